//! Saving while a run goes on: the steps of a save that all ranks take together, and the background writer.
use crate::{
    agree::agree,
    error::{Error, Result},
    optim::Optimizer,
    params::Unit,
    host_local,
    stages::Running,
    state::{Owned, owned, state_roles},
    storage::Layout,
    zero::engine::Engine,
};
use ckpt::{
    CkptError, Elements, Facts, ModelCard, ParityReport, Piece, Role, ShardReport, Staging, TextFile,
};
use contract::job::{CheckpointSpec, JobSpec};
use device::{
    Buf, Dtype, Ops, View,
    storage::{Event, said},
};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    thread::JoinHandle,
    time::Instant,
};

/// What checkpoints say beside tensors and the cursor; the same for the whole run.
pub struct Identity {
    /// The model.
    pub model: ModelCard,
    /// Tokenizer files.
    pub tokenizer: Vec<TextFile>,
    /// The job as it runs.
    pub job: JobSpec,
    /// Digest of the training data.
    pub data_digest: String,
    /// Streams reseeded so far (docs/numerics.md).
    pub rng_generation: u64,
    /// What was decided about random streams when the run began; null when it began anew.
    pub rng_decision: Value,
}

/// A completed checkpoint.
pub struct Saved {
    /// Optimizer steps done.
    pub step: u64,
    /// The checkpoint.
    pub path: PathBuf,
    /// On disk.
    pub bytes: u64,
    /// From the first write to the commit.
    pub seconds: f64,
}

/// Writes checkpoints of one run.
pub struct Saver {
    root: PathBuf,
    spec: CheckpointSpec,
    identity: Identity,
    under_way: Option<UnderWay>,
    last: Option<PathBuf>,
    layout: Layout,
    rooms: Rooms,
    notice: Option<String>,
}

/// Memory of the host that a background save of a GPU's copies to: made once, beside the run, since the driver takes seconds for
/// many gigabytes.
enum Rooms {
    NotAsked,
    Coming(JoinHandle<Vec<Buf>>),
    Ready(Vec<Buf>),
}

struct UnderWay {
    facts: Facts,
    /// Of the rank that keeps the directory.
    staging: Option<Staging>,
    /// Where all ranks write.
    directory: PathBuf,
    writer: Writer,
    began: Instant,
}

enum Writer {
    Done(Written),
    /// Gives the memory back with the report.
    Background(JoinHandle<(Written, Vec<Buf>)>),
}

type Written = std::result::Result<ShardReport, CkptError>;

/// What a rank owns of a tensor, beside its values.
struct Label {
    name: String,
    role: Role,
    start_element: u64,
}

impl Saver {
    /// `root` is the directory of checkpoints; `last` the one resumed from; `layout` says which ranks share `root`.
    pub fn new(
        root: PathBuf,
        spec: CheckpointSpec,
        identity: Identity,
        last: Option<PathBuf>,
        layout: Layout,
    ) -> Self {
        Saver { root, spec, identity, under_way: None, last, layout, rooms: Rooms::NotAsked, notice: None }
    }

    /// Makes room on the host for background saves, in the background. Without this the first save does. CPUs have it for the
    /// length of each save alone.
    pub fn prepare(&mut self, running: &Running) -> Result<()> {
        let on_gpu = !running.trainer.ops.is_host();
        if on_gpu && self.in_background(running) && matches!(self.rooms, Rooms::NotAsked) {
            let (sizes, ops) = (sizes(running), running.trainer.ops.clone());
            let make = move || sizes.into_iter().map(|(dtype, len)| ops.staging(dtype, len)).collect();
            self.rooms = Rooms::Coming(thread("checkpoint memory", make)?);
        }
        Ok(())
    }

    /// Waits until that room is there.
    pub fn wait_for_room(&mut self, running: &Running) -> Result<()> {
        self.prepare(running)?;
        if matches!(self.rooms, Rooms::Coming(_)) {
            self.rooms = Rooms::Ready(self.rooms(running)?);
        }
        Ok(())
    }

    /// A copy in memory of what has no place in memory would be no help.
    fn in_background(&self, running: &Running) -> bool {
        self.spec.r#async && running.train().zero.offload.is_none()
    }

    /// Says once what is had in another way than asked for.
    pub fn notice(&mut self) -> Option<String> {
        self.notice.take()
    }

    fn rooms(&mut self, running: &Running) -> Result<Vec<Buf>> {
        self.prepare(running)?;
        match std::mem::replace(&mut self.rooms, Rooms::NotAsked) {
            Rooms::Ready(rooms) => Ok(rooms),
            Rooms::Coming(rooms) => Ok(rooms.join().unwrap_or_else(|panic| {
                let why = said(panic.as_ref());
                self.notice = Some(format!("saves wait until the GPU's memory is copied: {why}"));
                ordinary(running)
            })),
            Rooms::NotAsked => Ok(ordinary(running)),
        }
    }

    /// The newest checkpoint of this run that is complete.
    pub fn last(&self) -> Option<&Path> {
        self.last.as_deref()
    }

    /// Is a checkpoint under way?
    pub fn pending(&self) -> bool {
        self.under_way.is_some()
    }

    /// Is this rank's background writer still at work?
    pub fn writing(&self) -> bool {
        matches!(&self.under_way, Some(UnderWay { writer: Writer::Background(t), .. }) if !t.is_finished())
    }

    /// Starts a checkpoint of the state as it is now. Collective; the last one must be finished.
    pub fn begin(&mut self, running: &mut Running) -> Result<()> {
        let began = Instant::now();
        let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
        let facts = self.facts(running);
        let (rank, keeper) = (engine.rank(), self.layout.keeper(engine.rank()));
        let bytes = self.layout.share(rank, self.bytes(engine, optimizer));
        let staging = (rank == keeper).then(|| Staging::begin(&self.root, facts.step, bytes));
        let staging = staging.transpose().map_err(storage);
        let path = staging.as_ref().map(|s| s.as_ref().map(|s| s.path().to_path_buf())).map_err(Clone::clone);
        let paths = agree(engine.queue(), path)?;
        let path = paths
            .into_iter()
            .nth(keeper)
            .flatten()
            .ok_or_else(|| Error::failed(format!("rank {keeper} named no staging directory")))?;
        let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.params(u)).collect();
        let mine = owned(engine, optimizer, &guards);
        let ops = running.trainer.ops.as_ref();
        let rank = engine.rank() as u32;
        let world = engine.world() as u32;
        let directory = path.clone();
        let labels: Vec<Label> = mine.iter().map(Label::of).collect();
        let values: Vec<View> = mine.iter().map(|o| o.values).collect();
        let (writer, copied) = if self.in_background(running) {
            let copies = ops.download(&values, self.rooms(running)?);
            let copied = copies.mark();
            let write = move || {
                let rooms = copies.wait();
                (ckpt::write_shard(&path, rank, world, &pieces(&labels, &rooms)), rooms)
            };
            (Writer::Background(thread("checkpoint", write)?), copied)
        } else {
            let written = write_now(ops, &path, rank, world, &labels, &values);
            (0..engine.shards.len()).for_each(|u| optimizer.let_go(u));
            (Writer::Done(written), Event::default())
        };
        drop(guards);
        running.trainer.change_behind(copied);
        let staging = staging?;
        self.under_way = Some(UnderWay { facts, staging, directory, writer, began });
        Ok(())
    }

    /// Bytes that all ranks together will write, with parity.
    fn bytes(&self, engine: &Engine, optimizer: &Optimizer) -> u64 {
        let tensors = total_bytes(engine, optimizer);
        let parity = if self.spec.parity { tensors.div_ceil(engine.world() as u64) } else { 0 };
        tensors.saturating_add(parity)
    }

    /// Waits for the writers, commits and prunes. Collective. `None` when nothing was under way.
    pub fn finish(&mut self, running: &Running) -> Result<Option<Saved>> {
        let Some(UnderWay { facts, staging, directory, writer, began }) = self.under_way.take() else {
            return Ok(None);
        };
        let queue = running.trainer.engine.queue();
        let report = match writer {
            Writer::Done(r) => r.map_err(storage),
            Writer::Background(t) => match t.join() {
                Ok((written, rooms)) => {
                    if !running.trainer.ops.is_host() {
                        self.rooms = Rooms::Ready(rooms);
                    }
                    written.map_err(storage)
                }
                Err(panic) => Err(Error::failed(format!("the checkpoint writer: {}", said(panic.as_ref())))),
            },
        };
        let reports = agree(queue, report)?;
        let step = facts.step;
        if !self.layout.is_shared() {
            let (path, bytes) =
                host_local::commit(queue, &self.layout, &self.root, staging, facts, reports, self.spec.keep)?;
            self.last = Some(path.clone());
            return Ok(Some(Saved { step, path, bytes, seconds: began.elapsed().as_secs_f64() }));
        }
        let parity = self.parity(running, &directory, &reports)?;
        let committed = match staging {
            Some(s) => self.commit(s, facts, reports, parity).map(Some),
            None => Ok(None),
        };
        let (path, bytes) = agree(queue, committed)?
            .into_iter()
            .flatten()
            .next()
            .ok_or_else(|| Error::failed("rank 0 committed nothing"))?;
        self.last = Some(path.clone());
        Ok(Some(Saved { step, path, bytes, seconds: began.elapsed().as_secs_f64() }))
    }

    /// Every rank's stripe of the parity, where the job asks for it. Collective, and only now: a stripe is made of the shards
    /// of all ranks, which have to be on the disk. Each rank reads and hashes one Nth of the checkpoint for it, also after a
    /// save in the background.
    fn parity(
        &self,
        running: &Running,
        directory: &Path,
        shards: &[ShardReport],
    ) -> Result<Option<Vec<ParityReport>>> {
        if !self.spec.parity {
            return Ok(None);
        }
        let engine = &running.trainer.engine;
        let (rank, world) = (engine.rank() as u32, engine.world() as u32);
        let mine = ckpt::write_parity(directory, rank, world, shards).map_err(storage);
        agree(engine.queue(), mine).map(Some)
    }

    fn commit(
        &self,
        staging: Staging,
        facts: Facts,
        reports: Vec<ShardReport>,
        parity: Option<Vec<ParityReport>>,
    ) -> Result<(PathBuf, u64)> {
        let done = match parity {
            Some(parity) => ckpt::commit_parity(staging, facts, reports, parity),
            None => ckpt::commit(staging, facts, reports),
        };
        let done = done.map_err(storage)?;
        if self.spec.keep > 0 {
            ckpt::prune(&self.root, self.spec.keep).map_err(storage)?;
        }
        Ok((done.path, done.bytes))
    }

    fn facts(&self, running: &Running) -> Facts {
        let (id, trainer, train) = (&self.identity, &running.trainer, running.train());
        let units: Vec<_> = trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
        Facts {
            step: running.at.step,
            world: trainer.engine.world() as u32,
            stage: trainer.engine.policy.stage,
            run_seed: train.seed,
            tokens: running.at.tokens,
            program: format!("launch {}", env!("CARGO_PKG_VERSION")),
            cursor: cursor(running, &id.data_digest, &units),
            // The runtime's own randomness is a function of seed and logical ids: there is no state to keep.
            rng: json!({
                "engine": "philox4x32-10, stateless",
                "generation": id.rng_generation,
                "resumed": id.rng_decision,
            }),
            groups: json!(trainer.optimizer.groups(&units)),
            model: id.model.clone(),
            tokenizer: id.tokenizer.clone(),
            job: json!(id.job),
        }
    }
}

/// Where the run is; `late` is there only when some parameters have had fewer updates, `loss_scale` with fp16.
fn cursor(running: &Running, data: &str, units: &[Unit]) -> Value {
    let mut cursor = json!({ "at": running.at, "data": data });
    let late = running.trainer.optimizer.late(units);
    if !late.is_empty() {
        cursor["late"] = json!(late);
    }
    if let Some(state) = running.trainer.loss_scale.state() {
        cursor["loss_scale"] = json!(state);
    }
    cursor
}

impl Label {
    fn of(o: &Owned) -> Self {
        Label { name: o.name.into(), role: o.role, start_element: o.start_element }
    }

    fn piece<'a>(&'a self, data: View<'a>) -> Piece<'a> {
        let data = match data.dtype() {
            Dtype::F32 => Elements::F32(data.host()),
            Dtype::Bf16 => Elements::Bf16(data.halves()),
            Dtype::F16 => unreachable!("weights in fp16 have masters"),
        };
        Piece { name: &self.name, role: self.role, start_element: self.start_element, data }
    }
}

/// Type and elements of each vector that this rank owns.
fn sizes(running: &Running) -> Vec<(Dtype, usize)> {
    let (engine, optimizer) = (&running.trainer.engine, &running.trainer.optimizer);
    let guards: Vec<_> = (0..engine.shards.len()).map(|u| engine.params(u)).collect();
    owned(engine, optimizer, &guards).iter().map(|o| (o.values.dtype(), o.values.len())).collect()
}

/// Memory of the host for copies of them.
fn ordinary(running: &Running) -> Vec<Buf> {
    sizes(running).into_iter().map(|(dtype, len)| Buf::zeroed_as(dtype, len)).collect()
}

fn pieces<'a>(labels: &'a [Label], values: &'a [Buf]) -> Vec<Piece<'a>> {
    labels.iter().zip(values).map(|(label, values)| label.piece(values.view())).collect()
}

fn thread<T: Send + 'static>(name: &str, f: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name(name.into()).spawn(f);
    thread.map_err(|e| Error::cluster(format!("{name}: no thread: {e}")))
}

/// Writes a shard while nothing else happens: straight from where the values lie, or by way of a copy on the host.
fn write_now(
    ops: &dyn Ops,
    path: &Path,
    rank: u32,
    world: u32,
    labels: &[Label],
    values: &[View],
) -> Written {
    let copied = |v: &View| if v.is_on_host() { Buf::default() } else { ops.downloaded(*v) };
    let copies: Vec<Buf> = values.iter().map(copied).collect();
    let pieces =
        labels.iter().zip(values).zip(&copies).map(|((label, values), copy)| {
            label.piece(if values.is_on_host() { *values } else { copy.view() })
        });
    let pieces: Vec<Piece> = pieces.collect();
    ckpt::write_shard(path, rank, world, &pieces)
}

/// Bytes of all tensors of a checkpoint.
pub fn total_bytes(engine: &Engine, optimizer: &Optimizer) -> u64 {
    let states = state_roles(optimizer.spec()).len() as u64;
    let weight = engine.weights().updated.size() as u64;
    let of = |u: &Unit| weight * u.len() as u64 + 4 * states * u.trained_len() as u64;
    engine.shards.iter().map(|s| of(&s.unit)).sum()
}

/// An error of the storage.
pub(crate) fn storage(e: CkptError) -> Error {
    Error::cluster(e.to_string())
}
