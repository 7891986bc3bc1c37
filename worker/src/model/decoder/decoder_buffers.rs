//! The buffer sets of a decoder: [`SavedBuffers`] and [`ScratchBuffers`].
use super::decoder_config::{DecoderConfig, QkNorm};
use crate::model::{
    activation_buffers::{BufferSpec, declare_buffer_set},
    lora::LoraScratchBuffers,
};

declare_buffer_set! {
    /// The values that the forward pass of a layer saves for its backward pass. `qkv` is the width
    /// of q, k and v together. Buffers of absent norms are empty.
    pub(super) struct SavedBuffers {
        /// 1/rms of the layer's input, `[rows]`.
        attention_in_rstd,
        /// q and k after rotation, and v, `[rows, qkv]`.
        qkv,
        /// The attention output, `[rows, heads·head_dim]`.
        attention,
        /// Log-sum-exp of attention scores, `[b, heads, t]`.
        lse,
        /// The residual stream after attention, `[rows, hidden]`.
        residual,
        /// 1/rms of `residual`, `[rows]`.
        mlp_in_rstd,
        /// Gate and up, `[rows, 2·intermediate]`.
        gate_up,
        /// q and k before their norms, `[rows, (heads + kv_heads)·head_dim]`.
        raw_qk,
        /// 1/rms of each normalized part of `raw_qk`, those of q before those of k.
        qk_rstd,
        /// The projected attention output before its norm, `[rows, hidden]`.
        attention_out,
        /// 1/rms of `attention_out`, `[rows]`.
        attention_out_rstd,
        /// The MLP output before its norm, `[rows, hidden]`.
        mlp_out,
        /// 1/rms of `mlp_out`, `[rows]`.
        mlp_out_rstd,
    }
}

declare_buffer_set! {
    /// The scratch buffers that all blocks share.
    pub(super) struct ScratchBuffers {
        /// Normalized rows, `[rows, hidden]`.
        norm,
        /// The gradient of `norm`.
        dnorm,
        /// The output of the MLP's gate, `[rows, intermediate]`.
        act,
        /// The gradients of gate and up, `[rows, 2·intermediate]`.
        dgate_up,
        /// The gradient of the attention output.
        dattention,
        /// The gradients of q, k and v.
        dqkv,
        /// The factors of a norm, at most as many as the widest norm has weights.
        norm_factors,
        /// The router's logits, `[rows, experts]`.
        router_logits,
        /// 1/rms of the head's input, `[rows]`.
        head_rstd,
    }
    /// The scratch buffers of adapters.
    with lora: LoraScratchBuffers
}

impl SavedBuffers<BufferSpec> {
    /// Declares the buffers for micro-batches of `b` sequences of `t` tokens.
    pub(super) fn declare(config: &DecoderConfig, b: usize, t: usize) -> Self {
        let (m, sizes, norms) = (b * t, config.sizes, config.norms);
        let rows_of = |norm: Option<&str>| if norm.is_some() { m } else { 0 };
        let (attention_out_rows, mlp_out_rows) = (rows_of(norms.attention_out), rows_of(norms.mlp_out));
        let heads = sizes.heads + sizes.kv_heads;
        let (raw_qk_width, qk_parts) = match config.qk_norm {
            None => (0, 0),
            Some(QkNorm::PerHead) => (heads * sizes.head_dim, heads),
            Some(QkNorm::AllHeads) => (heads * sizes.head_dim, 2),
        };
        SavedBuffers {
            attention_in_rstd: BufferSpec::f32(rows_of(norms.attention_in)),
            qkv: BufferSpec::compute(m * sizes.qkv_width()),
            attention: BufferSpec::compute(m * sizes.attention_width()),
            lse: BufferSpec::f32(b * sizes.heads * t),
            residual: BufferSpec::compute(m * sizes.hidden),
            mlp_in_rstd: BufferSpec::f32(rows_of(norms.mlp_in)),
            gate_up: BufferSpec::compute(m * 2 * config.dense_mlp_width()),
            raw_qk: BufferSpec::compute(m * raw_qk_width),
            qk_rstd: BufferSpec::f32(m * qk_parts),
            attention_out: BufferSpec::compute(attention_out_rows * sizes.hidden),
            attention_out_rstd: BufferSpec::f32(attention_out_rows),
            mlp_out: BufferSpec::compute(mlp_out_rows * sizes.hidden),
            mlp_out_rstd: BufferSpec::f32(mlp_out_rows),
        }
    }
}

impl ScratchBuffers<BufferSpec> {
    /// Declares the buffers for micro-batches of `m` rows, with these scratch buffers of adapters.
    pub(super) fn declare(config: &DecoderConfig, m: usize, lora: LoraScratchBuffers<BufferSpec>) -> Self {
        let (sizes, f) = (config.sizes, config.dense_mlp_width());
        let qk_norm_width = match config.qk_norm {
            Some(QkNorm::AllHeads) => sizes.attention_width(),
            Some(QkNorm::PerHead) | None => sizes.head_dim,
        };
        let factors = if config.norms_add_one { sizes.hidden.max(qk_norm_width) } else { 0 };
        let experts = config.moe.as_ref().map_or(0, |moe| moe.shape.experts);
        ScratchBuffers {
            norm: BufferSpec::compute(m * sizes.hidden),
            dnorm: BufferSpec::compute(m * sizes.hidden),
            act: BufferSpec::compute(m * f),
            dgate_up: BufferSpec::compute(m * 2 * f),
            dattention: BufferSpec::compute(m * sizes.attention_width()),
            dqkv: BufferSpec::compute(m * sizes.qkv_width()),
            norm_factors: BufferSpec::f32(factors),
            router_logits: BufferSpec::f32(m * experts),
            head_rstd: BufferSpec::f32(m),
            lora,
        }
    }
}
