//! Compares two checkpoints, whose formats, ZeRO stages and numbers of ranks may differ.
//!
//! Elements are streamed. Each thread holds two windows of 4 MiB, whatever the size of the
//! checkpoints.
mod stats;

pub use crate::diff::stats::{ElementDiff, ElementPair, RoundingCast};

use crate::catalog::{TensorInfo, TensorSource, TiedWeight, build_f32_read_requests};
use crate::diff::stats::DiffStats;
use crate::error::Result;
use crate::parallel;
use crate::tensor::{Dtype, TensorRole};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Maximum number of elements of each checkpoint that a thread reads and compares at a time.
const WINDOW_ELEMENTS: u64 = 1 << 20;
/// Maximum number of threads that compare two checkpoints.
const THREADS_MAX: usize = 16;

/// One of the two checkpoints of a comparison: the open checkpoint, and the list of its tied
/// weights, which have two names.
#[derive(Clone, Copy)]
pub struct DiffSide<'a> {
    /// The open checkpoint, from which tensors are read.
    pub source: &'a dyn TensorSource,
    /// Tied weights of the checkpoint, which provide further names of its tensors.
    pub ties: &'a [TiedWeight],
}

/// Options of [`diff_checkpoints`], such as to compare only the weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiffOptions {
    /// Whether to compare only weights and buffers, and ignore optimizer states.
    pub weights_only: bool,
}

/// The differences that were found between two checkpoints `a` and `b`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DiffReport {
    /// Path of the first checkpoint.
    pub a: PathBuf,
    /// Path of the second checkpoint.
    pub b: PathBuf,
    /// Number of pairs of tensors whose elements were compared.
    pub compared: u64,
    /// Number of compared pairs whose elements all have equal bits.
    pub equal: u64,
    /// Floating-point tensors with different elements, in the order of `a`.
    pub different: Vec<FloatTensorDiff>,
    /// `role/name` of tensors that only `a` has.
    pub only_a: Vec<String>,
    /// `role/name` of tensors that only `b` has.
    pub only_b: Vec<String>,
    /// Tensors with equal names and different shapes.
    pub shapes: Vec<ShapeDiff>,
    /// Tensors with different dtypes, whose values may be equal.
    pub dtypes: Vec<DtypeDiff>,
    /// One line for each tensor that one checkpoint stores and the other has as an alias. Such a
    /// tensor is compared with the target of the alias.
    pub tied: Vec<String>,
    /// `role/name` of tensors with equal shapes whose elements can't be compared, since the dtypes
    /// differ and are not both floating-point.
    pub not_compared: Vec<String>,
    /// Integer tensors with different bytes.
    pub other_bytes: Vec<IntegerTensorDiff>,
}

impl DiffReport {
    /// Returns true if the two checkpoints have the same tensors, with equal elements. Differences
    /// in dtypes and ties do not count.
    pub fn is_equal(&self) -> bool {
        self.different.is_empty()
            && self.only_a.is_empty()
            && self.only_b.is_empty()
            && self.shapes.is_empty()
            && self.not_compared.is_empty()
            && self.other_bytes.is_empty()
    }
}

/// The differences between the elements of an integer tensor in the two checkpoints.
#[derive(Clone, Debug, Serialize)]
pub struct IntegerTensorDiff {
    /// Role and name of the tensor in checkpoint `a`, as `role/name`.
    pub tensor: String,
    /// Shape on both sides.
    pub shape: Vec<u64>,
    /// Dtype on both sides.
    pub dtype: Dtype,
    /// Row-major index of the first element with different bytes.
    pub first: u64,
    /// Number of elements with different bytes.
    pub differing: u64,
}

/// The differences between the elements of a floating-point tensor in the two checkpoints.
#[derive(Clone, Debug, Serialize)]
pub struct FloatTensorDiff {
    /// Role and name of the tensor in checkpoint `a`, as `role/name`.
    pub tensor: String,
    /// Shape on both sides.
    pub shape: Vec<u64>,
    /// Statistics of the differences between the elements.
    #[serde(flatten)]
    pub values: ElementDiff,
}

/// A tensor that has different shapes in the two checkpoints.
#[derive(Clone, Debug, Serialize)]
pub struct ShapeDiff {
    /// Role and name of the tensor in checkpoint `a`, as `role/name`.
    pub tensor: String,
    /// Shape in `a`.
    pub a: Vec<u64>,
    /// Shape in `b`.
    pub b: Vec<u64>,
}

/// A tensor that has different dtypes in the two checkpoints.
#[derive(Clone, Debug, Serialize)]
pub struct DtypeDiff {
    /// Role and name of the tensor in checkpoint `a`, as `role/name`.
    pub tensor: String,
    /// Dtype in `a`.
    pub a: Dtype,
    /// Dtype in `b`.
    pub b: Dtype,
}

/// Compares every tensor that both checkpoints have, and lists the tensors that only one has.
/// Calls `progress` with the number of compared elements and the total number.
///
/// # Errors
/// Fails if one of the checkpoints can't be read, for example because of damage.
pub fn diff_checkpoints(
    a: DiffSide<'_>,
    b: DiffSide<'_>,
    options: &DiffOptions,
    progress: impl FnMut(u64, u64) + Send,
) -> Result<DiffReport> {
    let (mut report, pairs) = pair_tensors(a, b, options);
    let (exact, pairs): (Vec<TensorPair>, Vec<TensorPair>) =
        pairs.into_iter().partition(|p| !p.a.dtype.is_float());
    for pair in &exact {
        report.compared += 1;
        match compare_bytes(a.source, b.source, pair)? {
            None => report.equal += 1,
            Some(difference) => report.other_bytes.push(difference),
        }
    }
    let stats = compare_elements(a.source, b.source, &pairs, progress)?;
    for (pair, stats) in pairs.iter().zip(stats) {
        report.compared += 1;
        match stats.into_element_diff() {
            None => report.equal += 1,
            Some(values) => {
                report.different.push(FloatTensorDiff {
                    tensor: pair.a.label(),
                    shape: pair.a.shape.clone(),
                    values,
                });
            }
        }
    }
    Ok(report)
}

/// Formats the equation `weight/ALIAS = weight/STORED` for a tied weight, where ALIAS is the second
/// name of the stored weight.
fn format_alias(alias: &TensorInfo, target: &TensorInfo) -> String {
    format!("{} = {}", alias.label(), target.label())
}

/// A tensor of checkpoint `a` and the corresponding tensor of checkpoint `b`, which have equal
/// shapes.
struct TensorPair {
    a: TensorInfo,
    b: TensorInfo,
}

/// Pairs each tensor of the first checkpoint with the tensor of the second checkpoint that has the
/// same role and name. Returns the pairs whose elements can be compared, and a report of all other
/// differences.
fn pair_tensors(a: DiffSide<'_>, b: DiffSide<'_>, options: &DiffOptions) -> (DiffReport, Vec<TensorPair>) {
    let is_compared = |t: &TensorInfo| !options.weights_only || !t.role.is_optimizer_state();
    let tensors =
        |side: DiffSide<'_>| side.source.tensors().into_iter().filter(is_compared).collect::<Vec<_>>();
    let (tensors_a, tensors_b) = (tensors(a), tensors(b));
    let (index_a, index_b) = (TensorIndex::new(&tensors_a, a.ties), TensorIndex::new(&tensors_b, b.ties));
    let mut report =
        DiffReport { a: a.source.path().to_owned(), b: b.source.path().to_owned(), ..DiffReport::default() };
    let mut pairs = Vec::new();
    let mut covered = HashSet::new();
    for info in &tensors_a {
        match index_b.find_tensor(info) {
            None => report.only_a.push(info.label()),
            Some((other, tied)) => {
                if tied {
                    report.tied.push(format!("{} in b", format_alias(info, other)));
                    covered.insert(other.label());
                }
                pairs.extend(report.pair_if_comparable(info, other));
            }
        }
    }
    for info in &tensors_b {
        match index_a.find_tensor(info) {
            None => report.only_b.push(info.label()),
            Some((other, true)) => {
                report.tied.push(format!("{} in a", format_alias(info, other)));
                covered.insert(other.label());
                pairs.extend(report.pair_if_comparable(other, info));
            }
            Some((_, false)) => {}
        }
    }
    // these tensors were compared under their aliases
    report.only_a.retain(|name| !covered.contains(name));
    report.only_b.retain(|name| !covered.contains(name));
    (report, pairs)
}

/// An index of the tensors of one checkpoint by role and name, in which a tied weight is found
/// under both of its names.
struct TensorIndex<'a> {
    tensors_by_name: HashMap<(TensorRole, &'a str), &'a TensorInfo>,
    aliases: HashMap<&'a str, &'a str>,
}

impl<'a> TensorIndex<'a> {
    /// Creates an index of `tensors` by role and name, in which `ties` adds the second name of each
    /// tied weight.
    fn new(tensors: &'a [TensorInfo], ties: &'a [TiedWeight]) -> TensorIndex<'a> {
        TensorIndex {
            tensors_by_name: tensors.iter().map(|t| ((t.role, t.name.as_str()), t)).collect(),
            aliases: ties.iter().map(|t| (t.alias.as_str(), t.target.as_str())).collect(),
        }
    }

    /// Finds the tensor that has the role and name of `info` in this checkpoint, where a tied
    /// weight is found under both of its names. Returns the tensor, and true if the name is an
    /// alias. Returns `None` if there is no such tensor.
    fn find_tensor(&self, info: &TensorInfo) -> Option<(&'a TensorInfo, bool)> {
        let by_name = |name: &str| self.tensors_by_name.get(&(info.role, name)).copied();
        by_name(&info.name).map(|t| (t, false)).or_else(|| {
            let target = self.aliases.get(info.name.as_str())?;
            Some((by_name(target)?, true))
        })
    }
}

impl DiffReport {
    /// Adds the dtypes and the shapes of the tensors `a` and `b` to this report if they differ,
    /// before the elements of the tensors are compared. Returns the two tensors as a pair if their
    /// elements can be compared, otherwise `None`.
    fn pair_if_comparable(&mut self, a: &TensorInfo, b: &TensorInfo) -> Option<TensorPair> {
        if a.dtype != b.dtype {
            self.dtypes.push(DtypeDiff { tensor: a.label(), a: a.dtype, b: b.dtype });
        }
        if a.shape != b.shape {
            self.shapes.push(ShapeDiff { tensor: a.label(), a: a.shape.clone(), b: b.shape.clone() });
            return None;
        }
        if a.dtype != b.dtype && !(a.dtype.is_float() && b.dtype.is_float()) {
            self.not_compared.push(a.label());
            return None;
        }
        Some(TensorPair { a: a.clone(), b: b.clone() })
    }
}

/// Compares a pair of tensors of equal dtype byte by byte, for dtypes that are not read as F32.
/// Returns the first differing element and the number of differing elements, or `None` if all bytes
/// are equal. Such tensors are few and small, so one thread reads them.
fn compare_bytes(
    a: &dyn TensorSource,
    b: &dyn TensorSource,
    pair: &TensorPair,
) -> Result<Option<IntegerTensorDiff>> {
    let (size, total) = (pair.a.dtype.size(), pair.a.element_count());
    let (mut start, mut first, mut differing) = (0, None, 0);
    let (mut left, mut right) = (Vec::new(), Vec::new());
    while start < total {
        let count = WINDOW_ELEMENTS.min(total - start);
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
    Ok(first.map(|first| IntegerTensorDiff { tensor: pair.a.label(), shape, dtype, first, differing }))
}

/// A range of element indices in which the two tensors of a pair are compared. `pair` is the index
/// of the pair of tensors.
struct PairSpan {
    pair: usize,
    range: Range<u64>,
}

/// Divides the elements of all tensor pairs into groups of at most [`WINDOW_ELEMENTS`] elements
/// that are read and compared at once. One thread compares a group at a time.
fn divide_pairs_into_windows(pairs: &[TensorPair]) -> Vec<Vec<PairSpan>> {
    let (mut windows, mut open, mut free) = (Vec::new(), Vec::new(), WINDOW_ELEMENTS);
    for (pair, info) in pairs.iter().map(|p| &p.a).enumerate() {
        let (mut start, total) = (0, info.element_count());
        while start < total {
            let end = total.min(start + free);
            open.push(PairSpan { pair, range: start..end });
            free -= end - start;
            start = end;
            if free == 0 {
                windows.push(std::mem::take(&mut open));
                free = WINDOW_ELEMENTS;
            }
        }
    }
    windows.extend((!open.is_empty()).then_some(open));
    windows
}

/// Compares the elements of all pairs of tensors in several threads. Returns the statistics of each
/// pair, in the order of `pairs`.
fn compare_elements(
    a: &dyn TensorSource,
    b: &dyn TensorSource,
    pairs: &[TensorPair],
    progress: impl FnMut(u64, u64) + Send,
) -> Result<Vec<DiffStats>> {
    let windows = divide_pairs_into_windows(pairs);
    let total: u64 = pairs.iter().map(|p| p.a.element_count()).sum();
    let progress = Mutex::new((progress, 0u64));
    let compare = |buffers: &mut [Vec<f32>; 2], i: usize| {
        let stats = compare_window(a, b, pairs, &windows[i], buffers)?;
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        let (report, done) = &mut *progress;
        *done += windows[i].iter().map(|s| s.range.end - s.range.start).sum::<u64>();
        report(*done, total);
        Ok(stats)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let mut totals: Vec<DiffStats> = pairs.iter().map(|_| DiffStats::default()).collect();
    // in the order of windows, so that sums don't depend on thread timing
    for window in parallel::map_indices(threads, windows.len(), Default::default, compare) {
        window?.into_iter().for_each(|(pair, stats)| totals[pair].merge_following_range(stats));
    }
    Ok(totals)
}

/// Reads the element ranges `spans` of the tensor pairs from both checkpoints and compares them
/// element by element. Returns for each range the index of its tensor pair and the statistics of
/// the differences.
fn compare_window(
    a: &dyn TensorSource,
    b: &dyn TensorSource,
    pairs: &[TensorPair],
    spans: &[PairSpan],
    [left, right]: &mut [Vec<f32>; 2],
) -> Result<Vec<(usize, DiffStats)>> {
    let spans_of_a = spans.iter().map(|s| (Some(&pairs[s.pair].a), s.range.clone()));
    let spans_of_b = spans.iter().map(|s| (Some(&pairs[s.pair].b), s.range.clone()));
    a.read_verified(&mut build_f32_read_requests(spans_of_a, left))?;
    b.read_verified(&mut build_f32_read_requests(spans_of_b, right))?;
    let (mut found, mut at) = (Vec::new(), 0);
    for span in spans {
        let count = (span.range.end - span.range.start) as usize;
        let (x, y) = (&left[at..at + count], &right[at..at + count]);
        found.push((span.pair, DiffStats::from_slices(span.range.start, x, y)));
        at += count;
    }
    Ok(found)
}
