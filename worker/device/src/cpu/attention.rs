//! The forward pass of causal grouped-query attention on the CPU, which processes a tile of queries
//! with one tile of keys after another (Dao et al., "FlashAttention", 2022).
//!
//! Keys and values of a sequence are packed once, tile by tile, for all query heads. Scores exist
//! only for a strip of a few queries and one tile of keys. The result of a query depends on the
//! tiles of keys, but not on the other queries of its tile.
use super::attention_backward::{AttentionBackwardInputs, differentiate_attention};
use super::attention_dropout::{HeadDropout, KEY_TILE, multiply_row};
use super::attention_layout::{
    AttentionLayout, HeadSlice, MAX_TILE_ROWS, QUERY_TILE, READ_SLACK, copy_scaled_rows, find_visible_keys,
    softcap_scores, transpose_rows,
};
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{InputElements, OutputElements, PriorContents};
use super::instruction_set::multiversion;
use super::micro_kernel::multiply_small_matrices;
use super::row_outputs::SliceRows;
use super::simd::{LANES, MicroTile, Simd, exp, load_array, load_lanes, store_array, store_lanes};
use crate::buffer::{View, ViewMut};
use crate::ops::{AttentionOps, AttentionShape, expect_lens};
use std::ops::Range;

impl AttentionOps for Cpu {
    /// Computes causal attention on the CPU in parallel tasks, each of which computes a block of
    /// queries of one head.
    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape) {
        let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
        let g = AttentionLayout::new("attention_forward", o.len(), lse.len(), qkv.len(), starts, shape);
        let (o, lse, qkv) =
            (self.as_output(o), DisjointSlices::new(lse.host_slice_mut()), InputElements::from(qkv));
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
        let g = AttentionLayout::new(op, o.len(), lse.len(), qkv.len(), starts, shape);
        expect_lens(op, [("dqkv", dqkv.len(), qkv.len()), ("d_o", d_o.len(), o.len())]);
        let (d_o, o, lse, qkv) = (d_o.into(), o.into(), lse.host_slice(), qkv.into());
        let inputs = AttentionBackwardInputs { d_o, o, lse, qkv, starts };
        differentiate_attention(self, self.as_output(dqkv), inputs, g);
    }
}

/// A block of queries of one head, whose attention one parallel task of the forward pass computes.
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
    rows * g.padded * 2 + MAX_TILE_ROWS * KEY_TILE + rows * LANES + 4 * READ_SLACK
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

/// Copies the keys and the values of one key head of one sequence, tile after tile, into the order
/// in which the matmuls of attention read them. The keys are transposed. `task` is the index of the
/// sequence and head.
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

/// The running maxima, sums and outputs of the online softmax (Milakov and Gimelshein, 2018), for a
/// few queries that are computed together (a strip). A strip has as many queries as a micro tile
/// has rows.
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
    copy_scaled_rows(s, q, source, g.padded, height, g.shape.scale);
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
        for i in (0..rows.len()).step_by(S::TILE_ROWS) {
            let count = S::TILE_ROWS.min(rows.len() - i);
            let strip = OnlineSoftmaxState {
                scores: &mut scores[..S::TILE_ROWS * KEY_TILE],
                out: &mut out[i * g.padded..][..S::TILE_ROWS * g.padded],
                sums: &mut sums[i * LANES..][..S::TILE_ROWS * LANES],
                max: &mut max[i..i + S::TILE_ROWS],
            };
            let visibility = TileMask { q0: rows.start + i, starts: &starts[i..i + count], k0, dropout };
            strip.add_key_tile(s, g, &q[i * g.padded..][..S::TILE_ROWS * g.padded], kv, visibility);
        }
    }
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
    }
}

/// Divides a query's output by its sum of exponentials: `o = out / total`.
#[inline(always)]
fn divide_by_sum<S: Simd>(s: S, o: &mut [f32], out: &[f32], total: f32) {
    let factor = s.splat(1.0 / total);
    for j in (0..o.len()).step_by(LANES) {
        store_lanes(s, o, j, s.mul(load_lanes(s, out, j), factor));
    }
}

/// The positions of the queries and keys of one block of attention scores, from which follow the
/// scores that are masked and the random numbers of dropout.
struct TileMask<'a> {
    /// Position of the strip's first query.
    q0: usize,
    /// The first position that each query attends to.
    starts: &'a [u32],
    /// Position of the tile's first key.
    k0: usize,
    /// Dropout of the probabilities.
    dropout: Option<HeadDropout>,
}

impl OnlineSoftmaxState<'_> {
    /// Adds the contribution of a block of keys and values to the running softmax results of a few
    /// queries.
    #[inline(always)]
    fn add_key_tile<S: Simd>(self, s: S, g: AttentionLayout, q: &[f32], kv: &[f32], visibility: TileMask) {
        let head_dim = g.shape.head_dim;
        let last = visibility.q0 + visibility.starts.len() - 1;
        // No query of the strip attends to keys after its last query.
        let columns = (last + 1).clamp(visibility.k0, visibility.k0 + KEY_TILE) - visibility.k0;
        if columns == 0 {
            return;
        }
        let (keys, values) = kv.split_at(KEY_TILE * head_dim);
        let scores = MicroTile {
            depth: head_dim,
            a: q.as_ptr(),
            a_row_stride: g.padded,
            a_depth_stride: 1,
            b: keys.as_ptr(),
            b_row_stride: KEY_TILE,
            c: self.scores.as_mut_ptr(),
            c_row_stride: KEY_TILE,
            accumulate: false,
        };
        // SAFETY: q has TILE_ROWS rows, keys head_dim × KEY_TILE elements, scores TILE_ROWS ×
        // KEY_TILE.
        unsafe { multiply_small_matrices(s, S::TILE_ROWS, columns.div_ceil(LANES), scores) };
        if let Some(cap) = g.shape.softcap {
            for row in self.scores.chunks_exact_mut(KEY_TILE) {
                softcap_scores(s, &mut row[..columns.next_multiple_of(LANES)], cap);
            }
        }
        update_online_softmax(s, self.scores, self.sums, self.out, self.max, g.padded, columns, &visibility);
        if let Some(dropout) = &visibility.dropout {
            let rows = self.scores.chunks_exact_mut(KEY_TILE).take(visibility.starts.len());
            for (i, row) in rows.enumerate() {
                let width = columns.next_multiple_of(LANES);
                multiply_row(
                    s,
                    &mut row[..width],
                    &dropout.compute_factors(visibility.q0 + i, visibility.k0),
                );
            }
        }
        let outputs = MicroTile {
            depth: columns,
            a: self.scores.as_ptr(),
            a_row_stride: KEY_TILE,
            a_depth_stride: 1,
            b: values.as_ptr(),
            b_row_stride: g.padded,
            c: self.out.as_mut_ptr(),
            c_row_stride: g.padded,
            accumulate: true,
        };
        // SAFETY: scores have TILE_ROWS × KEY_TILE elements, values KEY_TILE × padded, out
        // TILE_ROWS × padded.
        unsafe { multiply_small_matrices(s, S::TILE_ROWS, g.padded / LANES, outputs) };
    }
}

/// Adds a block of attention scores to the running softmax results of a few queries: masks the
/// scores, replaces each by e^(score − max), and adds these to the queries' sums. If the maximum of
/// a query rises, its sum and output are rescaled.
#[inline(always)]
fn update_online_softmax<S: Simd>(
    s: S,
    scores: &mut [f32],
    sums: &mut [f32],
    out: &mut [f32],
    max: &mut [f32],
    padded: usize,
    columns: usize,
    visibility: &TileMask,
) {
    let width = columns.next_multiple_of(LANES);
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
