//! Causal grouped-query attention, backward.
//!
//! A task owns one key head of one sequence with all its query heads. It goes over the tiles of keys, and inside over
//! the query heads and their tiles in rising order, so each sum has one order. Probabilities are made again from the
//! scores and `lse`; no more than one tile of them exists.
use super::attention::{
    Geometry, KEYS, MAX_MR, QUERIES, Rows, SLACK, cap_scores, copy_rows, transpose_rows, visible,
};
use super::attention_dropout::{HeadDropout, multiply};
use super::half::{Element, In, Old, Out, with_elements};
use super::kernel::{Tile, small_product};
use super::simd::{LANES, Simd, exp, get, load, multiversion, put, store};
use super::{Cpu, Parts, expect_len};
use crate::ops::AttentionShape;

/// Inputs of the backward.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) d_o: In<'a>,
    pub(crate) o: In<'a>,
    pub(crate) lse: &'a [f32],
    pub(crate) qkv: In<'a>,
    pub(crate) starts: &'a [u32],
}

pub(crate) fn backward(cpu: &Cpu, dqkv: Out, given: Given, shape: AttentionShape) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let op = "attention_backward";
    let g = Geometry::new(op, given.qkv.len(), given.starts, shape);
    expect_len(op, "dqkv", dqkv.len(), given.qkv.len());
    expect_len(op, "d_o", given.d_o.len(), b * t * heads * head_dim);
    expect_len(op, "o", given.o.len(), b * t * heads * head_dim);
    expect_len(op, "lse", given.lse.len(), b * heads * t);
    // A query's gradient is summed over tiles of keys: in f32.
    let work = |dqkv: &mut [f32]| {
        let dqkv = Parts::new(dqkv);
        cpu.pool.run(b * kv_heads, &|task| {
            let mut scratch = cpu.scratch.take(Tiles::len(g));
            differentiate(cpu.level, &dqkv, given, g, task / kv_heads, task % kv_heads, &mut scratch);
        });
    };
    // SAFETY: the output is this call's own.
    unsafe { dqkv.through(0..dqkv.len(), Old::Lost, work) };
}

/// Scratch of one task; matrices of queries are `[QUERIES, padded]`, of keys `[KEYS, padded]`.
struct Tiles<'a> {
    /// Σ_j dO·O of each query of the group.
    delta: &'a mut [f32],
    /// Keys and values, transposed: `[head_dim, KEYS]`.
    keys_t: &'a mut [f32],
    values_t: &'a mut [f32],
    /// Keys times the scale.
    keys: &'a mut [f32],
    /// Queries times the scale.
    q: &'a mut [f32],
    d_o: &'a mut [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Probabilities and the scores' gradients: `[QUERIES, KEYS]`.
    p: &'a mut [f32],
    ds: &'a mut [f32],
}

impl<'a> Tiles<'a> {
    fn sizes(g: Geometry) -> [usize; 11] {
        let transposed = g.shape.head_dim * KEYS;
        let of_queries = (QUERIES + MAX_MR) * g.padded;
        let of_keys = (KEYS + MAX_MR) * g.padded;
        let square = (QUERIES + MAX_MR) * KEYS + SLACK;
        let delta = (g.group * g.shape.t).next_multiple_of(LANES);
        [
            delta, transposed, transposed, of_keys, of_queries, of_queries, of_queries, of_keys, of_keys,
            square, square,
        ]
    }

    fn len(g: Geometry) -> usize {
        Self::sizes(g).iter().sum()
    }

    fn cut(g: Geometry, mut scratch: &'a mut [f32]) -> Self {
        let [delta, keys_t, values_t, keys, q, d_o, dq, dk, dv, p, ds] = Self::sizes(g).map(|len| {
            let (part, rest) = std::mem::take(&mut scratch).split_at_mut(len);
            scratch = rest;
            part
        });
        Tiles { delta, keys_t, values_t, keys, q, d_o, dq, dk, dv, p, ds }
    }
}

multiversion! {
    fn differentiate = differentiate_group(
        dqkv: &Parts<f32>, given: Given, g: Geometry, seq: usize, kv: usize, scratch: &mut [f32]
    )
}

#[inline(always)]
fn differentiate_group<S: Simd>(
    s: S,
    dqkv: &Parts<f32>,
    given: Given,
    g: Geometry,
    seq: usize,
    kv: usize,
    scratch: &mut [f32],
) {
    let AttentionShape { t, head_dim, .. } = g.shape;
    let task = Task { given, g, seq, kv };
    let mut tiles = Tiles::cut(g, scratch);
    task.fill_delta(s, tiles.delta);
    for row in seq * t..(seq + 1) * t {
        let first = row * g.stride + g.query_column(kv * g.group);
        // SAFETY: the task owns the columns of its heads in the rows of its sequence.
        unsafe { dqkv.part(first..first + g.group * head_dim) }.fill(0.0);
    }
    for k0 in (0..t).step_by(KEYS) {
        task.load_keys(s, &mut tiles, k0);
        tiles.dk.fill(0.0);
        tiles.dv.fill(0.0);
        for h in kv * g.group..(kv + 1) * g.group {
            for q0 in (k0 / QUERIES * QUERIES..t).step_by(QUERIES) {
                let rows = QUERIES.min(t - q0);
                let starts = &given.starts[seq * t + q0..][..rows];
                if starts.iter().all(|&start| start as usize >= k0 + KEYS) {
                    continue;
                }
                let pair = Pair { h, q0, rows, k0, starts };
                task.load_queries(s, &mut tiles, &pair);
                task.scores(s, &mut tiles, &pair);
                task.gradients(s, &mut tiles, &pair);
                // SAFETY: as above.
                unsafe {
                    add_rows(s, dqkv, (seq * t + q0) * g.stride + g.query_column(h), g, tiles.dq, rows)
                };
            }
        }
        for (grad, column) in [(&*tiles.dk, g.key_column(kv)), (&*tiles.dv, g.value_column(kv))] {
            for i in 0..KEYS.min(t - k0) {
                let first = (seq * t + k0 + i) * g.stride + column;
                // SAFETY: the task owns the columns of its key head in the rows of its sequence.
                let dst = unsafe { dqkv.part(first..first + head_dim) };
                dst.copy_from_slice(&grad[i * g.padded..][..head_dim]);
            }
        }
    }
}

/// Adds the rows of `x` to the rows of `dst` that begin at `first`.
///
/// # Safety
/// The caller owns them.
#[inline(always)]
unsafe fn add_rows<S: Simd>(s: S, dst: &Parts<f32>, first: usize, g: Geometry, x: &[f32], rows: usize) {
    let head_dim = g.shape.head_dim;
    for i in 0..rows {
        let at = first + i * g.stride;
        // SAFETY: as the caller promises.
        let (dst, x) = (unsafe { dst.part(at..at + head_dim) }, &x[i * g.padded..][..head_dim]);
        for j in (0..head_dim).step_by(LANES) {
            put(s, dst, j, s.add(get(s, dst, j), get(s, x, j)));
        }
    }
}

/// The gradient of `l` from that of `c = cap·tanh(l / cap)`: times 1 − (c/cap)².
#[inline(always)]
pub(crate) fn before_cap<S: Simd>(s: S, grad: S::V, capped: S::V, cap: f32) -> S::V {
    let t = s.mul(capped, s.splat(1.0 / cap));
    s.mul(grad, s.fnma(t, t, s.splat(1.0)))
}

#[inline(always)]
fn dot<S: Simd, A: Element, B: Element>(s: S, a: &[A], b: &[B]) -> f32 {
    let mut sum = s.splat(0.0);
    for j in (0..a.len()).step_by(LANES) {
        sum = s.fma(A::lanes(s, a, j), B::lanes(s, b, j), sum);
    }
    s.sum(sum)
}

/// A key head of a sequence.
#[derive(Clone, Copy)]
struct Task<'a> {
    given: Given<'a>,
    g: Geometry,
    seq: usize,
    kv: usize,
}

/// A tile of queries of one head and a tile of keys.
struct Pair<'a> {
    h: usize,
    q0: usize,
    rows: usize,
    k0: usize,
    starts: &'a [u32],
}

impl Pair<'_> {
    /// Keys that at least one of the queries up to `last` (counted in the tile) may see.
    fn columns(&self, last: usize) -> usize {
        (self.q0 + last + 1).clamp(self.k0, self.k0 + KEYS) - self.k0
    }
}

impl Task<'_> {
    #[inline(always)]
    fn fill_delta<S: Simd>(&self, s: S, delta: &mut [f32]) {
        let AttentionShape { t, heads, head_dim, .. } = self.g.shape;
        for member in 0..self.g.group {
            let h = self.kv * self.g.group + member;
            for q in 0..t {
                let first = ((self.seq * t + q) * heads + h) * head_dim;
                let head = first..first + head_dim;
                let (o, d_o) = (self.given.o.slice(head.clone()), self.given.d_o.slice(head));
                let sum = with_elements!(o, o => with_elements!(d_o, d_o => dot(s, o, d_o)));
                delta[member * t + q] = sum;
            }
        }
    }

    #[inline(always)]
    fn load_keys<S: Simd>(&self, s: S, tiles: &mut Tiles, k0: usize) {
        let g = self.g;
        let keys = Rows {
            data: self.given.qkv,
            first: self.seq * g.shape.t + k0,
            count: KEYS.min(g.shape.t - k0),
            stride: g.stride,
            column: g.key_column(self.kv),
            width: g.shape.head_dim,
        };
        transpose_rows(s, tiles.keys_t, keys);
        transpose_rows(s, tiles.values_t, Rows { column: g.value_column(self.kv), ..keys });
        copy_rows(s, tiles.keys, keys, g.padded, KEYS, g.scale);
    }

    #[inline(always)]
    fn load_queries<S: Simd>(&self, s: S, tiles: &mut Tiles, pair: &Pair) {
        let g = self.g;
        let height = pair.rows.next_multiple_of(S::MR);
        let queries = Rows {
            data: self.given.qkv,
            first: self.seq * g.shape.t + pair.q0,
            count: pair.rows,
            stride: g.stride,
            column: g.query_column(pair.h),
            width: g.shape.head_dim,
        };
        copy_rows(s, tiles.q, queries, g.padded, height, g.scale);
        let stride = g.shape.heads * g.shape.head_dim;
        let d_o = Rows { data: self.given.d_o, stride, ..queries };
        copy_rows(s, tiles.d_o, d_o, g.padded, height, 1.0);
    }

    /// `p = e^(q·k − lse)` and `ds = p·(dO·v − delta)`, 0 where a query doesn't see a key. With dropout's factors f it is
    /// `ds = p·(f·dO·v − delta)`, and p leaves as `f·p`.
    #[inline(always)]
    fn scores<S: Simd>(&self, s: S, tiles: &mut Tiles, pair: &Pair) {
        let (g, t) = (self.g, self.g.shape.t);
        let lse = &self.given.lse[(self.seq * g.shape.heads + pair.h) * t + pair.q0..][..pair.rows];
        let member = pair.h - self.kv * g.group;
        let dropout = g.shape.dropout.map(|d| HeadDropout::new(&d, self.seq, pair.h));
        for i in (0..pair.rows).step_by(S::MR) {
            let last = (i + S::MR).min(pair.rows) - 1;
            let nvecs = pair.columns(last).div_ceil(LANES);
            let row = |a: &[f32], b: &[f32], c: &mut [f32]| Tile {
                k: g.shape.head_dim,
                a: a[i * g.padded..].as_ptr(),
                rs: g.padded,
                ks: 1,
                b: b.as_ptr(),
                ldb: KEYS,
                c: c[i * KEYS..].as_mut_ptr(),
                ldc: KEYS,
                add: false,
            };
            // SAFETY: MR rows of padded queries, head_dim × KEYS transposed keys, MR × KEYS results are there.
            unsafe {
                small_product(s, S::MR, nvecs, row(tiles.q, tiles.keys_t, tiles.p));
                small_product(s, S::MR, nvecs, row(tiles.d_o, tiles.values_t, tiles.ds));
            }
            for i in i..=last {
                let (p, ds) = (&mut tiles.p[i * KEYS..][..KEYS], &mut tiles.ds[i * KEYS..][..KEYS]);
                let factors = dropout.map(|d| d.factors(pair.q0 + i, pair.k0));
                if let Some(factors) = &factors {
                    multiply(s, &mut ds[..nvecs * LANES], factors);
                }
                let delta = tiles.delta[member * t + pair.q0 + i];
                let (lse, delta) = (s.splat(lse[i]), s.splat(delta));
                let cap = g.shape.softcap;
                if let Some(cap) = cap {
                    cap_scores(s, &mut p[..nvecs * LANES], cap);
                }
                for (p, ds) in p.as_chunks_mut().0.iter_mut().zip(ds.as_chunks_mut().0).take(nvecs) {
                    let score = load(s, p);
                    let e = exp(s, s.sub(score, lse));
                    store(s, p, e);
                    let slope = s.mul(e, s.sub(load(s, ds), delta));
                    store(s, ds, cap.map_or(slope, |cap| before_cap(s, slope, score, cap)));
                }
                if let Some(factors) = &factors {
                    multiply(s, &mut p[..nvecs * LANES], factors);
                }
                let sees = visible(pair.q0 + i, pair.starts[i], pair.k0);
                if sees.len() < KEYS {
                    for x in [p, ds] {
                        x[..sees.start].fill(0.0);
                        x[sees.end..].fill(0.0);
                    }
                }
            }
        }
    }

    /// `dq = ds·k`, `dk += dsᵀ·q`, `dv += pᵀ·dO`
    #[inline(always)]
    fn gradients<S: Simd>(&self, s: S, tiles: &mut Tiles, pair: &Pair) {
        let (padded, nvecs) = (self.g.padded, self.g.padded / LANES);
        for i in (0..pair.rows).step_by(S::MR) {
            let dq = Tile {
                k: pair.columns((i + S::MR).min(pair.rows) - 1),
                a: tiles.ds[i * KEYS..].as_ptr(),
                rs: KEYS,
                ks: 1,
                b: tiles.keys.as_ptr(),
                ldb: padded,
                c: tiles.dq[i * padded..].as_mut_ptr(),
                ldc: padded,
                add: false,
            };
            // SAFETY: ds has MR rows from i, keys KEYS × padded, dq MR rows from i.
            unsafe { small_product(s, S::MR, nvecs, dq) };
        }
        for j in (0..pair.columns(pair.rows - 1)).step_by(S::MR) {
            // Queries before the strip's first key see none of it.
            let first = (pair.k0 + j).saturating_sub(pair.q0).min(pair.rows);
            let column = |a: &[f32], b: &[f32], c: &mut [f32]| Tile {
                k: pair.rows - first,
                a: a[first * KEYS + j..].as_ptr(),
                rs: 1,
                ks: KEYS,
                b: b[first * padded..].as_ptr(),
                ldb: padded,
                c: c[j * padded..].as_mut_ptr(),
                ldc: padded,
                add: true,
            };
            // SAFETY: p and ds have slack for a strip past the last key; dk and dv have MAX_MR rows more than keys.
            unsafe {
                small_product(s, S::MR, nvecs, column(tiles.p, tiles.d_o, tiles.dv));
                small_product(s, S::MR, nvecs, column(tiles.ds, tiles.q, tiles.dk));
            }
        }
    }
}
