//! Tests of matmuls with GELU or a bias gradient in the epilogue, on the emulated GPU. These tests
//! count calls of the emulated libraries, so each runs in a separate process.

use crate::call_counts::call_count;
use crate::emulated_gpu;
use crate::own_process::is_own_process;
use device::cuda::LibrarySearchPaths;
use device::ops::{EpilogueOps, VectorOps};
use device::{Buf, Cuda, Dtype, Storage, View, ViewMut};

/// Opens the emulated GPU as a CUDA backend.
fn open_gpu() -> Cuda {
    let configured = vec![emulated_gpu::library_directory().to_owned()];
    Cuda::open(&LibrarySearchPaths { configured, ..LibrarySearchPaths::default() }, 0, None)
        .expect("the emulated GPU")
}

/// A buffer on the GPU whose first element is `offset` elements after its begin.
struct Operand {
    buf: Buf,
    offset: usize,
}

impl Operand {
    /// Creates an operand of `len` numbers that differ from each other.
    fn new(cuda: &Cuda, dtype: Dtype, len: usize, offset: usize) -> Operand {
        let values: Vec<f32> = (0..len + offset).map(|i| ((i * 37 + 11) % 29) as f32 / 16.0 - 0.75).collect();
        let wide = cuda.clone_to_device((&values[..]).into());
        let mut buf = cuda.zeroed(dtype, len + offset);
        cuda.cast(buf.view_mut(), wide.view());
        Operand { buf, offset }
    }

    fn view(&self) -> View<'_> {
        self.buf.view().slice(self.offset..self.buf.len())
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.buf.len();
        self.buf.view_mut().slice(self.offset..len)
    }

    fn to_host(&self, cuda: &Cuda) -> Vec<f32> {
        let mut wide = cuda.zeroed(Dtype::F32, self.buf.len());
        cuda.cast(wide.view_mut(), self.buf.view());
        cuda.clone_to_host(wide.view()).host_slice()[self.offset..].to_vec()
    }
}

/// The type of matrices, rows, inputs and outputs of a layer, and where its buffers begin.
#[derive(Clone, Copy, Debug)]
struct Layer {
    dtype: Dtype,
    sizes: [usize; 3],
    offset: usize,
}

const ALIGNED: Layer = Layer { dtype: Dtype::Bf16, sizes: [12, 16, 24], offset: 0 };

/// The results of the ops of one layer, and the numbers of matmuls and kernels of each of the four
/// ops: the forward pass, the gradient of GELU's input, and the gradients of the weights and biases
/// of a linear and a Conv1D layer.
fn run_layer(cuda: &Cuda, layer: Layer) -> (Vec<Vec<f32>>, [[i64; 2]; 4]) {
    let Layer { dtype, sizes, offset } = layer;
    let [m, inp, out] = sizes;
    let new = |len| Operand::new(cuda, dtype, len, offset);
    let (x, w, bias, dy) = (new(m * inp), new(inp * out), new(out), new(m * out));
    let [mut y, mut pre] = [0; 2].map(|_| new(m * out));
    let [mut dx, mut act] = [0; 2].map(|_| new(m * inp));
    let [mut dw, mut conv1d_dw] = [0; 2].map(|_| Operand::new(cuda, Dtype::F32, inp * out, offset));
    let mut sums = [0; 2].map(|_| Operand { buf: cuda.zeroed(Dtype::F32, out + offset), offset });
    let mut counts = Vec::new();
    let mut count = |run: &mut dyn FnMut()| {
        let read = || ["cublasLtMatmul", "cuLaunchKernel"].map(call_count);
        let before = read();
        run();
        let after = read();
        counts.push([after[0] - before[0], after[1] - before[1]]);
    };
    count(&mut || {
        cuda.conv1d_gelu_forward(y.view_mut(), pre.view_mut(), x.view(), w.view(), bias.view(), sizes);
    });
    count(&mut || {
        let (dy, w, pre) = (dy.view(), w.view(), x.view());
        cuda.conv1d_gelu_backward_input(dx.view_mut(), act.view_mut(), dy, w, pre, sizes);
    });
    let [dbias, conv1d_dbias] = &mut sums;
    count(&mut || {
        let (dw, dbias) = (dw.view_mut(), dbias.view_mut());
        cuda.matmul_backward_weight_and_bias(dw, dbias, dy.view(), x.view(), [m, out, inp]);
    });
    count(&mut || {
        let (dw, dbias) = (conv1d_dw.view_mut(), conv1d_dbias.view_mut());
        cuda.conv1d_backward_weight_and_bias(dw, dbias, dy.view(), x.view(), sizes);
    });
    let results = [&y, &pre, &dx, &act, &dw, &conv1d_dw, &sums[0], &sums[1]];
    let results = results.map(|result| result.to_host(cuda)).to_vec();
    cuda.check_status().expect("no call failed");
    (results, counts.try_into().expect("four ops"))
}

/// Asserts that results with epilogues are near those of separate kernels, up to the rounding of
/// the type of the matrices.
#[track_caller]
fn assert_near(fused: &[Vec<f32>], separate: &[Vec<f32>], what: &str) {
    for (i, (fused, separate)) in fused.iter().zip(separate).enumerate() {
        let largest = separate.iter().fold(0f32, |most, x| most.max(x.abs()));
        let pairs = fused.iter().zip(separate);
        let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(difference <= 1e-2 * largest, "{what}: result {i} differs by {difference} of {largest}");
    }
}

#[test]
fn epilogues_replace_kernels() {
    if !is_own_process("cuda_epilogues::epilogues_replace_kernels") {
        return;
    }
    let cuda = open_gpu();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let layer = Layer { dtype, ..ALIGNED };
        let (separate, kernels) = run_layer(&cuda, layer);
        // Sums of rows take two kernels.
        assert_eq!(kernels, [[1, 1], [1, 1], [1, 2], [1, 2]], "matmuls and kernels");
        cuda.set_matmul_epilogues_enabled(true);
        let (fused, kernels) = run_layer(&cuda, layer);
        // The backward pass of GELU computes its output again, for the gradient of the weight.
        assert_eq!(kernels, [[1, 0], [1, 1], [1, 0], [1, 0]], "matmuls and kernels with epilogues");
        assert_near(&fused, &separate, "epilogues");
        // Separate kernels round the product, which is exact in f16, and then apply the derivative.
        assert_eq!(fused[2] == separate[2], dtype == Dtype::F16, "the gradient of GELU's input");
        cuda.set_matmul_epilogues_enabled(false);
    }
}

#[test]
fn kernels_compute_what_epilogues_do_not_support() {
    if !is_own_process("cuda_epilogues::kernels_compute_what_epilogues_do_not_support") {
        return;
    }
    let run_both = |layer| {
        let cuda = open_gpu();
        let (separate, kernels) = run_layer(&cuda, layer);
        cuda.set_matmul_epilogues_enabled(true);
        let (results, with_epilogues) = run_layer(&cuda, layer);
        (separate, kernels, results, with_epilogues)
    };
    for layer in [
        Layer { dtype: Dtype::F32, ..ALIGNED },
        Layer { offset: 1, ..ALIGNED },
        Layer { sizes: [1, 16, 24], ..ALIGNED },
    ] {
        let (separate, kernels, results, with_epilogues) = run_both(layer);
        assert_eq!(with_epilogues, kernels, "{layer:?}");
        assert_eq!(results, separate, "{layer:?}");
    }
    // The width of GELU's input must be a multiple of eight, but that of a bias gradient need not.
    let (separate, kernels, results, with_epilogues) = run_both(Layer { sizes: [12, 12, 20], ..ALIGNED });
    assert_eq!((&kernels[..2], [[1, 0]; 2]), (&with_epilogues[..2], [with_epilogues[2], with_epilogues[3]]));
    assert_near(&results, &separate, "odd widths");
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("BLAS_LACKS", "odd") };
    let (separate, kernels, results, with_epilogues) = run_both(ALIGNED);
    assert_eq!((kernels, separate), (with_epilogues, results), "a library without epilogues");
}
