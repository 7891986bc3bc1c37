//! [`CheckpointSaver`]: writes the checkpoints of a run, in the background if `checkpoint.async` is
//! set.
use crate::{
    checkpoint::{
        host_local,
        memory_copies::{MemoryCopier, RecentStepEvents, StateCopyCost},
        shard_write::{
            BackgroundWrite, RangeLabel, ShardWrite, join_thread, spawn_named_thread,
            write_shard_in_foreground,
        },
        storage_topology::StorageTopology,
        tensor_mapping::{build_checkpoint_model_spec, list_owned_ranges},
    },
    consensus::{all_gather_values, is_any_true},
    error::{Error, Result, to_unwritable_checkpoint_error},
    optim::{Optimizer, count_state_elements, list_state_roles},
    params::ParamUnit,
    train::{running_trainer::RunningTrainer, step::Trainer},
    zero::engine::ZeroEngine,
};
use ckpt::{ModelSpec, ParityFileReport, RunFacts, ShardReport, StagingDir, TextFile};
use device::{
    Buf, Dtype, View,
    storage::{DeviceError, Event},
};
use diagnostic::codes;
use jobspec::{CheckpointSpec, JobSpec, TrainSpec};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    thread::JoinHandle,
    time::Instant,
};

/// Key under which a checkpoint's JSON with the progress of training names the batch job (such as a
/// Slurm job) that wrote the checkpoint.
pub(crate) const BATCH_JOB_KEY: &str = "batch_job";

/// Facts about the run that all its checkpoints contain: model, tokenizer files, job, and digest of
/// the training data.
pub struct RunMetadata {
    /// The description of the model.
    pub model: ModelSpec,
    /// The files of the tokenizer.
    pub tokenizer: Vec<TextFile>,
    /// The job with all defaults filled in.
    pub job: JobSpec,
    /// The id of the batch job that started the run; `None` if no scheduler did.
    pub batch_job: Option<String>,
    /// The digest of the training data.
    pub data_digest: String,
    /// The number of times that RNG streams were reseeded (docs/numerics.md).
    pub rng_generation: u64,
    /// The decision about how RNG streams were restored when the run resumed; null if the run
    /// started at step 0.
    pub rng_decision: Value,
}

impl RunMetadata {
    /// Collects the facts about a run that all its checkpoints contain, such as the model and the
    /// job. Facts about a batch job or a resume are added later. `tokenizer` are the files of the
    /// tokenizer, and `eod` is its end-of-document token.
    pub fn new(
        trainer: &Trainer,
        train: &TrainSpec,
        job: &JobSpec,
        data_digest: String,
        (tokenizer, eod): (Vec<TextFile>, u32),
    ) -> Self {
        let units = trainer.engine.clone_units();
        RunMetadata {
            model: build_checkpoint_model_spec(&trainer.model, &units, train, eod),
            tokenizer,
            job: job.clone(),
            batch_job: None,
            data_digest,
            rng_generation: 0,
            rng_decision: Value::Null,
        }
    }
}

/// A checkpoint that was saved and committed: its step, path, size in bytes, and the duration of
/// the save in seconds.
pub struct SavedCheckpoint {
    /// The number of optimizer steps done.
    pub step: u64,
    /// The directory of the checkpoint.
    pub path: PathBuf,
    /// The size of the checkpoint in the file system, in bytes.
    pub bytes: u64,
    /// The time from the first write to the commit, in seconds.
    pub seconds: f64,
}

/// Saves the checkpoints of a run on one rank: writes the shard of this rank and, together with all
/// ranks, commits the checkpoint.
pub struct CheckpointSaver {
    root: PathBuf,
    spec: CheckpointSpec,
    metadata: RunMetadata,
    pending: Option<PendingSave>,
    last: Option<PathBuf>,
    layout: StorageTopology,
    staging: StagingMemory,
    notice: Option<String>,
    memory: Option<MemoryCopier>,
    /// The events that copies in memory contain.
    step_events: RecentStepEvents,
    /// Whether the run resumed from memory and has not saved a checkpoint since.
    is_resumed_from_memory: bool,
}

/// State of the pinned host memory (staging memory) into which a GPU's values are copied for
/// background saves: not allocated, being allocated, or ready.
///
/// The memory is allocated once and in the background, because the driver takes seconds for many
/// gigabytes.
enum StagingMemory {
    NotAllocated,
    Allocating(JoinHandle<std::result::Result<Vec<Buf>, DeviceError>>),
    Ready(Vec<Buf>),
}

/// The save of one checkpoint that this rank has started and that all ranks together have not
/// committed yet.
struct PendingSave {
    facts: RunFacts,
    /// The write of this rank's shard. It is dropped, and ends, before the staging directory.
    writer: ShardWrite,
    /// The staging directory, if this rank commits and removes checkpoints for the ranks that share
    /// the directory (as directory leader); `None` on other ranks.
    staging: Option<StagingDir>,
    /// The path of the staging directory, into which all ranks write.
    directory: PathBuf,
    began: Instant,
}

impl CheckpointSaver {
    /// Creates the object with which one rank saves checkpoints in the directory `root`; `layout`
    /// states which ranks share this directory. `last` is the checkpoint from which the run
    /// resumed.
    pub fn new(
        root: PathBuf,
        spec: CheckpointSpec,
        metadata: RunMetadata,
        last: Option<PathBuf>,
        layout: StorageTopology,
    ) -> Self {
        CheckpointSaver {
            root,
            spec,
            metadata,
            pending: None,
            last,
            layout,
            staging: StagingMemory::NotAllocated,
            notice: None,
            memory: None,
            step_events: RecentStepEvents::default(),
            is_resumed_from_memory: false,
        }
    }

    /// Adds the object `memory`, if any, with which this saver copies the training state to the
    /// memory of hosts after certain steps. `is_resumed` states whether the run resumed from such
    /// copies, and `step_events` are the events that these contained.
    pub fn with_memory_copies(
        self,
        memory: Option<MemoryCopier>,
        is_resumed: bool,
        step_events: RecentStepEvents,
    ) -> Self {
        CheckpointSaver { memory, is_resumed_from_memory: is_resumed, step_events, ..self }
    }

    /// Stores the event that reports the latest completed step, so that memory copies of the
    /// training state contain it. Rank 0 must call this function before the copy of the step.
    pub fn record_step_event(&mut self, event: &protocol::event::Event) {
        if self.memory.is_some() {
            self.step_events.record(event);
        }
    }

    /// Copies the training state of this rank to the memory of hosts if the job requires a copy
    /// after the current step. Returns the cost of the copy. Collective: every rank must call it.
    pub fn copy_to_memory_if_due(&mut self, running: &mut RunningTrainer) -> Result<Option<StateCopyCost>> {
        let Some(mut memory) = self.memory.take_if(|m| m.is_due(running.position.step)) else {
            return Ok(None);
        };
        let facts = (running.trainer.engine.rank() == 0).then(|| {
            let mut facts = self.build_run_facts(running, Vec::new());
            self.step_events.add_to_cursor(&mut facts.cursor);
            facts
        });
        let cost = memory.copy_state(running, facts);
        self.memory = Some(memory);
        cost.map(Some)
    }

    /// Returns whether this process has already copied its training state to the memory of hosts.
    pub fn has_copied_to_memory(&self) -> bool {
        self.memory.as_ref().is_some_and(MemoryCopier::has_copied)
    }

    /// Returns whether the run resumed from copies in the memory of hosts and has saved no
    /// checkpoint to disk since the resume.
    pub fn is_unsaved_since_memory_resume(&self) -> bool {
        self.is_resumed_from_memory
    }

    /// Returns whether a run that ends before completing a step must save a checkpoint, because no
    /// checkpoint on disk has its training state. This is the case after a resume from memory, or
    /// if the run has no checkpoint.
    pub fn must_save_without_new_step(&self) -> bool {
        self.is_resumed_from_memory || self.last.is_none()
    }

    /// Starts a thread that allocates pinned host memory (staging memory), into which background
    /// saves copy a GPU's weights and optimizer states. Without this call, the first save allocates
    /// the memory.
    ///
    /// On a CPU each save allocates memory separately.
    pub fn start_staging_allocation(&mut self, running: &RunningTrainer) -> Result<()> {
        let is_gpu = !running.trainer.ops.is_host();
        if is_gpu && self.saves_in_background(running) && matches!(self.staging, StagingMemory::NotAllocated)
        {
            let (sizes, ops) = (list_range_sizes(running), running.trainer.ops.clone());
            let allocate =
                move || sizes.into_iter().map(|(dtype, len)| ops.try_alloc_staging(dtype, len)).collect();
            self.staging = StagingMemory::Allocating(spawn_named_thread("checkpoint memory", allocate)?);
        }
        Ok(())
    }

    /// Blocks until the pinned host memory (staging memory), into which background saves copy a
    /// GPU's weights and optimizer states, is allocated. Starts the allocation if necessary.
    pub fn wait_for_staging(&mut self, running: &RunningTrainer) -> Result<()> {
        self.start_staging_allocation(running)?;
        if matches!(self.staging, StagingMemory::Allocating(_)) {
            self.staging = StagingMemory::Ready(self.take_staging(running)?);
        }
        Ok(())
    }

    /// Returns whether a background thread of each rank writes the checkpoints of this run while
    /// training continues.
    ///
    /// Offloaded states are written in the foreground, because a copy of them would need the memory
    /// that offloading saves.
    fn saves_in_background(&self, running: &RunningTrainer) -> bool {
        self.spec.r#async && running.train_spec().zero.offload.is_none()
    }

    /// Returns, only once, the message for the user that no pinned host memory for background saves
    /// could be allocated. Returns `None` if there is no notice or it was already taken.
    pub fn take_staging_notice(&mut self) -> Option<String> {
        self.notice.take()
    }

    /// Takes out of this saver the host buffers to which a background save copies the GPU's values,
    /// and returns the buffers. If the driver has no pinned memory, returns pageable memory and
    /// records a notice.
    fn take_staging(&mut self, running: &RunningTrainer) -> Result<Vec<Buf>> {
        self.start_staging_allocation(running)?;
        match std::mem::replace(&mut self.staging, StagingMemory::NotAllocated) {
            StagingMemory::Ready(buffers) => Ok(buffers),
            StagingMemory::Allocating(thread) => Ok(join_thread(thread).unwrap_or_else(|why| {
                self.notice = Some(format!(
                    "saving blocks training while the GPU's memory is copied: no pinned host memory ({why})"
                ));
                allocate_pageable_buffers(running)
            })),
            StagingMemory::NotAllocated => Ok(allocate_pageable_buffers(running)),
        }
    }

    /// Returns the path of the newest committed checkpoint of this run, or of the checkpoint from
    /// which the run resumed if it has saved none.
    pub fn last_checkpoint(&self) -> Option<&Path> {
        self.last.as_deref()
    }

    /// Returns whether the save of a checkpoint has begun and is not finished yet.
    pub fn has_pending_save(&self) -> bool {
        self.pending.is_some()
    }

    /// Returns whether the background thread of this rank is still writing this rank's shard of a
    /// checkpoint.
    pub fn is_writing_in_background(&self) -> bool {
        self.find_background_write().is_some_and(BackgroundWrite::is_running)
    }

    /// Returns the running background thread that writes this rank's shard of the current
    /// checkpoint, or `None`.
    fn find_background_write(&self) -> Option<&BackgroundWrite> {
        match &self.pending.as_ref()?.writer {
            ShardWrite::Background(write) => Some(write),
            ShardWrite::Done(_) => None,
        }
    }

    /// Cancels the running background save if an older checkpoint exists and any rank has written
    /// less than half of its shard. The save that follows is then not delayed. Returns the step of
    /// the cancelled save. Collective: every rank must call it.
    pub fn cancel_mostly_unwritten_save(&mut self, running: &RunningTrainer) -> Result<Option<u64>> {
        let Some(write) = self.find_background_write().filter(|_| self.last.is_some()) else {
            return Ok(None);
        };
        let queue = running.trainer.engine.queue();
        if !is_any_true(queue, write.is_mostly_unwritten())? {
            return Ok(None);
        }
        write.cancel();
        let Some(PendingSave { facts, staging, writer: ShardWrite::Background(write), .. }) =
            self.pending.take()
        else {
            return Ok(None);
        };
        // The result is not needed; an error of the storage recurs in the next save.
        if let Ok((_, buffers)) = write.finish() {
            self.keep_staging_for_next_save(running, buffers);
        }
        is_any_true(queue, false)?; // every rank has stopped writing before the directory is removed
        drop(staging);
        Ok(Some(facts.step))
    }

    /// Stores the pinned host buffers of a finished background save for the next save of a GPU's
    /// values; on CPUs, the buffers are freed.
    fn keep_staging_for_next_save(&mut self, running: &RunningTrainer, buffers: Vec<Buf>) {
        if !running.trainer.ops.is_host() {
            self.staging = StagingMemory::Ready(buffers);
        }
    }

    /// Starts to save a checkpoint of the current training state; if `checkpoint.async` is set, a
    /// background thread writes this rank's shard. The previous checkpoint must be finished.
    /// Collective: every rank must call it.
    pub fn begin_save(&mut self, running: &mut RunningTrainer) -> Result<()> {
        let began = Instant::now();
        let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
        let facts = self.build_run_facts(running, self.metadata.tokenizer.clone());
        let (rank, leader) = (engine.rank(), self.layout.find_directory_leader(engine.rank()));
        let bytes =
            self.layout.compute_directory_bytes(rank, self.count_bytes_with_parity(engine, optimizer));
        let staging = (rank == leader).then(|| StagingDir::create(&self.root, facts.step, bytes));
        let staging = staging.transpose().map_err(to_unwritable_checkpoint_error);
        let path = staging.as_ref().map(|s| s.as_ref().map(|s| s.path().to_path_buf())).map_err(Clone::clone);
        let paths = all_gather_values(engine.queue(), path)?;
        let path = paths
            .into_iter()
            .nth(leader)
            .flatten()
            .ok_or_else(|| build_writer_error(format!("rank {leader} reported no staging directory")))?;
        let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.lock_resident_params(u)).collect();
        let ranges = list_owned_ranges(engine, optimizer, &guards);
        let ops = running.trainer.ops.as_ref();
        let rank = engine.rank() as u32;
        let world = engine.world() as u32;
        let directory = path.clone();
        let labels: Vec<RangeLabel> = ranges.iter().map(RangeLabel::new).collect();
        let values: Vec<View> = ranges.iter().map(|o| o.values).collect();
        let (writer, copied) = if self.saves_in_background(running) {
            let copies = ops.start_download(&values, self.take_staging(running)?);
            let copied = copies.done_event();
            let bytes = values.iter().map(|v| (v.len() * v.dtype().size()) as u64).sum();
            let write = BackgroundWrite::start(copies, labels, bytes, path, (rank, world))?;
            (ShardWrite::Background(write), copied)
        } else {
            let written = write_shard_in_foreground(ops, &path, rank, world, &labels, &values)?;
            (0..engine.shards.len()).for_each(|u| optimizer.evict_states(u));
            (ShardWrite::Done(written), Event::default())
        };
        drop(guards);
        running.trainer.delay_update_until(copied);
        let staging = staging?;
        self.pending = Some(PendingSave { facts, staging, directory, writer, began });
        Ok(())
    }

    /// Computes the number of bytes that all ranks together write for one checkpoint, including
    /// parity (XOR redundancy) if the job requests it.
    fn count_bytes_with_parity(&self, engine: &ZeroEngine, optimizer: &Optimizer) -> u64 {
        let tensors = count_checkpoint_bytes(engine, optimizer);
        let parity = if self.spec.parity { tensors.div_ceil(engine.world() as u64) } else { 0 };
        tensors.saturating_add(parity)
    }

    /// Waits until all ranks have written their shards, commits the checkpoint, and removes old
    /// checkpoints. Returns `None` if no checkpoint was begun.
    ///
    /// Collective: every rank must call it.
    pub fn finish_and_commit_save(&mut self, running: &RunningTrainer) -> Result<Option<SavedCheckpoint>> {
        let Some(PendingSave { facts, staging, directory, writer, began }) = self.pending.take() else {
            return Ok(None);
        };
        let queue = running.trainer.engine.queue();
        let report = match writer {
            ShardWrite::Done(written) => written.map_err(to_unwritable_checkpoint_error),
            ShardWrite::Background(write) => match write.finish() {
                Ok((Some(written), buffers)) => {
                    self.keep_staging_for_next_save(running, buffers);
                    written.map_err(to_unwritable_checkpoint_error)
                }
                Ok((None, _)) => Err(build_writer_error("the checkpoint writer was cancelled".into())),
                Err(why) => Err(build_writer_error(format!("the checkpoint writer stopped: {why}"))),
            },
        };
        let reports = all_gather_values(queue, report)?;
        let (step, layout, keep) = (facts.step, &self.layout, self.spec.keep);
        let (path, bytes) = if layout.is_shared() {
            let parity = self.write_parity_stripe(running, &directory, &reports)?;
            let committed = staging.map(|s| self.commit_and_prune(s, facts, reports, parity)).transpose();
            let committed = all_gather_values(queue, committed)?.into_iter().flatten().next();
            committed.ok_or_else(|| build_writer_error("rank 0 reported no committed checkpoint".into()))?
        } else {
            host_local::commit_on_all_hosts(queue, layout, &self.root, staging, facts, reports, keep)?
        };
        self.last = Some(path.clone());
        self.is_resumed_from_memory = false;
        Ok(Some(SavedCheckpoint { step, path, bytes, seconds: began.elapsed().as_secs_f64() }))
    }

    /// Writes this rank's part of the checkpoint's parity (XOR redundancy for rebuilding a lost
    /// shard), and returns descriptions of the parity files of all ranks.
    ///
    /// The shards of all ranks must be complete, because each rank reads one Nth of the checkpoint.
    /// Collective: every rank must call it.
    fn write_parity_stripe(
        &self,
        running: &RunningTrainer,
        directory: &Path,
        shards: &[ShardReport],
    ) -> Result<Option<Vec<ParityFileReport>>> {
        if !self.spec.parity {
            return Ok(None);
        }
        let engine = &running.trainer.engine;
        let (rank, world) = (engine.rank() as u32, engine.world() as u32);
        let mine = ckpt::write_parity(directory, rank, world, shards).map_err(to_unwritable_checkpoint_error);
        all_gather_values(engine.queue(), mine).map(Some)
    }

    /// Commits a checkpoint in the checkpoint directory that all ranks share, and removes old
    /// checkpoints from this directory. Returns the path and the number of bytes of the checkpoint.
    fn commit_and_prune(
        &self,
        staging: StagingDir,
        facts: RunFacts,
        reports: Vec<ShardReport>,
        parity: Option<Vec<ParityFileReport>>,
    ) -> Result<(PathBuf, u64)> {
        let done = match parity {
            Some(parity) => ckpt::commit_save_with_parity(staging, facts, reports, parity),
            None => ckpt::commit_save(staging, facts, reports),
        };
        let done = done.map_err(to_unwritable_checkpoint_error)?;
        if self.spec.keep > 0 {
            ckpt::prune_checkpoints(&self.root, self.spec.keep).map_err(to_unwritable_checkpoint_error)?;
        }
        Ok((done.path, done.bytes))
    }

    /// Collects the facts about the run (job, model, tokenizer files, progress) that are stored in
    /// the manifest (table of contents) of a checkpoint.
    fn build_run_facts(&self, running: &RunningTrainer, tokenizer: Vec<TextFile>) -> RunFacts {
        let (metadata, trainer, train) = (&self.metadata, &running.trainer, running.train_spec());
        let units = trainer.engine.clone_units();
        RunFacts {
            step: running.position.step,
            world: trainer.engine.world() as u32,
            stage: trainer.engine.policy.stage,
            run_seed: train.seed,
            tokens: running.position.tokens,
            program: format!("launch {}", env!("CARGO_PKG_VERSION")),
            cursor: build_cursor_json(running, metadata, &units),
            // The runtime's random numbers are functions of seed and logical ids, without state.
            rng: json!({
                "engine": "philox4x32-10, stateless",
                "generation": metadata.rng_generation,
                "resumed": metadata.rng_decision,
            }),
            groups: json!(trainer.optimizer.list_param_groups(&units)),
            model: metadata.model.clone(),
            tokenizer,
            job: json!(metadata.job),
        }
    }
}

/// Builds the JSON with the progress of training (step, samples, tokens and further values) that a
/// checkpoint stores.
fn build_cursor_json(running: &RunningTrainer, metadata: &RunMetadata, units: &[ParamUnit]) -> Value {
    let mut cursor = json!({ "at": running.position, "data": metadata.data_digest });
    if let Some(id) = &metadata.batch_job {
        cursor[BATCH_JOB_KEY] = json!(id);
    }
    let step_lag = running.trainer.optimizer.collect_step_lags(units);
    if !step_lag.is_empty() {
        cursor["late"] = json!(step_lag);
    }
    if let Some(state) = running.trainer.loss_scale.checkpoint_state() {
        cursor["loss_scale"] = json!(state);
    }
    cursor
}

/// Lists the element type and the length of each range of a weight or optimizer state that this
/// rank owns and saves.
fn list_range_sizes(running: &RunningTrainer) -> Vec<(Dtype, usize)> {
    let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
    let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.lock_resident_params(u)).collect();
    list_owned_ranges(engine, optimizer, &guards).iter().map(|o| (o.values.dtype(), o.values.len())).collect()
}

/// Allocates ordinary (not pinned) host buffers for a background save, one for each range of a
/// weight or optimizer state that this rank owns.
fn allocate_pageable_buffers(running: &RunningTrainer) -> Vec<Buf> {
    list_range_sizes(running).into_iter().map(|(dtype, len)| Buf::zeroed_as(dtype, len)).collect()
}

/// Returns the total size in bytes of all weights and optimizer states in a checkpoint, over all
/// ranks.
pub fn count_checkpoint_bytes(engine: &ZeroEngine, optimizer: &Optimizer) -> u64 {
    let roles = list_state_roles(optimizer.spec());
    let weight = engine.param_dtypes().updated.size() as u64;
    let unit_bytes =
        |u: &ParamUnit| weight * u.len() as u64 + 4 * count_state_elements(&roles, u, 0..u.len()) as u64;
    engine.shards.iter().map(|s| unit_bytes(&s.unit)).sum()
}

/// Builds the error which reports that this rank could not write its part of a checkpoint.
fn build_writer_error(message: String) -> Error {
    Error::new(codes::training::CHECKPOINT_WRITER_FAILED, message)
}
