//! The kernel arguments that all built-in attention kernels have: the shape of the attention
//! ([`AttentionArg`]) and the order of the thread blocks ([`BlockOrder`]).
use super::launch::KernelArg;
use crate::ops::AttentionShape;

/// Kernel argument with the shape, scale and dropout of an attention op. The layout is that of
/// `Attention` in attention.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AttentionArg {
    t: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    scale: f32,
    /// The softcap of the scores, or 0 for none.
    cap: f32,
    /// Number of the batch's first sequence among all samples, on which dropout's random words
    /// depend.
    first_sample: u64,
    key: [u32; 2],
    threshold: u32,
    /// Factor of the probabilities that dropout keeps; 0 without dropout.
    keep: f32,
}

// SAFETY: struct Attention of attention.cuh.
unsafe impl KernelArg for AttentionArg {}

impl AttentionArg {
    /// Creates the kernel argument for attention of the shape `s`.
    pub(super) fn new(s: AttentionShape) -> Self {
        let (first_sample, key, threshold, keep) = s
            .dropout
            .map_or((0, [0; 2], 0, 0.0), |d| (d.first_sequence, d.key, d.drop_threshold(), d.keep_scale()));
        let AttentionShape { t, heads, kv_heads, head_dim: dim, scale, .. } = s;
        let cap = s.softcap.unwrap_or(0.0);
        AttentionArg { t, heads, kv_heads, dim, scale, cap, first_sample, key, threshold, keep }
    }
}

/// Kernel argument with the order in which thread blocks of an attention kernel process heads and
/// tiles, chosen for hits in the L2 cache. The layout is that of `BlockOrder` in blocks.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct BlockOrder {
    /// Number of tiles of each head.
    pub(super) tiles: usize,
    /// Number of heads of each sequence.
    pub(super) heads: usize,
    /// Number of heads of all sequences together.
    pub(super) total_heads: usize,
    /// Number of heads whose blocks are scheduled together.
    pub(super) heads_together: usize,
}

// SAFETY: struct BlockOrder of blocks.cuh.
unsafe impl KernelArg for BlockOrder {}

impl BlockOrder {
    /// Chooses the order in which thread blocks process heads and tiles of `tile_rows` rows, so
    /// that blocks that run together share data in the L2 cache. All blocks of a head read the same
    /// rows, so heads are scheduled in groups whose rows fit into half of the L2 cache.
    pub(super) fn new(
        s: AttentionShape,
        tile_rows: usize,
        is_by_keys: bool,
        l2_cache_bytes: usize,
    ) -> BlockOrder {
        let tiles = s.t.div_ceil(tile_rows);
        let group = s.heads / s.kv_heads;
        let (heads, heads_sharing_rows, rows_per_token) =
            if is_by_keys { (s.kv_heads, 1, group) } else { (s.heads, group, 1) };
        let total_heads = heads * s.b;
        let bytes_read = 2 * rows_per_token * s.t * s.head_dim * size_of::<u16>();
        let together = (l2_cache_bytes / 2 / bytes_read.max(1)).max(1) * heads_sharing_rows;
        BlockOrder { tiles, heads, total_heads, heads_together: together.min(total_heads) }
    }
}
