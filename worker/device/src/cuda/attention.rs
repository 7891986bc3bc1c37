//! Attention on a GPU, computed by cuDNN or by the built-in CUDA kernels. A block of a built-in
//! kernel owns a tile of queries or keys. The built-in kernels use tensor cores if all tensors are
//! bf16 and heads have at most 128 elements, and otherwise compute in f32.
use super::backend::{Cuda, LaunchSize};
use super::compile::{ATTENTION_SOURCE, FLASH_HOPPER_SOURCE, FLASH_SOURCE};
use super::cudnn::{AttentionOperands, AttentionPass};
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::{AttentionOps, AttentionShape, expect_lens};
use std::ffi::CStr;

/// Number of queries or keys that one thread block processes at a time in the kernels of
/// attention.cu, which compute attention in f32 arithmetic. This is `TILE` of attention.cu.
const TILE_ROWS: usize = 32;
/// Number of threads per block of the kernels of attention.cu, which compute attention in f32
/// arithmetic.
const THREADS_PER_BLOCK: u32 = 128;
/// Maximum head dimension of the kernels of attention.cu, which compute attention in f32
/// arithmetic. This is `MAX_HEAD_DIM` of attention.cu.
const MAX_HEAD_DIM: usize = 256;

/// Number of queries or keys that one thread block processes in the kernels of flash.cu, which
/// compute attention on tensor cores. This is `BLOCK_ROWS` of flash.cu.
const FLASH_TILE_ROWS: usize = 128;
/// Maximum size in bytes of the shared memory that a thread block of flash.cu's kernels needs for
/// data other than rows of queries, keys, values or gradients. The bytes contain the statistics of
/// two steps of 64 such rows, and `BlockState`.
const FLASH_EXTRA_SHARED_BYTES: usize = 2 * 3 * 64 * 4 + 128;

/// The compute capability of Hopper GPUs, whose kernels are in flash_hopper.cu.
const HOPPER_CAPABILITY: (u32, u32) = (9, 0);

/// Kernel argument with the shape, scale and dropout of an attention op. The layout is that of
/// `Attention` in attention.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionArg {
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
    fn new(s: AttentionShape) -> Self {
        let (first_sample, key, threshold, keep) = s
            .dropout
            .map_or((0, [0; 2], 0, 0.0), |d| (d.first_sequence, d.key, d.drop_threshold(), d.keep_scale()));
        let AttentionShape { t, heads, kv_heads, head_dim: dim, scale, .. } = s;
        let cap = s.softcap.unwrap_or(0.0);
        AttentionArg { t, heads, kv_heads, dim, scale, cap, first_sample, key, threshold, keep }
    }
}

/// Computes the grid and the shared memory for a kernel of attention.cu, with one thread block for
/// each combination of row tile, head and sequence. Shared memory holds `row_tiles` tiles of rows
/// and `score_tiles` tiles of scores. Panics if the GPU has too little shared memory.
fn compute_tiled_launch_size(
    cuda: &Cuda,
    s: AttentionShape,
    heads: usize,
    row_tiles: usize,
    score_tiles: usize,
) -> LaunchSize {
    let AttentionShape { b, t, head_dim, .. } = s;
    let floats = row_tiles * TILE_ROWS * (head_dim + 1) + score_tiles * TILE_ROWS * (TILE_ROWS + 1);
    let shared = floats * size_of::<f32>();
    let available = cuda.properties().shared_memory_per_block;
    assert!(
        head_dim <= MAX_HEAD_DIM,
        "attention: heads of {head_dim} elements exceed the GPU's maximum of {MAX_HEAD_DIM}"
    );
    assert!(
        shared <= available,
        "attention: heads of {head_dim} elements need {shared} bytes of shared memory, but this GPU has {available}"
    );
    let grid = [t.div_ceil(TILE_ROWS) as u32, heads as u32, b as u32];
    LaunchSize::Config(LaunchConfig { grid, block: [THREADS_PER_BLOCK, 1, 1], shared })
}

/// Kernel argument with the order in which thread blocks of an attention kernel process heads and
/// tiles, chosen for hits in the L2 cache. The layout is that of `BlockOrder` in blocks.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct BlockOrder {
    /// Number of tiles of each head.
    tiles: usize,
    /// Number of heads of each sequence.
    heads: usize,
    /// Number of heads of all sequences together.
    total_heads: usize,
    /// Number of heads whose blocks are scheduled together.
    heads_together: usize,
}

// SAFETY: struct BlockOrder of blocks.cuh.
unsafe impl KernelArg for BlockOrder {}

/// The compiled variants of one attention kernel in flash.cu (for tensor cores), by head dimension
/// and options, with their launch parameters. The first index is 0 for heads of at most 64 elements
/// and 1 for heads of at most 128. The second index is 1 for attention with a softcap or dropout.
struct FlashKernel {
    names: [[&'static CStr; 2]; 2],
    /// Number of warps per block of each variant.
    warps: [[u32; 2]; 2],
    /// Number of rows of queries, keys, values or gradients in a block's shared memory, for each
    /// variant. These are the rows of two steps of the block's loop and, unless they are in
    /// registers, the rows that the block owns.
    rows: [[usize; 2]; 2],
    /// True if each block computes results for some keys and iterates over queries, false for the
    /// reverse.
    is_by_keys: bool,
}

/// The variants of the forward kernel of flash.cu, which computes attention on tensor cores.
const FLASH_FORWARD: FlashKernel = FlashKernel {
    names: [[c"flash_forward_64", c"flash_forward_64_any"], [c"flash_forward_128", c"flash_forward_128_any"]],
    warps: [[4, 4], [4, 8]],
    rows: [[256, 256], [256, 256]],
    is_by_keys: false,
};
/// The variants of the kernel of flash.cu (attention on tensor cores) that computes the gradients
/// of queries. Each of its blocks processes some queries.
const FLASH_BACKWARD_Q: FlashKernel = FlashKernel {
    names: [
        [c"flash_backward_q_64", c"flash_backward_q_64_any"],
        [c"flash_backward_q_128", c"flash_backward_q_128_any"],
    ],
    warps: [[4, 4], [8, 8]],
    rows: [[256, 256], [256, 256]],
    is_by_keys: false,
};
/// The variants of the kernel of flash.cu (attention on tensor cores) that computes the gradients
/// of keys and values. Each of its blocks processes some keys.
const FLASH_BACKWARD_KV: FlashKernel = FlashKernel {
    names: [
        [c"flash_backward_kv_64", c"flash_backward_kv_64_any"],
        [c"flash_backward_kv_128", c"flash_backward_kv_128_any"],
    ],
    warps: [[4, 8], [8, 8]],
    rows: [[384, 256], [256, 256]],
    is_by_keys: true,
};

impl FlashKernel {
    /// Enqueues the variant of this kernel of flash.cu (attention on tensor cores) that fits the
    /// attention shape `s`. The kernel receives `arguments`, then the shape and the order of the
    /// blocks.
    fn launch(&self, cuda: &Cuda, s: AttentionShape, arguments: &[&dyn KernelArg]) {
        let dim_index = usize::from(s.head_dim > 64);
        let variant = usize::from(s.softcap.is_some() || s.dropout.is_some());
        let width = (s.heads + 2 * s.kv_heads) * s.head_dim;
        assert!(s.t <= 1 << 30 && width <= 1 << 30, "attention: {s:?} exceeds the kernel's index range");
        let order = self.compute_block_order(s, cuda.properties().l2_cache_bytes);
        let blocks =
            u32::try_from(order.tiles * order.total_heads).ok().filter(|blocks| *blocks <= i32::MAX as u32);
        let grid = [blocks.unwrap_or_else(|| panic!("attention: {s:?} exceeds the grid")), 1, 1];
        let row_bytes = ([64, 128][dim_index] + 8) * size_of::<u16>();
        let shared = self.rows[dim_index][variant] * row_bytes + FLASH_EXTRA_SHARED_BYTES;
        let config = LaunchConfig { grid, block: [32 * self.warps[dim_index][variant], 1, 1], shared };
        let shape = AttentionArg::new(s);
        let arguments: Vec<&dyn KernelArg> =
            arguments.iter().copied().chain([&shape as &dyn KernelArg, &order]).collect();
        cuda.launch(FLASH_SOURCE, self.names[dim_index][variant], LaunchSize::Config(config), &arguments);
    }

    /// Chooses the order in which this kernel's thread blocks process heads and tiles, so that
    /// blocks that run together share data in the L2 cache.
    fn compute_block_order(&self, s: AttentionShape, l2_cache_bytes: usize) -> BlockOrder {
        BlockOrder::new(s, FLASH_TILE_ROWS, self.is_by_keys, l2_cache_bytes)
    }
}

impl BlockOrder {
    /// Chooses the order in which thread blocks process heads and tiles of `tile_rows` rows, so
    /// that blocks that run together share data in the L2 cache. All blocks of a head read the same
    /// rows, so heads are scheduled in groups whose rows fit into half of the L2 cache.
    fn new(s: AttentionShape, tile_rows: usize, is_by_keys: bool, l2_cache_bytes: usize) -> BlockOrder {
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

/// An attention kernel of flash_hopper.cu (for Hopper's tensor cores) in two variants, for heads of
/// 64 and of 128 elements. Element 0 of each array is for heads of 64 elements.
struct HopperKernel {
    names: [&'static CStr; 2],
    /// Number of warpgroups per block that own rows. Each owns 64 rows, and another one copies.
    warpgroups: [usize; 2],
    /// Number of rows of a tile of the ring in shared memory, and the number of tiles.
    ring: [(usize, usize); 2],
    /// Number of tensors whose rows a block owns.
    owned_tensors: usize,
    /// True if each block computes results for some keys and iterates over queries, false for the
    /// reverse.
    is_by_keys: bool,
}

/// The two variants of the forward kernel of flash_hopper.cu, which computes attention on the
/// tensor cores of Hopper GPUs.
const HOPPER_FORWARD: HopperKernel = HopperKernel {
    names: [c"hopper_forward_64", c"hopper_forward_128"],
    warpgroups: [2, 2],
    ring: [(128, 6), (128, 4)],
    owned_tensors: 1,
    is_by_keys: false,
};
/// The two variants of the kernel of flash_hopper.cu (attention on Hopper GPUs) that computes the
/// gradients of queries.
const HOPPER_BACKWARD_Q: HopperKernel = HopperKernel {
    names: [c"hopper_backward_q_64", c"hopper_backward_q_128"],
    warpgroups: [2, 2],
    ring: [(128, 6), (64, 6)],
    owned_tensors: 2,
    is_by_keys: false,
};
/// The two variants of the kernel of flash_hopper.cu (attention on Hopper GPUs) that computes the
/// gradients of keys and values.
const HOPPER_BACKWARD_KV: HopperKernel = HopperKernel {
    names: [c"hopper_backward_kv_64", c"hopper_backward_kv_128"],
    warpgroups: [3, 2],
    ring: [(64, 6), (64, 6)],
    owned_tensors: 2,
    is_by_keys: true,
};

impl HopperKernel {
    /// Returns the number of threads and the bytes of shared memory of each thread block of this
    /// kernel, for heads of `head_dim` elements. Shared memory contains the rows that the block
    /// owns and the ring, each with statistics and first keys, barriers, and the bytes that align
    /// the tiles.
    fn compute_block_resources(&self, head_dim: usize) -> (u32, usize) {
        let index = usize::from(head_dim > 64);
        let (rows, (tile_rows, tiles)) = (64 * self.warpgroups[index], self.ring[index]);
        let row_bytes = head_dim * size_of::<u16>();
        let statistics = if self.is_by_keys { tiles / 2 * tile_rows } else { rows } * 3 * size_of::<f32>();
        let barriers = (2 * tiles + 1) * size_of::<u64>();
        let tile_bytes = (self.owned_tensors * rows + tiles * tile_rows) * row_bytes;
        (128 * (self.warpgroups[index] as u32 + 1), tile_bytes + statistics + barriers + 32 + 1024)
    }

    /// Enqueues the variant of this kernel of flash_hopper.cu (attention on Hopper GPUs) that fits
    /// the attention shape `s`. The kernel receives `arguments`, then the shape and the order of
    /// the blocks.
    fn launch(&self, cuda: &Cuda, s: AttentionShape, arguments: &[&dyn KernelArg]) {
        let index = usize::from(s.head_dim > 64);
        let width = (s.heads + 2 * s.kv_heads) * s.head_dim;
        assert!(s.t <= 1 << 30 && width <= 1 << 30, "attention: {s:?} exceeds the kernel's index range");
        let properties = cuda.properties();
        let order =
            BlockOrder::new(s, 64 * self.warpgroups[index], self.is_by_keys, properties.l2_cache_bytes);
        let tiles = order.tiles * order.total_heads;
        assert!(tiles <= i32::MAX as usize, "attention: {s:?} exceeds the grid");
        let (threads, shared) = self.compute_block_resources(s.head_dim);
        let config = LaunchConfig { grid: [tiles as u32, 1, 1], block: [threads, 1, 1], shared };
        let shape = AttentionArg::new(s);
        let arguments: Vec<&dyn KernelArg> =
            arguments.iter().copied().chain([&shape as &dyn KernelArg, &order]).collect();
        cuda.launch(FLASH_HOPPER_SOURCE, self.names[index], LaunchSize::Config(config), &arguments);
    }
}

/// Returns true if the kernels of flash_hopper.cu (attention on the tensor cores of Hopper GPUs)
/// are used for the shape `s` on this GPU. `tensors` are all tensors of bf16 elements.
fn uses_hopper_kernels(cuda: &Cuda, s: AttentionShape, tensors: &[&TensorArg]) -> bool {
    let is_plain = s.softcap.is_none() && s.dropout.is_none();
    let is_aligned = tensors.iter().all(|tensor| tensor.at.is_multiple_of(16));
    cuda.properties().capability == HOPPER_CAPABILITY
        && matches!(s.head_dim, 64 | 128)
        && is_plain
        && is_aligned
}

/// Returns true if the built-in kernels compute attention of the shape `s` on tensor cores, for
/// tensors with the element types `dtypes`.
fn uses_tensor_cores(dtypes: &[Dtype], s: AttentionShape) -> bool {
    s.head_dim <= 128 && dtypes.iter().all(|dtype| *dtype == Dtype::Bf16)
}

/// Panics if an argument of an attention op does not fit the shape `s`, or if the shape is too
/// large for a grid of blocks.
fn check_arguments(op: &str, o: usize, lse: usize, qkv: usize, starts: &[u32], s: AttentionShape) {
    s.check_arguments(op, o, lse, qkv, starts);
    let AttentionShape { b, heads, .. } = s;
    assert!(heads <= 65_535 && b <= 65_535, "{op}: {heads} heads of {b} sequences exceed the grid");
}

impl AttentionOps for Cuda {
    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], s: AttentionShape) {
        check_arguments("attention_forward", o.len(), lse.len(), qkv.len(), starts, s);
        let dtypes = [o.dtype(), qkv.dtype()];
        let (o, lse, qkv) = (TensorArg::from(&o), f32_gpu_address(lse.as_view()), TensorArg::from(qkv));
        let run_built_in = || {
            let starts = self.upload_input("starts", starts);
            if uses_tensor_cores(&dtypes, s) && uses_hopper_kernels(self, s, &[&o, &qkv]) {
                return HOPPER_FORWARD.launch(self, s, &[&o, &lse, &qkv, &starts]);
            }
            if uses_tensor_cores(&dtypes, s) {
                return FLASH_FORWARD.launch(self, s, &[&o, &lse, &qkv, &starts]);
            }
            let work = compute_tiled_launch_size(self, s, s.heads, 3, 1);
            let shape = AttentionArg::new(s);
            self.launch(ATTENTION_SOURCE, c"attention_forward", work, &[&o, &lse, &qkv, &starts, &shape]);
        };
        let operands = AttentionOperands { qkv: qkv.at, o: o.at, lse, ..AttentionOperands::default() };
        let is_bf16 = dtypes == [Dtype::Bf16; 2];
        if !try_run_on_cudnn(self, is_bf16, s, starts, &operands, false, &run_built_in) {
            run_built_in();
        }
    }

    fn attention_backward(
        &self,
        dqkv: ViewMut,
        d_o: View,
        o: View,
        lse: View,
        qkv: View,
        starts: &[u32],
        s: AttentionShape,
    ) {
        let op = "attention_backward";
        check_arguments(op, o.len(), lse.len(), qkv.len(), starts, s);
        expect_lens(op, [("dqkv", dqkv.len(), qkv.len()), ("d_o", d_o.len(), o.len())]);
        let dtypes = [dqkv.dtype(), qkv.dtype(), d_o.dtype()];
        let is_bf16 = dtypes == [Dtype::Bf16; 3] && o.dtype() == Dtype::Bf16;
        let dots_bytes = lse.len() * size_of::<f32>();
        let (dqkv, lse, shape) = (TensorArg::from(&dqkv), f32_gpu_address(lse), AttentionArg::new(s));
        let [d_o, o, qkv] = [d_o, o, qkv].map(TensorArg::from);
        let run_built_in = || {
            let dots = self.alloc_scratch(dots_bytes);
            let (dots, starts) = (dots.address(), self.upload_input("starts", starts));
            let grid = [s.t.div_ceil(TILE_ROWS) as u32, s.heads as u32, s.b as u32];
            let config = LaunchConfig { grid, block: [8 * TILE_ROWS as u32, 1, 1], shared: 0 };
            self.launch(
                ATTENTION_SOURCE,
                c"attention_delta",
                LaunchSize::Config(config),
                &[&dots, &d_o, &o, &shape],
            );
            if uses_tensor_cores(&dtypes, s) {
                let arguments: [&dyn KernelArg; 6] = [&dqkv, &d_o, &qkv, &lse, &dots, &starts];
                if uses_hopper_kernels(self, s, &[&dqkv, &d_o, &qkv]) {
                    HOPPER_BACKWARD_Q.launch(self, s, &arguments);
                    return HOPPER_BACKWARD_KV.launch(self, s, &arguments);
                }
                FLASH_BACKWARD_Q.launch(self, s, &arguments);
                return FLASH_BACKWARD_KV.launch(self, s, &arguments);
            }
            let arguments: [&dyn KernelArg; 7] = [&dqkv, &d_o, &qkv, &lse, &dots, &starts, &shape];
            let by_queries = compute_tiled_launch_size(self, s, s.heads, 4, 1);
            self.launch(ATTENTION_SOURCE, c"attention_backward_q", by_queries, &arguments);
            let by_keys = compute_tiled_launch_size(self, s, s.kv_heads, 4, 2);
            self.launch(ATTENTION_SOURCE, c"attention_backward_kv", by_keys, &arguments);
        };
        let operands = AttentionOperands { qkv: qkv.at, o: o.at, lse, d_o: d_o.at, dqkv: dqkv.at };
        if !try_run_on_cudnn(self, is_bf16, s, starts, &operands, true, &run_built_in) {
            run_built_in();
        }
    }
}

/// Enqueues the forward or backward pass of attention on cuDNN, and returns false if the caller
/// must use the built-in kernels instead. Returns false if cuDNN is not used or was not selected
/// for this shape. The caller must then launch the built-in kernels, also if this call ran them
/// with `run_built_in` to time them.
fn try_run_on_cudnn(
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
    let enqueue = || cudnn.try_enqueue((&cuda.gpu, &cuda.profile), pass, operands, run_built_in);
    cuda.gpu.call_and_record_failure(enqueue).unwrap_or(true) // after a failure no kernel is launched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_whose_rows_fit_into_the_cache_are_scheduled_together() {
        let s = AttentionShape::new(2, 1000, 16, 4, 128);
        let order = |kernel: &FlashKernel, cache| {
            let order = kernel.compute_block_order(s, cache);
            (order.tiles, order.heads, order.total_heads, order.heads_together)
        };
        // Keys and values of 4 query heads take 512 000 bytes; queries and gradients of one key
        // head take four times as many.
        assert_eq!(order(&FLASH_FORWARD, 1_024_000), (8, 16, 32, 4));
        assert_eq!(order(&FLASH_FORWARD, 3_000_000), (8, 16, 32, 8));
        assert_eq!(order(&FLASH_FORWARD, 0), (8, 16, 32, 4));
        assert_eq!(order(&FLASH_FORWARD, 1 << 30), (8, 16, 32, 32));
        assert_eq!(order(&FLASH_BACKWARD_KV, 5_000_000), (8, 4, 8, 1));
        assert_eq!(order(&FLASH_BACKWARD_KV, 9_000_000), (8, 4, 8, 2));
    }
}
