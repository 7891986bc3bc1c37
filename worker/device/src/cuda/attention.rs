//! Attention: each block owns a tile of queries or keys. If everything is bf16 and heads have at
//! most 128 elements it runs on tensor cores, otherwise in f32.
use super::compile::{ATTENTION, FLASH};
use super::cudnn::{AttentionOperands, AttentionPass};
use super::launch::{KernelArg, LaunchConfig};
use super::{Cuda, TensorArg, expect_len, f32_address, unwrap_or_panic};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::AttentionShape;
use std::ffi::CStr;

/// `TILE` of attention.cu: queries or keys of a block.
const TILE: usize = 32;
/// Threads of a block of attention.cu.
const THREADS: u32 = 128;
/// `MOST_DIM` of attention.cu: maximum head dimension.
const MAX_HEAD_DIM: usize = 256;

/// `BLOCK_ROWS` of flash.cu: queries or keys of a block.
const FLASH_TILE: usize = 128;
/// Maximum bytes of shared memory of a block of flash.cu in addition to rows: statistics of two
/// steps of 64 rows, and `Kept`.
const FLASH_EXTRA_SHARED: usize = 2 * 3 * 64 * 4 + 128;

/// Shape, scale and dropout of an attention; `Attention` of attention.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionArg {
    t: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
    scale: f32,
    /// The softcap, or 0.
    cap: f32,
    /// The number of the first sequence among all samples, which dropout is drawn by.
    first_sample: i64,
    key: [u32; 2],
    threshold: u32,
    keep: f32,
}

// SAFETY: struct Attention of attention.cuh.
unsafe impl KernelArg for AttentionArg {}

impl AttentionArg {
    fn new(s: AttentionShape) -> Self {
        let [t, heads, kv_heads, dim] = [s.t, s.heads, s.kv_heads, s.head_dim].map(|n| n as i64);
        let (first_sample, key, threshold, keep) = s
            .dropout
            .map_or((0, [0; 2], 0, 0.0), |d| (d.first_sequence as i64, d.key, d.threshold(), d.keep_scale()));
        let cap = s.softcap.unwrap_or(0.0);
        AttentionArg { t, heads, kv_heads, dim, scale: s.scale, cap, first_sample, key, threshold, keep }
    }
}

/// A launch of attention.cu with one block per tile, head and sequence. Shared memory holds
/// `row_tiles` tiles of rows and `score_tiles` tiles of scores.
fn tiled_launch(
    cuda: &Cuda,
    s: AttentionShape,
    heads: usize,
    row_tiles: usize,
    score_tiles: usize,
) -> LaunchConfig {
    let floats = row_tiles * TILE * (s.head_dim + 1) + score_tiles * TILE * (TILE + 1);
    let shared = floats * size_of::<f32>();
    let available = cuda.properties().shared_memory_per_block;
    assert!(
        s.head_dim <= MAX_HEAD_DIM,
        "attention: heads of {} elements exceed the GPU's maximum of {MAX_HEAD_DIM}",
        s.head_dim
    );
    assert!(
        shared <= available,
        "attention: heads of {} elements need {shared} bytes of shared memory, but this GPU has {available}",
        s.head_dim
    );
    LaunchConfig {
        grid: [s.t.div_ceil(TILE) as u32, heads as u32, s.b as u32],
        block: [THREADS, 1, 1],
        shared,
    }
}

/// The order of a kernel's blocks; `Order` of flash.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct BlockOrder {
    /// Tiles per head.
    tiles: i64,
    /// Heads per sequence.
    heads: i64,
    /// Heads of all sequences.
    total_heads: i64,
    /// Heads whose blocks are scheduled together.
    heads_together: i64,
}

// SAFETY: struct Order of flash.cu.
unsafe impl KernelArg for BlockOrder {}

/// A kernel of flash.cu in its variants. The first index is 0 for heads of at most 64 elements and
/// 1 for heads of at most 128. The second is 1 for attention with a softcap or dropout.
struct FlashKernel {
    names: [[&'static CStr; 2]; 2],
    /// Warps per block.
    warps: [[u32; 2]; 2],
    /// Rows in shared memory: two steps of the rows that a block iterates over, and the rows that
    /// the block owns unless they are in registers.
    rows: [[usize; 2]; 2],
    /// True if blocks own keys and iterate over queries.
    is_by_keys: bool,
}

const FORWARD: FlashKernel = FlashKernel {
    names: [[c"flash_forward_64", c"flash_forward_64_any"], [c"flash_forward_128", c"flash_forward_128_any"]],
    warps: [[4, 4], [4, 8]],
    rows: [[256, 256], [256, 256]],
    is_by_keys: false,
};
const BACKWARD_Q: FlashKernel = FlashKernel {
    names: [
        [c"flash_backward_q_64", c"flash_backward_q_64_any"],
        [c"flash_backward_q_128", c"flash_backward_q_128_any"],
    ],
    warps: [[4, 4], [8, 8]],
    rows: [[256, 256], [256, 256]],
    is_by_keys: false,
};
const BACKWARD_KV: FlashKernel = FlashKernel {
    names: [
        [c"flash_backward_kv_64", c"flash_backward_kv_64_any"],
        [c"flash_backward_kv_128", c"flash_backward_kv_128_any"],
    ],
    warps: [[4, 8], [8, 8]],
    rows: [[384, 256], [256, 256]],
    is_by_keys: true,
};

impl FlashKernel {
    fn launch(&self, cuda: &Cuda, s: AttentionShape, arguments: &[&dyn KernelArg]) {
        let dim_index = usize::from(s.head_dim > 64);
        let variant = usize::from(s.softcap.is_some() || s.dropout.is_some());
        let width = (s.heads + 2 * s.kv_heads) * s.head_dim;
        assert!(s.t <= 1 << 30 && width <= 1 << 30, "attention: {s:?} exceeds the kernel's index range");
        let order = self.block_order(s, cuda.properties().l2_cache_bytes);
        let blocks =
            u32::try_from(order.tiles * order.total_heads).ok().filter(|blocks| *blocks <= i32::MAX as u32);
        let grid = [blocks.unwrap_or_else(|| panic!("attention: {s:?} exceeds the grid")), 1, 1];
        let row_bytes = ([64, 128][dim_index] + 8) * size_of::<u16>();
        let shared = self.rows[dim_index][variant] * row_bytes + FLASH_EXTRA_SHARED;
        let config = LaunchConfig { grid, block: [32 * self.warps[dim_index][variant], 1, 1], shared };
        let shape = AttentionArg::new(s);
        let arguments: Vec<&dyn KernelArg> =
            arguments.iter().copied().chain([&shape as &dyn KernelArg, &order]).collect();
        cuda.launch(FLASH, self.names[dim_index][variant], config, &arguments);
    }

    /// The order of the blocks. Each block of a head reads the same rows again, so the rows of the
    /// heads that are scheduled together are to fit into half of the L2 cache.
    fn block_order(&self, s: AttentionShape, l2_cache_bytes: usize) -> BlockOrder {
        let tiles = s.t.div_ceil(FLASH_TILE);
        let group = s.heads / s.kv_heads;
        let (heads, heads_sharing_rows, rows_per_token) =
            if self.is_by_keys { (s.kv_heads, 1, group) } else { (s.heads, group, 1) };
        let total_heads = heads * s.b;
        let bytes_read = 2 * rows_per_token * s.t * s.head_dim * size_of::<u16>();
        let together = (l2_cache_bytes / 2 / bytes_read.max(1)).max(1) * heads_sharing_rows;
        let [tiles, heads, total_heads, heads_together] =
            [tiles, heads, total_heads, together.min(total_heads)].map(|n| n as i64);
        BlockOrder { tiles, heads, total_heads, heads_together }
    }
}

/// True if attention with tensors of these types runs on tensor cores.
fn uses_tensor_cores(dtypes: &[Dtype], s: AttentionShape) -> bool {
    s.head_dim <= 128 && dtypes.iter().all(|dtype| *dtype == Dtype::Bf16)
}

/// Panics if an argument does not fit the shape.
fn check(op: &str, o: usize, lse: usize, qkv: usize, starts: &[u32], s: AttentionShape) {
    assert!(
        s.kv_heads > 0 && s.heads.is_multiple_of(s.kv_heads),
        "{op}: {} heads are not a multiple of {} kv heads",
        s.heads,
        s.kv_heads
    );
    expect_len(op, "o", o, s.b * s.t * s.heads * s.head_dim);
    expect_len(op, "lse", lse, s.b * s.heads * s.t);
    expect_len(op, "qkv", qkv, s.b * s.t * (s.heads + 2 * s.kv_heads) * s.head_dim);
    expect_len(op, "starts", starts.len(), s.b * s.t);
    assert!(
        s.heads <= 65_535 && s.b <= 65_535,
        "{op}: {} heads of {} sequences exceed the grid",
        s.heads,
        s.b
    );
    if let Some(d) = &s.dropout {
        d.check(op, &s);
    }
}

pub(super) fn forward(cuda: &Cuda, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], s: AttentionShape) {
    check("attention_forward", o.len(), lse.len(), qkv.len(), starts, s);
    let lse = f32_address(lse.as_view());
    let is_flash = uses_tensor_cores(&[o.dtype(), qkv.dtype()], s);
    let is_bf16 = [o.dtype(), qkv.dtype()] == [Dtype::Bf16; 2];
    let (o, qkv) = (TensorArg::from(&o), TensorArg::from(qkv));
    let run_flash = || FORWARD.launch(cuda, s, &[&o, &lse, &qkv, &cuda.upload_input("starts", starts)]);
    let operands = AttentionOperands { qkv: qkv.at, o: o.at, lse, ..AttentionOperands::default() };
    if run_on_cudnn(cuda, is_bf16, s, starts, &operands, false, &run_flash) {
        return;
    }
    if is_flash {
        return run_flash();
    }
    let starts = cuda.upload_input("starts", starts);
    let arguments: [&dyn KernelArg; 5] = [&o, &lse, &qkv, &starts, &AttentionArg::new(s)];
    cuda.launch(ATTENTION, c"attention_forward", tiled_launch(cuda, s, s.heads, 3, 1), &arguments);
}

pub(super) fn backward(
    cuda: &Cuda,
    dqkv: ViewMut,
    d_o: View,
    o: View,
    lse: View,
    qkv: View,
    starts: &[u32],
    s: AttentionShape,
) {
    let op = "attention_backward";
    check(op, o.len(), lse.len(), qkv.len(), starts, s);
    expect_len(op, "dqkv", dqkv.len(), qkv.len());
    expect_len(op, "d_o", d_o.len(), o.len());
    let is_flash = uses_tensor_cores(&[dqkv.dtype(), qkv.dtype(), d_o.dtype()], s);
    let is_bf16 = [dqkv.dtype(), qkv.dtype(), d_o.dtype(), o.dtype()] == [Dtype::Bf16; 4];
    let dots_bytes = lse.len() * size_of::<f32>();
    let (dqkv, d_o, o, qkv, lse, shape) = (
        TensorArg::from(&dqkv),
        TensorArg::from(d_o),
        TensorArg::from(o),
        TensorArg::from(qkv),
        f32_address(lse),
        AttentionArg::new(s),
    );
    let grid = [s.t.div_ceil(TILE) as u32, s.heads as u32, s.b as u32];
    let dots_config = LaunchConfig { grid, block: [8 * TILE as u32, 1, 1], shared: 0 };
    let run_built_in = || {
        let dots = cuda.scratch(dots_bytes);
        let starts = cuda.upload_input("starts", starts);
        cuda.launch(ATTENTION, c"attention_dots", dots_config, &[&dots.at(), &d_o, &o, &shape]);
        if is_flash {
            let arguments: [&dyn KernelArg; 6] = [&dqkv, &d_o, &qkv, &lse, &dots.at(), &starts];
            BACKWARD_Q.launch(cuda, s, &arguments);
            return BACKWARD_KV.launch(cuda, s, &arguments);
        }
        let arguments: [&dyn KernelArg; 7] = [&dqkv, &d_o, &qkv, &lse, &dots.at(), &starts, &shape];
        let by_queries = tiled_launch(cuda, s, s.heads, 4, 1);
        cuda.launch(ATTENTION, c"attention_backward_q", by_queries, &arguments);
        let by_keys = tiled_launch(cuda, s, s.kv_heads, 4, 2);
        cuda.launch(ATTENTION, c"attention_backward_kv", by_keys, &arguments);
    };
    let operands = AttentionOperands { qkv: qkv.at, o: o.at, lse, d_o: d_o.at, dqkv: dqkv.at };
    if !run_on_cudnn(cuda, is_bf16, s, starts, &operands, true, &run_built_in) {
        run_built_in();
    }
}

/// Enqueues the pass on cuDNN. Returns false without cuDNN, or if cuDNN was not selected for this
/// shape; the caller then launches the built-in kernels.
fn run_on_cudnn(
    cuda: &Cuda,
    is_bf16: bool,
    shape: AttentionShape,
    starts: &[u32],
    operands: &AttentionOperands,
    is_backward: bool,
    run_built_in: &dyn Fn(),
) -> bool {
    let Some(cudnn) = cuda.cudnn.get().filter(|_| shape.b * shape.t > 0) else { return false };
    let pass = AttentionPass::new(shape, starts, operands, is_bf16, is_backward);
    unwrap_or_panic(cudnn.run(cuda, pass, operands, run_built_in))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_whose_rows_fit_into_the_cache_are_scheduled_together() {
        let s = AttentionShape::new(2, 1000, 16, 4, 128);
        let order = |kernel: &FlashKernel, cache| {
            let order = kernel.block_order(s, cache);
            (order.tiles, order.heads, order.total_heads, order.heads_together)
        };
        // Keys and values of 4 query heads take 512 000 bytes; queries and gradients of one key
        // head take four times as many.
        assert_eq!(order(&FORWARD, 1_024_000), (8, 16, 32, 4));
        assert_eq!(order(&FORWARD, 3_000_000), (8, 16, 32, 8));
        assert_eq!(order(&FORWARD, 0), (8, 16, 32, 4));
        assert_eq!(order(&FORWARD, 1 << 30), (8, 16, 32, 32));
        assert_eq!(order(&BACKWARD_KV, 5_000_000), (8, 4, 8, 1));
        assert_eq!(order(&BACKWARD_KV, 9_000_000), (8, 4, 8, 2));
    }
}
