//! Training with CUDA graphs on the emulated GPU: the same bits as without them, with fewer calls
//! of the driver. There is one test, because the use of graphs and the call counts apply to the
//! whole process.
#![allow(clippy::unwrap_used)] // a test that panics has failed
#[path = "../device/tests/emulated_gpu/call_counts.rs"]
mod calls;
mod common;
mod emulated;

use calls::calls;
use common::*;
use contract::job::*;
use device::Cuda;
use emulated::*;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use worker::{stages::RunningTrainer, train::step::StepReport};

/// Enough to capture every repeated batch of calls and to take some steps with the graphs.
const STEPS: u64 = 6;

/// Trains for `n` steps on samples in which every token has a label. Returns the bits of loss and
/// gradient norm of each step.
fn train_learnable(running: &mut RunningTrainer, n: u64) -> Curve {
    let source = LearnableSamples { vocab: running.train_spec().model.vocab_size, ignored: None };
    let step = |_| {
        let outcome = running.step(&source, StepReport::default()).unwrap().0;
        (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
    };
    (0..n).map(step).collect()
}

/// Trains a new run of `world` ranks for [`STEPS`] steps.
fn train_new_run(spec: &TrainSpec, world: usize, graphs: bool) -> Curve {
    USE_GRAPHS.store(graphs, Relaxed);
    equal_on_all_ranks(on_shared_gpu(world, |comm, ops| {
        train_learnable(&mut build_trainer_on(spec, comm, ops).start_fresh(), STEPS)
    }))
}

fn gpt2_spec(dropout: Option<f64>) -> TrainSpec {
    let model = ModelSpec { dropout, ..families::pretrained_spec(&families::golden_directory("gpt2")) };
    train_spec(model, 0, 4, 1, 7)
}

/// Jobs that use the GPU in different ways: name, spec and the numbers of ranks.
fn cases() -> Vec<(&'static str, TrainSpec, &'static [usize])> {
    let mut recomputed = llama_spec(2, Precision::Bf16);
    recomputed.recompute = Recompute::Block;
    let mut offloaded = llama_spec(3, Precision::Bf16);
    offloaded.zero.offload = Some(Offload::Cpu);
    let no_masters = TrainSpec { master_weights: false, ..llama_spec(1, Precision::Bf16) };
    let mut muon = llama_spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let wide = ModelSpec {
        hidden_size: 16,
        intermediate_size: 32,
        num_key_value_heads: 2,
        head_dim: 8,
        ..llama_model()
    };
    let fp8 = TrainSpec { model: wide, ..llama_spec(0, Precision::Fp8) };
    let mut experts = mixture_spec();
    experts.experts.expert_parallel_size = 2;
    vec![
        ("a Llama", llama_spec(0, Precision::Fp32), &[1, 2]),
        ("stage 3", llama_spec(3, Precision::Bf16), &[1, 2, 4]),
        ("recomputed", recomputed, &[2]),
        ("states on the host", offloaded, &[1, 2]),
        ("no master weights", no_masters, &[1]),
        ("Muon", muon, &[2]),
        ("fp8", fp8, &[1]),
        ("GPT-2", gpt2_spec(None), &[1]),
        ("GPT-2 with dropout", gpt2_spec(Some(0.3)), &[1, 2]),
        (
            "gemma2 with global and sliding-window layers",
            train_spec(families::pretrained_spec(&families::golden_directory("gemma2")), 0, 2, 1, 7),
            &[1],
        ),
        ("a mixture of experts", mixture_spec(), &[1, 2]),
        ("expert parallelism", experts, &[2]),
    ]
}

#[test]
fn training_with_graphs_has_the_same_bits_and_fewer_calls() {
    for (what, spec, worlds) in cases() {
        let not_parallel = TrainSpec { experts: ExpertsSpec::default(), ..spec.clone() };
        let expected = train_new_run(if worlds.contains(&1) { &spec } else { &not_parallel }, 1, false);
        for world in worlds {
            assert_eq!(train_new_run(&spec, *world, true), expected, "{what}, {world} ranks");
        }
    }
    check_lagging_streams();
    check_resume_with_and_without_graphs();
    check_graph_share_of_two_ranks();
    for (what, spec, least) in [
        ("a Llama", llama_spec(0, Precision::Fp32), 80),
        ("stage 3", llama_spec(3, Precision::Bf16), 80),
        ("GPT-2", gpt2_spec(None), 80),
        ("GPT-2 with dropout", gpt2_spec(Some(0.3)), 80),
    ] {
        check_saved_calls(what, &spec, least);
    }
}

/// Streams wait for a graph the way they wait for single calls; otherwise the losses become NaN
/// when a stream lags.
fn check_lagging_streams() {
    let mut offloaded = llama_spec(3, Precision::Bf16);
    offloaded.zero.offload = Some(Offload::Cpu);
    for (what, spec) in [
        ("stage 2", llama_spec(2, Precision::Bf16)),
        ("states on the host", offloaded),
        ("dropout", gpt2_spec(Some(0.3))),
    ] {
        let expected = train_new_run(&spec, 1, false);
        for lag in ["side:1000", "main:100"] {
            // SAFETY: no other thread is running.
            unsafe { std::env::set_var("EMULATED_GPU_LAG", lag) };
            assert_eq!(train_new_run(&spec, 2, true), expected, "{what}, {lag}");
        }
        // SAFETY: no other thread is running.
        unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    }
}

/// With two ranks at least 60 % of the calls are made by graphs. The share is lower than that of
/// one rank, because each collective ends a batch of calls.
fn check_graph_share_of_two_ranks() {
    USE_GRAPHS.store(true, Relaxed);
    for (what, spec) in
        [("stage 0", llama_spec(0, Precision::Bf16)), ("stage 3", llama_spec(3, Precision::Bf16))]
    {
        let share = on_ranks(2, |hosts| {
            let cuda = open_gpu();
            let comm = Arc::new(comm::staged::StagedComm::new(hosts, cuda.clone()));
            let mut running = build_trainer_on(&spec, comm, cuda.clone()).start_fresh();
            train_learnable(&mut running, STEPS);
            let before = cuda.graph_stats();
            train_learnable(&mut running, 3);
            let after = cuda.graph_stats();
            let (in_graphs, direct) = (after.calls - before.calls, after.direct_calls - before.direct_calls);
            println!("{what}, 2 ranks: {before:?} {after:?}");
            100 * in_graphs / (in_graphs + direct)
        });
        assert!(share.iter().all(|share| *share >= 60), "{what}: {share:?} %");
    }
}

/// A run with graphs resumes from a checkpoint of a run without them, and the other way round.
fn check_resume_with_and_without_graphs() {
    let spec = |stage| llama_spec(stage, Precision::Bf16);
    USE_GRAPHS.store(false, Relaxed);
    let expected = train_on_gpu(&spec(0), 1, BEFORE + AFTER);
    for graphs in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        USE_GRAPHS.store(graphs, Relaxed);
        train_and_save(&|n, f| on_shared_gpu(n, f), &spec(3), 2, dir.path(), true);
        USE_GRAPHS.store(!graphs, Relaxed);
        let rest = resume_and_train(&|n, f| on_shared_gpu(n, f), &spec(1), 2, dir.path());
        assert_eq!(rest, expected[BEFORE as usize..], "saved with graphs: {graphs}");
    }
}

/// Calls that graphs replace.
const REPLACED_CALLS: [&str; 4] =
    ["cuLaunchKernel", "cublasLtMatmul", "cuMemsetD8Async", "cuMemcpyDtoDAsync"];
/// Calls that launch and change graphs, and that allocate and free memory.
const OTHER_CALLS: [&str; 4] =
    ["cuGraphLaunch", "cuMemAllocAsync", "cuMemFreeAsync", "cuGraphExecKernelNodeSetParams"];

/// The driver calls of one step.
struct CallsPerStep {
    /// Calls of [`REPLACED_CALLS`].
    replaceable: i64,
    /// Launches of graphs.
    graphs: i64,
    /// Changes of kernel parameters in graphs.
    updates: i64,
}

/// Graphs save at least `least_percent` of the calls that they can replace. After the first steps,
/// neither memory nor the number of graphs grows.
fn check_saved_calls(what: &str, spec: &TrainSpec, least_percent: i64) {
    let count_calls = |graphs: bool| {
        USE_GRAPHS.store(graphs, Relaxed);
        let cuda: Arc<Cuda> = open_gpu();
        let comm = Arc::new(comm::local::group(1).remove(0));
        let comm = Arc::new(comm::staged::StagedComm::new(comm, cuda.clone()));
        let mut running = build_trainer_on(spec, comm, cuda.clone()).start_fresh();
        train_learnable(&mut running, STEPS);
        let count = || (REPLACED_CALLS.map(calls).iter().sum::<i64>(), OTHER_CALLS.map(calls));
        let (replaceable, others) = count();
        let (stats, memory) = (cuda.graph_stats(), cuda.memory_info().unwrap());
        train_learnable(&mut running, 3);
        let (replaceable_after, others_after) = count();
        if graphs {
            assert_eq!(others_after[1..3], others[1..3], "{what}: allocations and frees");
            assert_eq!(cuda.memory_info().unwrap(), memory, "{what}: memory grows");
            assert_eq!(cuda.graph_stats().cached_graphs, stats.cached_graphs, "{what}: graphs accumulate");
        }
        CallsPerStep {
            replaceable: (replaceable_after - replaceable) / 3,
            graphs: (others_after[0] - others[0]) / 3,
            updates: (others_after[3] - others[3]) / 3,
        }
    };
    let (without, with) = (count_calls(false), count_calls(true));
    println!(
        "{what}: a step has {} calls without graphs; with graphs {} calls, {} graphs and {} updates",
        without.replaceable, with.replaceable, with.graphs, with.updates
    );
    assert_eq!(without.graphs, 0);
    let saved = without.replaceable - with.replaceable;
    assert!(
        100 * saved >= least_percent * without.replaceable,
        "{what}: graphs save {saved} of {} calls",
        without.replaceable
    );
}
