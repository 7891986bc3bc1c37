//! Attention: tiles of queries or keys, one block each. On tensor cores where everything is bf16 and heads have at most 128
//! elements, else in f32.
use super::card::{Launch, Param};
use super::compile::{ATTENTION, FLASH};
use super::dnn::{Operands, Pass};
use super::{Cuda, Tensor, expect_len, floats, must};
use crate::mem::{Dtype, View, ViewMut};
use crate::ops::AttentionShape;
use std::ffi::CStr;

/// TILE of attention.cu, and threads of a block.
const TILE: usize = 32;
const THREADS: u32 = 128;
/// MOST_DIM of attention.cu.
const MOST_DIM: usize = 256;

/// OWN of flash.cu: rows of a block.
const OWN: usize = 128;
/// Bytes that its blocks have beside rows, at most: statistics of two steps of 64 rows, and `Kept`.
const BESIDE: usize = 2 * 3 * 64 * 4 + 128;

/// `Attention` of attention.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    t: i64,
    heads: i64,
    kv_heads: i64,
    dim: i64,
    scale: f32,
    cap: f32,
    number: i64,
    key: [u32; 2],
    threshold: u32,
    keep: f32,
}

// SAFETY: struct Attention of attention.cuh.
unsafe impl Param for Shape {}

impl Shape {
    fn new(s: AttentionShape) -> Self {
        let [t, heads, kv_heads, dim] = [s.t, s.heads, s.kv_heads, s.head_dim].map(|n| n as i64);
        let (number, key, threshold, keep) =
            s.dropout.map_or((0, [0; 2], 0, 0.0), |d| (d.first as i64, d.key, d.threshold(), d.keep()));
        let cap = s.softcap.unwrap_or(0.0);
        Shape { t, heads, kv_heads, dim, scale: s.scale, cap, number, key, threshold, keep }
    }
}

/// A launch with a block per tile, head and sequence; `rows` of a head and `squares` of TILE × TILE lie in shared memory.
fn launch(cuda: &Cuda, s: AttentionShape, heads: usize, rows: usize, squares: usize) -> Launch {
    let floats = rows * TILE * (s.head_dim + 1) + squares * TILE * (TILE + 1);
    let shared = floats * size_of::<f32>();
    let room = cuda.facts().shared;
    assert!(
        s.head_dim <= MOST_DIM,
        "attention: heads of {} elements; at most {MOST_DIM} on a GPU",
        s.head_dim
    );
    assert!(
        shared <= room,
        "attention: heads of {} elements need {shared} bytes of shared memory, this GPU has {room}",
        s.head_dim
    );
    Launch { grid: [s.t.div_ceil(TILE) as u32, heads as u32, s.b as u32], block: [THREADS, 1, 1], shared }
}

/// `Order` of flash.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Order {
    tiles: i64,
    heads: i64,
    all: i64,
    together: i64,
}

// SAFETY: struct Order of flash.cu.
unsafe impl Param for Order {}

/// A kernel of flash.cu.
struct Flash {
    /// For heads of at most 64 elements and of at most 128; without a cap and dropout, and with.
    names: [[&'static CStr; 2]; 2],
    warps: [[u32; 2]; 2],
    /// Rows in shared memory: two steps of the other side, and the blocks' own where registers don't hold them.
    rows: [[usize; 2]; 2],
    /// Its blocks own keys, and walk through queries.
    is_by_keys: bool,
}

const FORWARD: Flash = Flash {
    names: [[c"flash_forward_64", c"flash_forward_64_any"], [c"flash_forward_128", c"flash_forward_128_any"]],
    warps: [[4, 4], [4, 8]],
    rows: [[256, 256], [256, 256]],
    is_by_keys: false,
};
const BACKWARD_Q: Flash = Flash {
    names: [
        [c"flash_backward_q_64", c"flash_backward_q_64_any"],
        [c"flash_backward_q_128", c"flash_backward_q_128_any"],
    ],
    warps: [[4, 4], [8, 8]],
    rows: [[256, 256], [256, 256]],
    is_by_keys: false,
};
const BACKWARD_KV: Flash = Flash {
    names: [
        [c"flash_backward_kv_64", c"flash_backward_kv_64_any"],
        [c"flash_backward_kv_128", c"flash_backward_kv_128_any"],
    ],
    warps: [[4, 8], [8, 8]],
    rows: [[384, 256], [256, 256]],
    is_by_keys: true,
};

impl Flash {
    fn launch(&self, cuda: &Cuda, s: AttentionShape, arguments: &[&dyn Param]) {
        let is_wide = usize::from(s.head_dim > 64);
        let is_any = usize::from(s.softcap.is_some() || s.dropout.is_some());
        let width = (s.heads + 2 * s.kv_heads) * s.head_dim;
        assert!(s.t <= 1 << 30 && width <= 1 << 30, "attention: {s:?} is too large");
        let order = self.order(s, cuda.facts().cache);
        let blocks = u32::try_from(order.tiles * order.all).ok().filter(|blocks| *blocks <= i32::MAX as u32);
        let grid = [blocks.unwrap_or_else(|| panic!("attention: too many blocks: {s:?}")), 1, 1];
        let shared = self.rows[is_wide][is_any] * ([64, 128][is_wide] + 8) * size_of::<u16>() + BESIDE;
        let shape = Launch { grid, block: [32 * self.warps[is_wide][is_any], 1, 1], shared };
        let shape_of_op = Shape::new(s);
        let all: Vec<&dyn Param> =
            arguments.iter().copied().chain([&shape_of_op as &dyn Param, &order]).collect();
        cuda.launch(FLASH, self.names[is_wide][is_any], shape, &all);
    }

    /// Rows that are walked through are read again by each block of a head. Those of the heads that go together shall stay in
    /// the card's cache, and leave half of it to the rest.
    fn order(&self, s: AttentionShape, cache: usize) -> Order {
        let tiles = s.t.div_ceil(OWN);
        let group = s.heads / s.kv_heads;
        let (heads, sharing, others) =
            if self.is_by_keys { (s.kv_heads, 1, group) } else { (s.heads, group, 1) };
        let all = heads * s.b;
        let walked = 2 * others * s.t * s.head_dim * size_of::<u16>();
        let together = (cache / 2 / walked.max(1)).max(1) * sharing;
        let [tiles, heads, all, together] = [tiles, heads, all, together.min(all)].map(|n| n as i64);
        Order { tiles, heads, all, together }
    }
}

/// Are these on tensor cores?
fn is_fast(given: &[Dtype], s: AttentionShape) -> bool {
    s.head_dim <= 128 && given.iter().all(|dtype| *dtype == Dtype::Bf16)
}

fn check(op: &str, o: usize, lse: usize, qkv: usize, starts: &[u32], s: AttentionShape) {
    assert!(
        s.kv_heads > 0 && s.heads.is_multiple_of(s.kv_heads),
        "{op}: {} heads, {} kv heads",
        s.heads,
        s.kv_heads
    );
    expect_len(op, "o", o, s.b * s.t * s.heads * s.head_dim);
    expect_len(op, "lse", lse, s.b * s.heads * s.t);
    expect_len(op, "qkv", qkv, s.b * s.t * (s.heads + 2 * s.kv_heads) * s.head_dim);
    expect_len(op, "starts", starts.len(), s.b * s.t);
    assert!(s.heads <= 65_535 && s.b <= 65_535, "{op}: {} heads, {} sequences", s.heads, s.b);
    if let Some(d) = &s.dropout {
        d.check(op, &s);
    }
}

pub(super) fn forward(cuda: &Cuda, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], s: AttentionShape) {
    check("attention_forward", o.len(), lse.len(), qkv.len(), starts, s);
    let lse = floats(lse.as_view());
    let fast = is_fast(&[o.dtype(), qkv.dtype()], s);
    let is_bf16 = [o.dtype(), qkv.dtype()] == [Dtype::Bf16; 2];
    let (o, qkv) = (Tensor::from(&o), Tensor::from(qkv));
    let own = || FORWARD.launch(cuda, s, &[&o, &lse, &qkv, &cuda.numbers("starts", starts)]);
    let operands = Operands { qkv: qkv.at, o: o.at, lse, ..Operands::default() };
    if by_dnn(cuda, is_bf16, s, starts, &operands, false, &own) {
        return;
    }
    if fast {
        return own();
    }
    let starts = cuda.numbers("starts", starts);
    let arguments: [&dyn Param; 5] = [&o, &lse, &qkv, &starts, &Shape::new(s)];
    cuda.launch(ATTENTION, c"attention_forward", launch(cuda, s, s.heads, 3, 1), &arguments);
}

pub(super) fn backward(
    cuda: &Cuda,
    dqkv: ViewMut,
    d_o: View,
    o: View,
    lse: View,
    qkv: View,
    starts: &[u32],
    s: AttentionShape,
) {
    let op = "attention_backward";
    check(op, o.len(), lse.len(), qkv.len(), starts, s);
    expect_len(op, "dqkv", dqkv.len(), qkv.len());
    expect_len(op, "d_o", d_o.len(), o.len());
    let fast = is_fast(&[dqkv.dtype(), qkv.dtype(), d_o.dtype()], s);
    let is_bf16 = [dqkv.dtype(), qkv.dtype(), d_o.dtype(), o.dtype()] == [Dtype::Bf16; 4];
    let bytes = lse.len() * size_of::<f32>();
    let (dqkv, d_o, o, qkv, lse, shape) = (
        Tensor::from(&dqkv),
        Tensor::from(d_o),
        Tensor::from(o),
        Tensor::from(qkv),
        floats(lse),
        Shape::new(s),
    );
    let grid = [s.t.div_ceil(TILE) as u32, s.heads as u32, s.b as u32];
    let of_queries = Launch { grid, block: [8 * TILE as u32, 1, 1], shared: 0 };
    let own = || {
        let dots = cuda.scratch(bytes);
        let starts = cuda.numbers("starts", starts);
        cuda.launch(ATTENTION, c"attention_dots", of_queries, &[&dots.at(), &d_o, &o, &shape]);
        if fast {
            let arguments: [&dyn Param; 6] = [&dqkv, &d_o, &qkv, &lse, &dots.at(), &starts];
            BACKWARD_Q.launch(cuda, s, &arguments);
            return BACKWARD_KV.launch(cuda, s, &arguments);
        }
        let arguments: [&dyn Param; 7] = [&dqkv, &d_o, &qkv, &lse, &dots.at(), &starts, &shape];
        cuda.launch(ATTENTION, c"attention_backward_q", launch(cuda, s, s.heads, 4, 1), &arguments);
        cuda.launch(ATTENTION, c"attention_backward_kv", launch(cuda, s, s.kv_heads, 4, 2), &arguments);
    };
    let operands = Operands { qkv: qkv.at, o: o.at, lse, d_o: d_o.at, dqkv: dqkv.at };
    if !by_dnn(cuda, is_bf16, s, starts, &operands, true, &own) {
        own();
    }
}

/// Was the pass asked of cuDNN?
fn by_dnn(
    cuda: &Cuda,
    is_bf16: bool,
    shape: AttentionShape,
    starts: &[u32],
    operands: &Operands,
    is_backward: bool,
    own: &dyn Fn(),
) -> bool {
    let Some(attentions) = cuda.attentions.get().filter(|_| shape.b * shape.t > 0) else { return false };
    let pass = Pass::of(shape, starts, operands, is_bf16, is_backward);
    must(attentions.run(cuda, pass, operands, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_whose_rows_fit_into_the_cache_go_together() {
        let s = AttentionShape::new(2, 1000, 16, 4, 128);
        let of = |kernel: &Flash, cache| {
            let order = kernel.order(s, cache);
            (order.tiles, order.heads, order.all, order.together)
        };
        // 512 000 bytes of keys and values for each 4 heads; of queries and gradients four times as many for each one.
        assert_eq!(of(&FORWARD, 1_024_000), (8, 16, 32, 4));
        assert_eq!(of(&FORWARD, 3_000_000), (8, 16, 32, 8));
        assert_eq!(of(&FORWARD, 0), (8, 16, 32, 4));
        assert_eq!(of(&FORWARD, 1 << 30), (8, 16, 32, 32));
        assert_eq!(of(&BACKWARD_KV, 5_000_000), (8, 4, 8, 1));
        assert_eq!(of(&BACKWARD_KV, 9_000_000), (8, 4, 8, 2));
    }
}
