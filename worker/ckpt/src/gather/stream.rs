//! Copies weights from a checkpoint to weight files. Several threads read ahead, and the calling
//! thread converts the elements and writes the files.
use super::plan::{GatherPlan, GatherWindow, GatheredFile};
use crate::catalog::{TensorSource, build_f32_read_requests};
use crate::codec::disk::{FileWriter, HashMode, IoMode};
use crate::codec::narrow::{NarrowingBuffers, find_overflow};
use crate::error::{CkptError, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of buffers for exporting weights, which the reading threads fill and the writing thread
/// empties.
const WINDOW_COUNT: usize = 6;
/// Number of threads that read the checkpoint. The disk serves one thread while another one
/// verifies its bytes.
const READER_COUNT: usize = 3;

/// A message from a reading thread to the writing thread of an export: the index of a group of
/// elements, and the elements or the read error.
type GatherWindowResult = (usize, Result<(GatherWindow, Vec<f32>)>);

/// Copies the weights of a checkpoint to new weight files in the directory `dir`, as `plan` states.
/// Returns the files, and the names of tensors with NaN or infinite values. Calls `progress` with
/// the number of written bytes and the total number. Returns `None` if `progress` returns
/// [`ControlFlow::Break`].
pub(super) fn write_weights(
    checkpoint: &dyn TensorSource,
    plan: &GatherPlan,
    dir: &Path,
    mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Option<(Vec<GatheredFile>, BTreeSet<String>)>> {
    let windows =
        Mutex::new((0..plan.files.len()).flat_map(|file| plan.divide_into_windows(file)).enumerate());
    std::thread::scope(|scope| {
        let (full, inbox) = sync_channel::<GatherWindowResult>(WINDOW_COUNT);
        let (outbox, empty) = sync_channel::<Vec<f32>>(WINDOW_COUNT);
        for _ in 0..WINDOW_COUNT {
            let _ = outbox.send(Vec::new());
        }
        let empty = Arc::new(Mutex::new(empty));
        for _ in 0..READER_COUNT {
            let (full, empty, windows) = (full.clone(), empty.clone(), &windows);
            scope.spawn(move || {
                loop {
                    // wait for a buffer before taking a window, so that the window that is needed
                    // next always has a buffer
                    let buffer = lock_mutex(&empty).recv();
                    // after an error the converting thread has dropped its sender
                    let (Ok(buffer), Some((i, window))) = (buffer, lock_mutex(windows).next()) else {
                        return;
                    };
                    if full.send((i, read_window(checkpoint, plan, window, buffer))).is_err() {
                        return;
                    }
                }
            });
        }
        drop((full, empty));
        let mut read = OrderedWindows { inbox, next_window: 0, early_windows: BTreeMap::new() };
        let mut files = Vec::with_capacity(plan.files.len());
        let mut done = 0;
        let mut buffers = NarrowingBuffers::default();
        let mut not_finite = BTreeSet::new();
        for (i, (name, _)) in plan.files.iter().enumerate() {
            let mut writer = FileWriter::create(dir.join(name), IoMode::Direct, HashMode::File)?;
            writer.write(&plan.encode_header(i)?)?;
            for _ in 0..plan.divide_into_windows(i).len() {
                let (window, buffer) = read.receive_next()?;
                write_window(plan, &window, &buffer, &mut buffers, &mut writer)?;
                window.collect_non_finite_names(plan, &buffer, &mut not_finite);
                done += buffer.len() as u64 * plan.dtype.size();
                if progress(done, plan.bytes).is_break() {
                    return Ok(None);
                }
                let _ = outbox.send(buffer);
            }
            let written = writer.finish()?;
            let blake3 = written.digest.ok_or_else(|| CkptError::internal("a file was not hashed"))?;
            files.push(GatheredFile { name: name.clone(), bytes: written.bytes, blake3 });
        }
        Ok(Some((files, not_finite)))
    })
}

/// Locks a mutex, also after a thread panicked while it held the lock.
fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // joining a reader that panicked ends the gather
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The receiver that takes groups of elements from several reading threads in any order, and
/// returns them in the order of the output files.
struct OrderedWindows {
    inbox: Receiver<GatherWindowResult>,
    next_window: usize,
    early_windows: BTreeMap<usize, Result<(GatherWindow, Vec<f32>)>>,
}

impl OrderedWindows {
    /// Waits until a reading thread has delivered the group of elements that must be written next,
    /// and returns this group.
    ///
    /// # Errors
    /// Fails if reading this window failed, or the reading threads ended early.
    fn receive_next(&mut self) -> Result<(GatherWindow, Vec<f32>)> {
        loop {
            if let Some(read) = self.early_windows.remove(&self.next_window) {
                self.next_window += 1;
                return read;
            }
            let ended = |_| CkptError::internal("the reading threads ended early");
            let (i, read) = self.inbox.recv().map_err(ended)?;
            self.early_windows.insert(i, read);
        }
    }
}

/// Reads the tensor elements of one group, `window`, from the checkpoint into `buffer`, and returns
/// the group and the buffer. The bytes are verified later, by [`TensorSource::verify_reads`].
fn read_window(
    checkpoint: &dyn TensorSource,
    plan: &GatherPlan,
    window: GatherWindow,
    mut buffer: Vec<f32>,
) -> Result<(GatherWindow, Vec<f32>)> {
    let spans = window.spans.iter().map(|(tensor, range)| (Some(&plan.tensors[*tensor]), range.clone()));
    checkpoint.read_unverified(&mut build_f32_read_requests(spans, &mut buffer))?;
    Ok((window, buffer))
}

/// Converts `values`, consecutive elements of an exported weight file, to the dtype of the export,
/// and appends them to the file.
///
/// # Errors
/// Fails with [`CkptError::ValueOverflow`] if a finite value is outside of the range of the dtype.
/// Also fails if writing fails.
fn write_window(
    plan: &GatherPlan,
    window: &GatherWindow,
    values: &[f32],
    buffers: &mut NarrowingBuffers,
    writer: &mut FileWriter,
) -> Result<()> {
    let narrow = buffers.convert_values(plan.dtype, values);
    writer.write(narrow)?;
    let Some(at) = find_overflow(plan.dtype, values, narrow) else { return Ok(()) };
    let mut before = 0;
    for (tensor, range) in &window.spans {
        let count = (range.end - range.start) as usize;
        if at < before + count {
            let (tensor, element) = (plan.tensors[*tensor].name.clone(), range.start + (at - before) as u64);
            let (value, dtype) = (values[at], plan.dtype.torch_name());
            return Err(CkptError::ValueOverflow { tensor, element, value, dtype });
        }
        before += count;
    }
    Ok(())
}
