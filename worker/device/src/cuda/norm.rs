//! RMSNorm, LayerNorm, the norm of heads, bias: rows, and sums over rows.
use super::card::{Launch, Param};
use super::compile::NORM;
use super::{Address, Cuda, Tensor, eights, expect_len, floats, threads};
use crate::mem::{Dtype, View, ViewMut};
use crate::ops::{HeadRows, LayerNorm, Write};
use std::ffi::CStr;

/// SUM_ROWS and COLUMNS of norm.cu.
const SUM_ROWS: usize = 64;
const COLUMNS: usize = 256;

/// `Rows` of norm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct Rows {
    count: i64,
    d: i64,
    per: i64,
    stride: i64,
    first: i64,
}

// SAFETY: struct Rows of norm.cu.
unsafe impl Param for Rows {}

impl Rows {
    fn plain(rows: usize, d: usize) -> Self {
        Rows { count: rows as i64, d: d as i64, per: 1, stride: d as i64, first: 0 }
    }

    /// Do all begin at eights, if the first element does?
    fn are_eights(&self) -> bool {
        [self.d, self.stride, self.first].iter().all(|n| n % 8 == 0)
    }

    fn heads(h: HeadRows) -> Self {
        let [d, per, stride, first] = [h.head_dim, h.heads, h.stride, h.first].map(|x| x as i64);
        let count = h.rows * h.heads;
        assert!(count < 1 << 31, "norms of {count} heads");
        Rows { count: count as i64, d, per, stride, first }
    }
}

/// Which kernel for rows of `d` elements: for anything; for these types in whole eights, one for each thread, or up to four.
fn choose(d: usize, tensors: &[(Tensor, Dtype)], [any, one, four]: [&'static CStr; 3]) -> &'static CStr {
    match d.div_ceil(8 * threads(d) as usize) {
        _ if !eights(d, tensors) => any,
        0..=1 => one,
        2..=4 => four,
        _ => any,
    }
}

fn all_bf16<const N: usize>(tensors: [Tensor; N]) -> [(Tensor, Dtype); N] {
    tensors.map(|tensor| (tensor, Dtype::Bf16))
}

/// What the summed rows are multiplied with.
#[derive(Clone, Copy)]
enum Times {
    One,
    /// x, and 1/rms of each row.
    RmsNormed(Tensor, Address),
    /// x, mean and 1/deviation of each row.
    LayerNormed(Tensor, Address),
}

/// `out[d] += Σ dy · times` over the rows, in an order that depends on their number alone.
fn sum_rows(cuda: &Cuda, out: Address, dy: Tensor, times: Times, at: Rows) {
    let (d, rows) = (at.d as usize, at.count as usize);
    let chunks = rows.div_ceil(SUM_ROWS);
    if rows == 0 || d == 0 {
        return;
    }
    let sums = cuda.scratch(chunks * d * size_of::<f32>());
    let (x, stats, what) = match times {
        Times::One => (Tensor::NONE, 0, 0i64),
        Times::RmsNormed(x, rstd) => (x, rstd, 1),
        Times::LayerNormed(x, stats) => (x, stats, 2),
    };
    let shape = Launch { grid: [chunks as u32, d.div_ceil(COLUMNS) as u32, 1], block: [32, 8, 1], shared: 0 };
    // x isn't there, or lies as dy does
    let known = [(dy, Dtype::Bf16), (if x.at == 0 { dy } else { x }, Dtype::Bf16)];
    let is_known = at.are_eights() && eights(d, &known);
    let name = if is_known { c"sum_rows_bf16" } else { c"sum_rows" };
    assert!(rows < 1 << 31, "a sum over {rows} rows");
    cuda.launch(NORM, name, shape, &[&sums.at(), &dy, &x, &stats, &at, &what]);
    let shape = Launch { grid: [d.div_ceil(32) as u32, 1, 1], block: [32, 32, 1], shared: 0 };
    cuda.launch(NORM, c"add_sums", shape, &[&out, &sums.at(), &(chunks as i64), &(d as i64)]);
}

/// `y`, and `x += delta` before where delta is given.
pub(super) fn rms(
    cuda: &Cuda,
    y: ViewMut,
    rstd: ViewMut,
    x: Tensor,
    delta: Option<View>,
    w: View,
    m: usize,
    eps: f32,
) {
    let d = w.len();
    expect_len("rmsnorm_forward", "y", y.len(), m * d);
    expect_len("rmsnorm_forward", "rstd", rstd.len(), m);
    if let Some(delta) = delta {
        expect_len("add_rmsnorm_forward", "delta", delta.len(), m * d);
    }
    let delta = delta.map_or(Tensor::NONE, Tensor::from);
    let rstd = floats(rstd.as_view());
    let (y, w) = (Tensor::from(&y), Tensor::from(w));
    let names = [c"rmsnorm_forward", c"rmsnorm_forward_bf16", c"rmsnorm_forward_bf16_long"];
    let name = choose(d, &all_bf16([y, x, if delta.at == 0 { x } else { delta }, w]), names);
    let arguments: [&dyn Param; 8] = [&y, &rstd, &x, &delta, &w, &(m as i64), &(d as i64), &eps];
    cuda.each_short_row(NORM, name, m, d, &arguments);
}

pub(super) fn rms_backward(
    cuda: &Cuda,
    dx: ViewMut,
    dw: ViewMut,
    dy: View,
    x: View,
    w: View,
    rstd: View,
    m: usize,
    write: Write,
) {
    let (op, d) = ("rmsnorm_backward", w.len());
    for (name, len) in [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())] {
        expect_len(op, name, len, m * d);
    }
    expect_len(op, "rstd", rstd.len(), m);
    expect_len(op, "dw", dw.len(), d);
    let (at, dy, x, rstd) = (Rows::plain(m, d), Tensor::from(dy), Tensor::from(x), floats(rstd));
    sum_rows(cuda, floats(dw.as_view()), dy, Times::RmsNormed(x, rstd), at);
    let add = i64::from(write == Write::Add);
    let (dx, w) = (Tensor::from(&dx), Tensor::from(w));
    let names = [c"rmsnorm_backward", c"rmsnorm_backward_bf16", c"rmsnorm_backward_bf16_long"];
    let [dy_type, x_type, w_type] = all_bf16([dy, x, w]);
    let name = choose(d, &[(dx, Dtype::F32), dy_type, x_type, w_type], names);
    let arguments: [&dyn Param; 7] = [&dx, &dy, &x, &w, &rstd, &at, &add];
    cuda.each_short_row(NORM, name, m, d, &arguments);
}

fn check_heads(op: &str, x: usize, raw: usize, rstd: usize, w: usize, h: HeadRows) {
    assert!(h.head_dim > 0, "{op}: heads of no element have no mean");
    assert!(h.first + h.width() <= h.stride, "{op}: {} heads don't fit a row of {}", h.heads, h.stride);
    expect_len(op, "x", x, h.rows * h.stride);
    expect_len(op, "raw", raw, h.rows * h.width());
    expect_len(op, "rstd", rstd, h.rows * h.heads);
    expect_len(op, "w", w, h.head_dim);
}

pub(super) fn heads(cuda: &Cuda, x: ViewMut, raw: ViewMut, rstd: ViewMut, w: View, h: HeadRows, eps: f32) {
    check_heads("rmsnorm_heads_forward", x.len(), raw.len(), rstd.len(), w.len(), h);
    let (at, rstd) = (Rows::heads(h), floats(rstd.as_view()));
    let (x, raw, w) = (Tensor::from(&x), Tensor::from(&raw), Tensor::from(w));
    let any = c"rmsnorm_heads_forward";
    let known = if at.are_eights() { c"rmsnorm_heads_forward_bf16" } else { any };
    let name = choose(h.head_dim, &all_bf16([x, raw, w]), [any, known, any]);
    let arguments: [&dyn Param; 6] = [&x, &raw, &rstd, &w, &at, &eps];
    cuda.each_short_row(NORM, name, h.rows * h.heads, h.head_dim, &arguments);
}

pub(super) fn heads_backward(
    cuda: &Cuda,
    dx: ViewMut,
    dw: ViewMut,
    raw: View,
    rstd: View,
    w: View,
    h: HeadRows,
) {
    let op = "rmsnorm_heads_backward";
    check_heads(op, dx.len(), raw.len(), rstd.len(), w.len(), h);
    expect_len(op, "dw", dw.len(), h.head_dim);
    let (at, d, raw, rstd) = (Rows::heads(h), Tensor::from(&dx), Tensor::from(raw), floats(rstd));
    // before the gradient is overwritten
    sum_rows(cuda, floats(dw.as_view()), d, Times::RmsNormed(raw, rstd), at);
    let (any, w) = (c"rmsnorm_backward", Tensor::from(w));
    let known = if at.are_eights() { c"rmsnorm_heads_backward_bf16" } else { any };
    let name = choose(h.head_dim, &all_bf16([d, raw, w]), [any, known, any]);
    let arguments: [&dyn Param; 7] = [&d, &d, &raw, &w, &rstd, &at, &0i64];
    cuda.each_short_row(NORM, name, h.rows * h.heads, h.head_dim, &arguments);
}

/// `y`, and `x += delta` before where delta is given.
pub(super) fn layer(
    cuda: &Cuda,
    y: ViewMut,
    stats: ViewMut,
    x: Tensor,
    delta: Option<View>,
    norm: LayerNorm,
    m: usize,
) {
    let d = norm.w.len();
    expect_len("layernorm_forward", "y", y.len(), m * d);
    expect_len("layernorm_forward", "stats", stats.len(), 2 * m);
    expect_len("layernorm_forward", "b", norm.b.len(), d);
    if let Some(delta) = delta {
        expect_len("add_layernorm_forward", "delta", delta.len(), m * d);
    }
    let delta = delta.map_or(Tensor::NONE, Tensor::from);
    let (w, b, stats) = (Tensor::from(norm.w), Tensor::from(norm.b), floats(stats.as_view()));
    let (y, rows, width) = (Tensor::from(&y), m as i64, d as i64);
    let names = [c"layernorm_forward", c"layernorm_forward_bf16", c"layernorm_forward_bf16_long"];
    let name = choose(d, &all_bf16([y, x, if delta.at == 0 { x } else { delta }, w, b]), names);
    let arguments: [&dyn Param; 9] = [&y, &stats, &x, &delta, &w, &b, &rows, &width, &norm.eps];
    cuda.each_short_row(NORM, name, m, d, &arguments);
}

pub(super) fn layer_backward(
    cuda: &Cuda,
    dx: ViewMut,
    [dw, db]: [ViewMut; 2],
    dy: View,
    x: View,
    w: View,
    stats: View,
    m: usize,
    write: Write,
) {
    let (op, d) = ("layernorm_backward", w.len());
    for (name, len) in [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())] {
        expect_len(op, name, len, m * d);
    }
    expect_len(op, "stats", stats.len(), 2 * m);
    expect_len(op, "dw", dw.len(), d);
    expect_len(op, "db", db.len(), d);
    let (at, dy, x, stats) = (Rows::plain(m, d), Tensor::from(dy), Tensor::from(x), floats(stats));
    sum_rows(cuda, floats(dw.as_view()), dy, Times::LayerNormed(x, stats), at);
    sum_rows(cuda, floats(db.as_view()), dy, Times::One, at);
    let add = i64::from(write == Write::Add);
    let (dx, w, rows, width) = (Tensor::from(&dx), Tensor::from(w), m as i64, d as i64);
    let names = [c"layernorm_backward", c"layernorm_backward_bf16", c"layernorm_backward_bf16_long"];
    let [dy_type, x_type, w_type] = all_bf16([dy, x, w]);
    let name = choose(d, &[(dx, Dtype::F32), dy_type, x_type, w_type], names);
    let arguments: [&dyn Param; 8] = [&dx, &dy, &x, &w, &stats, &rows, &width, &add];
    cuda.each_short_row(NORM, name, m, d, &arguments);
}

pub(super) fn bias(cuda: &Cuda, y: ViewMut, bias: View, m: usize, n: usize) {
    expect_len("bias_forward", "y", y.len(), m * n);
    expect_len("bias_forward", "bias", bias.len(), n);
    cuda.each_row(NORM, c"bias_forward", m, n, &[&Tensor::from(&y), &Tensor::from(bias), &(n as i64)]);
}

pub(super) fn bias_backward(cuda: &Cuda, dbias: ViewMut, dy: View, m: usize, n: usize) {
    expect_len("bias_backward", "dbias", dbias.len(), n);
    expect_len("bias_backward", "dy", dy.len(), m * n);
    sum_rows(cuda, floats(dbias.as_view()), dy.into(), Times::One, Rows::plain(m, n));
}
