//! Tests of training with CUDA graphs on the emulated GPU: losses have the same bits as without
//! graphs, and a step needs fewer calls of the driver. There is one test function, because the use
//! of graphs and the call counts apply to the whole process.

use crate::call_counts::call_count;
use crate::common::*;
use crate::emulated::*;
use crate::own_process::is_own_process;
use device::Cuda;
use jobspec::*;
use std::sync::{Arc, atomic::Ordering::Relaxed};
use worker::train::{running_trainer::RunningTrainer, step::RankStepReport};

/// Number of steps of a run: enough to capture every repeated batch of calls, and to take some
/// steps with the graphs.
const STEPS: u64 = 6;

/// Trains for `n` steps on samples in which every token has a label. Returns the bits of loss and
/// gradient norm of each step.
fn train_learnable(running: &mut RunningTrainer, n: u64) -> LossCurve {
    let source = LearnableSamples { vocab: running.train_spec().model.vocab_size, ignored: None };
    let step = |_| {
        let outcome = running.run_step(&source, RankStepReport::default()).unwrap().0;
        (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
    };
    (0..n).map(step).collect()
}

/// Trains a new run of `world` ranks for [`STEPS`] steps on learnable samples.
fn train_new_learnable_run(spec: &TrainSpec, world: usize, graphs: bool) -> LossCurve {
    USE_CUDA_GRAPHS.store(graphs, Relaxed);
    expect_equal_on_all_ranks(run_on_shared_gpu(world, |comm, ops| {
        train_learnable(&mut build_trainer_on(spec, comm, ops).start_with_random_params(), STEPS)
    }))
}

/// Creates the `train` section for the GPT-2 model of the golden files.
fn create_gpt2_spec(dropout: Option<f64>) -> TrainSpec {
    let model = ModelSpec {
        dropout,
        ..families::create_pretrained_model_spec(&families::golden_model_directory("gpt2"))
    };
    create_train_spec(model, 0, 4, 1, 7)
}

/// Creates test jobs that use the GPU in different ways. Returns name, spec and numbers of ranks of
/// each.
fn create_training_cases() -> Vec<(&'static str, TrainSpec, &'static [usize])> {
    let mut recomputed = create_llama_train_spec(2, Precision::Bf16);
    recomputed.recompute = RecomputeMode::Block;
    let mut offloaded = create_llama_train_spec(3, Precision::Bf16);
    offloaded.zero.offload = Some(OffloadTarget::Cpu);
    let no_masters = TrainSpec { master_weights: false, ..create_llama_train_spec(1, Precision::Bf16) };
    let mut muon = create_llama_train_spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let wide = ModelSpec {
        hidden_size: 16,
        intermediate_size: 32,
        num_key_value_heads: 2,
        head_dim: 8,
        ..create_small_llama_model()
    };
    let fp8 = TrainSpec { model: wide, ..create_llama_train_spec(0, Precision::Fp8) };
    let mut experts = create_moe_train_spec();
    experts.experts.expert_parallel_size = 2;
    vec![
        ("a Llama", create_llama_train_spec(0, Precision::Fp32), &[1, 2]),
        ("stage 3", create_llama_train_spec(3, Precision::Bf16), &[1, 2, 4]),
        ("recomputed", recomputed, &[2]),
        ("states on the host", offloaded, &[1, 2]),
        ("no master weights", no_masters, &[1]),
        ("Muon", muon, &[2]),
        ("fp8", fp8, &[1]),
        ("GPT-2", create_gpt2_spec(None), &[1]),
        ("GPT-2 with dropout", create_gpt2_spec(Some(0.3)), &[1, 2]),
        (
            "gemma2 with global and sliding-window layers",
            create_train_spec(
                families::create_pretrained_model_spec(&families::golden_model_directory("gemma2")),
                0,
                2,
                1,
                7,
            ),
            &[1],
        ),
        ("a mixture of experts", create_moe_train_spec(), &[1, 2]),
        ("expert parallelism", experts, &[2]),
    ]
}

#[test]
fn training_with_graphs_has_the_same_bits_and_fewer_calls() {
    if !is_own_process("cuda_graphs::training_with_graphs_has_the_same_bits_and_fewer_calls") {
        return;
    }
    for (what, spec, worlds) in create_training_cases() {
        let not_parallel = TrainSpec { experts: ExpertsSpec::default(), ..spec.clone() };
        let expected =
            train_new_learnable_run(if worlds.contains(&1) { &spec } else { &not_parallel }, 1, false);
        for world in worlds {
            assert_eq!(train_new_learnable_run(&spec, *world, true), expected, "{what}, {world} ranks");
        }
    }
    assert_lagging_streams_keep_losses();
    assert_resume_with_and_without_graphs();
    assert_graph_share_of_two_ranks();
    for (what, spec, least) in [
        ("a Llama", create_llama_train_spec(0, Precision::Fp32), 80),
        ("stage 3", create_llama_train_spec(3, Precision::Bf16), 80),
        ("GPT-2", create_gpt2_spec(None), 80),
        ("GPT-2 with dropout", create_gpt2_spec(Some(0.3)), 80),
    ] {
        assert_graphs_save_calls(what, &spec, least);
    }
}

/// Asserts that streams wait for the work of a CUDA graph, as they wait for single calls. Otherwise
/// the losses would become NaN when a stream lags.
fn assert_lagging_streams_keep_losses() {
    let mut offloaded = create_llama_train_spec(3, Precision::Bf16);
    offloaded.zero.offload = Some(OffloadTarget::Cpu);
    for (what, spec) in [
        ("stage 2", create_llama_train_spec(2, Precision::Bf16)),
        ("states on the host", offloaded),
        ("dropout", create_gpt2_spec(Some(0.3))),
    ] {
        let expected = train_new_learnable_run(&spec, 1, false);
        for lag in ["side:1000", "main:100"] {
            // SAFETY: no other thread is running.
            unsafe { std::env::set_var("EMULATED_GPU_LAG", lag) };
            assert_eq!(train_new_learnable_run(&spec, 2, true), expected, "{what}, {lag}");
        }
        // SAFETY: no other thread is running.
        unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    }
}

/// Asserts that, in training on two ranks, at least 60 % of the GPU calls are launched in CUDA
/// graphs. The share is lower than with one rank, because each collective ends a batch of calls.
fn assert_graph_share_of_two_ranks() {
    USE_CUDA_GRAPHS.store(true, Relaxed);
    for (what, spec) in [
        ("stage 0", create_llama_train_spec(0, Precision::Bf16)),
        ("stage 3", create_llama_train_spec(3, Precision::Bf16)),
    ] {
        let share = run_on_ranks(2, |hosts| {
            let cuda = open_emulated_gpu();
            let comm = Arc::new(comm::staged::StagedComm::new(hosts, cuda.clone()));
            let mut running = build_trainer_on(&spec, comm, cuda.clone()).start_with_random_params();
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

/// Asserts that a run with graphs resumes from a checkpoint of a run without graphs, and the other
/// way round.
fn assert_resume_with_and_without_graphs() {
    let spec = |stage| create_llama_train_spec(stage, Precision::Bf16);
    USE_CUDA_GRAPHS.store(false, Relaxed);
    let expected = train_on_emulated_gpu(&spec(0), 1, STEPS_BEFORE_SAVE + STEPS_AFTER_RESUME);
    for graphs in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        USE_CUDA_GRAPHS.store(graphs, Relaxed);
        train_and_save(&|n, f| run_on_shared_gpu(n, f), &spec(3), 2, dir.path(), true);
        USE_CUDA_GRAPHS.store(!graphs, Relaxed);
        let rest = resume_and_train(&|n, f| run_on_shared_gpu(n, f), &spec(1), 2, dir.path());
        assert_eq!(rest, expected[STEPS_BEFORE_SAVE as usize..], "saved with graphs: {graphs}");
    }
}

/// The functions of the CUDA driver whose calls CUDA graphs replace.
const REPLACED_CALLS: [&str; 4] =
    ["cuLaunchKernel", "cublasLtMatmul", "cuMemsetD8Async", "cuMemcpyDtoDAsync"];
/// The functions of the CUDA driver that launch and change CUDA graphs, and that allocate and free
/// memory.
const OTHER_CALLS: [&str; 4] =
    ["cuGraphLaunch", "cuMemAllocAsync", "cuMemFreeAsync", "cuGraphExecKernelNodeSetParams"];

/// The numbers of calls of CUDA driver functions in one training step.
struct CallsPerStep {
    /// Number of calls of the functions in [`REPLACED_CALLS`].
    replaceable: i64,
    /// Number of launches of graphs.
    graphs: i64,
    /// Number of changes of kernel parameters in graphs.
    updates: i64,
}

/// Asserts that graphs save at least `least_percent` of the calls that they can replace, and that
/// neither memory nor the number of graphs grows after the first steps.
fn assert_graphs_save_calls(what: &str, spec: &TrainSpec, least_percent: i64) {
    let count_calls = |graphs: bool| {
        USE_CUDA_GRAPHS.store(graphs, Relaxed);
        let cuda: Arc<Cuda> = open_emulated_gpu();
        let comm = Arc::new(comm::thread_comm::create_thread_group(1).remove(0));
        let comm = Arc::new(comm::staged::StagedComm::new(comm, cuda.clone()));
        let mut running = build_trainer_on(spec, comm, cuda.clone()).start_with_random_params();
        train_learnable(&mut running, STEPS);
        let count = || (REPLACED_CALLS.map(call_count).iter().sum::<i64>(), OTHER_CALLS.map(call_count));
        let (replaceable, others) = count();
        let (stats, memory) = (cuda.graph_stats(), cuda.query_memory_info().unwrap());
        train_learnable(&mut running, 3);
        let (replaceable_after, others_after) = count();
        if graphs {
            assert_eq!(others_after[1..3], others[1..3], "{what}: allocations and frees");
            assert_eq!(cuda.query_memory_info().unwrap(), memory, "{what}: memory grows");
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
