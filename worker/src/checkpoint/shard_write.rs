//! [`ShardWrite`]: writing this rank's shard of a checkpoint, on the calling thread or on a
//! background thread.
use crate::{
    checkpoint::tensor_mapping::OwnedRange,
    error::{Result, build_thread_start_error},
};
use ckpt::{
    CkptError, PieceElements, RunFacts, ShardReport, TensorPiece, TensorRole,
    memory_store::{MemoryCopyId, MemoryStore},
};
use device::{
    Buf, Dtype, Ops, View,
    storage::{DeviceError, Download, extract_panic_message},
};
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

/// The write of this rank's shard of a checkpoint: either already done, or running on a background
/// thread.
pub(super) enum ShardWrite {
    Done(ShardWriteResult),
    Background(BackgroundWrite),
}

/// The result of writing this rank's shard of a checkpoint: the file's size and hashes, or the
/// error.
pub(super) type ShardWriteResult = std::result::Result<ShardReport, CkptError>;

/// Value that the thread of a background write returns: the result of the write (`None` after a
/// cancellation), and the host buffers for the next save.
type BackgroundWriteResult = std::result::Result<(Option<ShardWriteResult>, Vec<Buf>), DeviceError>;

/// A background thread that writes this rank's shard of a checkpoint, with its progress.
pub(super) struct BackgroundWrite {
    /// The thread; `None` after [`BackgroundWrite::finish`].
    thread: Option<JoinHandle<BackgroundWriteResult>>,
    progress: Arc<WriteProgress>,
}

/// Number of bytes of a rank's shard that the background thread has written so far, and a flag that
/// requests the thread to stop.
struct WriteProgress {
    /// The size of the shard's elements in bytes.
    total_bytes: u64,
    written_bytes: AtomicU64,
    is_cancelled: AtomicBool,
}

impl BackgroundWrite {
    /// Starts a thread that writes this rank's weights and optimizer states as a shard of a
    /// checkpoint, once they are copied to the host. The shard is written to the staging directory
    /// `directory`.
    pub(super) fn start(
        copies: Download,
        labels: Vec<RangeLabel>,
        total_bytes: u64,
        directory: PathBuf,
        (rank, world): (u32, u32),
    ) -> Result<Self> {
        let (written_bytes, is_cancelled) = (AtomicU64::new(0), AtomicBool::new(false));
        let progress = Arc::new(WriteProgress { total_bytes, written_bytes, is_cancelled });
        let reported = progress.clone();
        let write = move || {
            let buffers = copies.wait()?;
            let pieces: Vec<TensorPiece> =
                labels.iter().zip(&buffers).map(|(label, values)| label.with_values(values.view())).collect();
            let written = ckpt::write_shard_until(&directory, rank, world, &pieces, |bytes| {
                reported.written_bytes.store(bytes, Relaxed);
                match reported.is_cancelled.load(Relaxed) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            Ok((written.transpose(), buffers))
        };
        Ok(BackgroundWrite { thread: Some(spawn_named_thread("checkpoint", write)?), progress })
    }

    /// Returns whether the background thread is still writing this rank's shard.
    pub(super) fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Returns whether the background thread has written less than half of the shard's bytes.
    pub(super) fn is_mostly_unwritten(&self) -> bool {
        self.is_running() && self.progress.written_bytes.load(Relaxed) < self.progress.total_bytes / 2
    }

    /// Requests that the background thread stop writing this rank's shard of the checkpoint, so
    /// that the shard remains incomplete.
    pub(super) fn cancel(&self) {
        self.progress.is_cancelled.store(true, Relaxed);
    }

    /// Waits for the background thread that writes this rank's shard to end, and returns its
    /// result. Returns its result, which is `None` after a cancellation, and the staging memory.
    pub(super) fn finish(
        mut self,
    ) -> std::result::Result<(Option<ShardWriteResult>, Vec<Buf>), ShardThreadFailure> {
        match self.thread.take() {
            Some(thread) => join_thread(thread),
            None => Ok((None, Vec::new())),
        }
    }
}

impl Drop for BackgroundWrite {
    /// Cancels the background write of this rank's shard, if the thread is still running, and waits
    /// until the thread has ended. A later attempt in this process then finds no thread that
    /// writes.
    fn drop(&mut self) {
        self.cancel();
        if let Some(thread) = self.thread.take() {
            // No one needs the result of an abandoned checkpoint.
            _ = thread.join();
        }
    }
}

/// Identifies a range of a tensor that this rank writes to a checkpoint: tensor name, role (weight
/// or optimizer state), and index of the first element.
pub(super) struct RangeLabel {
    name: String,
    role: TensorRole,
    start_element: u64,
}

impl RangeLabel {
    /// Creates the label of a tensor range: the tensor's name, its role (weight or optimizer
    /// state), and the index of the range's first element.
    pub(super) fn new(o: &OwnedRange) -> Self {
        RangeLabel { name: o.name.into(), role: o.role, start_element: o.start_element }
    }

    /// Combines this label (name, role, first element) with the values `data` into a tensor range
    /// that [`ckpt::write_shard`] can write.
    fn with_values<'a>(&'a self, data: View<'a>) -> TensorPiece<'a> {
        let data = match data.dtype() {
            Dtype::F32 => PieceElements::F32(data.host_slice()),
            Dtype::Bf16 => PieceElements::Bf16(data.half_bits()),
            Dtype::F16 => unreachable!("with fp16, checkpoints hold fp32 master weights"),
        };
        TensorPiece { name: &self.name, role: self.role, start_element: self.start_element, data }
    }
}

/// Starts a thread that runs a function and is named `name` for debuggers.
pub(super) fn spawn_named_thread<T: Send + 'static>(
    name: &str,
    f: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name.into()).spawn(f).map_err(|e| build_thread_start_error(name, &e))
}

/// Why a thread that copies a shard to the host or writes it to a file failed: an error of the
/// device, or a panic.
#[derive(Debug, thiserror::Error)]
pub(super) enum ShardThreadFailure {
    /// The device rejected an operation.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The thread panicked.
    #[error("{message}")]
    Panic {
        /// The message of the panic.
        message: String,
    },
}

/// Waits for a thread to end, and returns its result or, if the thread panicked, an error.
pub(super) fn join_thread<T>(
    thread: JoinHandle<std::result::Result<T, DeviceError>>,
) -> std::result::Result<T, ShardThreadFailure> {
    match thread.join() {
        Ok(result) => Ok(result?),
        Err(panic) => Err(ShardThreadFailure::Panic { message: extract_panic_message(panic.as_ref()) }),
    }
}

/// Copies this rank's weights and optimizer states into the memory file of its host, which contains
/// copies of training states for a fast restart. Returns the size of the copy in bytes.
pub(super) fn copy_shard_to_memory_store(
    ops: &dyn Ops,
    store: &MemoryStore,
    (id, rank): (MemoryCopyId, u32),
    facts: Option<RunFacts>,
    labels: &[RangeLabel],
    values: &[View],
) -> std::result::Result<std::result::Result<u64, CkptError>, DeviceError> {
    with_host_pieces(ops, labels, values, |pieces| {
        store.write_copy(id, rank, facts, pieces, rayon::current_num_threads())
    })
}

/// Writes this rank's shard of a checkpoint on the calling thread; values in device memory are
/// copied to the host first.
pub(super) fn write_shard_in_foreground(
    ops: &dyn Ops,
    path: &Path,
    rank: u32,
    world: u32,
    labels: &[RangeLabel],
    values: &[View],
) -> std::result::Result<ShardWriteResult, DeviceError> {
    with_host_pieces(ops, labels, values, |pieces| ckpt::write_shard(path, rank, world, pieces))
}

/// Copies those tensor ranges of a shard that are in device memory to the host, and then calls
/// `write` with all ranges in host memory.
fn with_host_pieces<T>(
    ops: &dyn Ops,
    labels: &[RangeLabel],
    values: &[View],
    write: impl FnOnce(&[TensorPiece]) -> T,
) -> std::result::Result<T, DeviceError> {
    let host_copy = |v: &View| if v.is_on_host() { Buf::default() } else { ops.clone_to_host(*v) };
    let copies: Vec<Buf> = values.iter().map(host_copy).collect();
    ops.check_status()?; // invalid values must not be saved
    let pieces = labels.iter().zip(values).zip(&copies).map(|((label, values), copy)| {
        label.with_values(if values.is_on_host() { *values } else { copy.view() })
    });
    Ok(write(&pieces.collect::<Vec<TensorPiece>>()))
}
