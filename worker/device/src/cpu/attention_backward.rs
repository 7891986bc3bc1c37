//! The backward pass of causal grouped-query attention on the CPU.
//!
//! A task computes one key head of one sequence with all its query heads. It iterates over tiles of
//! keys, for each over the query heads, and for each of these over tiles of queries. All loops run
//! in rising order, so every sum has one order. Probabilities are recomputed from the scores and
//! `lse`, one tile at a time.
use super::attention_dropout::{HeadDropout, KEY_TILE, multiply_row};
use super::attention_layout::{
    AttentionLayout, HeadSlice, MAX_TILE_ROWS, QUERY_TILE, READ_SLACK, copy_scaled_rows, find_visible_keys,
    round_to_bf16_in_place, scale_in_place, softcap_scores, transpose_rows,
};
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{Element, InputElements, OutputElements, PriorContents, with_elements};
use super::instruction_set::multiversion;
use super::scratch_product::{CausalBound, ScratchProduct};
use super::simd::{LANES, Simd, exp, load_array, load_lanes, store_array, store_lanes};
use super::sum_rule::SumRule;
use crate::ops::AttentionShape;

/// Inputs of attention's backward pass on the CPU, whose elements may have any type.
#[derive(Clone, Copy)]
pub(crate) struct AttentionBackwardInputs<'a> {
    /// Gradient of the attention output.
    pub(crate) d_o: InputElements<'a>,
    /// Output of the forward pass.
    pub(crate) o: InputElements<'a>,
    /// Log-sum-exp of each query's scores.
    pub(crate) lse: &'a [f32],
    /// Queries, keys and values of each token, as in the forward pass.
    pub(crate) qkv: InputElements<'a>,
    /// First position that each token attends to.
    pub(crate) starts: &'a [u32],
}

/// Computes the gradient of attention with respect to qkv, and writes it to `dqkv`. A task computes
/// one key head of one sequence.
pub(crate) fn differentiate_attention(
    cpu: &Cpu,
    dqkv: OutputElements,
    inputs: AttentionBackwardInputs,
    g: AttentionLayout,
) {
    let AttentionShape { b, kv_heads, .. } = g.shape;
    // The gradient of a query is summed over tiles of keys, so it is kept in f32 until the end.
    let work = |dqkv: &mut [f32]| {
        let dqkv = DisjointSlices::new(dqkv);
        cpu.pool.run(b * kv_heads, &|task| {
            let mut scratch = cpu.scratch.borrow_buf(KeyHeadScratch::total_len(g));
            let (seq, kv) = (task / kv_heads, task % kv_heads);
            differentiate_key_head(cpu.instruction_set, &dqkv, inputs, g, seq, kv, &mut scratch);
        });
    };
    // SAFETY: this call owns the output.
    unsafe { dqkv.update_as_f32(0..dqkv.len(), PriorContents::Ignored, work) };
}

/// Temporary matrices for one parallel task of attention's backward pass, a task that computes the
/// gradients of one key head in one sequence. Matrices of queries are `[QUERY_TILE, padded]`, and
/// matrices of keys `[KEY_TILE, padded]`.
struct KeyHeadScratch<'a> {
    /// Σ_j dO·O for each query of the group's heads.
    delta: &'a mut [f32],
    /// Transposed keys, `[head_dim, KEY_TILE]`.
    keys_t: &'a mut [f32],
    /// Transposed values, `[head_dim, KEY_TILE]`.
    values_t: &'a mut [f32],
    /// Keys of the current tile, multiplied by the scale unless the scores are.
    keys: &'a mut [f32],
    /// Queries of the current tile, multiplied by the scale unless the scores are.
    q: &'a mut [f32],
    /// Gradients of the outputs of the current tile of queries.
    d_o: &'a mut [f32],
    /// Gradients of the current tile's queries.
    dq: &'a mut [f32],
    /// Gradients of the current tile's keys, summed over tiles of queries.
    dk: &'a mut [f32],
    /// Gradients of the current tile's values, summed over tiles of queries.
    dv: &'a mut [f32],
    /// Probabilities, `[QUERY_TILE, KEY_TILE]`.
    p: &'a mut [f32],
    /// Gradients of the scores, `[QUERY_TILE, KEY_TILE]`.
    ds: &'a mut [f32],
}

impl<'a> KeyHeadScratch<'a> {
    /// Returns the number of elements of each temporary matrix that a task of attention's backward
    /// pass needs, in the order of this struct's fields.
    fn matrix_lens(g: AttentionLayout) -> [usize; 11] {
        let transposed = g.shape.head_dim * KEY_TILE;
        let of_queries = (QUERY_TILE + MAX_TILE_ROWS) * g.padded;
        let of_keys = (KEY_TILE + MAX_TILE_ROWS) * g.padded;
        let square = (QUERY_TILE + MAX_TILE_ROWS) * KEY_TILE + READ_SLACK;
        let delta = (g.group * g.shape.t).next_multiple_of(LANES);
        [
            delta, transposed, transposed, of_keys, of_queries, of_queries, of_queries, of_keys, of_keys,
            square, square,
        ]
    }

    /// Returns the number of elements of all scratch matrices of a task of attention's backward
    /// pass together.
    fn total_len(g: AttentionLayout) -> usize {
        Self::matrix_lens(g).iter().sum()
    }

    /// Divides a scratch buffer of [`Self::total_len`] elements into the matrices of a task of
    /// attention's backward pass.
    fn split(g: AttentionLayout, mut scratch: &'a mut [f32]) -> Self {
        let [delta, keys_t, values_t, keys, q, d_o, dq, dk, dv, p, ds] = Self::matrix_lens(g).map(|len| {
            let (part, rest) = std::mem::take(&mut scratch).split_at_mut(len);
            scratch = rest;
            part
        });
        KeyHeadScratch { delta, keys_t, values_t, keys, q, d_o, dq, dk, dv, p, ds }
    }
}

multiversion! {
    /// Computes the attention gradients of one key head and its value head in one sequence, and of
    /// the query heads that use them, with the given instruction set.
    fn differentiate_key_head = differentiate_key_head_simd(
        dqkv: &DisjointSlices<f32>, inputs: AttentionBackwardInputs, g: AttentionLayout, seq: usize, kv: usize, scratch: &mut [f32]
    )
}

/// Computes the attention gradients of one key head and its value head in one sequence, and of the
/// query heads that use them.
#[inline(always)]
fn differentiate_key_head_simd<S: Simd>(
    s: S,
    dqkv: &DisjointSlices<f32>,
    inputs: AttentionBackwardInputs,
    g: AttentionLayout,
    seq: usize,
    kv: usize,
    scratch: &mut [f32],
) {
    let AttentionShape { t, head_dim, .. } = g.shape;
    let task = KeyHeadTask { inputs, g, seq, kv };
    let mut tiles = KeyHeadScratch::split(g, scratch);
    task.compute_delta(s, tiles.delta);
    for row in seq * t..(seq + 1) * t {
        let first = row * g.stride + g.query_column(kv * g.group);
        // SAFETY: the task owns the columns of its heads in the rows of its sequence.
        unsafe { dqkv.slice_mut(first..first + g.group * head_dim) }.fill(0.0);
    }
    for k0 in (0..t).step_by(KEY_TILE) {
        task.load_keys_and_values(s, &mut tiles, k0);
        tiles.dk.fill(0.0);
        tiles.dv.fill(0.0);
        for h in kv * g.group..(kv + 1) * g.group {
            for q0 in (k0 / QUERY_TILE * QUERY_TILE..t).step_by(QUERY_TILE) {
                let rows = QUERY_TILE.min(t - q0);
                let starts = &inputs.starts[seq * t + q0..][..rows];
                if starts.iter().all(|&start| start as usize >= k0 + KEY_TILE) {
                    continue;
                }
                let pair = TilePair { h, q0, rows, k0, starts };
                task.load_queries_and_output_gradients(s, &mut tiles, &pair);
                task.compute_probabilities(s, &mut tiles, &pair);
                task.compute_gradients(&mut tiles, &pair);
                // SAFETY: as above.
                unsafe {
                    add_scaled_rows(s, dqkv, (seq * t + q0) * g.stride + g.query_column(h), g, tiles.dq, rows)
                };
            }
        }
        let factors = [g.split_scale().1, 1.0];
        let grads = [(&*tiles.dk, g.key_column(kv)), (&*tiles.dv, g.value_column(kv))];
        for ((grad, column), factor) in grads.into_iter().zip(factors) {
            for i in 0..KEY_TILE.min(t - k0) {
                let first = (seq * t + k0 + i) * g.stride + column;
                // SAFETY: the task owns the columns of its key head in the rows of its sequence.
                let dst = unsafe { dqkv.slice_mut(first..first + head_dim) };
                // As in the forward pass, zeros become positive.
                let values = dst.iter_mut().zip(&grad[i * g.padded..]);
                values.for_each(|(to, x)| *to = x * factor + 0.0);
            }
        }
    }
}

/// Adds the query gradients `x` of one attention head, times the scale factor of the scores, to the
/// rows of the matrix `dst` that begin at element `first`.
///
/// # Safety
///
/// The caller must ensure that no other thread accesses these elements of `dst`.
#[inline(always)]
unsafe fn add_scaled_rows<S: Simd>(
    s: S,
    dst: &DisjointSlices<f32>,
    first: usize,
    g: AttentionLayout,
    x: &[f32],
    rows: usize,
) {
    let (head_dim, factor) = (g.shape.head_dim, s.splat(g.split_scale().1));
    for i in 0..rows {
        let at = first + i * g.stride;
        // SAFETY: guaranteed by the caller.
        let (dst, x) = (unsafe { dst.slice_mut(at..at + head_dim) }, &x[i * g.padded..][..head_dim]);
        for j in (0..head_dim).step_by(LANES) {
            store_lanes(s, dst, j, s.add(load_lanes(s, dst, j), s.mul(load_lanes(s, x, j), factor)));
        }
    }
}

/// Returns the gradient of a score or logit `l` before the softcap, given the gradient `grad` after
/// the softcap: `grad·(1 − (c/cap)²)`, where `c` is the softcapped value. `grad` is the gradient of
/// `c = cap·tanh(l / cap)`, and `capped` is `c`.
#[inline(always)]
pub(crate) fn compute_softcap_gradient<S: Simd>(s: S, grad: S::V, capped: S::V, cap: f32) -> S::V {
    let t = s.mul(capped, s.splat(1.0 / cap));
    s.mul(grad, s.fnma(t, t, s.splat(1.0)))
}

/// Returns the dot product of two rows of equal length, summed in `f32`.
#[inline(always)]
fn dot<S: Simd, A: Element, B: Element>(s: S, a: &[A], b: &[B]) -> f32 {
    let mut sum = s.splat(0.0);
    for j in (0..a.len()).step_by(LANES) {
        sum = s.fma(A::load_lanes(s, a, j), B::load_lanes(s, b, j), sum);
    }
    s.sum(sum)
}

/// One task of attention's backward pass: the gradients of one key head, its value head and the
/// query heads that use them, in one sequence.
#[derive(Clone, Copy)]
struct KeyHeadTask<'a> {
    inputs: AttentionBackwardInputs<'a>,
    g: AttentionLayout,
    seq: usize,
    kv: usize,
}

/// The positions of a block of queries and of a block of keys whose attention scores are computed
/// together.
struct TilePair<'a> {
    h: usize,
    q0: usize,
    rows: usize,
    k0: usize,
    starts: &'a [u32],
}

impl TilePair<'_> {
    /// Returns how many keys of the block are at or before the position of the query with the index
    /// `last` in the block of queries.
    fn count_keys_up_to(&self, last: usize) -> usize {
        (self.q0 + last + 1).clamp(self.k0, self.k0 + KEY_TILE) - self.k0
    }
}

impl KeyHeadTask<'_> {
    /// Computes `delta`, the sum Σ dO·O over the elements of each query's output and its gradient,
    /// for all query heads that share a key head.
    #[inline(always)]
    fn compute_delta<S: Simd>(&self, s: S, delta: &mut [f32]) {
        let AttentionShape { t, heads, head_dim, .. } = self.g.shape;
        for member in 0..self.g.group {
            let h = self.kv * self.g.group + member;
            for q in 0..t {
                let first = ((self.seq * t + q) * heads + h) * head_dim;
                let head = first..first + head_dim;
                let (o, d_o) = (self.inputs.o.slice(head.clone()), self.inputs.d_o.slice(head));
                let sum = with_elements!(o, o => with_elements!(d_o, d_o => dot(s, o, d_o)));
                delta[member * t + q] = sum;
            }
        }
    }

    /// Copies the block of keys and values that begins at position `k0` to the task's temporary
    /// matrices.
    #[inline(always)]
    fn load_keys_and_values<S: Simd>(&self, s: S, tiles: &mut KeyHeadScratch, k0: usize) {
        let g = self.g;
        let keys = HeadSlice {
            data: self.inputs.qkv,
            first: self.seq * g.shape.t + k0,
            count: KEY_TILE.min(g.shape.t - k0),
            stride: g.stride,
            column: g.key_column(self.kv),
            width: g.shape.head_dim,
        };
        transpose_rows(s, tiles.keys_t, keys);
        transpose_rows(s, tiles.values_t, HeadSlice { column: g.value_column(self.kv), ..keys });
        copy_scaled_rows(s, tiles.keys, keys, g.padded, KEY_TILE, g.split_scale().0);
    }

    /// Copies a block of queries, and the output gradients of these queries, to the task's
    /// temporary matrices in `tiles`.
    #[inline(always)]
    fn load_queries_and_output_gradients<S: Simd>(&self, s: S, tiles: &mut KeyHeadScratch, pair: &TilePair) {
        let g = self.g;
        let height = pair.rows.next_multiple_of(S::TILE_ROWS);
        let queries = HeadSlice {
            data: self.inputs.qkv,
            first: self.seq * g.shape.t + pair.q0,
            count: pair.rows,
            stride: g.stride,
            column: g.query_column(pair.h),
            width: g.shape.head_dim,
        };
        copy_scaled_rows(s, tiles.q, queries, g.padded, height, g.split_scale().0);
        let stride = g.shape.heads * g.shape.head_dim;
        let d_o = HeadSlice { data: self.inputs.d_o, stride, ..queries };
        copy_scaled_rows(s, tiles.d_o, d_o, g.padded, height, 1.0);
    }

    /// Computes the attention probabilities `p = e^(q·k − lse)` of a block of queries and keys, and
    /// the gradients of the scores `ds = p·(dO·v − delta)`. Both are 0 where a query does not
    /// attend to a key. With dropout factors `f`, computes `ds = p·(f·dO·v − delta)` and replaces
    /// `p` by `f·p`. If products are summed as products of bf16 numbers, both are rounded to bf16.
    #[inline(always)]
    fn compute_probabilities<S: Simd>(&self, s: S, tiles: &mut KeyHeadScratch, pair: &TilePair) {
        let (g, t) = (self.g, self.g.shape.t);
        let lse = &self.inputs.lse[(self.seq * g.shape.heads + pair.h) * t + pair.q0..][..pair.rows];
        let member = pair.h - self.kv * g.group;
        let dropout = g.shape.dropout.map(|d| HeadDropout::new(&d, self.seq, pair.h));
        let bound = CausalBound::Columns(pair.q0 - pair.k0);
        for (a, b, c) in
            [(&*tiles.q, &*tiles.keys_t, &mut *tiles.p), (&*tiles.d_o, &*tiles.values_t, &mut *tiles.ds)]
        {
            g.products.multiply(ScratchProduct {
                a,
                a_row_stride: g.padded,
                a_depth_stride: 1,
                b,
                b_stride: KEY_TILE,
                c,
                c_stride: KEY_TILE,
                rows: pair.rows,
                columns: KEY_TILE,
                depth: g.shape.head_dim,
                accumulate: false,
                bound,
            });
        }
        let is_bf16 = g.products.rule == SumRule::Bf16Blocks;
        for i in (0..pair.rows).step_by(S::TILE_ROWS) {
            let last = (i + S::TILE_ROWS).min(pair.rows) - 1;
            let nvecs = pair.count_keys_up_to(last).div_ceil(LANES);
            for i in i..=last {
                let (p, ds) =
                    (&mut tiles.p[i * KEY_TILE..][..KEY_TILE], &mut tiles.ds[i * KEY_TILE..][..KEY_TILE]);
                let factors = dropout.map(|d| d.compute_factors(pair.q0 + i, pair.k0));
                if let Some(factors) = &factors {
                    multiply_row(s, &mut ds[..nvecs * LANES], factors);
                }
                let delta = tiles.delta[member * t + pair.q0 + i];
                let (lse, delta) = (s.splat(lse[i]), s.splat(delta));
                let cap = g.shape.softcap;
                if is_bf16 {
                    scale_in_place(s, &mut p[..nvecs * LANES], g.split_scale().1);
                }
                if let Some(cap) = cap {
                    softcap_scores(s, &mut p[..nvecs * LANES], cap);
                }
                for (p, ds) in p.as_chunks_mut().0.iter_mut().zip(ds.as_chunks_mut().0).take(nvecs) {
                    let score = load_array(s, p);
                    let e = exp(s, s.sub(score, lse));
                    store_array(s, p, e);
                    let slope = s.mul(e, s.sub(load_array(s, ds), delta));
                    store_array(
                        s,
                        ds,
                        cap.map_or(slope, |cap| compute_softcap_gradient(s, slope, score, cap)),
                    );
                }
                if let Some(factors) = &factors {
                    multiply_row(s, &mut p[..nvecs * LANES], factors);
                }
                let columns_seen = find_visible_keys(pair.q0 + i, pair.starts[i], pair.k0);
                if columns_seen.len() < KEY_TILE {
                    for x in [&mut *p, &mut *ds] {
                        x[..columns_seen.start].fill(0.0);
                        x[columns_seen.end..].fill(0.0);
                    }
                }
                if is_bf16 {
                    round_to_bf16_in_place(p);
                    round_to_bf16_in_place(ds);
                }
            }
        }
    }

    /// Computes the gradients of a block of queries and keys from the gradients `ds` of the scores:
    /// `dq = ds·k`, `dk += dsᵀ·q` and `dv += pᵀ·dO`.
    #[inline(always)]
    fn compute_gradients(&self, tiles: &mut KeyHeadScratch, pair: &TilePair) {
        let (g, offset) = (self.g, pair.q0 - pair.k0);
        g.products.multiply(ScratchProduct {
            a: tiles.ds,
            a_row_stride: KEY_TILE,
            a_depth_stride: 1,
            b: tiles.keys,
            b_stride: g.padded,
            c: tiles.dq,
            c_stride: g.padded,
            rows: pair.rows,
            columns: g.padded,
            depth: KEY_TILE,
            accumulate: false,
            bound: CausalBound::LastTerm(offset),
        });
        for (a, b, c) in [(&*tiles.p, &*tiles.d_o, &mut *tiles.dv), (&*tiles.ds, &*tiles.q, &mut *tiles.dk)] {
            g.products.multiply(ScratchProduct {
                a,
                a_row_stride: 1,
                a_depth_stride: KEY_TILE,
                b,
                b_stride: g.padded,
                c,
                c_stride: g.padded,
                rows: pair.count_keys_up_to(pair.rows - 1),
                columns: g.padded,
                depth: pair.rows,
                accumulate: true,
                bound: CausalBound::FirstTerm(offset),
            });
        }
    }
}
