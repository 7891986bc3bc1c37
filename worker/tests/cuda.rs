//! Training on an emulated card: curves beside the CPU's, the same bits for any number of ranks that share it, checkpoints that
//! go from one kind of device to the other.
#![allow(clippy::unwrap_used)] // a test that panics has failed
#[path = "../device/tests/card/mod.rs"]
mod card;
mod common;
#[path = "../comm/tests/nccl/stand_in.rs"]
mod stand_in;

use comm::{
    Comm, CommError,
    nccl::{Nccl, NcclComm},
    staged::Staged,
};
use common::*;
use contract::{job::*, judge::TrainJudge};
use device::{Cpu, Cuda, Dtype, Ops, Storage, cuda::Places};
use std::{path::Path, sync::Arc, time::Duration};
use worker::{
    resume::{Place, resume},
    storage::Layout,
};

/// Losses and norms of some steps, as bits.
type Curve = Vec<(u64, u64)>;

fn cuda() -> Arc<Cuda> {
    let places = Places { job: vec![card::folder().to_owned()], ..Places::default() };
    Arc::new(Cuda::open(&places, 0, None).unwrap())
}

/// Small enough for a card that is emulated.
fn llama() -> ModelSpec {
    ModelSpec {
        vocab_size: 37,
        hidden_size: 12,
        intermediate_size: 19,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        head_dim: 6,
        ..odd_model()
    }
}

fn spec(stage: u8, precision: Precision) -> TrainSpec {
    TrainSpec { precision, ..train_spec(llama(), stage, 4, 1, 7) }
}

/// Runs `f` on ranks that share the card.
fn on_card<T: Send>(world: usize, f: impl Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync) -> Vec<T> {
    on_ranks(world, |c| {
        let cuda = cuda();
        f(Arc::new(Staged::new(c, cuda.clone())), cuda)
    })
}

fn run(spec: &TrainSpec, world: usize, n: u64) -> Curve {
    let all = on_card(world, |comm, ops| steps(&mut build_on(spec, comm, ops).fresh(), n));
    assert!(all.iter().all(|curve| *curve == all[0]), "ranks disagree");
    all.into_iter().next().unwrap()
}

/// The largest difference of two curves, relative.
fn apart(a: &Curve, b: &Curve) -> f64 {
    assert_eq!(a.len(), b.len());
    let values = |c: &Curve| c.iter().flat_map(|&(l, n)| [l, n]).map(f64::from_bits).collect::<Vec<_>>();
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

#[track_caller]
fn assert_near(card: &Curve, cpu: &Curve, limit: f64, what: &str) {
    let apart = apart(card, cpu);
    assert!(apart <= limit, "{what}: {apart:e} apart");
}

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
    let model = ModelSpec {
        family: "qwen3_moe".into(),
        num_experts: Some(4),
        num_experts_per_tok: Some(2),
        moe_intermediate_size: Some(9),
        ..llama()
    };
    let mut spec = train_spec(model, 3, 4, 1, 7);
    spec.experts = ExpertsSpec { aux_loss: Some(0.1), z_loss: 0.01, ..ExpertsSpec::default() };
    let cpu = fresh_run(&spec, 1, 1, 2);
    let one = run(&spec, 1, 2);
    assert_near(&one, &cpu, 2e-5, "a mixture");
    assert_eq!(run(&spec, 2, 2), one, "2 ranks");
    spec.experts.parallel = 2;
    assert_eq!(run(&spec, 2, 2), one, "experts of two ranks");
    spec.recompute = Recompute::Block;
    assert_eq!(run(&spec, 4, 2), one, "two groups of two ranks");
}

/// What ranks on one kind of device do, as [`on_card`].
type On<'a, T> = &'a dyn Fn(usize, &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync)) -> Vec<T>;

fn on_cpu<T: Send>(world: usize, f: &(dyn Fn(Arc<dyn Comm>, Arc<dyn Ops>) -> T + Sync)) -> Vec<T> {
    on_ranks(world, |c| f(c, Arc::new(Cpu::new(1))))
}

const BEFORE: u64 = 2;
const AFTER: u64 = 2;

fn train_and_save(on: On<()>, spec: &TrainSpec, world: usize, root: &Path, asynchronous: bool) {
    let job = job(spec, root, asynchronous);
    on(world, &|comm, ops| {
        let mut running = build_on(spec, comm, ops).fresh();
        steps(&mut running, BEFORE);
        let mut saver = saver(&running, &job, root);
        saver.begin(&running).unwrap();
        if asynchronous {
            // What is written is the state at `begin`, whatever happens meanwhile.
            steps(&mut running, 1);
        }
        assert_eq!(saver.finish(&running).unwrap().unwrap().step, BEFORE);
    });
}

fn resume_and_train(on: On<Curve>, spec: &TrainSpec, world: usize, root: &Path) -> Curve {
    let job = job(spec, root, false);
    let all = on(world, &|comm, ops| {
        let mut bound = build_on(spec, comm, ops);
        let place = Place { root, workdir: root, layout: &Layout::shared(world) };
        let resumed = resume(&mut bound, &job, &place, "made up", &mut |_| Ok(())).unwrap();
        steps(&mut bound.resumed(resumed.unwrap().cursor), AFTER)
    });
    all.into_iter().next().unwrap()
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
    let nccl = Nccl::open(&[stand_in::folder().to_owned()]).unwrap();
    let run_over_nccl = |spec: &TrainSpec, world| {
        let all = on_ranks(world, |hosts| {
            let cuda = cuda();
            let comm = NcclComm::meet(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
            steps(&mut build_on(spec, Arc::new(comm), cuda).fresh(), 2)
        });
        assert!(all.iter().all(|curve| *curve == all[0]), "ranks disagree");
        all.into_iter().next().unwrap()
    };
    for precision in [Precision::Fp32, Precision::Bf16] {
        let expected = run(&spec(0, precision), 1, 2);
        for (stage, world) in [(3, 1), (0, 2), (2, 2), (3, 2)] {
            let got = run_over_nccl(&spec(stage, precision), world);
            assert_eq!(got, expected, "stage {stage}, {world} ranks, {precision:?}");
        }
    }
}

/// `launch plan` says what a GPU will hold; the workspace of products is as large as the emulated library wants it.
#[test]
fn the_plan_knows_a_gpus_memory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("corpus.txt"), "the quick brown fox ".repeat(500)).unwrap();
    for precision in ["fp32", "bf16"] {
        let text = format!(
            "cluster: {{devices: cuda}}\nrun: {{workdir: {:?}}}\ntrain:\n  precision: {precision}\n  \
             batch: {{global: 4, micro: 2}}\n  data: {{files: [corpus.txt], seq_len: 48}}\n  \
             model: {{hidden_size: 96, intermediate_size: 256, num_hidden_layers: 3}}\n",
            dir.path()
        );
        let loaded = contract::load(contract::Source::Text { name: "test".into(), text }, &[]);
        let job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
        let verdict = worker::Judge.judge(&job, 1, 1);
        assert!(verdict.problems.is_empty(), "{:?}", verdict.problems);
        let planned = verdict.memory[0].total - device::cuda::WORKSPACE as u64;
        let mut train = job.train.unwrap();
        train.model.vocab_size = 257;
        let (cuda, comm) = (cuda(), comm::local::group(1).remove(0));
        let comm = Arc::new(Staged::new(Arc::new(comm), cuda.clone()));
        steps(&mut build_on(&train, comm, cuda.clone()).fresh(), 2);
        let apart = cuda.peak_memory() as f64 / planned as f64 - 1.0;
        assert!(apart.abs() < 0.05, "{precision}: {apart:e} more than {:?}", verdict.memory[0]);
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
            cuda.wait();
        });
        let ended = comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap_err();
        assert_eq!(ended, CommError::Aborted("rank 1 died".into()));
    });
}
