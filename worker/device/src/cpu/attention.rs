//! Forward pass of causal grouped-query attention on the CPU, one block of queries and keys at a
//! time (Dao et al., "FlashAttention", 2022).
//!
//! Keys and values of a sequence are packed once, tile by tile, for all query heads. Scores exist
//! only for a strip of a few queries and one tile of keys. The result of a query depends on the
//! tiles of keys, but not on the other queries of its tile.
use super::attention_backward::{AttentionBackwardInputs, differentiate_attention};
use super::attention_dropout::{HeadDropout, KEY_TILE, multiply_row};
use super::attention_layout::{
    AttentionLayout, HeadSlice, MAX_TILE_ROWS, QUERY_TILE, READ_SLACK, copy_scaled_rows, find_visible_keys,
    round_to_bf16_in_place, scale_in_place, softcap_scores, transpose_rows,
};
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::row_outputs::SliceRows;
use super::scratch_product::{CausalBound, ScratchProduct};
use super::simd::{LANES, Simd, exp, load_array, load_lanes, store_array, store_lanes};
use super::sum_rule::SumRule;
use crate::buffer::{View, ViewMut};
use crate::ops::{AttentionOps, AttentionShape, expect_lens};
use std::ops::Range;

impl AttentionOps for Cpu {
    /// Computes causal attention on the CPU in parallel tasks, each of which computes a block of
    /// queries of one head.
    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape) {
        let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
        let lens = [o.len(), lse.len(), qkv.len()];
        let (o, lse, qkv) =
            (self.as_output(o), DisjointSlices::new(lse.host_slice_mut()), InputElements::from(qkv));
        let rule = qkv.choose_sum_rule(&qkv);
        let g = AttentionLayout::new(self, "attention_forward", lens, rule, starts, shape);
        let per_head = g.key_tile_count() * KEY_TILE * (head_dim + g.padded);
        let mut packed_kv = self.scratch.borrow_buf(b * kv_heads * per_head);
        let packed_kv = &mut packed_kv[..b * kv_heads * per_head];
        let outputs = SliceRows::new(&mut *packed_kv, per_head);
        self.run_over_each_output_row(b * kv_heads, per_head, outputs, |task, dst| {
            pack_keys_and_values(self.instruction_set, dst, qkv, g, task);
        });
        let (tiles, packed_kv) = (t.div_ceil(QUERY_TILE), &*packed_kv);
        self.pool.run(b * heads * tiles, &|task| {
            // The last tiles attend to the most keys, so they come first.
            let (head, tile) = (task % (b * heads), tiles - 1 - task / (b * heads));
            let (seq, h) = (head / heads, head % heads);
            let kv = &packed_kv[(seq * kv_heads + h / g.group) * per_head..][..per_head];
            let query = QueryTile { g, seq, h, rows: tile * QUERY_TILE..((tile + 1) * QUERY_TILE).min(t) };
            let mut scratch = self.scratch.borrow_buf(compute_scratch_len(g));
            attend(self.instruction_set, &o, &lse, query, qkv, starts, kv, &mut scratch);
        });
    }

    fn attention_backward(
        &self,
        dqkv: ViewMut,
        d_o: View,
        o: View,
        lse: View,
        qkv: View,
        starts: &[u32],
        shape: AttentionShape,
    ) {
        let op = "attention_backward";
        let lens = [o.len(), lse.len(), qkv.len()];
        expect_lens(op, [("dqkv", dqkv.len(), qkv.len()), ("d_o", d_o.len(), o.len())]);
        let [d_o, o, qkv] = [d_o, o, qkv].map(InputElements::from);
        let lse = lse.host_slice();
        let g = AttentionLayout::new(self, op, lens, qkv.choose_sum_rule(&d_o), starts, shape);
        let inputs = AttentionBackwardInputs { d_o, o, lse, qkv, starts };
        differentiate_attention(self, self.as_output(dqkv), inputs, g);
    }
}

/// A block of queries of one head in one sequence, whose attention one parallel task computes in
/// the forward pass.
struct QueryTile {
    g: AttentionLayout,
    /// Index of the sequence in the batch.
    seq: usize,
    /// Index of the query head.
    h: usize,
    /// Positions of the queries in their sequence.
    rows: Range<usize>,
}

/// Returns how many `f32` elements of scratch memory one task of attention's forward pass needs.
fn compute_scratch_len(g: AttentionLayout) -> usize {
    let rows = QUERY_TILE + MAX_TILE_ROWS;
    rows * (g.padded * 2 + KEY_TILE + LANES) + 4 * READ_SLACK
}

multiversion! {
    /// Copies the keys and the values of one key head of one sequence into the order in which the
    /// matmuls of attention read them, with the given instruction set.
    fn pack_keys_and_values = pack_key_head(dst: &mut [f32], qkv: InputElements, g: AttentionLayout, task: usize)
}
multiversion! {
    /// Computes the attention of one block of queries to all keys that they attend to, with the
    /// given instruction set.
    fn attend = attend_tile(
        o: &OutputElements, lse: &DisjointSlices<f32>, tile: QueryTile, qkv: InputElements, starts: &[u32], kv: &[f32], scratch: &mut [f32]
    )
}

/// Copies the keys and values of one key head in one sequence, one block of keys after another,
/// into the order in which attention's matmuls read them. The keys are transposed. `task` is the
/// index of the sequence and head.
#[inline(always)]
fn pack_key_head<S: Simd>(s: S, dst: &mut [f32], qkv: InputElements, g: AttentionLayout, task: usize) {
    let AttentionShape { t, kv_heads, head_dim, .. } = g.shape;
    let (seq, h) = (task / kv_heads, task % kv_heads);
    for (tile, dst) in dst.chunks_exact_mut(KEY_TILE * (head_dim + g.padded)).enumerate() {
        let (keys, values) = dst.split_at_mut(KEY_TILE * head_dim);
        let k0 = tile * KEY_TILE;
        let rows = HeadSlice {
            data: qkv,
            first: seq * t + k0,
            count: KEY_TILE.min(t - k0),
            stride: g.stride,
            column: g.key_column(h),
            width: head_dim,
        };
        transpose_rows(s, keys, rows);
        copy_scaled_rows(s, values, HeadSlice { column: g.value_column(h), ..rows }, g.padded, KEY_TILE, 1.0);
    }
}

/// The running maxima, sums and outputs of the online softmax (Milakov and Gimelshein, 2018), for
/// some queries.
struct OnlineSoftmaxState<'a> {
    /// Scores of the current tile, later their exponentials: rows of `KEY_TILE` elements.
    scores: &'a mut [f32],
    /// Outputs before the division by the sum of exponentials: rows of `padded` elements.
    out: &'a mut [f32],
    /// Sums of the exponentials, as 16 lanes for each query.
    sums: &'a mut [f32],
    /// The largest score of each query so far.
    max: &'a mut [f32],
}

/// Computes the attention of one block of queries to all keys that they attend to, and writes the
/// outputs and the log-sum-exps.
#[inline(always)]
fn attend_tile<S: Simd>(
    s: S,
    o: &OutputElements,
    lse: &DisjointSlices<f32>,
    tile: QueryTile,
    qkv: InputElements,
    starts: &[u32],
    kv: &[f32],
    scratch: &mut [f32],
) {
    let QueryTile { g, seq, h, rows } = tile;
    let AttentionShape { t, heads, head_dim, .. } = g.shape;
    let height = rows.len().next_multiple_of(S::TILE_ROWS);
    let (q, scratch) = scratch.split_at_mut(height * g.padded);
    let (out, scratch) = scratch.split_at_mut(height * g.padded);
    let (sums, scores) = scratch.split_at_mut(height * LANES);
    let mut max = [f32::NEG_INFINITY; QUERY_TILE + MAX_TILE_ROWS];
    let source = HeadSlice {
        data: qkv,
        first: seq * t + rows.start,
        count: rows.len(),
        stride: g.stride,
        column: g.query_column(h),
        width: head_dim,
    };
    copy_scaled_rows(s, q, source, g.padded, height, g.split_scale().0);
    out.fill(0.0);
    sums.fill(0.0);
    let starts = &starts[seq * t + rows.start..seq * t + rows.end];
    let dropout = g.shape.dropout.map(|d| HeadDropout::new(&d, seq, h));
    let earliest = starts.iter().min().map_or(0, |&k| k as usize);
    for (index, kv) in kv.chunks_exact(KEY_TILE * (head_dim + g.padded)).enumerate() {
        let k0 = index * KEY_TILE;
        if k0 + KEY_TILE <= earliest || k0 >= rows.end {
            continue;
        }
        let mut state = OnlineSoftmaxState {
            scores: &mut *scores,
            out: &mut *out,
            sums: &mut *sums,
            max: &mut max[..height],
        };
        state.add_key_tile(s, g, q, kv, TileMask { q0: rows.start, starts, k0, dropout });
    }
    // In the sums of bf16 products, the sign of a zero depends on the number of masked keys that
    // are skipped, which depends on the instruction set. Adding +0 makes all zeros positive.
    let is_bf16 = g.products.rule == SumRule::Bf16Blocks;
    for i in 0..rows.len() {
        let total = s.sum(load_lanes(s, sums, i * LANES));
        let at = rows.start + i;
        // SAFETY: no other task has these queries.
        let (mut o, lse) = unsafe {
            let first = ((seq * t + at) * heads + h) * head_dim;
            let row = (seq * heads + h) * t + at;
            (o.slice_as_f32(first..first + head_dim, PriorContents::Ignored), lse.slice_mut(row..row + 1))
        };
        lse[0] = (f64::from(max[i]) + libm::log(f64::from(total))) as f32;
        divide_by_sum(s, &mut o, &out[i * g.padded..], total);
        if is_bf16 {
            o.iter_mut().for_each(|x| *x += 0.0);
        }
    }
}

/// Divides a query's attention output by the sum of the exponentials of the query's scores: `o =
/// out / total`.
#[inline(always)]
fn divide_by_sum<S: Simd>(s: S, o: &mut [f32], out: &[f32], total: f32) {
    let factor = s.splat(1.0 / total);
    for j in (0..o.len()).step_by(LANES) {
        store_lanes(s, o, j, s.mul(load_lanes(s, out, j), factor));
    }
}

/// Position of one block of attention scores in the sequence, from which the masked scores and the
/// dropout of the block follow.
#[derive(Clone, Copy)]
struct TileMask<'a> {
    /// Position of the first query.
    q0: usize,
    /// The first position that each query attends to.
    starts: &'a [u32],
    /// Position of the tile's first key.
    k0: usize,
    /// Dropout of the probabilities.
    dropout: Option<HeadDropout>,
}

impl TileMask<'_> {
    /// Returns the part of this mask for the queries with the indices `rows`.
    fn select_rows(&self, rows: Range<usize>) -> Self {
        TileMask { q0: self.q0 + rows.start, starts: &self.starts[rows], ..*self }
    }

    /// Returns how many keys of the block are at or before the position of the block's last query.
    fn count_columns(&self) -> usize {
        (self.q0 + self.starts.len()).clamp(self.k0, self.k0 + KEY_TILE) - self.k0
    }
}

impl OnlineSoftmaxState<'_> {
    /// Adds the contribution of a block of keys and values to the running softmax results of some
    /// queries.
    #[inline(always)]
    fn add_key_tile<S: Simd>(&mut self, s: S, g: AttentionLayout, q: &[f32], kv: &[f32], mask: TileMask) {
        let (head_dim, rows) = (g.shape.head_dim, mask.starts.len());
        let (keys, values) = kv.split_at(KEY_TILE * head_dim);
        g.products.multiply(ScratchProduct {
            a: q,
            a_row_stride: g.padded,
            a_depth_stride: 1,
            b: keys,
            b_stride: KEY_TILE,
            c: self.scores,
            c_stride: KEY_TILE,
            rows,
            columns: KEY_TILE,
            depth: head_dim,
            accumulate: false,
            bound: CausalBound::Columns(mask.q0 - mask.k0),
        });
        for i in (0..rows).step_by(S::TILE_ROWS) {
            let strip = i..(i + S::TILE_ROWS).min(rows);
            self.replace_scores_by_probabilities(s, g, strip.clone(), &mask.select_rows(strip));
        }
        g.products.multiply(ScratchProduct {
            a: self.scores,
            a_row_stride: KEY_TILE,
            a_depth_stride: 1,
            b: values,
            b_stride: g.padded,
            c: self.out,
            c_stride: g.padded,
            rows,
            columns: g.padded,
            depth: KEY_TILE,
            accumulate: true,
            bound: CausalBound::LastTerm(mask.q0 - mask.k0),
        });
    }

    /// Converts the attention scores of a few queries to unnormalized softmax probabilities, and
    /// updates the running maxima, sums and outputs of these queries. `mask` is the mask of these
    /// queries.
    #[inline(always)]
    fn replace_scores_by_probabilities<S: Simd>(
        &mut self,
        s: S,
        g: AttentionLayout,
        strip: Range<usize>,
        mask: &TileMask,
    ) {
        let width = mask.count_columns().next_multiple_of(LANES);
        let scores = &mut self.scores[strip.start * KEY_TILE..strip.end * KEY_TILE];
        let is_bf16 = g.products.rule == SumRule::Bf16Blocks;
        for row in scores.chunks_exact_mut(KEY_TILE) {
            if is_bf16 {
                scale_in_place(s, &mut row[..width], g.split_scale().1);
            }
            if let Some(cap) = g.shape.softcap {
                softcap_scores(s, &mut row[..width], cap);
            }
        }
        let sums = &mut self.sums[strip.start * LANES..strip.end * LANES];
        let out = &mut self.out[strip.start * g.padded..strip.end * g.padded];
        update_online_softmax(s, scores, sums, out, &mut self.max[strip], g.padded, width, mask);
        for (i, row) in scores.chunks_exact_mut(KEY_TILE).enumerate() {
            if let Some(dropout) = &mask.dropout {
                multiply_row(s, &mut row[..width], &dropout.compute_factors(mask.q0 + i, mask.k0));
            }
            if is_bf16 {
                round_to_bf16_in_place(&mut row[..width]);
                row[width..].fill(0.0);
            }
        }
    }
}

/// Masks a block of attention scores, replaces each score s by e^(s − max), and adds these values
/// to the running sums of the queries. If the maximum of a query rises, its sum and output are
/// rescaled.
#[inline(always)]
fn update_online_softmax<S: Simd>(
    s: S,
    scores: &mut [f32],
    sums: &mut [f32],
    out: &mut [f32],
    max: &mut [f32],
    padded: usize,
    width: usize,
    visibility: &TileMask,
) {
    let mut shifts = [0.0f32; LANES];
    let mut rescale_factors = [0.0f32; LANES];
    for (i, &start) in visibility.starts.iter().enumerate() {
        let row = &mut scores[i * KEY_TILE..][..width];
        let columns_seen = find_visible_keys(visibility.q0 + i, start, visibility.k0);
        if columns_seen.is_empty() {
            row.fill(f32::NEG_INFINITY);
        } else if columns_seen.len() < width {
            row[..columns_seen.start].fill(f32::NEG_INFINITY);
            row[columns_seen.end..].fill(f32::NEG_INFINITY);
        }
        let mut largest = s.splat(max[i]);
        for v in row.as_chunks().0 {
            largest = s.max(largest, load_array(s, v));
        }
        let largest = s.max_lane(largest);
        // Before its first visible key a query's maximum is −∞, and −∞ − (−∞) would be NaN.
        shifts[i] = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        rescale_factors[i] = max[i] - shifts[i];
        max[i] = largest;
    }
    let factors = exp(s, load_lanes(s, &rescale_factors, 0));
    store_lanes(s, &mut rescale_factors, 0, factors);
    for i in 0..visibility.starts.len() {
        let row = &mut scores[i * KEY_TILE..][..width];
        let (shift, factor) = (s.splat(shifts[i]), s.splat(rescale_factors[i]));
        let mut sum = s.mul(load_lanes(s, sums, i * LANES), factor);
        for v in row.as_chunks_mut().0 {
            let e = exp(s, s.sub(load_array(s, v), shift));
            store_array(s, v, e);
            sum = s.add(sum, e);
        }
        store_lanes(s, sums, i * LANES, sum);
        if rescale_factors[i] != 1.0 {
            for v in out[i * padded..][..padded].as_chunks_mut().0 {
                store_array(s, v, s.mul(load_array(s, v), factor));
            }
        }
    }
}
