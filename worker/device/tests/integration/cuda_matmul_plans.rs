//! Tests how the CUDA backend chooses and stores plans of matmuls, on the emulated GPU. These tests
//! count calls of the emulated libraries, so each runs in a separate process.

use crate::call_counts::call_count;
use crate::emulated_gpu;
use crate::own_process::is_own_process;
use device::cuda::LibrarySearchPaths;
use device::ops::{GroupedMatmulOps, MatmulOps, RowGroup, VectorOps, WriteMode};
use device::{Buf, Cuda, Dtype, Storage};

/// Opens the emulated GPU as a CUDA backend.
fn open_gpu() -> Cuda {
    let configured = vec![emulated_gpu::library_directory().to_owned()];
    Cuda::open(&LibrarySearchPaths { configured, ..LibrarySearchPaths::default() }, 0, None)
        .expect("the emulated GPU")
}

/// Returns a GPU buffer of `len` bf16 numbers that differ from each other.
fn make_buffer(cuda: &Cuda, len: usize) -> Buf {
    let values: Vec<f32> = (0..len).map(|i| ((i * 37 + 11) % 29) as f32 / 16.0 - 0.75).collect();
    let wide = cuda.clone_to_device((&values[..]).into());
    let mut buf = cuda.zeroed(Dtype::Bf16, len);
    cuda.cast(buf.view_mut(), wide.view());
    buf
}

const HIDDEN: usize = 8;
const WIDTH: usize = 16;

/// Runs the three matmuls of each expert, of which the first has `counts[0]` rows, and returns all
/// results.
fn run_experts(cuda: &Cuda, counts: &[usize]) -> Vec<f32> {
    let mut start = 0;
    let groups: Vec<RowGroup> = counts
        .iter()
        .enumerate()
        .map(|(matrix, rows)| {
            start += rows;
            RowGroup { rows: start - rows..start, matrix_offset: matrix * HIDDEN * WIDTH }
        })
        .collect();
    let (x, dy) = (make_buffer(cuda, start * HIDDEN), make_buffer(cuda, start * WIDTH));
    let w = make_buffer(cuda, counts.len() * HIDDEN * WIDTH);
    let mut y = cuda.zeroed(Dtype::Bf16, start * WIDTH);
    let mut dx = cuda.zeroed(Dtype::Bf16, start * HIDDEN);
    let mut dw = cuda.zeroed(Dtype::F32, w.len());
    cuda.grouped_forward(y.view_mut(), x.view(), w.view(), &groups, WIDTH, HIDDEN);
    cuda.grouped_backward_input(dx.view_mut(), dy.view(), w.view(), &groups, WIDTH, HIDDEN);
    cuda.grouped_backward_weight(dw.view_mut(), dy.view(), x.view(), &groups, WIDTH, HIDDEN);
    let wide = [&y, &dx].map(|from| {
        let mut wide = cuda.zeroed(Dtype::F32, from.len());
        cuda.cast(wide.view_mut(), from.view());
        wide
    });
    wide.iter().chain([&dw]).flat_map(|buf| cuda.clone_to_host(buf.view()).host_slice().to_vec()).collect()
}

/// Returns the numbers of rows of four experts in a step. Each step has other numbers.
fn expert_rows_of_step(step: usize) -> [usize; 4] {
    [3 + 7 * step % 13, 17 + 5 * step % 14, 1 + step, 33 + 11 * step % 29]
}

#[test]
fn experts_of_any_size_use_the_algorithms_of_the_first_steps() {
    if !is_own_process("cuda_matmul_plans::experts_of_any_size_use_the_algorithms_of_the_first_steps") {
        return;
    }
    let cuda = open_gpu();
    cuda.enable_matmul_autotuning(); // does not apply to matmuls of experts
    let count_heuristics = || call_count("cublasLtMatmulAlgoGetHeuristic");
    let first: Vec<_> = (0..2).map(|step| run_experts(&cuda, &expert_rows_of_step(step))).collect();
    let (heuristics, matmuls) = (count_heuristics(), call_count("cublasLtMatmul"));
    assert!((1..=9).contains(&heuristics), "three matmuls in three buckets: {heuristics}");
    assert_eq!(matmuls, 2 * 3 * 4, "no matmul was timed");
    let later: Vec<_> = (2..12).map(|step| run_experts(&cuda, &expert_rows_of_step(step))).collect();
    assert_eq!(count_heuristics(), heuristics, "from the third step on, no algorithm is searched for");
    cuda.check_status().expect("no call failed");
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("BLAS_LACKS", "checked") };
    let exact: Vec<_> = (0..12).map(|step| run_experts(&open_gpu(), &expert_rows_of_step(step))).collect();
    assert_eq!([first, later].concat(), exact, "the algorithms of exactly these sizes");
}

#[test]
fn matmuls_of_a_stream_share_a_workspace() {
    if !is_own_process("cuda_matmul_plans::matmuls_of_a_stream_share_a_workspace") {
        return;
    }
    let cuda = open_gpu();
    let (x, w) = (make_buffer(&cuda, 64), make_buffer(&cuda, 64));
    let mut y = cuda.zeroed(Dtype::Bf16, 64);
    let mut run = || {
        cuda.matmul_forward(y.view_mut(), x.view(), w.view(), 8, 8, 8, WriteMode::Overwrite);
    };
    run();
    let before = call_count("cuMemAllocAsync");
    (0..10).for_each(|_| run());
    assert_eq!(call_count("cuMemAllocAsync"), before);
    cuda.synchronize().expect("no call failed");
}
