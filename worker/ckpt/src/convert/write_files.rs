//! Writes the planned files of a conversion in parallel. For each worker thread, a second thread
//! reads ahead, and a third one writes the values that the worker converted. The memory per worker
//! doesn't depend on the size of the files.
use super::file_plan::{FileContent, FilePlan, PlannedShardPiece, StorageSpan, TorchFilePlan, sum_bytes};
use super::finished_file_check::{is_shard_intact, is_torch_file_intact};
use super::output::{ConvertOutput, FinishedFile};
use super::source_state::SourceState;
use super::write_steps::{WINDOW_ELEMENTS, WriteStep, WriteStepData, plan_storage_steps};
use crate::catalog::{TensorInfo, TensorSource, build_f32_read_requests};
use crate::codec::disk::{
    self, Directory, DiskBufferPool, FileWriter, HashMode, IoMode, ReadBuffers, SMALL_WINDOW_BYTES,
    WrittenFile,
};
use crate::codec::narrow::NarrowingBuffers;
use crate::codec::safetensors::{self, PlannedTensor};
use crate::codec::torch_writer::TorchWriter;
use crate::error::{CkptError, Result};
use crate::hash::Hash;
use crate::layout::native::shard_file_name;
use crate::save::{ShardReport, WrittenPieceReport};
use crate::tensor::Dtype;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Number of buffers per thread of a conversion, so that one can be read while a second waits and a
/// third is written.
const WINDOWS_PER_WORKER: usize = 3;
/// Memory in bytes that a conversion needs for each worker (thread). Covers its windows, a
/// converted window, three buffers of the writing thread, and one buffer for verifying the source.
const WORKER_MEMORY_BYTES: u64 = 18 << 20;
/// Memory in bytes that a conversion needs in addition to that of its workers (threads).
const BASE_MEMORY_BYTES: u64 = 8 << 20;
/// Maximum number of workers (threads) of a conversion, each of which writes one file at a time.
const WORKERS_MAX: usize = 32;
/// Maximum interval between two calls of the callback that shows the progress of a conversion.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The list of all files that a conversion has written or reused, and the number of reused files.
pub(super) struct WrittenFiles {
    /// Number of files that were reused, since an interrupted conversion had finished them.
    pub(super) reused: u64,
    /// The records of all files, in any order.
    pub(super) files: Vec<FinishedFile>,
}

/// The data that all threads of a conversion use, such as the source checkpoint, the planned files
/// and the number of written bytes.
struct SharedWriteState<'a> {
    source: &'a dyn TensorSource,
    tensors: &'a [TensorInfo],
    /// Number of ranks of the converted checkpoint.
    world: u32,
    /// The output directory.
    dir: &'a Path,
    /// The planned files, largest first. A file that an interrupted conversion finished comes with
    /// its record.
    files: Vec<(&'a FilePlan, Option<FinishedFile>)>,
    /// Index of the next file that a worker takes.
    next: AtomicUsize,
    /// Whether the workers must stop, since one of them failed.
    stop: AtomicBool,
    /// Number of bytes written so far.
    bytes: AtomicU64,
    /// Buffers of the writing threads.
    buffers: DiskBufferPool,
    /// Buffers for hashing linked files.
    scratch: ReadBuffers,
    /// Window buffers that no worker currently uses, for reuse.
    windows: Mutex<Vec<Vec<f32>>>,
}

/// Writes all planned files of a conversion with several threads, and verifies the checksums of all
/// bytes that they read from the source checkpoint. Uses at most `memory` bytes. Reuses unchanged
/// files for which `output` has a record. Calls `progress` with the number of written bytes and the
/// total number.
pub(super) fn write_planned_files(
    source: &dyn TensorSource,
    state: &SourceState,
    files: &[FilePlan],
    output: &mut ConvertOutput,
    memory: u64,
    mut progress: impl FnMut(u64, u64),
) -> Result<WrittenFiles> {
    let dir = output.dir.clone();
    make_parent_dirs(&dir, files)?;
    let total = sum_bytes(files);
    let mut order: Vec<&FilePlan> = files.iter().collect();
    // largest first, so that no worker is left with a large file at the end
    order.sort_by_key(|f| std::cmp::Reverse(f.size_in_bytes()));
    let files = order.into_iter().map(|f| (f, output.find_finished_file(&f.path).cloned())).collect();
    let shared = SharedWriteState {
        source,
        tensors: &state.tensors,
        world: state.world,
        dir: &dir,
        files,
        next: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        bytes: AtomicU64::new(0),
        buffers: DiskBufferPool::with_size(SMALL_WINDOW_BYTES),
        scratch: ReadBuffers::default(),
        windows: Mutex::default(),
    };
    let workers = compute_worker_count(memory, shared.files.len());
    let mut done = WrittenFiles { reused: 0, files: Vec::new() };
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel::<Result<(FinishedFile, bool)>>(workers);
        for _ in 0..workers {
            let (sender, shared) = (sender.clone(), &shared);
            scope.spawn(move || shared.run_worker(&sender));
        }
        drop(sender);
        let result = collect_finished_files(&receiver, output, &mut done, || {
            progress(shared.bytes.load(Ordering::Relaxed), total);
        });
        if result.is_err() {
            shared.stop.store(true, Ordering::Relaxed);
            // receive the remaining results, so that no worker blocks on sending
            for _ in receiver {}
        }
        result
    })?;
    // a killed conversion had not verified the bytes that it read, so every byte of the source is
    // verified if files are reused
    source.verify_reads(done.reused > 0)?;
    progress(total, total);
    Ok(done)
}

/// Waits for the threads that write files, and records the path, size and hash of each file in
/// `.done` as soon as the file is complete. Adds new files to `.done` of `output`, and counts
/// reused files and collects all records in `done`. Returns at the first error. Calls `progress`
/// after each file, and at least every [`PROGRESS_INTERVAL`].
fn collect_finished_files(
    receiver: &Receiver<Result<(FinishedFile, bool)>>,
    output: &mut ConvertOutput,
    done: &mut WrittenFiles,
    mut progress: impl FnMut(),
) -> Result<()> {
    loop {
        match receiver.recv_timeout(PROGRESS_INTERVAL) {
            Ok(file) => {
                let (file, reused) = file?;
                match reused {
                    true => done.reused += 1,
                    false => output.record_finished_file(&file)?,
                }
                done.files.push(file);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        progress();
    }
}

/// Returns the number of worker threads for a conversion of `files` files with `memory` bytes of
/// memory, at least 1. The result is at most `files`, at most [`WORKERS_MAX`], and at most one more
/// than the number of cores. The additional worker uses the disk while another one ends a file and
/// begins the next.
fn compute_worker_count(memory: u64, files: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let affordable = (memory.saturating_sub(BASE_MEMORY_BYTES) / WORKER_MEMORY_BYTES) as usize;
    (cores + 1).min(affordable).min(files).clamp(1, WORKERS_MAX)
}

/// Creates the parent directories of all planned files in the output directory `dir`.
fn make_parent_dirs(dir: &Path, files: &[FilePlan]) -> Result<()> {
    let mut last = None;
    for file in files {
        let parent = file.path.rsplit_once('/').map(|(parent, _)| parent);
        if let Some(parent) = parent.filter(|p| last != Some(*p)) {
            let path = dir.join(parent);
            fs::create_dir_all(&path).map_err(CkptError::io("make directory", &path))?;
            last = Some(parent);
        }
    }
    Ok(())
}

impl SharedWriteState<'_> {
    /// The main function of a worker thread: writes one planned file after another, until no file
    /// is left or the conversion is stopped. Sends the record of each file, and whether the file
    /// was reused. Ends after an error.
    fn run_worker(&self, sender: &SyncSender<Result<(FinishedFile, bool)>>) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some((file, earlier)) = self.files.get(self.next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            let result = self.write_file(file, earlier.as_ref());
            let failed = result.is_err();
            if sender.send(result).is_err() || failed {
                return;
            }
        }
    }

    /// Writes one planned file of a conversion, unless the file `earlier`, which an interrupted
    /// conversion completed under this path, is still unchanged and can be reused. Returns the
    /// record of the file, and whether the file was reused.
    fn write_file(&self, file: &FilePlan, earlier: Option<&FinishedFile>) -> Result<(FinishedFile, bool)> {
        if let Some(earlier) = earlier.filter(|e| self.is_finished_file_intact(file, e)) {
            self.bytes.fetch_add(file.size_in_bytes(), Ordering::Relaxed);
            return Ok((earlier.clone(), true));
        }
        let path = self.dir.join(&file.path);
        disk::unlink(&path)?;
        let mut done = FinishedFile { path: file.path.clone(), bytes: 0, blake3: None, shard: None };
        match &file.content {
            FileContent::Bytes(bytes) => {
                done.bytes = disk::write_file(path, bytes)?;
                done.blake3 = Some(Hash::digest(bytes));
            }
            FileContent::LinkTo(other) => {
                link_or_copy_file(other, &path)?;
                let (bytes, digest) =
                    disk::hash_file(&Directory::open(self.dir)?, &file.path, &self.scratch)?;
                (done.bytes, done.blake3) = (bytes, Some(digest));
            }
            FileContent::Shard { rank, pieces } => {
                let shard = self.write_shard_file(&path, *rank, pieces)?;
                (done.bytes, done.shard) = (shard.bytes, Some(shard));
            }
            FileContent::Torch(plan) => {
                let writer = TorchWriter::create(
                    path,
                    file.file_stem(),
                    &plan.value,
                    plan.size_in_bytes(),
                    &self.buffers,
                )?;
                let written = self.write_torch_file(plan, writer)?;
                (done.bytes, done.blake3) = (written.bytes, written.digest);
            }
        }
        Ok((done, false))
    }

    /// Returns true if a file from an interrupted conversion still has the size and the hash in its
    /// record `earlier`, so that it need not be written again. Reads and verifies every byte of the
    /// tensors. Returns false for links and small files, which are cheap to write again.
    fn is_finished_file_intact(&self, file: &FilePlan, earlier: &FinishedFile) -> bool {
        let path = self.dir.join(&file.path);
        let open = || -> Option<(fs::File, u64)> {
            let name = path.file_name()?.to_str()?;
            let directory = Directory::open(path.parent()?).ok()?;
            directory.open_file(name, nix::fcntl::OFlag::empty()).ok()
        };
        let Some((open, size)) = open().filter(|(_, size)| *size == earlier.bytes) else { return false };
        match (&file.content, &earlier.shard, earlier.blake3) {
            (FileContent::Torch(_), _, Some(digest)) => {
                is_torch_file_intact(&open, size, digest).unwrap_or(false)
            }
            (FileContent::Shard { .. }, Some(shard), _) => {
                is_shard_intact(&open, size, shard).unwrap_or(false)
            }
            // links and small files are written again
            _ => false,
        }
    }

    /// Writes a planned torch file with its pickled Python value and the data of its tensor
    /// storages.
    fn write_torch_file(&self, plan: &TorchFilePlan, mut writer: TorchWriter) -> Result<WrittenFile> {
        let steps: Vec<WriteStep> =
            plan.storages.iter().flat_map(|s| plan_storage_steps(s.dtype, &s.spans)).collect();
        let mut narrow = NarrowingBuffers::default();
        self.stream_write_steps(&steps, |step, loaded| match (step, loaded) {
            (WriteStep::Begin, _) => writer.begin_storage(),
            (WriteStep::End, _) => writer.end_member(),
            (WriteStep::Window { dtype, .. }, WriteStepData::Values(values)) => {
                writer.write(narrow.convert_values(*dtype, values))
            }
            (WriteStep::Bytes(bytes), _) => writer.write(bytes),
            (WriteStep::Raw { .. }, WriteStepData::Bytes(bytes)) => writer.write(bytes),
            _ => Err(CkptError::internal("a window was read as something else")),
        })?;
        writer.finish()
    }

    /// Writes the safetensors file of the rank `rank` in launch's own format to `path`, with the
    /// tensor elements that `pieces` selects. Returns its report.
    fn write_shard_file(&self, path: &Path, rank: u32, pieces: &[PlannedShardPiece]) -> Result<ShardReport> {
        let info = |p: &PlannedShardPiece| &self.tensors[p.tensor];
        let shapes: Vec<[u64; 1]> = pieces.iter().map(|p| [p.element_count()]).collect();
        let planned: Vec<PlannedTensor<'_>> = pieces
            .iter()
            .zip(&shapes)
            .map(|(p, shape)| {
                let name = safetensors::format_piece_key(info(p).role, &info(p).name, p.elements.start);
                PlannedTensor { name, dtype: p.dtype, shape }
            })
            .collect();
        let header =
            safetensors::encode_shard_header(rank, self.world, &planned).map_err(CkptError::invalid_save)?;
        let mut writer = FileWriter::with_buffers(
            path.to_owned(),
            IoMode::Direct,
            HashMode::Blocks,
            self.buffers.clone(),
        )?;
        writer.write(&header)?;
        let runs = pieces.chunk_by(|a, b| a.dtype == b.dtype).map(|run| {
            let spans: Vec<StorageSpan> =
                run.iter().map(|p| StorageSpan::Elements(p.tensor, p.elements.clone())).collect();
            (run[0].dtype, spans)
        });
        let runs: Vec<(Dtype, Vec<StorageSpan>)> = runs.collect();
        let steps: Vec<WriteStep> =
            runs.iter().flat_map(|(dtype, spans)| plan_storage_steps(*dtype, spans)).collect();
        let mut narrow = NarrowingBuffers::default();
        self.stream_write_steps(&steps, |step, loaded| match (step, loaded) {
            (WriteStep::Window { dtype, .. }, WriteStepData::Values(values)) => {
                writer.write(narrow.convert_values(*dtype, values))
            }
            _ => Ok(()),
        })?;
        let (mut offset, mut reports) = (header.len() as u64, Vec::with_capacity(pieces.len()));
        for p in pieces {
            let (name, role, start, count) =
                (info(p).name.clone(), info(p).role, p.elements.start, p.element_count());
            reports.push(WrittenPieceReport { name, role, dtype: p.dtype, start, count, offset });
            offset += p.size_in_bytes();
        }
        let WrittenFile { bytes, blocks, .. } = writer.finish()?;
        let file = shard_file_name(rank, self.world);
        Ok(ShardReport { rank, world: self.world, file, bytes, blocks, pieces: reports })
    }

    /// Reads the tensor data for each step of writing one output file, and calls `sink` with the
    /// step and its data, in the order of the steps. A second thread reads the data ahead if there
    /// is more than one window.
    fn stream_write_steps(
        &self,
        steps: &[WriteStep<'_>],
        mut sink: impl FnMut(&WriteStep<'_>, &WriteStepData) -> Result<()>,
    ) -> Result<()> {
        let windows =
            steps.iter().filter(|s| matches!(s, WriteStep::Window { .. } | WriteStep::Raw { .. })).count();
        if windows <= 1 || steps.iter().map(WriteStep::element_count).sum::<usize>() <= WINDOW_ELEMENTS {
            let mut buffer = self.take_window();
            for step in steps {
                let loaded = self.read_write_step_data(step, std::mem::take(&mut buffer))?;
                self.deliver_write_step(step, &mut sink, &loaded)?;
                if let WriteStepData::Values(values) = loaded {
                    buffer = values;
                }
            }
            self.return_window(buffer);
            return Ok(());
        }
        std::thread::scope(|scope| {
            let (full, inbox) = sync_channel::<Result<WriteStepData>>(1);
            let (outbox, empty) = sync_channel::<Vec<f32>>(WINDOWS_PER_WORKER);
            for _ in 0..WINDOWS_PER_WORKER {
                let _ = outbox.send(self.take_window());
            }
            scope.spawn(move || {
                for step in steps {
                    let buffer = match step {
                        WriteStep::Window { .. } => empty.recv(),
                        _ => Ok(Vec::new()),
                    };
                    // the receiver is gone after an error
                    let Ok(buffer) = buffer else { return };
                    if full.send(self.read_write_step_data(step, buffer)).is_err() {
                        return;
                    }
                }
                // the receiver has ended, or ends when `full` is dropped
                drop(full);
                empty.iter().for_each(|window| self.return_window(window));
            });
            for step in steps {
                if self.stop.load(Ordering::Relaxed) {
                    return Err(CkptError::internal("another file could not be written"));
                }
                let loaded =
                    inbox.recv().map_err(|_| CkptError::internal("the reading thread ended early"))??;
                self.deliver_write_step(step, &mut sink, &loaded)?;
                if let WriteStepData::Values(values) = loaded {
                    let _ = outbox.send(values);
                }
            }
            Ok(())
        })
    }

    /// Locks the pool of unused read buffers, even if another thread panicked while it held the
    /// lock.
    fn lock_window_pool(&self) -> std::sync::MutexGuard<'_, Vec<Vec<f32>>> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a read buffer from the pool, or allocates one if the pool is empty.
    fn take_window(&self) -> Vec<f32> {
        self.lock_window_pool().pop().unwrap_or_default()
    }

    /// Returns a read buffer to the pool for reuse.
    fn return_window(&self, window: Vec<f32>) {
        self.lock_window_pool().push(window);
    }

    /// Calls `sink` with a step of writing an output file and its tensor data, and adds the step's
    /// bytes to the conversion's count of written bytes.
    fn deliver_write_step(
        &self,
        step: &WriteStep<'_>,
        sink: &mut impl FnMut(&WriteStep<'_>, &WriteStepData) -> Result<()>,
        loaded: &WriteStepData,
    ) -> Result<()> {
        sink(step, loaded)?;
        self.bytes.fetch_add(step.size_in_bytes(), Ordering::Relaxed);
        Ok(())
    }

    /// Reads from the source checkpoint the tensor elements that one step of writing an output file
    /// needs. A step with a window reads into `buffer`, which the result contains. The bytes are
    /// verified later, by [`TensorSource::verify_reads`].
    fn read_write_step_data(&self, step: &WriteStep<'_>, mut buffer: Vec<f32>) -> Result<WriteStepData> {
        match step {
            WriteStep::Window { parts, .. } => {
                let info = |tensor: Option<usize>| tensor.map(|i| &self.tensors[i]);
                let spans = parts.iter().map(|(tensor, range)| (info(*tensor), range.clone()));
                self.source.read_unverified(&mut build_f32_read_requests(spans, &mut buffer))?;
                Ok(WriteStepData::Values(buffer))
            }
            WriteStep::Raw { tensor, start, bytes } => {
                let info = &self.tensors[*tensor];
                let mut out = vec![0u8; *bytes];
                self.source.read_raw(&info.name, info.role, *start, &mut out)?;
                Ok(WriteStepData::Bytes(out))
            }
            _ => Ok(WriteStepData::Nothing),
        }
    }
}

/// Creates `to` as a hard link to the file `from`, or as a copy if hard links are not possible.
fn link_or_copy_file(from: &Path, to: &Path) -> Result<()> {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to).map_err(CkptError::io("copy", from))?;
    }
    Ok(())
}
