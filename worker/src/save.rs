//! [`CheckpointSaver`]: writes the checkpoints of a run, in the background with `checkpoint.async`.
use crate::{
    checkpoint_mapping::{OwnedRange, owned_ranges, state_roles},
    consensus::exchange_values,
    error::{Error, Result, thread_start_error, unwritable_checkpoint},
    host_local,
    optim::Optimizer,
    params::ParamUnit,
    stages::RunningTrainer,
    storage_layout::StorageLayout,
    zero::engine::Engine,
};
use ckpt::{
    CkptError, Elements, ModelSpec, ParityReport, Piece, RunFacts, ShardReport, Staging, TensorRole, TextFile,
};
use contract::job::{CheckpointSpec, JobSpec};
use device::{
    Buf, Dtype, Ops, View,
    storage::{Event, panic_message},
};
use diagnostic::codes;
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    thread::JoinHandle,
    time::Instant,
};

/// The part of a checkpoint's metadata that does not change during a run.
pub struct RunMetadata {
    /// The description of the model.
    pub model: ModelSpec,
    /// The files of the tokenizer.
    pub tokenizer: Vec<TextFile>,
    /// The job with all defaults filled in.
    pub job: JobSpec,
    /// The digest of the training data.
    pub data_digest: String,
    /// How often random streams were reseeded (docs/numerics.md).
    pub rng_generation: u64,
    /// How random streams were restored when the run resumed; null if it started at step 0.
    pub rng_decision: Value,
}

/// A committed checkpoint.
pub struct SavedCheckpoint {
    /// Optimizer steps done.
    pub step: u64,
    /// The directory of the checkpoint.
    pub path: PathBuf,
    /// The size of the checkpoint in the file system.
    pub bytes: u64,
    /// The time from the first write to the commit.
    pub seconds: f64,
}

/// Writes the checkpoints of one run.
pub struct CheckpointSaver {
    root: PathBuf,
    spec: CheckpointSpec,
    metadata: RunMetadata,
    pending: Option<PendingSave>,
    last: Option<PathBuf>,
    layout: StorageLayout,
    staging: StagingMemory,
    notice: Option<String>,
}

/// Pinned host memory to which background saves copy a GPU's values. Allocated once and in the
/// background, because the driver takes seconds for many gigabytes.
enum StagingMemory {
    NotAllocated,
    Allocating(JoinHandle<Vec<Buf>>),
    Ready(Vec<Buf>),
}

/// A checkpoint that was begun and not committed.
struct PendingSave {
    facts: RunFacts,
    /// The staging directory, on the rank that leads the directory.
    staging: Option<Staging>,
    /// The path of the staging directory, into which all ranks write.
    directory: PathBuf,
    writer: ShardWriter,
    began: Instant,
}

/// The writing of this rank's shard: finished, or running on a background thread.
enum ShardWriter {
    Done(ShardResult),
    /// Returns the staging memory together with the result.
    Background(JoinHandle<(ShardResult, Vec<Buf>)>),
}

type ShardResult = std::result::Result<ShardReport, CkptError>;

/// An owned range of a tensor without its values.
struct RangeLabel {
    name: String,
    role: TensorRole,
    start_element: u64,
}

impl CheckpointSaver {
    /// A saver into the directory `root`, which ranks share according to `layout`. `last` is the
    /// checkpoint from which the run resumed.
    pub fn new(
        root: PathBuf,
        spec: CheckpointSpec,
        metadata: RunMetadata,
        last: Option<PathBuf>,
        layout: StorageLayout,
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
        }
    }

    /// Starts to allocate the staging memory for background saves of a GPU; otherwise the first
    /// save does. On a CPU each save allocates its memory.
    pub fn allocate_staging(&mut self, running: &RunningTrainer) -> Result<()> {
        let is_gpu = !running.trainer.ops.is_host();
        if is_gpu && self.saves_in_background(running) && matches!(self.staging, StagingMemory::NotAllocated)
        {
            let (sizes, ops) = (range_sizes(running), running.trainer.ops.clone());
            let allocate = move || sizes.into_iter().map(|(dtype, len)| ops.staging(dtype, len)).collect();
            self.staging = StagingMemory::Allocating(spawn_thread("checkpoint memory", allocate)?);
        }
        Ok(())
    }

    /// Waits until the staging memory is allocated.
    pub fn wait_for_staging(&mut self, running: &RunningTrainer) -> Result<()> {
        self.allocate_staging(running)?;
        if matches!(self.staging, StagingMemory::Allocating(_)) {
            self.staging = StagingMemory::Ready(self.take_staging(running)?);
        }
        Ok(())
    }

    /// Whether saves run in the background. Offloaded states are written in the foreground: a copy
    /// of them would need the memory that offloading saves.
    fn saves_in_background(&self, running: &RunningTrainer) -> bool {
        self.spec.r#async && running.train_spec().zero.offload.is_none()
    }

    /// Takes the notice about a fallback of this rank, if there is one.
    pub fn take_notice(&mut self) -> Option<String> {
        self.notice.take()
    }

    /// The staging memory for one background save: pinned, or pageable with a notice if the driver
    /// has no pinned memory.
    fn take_staging(&mut self, running: &RunningTrainer) -> Result<Vec<Buf>> {
        self.allocate_staging(running)?;
        match std::mem::replace(&mut self.staging, StagingMemory::NotAllocated) {
            StagingMemory::Ready(buffers) => Ok(buffers),
            StagingMemory::Allocating(thread) => Ok(thread.join().unwrap_or_else(|panic| {
                let why = panic_message(panic.as_ref());
                self.notice = Some(format!(
                    "saving blocks training while the GPU's memory is copied: no pinned host memory ({why})"
                ));
                pageable_buffers(running)
            })),
            StagingMemory::NotAllocated => Ok(pageable_buffers(running)),
        }
    }

    /// The newest committed checkpoint of this run.
    pub fn last_checkpoint(&self) -> Option<&Path> {
        self.last.as_deref()
    }

    /// Whether a checkpoint was begun and not finished.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Whether the background thread of this rank is still writing.
    pub fn is_writing(&self) -> bool {
        matches!(&self.pending, Some(PendingSave { writer: ShardWriter::Background(t), .. }) if !t.is_finished())
    }

    /// Begins a checkpoint of the current state; the previous one must be finished. Collective.
    pub fn begin(&mut self, running: &mut RunningTrainer) -> Result<()> {
        let began = Instant::now();
        let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
        let facts = self.run_facts(running);
        let (rank, leader) = (engine.rank(), self.layout.directory_leader(engine.rank()));
        let bytes = self.layout.bytes_share(rank, self.total_bytes(engine, optimizer));
        let staging = (rank == leader).then(|| Staging::begin(&self.root, facts.step, bytes));
        let staging = staging.transpose().map_err(unwritable_checkpoint);
        let path = staging.as_ref().map(|s| s.as_ref().map(|s| s.path().to_path_buf())).map_err(Clone::clone);
        let paths = exchange_values(engine.queue(), path)?;
        let path = paths
            .into_iter()
            .nth(leader)
            .flatten()
            .ok_or_else(|| writer_error(format!("rank {leader} reported no staging directory")))?;
        let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.params(u)).collect();
        let ranges = owned_ranges(engine, optimizer, &guards);
        let ops = running.trainer.ops.as_ref();
        let rank = engine.rank() as u32;
        let world = engine.world() as u32;
        let directory = path.clone();
        let labels: Vec<RangeLabel> = ranges.iter().map(RangeLabel::new).collect();
        let values: Vec<View> = ranges.iter().map(|o| o.values).collect();
        let (writer, copied) = if self.saves_in_background(running) {
            let copies = ops.download(&values, self.take_staging(running)?);
            let copied = copies.done_event();
            let write = move || {
                let buffers = copies.wait();
                (ckpt::write_shard(&path, rank, world, &pieces(&labels, &buffers)), buffers)
            };
            (ShardWriter::Background(spawn_thread("checkpoint", write)?), copied)
        } else {
            let written = write_in_foreground(ops, &path, rank, world, &labels, &values);
            (0..engine.shards.len()).for_each(|u| optimizer.evict_states(u));
            (ShardWriter::Done(written), Event::default())
        };
        drop(guards);
        running.trainer.delay_update_until(copied);
        let staging = staging?;
        self.pending = Some(PendingSave { facts, staging, directory, writer, began });
        Ok(())
    }

    /// Number of bytes that all ranks together write for one checkpoint, including parity.
    fn total_bytes(&self, engine: &Engine, optimizer: &Optimizer) -> u64 {
        let tensors = checkpoint_bytes(engine, optimizer);
        let parity = if self.spec.parity { tensors.div_ceil(engine.world() as u64) } else { 0 };
        tensors.saturating_add(parity)
    }

    /// Waits for the writers, commits, and removes old checkpoints. `None` if no checkpoint was
    /// begun. Collective.
    pub fn finish(&mut self, running: &RunningTrainer) -> Result<Option<SavedCheckpoint>> {
        let Some(PendingSave { facts, staging, directory, writer, began }) = self.pending.take() else {
            return Ok(None);
        };
        let queue = running.trainer.engine.queue();
        let report = match writer {
            ShardWriter::Done(written) => written.map_err(unwritable_checkpoint),
            ShardWriter::Background(thread) => match thread.join() {
                Ok((written, buffers)) => {
                    if !running.trainer.ops.is_host() {
                        self.staging = StagingMemory::Ready(buffers);
                    }
                    written.map_err(unwritable_checkpoint)
                }
                Err(panic) => {
                    let why = panic_message(panic.as_ref());
                    Err(writer_error(format!("the checkpoint writer stopped: {why}")))
                }
            },
        };
        let reports = exchange_values(queue, report)?;
        let step = facts.step;
        if !self.layout.is_shared() {
            let (path, bytes) = host_local::commit_on_all_hosts(
                queue,
                &self.layout,
                &self.root,
                staging,
                facts,
                reports,
                self.spec.keep,
            )?;
            self.last = Some(path.clone());
            return Ok(Some(SavedCheckpoint { step, path, bytes, seconds: began.elapsed().as_secs_f64() }));
        }
        let parity = self.write_parity_stripe(running, &directory, &reports)?;
        let committed = match staging {
            Some(s) => self.commit_and_prune(s, facts, reports, parity).map(Some),
            None => Ok(None),
        };
        let (path, bytes) = exchange_values(queue, committed)?
            .into_iter()
            .flatten()
            .next()
            .ok_or_else(|| writer_error("rank 0 reported no committed checkpoint".into()))?;
        self.last = Some(path.clone());
        Ok(Some(SavedCheckpoint { step, path, bytes, seconds: began.elapsed().as_secs_f64() }))
    }

    /// Writes this rank's stripe of the parity and returns the reports of all; `None` without
    /// `checkpoint.parity`. The shards of all ranks must be complete, because each rank reads one
    /// Nth of the checkpoint. Collective.
    fn write_parity_stripe(
        &self,
        running: &RunningTrainer,
        directory: &Path,
        shards: &[ShardReport],
    ) -> Result<Option<Vec<ParityReport>>> {
        if !self.spec.parity {
            return Ok(None);
        }
        let engine = &running.trainer.engine;
        let (rank, world) = (engine.rank() as u32, engine.world() as u32);
        let mine = ckpt::write_parity(directory, rank, world, shards).map_err(unwritable_checkpoint);
        exchange_values(engine.queue(), mine).map(Some)
    }

    /// Commits a checkpoint in a directory that all ranks share, and removes old checkpoints.
    /// Returns its path and bytes.
    fn commit_and_prune(
        &self,
        staging: Staging,
        facts: RunFacts,
        reports: Vec<ShardReport>,
        parity: Option<Vec<ParityReport>>,
    ) -> Result<(PathBuf, u64)> {
        let done = match parity {
            Some(parity) => ckpt::commit_parity(staging, facts, reports, parity),
            None => ckpt::commit(staging, facts, reports),
        };
        let done = done.map_err(unwritable_checkpoint)?;
        if self.spec.keep > 0 {
            ckpt::prune(&self.root, self.spec.keep).map_err(unwritable_checkpoint)?;
        }
        Ok((done.path, done.bytes))
    }

    /// The facts about the run that the manifest of a checkpoint stores.
    fn run_facts(&self, running: &RunningTrainer) -> RunFacts {
        let (metadata, trainer, train) = (&self.metadata, &running.trainer, running.train_spec());
        let units: Vec<_> = trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
        RunFacts {
            step: running.position.step,
            world: trainer.engine.world() as u32,
            stage: trainer.engine.policy.stage,
            run_seed: train.seed,
            tokens: running.position.tokens,
            program: format!("launch {}", env!("CARGO_PKG_VERSION")),
            cursor: cursor_json(running, &metadata.data_digest, &units),
            // The runtime's random numbers are functions of seed and logical ids, without state.
            rng: json!({
                "engine": "philox4x32-10, stateless",
                "generation": metadata.rng_generation,
                "resumed": metadata.rng_decision,
            }),
            groups: json!(trainer.optimizer.groups(&units)),
            model: metadata.model.clone(),
            tokenizer: metadata.tokenizer.clone(),
            job: json!(metadata.job),
        }
    }
}

/// The cursor that a checkpoint stores: the position of the run, `late` if some parameters have had
/// fewer updates than others, and `loss_scale` with fp16.
fn cursor_json(running: &RunningTrainer, data: &str, units: &[ParamUnit]) -> Value {
    let mut cursor = json!({ "at": running.position, "data": data });
    let step_lag = running.trainer.optimizer.step_lag(units);
    if !step_lag.is_empty() {
        cursor["late"] = json!(step_lag);
    }
    if let Some(state) = running.trainer.loss_scale.state() {
        cursor["loss_scale"] = json!(state);
    }
    cursor
}

impl RangeLabel {
    fn new(o: &OwnedRange) -> Self {
        RangeLabel { name: o.name.into(), role: o.role, start_element: o.start_element }
    }

    /// The range with its values, in the form in which shards are written.
    fn piece<'a>(&'a self, data: View<'a>) -> Piece<'a> {
        let data = match data.dtype() {
            Dtype::F32 => Elements::F32(data.host()),
            Dtype::Bf16 => Elements::Bf16(data.half_bits()),
            Dtype::F16 => unreachable!("with fp16, checkpoints hold fp32 master weights"),
        };
        Piece { name: &self.name, role: self.role, start_element: self.start_element, data }
    }
}

/// Element type and length of each range that this rank owns.
fn range_sizes(running: &RunningTrainer) -> Vec<(Dtype, usize)> {
    let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
    let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.params(u)).collect();
    owned_ranges(engine, optimizer, &guards).iter().map(|o| (o.values.dtype(), o.values.len())).collect()
}

/// Ordinary host memory for copies of the owned ranges.
fn pageable_buffers(running: &RunningTrainer) -> Vec<Buf> {
    range_sizes(running).into_iter().map(|(dtype, len)| Buf::zeroed_as(dtype, len)).collect()
}

/// Pairs each label with its values.
fn pieces<'a>(labels: &'a [RangeLabel], values: &'a [Buf]) -> Vec<Piece<'a>> {
    labels.iter().zip(values).map(|(label, values)| label.piece(values.view())).collect()
}

fn spawn_thread<T: Send + 'static>(
    name: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name.into()).spawn(f).map_err(|e| thread_start_error(name, &e))
}

/// Writes a shard in the foreground, directly from host memory or through a host copy of device
/// memory.
fn write_in_foreground(
    ops: &dyn Ops,
    path: &Path,
    rank: u32,
    world: u32,
    labels: &[RangeLabel],
    values: &[View],
) -> ShardResult {
    let host_copy = |v: &View| if v.is_on_host() { Buf::default() } else { ops.host_copy(*v) };
    let copies: Vec<Buf> = values.iter().map(host_copy).collect();
    let pieces =
        labels.iter().zip(values).zip(&copies).map(|((label, values), copy)| {
            label.piece(if values.is_on_host() { *values } else { copy.view() })
        });
    let pieces: Vec<Piece> = pieces.collect();
    ckpt::write_shard(path, rank, world, &pieces)
}

/// Number of bytes of all tensors of a checkpoint.
pub fn checkpoint_bytes(engine: &Engine, optimizer: &Optimizer) -> u64 {
    let states = state_roles(optimizer.spec()).len() as u64;
    let weight = engine.param_dtypes().updated.size() as u64;
    let unit_bytes = |u: &ParamUnit| weight * u.len() as u64 + 4 * states * u.trained_len() as u64;
    engine.shards.iter().map(|s| unit_bytes(&s.unit)).sum()
}

fn writer_error(message: String) -> Error {
    Error::new(codes::training::CHECKPOINT_WRITER_FAILED, message)
}
