//! Training on an emulated card: curves beside the CPU's, the same bits for any number of ranks that share it, checkpoints that
//! go from one kind of device to the other.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
mod emulated;

use comm::{
    Comm, CommError,
    nccl::{Nccl, NcclComm},
    staged::Staged,
};
use common::*;
use contract::{job::*, preflight::Preflight};
use device::{Dtype, Storage};
use emulated::*;
use std::{sync::Arc, time::Duration};

#[test]
fn every_stage_and_any_number_of_ranks_on_one_card() {
    let cpu = fresh_run(&spec(0, Precision::Fp32), 1, 1, 3);
    let expected = run(&spec(0, Precision::Fp32), 1, 3);
    assert_near(&expected, &cpu, 1e-5, "fp32");
    for (stage, world) in [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (3, 4), (1, 4)] {
        assert_eq!(run(&spec(stage, Precision::Fp32), world, 3), expected, "stage {stage}, {world} ranks");
    }
}

#[test]
fn bf16_as_on_the_cpu_and_the_same_bits_for_any_number_of_ranks() {
    let cpu = fresh_run(&spec(0, Precision::Bf16), 1, 1, 3);
    let expected = run(&spec(0, Precision::Bf16), 1, 3);
    assert_near(&expected, &cpu, 2e-2, "bf16");
    for (stage, world) in [(0, 2), (2, 2), (3, 4)] {
        assert_eq!(run(&spec(stage, Precision::Bf16), world, 3), expected, "stage {stage}, {world} ranks");
    }
}

/// Sums differ in the last bit, and then an operand now and then rounds to another number of fp8.
#[test]
fn fp8_as_on_the_cpu_and_the_same_bits_for_any_number_of_ranks() {
    let sizes =
        ModelSpec { hidden_size: 16, intermediate_size: 32, num_key_value_heads: 2, head_dim: 8, ..llama() };
    for model in [sizes.clone(), ModelSpec { family: "gpt2".into(), ..sizes }] {
        let spec = |stage| TrainSpec { model: model.clone(), ..spec(stage, Precision::Fp8) };
        let cpu = fresh_run(&spec(0), 1, 1, 2);
        let expected = run(&spec(0), 1, 2);
        assert_near(&expected, &cpu, 1e-2, &model.family);
        let others = if model.family == "gpt2" { &[(3, 2)][..] } else { &[(0, 2), (3, 4)] };
        for &(stage, world) in others {
            assert_eq!(
                run(&spec(stage), world, 2),
                expected,
                "{}: stage {stage}, {world} ranks",
                model.family
            );
        }
    }
}

/// Families beside Llama: learned positions and biases; norms from one, caps, sliding windows; adapters with dropout; Muon.
#[test]
fn other_families_adapters_and_optimizers() {
    let folder = |name| train_spec(families::from(&families::folder(name)), 0, 2, 1, 7);
    let mut muon = spec(1, Precision::Fp32);
    (muon.optimizer.name, muon.optimizer.momentum) = (OptimizerName::Muon, 0.95);
    let mut adapters = spec(1, Precision::Fp32);
    let targets = LoraTargets::AllLinear;
    let lora = LoraSpec { from: None, rank: 2, alpha: 4.0, dropout: Some(0.3), rslora: false, targets };
    adapters.lora = Some(lora);
    let mut frozen = spec(2, Precision::Fp32);
    frozen.freeze = vec!["*q_proj*".into(), "*norm*".into(), "*embed*".into()];
    let dropped = |spec: TrainSpec| {
        let model = ModelSpec { dropout: Some(0.2), ..spec.model.clone() };
        TrainSpec { model, ..spec }
    };
    for (what, spec) in [
        ("gpt2", folder("gpt2")),
        ("gpt2 with dropout", dropped(folder("gpt2"))),
        ("gemma2 with dropout", dropped(folder("gemma2"))),
        ("gemma2", folder("gemma2")),
        ("muon", muon),
        ("adapters", adapters),
        ("frozen in part", frozen),
    ] {
        let cpu = fresh_run(&spec, 1, 1, 2);
        let one = run(&spec, 1, 2);
        assert_near(&one, &cpu, 2e-5, what);
        assert_eq!(run(&spec, 2, 2), one, "{what}: 2 ranks");
    }
}

/// Optimizer states in the host's memory or in files come to the card for their update: the same bits, also in checkpoints.
#[test]
fn states_that_lie_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let places = [Offload::Cpu, Offload::Files(dir.path().join("states"))];
    for name in [OptimizerName::Adamw, OptimizerName::Sgd, OptimizerName::Lion, OptimizerName::Muon] {
        let of = |stage, place: Option<&Offload>| {
            let mut spec = spec(stage, Precision::Fp32);
            spec.freeze = vec!["*.1.mlp.*".into()];
            spec.optimizer.name = name;
            spec.optimizer.momentum = if name == OptimizerName::Adamw { 0.0 } else { 0.9 };
            spec.zero.offload = place.cloned();
            spec
        };
        let whole = run(&of(0, None), 1, BEFORE + AFTER);
        for (i, place) in places.iter().enumerate() {
            for (stage, world) in [(0, 2), (3, 1)] {
                let found = run(&of(stage, Some(place)), world, BEFORE + AFTER);
                assert_eq!(found, whole, "{name:?}, {place:?}, stage {stage}");
            }
            let root = dir.path().join(format!("{name:?} {i}"));
            train_and_save(&|n, f| on_card(n, f), &of(3, Some(place)), 2, &root, true);
            let rest = resume_and_train(&|n, f| on_card(n, f), &of(1, Some(place)), 2, &root);
            assert_eq!(rest, whole[BEFORE as usize..], "{name:?}, {place:?}, resumed");
        }
    }
}

/// On tensor cores, and vectors of 16 bits.
#[test]
fn dropout_in_bf16() {
    let model = |rate| ModelSpec { dropout: Some(rate), ..families::from(&families::folder("gpt2")) };
    let spec = |rate| TrainSpec { precision: Precision::Bf16, ..train_spec(model(rate), 0, 2, 1, 7) };
    let cpu = fresh_run(&spec(0.3), 1, 1, 2);
    let one = run(&spec(0.3), 1, 2);
    assert_near(&one, &cpu, 2e-2, "gpt2");
    assert_eq!(run(&spec(0.3), 2, 2), one, "2 ranks");
    assert!(apart(&run(&spec(0.0), 1, 2), &cpu) > 5e-2, "dropout is seen at this tolerance");
}

#[test]
fn experts_on_their_own_ranks_and_together() {
    let mut spec = mixture();
    spec.experts = ExpertsSpec { aux_loss: Some(0.1), z_loss: 0.01, ..ExpertsSpec::default() };
    let cpu = fresh_run(&spec, 1, 1, 2);
    let one = run(&spec, 1, 2);
    assert_near(&one, &cpu, 2e-5, "a mixture");
    assert_eq!(run(&spec, 2, 2), one, "2 ranks");
    spec.experts.expert_parallel_size = 2;
    assert_eq!(run(&spec, 2, 2), one, "experts of two ranks");
    spec.recompute = Recompute::Block;
    assert_eq!(run(&spec, 4, 2), one, "two groups of two ranks");
}

#[test]
fn a_checkpoint_goes_from_one_device_to_the_other() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let of = |stage| spec(stage, precision);
        let limit = if precision == Precision::Fp32 { 1e-5 } else { 2e-2 };
        let rest = |curve: Curve| curve[BEFORE as usize..].to_vec();
        let card = rest(run(&of(0), 1, BEFORE + AFTER));
        let cpu = rest(fresh_run(&of(0), 1, 1, BEFORE + AFTER));
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| on_card(n, f), &of(3), 2, dir.path(), true);
        // the card's own numbers, bit by bit, at any stage and number of ranks
        assert_eq!(resume_and_train(&|n, f| on_card(n, f), &of(0), 1, dir.path()), card, "{precision:?}");
        assert_eq!(resume_and_train(&|n, f| on_card(n, f), &of(1), 2, dir.path()), card, "{precision:?}");
        let there = resume_and_train(&on_cpu, &of(2), 2, dir.path());
        assert_near(&there, &cpu, limit, "from the card to the CPU");
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&on_cpu, &of(1), 2, dir.path(), false);
        let back = resume_and_train(&|n, f| on_card(n, f), &of(3), 2, dir.path());
        assert_near(&back, &card, limit, "from the CPU to the card");
    }
}

/// NCCL, as far as a stand-in goes: the same bits as by way of the host.
#[test]
fn nccl_gives_the_same_bits() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        let expected = run(&spec(0, precision), 1, 2);
        for (stage, world) in [(3, 1), (0, 2), (2, 2), (3, 2)] {
            let got = run_over_nccl(&spec(stage, precision), world, 2);
            assert_eq!(got, expected, "stage {stage}, {world} ranks, {precision:?}");
        }
    }
}

/// In job.yaml.
const BF16_ALONE: &str = "bf16\n  master_weights: false";

/// Weights in bf16 alone: the rounding is the CPU's, whose curve differs by the sums before it.
#[test]
fn without_master_weights() {
    for name in [OptimizerName::Adamw, OptimizerName::Muon] {
        let of = |stage| {
            let mut spec = TrainSpec { master_weights: false, ..spec(stage, Precision::Bf16) };
            spec.freeze = vec!["*.1.mlp.*".into()];
            spec.optimizer.name = name;
            spec.optimizer.momentum = if name == OptimizerName::Adamw { 0.0 } else { 0.95 };
            spec
        };
        let cpu = fresh_run(&of(0), 1, 1, BEFORE + AFTER);
        let whole = run(&of(0), 1, BEFORE + AFTER);
        assert_near(&whole, &cpu, 2e-2, "bf16 alone");
        for (stage, world) in [(0, 2), (1, 2), (2, 2), (3, 4)] {
            let found = run(&of(stage), world, BEFORE + AFTER);
            assert_eq!(found, whole, "{name:?}: stage {stage}, {world} ranks");
        }
        assert_eq!(run_over_nccl(&of(3), 2, BEFORE + AFTER), whole, "{name:?}, NCCL");
        let mut away = of(3);
        away.zero.offload = Some(Offload::Cpu);
        assert_eq!(run(&away, 2, BEFORE + AFTER), whole, "{name:?}, states on the host");
        let dir = tempfile::tempdir().unwrap();
        train_and_save(&|n, f| on_card(n, f), &of(3), 2, dir.path(), true);
        let rest = resume_and_train(&|n, f| on_card(n, f), &of(1), 1, dir.path());
        assert_eq!(rest, whole[BEFORE as usize..], "{name:?}, resumed");
        let there = resume_and_train(&on_cpu, &of(2), 2, dir.path());
        assert_near(&there, &cpu[BEFORE as usize..].to_vec(), 2e-2, "from the card to the CPU");
    }
}

/// `launch plan` says what a GPU will hold; the workspace of products is as large as the emulated library wants it.
#[test]
fn the_plan_knows_a_gpus_memory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("corpus.txt"), "the quick brown fox ".repeat(500)).unwrap();
    for (precision, offload) in [
        ("fp32", "none"),
        ("bf16", "none"),
        ("fp8", "none"),
        ("bf16", "{optimizer: cpu}"),
        (BF16_ALONE, "none"),
    ] {
        let text = format!(
            "cluster: {{devices: cuda}}\nrun: {{workdir: {:?}}}\ntrain:\n  precision: {precision}\n  zero: {{offload: {offload}}}\n  \
             batch: {{global: 4, micro: 2}}\n  data: {{files: [corpus.txt], seq_len: 48}}\n  \
             model: {{hidden_size: 96, intermediate_size: 256, num_hidden_layers: 3}}\n",
            dir.path()
        );
        let loaded = contract::load(contract::Source::Text { name: "test".into(), text }, &[]);
        let job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
        let verdict = worker::TrainPreflight.check_job(&job, 1, 1);
        assert!(verdict.errors.is_empty(), "{:?}", verdict.errors);
        let planned = verdict.memory[0].total - device::cuda::MATMUL_WORKSPACE_BYTES as u64;
        let mut train = job.train.unwrap();
        train.model.vocab_size = 257;
        for graphs in [false, true] {
            let (cuda, comm) = (cuda(), comm::local::group(1).remove(0));
            cuda.set_graphs_enabled(graphs);
            let comm = Arc::new(Staged::new(Arc::new(comm), cuda.clone()));
            steps(&mut build_on(&train, comm, cuda.clone()).start_fresh(), 2);
            let apart = cuda.peak_memory() as f64 / planned as f64 - 1.0;
            println!("{precision}, offload {offload}, graphs {graphs}: {apart:e}");
            assert!(
                apart.abs() < 0.05,
                "{precision}, offload {offload}, graphs {graphs}: {apart:e} more than {:?}",
                verdict.memory[0]
            );
        }
    }
}

/// A peer that died leaves work on the card that never ends: an abort ends it, and says why.
#[test]
fn an_abort_frees_a_rank_that_waits_for_its_card() {
    let nccl = Nccl::open(&[stand_in::folder().to_owned()]).unwrap();
    on_ranks(2, |hosts| {
        let cuda = cuda();
        let comm = NcclComm::meet(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
        if comm.rank() == 1 {
            return;
        }
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| comm.abort("rank 1 died"));
            cuda.synchronize();
        });
        let ended = comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap_err();
        assert_eq!(ended, CommError::Aborted("rank 1 died".into()));
    });
}
