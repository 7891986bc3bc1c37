//! Attention as cuDNN's graphs have it, in the layout of [`crate::Ops::attention_forward`].
use super::super::binding::{Address, Dnn as Library};
use super::super::card::Card;
use super::super::error::Result;
use super::descriptor::{Mode, Reduction, Type};
use super::graph::{ALIGNMENT, Graph, Place, Tensor, packed};
use super::plan::{Plan, Target, plans as plans_of};
use crate::ops::AttentionShape;
use std::{ops::Range, sync::Arc};

/// Numbers of the graphs' tensors.
const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
const O: i64 = 4;
const LSE: i64 = 5;
const SCALE: i64 = 6;
const HIDDEN: i64 = 7;
const WINDOW: i64 = 8;
const D_O: i64 = 9;
const D_Q: i64 = 10;
const D_K: i64 = 11;
const D_V: i64 = 12;
const KEPT: i64 = 13;
/// Of each query Σ dO·O.
const DOTS: i64 = 14;
/// The gradients of queries while they are sums of several blocks' parts.
const D_Q_SUMS: i64 = 15;

/// Elements of a head that the backward takes.
const MOST_DIM: usize = 128;
/// What heads have a multiple of.
const STEP: usize = 8;

/// Which keys a query sees, in its sequence and not after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) enum Mask {
    Causal,
    /// So many, itself included.
    Window(usize),
}

impl Mask {
    /// What these first keys of each query are; none where they are documents.
    pub(in super::super) fn of(starts: &[u32], t: usize) -> Option<Mask> {
        let first = starts.get(..t)?;
        let window = first.iter().position(|start| *start > 0);
        let is = |window: usize| {
            let expected = |at: usize| (at % t + 1).saturating_sub(window) as u32;
            starts.iter().enumerate().all(|(at, start)| *start == expected(at))
        };
        let (window, mask) = window.map_or((t, Mask::Causal), |window| (window, Mask::Window(window)));
        (window > 0 && is(window)).then_some(mask)
    }
}

/// One pass of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Pass {
    pub(in super::super) shape: AttentionShape,
    pub(in super::super) mask: Mask,
    pub(in super::super) is_backward: bool,
}

/// Where the operands of both passes lie; those of the other one are 0.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Operands {
    pub(in super::super) qkv: Address,
    pub(in super::super) o: Address,
    pub(in super::super) lse: Address,
    pub(in super::super) d_o: Address,
    pub(in super::super) dqkv: Address,
}

impl Operands {
    fn are_aligned(&self) -> bool {
        let Operands { qkv, o, lse, d_o, dqkv } = *self;
        [qkv, o, lse, d_o, dqkv].iter().all(|at| at.is_multiple_of(ALIGNMENT as u64))
    }
}

/// Elements and strides of tensors of a shape.
struct Layout {
    b: i64,
    t: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
}

impl Layout {
    fn of(s: AttentionShape) -> Self {
        let [b, t, heads, kv_heads, dim] = [s.b, s.t, s.heads, s.kv_heads, s.head_dim].map(|n| n as i64);
        Layout { b, t, heads, kv_heads, dim }
    }

    fn rows(&self, heads: i64) -> [i64; 4] {
        [self.b, heads, self.t, self.dim]
    }

    /// Of rows with so many elements, in which heads follow one another.
    fn strides(&self, width: i64) -> [i64; 4] {
        [self.t * width, self.dim, width, 1]
    }

    /// Of a row of `qkv`.
    fn width(&self) -> i64 {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    fn scores(&self) -> [i64; 4] {
        [self.b, self.heads, self.t, self.t]
    }

    fn of_queries(&self) -> [i64; 4] {
        [self.b, self.heads, self.t, 1]
    }
}

impl Pass {
    /// Of attention whose tensors are all bf16 (`is_bf16`), or what no graph says of it.
    pub(in super::super) fn of(
        shape: AttentionShape,
        starts: &[u32],
        operands: &Operands,
        is_bf16: bool,
        is_backward: bool,
    ) -> std::result::Result<Pass, &'static str> {
        let faults = [
            (!is_bf16, "attention of anything but bf16"),
            (shape.softcap.is_some(), "attention with capped scores"),
            (shape.dropout.is_some(), "attention with dropout of its probabilities"),
            (shape.head_dim > MOST_DIM, "heads of more than 128 elements"),
            (!shape.head_dim.is_multiple_of(STEP), "heads of no multiple of 8 elements"),
            (shape.t < 2, "sequences of one token"),
            (!operands.are_aligned(), "operands that begin elsewhere than at 16 bytes"),
        ];
        if let Some((_, fault)) = faults.iter().find(|(there, _)| *there) {
            return Err(fault);
        }
        let mask = Mask::of(starts, shape.t);
        let mask =
            mask.ok_or("several documents in a sequence (`train.data.pack: false` keeps them apart)")?;
        Ok(Pass { shape, mask, is_backward })
    }

    /// Where the tensors of the graph lie.
    pub(super) fn tensors(&self, at: &Operands) -> Vec<(i64, Address)> {
        let s = self.shape;
        let size = size_of::<u16>() as u64;
        let [k, v] = [s.heads, s.heads + s.kv_heads].map(|heads| (heads * s.head_dim) as u64 * size);
        let mut all = vec![(Q, at.qkv), (K, at.qkv + k), (V, at.qkv + v), (O, at.o), (LSE, at.lse)];
        if self.is_backward {
            all.extend([(D_O, at.d_o), (D_Q, at.dqkv), (D_K, at.dqkv + k), (D_V, at.dqkv + v)]);
        }
        all
    }

    /// Tensors of `f32` that the pass needs beside its operands: number, elements, and whether they begin as zeros.
    pub(super) fn sums(&self) -> Vec<(i64, usize, bool)> {
        let s = self.shape;
        let queries = s.b * s.heads * s.t;
        if self.is_backward {
            vec![(DOTS, queries, false), (D_Q_SUMS, queries * s.head_dim, true)]
        } else {
            Vec::new()
        }
    }

    /// What the pass left, as f32: output and logarithms of sums, or the gradients of q, k and v; waits for it.
    pub(super) fn results(&self, card: &Card, at: &Operands) -> Result<[Vec<f32>; 3]> {
        let s = self.shape;
        let rows = s.b * s.t;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let halves = |at, len: usize| {
            let mut bits = vec![0u16; len];
            card.download(bytemuck::cast_slice_mut(&mut bits), at)?;
            Ok(bits.into_iter().map(|bits| f32::from_bits(u32::from(bits) << 16)).collect::<Vec<_>>())
        };
        if self.is_backward {
            let all = halves(at.dqkv, rows * (queries + 2 * keys))?;
            let rows = all.chunks(queries + 2 * keys);
            let part =
                |range: Range<usize>| rows.clone().flat_map(|row| row[range.clone()].to_vec()).collect();
            return Ok([
                part(0..queries),
                part(queries..queries + keys),
                part(queries + keys..queries + 2 * keys),
            ]);
        }
        let mut sums = vec![0f32; rows * s.heads];
        card.download(bytemuck::cast_slice_mut(&mut sums), at.lse)?;
        Ok([halves(at.o, rows * queries)?, sums, Vec::new()])
    }

    /// The host's numbers that the graph reads.
    fn values(&self) -> Vec<(i64, f32)> {
        let mut all = vec![(SCALE, self.shape.scale), (HIDDEN, f32::NEG_INFINITY)];
        if let Mask::Window(window) = self.mask {
            all.push((WINDOW, window as f32));
        }
        if self.is_backward {
            all.push((KEPT, 1.0)); // nothing is dropped
        }
        all
    }

    /// For people: `attention of 2 × 2048 tokens, 32 and 8 heads of 128`.
    pub(in super::super) fn describe(&self) -> String {
        let s = self.shape;
        let window = if let Mask::Window(window) = self.mask {
            format!(", {window} at a time")
        } else {
            String::new()
        };
        format!(
            "attention of {} × {} tokens{window}, {} and {} heads of {}",
            s.b, s.t, s.heads, s.kv_heads, s.head_dim
        )
    }
}

/// Bytes that a pass may need beside its operands: of the backward the sums for queries, the gradients of keys and values by query head, and
/// on cards older than Hopper sums once more (what cuDNN 9.19 says of its plans).
pub fn attention_bytes(s: AttentionShape) -> usize {
    let queries = s.b * s.heads * s.t;
    let gradients = if s.heads == s.kv_heads { 0 } else { 2 * size_of::<u16>() };
    queries * (s.head_dim * (2 * size_of::<f32>() + gradients) + 2 * size_of::<f32>())
}

/// The library's plans for a pass, best guess first.
pub(super) fn plans(
    library: &Arc<Library>,
    pass: &Pass,
    target: Target,
) -> Result<impl Iterator<Item = Result<Plan>> + use<>> {
    let mut graph = Graph::new(library);
    if pass.is_backward {
        backward(&mut graph, pass)?
    } else {
        forward(&mut graph, pass)?
    };
    plans_of(graph, pass.values(), target)
}

/// A side of `qkv` or of its gradient: queries, keys or values.
fn rows(g: &mut Graph, id: i64, l: &Layout, heads: i64) -> Result<Tensor> {
    g.tensor(Place::Memory(id), Type::Bf16, l.rows(heads), l.strides(l.width()))
}

/// Keys or values with tokens as columns.
fn columns(g: &mut Graph, id: i64, l: &Layout) -> Result<Tensor> {
    let ([b, h, t, d], [x, y, z, w]) = (l.rows(l.kv_heads), l.strides(l.width()));
    g.tensor(Place::Memory(id), Type::Bf16, [b, h, d, t], [x, y, w, z])
}

/// The output, or its gradient.
fn output(g: &mut Graph, id: i64, l: &Layout) -> Result<Tensor> {
    g.tensor(Place::Memory(id), Type::Bf16, l.rows(l.heads), l.strides(l.heads * l.dim))
}

/// An `f32` for each query.
fn of_queries(g: &mut Graph, id: i64, l: &Layout) -> Result<Tensor> {
    g.tensor(Place::Memory(id), Type::F32, l.of_queries(), packed(l.of_queries()))
}

/// Scores of what a query doesn't see become infinitely small.
fn hide(g: &mut Graph, mask: Mask, scores: Tensor) -> Result<Tensor> {
    let hidden = g.scalar(HIDDEN)?;
    let (query, key) = (g.index(scores, 2)?, g.index(scores, 3)?);
    let is_before = g.apply(Mode::GreaterEqual, Type::Boolean, query, Some(key))?;
    let scores = g.select(is_before, scores, hidden)?;
    let Mask::Window(_) = mask else { return Ok(scores) };
    let (query, key) = (g.index(scores, 2)?, g.index(scores, 3)?);
    let window = g.scalar(WINDOW)?;
    let end = g.apply(Mode::Add, Type::F32, key, Some(window))?;
    let is_near = g.apply(Mode::Greater, Type::Boolean, end, Some(query))?;
    g.select(is_near, scores, hidden)
}

/// `o = softmax(mask(scale · q · kᵀ)) · v`, and the logarithm of each row's sum.
fn forward(g: &mut Graph, pass: &Pass) -> Result<()> {
    let l = Layout::of(pass.shape);
    let (q, k, v) = (rows(g, Q, &l, l.heads)?, columns(g, K, &l)?, rows(g, V, &l, l.kv_heads)?);
    let scale = g.scalar(SCALE)?;
    let scores = g.between(Type::F32, l.scores())?;
    g.multiply(q, k, scores)?;
    let scores = g.apply(Mode::Mul, Type::F32, scores, Some(scale))?;
    let scores = hide(g, pass.mask, scores)?;

    let most = g.between(Type::F32, l.of_queries())?;
    g.reduce(Reduction::Max, scores, most)?;
    let below = g.apply(Mode::Sub, Type::F32, scores, Some(most))?;
    let shares = g.apply(Mode::Exp, Type::F32, below, None)?;
    let sum = g.between(Type::F32, l.of_queries())?;
    g.reduce(Reduction::Add, shares, sum)?;
    let logarithm = g.apply(Mode::Log, Type::F32, sum, None)?;
    let lse = of_queries(g, LSE, &l)?;
    g.pointwise(Mode::Add, most, Some(logarithm), lse)?;

    let probabilities = g.apply(Mode::Div, Type::Bf16, shares, Some(sum))?;
    let o = output(g, O, &l)?;
    g.multiply(probabilities, v, o)
}

/// With p the probabilities and dP = dO·vᵀ: dV = pᵀ·dO, dS = p·(dP − Σ dO·O)·scale, dQ = dS·k, dK = dSᵀ·q.
fn backward(g: &mut Graph, pass: &Pass) -> Result<()> {
    let l = Layout::of(pass.shape);
    let (d_o, o) = (output(g, D_O, &l)?, output(g, O, &l)?);
    let both = g.tensor(Place::Virtual, Type::F32, l.rows(l.heads), packed(l.rows(l.heads)))?;
    g.pointwise(Mode::Mul, d_o, Some(o), both)?;
    let dots = g.between(Type::F32, l.of_queries())?;
    g.reduce(Reduction::Add, both, dots)?;
    let kept = g.scalar(KEPT)?;
    let dots_of_kept = of_queries(g, DOTS, &l)?;
    g.pointwise(Mode::Mul, dots, Some(kept), dots_of_kept)?;

    let (q, k, v) = (rows(g, Q, &l, l.heads)?, columns(g, K, &l)?, columns(g, V, &l)?);
    let scale = g.scalar(SCALE)?;
    let scores = g.between(Type::F32, l.scores())?;
    g.multiply(q, k, scores)?;
    let scores = g.apply(Mode::Mul, Type::F32, scores, Some(scale))?;
    let lse = of_queries(g, LSE, &l)?;
    let below = g.apply(Mode::Sub, Type::F32, scores, Some(lse))?;
    let below = hide(g, pass.mask, below)?;
    let p = g.apply(Mode::Exp, Type::F32, below, None)?;
    let p_of_keys = g.transposed(Type::Bf16, p)?;
    of_keys(g, &l, p_of_keys, d_o, D_V)?;

    let d_p = g.between(Type::F32, l.scores())?;
    g.multiply(d_o, v, d_p)?;
    let d_s = g.apply(Mode::Sub, Type::F32, d_p, Some(dots_of_kept))?;
    let d_s = g.apply(Mode::Mul, Type::F32, d_s, Some(p))?;
    let d_s = g.apply(Mode::Mul, Type::F32, d_s, Some(scale))?;
    let d_s_of_keys = g.transposed(Type::Bf16, d_s)?;
    of_keys(g, &l, d_s_of_keys, q, D_K)?;

    let k = g.transposed(Type::F32, k)?;
    let sums = g.tensor(Place::Memory(D_Q_SUMS), Type::F32, l.rows(l.heads), packed(l.rows(l.heads)))?;
    g.multiply(d_s, k, sums)?;
    let d_q = rows(g, D_Q, &l, l.heads)?;
    g.pointwise(Mode::Identity, sums, None, d_q)
}

/// The gradient of keys or values: `a · b` for each query head, added up for those that share a key head.
fn of_keys(g: &mut Graph, l: &Layout, a: Tensor, b: Tensor, id: i64) -> Result<()> {
    let gradient = rows(g, id, l, l.kv_heads)?;
    if l.heads == l.kv_heads {
        return g.multiply(a, b, gradient);
    }
    let of_heads = g.between(Type::Bf16, l.rows(l.heads))?;
    g.multiply(a, b, of_heads)?;
    g.reduce(Reduction::Add, of_heads, gradient)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_told_by_the_first_keys() {
        assert_eq!(Mask::of(&[0, 0, 0, 0], 4), Some(Mask::Causal));
        assert_eq!(Mask::of(&[0, 0, 0, 0], 2), Some(Mask::Causal));
        assert_eq!(Mask::of(&[0, 0, 1, 2, 0, 0, 1, 2], 4), Some(Mask::Window(2)));
        assert_eq!(Mask::of(&[0, 1, 2], 3), Some(Mask::Window(1)));
        assert_eq!(Mask::of(&[0, 0, 2, 2], 4), None, "a document begins");
        assert_eq!(Mask::of(&[0, 0, 0, 0, 0, 0, 1, 2], 4), None, "sequences differ");
        assert_eq!(Mask::of(&[0, 0, 1, 2, 0, 0, 0, 0], 4), None, "sequences differ");
        assert_eq!(Mask::of(&[1, 0], 2), None);
        assert_eq!(Mask::of(&[], 4), None);
    }
}
