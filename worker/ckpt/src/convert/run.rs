//! Writes planned files in parallel. Each worker reads ahead, converts, and hands over to the thread that writes; what it
//! needs of memory is the same for every size of file.
use super::earlier::{shard_is_sound, torch_is_sound};
use super::file::{Content, FilePlan, ShardPiece, Span, TorchPlan};
use super::output::{Finished, Output};
use super::state::State;
use super::steps::{Loaded, Step, WINDOW, steps};
use crate::catalog::TensorInfo;
use crate::disk::{self, Buffers, FileWriter, Folder, NARROW, WritePath};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::safetensors::{self, Planned};
use crate::formats::torch_write::TorchWriter;
use crate::manifest::shard_name;
use crate::save::{PieceReport, ShardReport};
use crate::source::{Request, Source};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Windows of one worker: one being read, one waiting, one being written.
const WINDOWS: usize = 3;
/// Bytes that one worker needs: windows, a converted one, three of the writing thread, one to check the source.
const PER_WORKER: u64 = 18 << 20;
/// Bytes needed beside the workers.
const BESIDE: u64 = 8 << 20;
/// Most files at once.
const WORKERS_MAX: usize = 32;
/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// What came of all files.
pub(super) struct Done {
    pub(super) reused: u64,
    /// Shards of ours.
    pub(super) shards: Vec<ShardReport>,
}

/// What all workers share.
struct Shared<'a> {
    source: &'a dyn Source,
    tensors: &'a [TensorInfo],
    world: u32,
    dir: &'a Path,
    files: Vec<(&'a FilePlan, Option<Finished>)>,
    next: AtomicUsize,
    stop: AtomicBool,
    bytes: AtomicU64,
    /// Of the writing threads.
    buffers: Buffers,
    /// Windows that no file uses now.
    windows: Mutex<Vec<Vec<f32>>>,
}

/// Writes all files into the output's folder.
pub(super) fn run(
    source: &dyn Source,
    state: &State,
    files: &[FilePlan],
    output: &mut Output,
    memory: u64,
    mut progress: impl FnMut(u64, u64),
) -> Result<Done> {
    let dir = output.dir.clone();
    make_folders(&dir, files)?;
    let total: u64 = files.iter().map(FilePlan::bytes).sum();
    let mut order: Vec<&FilePlan> = files.iter().collect();
    // the largest first, so that none is left over for a single worker at the end
    order.sort_by_key(|f| std::cmp::Reverse(f.bytes()));
    let files = order.into_iter().map(|f| (f, output.earlier(&f.path).cloned())).collect();
    let shared = Shared {
        source,
        tensors: &state.tensors,
        world: state.world,
        dir: &dir,
        files,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        bytes: AtomicU64::new(0),
        buffers: Buffers::of(NARROW),
        windows: Mutex::default(),
    };
    let workers = workers(memory, shared.files.len());
    let mut done = Done { reused: 0, shards: Vec::new() };
    std::thread::scope(|scope| {
        let (tell, told) = sync_channel::<Result<(Finished, bool)>>(workers);
        for _ in 0..workers {
            let (tell, shared) = (tell.clone(), &shared);
            scope.spawn(move || shared.work(&tell));
        }
        drop(tell);
        let result = collect(&told, output, &mut done, || {
            progress(shared.bytes.load(Ordering::Relaxed), total);
        });
        if result.is_err() {
            shared.stop.store(true, Ordering::Relaxed);
            // lets workers end that wait to tell
            for _ in told {}
        }
        result
    })?;
    // what an earlier run had written was not checked by it when it was killed
    source.settle(done.reused > 0)?;
    progress(total, total);
    Ok(done)
}

/// Takes what workers tell until all are done; the first error ends it.
fn collect(
    told: &Receiver<Result<(Finished, bool)>>,
    output: &mut Output,
    done: &mut Done,
    mut progress: impl FnMut(),
) -> Result<()> {
    loop {
        match told.recv_timeout(TELL_EVERY) {
            Ok(file) => {
                let (file, reused) = file?;
                match reused {
                    true => done.reused += 1,
                    false => output.record(&file)?,
                }
                done.shards.extend(file.shard);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        progress();
    }
}

/// One more than there are cores: while one ends a file and begins the next, the disk works for the others.
fn workers(memory: u64, files: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let affordable = (memory.saturating_sub(BESIDE) / PER_WORKER) as usize;
    (cores + 1).min(affordable).min(files).clamp(1, WORKERS_MAX)
}

fn make_folders(dir: &Path, files: &[FilePlan]) -> Result<()> {
    let mut last = None;
    for file in files {
        let folder = file.path.rsplit_once('/').map(|(folder, _)| folder);
        if let Some(folder) = folder.filter(|f| last != Some(*f)) {
            let path = dir.join(folder);
            fs::create_dir_all(&path).map_err(CkptError::io("make directory", &path))?;
            last = Some(folder);
        }
    }
    Ok(())
}

impl Shared<'_> {
    fn work(&self, tell: &SyncSender<Result<(Finished, bool)>>) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some((file, earlier)) = self.files.get(self.next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            let result = self.file(file, earlier.as_ref());
            let failed = result.is_err();
            if tell.send(result).is_err() || failed {
                return;
            }
        }
    }

    /// One file; true when an earlier run had written it.
    fn file(&self, file: &FilePlan, earlier: Option<&Finished>) -> Result<(Finished, bool)> {
        if let Some(earlier) = earlier.filter(|e| self.is_as_recorded(file, e)) {
            self.bytes.fetch_add(file.bytes(), Ordering::Relaxed);
            return Ok((earlier.clone(), true));
        }
        let path = self.dir.join(&file.path);
        disk::unlink(&path)?;
        let mut done = Finished { path: file.path.clone(), bytes: 0, members: None, shard: None };
        match &file.content {
            Content::Bytes(bytes) => done.bytes = disk::write_file(path, bytes)?,
            Content::Same(other) => done.bytes = link(other, &path)?,
            Content::Shard { rank, pieces } => {
                let shard = self.shard(&path, *rank, pieces)?;
                (done.bytes, done.shard) = (shard.bytes, Some(shard));
            }
            Content::Torch(plan) => {
                let writer =
                    TorchWriter::create(path, file.stem(), &plan.value, plan.bytes(), &self.buffers)?;
                let (bytes, members) = self.torch(plan, writer)?;
                (done.bytes, done.members) = (bytes, Some(members));
            }
        }
        Ok((done, false))
    }

    /// True when the file of an earlier run is whole: every byte of its tensors is checked.
    fn is_as_recorded(&self, file: &FilePlan, earlier: &Finished) -> bool {
        let path = self.dir.join(&file.path);
        let open = || -> Option<(fs::File, u64)> {
            let name = path.file_name()?.to_str()?;
            let folder = Folder::open(path.parent()?).ok()?;
            folder.open_file(name, nix::fcntl::OFlag::empty()).ok()
        };
        let Some((open, size)) = open().filter(|(_, size)| *size == earlier.bytes) else { return false };
        match (&file.content, &earlier.shard, earlier.members) {
            (Content::Torch(_), _, Some(members)) => torch_is_sound(&open, size, members).unwrap_or(false),
            (Content::Shard { .. }, Some(shard), _) => shard_is_sound(&open, size, shard).unwrap_or(false),
            // small ones are written again
            _ => false,
        }
    }

    fn torch(&self, plan: &TorchPlan, mut writer: TorchWriter) -> Result<(u64, u32)> {
        let steps: Vec<Step> = plan.storages.iter().flat_map(|s| steps(s.dtype, &s.spans)).collect();
        let mut narrow = Narrow::default();
        self.stream(&steps, |step, loaded| match (step, loaded) {
            (Step::Begin, _) => writer.begin_storage(),
            (Step::End, _) => writer.end(),
            (Step::Window { dtype, .. }, Loaded::Values(values)) => {
                writer.write(narrow.convert(*dtype, values))
            }
            (Step::Bytes(bytes), _) => writer.write(bytes),
            (Step::Raw { .. }, Loaded::Bytes(bytes)) => writer.write(bytes),
            _ => Err(CkptError::invalid("a window was read as something else")),
        })?;
        writer.finish()
    }

    fn shard(&self, path: &Path, rank: u32, pieces: &[ShardPiece]) -> Result<ShardReport> {
        let of = |p: &ShardPiece| &self.tensors[p.tensor];
        let shapes: Vec<[u64; 1]> = pieces.iter().map(|p| [p.count()]).collect();
        let planned: Vec<Planned<'_>> = pieces
            .iter()
            .zip(&shapes)
            .map(|(p, shape)| {
                let name = safetensors::piece_key(of(p).role, &of(p).name, p.elements.start);
                Planned { name, dtype: p.dtype, shape }
            })
            .collect();
        let header = safetensors::shard_header(rank, self.world, &planned).map_err(CkptError::invalid)?;
        let mut writer = FileWriter::with(path.to_owned(), WritePath::Direct, true, self.buffers.clone())?;
        writer.write(&header)?;
        let alike = pieces.chunk_by(|a, b| a.dtype == b.dtype).map(|run| {
            let spans: Vec<Span> = run.iter().map(|p| Span::Of(p.tensor, p.elements.clone())).collect();
            (run[0].dtype, spans)
        });
        let alike: Vec<(Dtype, Vec<Span>)> = alike.collect();
        let steps: Vec<Step> = alike.iter().flat_map(|(dtype, spans)| steps(*dtype, spans)).collect();
        let mut narrow = Narrow::default();
        self.stream(&steps, |step, loaded| match (step, loaded) {
            (Step::Window { dtype, .. }, Loaded::Values(values)) => {
                writer.write(narrow.convert(*dtype, values))
            }
            _ => Ok(()),
        })?;
        let (mut offset, mut reports) = (header.len() as u64, Vec::with_capacity(pieces.len()));
        for p in pieces {
            let (name, role, start, count) = (of(p).name.clone(), of(p).role, p.elements.start, p.count());
            reports.push(PieceReport { name, role, dtype: p.dtype, start, count, offset });
            offset += p.bytes();
        }
        let (bytes, blocks) = writer.finish()?;
        let file = shard_name(rank, self.world);
        Ok(ShardReport { rank, world: self.world, file, bytes, blocks, pieces: reports })
    }

    /// Reads the steps' windows ahead, and hands each step with what was read for it to `sink`.
    fn stream(
        &self,
        steps: &[Step<'_>],
        mut sink: impl FnMut(&Step<'_>, &Loaded) -> Result<()>,
    ) -> Result<()> {
        let windows = steps.iter().filter(|s| matches!(s, Step::Window { .. } | Step::Raw { .. })).count();
        if windows <= 1 || steps.iter().map(Step::elements).sum::<usize>() <= WINDOW {
            let mut buffer = self.window();
            for step in steps {
                let loaded = self.load(step, std::mem::take(&mut buffer))?;
                self.told(step, &mut sink, &loaded)?;
                if let Loaded::Values(values) = loaded {
                    buffer = values;
                }
            }
            self.give(buffer);
            return Ok(());
        }
        std::thread::scope(|scope| {
            let (full, inbox) = sync_channel::<Result<Loaded>>(1);
            let (outbox, empty) = sync_channel::<Vec<f32>>(WINDOWS);
            for _ in 0..WINDOWS {
                let _ = outbox.send(self.window());
            }
            scope.spawn(move || {
                for step in steps {
                    let buffer = match step {
                        Step::Window { .. } => empty.recv(),
                        _ => Ok(Vec::new()),
                    };
                    // the other side is gone after an error
                    let Ok(buffer) = buffer else { return };
                    if full.send(self.load(step, buffer)).is_err() {
                        return;
                    }
                }
                // the other side has ended, or ends when this does
                drop(full);
                empty.iter().for_each(|window| self.give(window));
            });
            for step in steps {
                if self.stop.load(Ordering::Relaxed) {
                    return Err(CkptError::invalid("another file could not be written"));
                }
                let loaded =
                    inbox.recv().map_err(|_| CkptError::invalid("the reading thread ended early"))??;
                self.told(step, &mut sink, &loaded)?;
                if let Loaded::Values(values) = loaded {
                    let _ = outbox.send(values);
                }
            }
            Ok(())
        })
    }

    fn windows(&self) -> std::sync::MutexGuard<'_, Vec<Vec<f32>>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A window of an earlier file, or a new one.
    fn window(&self) -> Vec<f32> {
        self.windows().pop().unwrap_or_default()
    }

    /// Keeps a window for the next file.
    fn give(&self, window: Vec<f32>) {
        self.windows().push(window);
    }

    fn told(
        &self,
        step: &Step<'_>,
        sink: &mut impl FnMut(&Step<'_>, &Loaded) -> Result<()>,
        loaded: &Loaded,
    ) -> Result<()> {
        sink(step, loaded)?;
        self.bytes.fetch_add(step.bytes(), Ordering::Relaxed);
        Ok(())
    }

    fn load(&self, step: &Step<'_>, mut buffer: Vec<f32>) -> Result<Loaded> {
        match step {
            Step::Window { spans, elements, .. } => {
                buffer.resize(*elements, 0.0);
                let mut requests = Vec::with_capacity(spans.len());
                let mut rest = buffer.as_mut_slice();
                for span in spans {
                    let (out, tail) = std::mem::take(&mut rest).split_at_mut(span.count as usize);
                    rest = tail;
                    match span.tensor {
                        Some(i) => {
                            let (name, role) = (self.tensors[i].name.as_str(), self.tensors[i].role);
                            requests.push(Request { name, role, start_element: span.start, out });
                        }
                        None => out.fill(0.0),
                    }
                }
                self.source.read_unchecked(&mut requests)?;
                Ok(Loaded::Values(buffer))
            }
            Step::Raw { tensor, start, bytes } => {
                let info = &self.tensors[*tensor];
                let mut out = vec![0u8; *bytes];
                self.source.read_raw(&info.name, info.role, *start, &mut out)?;
                Ok(Loaded::Bytes(out))
            }
            _ => Ok(Loaded::Nothing),
        }
    }
}

/// Memory of the conversion.
#[derive(Default)]
struct Narrow {
    bf16: Vec<bf16>,
    f16: Vec<f16>,
}

impl Narrow {
    /// The bytes of values in a type: rounded to the nearest, ties to even, as torch does.
    fn convert<'a>(&'a mut self, dtype: Dtype, values: &'a [f32]) -> &'a [u8] {
        match dtype {
            Dtype::BF16 => {
                self.bf16.resize(values.len(), bf16::ZERO);
                self.bf16.convert_from_f32_slice(values);
                bytemuck::cast_slice(&self.bf16)
            }
            Dtype::F16 => {
                self.f16.resize(values.len(), f16::ZERO);
                self.f16.convert_from_f32_slice(values);
                bytemuck::cast_slice(&self.f16)
            }
            _ => bytemuck::cast_slice(values),
        }
    }
}

/// A hard link, or a copy where the file system has none; its size.
fn link(from: &Path, to: &Path) -> Result<u64> {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to).map_err(CkptError::io("copy", from))?;
    }
    fs::metadata(to).map(|m| m.len()).map_err(CkptError::io("look at", to))
}
