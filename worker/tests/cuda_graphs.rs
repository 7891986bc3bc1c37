//! Training with CUDA graphs on an emulated card: the bits of training without them, by fewer calls. One test: whether cards use graphs
//! counts for the whole process, and so do its calls.
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

/// Enough for graphs of everything that comes again, and some steps by them.
const STEPS: u64 = 6;

/// Steps whose lists differ and are equally long.
fn learn(running: &mut RunningTrainer, n: u64) -> Curve {
    let source = Learnable { vocab: running.train().model.vocab_size, ignored: None };
    let step = |_| {
        let outcome = running.step(&source, StepReport::default()).unwrap().0;
        (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
    };
    (0..n).map(step).collect()
}

fn learned(spec: &TrainSpec, world: usize, graphs: bool) -> Curve {
    GRAPHS.store(graphs, Relaxed);
    let all = on_card(world, |comm, ops| learn(&mut build_on(spec, comm, ops).start_fresh(), STEPS));
    assert!(all.iter().all(|curve| *curve == all[0]), "ranks disagree");
    all.into_iter().next().unwrap()
}

fn gpt2(dropout: Option<f64>) -> TrainSpec {
    let model = ModelSpec { dropout, ..families::from(&families::folder("gpt2")) };
    train_spec(model, 0, 4, 1, 7)
}

/// What is trained in different ways, and by how many ranks.
fn cases() -> Vec<(&'static str, TrainSpec, &'static [usize])> {
    let mut recomputed = spec(2, Precision::Bf16);
    recomputed.recompute = Recompute::Block;
    let mut away = spec(3, Precision::Bf16);
    away.zero.offload = Some(Offload::Cpu);
    let alone = TrainSpec { master_weights: false, ..spec(1, Precision::Bf16) };
    let mut muon = spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let wide =
        ModelSpec { hidden_size: 16, intermediate_size: 32, num_key_value_heads: 2, head_dim: 8, ..llama() };
    let fp8 = TrainSpec { model: wide, ..spec(0, Precision::Fp8) };
    let mut experts = mixture();
    experts.experts.expert_parallel_size = 2;
    vec![
        ("a Llama", spec(0, Precision::Fp32), &[1, 2]),
        ("stage 3", spec(3, Precision::Bf16), &[1, 2, 4]),
        ("recomputed", recomputed, &[2]),
        ("states on the host", away, &[1, 2]),
        ("no master weights", alone, &[1]),
        ("Muon", muon, &[2]),
        ("fp8", fp8, &[1]),
        ("GPT-2", gpt2(None), &[1]),
        ("GPT-2 with dropout", gpt2(Some(0.3)), &[1, 2]),
        (
            "gemma2, two kinds of layers",
            train_spec(families::from(&families::folder("gemma2")), 0, 2, 1, 7),
            &[1],
        ),
        ("a mixture", mixture(), &[1, 2]),
        ("experts on their own ranks", experts, &[2]),
    ]
}

#[test]
fn training_by_graphs_is_the_same_by_fewer_calls() {
    for (what, spec, worlds) in cases() {
        let alone = TrainSpec { experts: ExpertsSpec::default(), ..spec.clone() };
        let expected = learned(if worlds.contains(&1) { &spec } else { &alone }, 1, false);
        for world in worlds {
            assert_eq!(learned(&spec, *world, true), expected, "{what}, {world} ranks");
        }
    }
    streams_that_lag_change_nothing();
    checkpoints_go_from_the_one_to_the_other();
    ranks_go_by_graphs();
    for (what, spec, least) in [
        ("a Llama", spec(0, Precision::Fp32), 80),
        ("stage 3", spec(3, Precision::Bf16), 80),
        ("GPT-2", gpt2(None), 80),
        ("GPT-2 with dropout", gpt2(Some(0.3)), 80),
    ] {
        a_step_goes_by_graphs(what, &spec, least);
    }
}

/// What doesn't wait for a graph as it would for its calls finds numbers that are none.
fn streams_that_lag_change_nothing() {
    let mut away = spec(3, Precision::Bf16);
    away.zero.offload = Some(Offload::Cpu);
    for (what, spec) in
        [("stage 2", spec(2, Precision::Bf16)), ("states on the host", away), ("dropout", gpt2(Some(0.3)))]
    {
        let expected = learned(&spec, 1, false);
        for lag in ["side:1000", "main:100"] {
            // SAFETY: no other thread runs.
            unsafe { std::env::set_var("EMULATED_GPU_LAG", lag) };
            assert_eq!(learned(&spec, 2, true), expected, "{what}, {lag}");
        }
        // SAFETY: as above.
        unsafe { std::env::remove_var("EMULATED_GPU_LAG") };
    }
}

/// Collectives end pieces: of two ranks fewer calls go by graphs.
fn ranks_go_by_graphs() {
    GRAPHS.store(true, Relaxed);
    for (what, spec) in [("stage 0", spec(0, Precision::Bf16)), ("stage 3", spec(3, Precision::Bf16))] {
        let share = on_ranks(2, |hosts| {
            let cuda = cuda();
            let comm = Arc::new(comm::staged::Staged::new(hosts, cuda.clone()));
            let mut running = build_on(&spec, comm, cuda.clone()).start_fresh();
            learn(&mut running, STEPS);
            let before = cuda.graph_stats();
            learn(&mut running, 3);
            let now = cuda.graph_stats();
            let (by_graphs, plain) = (now.calls - before.calls, now.direct_calls - before.direct_calls);
            println!("{what}, 2 ranks: {before:?} {now:?}");
            100 * by_graphs / (by_graphs + plain)
        });
        assert!(share.iter().all(|share| *share >= 60), "{what}: {share:?} %");
    }
}

fn checkpoints_go_from_the_one_to_the_other() {
    let of = |stage| spec(stage, Precision::Bf16);
    GRAPHS.store(false, Relaxed);
    let whole = run(&of(0), 1, BEFORE + AFTER);
    for graphs in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        GRAPHS.store(graphs, Relaxed);
        train_and_save(&|n, f| on_card(n, f), &of(3), 2, dir.path(), true);
        GRAPHS.store(!graphs, Relaxed);
        let rest = resume_and_train(&|n, f| on_card(n, f), &of(1), 2, dir.path());
        assert_eq!(rest, whole[BEFORE as usize..], "saved with graphs: {graphs}");
    }
}

/// Calls that put work on the card, and others.
const WORK: [&str; 4] = ["cuLaunchKernel", "cublasLtMatmul", "cuMemsetD8Async", "cuMemcpyDtoDAsync"];
const OTHER: [&str; 4] =
    ["cuGraphLaunch", "cuMemAllocAsync", "cuMemFreeAsync", "cuGraphExecKernelNodeSetParams"];

/// Calls of a step that graphs saved, in percent, once they are made; and nothing grows any more.
fn a_step_goes_by_graphs(what: &str, spec: &TrainSpec, least: i64) {
    let counted = |graphs: bool| {
        GRAPHS.store(graphs, Relaxed);
        let cuda: Arc<Cuda> = cuda();
        let comm = Arc::new(comm::local::group(1).remove(0));
        let comm = Arc::new(comm::staged::Staged::new(comm, cuda.clone()));
        let mut running = build_on(spec, comm, cuda.clone()).start_fresh();
        learn(&mut running, STEPS);
        let asked = || {
            (
                WORK.map(calls).iter().sum::<i64>(),
                OTHER.map(calls),
                cuda.graph_stats(),
                cuda.memory_info().unwrap(),
            )
        };
        let (work, [launches, ..], before, memory) = asked();
        let [got, gave, changed] = [OTHER[1], OTHER[2], OTHER[3]].map(calls);
        learn(&mut running, 3);
        let (now, others, after, left) = asked();
        if graphs {
            assert_eq!((others[1], others[2], left), (got, gave, memory), "{what}: memory is asked for");
            assert_eq!(after.cached_graphs, before.cached_graphs, "{what}: graphs pile up");
        }
        ((now - work) / 3, (others[0] - launches) / 3, (others[3] - changed) / 3)
    };
    let ((plain, none, _), (rest, graphs, changed)) = (counted(false), counted(true));
    println!(
        "{what}: a step is {plain} calls without graphs, {rest} calls and {graphs} graphs with {changed} changes with them"
    );
    assert_eq!(none, 0);
    assert!(100 * (plain - rest) >= least * plain, "{what}: {rest} of {plain} calls, {graphs} graphs");
}
