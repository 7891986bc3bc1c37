//! The buffer sets of GPT-2: [`SavedBuffers`] and [`ScratchBuffers`].
use super::gpt2_config::Gpt2Config;
use crate::model::{
    activation_buffers::{BufferSpec, declare_buffer_set},
    lora::LoraScratchBuffers,
};

declare_buffer_set! {
    /// The values that the forward pass of a layer saves for its backward pass.
    pub(super) struct SavedBuffers {
        /// Mean and 1/σ of the layer's input, `[rows, 2]`.
        ln_1_stats,
        /// q, k and v, `[rows, 3·hidden]`.
        qkv,
        /// The attention output, `[rows, hidden]`.
        attention,
        /// Log-sum-exp of attention scores, `[b, heads, t]`.
        lse,
        /// The residual stream after attention, `[rows, hidden]`.
        residual,
        /// Mean and 1/σ of `residual`, `[rows, 2]`.
        ln_2_stats,
        /// The input of GELU, `[rows, intermediate]`.
        fc,
    }
}

declare_buffer_set! {
    /// The scratch buffers that all blocks share.
    pub(super) struct ScratchBuffers {
        /// Normalized rows, `[rows, hidden]`.
        norm,
        /// The gradient of `norm`.
        dnorm,
        /// The output of GELU, `[rows, intermediate]`.
        act,
        /// The gradient of the input of GELU.
        dfc,
        /// The gradient of the attention output.
        dattention,
        /// The gradients of q, k and v.
        dqkv,
        /// Mean and 1/σ of the head's input, `[rows, 2]`.
        head_stats,
    }
    /// The scratch buffers of adapters.
    with lora: LoraScratchBuffers
}

impl SavedBuffers<BufferSpec> {
    /// Declares the buffers for micro-batches of `b` sequences of `t` tokens.
    pub(super) fn declare(config: &Gpt2Config, b: usize, t: usize) -> Self {
        let (m, d) = (b * t, config.sizes.hidden);
        SavedBuffers {
            ln_1_stats: BufferSpec::f32(2 * m),
            qkv: BufferSpec::compute(m * 3 * d),
            attention: BufferSpec::compute(m * d),
            lse: BufferSpec::f32(b * config.sizes.heads * t),
            residual: BufferSpec::compute(m * d),
            ln_2_stats: BufferSpec::f32(2 * m),
            fc: BufferSpec::compute(m * config.intermediate_size),
        }
    }
}

impl ScratchBuffers<BufferSpec> {
    /// Declares the buffers for micro-batches of `m` rows, with these scratch buffers of adapters.
    pub(super) fn declare(config: &Gpt2Config, m: usize, lora: LoraScratchBuffers<BufferSpec>) -> Self {
        let (d, f) = (config.sizes.hidden, config.intermediate_size);
        ScratchBuffers {
            norm: BufferSpec::compute(m * d),
            dnorm: BufferSpec::compute(m * d),
            act: BufferSpec::compute(m * f),
            dfc: BufferSpec::compute(m * f),
            dattention: BufferSpec::compute(m * d),
            dqkv: BufferSpec::compute(m * 3 * d),
            head_stats: BufferSpec::f32(2 * m),
            lora,
        }
    }
}
