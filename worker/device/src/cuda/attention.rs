//! Attention on a GPU, computed by cuDNN or by the built-in CUDA kernels. A block of a built-in
//! kernel owns a tile of queries or keys. The built-in kernels use tensor cores if all tensors are
//! bf16 or all are f16, and otherwise compute in f32.
use super::attention_arguments::{AttentionArg, BlockOrder};
use super::backend::{Cuda, LaunchSize};
use super::compile::{ATTENTION_SOURCE, FLASH_HOPPER_SOURCE};
use super::cudnn::{AttentionOperands, AttentionPass};
use super::flash_kernels::{FLASH_BACKWARD_KV, FLASH_BACKWARD_Q, FLASH_FORWARD, launch_flash_kernels};
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
/// Maximum head dimension of all built-in attention kernels. This is `MAX_HEAD_DIM` of attention.cu
/// and the largest `D` of flash.cuh.
const MAX_HEAD_DIM: usize = 256;

/// The compute capability of Hopper GPUs, whose kernels are in flash_hopper.cu.
const HOPPER_CAPABILITY: (u32, u32) = (9, 0);

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
/// are used for the shape `s` on this GPU. `tensors` are all tensors of elements of the type
/// `dtype`.
fn uses_hopper_kernels(cuda: &Cuda, dtype: Dtype, s: AttentionShape, tensors: &[&TensorArg]) -> bool {
    let is_plain = s.softcap.is_none() && s.dropout.is_none();
    let is_aligned = tensors.iter().all(|tensor| tensor.at.is_multiple_of(16));
    cuda.properties().capability == HOPPER_CAPABILITY
        && dtype == Dtype::Bf16
        && matches!(s.head_dim, 64 | 128)
        && is_plain
        && is_aligned
}

/// Returns the common 16-bit element type of all tensors if the built-in kernels compute attention
/// of the shape `s` on tensor cores, for tensors with the element types `dtypes`. Returns `None` if
/// they compute in f32.
fn find_tensor_core_dtype(dtypes: &[Dtype], s: AttentionShape) -> Option<Dtype> {
    let dtype = *dtypes.first()?;
    let is_supported = dtype != Dtype::F32 && s.head_dim <= MAX_HEAD_DIM;
    (is_supported && dtypes.iter().all(|other| *other == dtype)).then_some(dtype)
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
            if let Some(dtype) = find_tensor_core_dtype(&dtypes, s) {
                let arguments: [&dyn KernelArg; 4] = [&o, &lse, &qkv, &starts];
                if uses_hopper_kernels(self, dtype, s, &[&o, &qkv]) {
                    return HOPPER_FORWARD.launch(self, s, &arguments);
                }
                return launch_flash_kernels(&FLASH_FORWARD, self, dtype, s, &arguments);
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
            if let Some(dtype) = find_tensor_core_dtype(&dtypes, s) {
                let arguments: [&dyn KernelArg; 6] = [&dqkv, &d_o, &qkv, &lse, &dots, &starts];
                if uses_hopper_kernels(self, dtype, s, &[&dqkv, &d_o, &qkv]) {
                    HOPPER_BACKWARD_Q.launch(self, s, &arguments);
                    return HOPPER_BACKWARD_KV.launch(self, s, &arguments);
                }
                launch_flash_kernels(&FLASH_BACKWARD_Q, self, dtype, s, &arguments);
                return launch_flash_kernels(&FLASH_BACKWARD_KV, self, dtype, s, &arguments);
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
    fn tensors_of_one_16_bit_type_are_multiplied_on_tensor_cores() {
        let find = |dtypes: &[Dtype], head_dim| {
            find_tensor_core_dtype(dtypes, AttentionShape::new(1, 8, 1, 1, head_dim))
        };
        assert_eq!(find(&[Dtype::Bf16; 3], 256), Some(Dtype::Bf16));
        assert_eq!(find(&[Dtype::F16; 2], 130), Some(Dtype::F16));
        assert_eq!(find(&[Dtype::F16; 2], 257), None);
        assert_eq!(find(&[Dtype::F32; 2], 64), None);
        assert_eq!(find(&[Dtype::F16, Dtype::Bf16], 64), None);
        assert_eq!(find(&[Dtype::Bf16, Dtype::F32], 64), None);
    }
}
