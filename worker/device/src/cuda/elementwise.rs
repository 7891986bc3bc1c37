//! Ops on vectors on a GPU: elementwise ops, dropout, stochastic rounding, and sums of squares by
//! block.
use super::backend::{Cuda, LaunchSize};
use super::compile::ELEMENTWISE_SOURCE;
use super::launch::{KernelArg, LaunchConfig};
use super::memory::DeviceMemory;
use super::tensor_arg::{TensorArg, f32_gpu_address};
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::ops::{
    NORM_BLOCK_LEN, PendingSumsOfSquares, SampleDropout, StochasticRounding, VectorOps, expect_lens,
};
use crate::storage::{Download, Event, Storage};
use std::ptr::NonNull;

impl VectorOps for Cuda {
    fn cast(&self, y: ViewMut, x: View) {
        expect_lens("cast", [("x", x.len(), y.len())]);
        convert_elements(self, TensorArg::from(&y), TensorArg::from(x), x.len());
    }

    fn round_stochastically(&self, y: ViewMut, x: View, rounding: &StochasticRounding) {
        rounding.check_output_and_range(&y);
        expect_lens("round_stochastically", [("x", x.len(), y.len())]);
        let StochasticRounding { key, first_element: first, step } = *rounding;
        let scalars = RoundingScalars { first, step, key };
        // A thread rounds a block of four elements of the whole tensor. The first and the last
        // block may be only partly within `x`.
        let blocks = match x.len() as u64 {
            0 => 0,
            len => ((first + len - 1) / 4 - first / 4 + 1) as usize,
        };
        let (y, len, x) = (TensorArg::from(&y), x.len(), f32_gpu_address(x));
        let work = LaunchSize::Elements(blocks);
        self.launch(ELEMENTWISE_SOURCE, c"round_stochastically", work, &[&y, &x, &len, &blocks, &scalars]);
    }

    fn add(&self, y: ViewMut, x: View) {
        expect_lens("add", [("x", x.len(), y.len())]);
        let (y, len, x) = (TensorArg::from(&y), x.len(), TensorArg::from(x));
        self.launch(ELEMENTWISE_SOURCE, c"add", LaunchSize::ElementsBy8(len), &[&y, &x, &len]);
    }

    fn scale(&self, y: ViewMut, s: f32) {
        let (y, len) = (TensorArg::from(&y), y.len());
        self.launch(ELEMENTWISE_SOURCE, c"scale", LaunchSize::ElementsBy8(len), &[&y, &len, &s]);
    }

    fn add_scalar(&self, y: ViewMut, s: f32) {
        let (y, len) = (TensorArg::from(&y), y.len());
        self.launch(ELEMENTWISE_SOURCE, c"add_scalar", LaunchSize::Elements(len), &[&y, &len, &s]);
    }

    fn axpby(&self, y: ViewMut, a: f32, x: View, b: f32) {
        expect_lens("axpby", [("x", x.len(), y.len())]);
        let (y, len, x) = (f32_gpu_address(y.as_view()), x.len(), f32_gpu_address(x));
        self.launch(ELEMENTWISE_SOURCE, c"axpby", LaunchSize::Elements(len), &[&y, &x, &len, &a, &b]);
    }

    fn softcap(&self, y: ViewMut, cap: f32) {
        let (y, len) = (f32_gpu_address(y.as_view()), y.len());
        self.launch(ELEMENTWISE_SOURCE, c"softcap", LaunchSize::Elements(len), &[&y, &len, &cap]);
    }

    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize) {
        let len = rows * columns;
        expect_lens("transpose", [("x", x.len(), len), ("y", y.len(), len)]);
        let (y, x) = (f32_gpu_address(y.as_view()), f32_gpu_address(x));
        self.launch(ELEMENTWISE_SOURCE, c"transpose", LaunchSize::Elements(len), &[&y, &x, &rows, &columns]);
    }

    fn dropout(&self, x: ViewMut, d: &SampleDropout) {
        let samples = x.len().checked_div(d.sample_len).unwrap_or(0);
        expect_lens("dropout", [("x", x.len(), samples * d.sample_len)]);
        let scalars = DropoutScalars {
            sample: d.sample_len,
            first: d.first_sample,
            threshold: d.drop_threshold(),
            key: d.key,
            keep_factor: d.keep_scale(),
            unused: 0.0,
        };
        let (x, blocks) = (TensorArg::from(&x), samples * d.sample_len.div_ceil(4));
        self.launch(ELEMENTWISE_SOURCE, c"dropout", LaunchSize::Elements(blocks), &[&x, &blocks, &scalars]);
    }

    fn sum_squares(&self, x: View) -> f64 {
        self.sum_squares_by_block_concat(&[x]).iter().sum()
    }

    fn sum_squares_by_block(&self, out: &mut [f64], x: View) {
        expect_lens("sum_squares_by_block", [("out", out.len(), x.len().div_ceil(NORM_BLOCK_LEN))]);
        out.copy_from_slice(&self.sum_squares_by_block_concat(&[x]));
    }

    /// Computes the sum of squares of each block of [`NORM_BLOCK_LEN`] elements of all `vectors` on
    /// the GPU, and returns all sums in order. Launches one kernel per vector, and waits once for
    /// all of them.
    fn sum_squares_by_block_concat(&self, vectors: &[View]) -> Vec<f64> {
        let mut out = vec![0.0f64; count_norm_blocks(vectors)];
        let sums = self.enqueue_sums_of_squares(vectors);
        self.gpu.call_and_record_failure(|| {
            self.gpu.download_blocking(bytemuck::cast_slice_mut(&mut out), sums.address())
        });
        out
    }

    /// Enqueues kernels that compute the sum of squares of each block of `vectors`, and a copy of
    /// the sums to the host, without waiting.
    fn start_sum_squares_by_block(&self, vectors: &[View], mut staging: Buf) -> PendingSumsOfSquares {
        let count = count_norm_blocks(vectors);
        let len = count * (size_of::<f64>() / size_of::<f32>());
        if staging.len() < len {
            staging = self.alloc_staging(Dtype::F32, len);
        }
        let sums = self.enqueue_sums_of_squares(vectors);
        let done = self.gpu.call_and_record_failure(|| {
            let to = NonNull::from(staging.view_mut().host_bytes_mut()).cast();
            // SAFETY: both ranges have `count` sums, and the download owns the host's range until
            // the event.
            unsafe { self.gpu.download_async(to, sums.address(), count * size_of::<f64>()) }?;
            self.gpu.record_event()
        });
        let done = done.map(Event::new).unwrap_or_default();
        PendingSumsOfSquares::Copying(Download::new(vec![staging], done, self.check_status()), count)
    }
}

/// Returns how many sums of squares are computed for `vectors`: one for each block of
/// [`NORM_BLOCK_LEN`] elements of a vector, rounded up.
fn count_norm_blocks(vectors: &[View]) -> usize {
    vectors.iter().map(|x| x.len().div_ceil(NORM_BLOCK_LEN)).sum()
}

impl Cuda {
    /// Enqueues one kernel per vector, which computes the sum of squares of each block of
    /// [`NORM_BLOCK_LEN`] elements of that vector. Returns the memory with the sums, in `f64`.
    fn enqueue_sums_of_squares(&self, vectors: &[View]) -> DeviceMemory {
        let sums = self.alloc_scratch(count_norm_blocks(vectors) * size_of::<f64>());
        let mut at = sums.address();
        for x in vectors {
            let count = count_norm_blocks(&[*x]);
            let config = LaunchConfig { grid: [count as u32, 1, 1], block: [256, 1, 1], shared: 0 };
            let arguments: [&dyn KernelArg; 4] = [&at, &TensorArg::from(*x), &x.len(), &NORM_BLOCK_LEN];
            self.launch(ELEMENTWISE_SOURCE, c"sum_squares_by_block", LaunchSize::Config(config), &arguments);
            at += (count * size_of::<f64>()) as u64;
        }
        sums
    }
}

/// Enqueues a kernel that stores `len` elements of `x` in `y`, converted to the element type of
/// `y`.
pub(super) fn convert_elements(cuda: &Cuda, y: TensorArg, x: TensorArg, len: usize) {
    cuda.launch(ELEMENTWISE_SOURCE, c"cast", LaunchSize::ElementsBy8(len), &[&y, &x, &len]);
}

/// Scalar arguments of the CUDA kernel `dropout`, such as the key of its random numbers. The layout
/// is that of `DropoutScalars` in elementwise.cu.
#[repr(C)]
struct DropoutScalars {
    sample: usize,
    first: u64,
    threshold: u64,
    key: [u32; 2],
    keep_factor: f32,
    unused: f32,
}

// SAFETY: struct DropoutScalars of elementwise.cu.
unsafe impl KernelArg for DropoutScalars {}

/// Scalar arguments of the CUDA kernel `round_stochastically`. The layout is that of
/// `RoundingScalars` in elementwise.cu.
#[repr(C)]
struct RoundingScalars {
    first: u64,
    step: u64,
    key: [u32; 2],
}

// SAFETY: struct RoundingScalars of elementwise.cu.
unsafe impl KernelArg for RoundingScalars {}
