//! Causal grouped-query attention, forward pass: tiles of queries times tiles of keys with an
//! online softmax (Dao et al., "FlashAttention", 2022).
//!
//! Keys and values of a sequence are packed once, tile by tile, for all query heads. Scores exist
//! only for a strip of a few queries and one tile of keys. The result of a query depends on the
//! tiles of keys, but not on the other queries of its tile.
use super::attention_dropout::{HeadDropout, KEY_TILE, multiply_row};
use super::backend::Cpu;
use super::disjoint_slices::DisjointSlices;
use super::elements::{Element, InputElements, OutputElements, PriorContents, with_elements};
use super::instruction_set::multiversion;
use super::micro_kernel::multiply_small_matrices;
use super::simd::{LANES, MicroTile, Simd, exp, load_array, load_lanes, store_array, store_lanes, tanh};
use crate::ops::AttentionShape;
use crate::ops::expect_len;
use std::ops::Range;

/// Number of queries in a tile.
pub(crate) const QUERY_TILE: usize = 64;
/// Number of elements past the end of a scratch matrix that the micro-kernel may read if the number
/// of rows is not a multiple of its tile.
pub(crate) const READ_SLACK: usize = 16;
/// Maximum number of rows of a micro tile on any instruction set.
pub(crate) const MAX_TILE_ROWS: usize = 8;

/// Shape of an attention op, and sizes that follow from the shape.
#[derive(Clone, Copy)]
pub(crate) struct AttentionLayout {
    /// The shape and options of the attention.
    pub(crate) shape: AttentionShape,
    /// Number of elements in a row of qkv.
    pub(crate) stride: usize,
    /// Number of query heads that share a key head.
    pub(crate) group: usize,
    /// `head_dim`, rounded up to a multiple of the vector length.
    pub(crate) padded: usize,
    /// Factor by which every score q·k is multiplied.
    pub(crate) scale: f32,
}

impl AttentionLayout {
    /// Computes the layout of an attention. Panics if the shape or an argument that forward and
    /// backward pass share is invalid. `qkv` is the length of qkv, and `op` the op's name in
    /// panics.
    pub(crate) fn new(op: &str, qkv: usize, starts: &[u32], shape: AttentionShape) -> Self {
        let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
        assert!(
            kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads),
            "{op}: {heads} query heads are not a multiple of {kv_heads} key heads"
        );
        assert!(head_dim > 0, "{op}: head_dim is 0");
        if let Some(d) = &shape.dropout {
            d.check(op, &shape);
        }
        let stride = (heads + 2 * kv_heads) * head_dim;
        expect_len(op, "qkv", qkv, b * t * stride);
        expect_len(op, "starts", starts.len(), b * t);
        for (i, &start) in starts.iter().enumerate() {
            assert!(start as usize <= i % t, "{op}: the start {start} of token {} is after the token", i % t);
        }
        AttentionLayout {
            shape,
            stride,
            group: heads / kv_heads,
            padded: head_dim.next_multiple_of(LANES),
            scale: shape.scale,
        }
    }

    /// Returns the number of tiles of keys in a sequence.
    pub(crate) fn key_tile_count(&self) -> usize {
        self.shape.t.div_ceil(KEY_TILE)
    }

    /// Returns the column at which query head `h` begins in a row of qkv.
    pub(crate) fn query_column(&self, h: usize) -> usize {
        h * self.shape.head_dim
    }

    /// Returns the column at which key head `h` begins in a row of qkv.
    pub(crate) fn key_column(&self, h: usize) -> usize {
        (self.shape.heads + h) * self.shape.head_dim
    }

    /// Returns the column at which value head `h` begins in a row of qkv.
    pub(crate) fn value_column(&self, h: usize) -> usize {
        (self.shape.heads + self.shape.kv_heads + h) * self.shape.head_dim
    }
}

/// Consecutive rows of one head inside a wider matrix, such as qkv.
#[derive(Clone, Copy)]
pub(crate) struct HeadSlice<'a> {
    /// The elements of the whole matrix.
    pub(crate) data: InputElements<'a>,
    /// Index of the first row.
    pub(crate) first: usize,
    /// Number of rows.
    pub(crate) count: usize,
    /// Number of elements from one row of the matrix to the next.
    pub(crate) stride: usize,
    /// First column of the head.
    pub(crate) column: usize,
    /// Number of elements of the head in each row.
    pub(crate) width: usize,
}

impl<'a> HeadSlice<'a> {
    /// Returns the elements of row `i` of the slice.
    #[inline(always)]
    fn row(&self, i: usize) -> InputElements<'a> {
        let first = (self.first + i) * self.stride + self.column;
        self.data.slice(first..first + self.width)
    }
}

/// Copies the rows of a head, multiplied by a factor: `dst[i·padded + j] = rows[i][j]·factor`.
/// Elements past the width, and rows past the last row up to `height`, become 0.
#[inline(always)]
pub(crate) fn copy_scaled_rows<S: Simd>(
    s: S,
    dst: &mut [f32],
    rows: HeadSlice,
    padded: usize,
    height: usize,
    factor: f32,
) {
    let factor = s.splat(factor);
    for i in 0..rows.count {
        let dst = &mut dst[i * padded..][..padded];
        with_elements!(rows.row(i), row => write_scaled_row(s, dst, row, factor));
    }
    dst[rows.count * padded..height * padded].fill(0.0);
}

/// Writes one row, multiplied by `factor`, to `dst`.
#[inline(always)]
fn write_scaled_row<S: Simd, E: Element>(s: S, dst: &mut [f32], row: &[E], factor: S::V) {
    for j in (0..row.len()).step_by(LANES) {
        store_lanes(s, dst, j, s.mul(E::load_lanes(s, row, j), factor));
    }
}

/// Transposes the rows of a head: `dst[j·KEY_TILE + i] = rows[i][j]`. Columns past the last row
/// become 0.
#[inline(always)]
pub(crate) fn transpose_rows<S: Simd>(s: S, dst: &mut [f32], rows: HeadSlice) {
    assert!(rows.count <= KEY_TILE && dst.len() >= rows.width * KEY_TILE);
    let (whole, deep) = (rows.count / 8 * 8, rows.width / 8 * 8);
    for i in (0..whole).step_by(8) {
        let first = (rows.first + i) * rows.stride + rows.column;
        let from = rows.data.slice(first..first + 7 * rows.stride + rows.width);
        with_elements!(from, from => transpose_strip(s, &mut dst[i..], from, rows.stride, deep));
    }
    for j in 0..rows.width {
        let line = &mut dst[j * KEY_TILE..][..KEY_TILE];
        let start = if j < deep { whole } else { 0 };
        for (i, x) in line.iter_mut().enumerate().skip(start) {
            *x = if i < rows.count { rows.row(i).get(j) } else { 0.0 };
        }
    }
}

/// Transposes 8 rows of a matrix: `dst[j·KEY_TILE + i] = from[i·stride + j]` for i in 0..8 and j in
/// 0..deep. `deep` must be a multiple of 8.
#[inline(always)]
fn transpose_strip<S: Simd, E: Element>(s: S, dst: &mut [f32], from: &[E], stride: usize, deep: usize) {
    for j in (0..deep).step_by(8) {
        let (from, dst) = (&from[j..7 * stride + j + 8], &mut dst[j * KEY_TILE..][..7 * KEY_TILE + 8]);
        // SAFETY: `from` and `dst` have 8 rows of 8 elements.
        unsafe { E::transpose8(s, from.as_ptr(), stride, dst.as_mut_ptr(), KEY_TILE) };
    }
}

/// Returns the keys to which query `q` attends in the tile that begins at key `k0`, as a range of
/// columns of the tile. `start` is the first position to which the query attends.
#[inline(always)]
pub(crate) fn find_visible_keys(q: usize, start: u32, k0: usize) -> Range<usize> {
    let end = (q + 1).clamp(k0, k0 + KEY_TILE) - k0;
    (start as usize).clamp(k0, k0 + end) - k0..end
}

/// Implements [`crate::Ops::attention_forward`]. A task computes one tile of queries of one head.
pub(crate) fn forward(
    cpu: &Cpu,
    o: OutputElements,
    lse: &mut [f32],
    qkv: InputElements,
    starts: &[u32],
    shape: AttentionShape,
) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let g = AttentionLayout::new("attention_forward", qkv.len(), starts, shape);
    expect_len("attention_forward", "o", o.len(), b * t * heads * head_dim);
    expect_len("attention_forward", "lse", lse.len(), b * heads * t);
    let per_tile = KEY_TILE * (head_dim + g.padded);
    let per_head = g.key_tile_count() * per_tile;
    let mut packed_kv = cpu.scratch.take(b * kv_heads * per_head);
    let parts = DisjointSlices::new(&mut packed_kv);
    cpu.pool.run(b * kv_heads, &|task| {
        // SAFETY: each task writes different heads.
        let dst = unsafe { parts.slice_mut(task * per_head..(task + 1) * per_head) };
        pack_keys_and_values(cpu.instruction_set, dst, qkv, g, task);
    });
    let tiles = t.div_ceil(QUERY_TILE);
    let lse = DisjointSlices::new(lse);
    let packed_kv = &packed_kv[..b * kv_heads * per_head];
    cpu.pool.run(b * heads * tiles, &|task| {
        // The last tiles attend to the most keys, so they come first.
        let (head, tile) = (task % (b * heads), tiles - 1 - task / (b * heads));
        let (seq, h) = (head / heads, head % heads);
        let kv = (seq * kv_heads + h / g.group) * per_head;
        let query = QueryTile { g, seq, h, rows: tile * QUERY_TILE..((tile + 1) * QUERY_TILE).min(t) };
        let mut scratch = cpu.scratch.take(compute_scratch_len(g));
        attend(
            cpu.instruction_set,
            &o,
            &lse,
            query,
            qkv,
            starts,
            &packed_kv[kv..kv + per_head],
            &mut scratch,
        );
    });
}

/// The tile of queries that one task of the forward pass computes.
struct QueryTile {
    g: AttentionLayout,
    /// Index of the sequence in the batch.
    seq: usize,
    /// Index of the query head.
    h: usize,
    /// Positions of the queries in their sequence.
    rows: Range<usize>,
}

/// Returns the number of `f32` elements of the forward pass's scratch memory per task: queries,
/// outputs, sums, and the scores of a strip.
fn compute_scratch_len(g: AttentionLayout) -> usize {
    let rows = QUERY_TILE + MAX_TILE_ROWS;
    rows * g.padded * 2 + MAX_TILE_ROWS * KEY_TILE + rows * LANES + 4 * READ_SLACK
}

multiversion! {
    fn pack_keys_and_values = pack_key_head(dst: &mut [f32], qkv: InputElements, g: AttentionLayout, task: usize)
}
multiversion! {
    fn attend = attend_tile(
        o: &OutputElements, lse: &DisjointSlices<f32>, tile: QueryTile, qkv: InputElements, starts: &[u32], kv: &[f32], scratch: &mut [f32]
    )
}

/// Packs the transposed keys and the values of one key head, tile after tile. Task number `task`
/// determines sequence and head.
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

/// State of the online softmax for a strip of queries. A strip has as many queries as a micro tile
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

/// Computes attention of one tile of queries over all its keys, and writes outputs and
/// log-sum-exps.
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
    copy_scaled_rows(s, q, source, g.padded, height, g.scale);
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

/// Positions of a strip of queries and of a tile of keys, from which masking and dropout are
/// computed.
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
    /// Adds a tile of keys and values to the online softmax of the strip.
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

/// Applies the softcap in place: a score `s` becomes `cap·tanh(s / cap)`.
#[inline(always)]
pub(crate) fn softcap_scores<S: Simd>(s: S, scores: &mut [f32], cap: f32) {
    let (cap, inverse) = (s.splat(cap), s.splat(1.0 / cap));
    for v in scores.as_chunks_mut().0 {
        let capped = s.mul(cap, tanh(s, s.mul(load_array(s, v), inverse)));
        store_array(s, v, capped);
    }
}

/// Masks the scores of a tile, replaces them by e^(score − max), and adds them to the queries'
/// sums. If the maximum of a query rises, its sum and output are rescaled.
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
