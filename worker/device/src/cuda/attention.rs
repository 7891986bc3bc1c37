//! Attention: tiles of queries or keys, one block each. On tensor cores where everything is bf16 and heads have at most 128
//! elements, else in f32.
use super::card::{Launch, Param};
use super::compile::{ATTENTION, FLASH};
use super::{Cuda, Tensor, expect_len, floats};
use crate::mem::{Dtype, View, ViewMut};
use crate::ops::AttentionShape;

/// TILE of attention.cu, and threads of a block.
const TILE: usize = 32;
const THREADS: u32 = 128;
/// MOST_DIM of attention.cu.
const MOST_DIM: usize = 256;

/// OWN, TILE_F and TILE_B of flash.cu: rows of a block, and of a step of the forward and the backward.
const OWN: usize = 64;
const STEP_FORWARD: usize = 64;
const STEP_BACKWARD: usize = 32;

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
    assert!(heads <= 65_535 && s.b <= 65_535, "attention: {heads} heads, {} sequences", s.b);
    Launch { grid: [s.t.div_ceil(TILE) as u32, heads as u32, s.b as u32], block: [THREADS, 1, 1], shared }
}

/// A launch of flash.cu, and the heads' size that its kernels were made for: `tiles` of 64 rows and as many of `step` rows lie in
/// shared memory.
fn flash(
    s: AttentionShape,
    heads: usize,
    own_tiles: usize,
    step_tiles: usize,
    step: usize,
) -> (bool, Launch) {
    let is_wide = s.head_dim > 64;
    let rows = own_tiles * OWN + step_tiles * step;
    let shared = rows * (if is_wide { 128 } else { 64 } + 8) * size_of::<u16>();
    assert!(heads <= 65_535 && s.b <= 65_535, "attention: {heads} heads, {} sequences", s.b);
    let grid = [s.t.div_ceil(OWN) as u32, heads as u32, s.b as u32];
    (is_wide, Launch { grid, block: [THREADS, 1, 1], shared })
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
    if let Some(d) = &s.dropout {
        d.check(op, &s);
    }
}

pub(super) fn forward(cuda: &Cuda, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], s: AttentionShape) {
    check("attention_forward", o.len(), lse.len(), qkv.len(), starts, s);
    let lse = floats(lse.as_view());
    let fast = is_fast(&[qkv.dtype()], s);
    let starts = cuda.numbers(starts);
    let arguments: [&dyn Param; 5] =
        [&Tensor::from(&o), &lse, &Tensor::from(qkv), &starts.at(), &Shape::new(s)];
    if fast {
        let (is_wide, shape) = flash(s, s.heads, 1, 2, STEP_FORWARD);
        let name = if is_wide { c"flash_forward_128" } else { c"flash_forward_64" };
        return cuda.launch(FLASH, name, shape, &arguments);
    }
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
    let fast = is_fast(&[qkv.dtype(), d_o.dtype()], s);
    let dots = cuda.scratch(lse.len() * size_of::<f32>());
    let starts = cuda.numbers(starts);
    let (dqkv, d_o, qkv, lse, shape) =
        (Tensor::from(&dqkv), Tensor::from(d_o), Tensor::from(qkv), floats(lse), Shape::new(s));
    let per_query = Launch { grid: [s.t as u32, s.heads as u32, s.b as u32], block: [32, 1, 1], shared: 0 };
    cuda.launch(ATTENTION, c"attention_dots", per_query, &[&dots.at(), &d_o, &Tensor::from(o), &shape]);
    let arguments: [&dyn Param; 7] = [&dqkv, &d_o, &qkv, &lse, &dots.at(), &starts.at(), &shape];
    if fast {
        let (is_wide, by_queries) = flash(s, s.heads, 2, 2, STEP_BACKWARD);
        let (_, by_keys) = flash(s, s.kv_heads, 2, 2, STEP_BACKWARD);
        let names = match is_wide {
            true => [c"flash_backward_q_128", c"flash_backward_kv_128"],
            false => [c"flash_backward_q_64", c"flash_backward_kv_64"],
        };
        cuda.launch(FLASH, names[0], by_queries, &arguments);
        return cuda.launch(FLASH, names[1], by_keys, &arguments);
    }
    cuda.launch(ATTENTION, c"attention_backward_q", launch(cuda, s, s.heads, 4, 1), &arguments);
    cuda.launch(ATTENTION, c"attention_backward_kv", launch(cuda, s, s.kv_heads, 4, 2), &arguments);
}
