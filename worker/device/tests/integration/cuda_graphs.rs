//! Tests CUDA graphs on the emulated GPU: they give the same results with fewer calls, and results
//! are correct if graphs fail.
//!
//! This is one test, because the emulated GPU counts calls and injects failures per process.

use crate::call_counts::call_count;
use crate::emulated_gpu;
use crate::own_process::is_own_process;
use device::{
    Buf, Cuda, Dtype, Storage, conformance,
    cuda::LibrarySearchPaths,
    ops::{BiasOps, EmbeddingOps, MatmulOps, VectorOps, WriteMode},
    storage::BackendNotice,
};
use diagnostic::codes::device::CUDA_GRAPHS_DISABLED;
use std::time::Duration;

/// Opens the emulated GPU as a CUDA backend.
fn open_gpu() -> Cuda {
    let configured = vec![emulated_gpu::library_directory().to_owned()];
    Cuda::open(&LibrarySearchPaths { configured, ..LibrarySearchPaths::default() }, 0, None)
        .expect("the emulated GPU")
}

/// Buffers that a test step changes with each kind of call that CUDA graphs contain: kernels, an
/// input from host memory, a matmul with scratch memory, a fill and a copy.
struct StepBuffers<'a> {
    cuda: &'a Cuda,
    buffers: [Buf; 4],
}

impl<'a> StepBuffers<'a> {
    /// Allocates the buffers and fills each with a different number.
    fn new(cuda: &'a Cuda) -> Self {
        let buffers = [1.0f32, -0.5, 0.25, 2.0].map(|x| {
            let mut buf = cuda.zeroed(Dtype::F32, 64);
            cuda.add_scalar(buf.view_mut(), x);
            buf
        });
        StepBuffers { cuda, buffers }
    }

    /// Runs one test step on the buffers. `factor` is an argument of the last kernel.
    fn run_step(&mut self, factor: f32, tokens: &[u32; 8]) {
        let (cuda, [x, y, w, z]) = (self.cuda, &mut self.buffers);
        cuda.embedding_forward(y.view_mut(), x.view(), tokens, 8);
        cuda.matmul_forward(z.view_mut(), y.view(), w.view(), 8, 8, 8, WriteMode::Accumulate);
        cuda.scale(z.view_mut(), 0.5);
        cuda.add(x.view_mut(), z.view());
        cuda.softcap(x.view_mut(), 3.0);
        cuda.fill_with_zeros(y.view_mut());
        cuda.copy(y.view_mut().slice(0..8), z.view().slice(8..16));
        cuda.bias_backward(w.view_mut().slice(0..8), y.view(), 8, 8); // uses scratch memory
        cuda.scale(w.view_mut(), factor);
    }

    /// Copies all buffers to the host and returns their bits.
    fn download_bits(&self) -> Vec<u32> {
        let copies = self.buffers.iter().map(|buf| self.cuda.clone_to_host(buf.view()));
        copies.flat_map(|buf| buf.host_slice().iter().map(|x| x.to_bits()).collect::<Vec<_>>()).collect()
    }
}

const STEPS: u32 = 6;

/// Returns the tokens of test step `step`, which kernels read as an input from host memory. They
/// differ from step to step.
fn step_tokens(step: u32) -> [u32; 8] {
    std::array::from_fn(|i| (i as u32 * 5 + step * 3) % 8)
}

/// Runs [`STEPS`] steps and returns the bits of the buffers. If `varies`, the last kernel's
/// argument differs in each step.
fn run_steps(cuda: &Cuda, varies: bool) -> Vec<u32> {
    let mut work = StepBuffers::new(cuda);
    for step in 0..STEPS {
        work.run_step(if varies { 0.5 + step as f32 } else { 0.75 }, &step_tokens(step));
        cuda.synchronize().expect("no call failed");
    }
    work.download_bits()
}

#[test]
fn graphs_have_the_effect_of_their_calls() {
    if !is_own_process("cuda_graphs::graphs_have_the_effect_of_their_calls") {
        return;
    }
    let expected = [false, true].map(|varies| run_steps(&open_gpu(), varies));
    check_that_graphs_replace_calls_and_keep_the_bits(&expected);
    check_that_recorded_calls_precede_frees_and_reads();
    check_that_growing_scratch_memory_keeps_results();
    check_that_unique_batches_make_no_graph();
    check_that_changed_arguments_update_a_graph();
    check_that_the_number_of_graphs_is_limited();
    check_that_failing_graphs_keep_the_results(&expected);
    check_that_autotuning_keeps_graphs_only_if_faster();
    let cuda = open_gpu();
    cuda.set_graphs_enabled(true);
    let rows = conformance::compare_ops_with_cpu(&cuda, 1, 2);
    assert!(rows.iter().all(|row| row.failure.is_none() && row.max_errors.f32 < 1e-3), "{rows:#?}");
}

/// Asserts that repeated steps are launched as graphs only, with the results of single calls.
fn check_that_graphs_replace_calls_and_keep_the_bits(expected: &[Vec<u32>; 2]) {
    let cuda = open_gpu();
    cuda.set_graphs_enabled(true);
    assert_eq!(run_steps(&cuda, false), expected[0]);
    assert_eq!(run_steps(&cuda, true), expected[1], "with an argument that varies");
    let mut work = StepBuffers::new(&cuda);
    for step in 0..3 {
        work.run_step(0.75, &step_tokens(step));
        cuda.synchronize().expect("no call failed");
    }
    let direct_calls =
        || ["cuLaunchKernel", "cuMemsetD8Async", "cuMemAllocAsync", "cuMemFreeAsync"].map(call_count);
    let (direct_before, launches_before, before) =
        (direct_calls(), call_count("cuGraphLaunch"), cuda.graph_stats());
    for step in 3..3 + STEPS {
        work.run_step(0.75, &step_tokens(step));
        cuda.synchronize().expect("no call failed");
    }
    assert_eq!(direct_calls(), direct_before, "only graphs are launched");
    assert_eq!(call_count("cuGraphLaunch") - launches_before, i64::from(STEPS));
    let after = cuda.graph_stats();
    assert_eq!(
        (after.enabled, after.cached_graphs, after.direct_calls),
        (true, before.cached_graphs, before.direct_calls)
    );
    assert_eq!(after.calls - before.calls, u64::from(STEPS) * 10, "calls of a step");
    // With graphs off again, calls are issued one by one and give the same results.
    let mut other = StepBuffers::new(&cuda);
    cuda.set_graphs_enabled(false);
    (0..3 + STEPS).for_each(|step| other.run_step(0.75, &step_tokens(step)));
    assert_eq!(other.download_bits(), work.download_bits());
    assert_eq!(cuda.graph_stats().cached_graphs, 0);
    assert_eq!(
        call_count("cuGraphExecDestroy"),
        call_count("cuGraphInstantiate"),
        "every graph is destroyed"
    );
}

/// Asserts that GPU calls that are only recorded so far are issued before their memory is freed,
/// and before their results are read.
fn check_that_recorded_calls_precede_frees_and_reads() {
    let cuda = open_gpu();
    cuda.set_graphs_enabled(true);
    let mut sum = cuda.zeroed(Dtype::F32, 64);
    for step in 1..=STEPS {
        let mut other = cuda.zeroed(Dtype::F32, 64);
        cuda.add_scalar(other.view_mut(), 1.5);
        for _ in 0..4 {
            cuda.add(sum.view_mut(), other.view());
        }
        drop(other);
        cuda.add_scalar(sum.view_mut(), 1.0);
        let event = cuda.record_event();
        cuda.with_separate_stream(&mut || {
            event.make_stream_wait();
            let copy = cuda.clone_to_device(sum.view());
            assert_eq!(cuda.clone_to_host(copy.view()).host_slice(), [7.0 * step as f32; 64]);
        });
    }
}

/// Asserts that recorded calls still use the old, smaller block of scratch memory when a larger
/// block replaces it.
fn check_that_growing_scratch_memory_keeps_results() {
    // Streams lag behind the host, so that a block that is freed too early would be reused.
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "main:10") };
    let [expected, with_graphs] = [false, true].map(|graphs| {
        let cuda = open_gpu();
        cuda.set_graphs_enabled(graphs);
        let StepBuffers { buffers: [x, y, ..], .. } = &mut StepBuffers::new(&cuda);
        let mut wide = [1.0, 2.0].map(|value| {
            let mut buf = cuda.zeroed(Dtype::F32, 9000);
            cuda.add_scalar(buf.view_mut(), value);
            buf
        });
        let [to, from] = &mut wide;
        cuda.bias_backward(x.view_mut().slice(0..8), y.view(), 8, 8);
        cuda.bias_backward(to.view_mut(), from.view(), 1, 9000);
        [x, to].map(|buf| cuda.clone_to_host(buf.view()).host_slice().to_vec())
    });
    // SAFETY: no other thread runs; both GPUs are closed.
    unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    assert_eq!(with_graphs, expected);
}

/// Asserts that batches of calls that occur only once are not captured as CUDA graphs.
fn check_that_unique_batches_make_no_graph() {
    let cuda = open_gpu();
    cuda.set_graphs_enabled(true);
    let graphs_before = call_count("cuGraphInstantiate");
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    for step in 0..40u16 {
        (0..6u16).for_each(|call| cuda.add_scalar(buf.view_mut(), f32::from(6 * step + call)));
        cuda.synchronize().expect("no call failed");
    }
    let sum = f32::from((0..240).sum::<u16>());
    assert_eq!(cuda.clone_to_host(buf.view()).host_slice(), [sum; 8]);
    assert_eq!((call_count("cuGraphInstantiate"), cuda.graph_stats().cached_graphs), (graphs_before, 0));
}

/// Asserts that batches of calls that differ in one argument share one CUDA graph, which is
/// updated.
fn check_that_changed_arguments_update_a_graph() {
    let expected = run_steps(&open_gpu(), true);
    let cuda = open_gpu();
    cuda.set_graphs_enabled(true);
    let (launches, updates) = (call_count("cuLaunchKernel"), call_count("cuGraphExecKernelNodeSetParams"));
    assert_eq!(run_steps(&cuda, true), expected);
    let stats = cuda.graph_stats();
    assert_eq!((stats.cached_graphs, stats.updated_kernels), (1, u64::from(STEPS) - 2), "{stats:?}");
    assert_eq!(call_count("cuGraphExecKernelNodeSetParams") - updates, i64::from(STEPS) - 2);
    assert!(call_count("cuLaunchKernel") - launches < 30, "{}", call_count("cuLaunchKernel") - launches);
}

/// Asserts that the number of cached CUDA graphs is limited if batches of calls occur exactly
/// twice. After graphs were evicted unused, no more graphs are captured.
fn check_that_the_number_of_graphs_is_limited() {
    let cuda = open_gpu();
    cuda.set_graphs_enabled(true);
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    let mut most = 0;
    for batch in 0..1300u16 {
        for _ in 0..2 {
            (0..4u16).for_each(|call| cuda.scale(buf.view_mut(), f32::from(4 * batch + call)));
            cuda.synchronize().expect("no call failed");
        }
        most = most.max(cuda.graph_stats().cached_graphs);
    }
    assert_eq!(most, 512);
    assert!(cuda.graph_stats().launches < 600, "{:?}", cuda.graph_stats());
    drop((buf, cuda));
    assert_eq!(
        call_count("cuGraphExecDestroy"),
        call_count("cuGraphInstantiate"),
        "every graph is destroyed"
    );
}

/// Asserts that training continues with the same results, and one notice, if a CUDA call that
/// creates or launches a graph fails.
fn check_that_failing_graphs_keep_the_results(expected: &[Vec<u32>; 2]) {
    for (fault, function) in [
        ("cuStreamBeginCapture:1", "cuStreamBeginCapture"),
        ("cuStreamEndCapture:1", "cuStreamEndCapture"),
        ("cuGraphInstantiate:1", "cuGraphInstantiate"),
        ("cuGraphLaunch:1", "cuGraphLaunch"),
        ("cuGraphLaunch:3", "cuGraphLaunch"),
        ("cuGraphExecKernelNodeSetParams:2", "cuGraphExecKernelNodeSetParams"),
        ("captured matmul", "cublasLtMatmul"),
    ] {
        let cuda = open_gpu();
        cuda.set_graphs_enabled(true);
        let varies = function == "cuGraphExecKernelNodeSetParams";
        let expected = &expected[usize::from(varies)];
        // SAFETY: no other thread runs.
        unsafe { std::env::set_var("EMULATED_GPU_FAILS", fault) };
        assert_eq!(run_steps(&cuda, varies), *expected, "{fault}");
        // SAFETY: no other thread runs.
        unsafe { std::env::remove_var("EMULATED_GPU_FAILS") };
        assert!(!cuda.graph_stats().enabled, "{fault}");
        let Some(BackendNotice::Degraded(warning)) = cuda.record_step_duration(Duration::ZERO) else {
            panic!("{fault}: no notice")
        };
        assert_eq!(warning.code(), CUDA_GRAPHS_DISABLED, "{fault}");
        assert_eq!(warning.field("function"), Some(&function.into()), "{fault}: {warning:?}");
        assert_eq!(cuda.record_step_duration(Duration::ZERO), None, "{fault}: the notice is given once");
        assert_eq!(run_steps(&cuda, varies), *expected, "{fault}: after the failure");
        drop(cuda);
        assert_eq!(call_count("cuGraphDestroy"), call_count("cuGraphInstantiate"), "{fault}");
    }
}

/// Asserts that autotuning keeps using CUDA graphs only if they are faster, and does not try graphs
/// if calls take long.
fn check_that_autotuning_keeps_graphs_only_if_faster() {
    let measured = |enabled, step_seconds_with| BackendNotice::GraphsMeasured {
        enabled,
        step_seconds_with,
        step_seconds_without: 5e-3,
    };
    for (calls, ms_with_graphs, expected) in [
        (100, 3, measured(true, 3e-3)),
        (100, 7, measured(false, 7e-3)),
        (20, 3, BackendNotice::GraphsNotNeeded { seconds_per_call: 250e-6 }),
    ] {
        let cuda = open_gpu();
        let mut buf = cuda.zeroed(Dtype::F32, 8);
        cuda.start_graph_autotuning();
        let mut notices = Vec::new();
        for _ in 0..60 {
            (0..calls).for_each(|_| cuda.scale(buf.view_mut(), 1.0));
            let ms = if cuda.graph_stats().enabled { ms_with_graphs } else { 5 };
            notices.extend(cuda.record_step_duration(Duration::from_millis(ms)));
        }
        assert_eq!(notices, std::slice::from_ref(&expected));
        let is_enabled = matches!(expected, BackendNotice::GraphsMeasured { enabled: true, .. });
        assert_eq!(cuda.graph_stats().enabled, is_enabled);
    }
}
