//! A whole training engine in one process: ranks are threads, samples are made up.
#![allow(dead_code)] // each test file uses a part of it
pub(crate) mod families;
pub(crate) mod golden;
pub(crate) mod llama;

use comm::{
    Comm, local,
    tcp::{Endpoint, Group, Limits, Member, Stopper},
};
use contract::job::*;
use device::{Ops, cpu::Cpu, ops::IGNORE};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{os::fd::OwnedFd, path::Path, sync::Arc};
use worker::{
    error::Result,
    model::Batch,
    save::{CheckpointSaver, RunMetadata},
    stages::{ReadyTrainer, ResolvedSpec, RunningTrainer},
    state::checkpoint_model_spec,
    storage_layout::StorageLayout,
    train::step::{SampleSource, StepOutcome, StepReport},
};

/// A tiny model whose sizes nothing divides.
pub(crate) fn odd_model() -> ModelSpec {
    ModelSpec {
        from: None,
        dropout: None,
        family: "llama".into(),
        vocab_size: 131,
        hidden_size: 42,
        intermediate_size: 57,
        num_hidden_layers: 3,
        num_attention_heads: 3,
        num_key_value_heads: 1,
        head_dim: 14,
        num_experts: None,
        num_experts_per_tok: None,
        moe_intermediate_size: None,
        max_position_embeddings: 32,
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        tie_word_embeddings: false,
        initializer_range: 0.05,
    }
}

fn source(files: Vec<String>) -> DataSource {
    DataSource {
        name: String::new(),
        weight: 1.0,
        files,
        format: Format::Text,
        field: "text".into(),
        loss_on: LossOn::All,
    }
}

pub(crate) fn train_spec(model: ModelSpec, stage: u8, global: u32, micro: u32, seq_len: u32) -> TrainSpec {
    TrainSpec {
        model,
        experts: ExpertsSpec::default(),
        data: DataSpec {
            sources: vec![source(vec!["unused".into()])],
            chat_template: None,
            tokenizer: Tokenizer::Bytes,
            seq_len,
            pack: true,
            shuffle: true,
            held_out: 0.0,
            cache: "unused".into(),
        },
        zero: ZeroSpec { stage, prefetch: 1, max_live_parameters: 0, offload: None },
        precision: Precision::Fp32,
        master_weights: true,
        loss_scale: LossScaleSpec::default(),
        batch: BatchSpec { global, micro },
        optimizer: OptimizerSpec {
            name: OptimizerName::Adamw,
            lr: 1e-3,
            betas: (0.9, 0.95),
            eps: 1e-8,
            momentum: 0.0,
            weight_decay: 0.1,
            no_decay: vec!["*norm*".into()],
            groups: Vec::new(),
        },
        schedule: ScheduleSpec { name: ScheduleName::Cosine, warmup_steps: 3, min_lr: 1e-4, decay_steps: 0 },
        clip_norm: Some(1.0),
        steps: 20,
        seed: 7,
        recompute: Recompute::None,
        deterministic: true,
        attention: Attention::default(),
        cuda_graphs: CudaGraphs::default(),
        eval: None,
        freeze: Vec::new(),
        train_only: Vec::new(),
        lora: None,
    }
}

/// Tokens and labels that depend on the sample's number alone; some labels are ignored, some samples hold two documents.
pub(crate) struct MadeUp {
    pub(crate) vocab: u32,
}

impl SampleSource for MadeUp {
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()> {
        let t = batch.t;
        for j in 0..batch.b {
            let mut s = (first + j as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            let mut next = || {
                s ^= s << 13;
                s ^= s >> 7;
                s ^= s << 17;
                (s >> 33) as u32
            };
            let cut = next() as usize % t;
            for i in 0..t {
                let at = j * t + i;
                batch.tokens[at] = next() % self.vocab;
                batch.labels[at] = if next() % 9 == 0 { IGNORE } else { next() % self.vocab };
                batch.starts[at] = if i >= cut { cut as u32 } else { 0 };
            }
        }
        Ok(())
    }
}

/// Sequences of which each token says the next one: after a few steps a model knows them.
pub(crate) struct Learnable {
    pub(crate) vocab: u32,
    /// Tokens that this divides have no label.
    pub(crate) ignored: Option<u32>,
}

impl SampleSource for Learnable {
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()> {
        for (at, token) in batch.tokens.iter_mut().enumerate() {
            let (sample, i) = (first + (at / batch.t) as u64, (at % batch.t) as u64);
            *token = ((sample * 17 + i * 5) % u64::from(self.vocab)) as u32;
        }
        for (label, token) in batch.labels.iter_mut().zip(&batch.tokens) {
            let ignored = self.ignored.is_some_and(|by| token.is_multiple_of(by));
            *label = if ignored { IGNORE } else { (token + 5) % self.vocab };
        }
        batch.starts.fill(0);
        Ok(())
    }
}

pub(crate) fn build(spec: &TrainSpec, comm: Arc<dyn Comm>, threads: usize) -> ReadyTrainer {
    build_on(spec, comm, Arc::new(Cpu::new(threads)))
}

pub(crate) fn build_on(spec: &TrainSpec, comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> ReadyTrainer {
    let spec = ResolvedSpec::new(spec, spec.model.vocab_size).unwrap();
    spec.build_model().unwrap().shard(comm, ops).unwrap().create_optimizer().unwrap().set_schedule()
}

/// Runs `f` as every rank of `world`; results by rank.
pub(crate) fn on_ranks<T: Send>(world: usize, f: impl Fn(Arc<dyn Comm>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|s| {
        let ranks: Vec<_> = local::group(world)
            .into_iter()
            .map(|c| {
                let f = &f;
                s.spawn(move || f(Arc::new(c)))
            })
            .collect();
        ranks.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// As [`on_ranks`], but rank r is on host `hosts[r]`: shared memory inside a host, TCP between them.
pub(crate) fn on_hosts<T: Send>(hosts: &[usize], f: impl Fn(Arc<dyn Comm>) -> T + Sync) -> Vec<T> {
    let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
    let endpoints: Vec<Endpoint> = hosts.iter().map(|_| Endpoint::bind(loopback).unwrap()).collect();
    let member =
        |(e, host): (&Endpoint, &usize)| Member { host: *host, addresses: vec![e.address().unwrap()] };
    let members: Vec<Member> = endpoints.iter().zip(hosts).map(member).collect();
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let memory: Vec<OwnedFd> =
        (0..hosts.len()).map(|_| memfd_create("worker-test", flags).unwrap()).collect();
    std::thread::scope(|s| {
        let ranks: Vec<_> = endpoints
            .into_iter()
            .enumerate()
            .map(|(rank, endpoint)| {
                let group =
                    Group { rank, members: members.clone(), run: "test".into(), attempt: 0, key: [1; 32] };
                let memory = memory[hosts[rank]].try_clone().unwrap();
                let f = &f;
                s.spawn(move || {
                    let stopper = Stopper::new(rank, group.members.len()).unwrap();
                    f(Arc::new(endpoint.join(&group, Some(memory), Limits::default(), &stopper).unwrap()))
                })
            })
            .collect();
        ranks.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Takes `steps` steps; losses and norms as bits.
pub(crate) fn steps(running: &mut RunningTrainer, steps: u64) -> Vec<(u64, u64)> {
    let source = MadeUp { vocab: running.train().model.vocab_size };
    (0..steps)
        .map(|_| {
            let (StepOutcome { loss, grad_norm, .. }, _) =
                running.step(&source, StepReport::default()).unwrap();
            (loss.to_bits(), grad_norm.to_bits())
        })
        .collect()
}

/// Losses and norms of a fresh run; all ranks must agree.
pub(crate) fn fresh_run(spec: &TrainSpec, world: usize, threads: usize, n: u64) -> Vec<(u64, u64)> {
    let all = on_ranks(world, |c| steps(&mut build(spec, c, threads).start_fresh(), n));
    assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
    all.into_iter().next().unwrap()
}

/// Slope of the first global batch's loss along its gradient, by differences over `step`, and the gradient's norm.
pub(crate) fn slope_and_norm(running: &mut RunningTrainer, step: f64) -> (f64, f64) {
    let source = MadeUp { vocab: running.train().model.vocab_size };
    let units = running.trainer.engine.shards.len();
    let positions = (running.trainer.global_batch() * running.trainer.batch.t as u64) as f64;
    let outcome = running.trainer.accumulate(&source, 0, StepReport::default()).unwrap();
    let scale = (positions / outcome.targets as f64) as f32;
    let gradients: Vec<Vec<f32>> = (0..units)
        .map(|u| {
            running.trainer.engine.finish_gradient(u).unwrap().host().iter().map(|g| g * scale).collect()
        })
        .collect();
    let norm = gradients.iter().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    assert!(norm > 1e-3, "{norm}");
    let mut shifted = |by: f64| {
        for (u, gradient) in gradients.iter().enumerate() {
            let unit = running.trainer.engine.shards[u].unit.clone();
            let mut at = 0;
            running.trainer.engine.with_resident(u, |params| {
                for s in unit.trained_segments(0..unit.len()) {
                    for x in &mut params.host_mut()[s.flat] {
                        *x += (by * f64::from(gradient[at]) / norm) as f32;
                        at += 1;
                    }
                }
            });
        }
        let found = running.trainer.accumulate(&source, 0, StepReport::default()).unwrap().loss;
        (0..units).for_each(|u| drop(running.trainer.engine.finish_gradient(u).unwrap()));
        found
    };
    let (up, down) = (shifted(step), shifted(-2.0 * step));
    ((up - down) / (2.0 * step), norm)
}

/// A job that trains this in `dir`.
pub(crate) fn job(train: &TrainSpec, dir: &Path, asynchronous: bool) -> JobSpec {
    let text = format!(
        "name: test\nrun: {{workdir: {dir:?}}}\ntrain: {{data: {{files: [none]}}}}\ncheckpoint: {{keep: 2, async: {asynchronous}, every: never}}\n"
    );
    let loaded = contract::load(contract::Source::Text { name: "test".into(), text }, &[]);
    let mut job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
    (job.checkpoint.parity, job.checkpoint.gather_16bit_weights_on_model_save) = (asynchronous, false);
    job.resume = ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile };
    job.train = Some(train.clone());
    job
}

/// Saves under `root`.
pub(crate) fn saver(running: &RunningTrainer, job: &JobSpec, root: &Path) -> CheckpointSaver {
    let units: Vec<_> = running.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let identity = RunMetadata {
        model: checkpoint_model_spec(running.trainer.model.as_ref(), &units, running.train(), 0),
        tokenizer: Vec::new(),
        job: job.clone(),
        data_digest: "made up".into(),
        rng_generation: 0,
        rng_decision: serde_json::Value::Null,
    };
    let layout = StorageLayout::shared(running.trainer.engine.world());
    CheckpointSaver::new(root.into(), job.checkpoint.clone(), identity, None, layout)
}
