//! CUDA graphs on the emulated GPU: the same results with fewer calls, and correct results if
//! graphs fail.
//!
//! This is one test, because the emulated GPU counts calls and injects failures per process.
#[path = "emulated_gpu/call_counts.rs"]
mod call_counts;
mod emulated_gpu;

use call_counts::calls;
use device::{
    Buf, Cuda, Dtype, Ops, Storage, conformance, cuda::LibraryPaths, ops::WriteMode, storage::BackendNotice,
};
use diagnostic::codes::device::CUDA_GRAPHS_DISABLED;
use std::time::Duration;

fn cuda() -> Cuda {
    let configured = vec![emulated_gpu::library_directory().to_owned()];
    Cuda::open(&LibraryPaths { configured, ..LibraryPaths::default() }, 0, None).expect("the emulated GPU")
}

/// Some buffers, and a step that changes them with each kind of call that graphs contain: kernels,
/// a host input, a matmul with scratch memory, a fill and a copy.
struct Work<'a> {
    cuda: &'a Cuda,
    buffers: [Buf; 4],
}

impl<'a> Work<'a> {
    fn new(cuda: &'a Cuda) -> Self {
        let buffers = [1.0f32, -0.5, 0.25, 2.0].map(|x| {
            let mut buf = cuda.zeroed(Dtype::F32, 64);
            cuda.add_scalar(buf.view_mut(), x);
            buf
        });
        Work { cuda, buffers }
    }

    fn step(&mut self, factor: f32, tokens: &[u32; 8]) {
        let (cuda, [x, y, w, z]) = (self.cuda, &mut self.buffers);
        cuda.embedding_forward(y.view_mut(), x.view(), tokens, 8);
        cuda.matmul_forward(z.view_mut(), y.view(), w.view(), 8, 8, 8, WriteMode::Accumulate);
        cuda.scale(z.view_mut(), 0.5);
        cuda.add(x.view_mut(), z.view());
        cuda.softcap(x.view_mut(), 3.0);
        cuda.clear(y.view_mut());
        cuda.copy(y.view_mut().slice(0..8), z.view().slice(8..16));
        cuda.bias_backward(w.view_mut().slice(0..8), y.view(), 8, 8); // uses scratch memory
        cuda.scale(w.view_mut(), factor);
    }

    fn bits(&self) -> Vec<u32> {
        let copies = self.buffers.iter().map(|buf| self.cuda.host_copy(buf.view()));
        copies.flat_map(|buf| buf.host().iter().map(|x| x.to_bits()).collect::<Vec<_>>()).collect()
    }
}

const STEPS: u32 = 6;

/// The tokens of a step; they differ from step to step.
fn tokens(step: u32) -> [u32; 8] {
    std::array::from_fn(|i| (i as u32 * 5 + step * 3) % 8)
}

/// The bits of the buffers after some steps. With `varies`, the last kernel's argument differs each
/// step.
fn run(cuda: &Cuda, varies: bool) -> Vec<u32> {
    let mut work = Work::new(cuda);
    for step in 0..STEPS {
        work.step(if varies { 0.5 + step as f32 } else { 0.75 }, &tokens(step));
        cuda.synchronize();
    }
    work.bits()
}

#[test]
fn graphs_have_the_effect_of_their_calls() {
    let expected = [false, true].map(|varies| run(&cuda(), varies));
    graphs_replace_calls_and_keep_the_bits(&expected);
    freed_memory_was_used_before();
    growing_scratch_memory_keeps_results();
    unique_batches_make_no_graph();
    changed_arguments_update_a_graph();
    the_number_of_graphs_is_limited();
    failures_of_graphs_keep_the_results(&expected);
    timing_decides();
    let cuda = cuda();
    cuda.set_graphs_enabled(true);
    let rows = conformance::check_ops(&cuda, 1, 2);
    assert!(rows.iter().all(|row| row.failure.is_none() && row.max_errors.f32 < 1e-3), "{rows:#?}");
}

fn graphs_replace_calls_and_keep_the_bits(expected: &[Vec<u32>; 2]) {
    let cuda = cuda();
    cuda.set_graphs_enabled(true);
    assert_eq!(run(&cuda, false), expected[0]);
    assert_eq!(run(&cuda, true), expected[1], "with an argument that varies");
    let mut work = Work::new(&cuda);
    for step in 0..3 {
        work.step(0.75, &tokens(step));
        cuda.synchronize();
    }
    let direct_calls =
        || ["cuLaunchKernel", "cuMemsetD8Async", "cuMemAllocAsync", "cuMemFreeAsync"].map(calls);
    let (direct_before, launches_before, before) =
        (direct_calls(), calls("cuGraphLaunch"), cuda.graph_stats());
    for step in 3..3 + STEPS {
        work.step(0.75, &tokens(step));
        cuda.synchronize();
    }
    assert_eq!(direct_calls(), direct_before, "only graphs are launched");
    assert_eq!(calls("cuGraphLaunch") - launches_before, i64::from(STEPS));
    let after = cuda.graph_stats();
    assert_eq!(
        (after.enabled, after.cached_graphs, after.direct_calls),
        (true, before.cached_graphs, before.direct_calls)
    );
    assert_eq!(after.calls - before.calls, u64::from(STEPS) * 10, "calls of a step");
    // With graphs off again, calls are issued one by one and give the same results.
    let mut other = Work::new(&cuda);
    cuda.set_graphs_enabled(false);
    (0..3 + STEPS).for_each(|step| other.step(0.75, &tokens(step)));
    assert_eq!(other.bits(), work.bits());
    assert_eq!(cuda.graph_stats().cached_graphs, 0);
    assert_eq!(calls("cuGraphExecDestroy"), calls("cuGraphInstantiate"), "every graph is destroyed");
}

/// Recorded calls are issued before their memory is freed, and before their results are read.
fn freed_memory_was_used_before() {
    let cuda = cuda();
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
            event.stream_wait();
            let copy = cuda.device_copy(sum.view());
            assert_eq!(cuda.host_copy(copy.view()).host(), [7.0 * step as f32; 64]);
        });
    }
}

/// When scratch memory grows, recorded calls still use the smaller block.
fn growing_scratch_memory_keeps_results() {
    // Streams lag behind the host, so that a block that is freed too early would be reused.
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "main:10") };
    let [expected, with_graphs] = [false, true].map(|graphs| {
        let cuda = cuda();
        cuda.set_graphs_enabled(graphs);
        let Work { buffers: [x, y, ..], .. } = &mut Work::new(&cuda);
        let mut wide = [1.0, 2.0].map(|value| {
            let mut buf = cuda.zeroed(Dtype::F32, 9000);
            cuda.add_scalar(buf.view_mut(), value);
            buf
        });
        let [to, from] = &mut wide;
        cuda.bias_backward(x.view_mut().slice(0..8), y.view(), 8, 8);
        cuda.bias_backward(to.view_mut(), from.view(), 1, 9000);
        [x, to].map(|buf| cuda.host_copy(buf.view()).host().to_vec())
    });
    // SAFETY: no other thread runs; both GPUs are closed.
    unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    assert_eq!(with_graphs, expected);
}

fn unique_batches_make_no_graph() {
    let cuda = cuda();
    cuda.set_graphs_enabled(true);
    let graphs_before = calls("cuGraphInstantiate");
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    for step in 0..40u16 {
        (0..6u16).for_each(|call| cuda.add_scalar(buf.view_mut(), f32::from(6 * step + call)));
        cuda.synchronize();
    }
    let sum = f32::from((0..240).sum::<u16>());
    assert_eq!(cuda.host_copy(buf.view()).host(), [sum; 8]);
    assert_eq!((calls("cuGraphInstantiate"), cuda.graph_stats().cached_graphs), (graphs_before, 0));
}

/// Batches that differ in one argument share one graph, which is updated.
fn changed_arguments_update_a_graph() {
    let expected = run(&cuda(), true);
    let cuda = cuda();
    cuda.set_graphs_enabled(true);
    let (launches, updates) = (calls("cuLaunchKernel"), calls("cuGraphExecKernelNodeSetParams"));
    assert_eq!(run(&cuda, true), expected);
    let stats = cuda.graph_stats();
    assert_eq!((stats.cached_graphs, stats.updated_kernels), (1, u64::from(STEPS) - 2), "{stats:?}");
    assert_eq!(calls("cuGraphExecKernelNodeSetParams") - updates, i64::from(STEPS) - 2);
    assert!(calls("cuLaunchKernel") - launches < 30, "{}", calls("cuLaunchKernel") - launches);
}

/// Batches that occur exactly twice never exceed the maximum number of cached graphs. After some
/// graphs were evicted unused, no more graphs are captured.
fn the_number_of_graphs_is_limited() {
    let cuda = cuda();
    cuda.set_graphs_enabled(true);
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    let mut most = 0;
    for batch in 0..1300u16 {
        for _ in 0..2 {
            (0..4u16).for_each(|call| cuda.scale(buf.view_mut(), f32::from(4 * batch + call)));
            cuda.synchronize();
        }
        most = most.max(cuda.graph_stats().cached_graphs);
    }
    assert_eq!(most, 512);
    assert!(cuda.graph_stats().launches < 600, "{:?}", cuda.graph_stats());
    drop((buf, cuda));
    assert_eq!(calls("cuGraphExecDestroy"), calls("cuGraphInstantiate"), "every graph is destroyed");
}

fn failures_of_graphs_keep_the_results(expected: &[Vec<u32>; 2]) {
    for (fault, function) in [
        ("cuStreamBeginCapture:1", "cuStreamBeginCapture"),
        ("cuStreamEndCapture:1", "cuStreamEndCapture"),
        ("cuGraphInstantiate:1", "cuGraphInstantiate"),
        ("cuGraphLaunch:1", "cuGraphLaunch"),
        ("cuGraphLaunch:3", "cuGraphLaunch"),
        ("cuGraphExecKernelNodeSetParams:2", "cuGraphExecKernelNodeSetParams"),
        ("captured matmul", "cublasLtMatmul"),
    ] {
        let cuda = cuda();
        cuda.set_graphs_enabled(true);
        let varies = function == "cuGraphExecKernelNodeSetParams";
        let expected = &expected[usize::from(varies)];
        // SAFETY: no other thread runs.
        unsafe { std::env::set_var("EMULATED_GPU_FAILS", fault) };
        assert_eq!(run(&cuda, varies), *expected, "{fault}");
        // SAFETY: no other thread runs.
        unsafe { std::env::remove_var("EMULATED_GPU_FAILS") };
        assert!(!cuda.graph_stats().enabled, "{fault}");
        let Some(BackendNotice::Degraded(warning)) = cuda.after_step(Duration::ZERO) else {
            panic!("{fault}: no notice")
        };
        assert_eq!(warning.code(), CUDA_GRAPHS_DISABLED, "{fault}");
        assert_eq!(warning.field("function"), Some(&function.into()), "{fault}: {warning:?}");
        assert_eq!(cuda.after_step(Duration::ZERO), None, "{fault}: the notice is given once");
        assert_eq!(run(&cuda, varies), *expected, "{fault}: after the failure");
        drop(cuda);
        assert_eq!(calls("cuGraphDestroy"), calls("cuGraphInstantiate"), "{fault}");
    }
}

/// The autotuner keeps graphs on only if they are faster, and does not try them if calls are long.
fn timing_decides() {
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
        let cuda = cuda();
        let mut buf = cuda.zeroed(Dtype::F32, 8);
        cuda.autotune_graphs();
        let mut notices = Vec::new();
        for _ in 0..60 {
            (0..calls).for_each(|_| cuda.scale(buf.view_mut(), 1.0));
            let ms = if cuda.graph_stats().enabled { ms_with_graphs } else { 5 };
            notices.extend(cuda.after_step(Duration::from_millis(ms)));
        }
        assert_eq!(notices, std::slice::from_ref(&expected));
        let is_enabled = matches!(expected, BackendNotice::GraphsMeasured { enabled: true, .. });
        assert_eq!(cuda.graph_stats().enabled, is_enabled);
    }
}
