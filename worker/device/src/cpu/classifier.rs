//! The classifier (output layer and cross-entropy loss in one op) on the CPU, with gradients. Rows
//! are processed in chunks.
//!
//! The logits of a chunk are processed in blocks of the vocabulary, so that each block is read
//! while it is in the cache. The forward pass computes a block and updates maximum and sum of each
//! row. The backward pass replaces a block by its gradients and multiplies them by weight and
//! input. If these are bf16, the gradients are rounded to bf16 before.
use super::attention_backward::compute_softcap_gradient;
use super::backend::Cpu;
use super::elements::{HalfFormat, InputElements, OutputElements, PriorContents, round_to_half};
use super::instruction_set::{InstructionSet, multiversion};
use super::matmul::{MatmulShape, matmul_f32};
use super::packing::Operand;
use super::row_outputs::SliceRows;
use super::simd::{LANES, Simd, exp, load_lanes, store_lanes, tanh};
use super::sum_rule::SumRule;
use crate::buffer::{View, ViewMut};
use crate::ops::{ClassifierGrads, ClassifierOps, ClassifierShape, IGNORE_LABEL, WriteMode};
use std::ops::Range;

/// Maximum number of logits in memory at a time, which may be exceeded in order to process at least
/// [`MIN_CHUNK_ROWS`] rows at a time. The number of rows of a chunk depends on the vocabulary
/// alone.
const MAX_CHUNK_LOGITS: usize = 4 << 20;
/// Maximum number of rows whose logits are in memory at a time (a chunk of rows).
const MAX_CHUNK_ROWS: usize = 512;
/// Minimum number of rows whose logits are in memory at a time (a chunk of rows). Fewer rows would
/// be too slow, because each chunk packs `w` twice, and reads and writes the whole gradient of `w`.
const MIN_CHUNK_ROWS: usize = 256;
/// Number of vocabulary entries (columns of the logits) whose logits are processed at a time, so
/// that the data stays in the cache.
const VOCAB_BLOCK: usize = 512;

/// Returns the number of rows whose logits are in memory at a time, for `m` rows in total and a
/// vocabulary of `v`. Only the logits of one chunk are in memory at a time.
pub fn choose_classifier_chunk_rows(m: usize, v: usize) -> usize {
    (MAX_CHUNK_LOGITS / v.max(1)).clamp(MIN_CHUNK_ROWS, MAX_CHUNK_ROWS).min(m)
}

impl ClassifierOps for Cpu {
    fn compute_classifier_loss(
        &self,
        loss: ViewMut,
        x: View,
        w: View,
        labels: &[u32],
        shape: ClassifierShape,
        grads: Option<ClassifierGrads>,
    ) {
        let ClassifierShape { m, d, v, .. } = shape;
        shape.check_arguments([loss.len(), x.len(), w.len()], labels, grads.as_ref());
        let (loss, x, w) = (loss.host_slice_mut(), InputElements::from(x), InputElements::from(w));
        let mut grads = grads.map(|ClassifierGrads { dx, dw, dw_write, scale }| ClassifierBackwardOutputs {
            dx: self.as_output(dx),
            dw: dw.host_slice_mut(),
            dw_write,
            scale,
        });
        if let (0, Some(g)) = (m, &mut grads)
            && g.dw_write == WriteMode::Overwrite
        {
            g.dw.fill(0.0);
        }
        let rows = choose_classifier_chunk_rows(m, v);
        let mut logits = self.scratch.borrow_buf(rows * v);
        let mut statistics = self.scratch.borrow_buf(rows * LogitStatistics::FLOAT_COUNT);
        for start in (0..m).step_by(rows.max(1)) {
            let rows = start..(start + rows).min(m);
            let shape = ClassifierShape { m: rows.len(), ..shape };
            let (x, labels) = (x.slice(rows.start * d..rows.end * d), &labels[rows.clone()]);
            let chunk = ClassifierChunk { cpu: self, x, w, labels, shape };
            let logits = &mut logits[..rows.len() * v];
            let statistics: &mut [LogitStatistics] =
                bytemuck::cast_slice_mut(&mut statistics[..rows.len() * LogitStatistics::FLOAT_COUNT]);
            chunk.forward(logits, statistics);
            for ((loss, statistics), &label) in loss[rows.clone()].iter_mut().zip(&*statistics).zip(labels) {
                *loss = if label == IGNORE_LABEL { 0.0 } else { statistics.compute_loss() };
            }
            if let Some(g) = &mut grads {
                chunk.backward(logits, statistics, g, rows.start);
            }
        }
    }
}

/// Destinations of the gradients that the classifier's backward pass computes: the gradients of its
/// input rows and of the output layer's weight.
struct ClassifierBackwardOutputs<'a> {
    dx: OutputElements<'a>,
    dw: &'a mut [f32],
    dw_write: WriteMode,
    scale: f32,
}

/// Statistics of a row of logits, from which the row's loss is computed: the maximum, the sum of
/// exponentials, and the logit of the row's label. Updated block by block.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct LogitStatistics {
    /// The largest logit so far.
    max: f64,
    /// Σ e^(logit − max) of the logits so far.
    total: f64,
    /// The logit of the row's label.
    label_logit: f64,
}

impl LogitStatistics {
    /// Number of `f32` elements in which the statistics of one row of logits are stored.
    const FLOAT_COUNT: usize = size_of::<Self>() / size_of::<f32>();
    /// Initial statistics of a row of logits, before any logit was added.
    const EMPTY: Self = LogitStatistics { max: f64::NEG_INFINITY, total: 0.0, label_logit: 0.0 };

    /// Returns the cross-entropy loss of the row of logits: `log Σ e^logit − logit of the label`.
    fn compute_loss(&self) -> f32 {
        (libm::log(self.total) + self.max - self.label_logit) as f32
    }
}

/// Some rows of the classifier's input (a chunk), whose logits are in memory at the same time.
struct ClassifierChunk<'a> {
    cpu: &'a Cpu,
    x: InputElements<'a>,
    w: InputElements<'a>,
    labels: &'a [u32],
    shape: ClassifierShape,
}

impl ClassifierChunk<'_> {
    /// Returns the ranges of vocabulary entries (columns of the logits) that are processed one
    /// after another.
    fn vocab_blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let v = self.shape.v;
        (0..v).step_by(VOCAB_BLOCK).map(move |start| start..(start + VOCAB_BLOCK).min(v))
    }

    /// Returns the range of elements that the vocabulary entries `block` have in the output layer's
    /// weight and in the weight's gradient.
    fn weight_range(&self, block: &Range<usize>) -> Range<usize> {
        block.start * self.shape.d..block.end * self.shape.d
    }

    /// Computes the logits of this chunk of rows, and the statistics of each row for the loss.
    fn forward(&self, logits: &mut [f32], statistics: &mut [LogitStatistics]) {
        let ClassifierShape { m, d, v, .. } = self.shape;
        statistics.fill(LogitStatistics::EMPTY);
        for block in self.vocab_blocks() {
            let a = Operand::from_rows(self.x, d);
            let b = Operand::from_rows(self.w.slice(self.weight_range(&block)), d);
            let shape = MatmulShape { m, n: block.len(), k: d, ldc: v, write: WriteMode::Overwrite };
            matmul_f32(self.cpu, &mut logits[block.start..], a, b, shape);
            let outputs = (SliceRows::new(&mut *statistics, 1), SliceRows::new(&mut *logits, v));
            self.cpu.run_over_each_output_row(m, 4 * block.len(), outputs, |row, (statistics, logits)| {
                let (statistics, logits) = (&mut statistics[0], &mut logits[block.clone()]);
                if let Some(cap) = self.shape.softcap {
                    cap_logits(self.cpu.instruction_set, logits, cap);
                }
                let label = self.labels[row] as usize;
                if block.contains(&label) {
                    statistics.label_logit = f64::from(logits[label - block.start]);
                }
                update_row_statistics(self.cpu.instruction_set, statistics, logits);
            });
        }
    }

    /// Computes the classifier's gradients for this chunk of rows: replaces `logits` by dlogits,
    /// and computes `dx = dlogits·w` and `dw (=|+=) dlogitsᵀ·x`. `first` is the chunk's first row.
    fn backward(
        &self,
        logits: &mut [f32],
        statistics: &[LogitStatistics],
        g: &mut ClassifierBackwardOutputs,
        first: usize,
    ) {
        let ClassifierShape { m, d, .. } = self.shape;
        let dw_write = if first == 0 { g.dw_write } else { WriteMode::Accumulate };
        let ClassifierBackwardOutputs { dx, dw, scale, .. } = g;
        let work = |dx: &mut [f32]| self.backward_blocks(logits, statistics, dx, dw, dw_write, *scale);
        // SAFETY: chunks are processed one after another.
        unsafe { dx.update_as_f32(first * d..(first + m) * d, PriorContents::Ignored, work) };
    }

    /// Computes the classifier's gradients for this chunk of rows, one block of the vocabulary
    /// after another.
    fn backward_blocks(
        &self,
        logits: &mut [f32],
        statistics: &[LogitStatistics],
        dx: &mut [f32],
        dw: &mut [f32],
        dw_write: WriteMode,
        scale: f32,
    ) {
        let ClassifierShape { m, d, v, .. } = self.shape;
        for block in self.vocab_blocks() {
            self.replace_logits_by_gradients(logits, statistics, &block, scale);
            let (dlogits, stride) = match self.rounds_gradients_to_bf16() {
                false => (InputElements::F32(&logits[block.start..]), v),
                true => {
                    let bits = &bytemuck::cast_slice(logits)[2 * block.start..];
                    (InputElements::Half(HalfFormat::Bf16, bits), 2 * v)
                }
            };
            let a = Operand::from_rows(dlogits, stride);
            let b = Operand::from_transposed(self.w.slice(self.weight_range(&block)), d);
            let write = if block.start == 0 { WriteMode::Overwrite } else { WriteMode::Accumulate };
            matmul_f32(self.cpu, dx, a, b, MatmulShape { m, n: d, k: block.len(), ldc: d, write });
            if dw.is_empty() {
                continue;
            }
            let (a, b) = (Operand::from_transposed(dlogits, stride), Operand::from_transposed(self.x, d));
            let shape = MatmulShape { m: block.len(), n: d, k: m, ldc: d, write: dw_write };
            matmul_f32(self.cpu, &mut dw[self.weight_range(&block)], a, b, shape);
        }
    }

    /// Returns true if the gradients of the logits are rounded to bf16, as required when the
    /// classifier's input and weight are both bf16.
    fn rounds_gradients_to_bf16(&self) -> bool {
        self.x.choose_sum_rule(&self.w) == SumRule::Bf16Blocks
    }

    /// Replaces some columns of the logits by their gradient `(softmax − one-hot)·scale`. The
    /// gradient of rows without a loss is 0. Gradients that are rounded to bf16 take the first half
    /// of the memory of their columns in each row.
    fn replace_logits_by_gradients(
        &self,
        logits: &mut [f32],
        statistics: &[LogitStatistics],
        block: &Range<usize>,
        scale: f32,
    ) {
        let cost = 4 * block.len();
        let outputs = SliceRows::new(logits, self.shape.v);
        self.cpu.run_over_each_output_row(self.shape.m, cost, outputs, |row, logits| {
            let logits = &mut logits[block.clone()];
            if self.labels[row] == IGNORE_LABEL {
                return logits.fill(0.0);
            }
            let (label, max) = (self.labels[row] as usize, statistics[row].max as f32);
            let factor = (f64::from(scale) / statistics[row].total) as f32;
            let slope = |l: f32| self.shape.softcap.map_or(1.0, |cap| 1.0 - (l / cap) * (l / cap));
            let label_column = block.contains(&label).then(|| label - block.start);
            let label_gradient = label_column.map(|column| (column, scale * slope(logits[column])));
            match self.shape.softcap {
                Some(cap) => exponentiate_capped(self.cpu.instruction_set, logits, max, factor, cap),
                None => exponentiate(self.cpu.instruction_set, logits, max, factor),
            }
            if let Some((column, gradient)) = label_gradient {
                logits[column] -= gradient;
            }
            if self.rounds_gradients_to_bf16() {
                round_to_bf16_in_first_half(self.cpu.instruction_set, logits);
            }
        });
    }
}

/// Rounds the `f32` numbers in `x`, at most [`VOCAB_BLOCK`], to bf16, and stores the results in the
/// first half of the memory of `x`.
fn round_to_bf16_in_first_half(instruction_set: InstructionSet, x: &mut [f32]) {
    let mut bits = [0u16; VOCAB_BLOCK];
    let bits = &mut bits[..x.len()];
    round_to_half(instruction_set, HalfFormat::Bf16, bits, x);
    bytemuck::cast_slice_mut(x)[..bits.len()].copy_from_slice(bits);
}

multiversion! {
    /// Updates the statistics of a row of logits (maximum, sum of exponentials) with the row's next
    /// logits, with the given instruction set.
    fn update_row_statistics = update_row_statistics_simd(statistics: &mut LogitStatistics, logits: &[f32])
}
multiversion! {
    /// Replaces each element `x` by `e^(x − shift)·factor` with the given instruction set.
    fn exponentiate = exponentiate_logits(x: &mut [f32], shift: f32, factor: f32)
}
multiversion! {
    /// Applies the softcap `cap·tanh(x / cap)` to each logit in place, with the given instruction
    /// set.
    fn cap_logits = softcap_each_logit(x: &mut [f32], cap: f32)
}
multiversion! {
    /// Replaces each logit `x` by `e^(x − shift)·factor·(1 − (x/cap)²)`, where the last factor is
    /// the softcap's derivative, with the given instruction set.
    fn exponentiate_capped = exponentiate_capped_logits(x: &mut [f32], shift: f32, factor: f32, cap: f32)
}

/// Applies the softcap `cap·tanh(x / cap)` to each logit, in place.
#[inline(always)]
fn softcap_each_logit<S: Simd>(s: S, x: &mut [f32], cap: f32) {
    for i in (0..x.len()).step_by(LANES) {
        store_lanes(s, x, i, s.mul(s.splat(cap), tanh(s, s.mul(load_lanes(s, x, i), s.splat(1.0 / cap)))));
    }
}

/// Updates the maximum and the sum of exponentials of a row of logits with the row's next logits. A
/// NaN makes the sum NaN.
///
/// The exponentials of these logits are summed in 16 lanes of `f32`. Their sum is added to the
/// row's total in `f64`.
#[inline(always)]
fn update_row_statistics_simd<S: Simd>(s: S, statistics: &mut LogitStatistics, logits: &[f32]) {
    let whole = logits.len() / LANES * LANES;
    let mut max = s.splat(statistics.max as f32);
    for i in (0..whole).step_by(LANES) {
        max = s.max(max, load_lanes(s, logits, i));
    }
    let max = logits[whole..].iter().fold(s.max_lane(max), |a, &b| if a > b { a } else { b });
    let shift = s.splat(max);
    let mut total = s.splat(0.0);
    for i in (0..whole).step_by(LANES) {
        total = s.add(total, exp(s, s.sub(load_lanes(s, logits, i), shift)));
    }
    if whole < logits.len() {
        let mut rest = [f32::NEG_INFINITY; LANES];
        rest[..logits.len() - whole].copy_from_slice(&logits[whole..]);
        total = s.add(total, exp(s, s.sub(load_lanes(s, &rest, 0), shift)));
    }
    let max_increase = f64::from(max) - statistics.max;
    if max_increase != 0.0 {
        statistics.total *= libm::exp(-max_increase);
        statistics.max = f64::from(max);
    }
    statistics.total += f64::from(s.sum(total));
}

/// Replaces each element `x` by `e^(x − shift)·factor`.
#[inline(always)]
fn exponentiate_logits<S: Simd>(s: S, x: &mut [f32], shift: f32, factor: f32) {
    let (shift, factor) = (s.splat(shift), s.splat(factor));
    for i in (0..x.len()).step_by(LANES) {
        store_lanes(s, x, i, s.mul(exp(s, s.sub(load_lanes(s, x, i), shift)), factor));
    }
}

/// Replaces each logit `x` by `e^(x − shift)·factor·(1 − (x/cap)²)`, where the last factor is the
/// softcap's derivative. This is the softmax part of the gradient of the logit before the softcap.
#[inline(always)]
fn exponentiate_capped_logits<S: Simd>(s: S, x: &mut [f32], shift: f32, factor: f32, cap: f32) {
    let (shift, factor) = (s.splat(shift), s.splat(factor));
    for i in (0..x.len()).step_by(LANES) {
        let capped = load_lanes(s, x, i);
        let p = s.mul(exp(s, s.sub(capped, shift)), factor);
        store_lanes(s, x, i, compute_softcap_gradient(s, p, capped, cap));
    }
}
