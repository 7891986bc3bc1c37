//! Streams weights from a checkpoint into files: several threads read ahead, one converts and
//! passes the result to the writer.
use super::{GatherPlan, GatheredFile};
use crate::disk::{FileWriter, IoMode};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::source::{ReadRequest, TensorSource};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Windows between the reading threads and the writing one.
const WINDOWS: usize = 6;
/// Threads that read: the disk serves one while another verifies what it read.
const READERS: usize = 3;

/// Consecutive elements of one file, from one or more tensors.
#[derive(Default)]
pub(super) struct Window {
    /// Indices of tensors, each with a range of its elements.
    pub(super) spans: Vec<(usize, Range<u64>)>,
    pub(super) elements: usize,
}

impl Window {
    /// Adds the names of its tensors that hold NaN or infinite values.
    fn add_not_finite(&self, plan: &GatherPlan, values: &[f32], names: &mut BTreeSet<String>) {
        let mut rest = values;
        for (tensor, range) in &self.spans {
            let (span, tail) = rest.split_at((range.end - range.start) as usize);
            rest = tail;
            // a fold without early exit is vectorized
            if span.iter().fold(false, |any, x| any | !x.is_finite()) {
                names.insert(plan.tensors[*tensor].name.clone());
            }
        }
    }
}

/// The result of a reading thread: the number of the window, and its data or error.
type ReadWindow = (usize, Result<(Window, Vec<f32>)>);

/// Writes the weight files into `dir`. Returns the files, and the names of tensors with NaN or
/// infinite values.
pub(super) fn write_weights(
    checkpoint: &dyn TensorSource,
    plan: &GatherPlan,
    dir: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<(Vec<GatheredFile>, BTreeSet<String>)> {
    let windows = Mutex::new((0..plan.files.len()).flat_map(|file| plan.windows(file)).enumerate());
    std::thread::scope(|scope| {
        let (full, inbox) = sync_channel::<ReadWindow>(WINDOWS);
        let (outbox, empty) = channel::<Vec<f32>>();
        for _ in 0..WINDOWS {
            let _ = outbox.send(Vec::new());
        }
        let empty = Arc::new(Mutex::new(empty));
        for _ in 0..READERS {
            let (full, empty, windows) = (full.clone(), empty.clone(), &windows);
            scope.spawn(move || {
                loop {
                    // a buffer first, so that the next window in order always has one
                    let buffer = lock_mutex(&empty).recv();
                    // the sender is gone after an error
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
        let mut read = OrderedWindows { inbox, next: 0, early: BTreeMap::new() };
        let mut files = Vec::with_capacity(plan.files.len());
        let mut done = 0;
        let mut narrow = NarrowBuffers::default();
        let mut not_finite = BTreeSet::new();
        for (i, (name, _)) in plan.files.iter().enumerate() {
            let mut writer = FileWriter::create(dir.join(name), IoMode::Direct, false)?;
            writer.write(&plan.encode_header(i)?)?;
            for _ in 0..plan.windows(i).len() {
                let (window, buffer) = read.next()?;
                narrow.write(plan, &window, &buffer, &mut writer)?;
                window.add_not_finite(plan, &buffer, &mut not_finite);
                done += buffer.len() as u64 * plan.dtype.size();
                progress(done, plan.bytes);
                let _ = outbox.send(buffer);
            }
            files.push(GatheredFile { name: name.clone(), bytes: writer.finish()?.0 });
        }
        Ok((files, not_finite))
    })
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // a reader that panicked ends the gather when it is joined
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the order of windows that were read concurrently.
struct OrderedWindows {
    inbox: Receiver<ReadWindow>,
    next: usize,
    early: BTreeMap<usize, Result<(Window, Vec<f32>)>>,
}

impl OrderedWindows {
    fn next(&mut self) -> Result<(Window, Vec<f32>)> {
        loop {
            if let Some(read) = self.early.remove(&self.next) {
                self.next += 1;
                return read;
            }
            let ended = |_| CkptError::internal("the reading threads ended early");
            let (i, read) = self.inbox.recv().map_err(ended)?;
            self.early.insert(i, read);
        }
    }
}

fn read_window(
    checkpoint: &dyn TensorSource,
    plan: &GatherPlan,
    window: Window,
    mut buffer: Vec<f32>,
) -> Result<(Window, Vec<f32>)> {
    buffer.resize(window.elements, 0.0);
    let mut requests = Vec::with_capacity(window.spans.len());
    let mut rest = buffer.as_mut_slice();
    for (tensor, range) in &window.spans {
        let (out, tail) = rest.split_at_mut((range.end - range.start) as usize);
        rest = tail;
        let name = plan.tensors[*tensor].name.as_str();
        requests.push(ReadRequest {
            name,
            role: plan.tensors[*tensor].role,
            start_element: range.start,
            out,
        });
    }
    checkpoint.read_unchecked(&mut requests)?;
    Ok((window, buffer))
}

/// Reused buffers for conversion to 16-bit dtypes.
#[derive(Default)]
struct NarrowBuffers {
    bf16: Vec<bf16>,
    f16: Vec<f16>,
}

impl NarrowBuffers {
    fn write(
        &mut self,
        plan: &GatherPlan,
        window: &Window,
        values: &[f32],
        writer: &mut FileWriter,
    ) -> Result<()> {
        let overflow = match plan.dtype {
            Dtype::BF16 => {
                self.bf16.resize(values.len(), bf16::ZERO);
                self.bf16.convert_from_f32_slice(values);
                writer.write(bytemuck::cast_slice(&self.bf16))?;
                overflow(values, &self.bf16, |x| x.is_infinite())
            }
            Dtype::F16 => {
                self.f16.resize(values.len(), f16::ZERO);
                self.f16.convert_from_f32_slice(values);
                writer.write(bytemuck::cast_slice(&self.f16))?;
                overflow(values, &self.f16, |x| x.is_infinite())
            }
            _ => {
                writer.write(bytemuck::cast_slice(values))?;
                None
            }
        };
        let Some(at) = overflow else { return Ok(()) };
        let mut before = 0;
        for (tensor, range) in &window.spans {
            let count = (range.end - range.start) as usize;
            if at < before + count {
                let tensor = plan.tensors[*tensor].name.clone();
                let element = range.start + (at - before) as u64;
                return Err(CkptError::ValueOverflow {
                    tensor,
                    element,
                    value: values[at],
                    dtype: plan.dtype.torch_name(),
                });
            }
            before += count;
        }
        Ok(())
    }
}

/// Index of the first finite value that became infinite.
fn overflow<T>(wide: &[f32], narrow: &[T], is_infinite: impl Fn(&T) -> bool) -> Option<usize> {
    wide.iter().zip(narrow).position(|(w, n)| is_infinite(n) && w.is_finite())
}
