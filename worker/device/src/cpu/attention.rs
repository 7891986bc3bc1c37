//! Causal grouped-query attention, forward: tiles of queries against tiles of keys with a running softmax.
//!
//! Keys and values of a sequence are laid out once, tile by tile, for all heads; the scores exist only as one strip of a
//! few queries × one tile of keys. A query's result depends on the tiles of keys, not on which queries share its tile.
use super::attention_dropout::{HeadDropout, multiply};
use super::half::{Element, In, Old, Out, with_elements};
use super::kernel::{Tile, small_product};
use super::simd::{LANES, Simd, exp, get, load, multiversion, put, store, tanh};
use super::{Cpu, Parts, expect_len};
use crate::ops::AttentionShape;
use std::ops::Range;

/// Keys in a tile.
pub(crate) const KEYS: usize = 64;
/// Queries in a tile.
pub(crate) const QUERIES: usize = 64;
/// Elements past the end of a scratch matrix that a micro tile may read when its rows don't divide the tile.
pub(crate) const SLACK: usize = 16;
/// Upper bound of the micro tile's rows.
pub(crate) const MAX_MR: usize = 8;

/// Numbers that follow from the shape.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) shape: AttentionShape,
    /// Elements in a row of qkv.
    pub(crate) stride: usize,
    /// Query heads per key head.
    pub(crate) group: usize,
    /// head_dim rounded up to whole vectors.
    pub(crate) padded: usize,
    pub(crate) scale: f32,
}

impl Geometry {
    /// Checks the shape and the arguments that forward and backward share.
    pub(crate) fn new(op: &str, qkv: usize, starts: &[u32], shape: AttentionShape) -> Self {
        let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
        assert!(
            kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads),
            "{op}: {kv_heads} key heads don't divide {heads} query heads"
        );
        assert!(head_dim > 0, "{op}: head_dim is 0");
        if let Some(d) = &shape.dropout {
            d.check(op, &shape);
        }
        let stride = (heads + 2 * kv_heads) * head_dim;
        expect_len(op, "qkv", qkv, b * t * stride);
        expect_len(op, "starts", starts.len(), b * t);
        for (i, &start) in starts.iter().enumerate() {
            assert!(start as usize <= i % t, "{op}: token {} starts at {start}, after itself", i % t);
        }
        Geometry {
            shape,
            stride,
            group: heads / kv_heads,
            padded: head_dim.next_multiple_of(LANES),
            scale: shape.scale,
        }
    }

    /// Tiles of keys in a sequence.
    pub(crate) fn key_tiles(&self) -> usize {
        self.shape.t.div_ceil(KEYS)
    }

    /// Column of query head `h` in a row of qkv.
    pub(crate) fn query_column(&self, h: usize) -> usize {
        h * self.shape.head_dim
    }

    /// Column of key head `h`.
    pub(crate) fn key_column(&self, h: usize) -> usize {
        (self.shape.heads + h) * self.shape.head_dim
    }

    /// Column of value head `h`.
    pub(crate) fn value_column(&self, h: usize) -> usize {
        (self.shape.heads + self.shape.kv_heads + h) * self.shape.head_dim
    }
}

/// Some rows of one head inside a wider matrix.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) data: In<'a>,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) stride: usize,
    pub(crate) column: usize,
    pub(crate) width: usize,
}

impl<'a> Rows<'a> {
    #[inline(always)]
    fn row(&self, i: usize) -> In<'a> {
        let first = (self.first + i) * self.stride + self.column;
        self.data.slice(first..first + self.width)
    }
}

/// `dst[i·padded + j] = rows[i][j]·factor`, 0 for j past the width and in the rows up to `height`.
#[inline(always)]
pub(crate) fn copy_rows<S: Simd>(
    s: S,
    dst: &mut [f32],
    rows: Rows,
    padded: usize,
    height: usize,
    factor: f32,
) {
    let factor = s.splat(factor);
    for i in 0..rows.count {
        let dst = &mut dst[i * padded..][..padded];
        with_elements!(rows.row(i), row => scale_row(s, dst, row, factor));
    }
    dst[rows.count * padded..height * padded].fill(0.0);
}

#[inline(always)]
fn scale_row<S: Simd, E: Element>(s: S, dst: &mut [f32], row: &[E], factor: S::V) {
    for j in (0..row.len()).step_by(LANES) {
        put(s, dst, j, s.mul(E::lanes(s, row, j), factor));
    }
}

/// `dst[j·KEYS + i] = rows[i][j]`, 0 in the columns past the last row.
#[inline(always)]
pub(crate) fn transpose_rows<S: Simd>(s: S, dst: &mut [f32], rows: Rows) {
    assert!(rows.count <= KEYS && dst.len() >= rows.width * KEYS);
    let (whole, deep) = (rows.count / 8 * 8, rows.width / 8 * 8);
    for i in (0..whole).step_by(8) {
        let first = (rows.first + i) * rows.stride + rows.column;
        let from = rows.data.slice(first..first + 7 * rows.stride + rows.width);
        with_elements!(from, from => transpose_strip(s, &mut dst[i..], from, rows.stride, deep));
    }
    for j in 0..rows.width {
        let line = &mut dst[j * KEYS..][..KEYS];
        let start = if j < deep { whole } else { 0 };
        for (i, x) in line.iter_mut().enumerate().skip(start) {
            *x = if i < rows.count { rows.row(i).at(j) } else { 0.0 };
        }
    }
}

/// `dst[j·KEYS + i] = from[i·stride + j]` for i in 0..8, j in 0..deep, a multiple of 8.
#[inline(always)]
fn transpose_strip<S: Simd, E: Element>(s: S, dst: &mut [f32], from: &[E], stride: usize, deep: usize) {
    for j in (0..deep).step_by(8) {
        let (from, dst) = (&from[j..7 * stride + j + 8], &mut dst[j * KEYS..][..7 * KEYS + 8]);
        // SAFETY: 8 rows × 8 columns lie in `from` and in `dst`.
        unsafe { E::transpose8(s, from.as_ptr(), stride, dst.as_mut_ptr(), KEYS) };
    }
}

/// The keys of a tile starting at `k0` that query `q` sees, as columns of the tile; empty when it sees none.
#[inline(always)]
pub(crate) fn visible(q: usize, start: u32, k0: usize) -> Range<usize> {
    let end = (q + 1).clamp(k0, k0 + KEYS) - k0;
    (start as usize).clamp(k0, k0 + end) - k0..end
}

pub(crate) fn forward(cpu: &Cpu, o: Out, lse: &mut [f32], qkv: In, starts: &[u32], shape: AttentionShape) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let g = Geometry::new("attention_forward", qkv.len(), starts, shape);
    expect_len("attention_forward", "o", o.len(), b * t * heads * head_dim);
    expect_len("attention_forward", "lse", lse.len(), b * heads * t);
    let per_tile = KEYS * (head_dim + g.padded);
    let per_head = g.key_tiles() * per_tile;
    let mut laid_out = cpu.scratch.take(b * kv_heads * per_head);
    let parts = Parts::new(&mut laid_out);
    cpu.pool.run(b * kv_heads, &|task| {
        // SAFETY: tasks have heads of their own.
        let dst = unsafe { parts.part(task * per_head..(task + 1) * per_head) };
        lay_out(cpu.level, dst, qkv, g, task);
    });
    let tiles = t.div_ceil(QUERIES);
    let lse = Parts::new(lse);
    let laid_out = &laid_out[..b * kv_heads * per_head];
    cpu.pool.run(b * heads * tiles, &|task| {
        // The last tiles see the most keys: begin with them.
        let (head, tile) = (task % (b * heads), tiles - 1 - task / (b * heads));
        let (seq, h) = (head / heads, head % heads);
        let kv = (seq * kv_heads + h / g.group) * per_head;
        let query = QueryTile { g, seq, h, rows: tile * QUERIES..((tile + 1) * QUERIES).min(t) };
        let mut scratch = cpu.scratch.take(scratch_len(g));
        attend(cpu.level, &o, &lse, query, qkv, starts, &laid_out[kv..kv + per_head], &mut scratch);
    });
}

/// One task of the forward: some queries of one head.
struct QueryTile {
    g: Geometry,
    seq: usize,
    h: usize,
    /// Positions in the sequence.
    rows: Range<usize>,
}

/// Queries, scores of a strip, outputs, sums.
fn scratch_len(g: Geometry) -> usize {
    let rows = QUERIES + MAX_MR;
    rows * g.padded * 2 + MAX_MR * KEYS + rows * LANES + 4 * SLACK
}

multiversion! {
    fn lay_out = lay_out_head(dst: &mut [f32], qkv: In, g: Geometry, task: usize)
}
multiversion! {
    fn attend = attend_tile(
        o: &Out, lse: &Parts<f32>, tile: QueryTile, qkv: In, starts: &[u32], kv: &[f32], scratch: &mut [f32]
    )
}

/// Keys (transposed) and values of one key head, tile after tile.
#[inline(always)]
fn lay_out_head<S: Simd>(s: S, dst: &mut [f32], qkv: In, g: Geometry, task: usize) {
    let AttentionShape { t, kv_heads, head_dim, .. } = g.shape;
    let (seq, h) = (task / kv_heads, task % kv_heads);
    for (tile, dst) in dst.chunks_exact_mut(KEYS * (head_dim + g.padded)).enumerate() {
        let (keys, values) = dst.split_at_mut(KEYS * head_dim);
        let k0 = tile * KEYS;
        let rows = Rows {
            data: qkv,
            first: seq * t + k0,
            count: KEYS.min(t - k0),
            stride: g.stride,
            column: g.key_column(h),
            width: head_dim,
        };
        transpose_rows(s, keys, rows);
        copy_rows(s, values, Rows { column: g.value_column(h), ..rows }, g.padded, KEYS, 1.0);
    }
}

/// The running softmax of a strip of `MR` queries.
struct Strip<'a> {
    /// Scores, then probabilities: rows of `KEYS`.
    scores: &'a mut [f32],
    /// Unnormalised outputs: rows of `padded`.
    out: &'a mut [f32],
    /// Sums of the exponentials, 16 lanes for each query.
    sums: &'a mut [f32],
    /// Largest score of each query so far.
    max: &'a mut [f32],
}

#[inline(always)]
fn attend_tile<S: Simd>(
    s: S,
    o: &Out,
    lse: &Parts<f32>,
    tile: QueryTile,
    qkv: In,
    starts: &[u32],
    kv: &[f32],
    scratch: &mut [f32],
) {
    let QueryTile { g, seq, h, rows } = tile;
    let AttentionShape { t, heads, head_dim, .. } = g.shape;
    let height = rows.len().next_multiple_of(S::MR);
    let (q, scratch) = scratch.split_at_mut(height * g.padded);
    let (out, scratch) = scratch.split_at_mut(height * g.padded);
    let (sums, scores) = scratch.split_at_mut(height * LANES);
    let mut max = [f32::NEG_INFINITY; QUERIES + MAX_MR];
    let source = Rows {
        data: qkv,
        first: seq * t + rows.start,
        count: rows.len(),
        stride: g.stride,
        column: g.query_column(h),
        width: head_dim,
    };
    copy_rows(s, q, source, g.padded, height, g.scale);
    out.fill(0.0);
    sums.fill(0.0);
    let starts = &starts[seq * t + rows.start..seq * t + rows.end];
    let dropout = g.shape.dropout.map(|d| HeadDropout::new(&d, seq, h));
    let earliest = starts.iter().min().map_or(0, |&k| k as usize);
    for (index, kv) in kv.chunks_exact(KEYS * (head_dim + g.padded)).enumerate() {
        let k0 = index * KEYS;
        if k0 + KEYS <= earliest || k0 >= rows.end {
            continue;
        }
        for i in (0..rows.len()).step_by(S::MR) {
            let count = S::MR.min(rows.len() - i);
            let strip = Strip {
                scores: &mut scores[..S::MR * KEYS],
                out: &mut out[i * g.padded..][..S::MR * g.padded],
                sums: &mut sums[i * LANES..][..S::MR * LANES],
                max: &mut max[i..i + S::MR],
            };
            let seen = Seen { q0: rows.start + i, starts: &starts[i..i + count], k0, dropout };
            strip.attend(s, g, &q[i * g.padded..][..S::MR * g.padded], kv, seen);
        }
    }
    for i in 0..rows.len() {
        let total = s.sum(get(s, sums, i * LANES));
        let at = rows.start + i;
        // SAFETY: this task's queries are its own.
        let (mut o, lse) = unsafe {
            let first = ((seq * t + at) * heads + h) * head_dim;
            let row = (seq * heads + h) * t + at;
            (o.part(first..first + head_dim, Old::Lost), lse.part(row..row + 1))
        };
        lse[0] = (f64::from(max[i]) + libm::log(f64::from(total))) as f32;
        normalise(s, &mut o, &out[i * g.padded..], total);
    }
}

/// `o = out / total`
#[inline(always)]
fn normalise<S: Simd>(s: S, o: &mut [f32], out: &[f32], total: f32) {
    let factor = s.splat(1.0 / total);
    for j in (0..o.len()).step_by(LANES) {
        put(s, o, j, s.mul(get(s, out, j), factor));
    }
}

/// Which queries meet which keys, and what of their probabilities is dropped.
struct Seen<'a> {
    /// Position of the first query.
    q0: usize,
    /// Of each query.
    starts: &'a [u32],
    /// Position of the first key.
    k0: usize,
    dropout: Option<HeadDropout>,
}

impl Strip<'_> {
    /// Takes a tile of keys and values into account.
    #[inline(always)]
    fn attend<S: Simd>(self, s: S, g: Geometry, q: &[f32], kv: &[f32], seen: Seen) {
        let head_dim = g.shape.head_dim;
        let last = seen.q0 + seen.starts.len() - 1;
        // Keys after the strip's last query are seen by none of it.
        let columns = (last + 1).clamp(seen.k0, seen.k0 + KEYS) - seen.k0;
        if columns == 0 {
            return;
        }
        let (keys, values) = kv.split_at(KEYS * head_dim);
        let scores = Tile {
            k: head_dim,
            a: q.as_ptr(),
            rs: g.padded,
            ks: 1,
            b: keys.as_ptr(),
            ldb: KEYS,
            c: self.scores.as_mut_ptr(),
            ldc: KEYS,
            add: false,
        };
        // SAFETY: q holds MR rows, keys head_dim × KEYS, scores MR × KEYS.
        unsafe { small_product(s, S::MR, columns.div_ceil(LANES), scores) };
        if let Some(cap) = g.shape.softcap {
            for row in self.scores.chunks_exact_mut(KEYS) {
                cap_scores(s, &mut row[..columns.next_multiple_of(LANES)], cap);
            }
        }
        softmax_strip(s, self.scores, self.sums, self.out, self.max, g.padded, columns, &seen);
        if let Some(dropout) = &seen.dropout {
            let rows = self.scores.chunks_exact_mut(KEYS).take(seen.starts.len());
            for (i, row) in rows.enumerate() {
                let width = columns.next_multiple_of(LANES);
                multiply(s, &mut row[..width], &dropout.factors(seen.q0 + i, seen.k0));
            }
        }
        let outputs = Tile {
            k: columns,
            a: self.scores.as_ptr(),
            rs: KEYS,
            ks: 1,
            b: values.as_ptr(),
            ldb: g.padded,
            c: self.out.as_mut_ptr(),
            ldc: g.padded,
            add: true,
        };
        // SAFETY: scores hold MR × KEYS, values KEYS × padded, out MR × padded.
        unsafe { small_product(s, S::MR, g.padded / LANES, outputs) };
    }
}

/// A score s becomes `cap·tanh(s / cap)`.
#[inline(always)]
pub(crate) fn cap_scores<S: Simd>(s: S, scores: &mut [f32], cap: f32) {
    let (cap, inverse) = (s.splat(cap), s.splat(1.0 / cap));
    for v in scores.as_chunks_mut().0 {
        let capped = s.mul(cap, tanh(s, s.mul(load(s, v), inverse)));
        store(s, v, capped);
    }
}

/// Scores become e^(score − max); sums and outputs follow when a query's maximum rises.
#[inline(always)]
fn softmax_strip<S: Simd>(
    s: S,
    scores: &mut [f32],
    sums: &mut [f32],
    out: &mut [f32],
    max: &mut [f32],
    padded: usize,
    columns: usize,
    seen: &Seen,
) {
    let width = columns.next_multiple_of(LANES);
    let mut shifts = [0.0f32; LANES];
    let mut changes = [0.0f32; LANES];
    for (i, &start) in seen.starts.iter().enumerate() {
        let row = &mut scores[i * KEYS..][..width];
        let sees = visible(seen.q0 + i, start, seen.k0);
        if sees.is_empty() {
            row.fill(f32::NEG_INFINITY);
        } else if sees.len() < width {
            row[..sees.start].fill(f32::NEG_INFINITY);
            row[sees.end..].fill(f32::NEG_INFINITY);
        }
        let mut largest = s.splat(max[i]);
        for v in row.as_chunks().0 {
            largest = s.max(largest, load(s, v));
        }
        let largest = s.largest(largest);
        // While a query has seen no key its maximum is −∞, and −∞ − −∞ would be no number.
        shifts[i] = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        changes[i] = max[i] - shifts[i];
        max[i] = largest;
    }
    let factors = exp(s, get(s, &changes, 0));
    put(s, &mut changes, 0, factors);
    for i in 0..seen.starts.len() {
        let row = &mut scores[i * KEYS..][..width];
        let (shift, factor) = (s.splat(shifts[i]), s.splat(changes[i]));
        let mut sum = s.mul(get(s, sums, i * LANES), factor);
        for v in row.as_chunks_mut().0 {
            let e = exp(s, s.sub(load(s, v), shift));
            store(s, v, e);
            sum = s.add(sum, e);
        }
        put(s, sums, i * LANES, sum);
        if changes[i] != 1.0 {
            for v in out[i * padded..][..padded].as_chunks_mut().0 {
                store(s, v, s.mul(load(s, v), factor));
            }
        }
    }
}
