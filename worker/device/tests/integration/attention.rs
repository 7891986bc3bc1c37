//! Compares attention on the tensor cores of the emulated GPU with attention in f32 on the same
//! GPU.

use crate::emulated_gpu;
use device::cuda::LibrarySearchPaths;
use device::ops::{AttentionDropout, AttentionOps, AttentionShape, VectorOps};
use device::{Buf, Cuda, Dtype, Storage};
use std::path::PathBuf;

/// Attention with heads of 64 and 128 elements, which Hopper GPUs compute with warpgroups.
const HOPPER_SHAPES: [[usize; 5]; 4] =
    [[2, 150, 4, 2, 64], [1, 261, 2, 2, 64], [1, 200, 3, 1, 128], [2, 65, 2, 2, 128]];
/// Attention that is computed warp by warp, with heads of every width for which there is a kernel.
const WARP_SHAPES: [[usize; 5]; 4] =
    [[1, 150, 2, 1, 40], [2, 70, 4, 2, 128], [1, 197, 2, 1, 192], [1, 140, 2, 2, 256]];

/// The first position to which each query attends.
#[derive(Clone, Copy, Debug)]
enum Mask {
    /// Every query attends to all earlier positions.
    Causal,
    /// Queries attend to at most this number of positions before them.
    Window(usize),
    /// Queries attend within documents of this length.
    Documents(usize),
}

impl Mask {
    /// Returns the first position for each query of `b` sequences of `t` positions.
    fn list_starts(self, b: usize, t: usize) -> Vec<u32> {
        let start = |position: usize| match self {
            Mask::Causal => 0,
            Mask::Window(size) => position.saturating_sub(size),
            Mask::Documents(length) => position / length * length,
        };
        (0..b * t).map(|i| start(i % t) as u32).collect()
    }
}

#[test]
fn attention_on_warpgroups_matches_attention_in_f32() {
    let Some(directory) = emulated_gpu::ptx_library_directory() else { return };
    let cuda = open_gpu(directory);
    let masks = [Mask::Causal, Mask::Window(70), Mask::Documents(30), Mask::Documents(30)];
    for ([b, t, heads, kv_heads, head_dim], mask) in HOPPER_SHAPES.into_iter().zip(masks) {
        let shape = AttentionShape::new(b, t, heads, kv_heads, head_dim);
        assert_attention_matches_f32(&cuda, Dtype::Bf16, shape, mask, 6e-3);
    }
}

#[test]
fn attention_in_16_bits_matches_attention_in_f32() {
    let cuda = open_gpu(emulated_gpu::library_directory().to_owned());
    let masks = [Mask::Documents(50), Mask::Causal, Mask::Window(70), Mask::Causal];
    let dropout = Some(AttentionDropout { key: [3, 4], probability: 0.2, first_sequence: 9 });
    for ([b, t, heads, kv_heads, head_dim], mask) in WARP_SHAPES.into_iter().zip(masks) {
        let plain = AttentionShape::new(b, t, heads, kv_heads, head_dim);
        let capped = AttentionShape { softcap: Some(2.0), dropout, ..plain };
        for (dtype, tolerance) in [(Dtype::Bf16, 6e-3), (Dtype::F16, 8e-4)] {
            assert_attention_matches_f32(&cuda, dtype, plain, mask, tolerance);
            assert_attention_matches_f32(&cuda, dtype, capped, mask, tolerance);
        }
    }
}

/// Checks that gradients of scores which f16 cannot represent give gradients that are not finite,
/// so that the loss scaler skips the step.
#[test]
fn an_overflow_of_f16_gradients_is_visible() {
    let cuda = open_gpu(emulated_gpu::library_directory().to_owned());
    for head_dim in [64, 256] {
        let shape = AttentionShape::new(1, 40, 1, 1, head_dim);
        let qkv = draw_values(40 * 3 * head_dim, 3);
        let small = draw_values(40 * head_dim, 5);
        let large: Vec<f32> = small.iter().map(|x| 60_000.0 * x).collect();
        let is_finite = |d_o: &[f32]| {
            let [.., dqkv] = run_attention(&cuda, Dtype::F16, shape, Mask::Causal, &qkv, d_o);
            dqkv.iter().all(|x| x.is_finite())
        };
        assert!(is_finite(&small) && !is_finite(&large), "heads of {head_dim}");
    }
}

/// Opens the emulated GPU whose libraries are in `directory`.
fn open_gpu(directory: PathBuf) -> Cuda {
    let paths = LibrarySearchPaths { configured: vec![directory], ..LibrarySearchPaths::default() };
    Cuda::open(&paths, 0, None).expect("the emulated GPU")
}

/// Asserts that attention on tensors of the type `dtype`, forward and backward, gives the results
/// of f32 tensors, with at most the relative error `tolerance` over all elements of a result.
fn assert_attention_matches_f32(
    cuda: &Cuda,
    dtype: Dtype,
    shape: AttentionShape,
    mask: Mask,
    tolerance: f64,
) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let qkv = draw_values(b * t * (heads + 2 * kv_heads) * head_dim, 3);
    let d_o = draw_values(b * t * heads * head_dim, 5);
    let [exact, rounded] =
        [Dtype::F32, dtype].map(|dtype| run_attention(cuda, dtype, shape, mask, &qkv, &d_o));
    for ((exact, rounded), name) in exact.iter().zip(&rounded).zip(["o", "lse", "dqkv"]) {
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let error = norm(&mut exact.iter().zip(rounded).map(|(x, y)| x - y));
        let ratio = error / norm(&mut exact.iter().copied());
        assert!(ratio < tolerance, "{name} of {dtype:?} {shape:?}, {mask:?}: relative error {ratio}");
    }
}

/// Runs attention forward and backward on tensors of the type `dtype`, and returns the outputs, the
/// log-sum-exps and the gradients.
fn run_attention(
    cuda: &Cuda,
    dtype: Dtype,
    shape: AttentionShape,
    mask: Mask,
    qkv: &[f32],
    d_o: &[f32],
) -> [Vec<f32>; 3] {
    let starts = mask.list_starts(shape.b, shape.t);
    let make = |values: &[f32]| {
        let wide = cuda.clone_to_device(values.into());
        let mut buf = cuda.zeroed(dtype, values.len());
        cuda.cast(buf.view_mut(), wide.view());
        buf
    };
    let (qkv, d_o) = (make(qkv), make(d_o));
    let mut o = cuda.zeroed(dtype, d_o.len());
    let mut lse = cuda.zeroed(Dtype::F32, shape.b * shape.heads * shape.t);
    let mut dqkv = cuda.zeroed(dtype, qkv.len());
    cuda.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape);
    cuda.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), &starts, shape);
    let copy_as_f32 = |buf: Buf| {
        let mut wide = cuda.zeroed(Dtype::F32, buf.len());
        cuda.cast(wide.view_mut(), buf.view());
        cuda.clone_to_host(wide.view()).host_slice().to_vec()
    };
    [o, lse, dqkv].map(copy_as_f32)
}

/// Returns `count` values between −1 and 1 that bf16 and f16 represent exactly.
fn draw_values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut draw = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 25) as f32 / 64.0 - 1.0
    };
    (0..count).map(|_| draw()).collect()
}
