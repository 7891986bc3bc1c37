//! Helpers that train whole models in one process: every rank is a thread, and samples are
//! synthetic.
#![allow(dead_code, reason = "each test file uses a part of this module")]
pub(crate) mod families;
pub(crate) mod golden;
pub(crate) mod llama;
mod rank_threads;

use comm::{
    Comm,
    tcp::{AbortHandle, GroupMember, GroupSpec, RankListener, TcpLimits},
    thread_comm,
};
use device::{Ops, cpu::Cpu, ops::IGNORE_LABEL};
use jobspec::*;
use nix::sys::memfd::{MFdFlags, memfd_create};
use protocol::{control::FromWorker, event::Event};
use rank_threads::run_rank_threads;
use std::{os::fd::OwnedFd, path::Path, sync::Arc};
use worker::{
    checkpoint::{
        resume::{CheckpointLocations, resume_from_checkpoint},
        save::{CheckpointSaver, RunMetadata},
        storage_topology::StorageTopology,
    },
    error::Result,
    model::MicroBatch,
    train::{
        running_trainer::RunningTrainer,
        step::{RankStepReport, SampleSource, StepOutcome},
    },
    trainer_stages::{ResolvedSpec, UninitializedTrainer},
};

/// The digest of the synthetic training data, which tests store in checkpoints and resume with.
pub(crate) const SYNTHETIC_DATA_DIGEST: &str = "synthetic";

/// Creates the `train.model` section of a dense model with these sizes: vocabulary, hidden size,
/// size of the MLP, layers, heads, heads of keys.
pub(crate) fn create_sized_model(family: &str, sizes: [u32; 6], tied: bool, positions: u32) -> ModelSpec {
    ModelSpec {
        family: family.into(),
        vocab_size: sizes[0],
        hidden_size: sizes[1],
        intermediate_size: sizes[2],
        num_hidden_layers: sizes[3],
        num_attention_heads: sizes[4],
        num_key_value_heads: sizes[5],
        head_dim: sizes[1] / sizes[4],
        max_position_embeddings: positions,
        tie_word_embeddings: tied,
        ..create_odd_sized_model()
    }
}

/// Creates the `train.model` section of a tiny Llama. The sizes are no multiples of any number of
/// ranks or vector width.
pub(crate) fn create_odd_sized_model() -> ModelSpec {
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

/// Creates a data source that no test reads. A `train` section must have one.
fn create_unused_data_source(files: Vec<String>) -> DataSource {
    DataSource {
        name: String::new(),
        weight: 1.0,
        files,
        format: RecordFormat::Text,
        field: "text".into(),
        loss_on: LossTargets::All,
    }
}

/// Creates the `train` section for `model` at ZeRO stage `stage`: AdamW in fp32, `global` samples
/// of `seq_len` tokens per step in micro-batches of `micro`.
pub(crate) fn create_train_spec(
    model: ModelSpec,
    stage: u8,
    global: u32,
    micro: u32,
    seq_len: u32,
) -> TrainSpec {
    TrainSpec {
        model,
        experts: ExpertsSpec::default(),
        data: DataSpec {
            sources: vec![create_unused_data_source(vec!["unused".into()])],
            chat_template: None,
            tokenizer: TokenizerSpec::Bytes,
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
            beta1: None,
            beta2_decay: -0.8,
            clip_threshold: 1.0,
            weight_decay: 0.1,
            no_decay: vec!["*norm*".into()],
            groups: Vec::new(),
        },
        schedule: ScheduleSpec { name: ScheduleName::Cosine, warmup_steps: 3, min_lr: 1e-4, decay_steps: 0 },
        clip_norm: Some(1.0),
        steps: 20,
        seed: 7,
        recompute: RecomputeMode::None,
        deterministic: true,
        attention: AttentionKernels::default(),
        cuda_graphs: CudaGraphMode::default(),
        eval: None,
        freeze: Vec::new(),
        train_only: Vec::new(),
        lora: None,
    }
}

/// A source of pseudo-random tokens and labels, which depend only on the index of the sample. Some
/// labels are ignored, and most samples have two documents.
pub(crate) struct SyntheticSamples {
    /// The size of the vocabulary.
    pub(crate) vocab: u32,
}

impl SampleSource for SyntheticSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()> {
        let t = batch.seq_len;
        for j in 0..batch.sequences {
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
                batch.labels[at] = if next() % 9 == 0 { IGNORE_LABEL } else { next() % self.vocab };
                batch.starts[at] = if i >= cut { cut as u32 } else { 0 };
            }
        }
        Ok(())
    }
}

/// A source of sequences in which each token determines the next one, so that the loss falls within
/// a few steps.
pub(crate) struct LearnableSamples {
    /// The size of the vocabulary.
    pub(crate) vocab: u32,
    /// Multiples of this token have no label.
    pub(crate) ignored: Option<u32>,
}

impl SampleSource for LearnableSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()> {
        for (at, token) in batch.tokens.iter_mut().enumerate() {
            let (sample, i) = (first + (at / batch.seq_len) as u64, (at % batch.seq_len) as u64);
            *token = ((sample * 17 + i * 5) % u64::from(self.vocab)) as u32;
        }
        for (label, token) in batch.labels.iter_mut().zip(&batch.tokens) {
            let ignored = self.ignored.is_some_and(|by| token.is_multiple_of(by));
            *label = if ignored { IGNORE_LABEL } else { (token + 5) % self.vocab };
        }
        batch.starts.fill(0);
        Ok(())
    }
}

/// Builds the trainer of one rank on the CPU with `threads` threads. Weights are not initialized.
pub(crate) fn build_trainer(spec: &TrainSpec, comm: Arc<dyn Comm>, threads: usize) -> UninitializedTrainer {
    build_trainer_on(spec, comm, Arc::new(Cpu::new(threads)))
}

/// Builds the trainer of one rank on the device of `ops`. Weights are not initialized.
pub(crate) fn build_trainer_on(
    spec: &TrainSpec,
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
) -> UninitializedTrainer {
    let spec = ResolvedSpec::new(spec, spec.model.vocab_size).unwrap();
    spec.build_model().unwrap().shard_model(comm, ops).unwrap().into_uninitialized_trainer().unwrap()
}

/// Creates the communicator of a run of one rank.
pub(crate) fn create_single_rank_comm() -> Arc<dyn Comm> {
    Arc::new(thread_comm::create_thread_group(1).remove(0))
}

/// Runs `f` on a thread for each of `world` ranks, which communicate in shared memory. Returns the
/// results in rank order.
pub(crate) fn run_on_ranks<T: Send>(world: usize, f: impl Fn(Arc<dyn Comm>) -> T + Sync) -> Vec<T> {
    let f = &f;
    let ranks = thread_comm::create_thread_group(world).into_iter().map(|c| move || f(Arc::new(c)));
    run_rank_threads(ranks.collect())
}

/// Runs `f` on a thread for each rank. Rank r is on host `hosts[r]`. Ranks communicate in shared
/// memory within a host and through TCP between hosts. Returns the results in rank order.
pub(crate) fn run_on_hosts<T: Send>(hosts: &[usize], f: impl Fn(Arc<dyn Comm>) -> T + Sync) -> Vec<T> {
    let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
    let endpoints: Vec<RankListener> = hosts.iter().map(|_| RankListener::bind(loopback).unwrap()).collect();
    let member = |(e, host): (&RankListener, &usize)| GroupMember {
        host: *host,
        addresses: vec![e.address().unwrap()],
    };
    let members: Vec<GroupMember> = endpoints.iter().zip(hosts).map(member).collect();
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let memory: Vec<OwnedFd> =
        (0..hosts.len()).map(|_| memfd_create("worker-test", flags).unwrap()).collect();
    let f = &f;
    let run_rank = |(rank, endpoint): (usize, RankListener)| {
        let group =
            GroupSpec { rank, members: members.clone(), run: "test".into(), attempt: 0, key: [1; 32] };
        let memory = memory[hosts[rank]].try_clone().unwrap();
        move || {
            let stopper = AbortHandle::new(rank, group.members.len()).unwrap();
            f(Arc::new(endpoint.join(&group, Some(memory), TcpLimits::default(), &stopper).unwrap()))
        }
    };
    run_rank_threads(endpoints.into_iter().enumerate().map(run_rank).collect())
}

/// Trains for `steps` steps on synthetic samples. Returns the bits of each step's loss and gradient
/// norm.
pub(crate) fn train_steps(running: &mut RunningTrainer, steps: u64) -> Vec<(u64, u64)> {
    let source = SyntheticSamples { vocab: running.train_spec().model.vocab_size };
    (0..steps)
        .map(|_| {
            let (StepOutcome { loss, grad_norm, .. }, _) =
                running.run_step(&source, RankStepReport::default()).unwrap();
            (loss.to_bits(), grad_norm.to_bits())
        })
        .collect()
}

/// Trains a new run of `world` ranks on the CPU for `steps` steps. Asserts that all ranks compute
/// equal losses. Returns the bits of each step's loss and gradient norm.
pub(crate) fn train_new_run(spec: &TrainSpec, world: usize, threads: usize, steps: u64) -> Vec<(u64, u64)> {
    expect_equal_on_all_ranks(run_on_ranks(world, |c| {
        train_steps(&mut build_trainer(spec, c, threads).start_with_random_params(), steps)
    }))
}

/// Asserts that all ranks returned equal results, and returns the result.
#[track_caller]
pub(crate) fn expect_equal_on_all_ranks<T: PartialEq>(results: Vec<T>) -> T {
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "ranks disagree");
    results.into_iter().next().unwrap()
}

/// Measures the slope of the first global batch's loss along the gradient, and the norm of the
/// gradient. Slope and norm are equal if the gradient is correct. The slope is the central
/// difference over parameters moved by `step`. The parameters of `running` stay changed.
pub(crate) fn measure_slope_and_gradient_norm(running: &mut RunningTrainer, step: f64) -> (f64, f64) {
    let source = SyntheticSamples { vocab: running.train_spec().model.vocab_size };
    let units = running.trainer.engine.shards.len();
    let positions = (running.trainer.global_batch_size() * running.trainer.batch.seq_len as u64) as f64;
    let outcome =
        running.trainer.compute_global_batch_gradients(&source, 0, RankStepReport::default()).unwrap();
    let scale = (positions / outcome.targets as f64) as f32;
    let gradients: Vec<Vec<f32>> = (0..units)
        .map(|u| {
            running
                .trainer
                .engine
                .finish_gradient(u)
                .unwrap()
                .owned
                .host_slice()
                .iter()
                .map(|g| g * scale)
                .collect()
        })
        .collect();
    let norm = gradients.iter().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    assert!(norm > 1e-3, "{norm}");
    let mut shifted = |by: f64| {
        for (u, gradient) in gradients.iter().enumerate() {
            let unit = running.trainer.engine.shards[u].unit.clone();
            let mut at = 0;
            running.trainer.engine.with_resident_params(u, |params| {
                for s in unit.list_trained_segments(0..unit.len()) {
                    for x in &mut params.host_slice_mut()[s.flat] {
                        *x += (by * f64::from(gradient[at]) / norm) as f32;
                        at += 1;
                    }
                }
            });
        }
        let found = running
            .trainer
            .compute_global_batch_gradients(&source, 0, RankStepReport::default())
            .unwrap()
            .loss;
        (0..units).for_each(|u| drop(running.trainer.engine.finish_gradient(u).unwrap()));
        found
    };
    let (up, down) = (shifted(step), shifted(-2.0 * step));
    ((up - down) / (2.0 * step), norm)
}

/// Creates a job that trains `train` with checkpoints in `dir`. Checkpoints are written in the
/// background and with parity if `asynchronous` is set.
pub(crate) fn create_job_spec(train: &TrainSpec, dir: &Path, asynchronous: bool) -> JobSpec {
    let text = format!(
        "name: test\nrun: {{workdir: {dir:?}}}\ntrain: {{data: {{files: [none]}}}}\ncheckpoint: {{keep: 2, async: {asynchronous}, every: never}}\n"
    );
    let loaded = jobspec::load_job(jobspec::JobSource::Text { name: "test".into(), text }, &[]);
    let mut job = loaded.unwrap_or_else(|problems| panic!("{problems:?}")).0;
    (job.checkpoint.parity, job.checkpoint.gather_16bit_weights_on_model_save) = (asynchronous, false);
    job.resume = ResumeSpec { from: ResumeFrom::Auto, rng: RngPolicy::Reconcile };
    job.train = Some(train.clone());
    job
}

/// Creates the checkpoint saver of one rank for directory `root`, which all ranks share.
pub(crate) fn create_checkpoint_saver(
    running: &RunningTrainer,
    job: &JobSpec,
    root: &Path,
) -> CheckpointSaver {
    let (trainer, train, digest) = (&running.trainer, running.train_spec(), SYNTHETIC_DATA_DIGEST.into());
    let identity = RunMetadata::new(trainer, train, job, digest, (Vec::new(), 0));
    let layout = StorageTopology::for_shared_directory(running.trainer.engine.world());
    CheckpointSaver::new(root.into(), job.checkpoint.clone(), identity, None, layout)
}

/// Saves a checkpoint of the run under `root` and waits until the checkpoint is complete.
/// Collective: every rank of the group must call it.
pub(crate) fn save_checkpoint(running: &mut RunningTrainer, spec: &TrainSpec, root: &Path) {
    let mut saver = create_checkpoint_saver(running, &create_job_spec(spec, root, false), root);
    saver.begin_save(running).unwrap();
    saver.finish_and_commit_save(running).unwrap();
}

/// Resumes from the newest checkpoint under `root`. Returns the resumed run and the messages of the
/// notices. Collective: every rank of the group must call it.
pub(crate) fn resume_newest_checkpoint(
    spec: &TrainSpec,
    comm: Arc<dyn Comm>,
    root: &Path,
) -> (RunningTrainer, Vec<String>) {
    try_resume_newest_checkpoint(spec, comm, root).unwrap()
}

/// Resumes from the newest checkpoint under `root`, or returns the error of a checkpoint that does
/// not fit the job. Collective: every rank of the group must call it.
pub(crate) fn try_resume_newest_checkpoint(
    spec: &TrainSpec,
    comm: Arc<dyn Comm>,
    root: &Path,
) -> worker::error::Result<(RunningTrainer, Vec<String>)> {
    try_resume_newest_checkpoint_on(spec, comm, root, Arc::new(Cpu::new(1)))
}

/// Resumes from the newest checkpoint under `root` on the device of `ops`, or returns the error of
/// a checkpoint that does not fit the job. Collective: every rank of the group must call it.
pub(crate) fn try_resume_newest_checkpoint_on(
    spec: &TrainSpec,
    comm: Arc<dyn Comm>,
    root: &Path,
    ops: Arc<dyn Ops>,
) -> worker::error::Result<(RunningTrainer, Vec<String>)> {
    let (job, world) = (create_job_spec(spec, root, false), comm.world_size());
    let mut ready = build_trainer_on(spec, comm, ops);
    let dirs = CheckpointLocations {
        root,
        workdir: root,
        layout: &StorageTopology::for_shared_directory(world),
        memory: None,
    };
    let mut notices = Vec::new();
    let resumed =
        resume_from_checkpoint(&mut ready, &job, &dirs, None, SYNTHETIC_DATA_DIGEST, &mut |event| {
            match event {
                FromWorker::Event(Event::Notice { message, .. }) => notices.push(message),
                FromWorker::Event(Event::Resume { .. }) => (),
                other => panic!("{other:?}"),
            }
            Ok(())
        });
    let cursor = resumed?.expect("a checkpoint to resume from").cursor;
    Ok((ready.start_at_position(cursor), notices))
}

/// Asserts that the notices of a resume equal the snapshot `name`. `root` is the directory of the
/// checkpoints.
pub(crate) fn assert_notices_match_snapshot(name: &str, notices: &[String], root: &Path) {
    let text = notices.join("\n").replace(&root.display().to_string(), "[root]");
    insta::with_settings!({ snapshot_path => "../snapshots", prepend_module_to_snapshot => false, omit_expression => true, filters => [(r"\(id [0-9a-f]+\)", "(id [id])")] }, {
        insta::assert_snapshot!(name, text);
    });
}
