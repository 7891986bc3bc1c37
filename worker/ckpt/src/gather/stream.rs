//! Windows of a file of weights on their way: some threads read ahead while one converts and hands over to the writer.
use super::{GatheredFile, Plan};
use crate::disk::{FileWriter, WritePath};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::source::{Request, Source};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Windows between the reading threads and the writing one.
const WINDOWS: usize = 6;
/// Threads that read: while one sums what it has read, the disk works for another.
const READERS: usize = 3;

/// Some consecutive elements of one file, of one or more tensors.
#[derive(Default)]
pub(super) struct Window {
    /// Index of the tensor and the elements of it.
    pub(super) spans: Vec<(usize, Range<u64>)>,
    pub(super) elements: usize,
}

impl Window {
    /// Adds the names of its tensors that hold NaN or infinite values.
    fn add_not_finite(&self, plan: &Plan, values: &[f32], names: &mut BTreeSet<String>) {
        let mut rest = values;
        for (tensor, range) in &self.spans {
            let (own, tail) = rest.split_at((range.end - range.start) as usize);
            rest = tail;
            // without an early end the loop is vectorised
            if own.iter().fold(false, |any, x| any | !x.is_finite()) {
                names.insert(plan.tensors[*tensor].name.clone());
            }
        }
    }
}

/// What a reading thread hands over: which window, and what was read for it.
type Read = (usize, Result<(Window, Vec<f32>)>);

/// Writes the weight files into `dir`; some threads read ahead while this one converts and hands over to the writer.
pub(super) fn write_weights(
    checkpoint: &dyn Source,
    plan: &Plan,
    dir: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<(Vec<GatheredFile>, BTreeSet<String>)> {
    let all = Mutex::new((0..plan.files.len()).flat_map(|file| plan.windows(file)).enumerate());
    std::thread::scope(|scope| {
        let (full, inbox) = sync_channel::<Read>(WINDOWS);
        let (outbox, empty) = channel::<Vec<f32>>();
        for _ in 0..WINDOWS {
            let _ = outbox.send(Vec::new());
        }
        let empty = Arc::new(Mutex::new(empty));
        for _ in 0..READERS {
            let (full, empty, all) = (full.clone(), empty.clone(), &all);
            scope.spawn(move || {
                loop {
                    // memory first: so the window that is waited for always has some
                    let memory = lock(&empty).recv();
                    // the other side is gone after an error
                    let (Ok(buffer), Some((i, window))) = (memory, lock(all).next()) else { return };
                    if full.send((i, read_window(checkpoint, plan, window, buffer))).is_err() {
                        return;
                    }
                }
            });
        }
        drop((full, empty));
        let mut read = InOrder { inbox, next: 0, early: BTreeMap::new() };
        let mut files = Vec::with_capacity(plan.files.len());
        let mut done = 0;
        let mut narrow = Narrow::default();
        let mut not_finite = BTreeSet::new();
        for (i, (name, _)) in plan.files.iter().enumerate() {
            let mut writer = FileWriter::create(dir.join(name), WritePath::Direct, false)?;
            writer.write(&plan.header(i)?)?;
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

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // a reader that panics ends the others' work when it is joined
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Windows in their order, whichever is read first.
struct InOrder {
    inbox: Receiver<Read>,
    next: usize,
    early: BTreeMap<usize, Result<(Window, Vec<f32>)>>,
}

impl InOrder {
    fn next(&mut self) -> Result<(Window, Vec<f32>)> {
        loop {
            if let Some(read) = self.early.remove(&self.next) {
                self.next += 1;
                return read;
            }
            let ended = |_| CkptError::invalid("the reading threads ended early");
            let (i, read) = self.inbox.recv().map_err(ended)?;
            self.early.insert(i, read);
        }
    }
}

fn read_window(
    checkpoint: &dyn Source,
    plan: &Plan,
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
        requests.push(Request { name, role: plan.tensors[*tensor].role, start_element: range.start, out });
    }
    checkpoint.read_unchecked(&mut requests)?;
    Ok((window, buffer))
}

/// Memory of the conversion.
#[derive(Default)]
struct Narrow {
    bf16: Vec<bf16>,
    f16: Vec<f16>,
}

impl Narrow {
    fn write(&mut self, plan: &Plan, window: &Window, values: &[f32], writer: &mut FileWriter) -> Result<()> {
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
                return Err(CkptError::Overflow {
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

/// The first finite value that became infinite.
fn overflow<T>(wide: &[f32], narrow: &[T], is_infinite: impl Fn(&T) -> bool) -> Option<usize> {
    wide.iter().zip(narrow).position(|(w, n)| is_infinite(n) && w.is_finite())
}
