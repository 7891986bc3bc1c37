//! What differs between two checkpoints of any formats, stages and worlds: structure first, then every element.
//!
//! Streaming: each thread holds two windows of 4 MiB, whatever the size.
mod stats;

pub use self::stats::{At, Cast, Values};

use self::stats::Stats;
use crate::catalog::{Role, TensorInfo, Tie};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::source::{Request, Source};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Elements of each side compared at a time.
const WINDOW: u64 = 1 << 20;
/// Most threads.
const THREADS: usize = 16;

/// One of the two checkpoints.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    pub source: &'a dyn Source,
    /// Second names of its weights.
    pub ties: &'a [Tie],
}

/// Which tensors are compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiffOptions {
    /// Weights and buffers only, no state of the optimizer.
    pub weights_only: bool,
}

/// How two checkpoints differ.
#[derive(Clone, Debug, Serialize)]
pub struct DiffReport {
    pub a: PathBuf,
    pub b: PathBuf,
    /// Pairs of tensors whose elements were compared.
    pub compared: u64,
    /// Of those, with the same bits everywhere.
    pub equal: u64,
    /// In the order of `a`.
    pub different: Vec<TensorDiff>,
    /// `role/name` of what only one of them has.
    pub only_a: Vec<String>,
    pub only_b: Vec<String>,
    /// Same name, other shape.
    pub shapes: Vec<ShapeDiff>,
    /// Stored in other element types, though perhaps with the same values.
    pub dtypes: Vec<DtypeDiff>,
    /// Names that one side stores and the other has as a second name: compared with what that is tied to.
    pub tied: Vec<String>,
    /// No floating point numbers on one side alone: only their shapes were compared.
    pub not_compared: Vec<String>,
    /// No floating point numbers, and with other bytes.
    pub other_bytes: Vec<BytesDiff>,
}

impl DiffReport {
    /// Is there nothing to tell them apart but how they are stored?
    pub fn is_equal(&self) -> bool {
        self.different.is_empty()
            && self.only_a.is_empty()
            && self.only_b.is_empty()
            && self.shapes.is_empty()
            && self.not_compared.is_empty()
            && self.other_bytes.is_empty()
    }
}

/// A tensor of integers or the like with different elements.
#[derive(Clone, Debug, Serialize)]
pub struct BytesDiff {
    /// `role/name`, as `a` calls it.
    pub tensor: String,
    pub shape: Vec<u64>,
    pub dtype: Dtype,
    /// Row-major index of the first element with other bytes.
    pub first: u64,
    pub differing: u64,
}

/// A tensor with different elements.
#[derive(Clone, Debug, Serialize)]
pub struct TensorDiff {
    /// `role/name`, as `a` calls it.
    pub tensor: String,
    pub shape: Vec<u64>,
    #[serde(flatten)]
    pub values: Values,
}

/// A tensor of two shapes.
#[derive(Clone, Debug, Serialize)]
pub struct ShapeDiff {
    pub tensor: String,
    pub a: Vec<u64>,
    pub b: Vec<u64>,
}

/// A tensor of two element types.
#[derive(Clone, Debug, Serialize)]
pub struct DtypeDiff {
    pub tensor: String,
    pub a: Dtype,
    pub b: Dtype,
}

/// Compares every tensor that both have. `progress` gets (elements compared, elements to compare).
///
/// # Errors
/// Whatever keeps one of them from being read, damage above all.
pub fn diff(
    a: Side<'_>,
    b: Side<'_>,
    options: &DiffOptions,
    progress: impl FnMut(u64, u64) + Send,
) -> Result<DiffReport> {
    let (mut report, pairs) = pair(a, b, options);
    let (exact, pairs): (Vec<Pair>, Vec<Pair>) = pairs.into_iter().partition(|p| !p.a.dtype.is_float());
    for pair in &exact {
        report.compared += 1;
        match bytes_of(a.source, b.source, pair)? {
            None => report.equal += 1,
            Some(found) => report.other_bytes.push(found),
        }
    }
    let stats = compare(a.source, b.source, &pairs, progress)?;
    for (pair, stats) in pairs.iter().zip(stats) {
        report.compared += 1;
        match stats.finish() {
            None => report.equal += 1,
            Some(values) => {
                report.different.push(TensorDiff {
                    tensor: label(&pair.a),
                    shape: pair.a.shape.clone(),
                    values,
                });
            }
        }
    }
    Ok(report)
}

fn label(info: &TensorInfo) -> String {
    format!("{}/{}", info.role, info.name)
}

/// The same tensor on both sides.
struct Pair {
    a: TensorInfo,
    b: TensorInfo,
}

/// What belongs together, and what has no partner.
fn pair(a: Side<'_>, b: Side<'_>, options: &DiffOptions) -> (DiffReport, Vec<Pair>) {
    let wanted = |t: &TensorInfo| !options.weights_only || !t.role.is_optimizer_state();
    let of = |side: Side<'_>| side.source.tensors().into_iter().filter(wanted).collect::<Vec<_>>();
    let (of_a, of_b) = (of(a), of(b));
    let (held_a, held_b) = (Held::new(&of_a, a.ties), Held::new(&of_b, b.ties));
    let mut report = DiffReport {
        a: a.source.path().to_owned(),
        b: b.source.path().to_owned(),
        compared: 0,
        equal: 0,
        different: Vec::new(),
        only_a: Vec::new(),
        only_b: Vec::new(),
        shapes: Vec::new(),
        dtypes: Vec::new(),
        tied: Vec::new(),
        not_compared: Vec::new(),
        other_bytes: Vec::new(),
    };
    let mut pairs = Vec::new();
    let mut covered = HashSet::new();
    for info in &of_a {
        match held_b.find(info) {
            None => report.only_a.push(label(info)),
            Some((other, tied)) => {
                if tied {
                    report.tied.push(format!("{} = {} in b", label(info), label(other)));
                    covered.insert(label(other));
                }
                pairs.extend(report.judge(info, other));
            }
        }
    }
    for info in &of_b {
        match held_a.find(info) {
            None => report.only_b.push(label(info)),
            Some((other, true)) => {
                report.tied.push(format!("{} = {} in a", label(info), label(other)));
                covered.insert(label(other));
                pairs.extend(report.judge(other, info));
            }
            Some((_, false)) => {}
        }
    }
    // compared under its second name
    report.only_a.retain(|name| !covered.contains(name));
    report.only_b.retain(|name| !covered.contains(name));
    (report, pairs)
}

/// Tensors by role and name, second names included.
struct Held<'a> {
    by_name: HashMap<(Role, &'a str), &'a TensorInfo>,
    aliases: HashMap<&'a str, &'a str>,
}

impl<'a> Held<'a> {
    fn new(tensors: &'a [TensorInfo], ties: &'a [Tie]) -> Held<'a> {
        Held {
            by_name: tensors.iter().map(|t| ((t.role, t.name.as_str()), t)).collect(),
            aliases: ties.iter().map(|t| (t.alias.as_str(), t.target.as_str())).collect(),
        }
    }

    /// The tensor of this role and name; `true`: it has the name through a tie.
    fn find(&self, info: &TensorInfo) -> Option<(&'a TensorInfo, bool)> {
        let by_name = |name: &str| self.by_name.get(&(info.role, name)).copied();
        by_name(&info.name).map(|t| (t, false)).or_else(|| {
            let target = self.aliases.get(info.name.as_str())?;
            Some((by_name(target)?, true))
        })
    }
}

impl DiffReport {
    /// Notes what the catalogs tell; the pair when its elements can be compared.
    fn judge(&mut self, a: &TensorInfo, b: &TensorInfo) -> Option<Pair> {
        if a.dtype != b.dtype {
            self.dtypes.push(DtypeDiff { tensor: label(a), a: a.dtype, b: b.dtype });
        }
        if a.shape != b.shape {
            self.shapes.push(ShapeDiff { tensor: label(a), a: a.shape.clone(), b: b.shape.clone() });
            return None;
        }
        if a.dtype != b.dtype && !(a.dtype.is_float() && b.dtype.is_float()) {
            self.not_compared.push(label(a));
            return None;
        }
        Some(Pair { a: a.clone(), b: b.clone() })
    }
}

/// How the bytes of a pair differ that are no floating point numbers; few tensors are none, and small.
fn bytes_of(a: &dyn Source, b: &dyn Source, pair: &Pair) -> Result<Option<BytesDiff>> {
    let (size, total) = (pair.a.dtype.size(), pair.a.elements());
    let (mut start, mut first, mut differing) = (0, None, 0);
    let (mut left, mut right) = (Vec::new(), Vec::new());
    while start < total {
        let count = WINDOW.min(total - start);
        for (source, info, out) in [(a, &pair.a, &mut left), (b, &pair.b, &mut right)] {
            out.resize((count * size) as usize, 0u8);
            source.read_raw(&info.name, info.role, start, out)?;
        }
        let elements = left.chunks(size as usize).zip(right.chunks(size as usize));
        for (i, _) in elements.enumerate().filter(|(_, (x, y))| x != y) {
            first.get_or_insert(start + i as u64);
            differing += 1;
        }
        start += count;
    }
    let (shape, dtype) = (pair.a.shape.clone(), pair.a.dtype);
    Ok(first.map(|first| BytesDiff { tensor: label(&pair.a), shape, dtype, first, differing }))
}

/// Some elements of a pair.
struct Span {
    pair: usize,
    range: Range<u64>,
}

/// Windows of at most [`WINDOW`] elements over all pairs, in order.
fn windows(pairs: &[Pair]) -> Vec<Vec<Span>> {
    let (mut windows, mut open, mut room) = (Vec::new(), Vec::new(), WINDOW);
    for (pair, info) in pairs.iter().map(|p| &p.a).enumerate() {
        let (mut start, total) = (0, info.elements());
        while start < total {
            let end = total.min(start + room);
            open.push(Span { pair, range: start..end });
            room -= end - start;
            start = end;
            if room == 0 {
                windows.push(std::mem::take(&mut open));
                room = WINDOW;
            }
        }
    }
    windows.extend((!open.is_empty()).then_some(open));
    windows
}

/// Statistics of every pair, in their order.
fn compare(
    a: &dyn Source,
    b: &dyn Source,
    pairs: &[Pair],
    progress: impl FnMut(u64, u64) + Send,
) -> Result<Vec<Stats>> {
    let windows = windows(pairs);
    let total: u64 = pairs.iter().map(|p| p.a.elements()).sum();
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done = Mutex::new((BTreeMap::new(), progress, 0u64));
    let worker = || -> Result<()> {
        let (mut left, mut right) = (Vec::new(), Vec::new());
        while let Some((number, spans)) = take(&windows, &next, &failed) {
            let found = window(a, b, pairs, spans, &mut left, &mut right).inspect_err(|_| {
                failed.store(true, Ordering::Relaxed);
            })?;
            let elements: u64 = spans.iter().map(|s| s.range.end - s.range.start).sum();
            let mut done = done.lock().map_err(|_| CkptError::invalid("a thread panicked"))?;
            done.0.insert(number, found);
            done.2 += elements;
            let so_far = done.2;
            (done.1)(so_far, total);
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let ended =
            workers.into_iter().map(|w| w.join().map_err(|_| CkptError::invalid("a thread panicked")));
        ended.collect::<Vec<_>>().into_iter().try_for_each(|result| result?)
    })?;
    let (found, ..) = done.into_inner().map_err(|_| CkptError::invalid("a thread panicked"))?;
    let mut all: Vec<Stats> = pairs.iter().map(|_| Stats::default()).collect();
    // in the order of the windows: the sums don't depend on the threads
    for (pair, stats) in found.into_values().flatten() {
        all[pair].append(stats);
    }
    Ok(all)
}

fn take<'a>(
    windows: &'a [Vec<Span>],
    next: &AtomicUsize,
    failed: &AtomicBool,
) -> Option<(usize, &'a [Span])> {
    if failed.load(Ordering::Relaxed) {
        return None;
    }
    let number = next.fetch_add(1, Ordering::Relaxed);
    windows.get(number).map(|spans| (number, spans.as_slice()))
}

/// Reads and compares one window.
fn window(
    a: &dyn Source,
    b: &dyn Source,
    pairs: &[Pair],
    spans: &[Span],
    left: &mut Vec<f32>,
    right: &mut Vec<f32>,
) -> Result<Vec<(usize, Stats)>> {
    read(a, spans, |s| &pairs[s.pair].a, left)?;
    read(b, spans, |s| &pairs[s.pair].b, right)?;
    let (mut found, mut at) = (Vec::new(), 0);
    for span in spans {
        let count = (span.range.end - span.range.start) as usize;
        let (x, y) = (&left[at..at + count], &right[at..at + count]);
        found.push((span.pair, Stats::of(span.range.start, x, y)));
        at += count;
    }
    Ok(found)
}

fn read<'a>(
    source: &dyn Source,
    spans: &[Span],
    of: impl Fn(&Span) -> &'a TensorInfo,
    buffer: &mut Vec<f32>,
) -> Result<()> {
    let total: u64 = spans.iter().map(|s| s.range.end - s.range.start).sum();
    buffer.resize(total as usize, 0.0);
    let (mut rest, mut requests) = (buffer.as_mut_slice(), Vec::new());
    for span in spans {
        let info = of(span);
        let (out, tail) = rest.split_at_mut((span.range.end - span.range.start) as usize);
        rest = tail;
        requests.push(Request { name: &info.name, role: info.role, start_element: span.range.start, out });
    }
    source.read_many(&mut requests)
}
