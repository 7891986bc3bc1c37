//! [`SavedBuffers`] and [`ScratchBuffers`]: the buffers for values that a decoder saves between its
//! forward and backward pass, and for temporary values.
use super::decoder_config::{DecoderConfig, NormKind, QkNormExtent};
use crate::model::{
    activation_buffers::{BufferSpec, declare_buffer_set},
    lora::LoraScratchBuffers,
};

declare_buffer_set! {
    /// The values that the forward pass of a decoder layer saves for its backward pass. `qkv` is
    /// the width of q, k and v together. Buffers of absent norms are empty. The statistics of a row
    /// are 1/rms for RMSNorm, and mean and 1/σ for LayerNorm.
    pub(super) struct SavedBuffers {
        /// The statistics of the layer's input, `[rows, statistics]`.
        attention_in_stats,
        /// q and k after the rotation, and v, `[rows, qkv]`.
        qkv,
        /// The attention output, `[rows, heads·head_dim]`.
        attention,
        /// Log-sum-exp of attention scores, `[b, heads, t]`.
        lse,
        /// The residual stream after attention, `[rows, hidden]`.
        residual,
        /// The statistics of `residual`, `[rows, statistics]`.
        mlp_in_stats,
        /// Gate and up, `[rows, 2·intermediate]`, or the input of GELU, `[rows, intermediate]`.
        gate_up,
        /// q and k before their norms, `[rows, (heads + kv_heads)·head_dim]`.
        raw_qk,
        /// 1/rms of each normalized part of `raw_qk`, those of q before those of k.
        qk_rstd,
        /// The projected attention output before its norm, `[rows, hidden]`.
        attention_out,
        /// The statistics of `attention_out`, `[rows, statistics]`.
        attention_out_stats,
        /// The MLP output before its norm, `[rows, hidden]`.
        mlp_out,
        /// The statistics of `mlp_out`, `[rows, statistics]`.
        mlp_out_stats,
    }
}

declare_buffer_set! {
    /// The buffers for temporary values (scratch) that all blocks of a decoder share: embedding,
    /// layers and head.
    pub(super) struct ScratchBuffers {
        /// Normalized rows, `[rows, hidden]`.
        norm,
        /// The gradient of `norm`.
        dnorm,
        /// The output of the MLP's activation, `[rows, intermediate]`.
        act,
        /// The gradient of `gate_up`.
        dgate_up,
        /// The gradient of the attention output.
        dattention,
        /// The gradients of q, k and v.
        dqkv,
        /// The factors by which the norm that is being computed multiplies normalized elements. The
        /// buffer is long enough for the widest norm.
        norm_factors,
        /// The router's logits, `[rows, experts]`.
        router_logits,
        /// The statistics of the head's input, `[rows, statistics]`.
        head_stats,
    }
    /// The scratch buffers of adapters.
    with lora: LoraScratchBuffers
}

impl SavedBuffers<BufferSpec> {
    /// Declares the buffers for the values that the forward pass of a layer saves, for
    /// micro-batches of `b` sequences of `t` tokens.
    pub(super) fn declare(config: &DecoderConfig, b: usize, t: usize) -> Self {
        let (m, sizes, norms) = (b * t, config.sizes, config.norms);
        let rows_of = |norm: Option<&str>| if norm.is_some() { m } else { 0 };
        let (attention_out_rows, mlp_out_rows) = (rows_of(norms.attention_out), rows_of(norms.mlp_out));
        let stats = |rows: usize| BufferSpec::in_f32(rows * config.norm_stats_per_row());
        let heads = sizes.heads + sizes.kv_heads;
        let (raw_qk_width, qk_parts) = match config.qk_norm {
            None => (0, 0),
            Some(QkNormExtent::PerHead) => (heads * sizes.head_dim, heads),
            Some(QkNormExtent::AllHeads) => (heads * sizes.head_dim, 2),
        };
        SavedBuffers {
            attention_in_stats: stats(rows_of(norms.attention_in)),
            qkv: BufferSpec::in_compute_dtype(m * sizes.qkv_width()),
            attention: BufferSpec::in_compute_dtype(m * sizes.attention_width()),
            lse: BufferSpec::in_f32(b * sizes.heads * t),
            residual: BufferSpec::in_compute_dtype(m * sizes.hidden),
            mlp_in_stats: stats(rows_of(norms.mlp_in)),
            gate_up: BufferSpec::in_compute_dtype(m * config.gate_up_width()),
            raw_qk: BufferSpec::in_compute_dtype(m * raw_qk_width),
            qk_rstd: BufferSpec::in_f32(m * qk_parts),
            attention_out: BufferSpec::in_compute_dtype(attention_out_rows * sizes.hidden),
            attention_out_stats: stats(attention_out_rows),
            mlp_out: BufferSpec::in_compute_dtype(mlp_out_rows * sizes.hidden),
            mlp_out_stats: stats(mlp_out_rows),
        }
    }
}

impl ScratchBuffers<BufferSpec> {
    /// Declares the buffers for a decoder's temporary values, including those of LoRA adapters, for
    /// micro-batches of `m` rows (tokens).
    pub(super) fn declare(config: &DecoderConfig, m: usize, lora: LoraScratchBuffers<BufferSpec>) -> Self {
        let sizes = config.sizes;
        let qk_norm_width = match config.qk_norm {
            Some(QkNormExtent::AllHeads) => sizes.attention_width(),
            Some(QkNormExtent::PerHead) | None => sizes.head_dim,
        };
        let factors =
            if config.norm_kind == NormKind::RmsAddOne { sizes.hidden.max(qk_norm_width) } else { 0 };
        let experts = config.moe.as_ref().map_or(0, |moe| moe.shape.experts);
        ScratchBuffers {
            norm: BufferSpec::in_compute_dtype(m * sizes.hidden),
            dnorm: BufferSpec::in_compute_dtype(m * sizes.hidden),
            act: BufferSpec::in_compute_dtype(m * config.dense_mlp_width()),
            dgate_up: BufferSpec::in_compute_dtype(m * config.gate_up_width()),
            dattention: BufferSpec::in_compute_dtype(m * sizes.attention_width()),
            dqkv: BufferSpec::in_compute_dtype(m * sizes.qkv_width()),
            norm_factors: BufferSpec::in_f32(factors),
            router_logits: BufferSpec::in_f32(m * experts),
            head_stats: BufferSpec::in_f32(m * config.norm_stats_per_row()),
            lora,
        }
    }
}
