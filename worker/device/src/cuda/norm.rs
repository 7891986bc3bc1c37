//! Ops on a GPU that normalize rows or sum over rows: RMSNorm, LayerNorm, RMSNorm of heads, and
//! bias.
use super::backend::{Cuda, choose_row_threads};
use super::bindings::Address;
use super::compile::NORM;
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, are_vectorizable, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::expect_len;
use crate::ops::{HeadLayout, LayerNormParams, WriteMode};
use std::ffi::CStr;

/// Number of rows that a thread block sums. This is `ROWS_PER_PARTIAL_SUM` of norm.cu.
const ROWS_PER_PARTIAL_SUM: usize = 64;
/// Number of columns that a thread block sums. This is `COLUMNS_PER_BLOCK` of norm.cu.
const COLUMNS_PER_BLOCK: usize = 256;

/// Layout of rows, or of heads within rows, in a tensor. The layout of this type is that of
/// `RowLayout` in norm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct RowLayout {
    count: i64,
    d: i64,
    per: i64,
    stride: i64,
    first: i64,
}

// SAFETY: struct RowLayout of norm.cu.
unsafe impl KernelArg for RowLayout {}

impl RowLayout {
    /// Returns the layout of contiguous rows of `d` elements.
    fn from_contiguous_rows(rows: usize, d: usize) -> Self {
        RowLayout { count: rows as i64, d: d as i64, per: 1, stride: d as i64, first: 0 }
    }

    /// Returns true if every row begins at a multiple of eight elements, provided that the first
    /// does.
    fn are_vectorizable(&self) -> bool {
        [self.d, self.stride, self.first].iter().all(|n| n % 8 == 0)
    }

    /// Returns the layout in which each head of a wider matrix is a row. Panics if there are too
    /// many heads for a grid.
    fn from_heads(h: HeadLayout) -> Self {
        let [d, per, stride, first] = [h.head_dim, h.heads, h.stride, h.first_column].map(|x| x as i64);
        let count = h.rows * h.heads;
        assert!(count < 1 << 31, "rmsnorm_heads: {count} heads exceed the grid");
        RowLayout { count: count as i64, d, per, stride, first }
    }
}

/// Selects the kernel for rows of `d` elements. If the tensors can be accessed as vectors of eight
/// elements, returns the kernel `one` for up to one vector per thread, or the kernel `up_to_four`
/// for up to four. Returns the kernel `general` otherwise, and for longer rows.
fn select_kernel(
    d: usize,
    tensors: &[(TensorArg, Dtype)],
    [general, one, up_to_four]: [&'static CStr; 3],
) -> &'static CStr {
    match d.div_ceil(8 * choose_row_threads(d) as usize) {
        _ if !are_vectorizable(d, tensors) => general,
        0..=1 => one,
        2..=4 => up_to_four,
        _ => general,
    }
}

/// Pairs each tensor with bf16 as the element type that [`are_vectorizable`] requires.
fn require_bf16<const N: usize>(tensors: [TensorArg; N]) -> [(TensorArg, Dtype); N] {
    tensors.map(|tensor| (tensor, Dtype::Bf16))
}

/// Factor by which each row is multiplied before [`sum_rows`] sums the rows.
#[derive(Clone, Copy)]
enum RowFactor {
    One,
    /// The normalized input of RMSNorm, `x · rstd`: x, and the address of the reciprocal root mean
    /// square of each row.
    RmsNormed(TensorArg, Address),
    /// The normalized input of LayerNorm, `(x − mean) · rstd`: x, and the address of mean and rstd
    /// of each row.
    LayerNormed(TensorArg, Address),
}

/// Adds `Σ dy · factor` over the rows to `out[d]`. The order of the sum depends only on the number
/// of rows.
fn sum_rows(cuda: &Cuda, out: Address, dy: TensorArg, factor: RowFactor, at: RowLayout) {
    let (d, rows) = (at.d as usize, at.count as usize);
    let chunks = rows.div_ceil(ROWS_PER_PARTIAL_SUM);
    if rows == 0 || d == 0 {
        return;
    }
    let sums = cuda.alloc_scratch(chunks * d * size_of::<f32>());
    let (x, stats, factor_code) = match factor {
        RowFactor::One => (TensorArg::NONE, 0, 0i64),
        RowFactor::RmsNormed(x, rstd) => (x, rstd, 1),
        RowFactor::LayerNormed(x, stats) => (x, stats, 2),
    };
    let config = LaunchConfig {
        grid: [chunks as u32, d.div_ceil(COLUMNS_PER_BLOCK) as u32, 1],
        block: [32, 8, 1],
        shared: 0,
    };
    // x is absent or has the layout of dy
    let tensors = require_bf16([dy, if x.at == 0 { dy } else { x }]);
    let is_bf16 = at.are_vectorizable() && are_vectorizable(d, &tensors);
    let name = if is_bf16 { c"sum_rows_bf16" } else { c"sum_rows" };
    assert!(rows < 1 << 31, "sum_rows: {rows} rows exceed the grid");
    cuda.launch_kernel(NORM, name, config, &[&sums.address(), &dy, &x, &stats, &at, &factor_code]);
    let config = LaunchConfig { grid: [d.div_ceil(32) as u32, 1, 1], block: [32, 32, 1], shared: 0 };
    cuda.launch_kernel(
        NORM,
        c"add_partial_sums",
        config,
        &[&out, &sums.address(), &(chunks as i64), &(d as i64)],
    );
}

/// Computes RMSNorm of each row of `x`. If there is a `delta`, first adds it to `x` in place.
pub(super) fn rmsnorm_forward(
    cuda: &Cuda,
    y: ViewMut,
    rstd: ViewMut,
    x: TensorArg,
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
    let delta = delta.map_or(TensorArg::NONE, TensorArg::from);
    let rstd = f32_gpu_address(rstd.as_view());
    let (y, w) = (TensorArg::from(&y), TensorArg::from(w));
    let names = [c"rmsnorm_forward", c"rmsnorm_forward_bf16", c"rmsnorm_forward_bf16_long"];
    let name = select_kernel(d, &require_bf16([y, x, if delta.at == 0 { x } else { delta }, w]), names);
    let arguments: [&dyn KernelArg; 8] = [&y, &rstd, &x, &delta, &w, &(m as i64), &(d as i64), &eps];
    cuda.launch_row_warps(NORM, name, m, d, &arguments);
}

/// Implements [`crate::Ops::rmsnorm_backward`].
pub(super) fn rmsnorm_backward(
    cuda: &Cuda,
    dx: ViewMut,
    dw: ViewMut,
    dy: View,
    x: View,
    w: View,
    rstd: View,
    m: usize,
    write: WriteMode,
) {
    let (op, d) = ("rmsnorm_backward", w.len());
    for (name, len) in [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())] {
        expect_len(op, name, len, m * d);
    }
    expect_len(op, "rstd", rstd.len(), m);
    expect_len(op, "dw", dw.len(), d);
    let (at, dy, x, rstd) = (
        RowLayout::from_contiguous_rows(m, d),
        TensorArg::from(dy),
        TensorArg::from(x),
        f32_gpu_address(rstd),
    );
    sum_rows(cuda, f32_gpu_address(dw.as_view()), dy, RowFactor::RmsNormed(x, rstd), at);
    let add = i64::from(write == WriteMode::Accumulate);
    let (dx, w) = (TensorArg::from(&dx), TensorArg::from(w));
    let names = [c"rmsnorm_backward", c"rmsnorm_backward_bf16", c"rmsnorm_backward_bf16_long"];
    let [dy_type, x_type, w_type] = require_bf16([dy, x, w]);
    let name = select_kernel(d, &[(dx, Dtype::F32), dy_type, x_type, w_type], names);
    let arguments: [&dyn KernelArg; 7] = [&dx, &dy, &x, &w, &rstd, &at, &add];
    cuda.launch_row_warps(NORM, name, m, d, &arguments);
}

/// Panics if the length of a buffer of the op `op` does not fit the layout.
fn check_head_lengths(op: &str, x: usize, raw: usize, rstd: usize, w: usize, h: HeadLayout) {
    assert!(h.head_dim > 0, "{op}: the head dimension is 0");
    assert!(
        h.first_column + h.width() <= h.stride,
        "{op}: {} heads from element {} on do not fit rows of {}",
        h.heads,
        h.first_column,
        h.stride
    );
    expect_len(op, "x", x, h.rows * h.stride);
    expect_len(op, "raw", raw, h.rows * h.width());
    expect_len(op, "rstd", rstd, h.rows * h.heads);
    expect_len(op, "w", w, h.head_dim);
}

/// Implements [`crate::Ops::rmsnorm_heads_forward`].
pub(super) fn rmsnorm_heads_forward(
    cuda: &Cuda,
    x: ViewMut,
    raw: ViewMut,
    rstd: ViewMut,
    w: View,
    h: HeadLayout,
    eps: f32,
) {
    check_head_lengths("rmsnorm_heads_forward", x.len(), raw.len(), rstd.len(), w.len(), h);
    let (at, rstd) = (RowLayout::from_heads(h), f32_gpu_address(rstd.as_view()));
    let (x, raw, w) = (TensorArg::from(&x), TensorArg::from(&raw), TensorArg::from(w));
    let general = c"rmsnorm_heads_forward";
    let bf16 = if at.are_vectorizable() { c"rmsnorm_heads_forward_bf16" } else { general };
    let name = select_kernel(h.head_dim, &require_bf16([x, raw, w]), [general, bf16, general]);
    let arguments: [&dyn KernelArg; 6] = [&x, &raw, &rstd, &w, &at, &eps];
    cuda.launch_row_warps(NORM, name, h.rows * h.heads, h.head_dim, &arguments);
}

/// Implements [`crate::Ops::rmsnorm_heads_backward`].
pub(super) fn rmsnorm_heads_backward(
    cuda: &Cuda,
    dx: ViewMut,
    dw: ViewMut,
    raw: View,
    rstd: View,
    w: View,
    h: HeadLayout,
) {
    let op = "rmsnorm_heads_backward";
    check_head_lengths(op, dx.len(), raw.len(), rstd.len(), w.len(), h);
    expect_len(op, "dw", dw.len(), h.head_dim);
    let (at, d, raw, rstd) =
        (RowLayout::from_heads(h), TensorArg::from(&dx), TensorArg::from(raw), f32_gpu_address(rstd));
    // before the launch below overwrites the gradient
    sum_rows(cuda, f32_gpu_address(dw.as_view()), d, RowFactor::RmsNormed(raw, rstd), at);
    let (general, w) = (c"rmsnorm_backward", TensorArg::from(w));
    let bf16 = if at.are_vectorizable() { c"rmsnorm_heads_backward_bf16" } else { general };
    let name = select_kernel(h.head_dim, &require_bf16([d, raw, w]), [general, bf16, general]);
    let arguments: [&dyn KernelArg; 7] = [&d, &d, &raw, &w, &rstd, &at, &0i64];
    cuda.launch_row_warps(NORM, name, h.rows * h.heads, h.head_dim, &arguments);
}

/// Computes LayerNorm of each row of `x`. If there is a `delta`, first adds it to `x` in place.
pub(super) fn layernorm_forward(
    cuda: &Cuda,
    y: ViewMut,
    stats: ViewMut,
    x: TensorArg,
    delta: Option<View>,
    norm: LayerNormParams,
    m: usize,
) {
    let d = norm.w.len();
    expect_len("layernorm_forward", "y", y.len(), m * d);
    expect_len("layernorm_forward", "stats", stats.len(), 2 * m);
    expect_len("layernorm_forward", "b", norm.b.len(), d);
    if let Some(delta) = delta {
        expect_len("add_layernorm_forward", "delta", delta.len(), m * d);
    }
    let delta = delta.map_or(TensorArg::NONE, TensorArg::from);
    let (w, b, stats) = (TensorArg::from(norm.w), TensorArg::from(norm.b), f32_gpu_address(stats.as_view()));
    let (y, rows, width) = (TensorArg::from(&y), m as i64, d as i64);
    let names = [c"layernorm_forward", c"layernorm_forward_bf16", c"layernorm_forward_bf16_long"];
    let name = select_kernel(d, &require_bf16([y, x, if delta.at == 0 { x } else { delta }, w, b]), names);
    let arguments: [&dyn KernelArg; 9] = [&y, &stats, &x, &delta, &w, &b, &rows, &width, &norm.eps];
    cuda.launch_row_warps(NORM, name, m, d, &arguments);
}

/// Implements [`crate::Ops::layernorm_backward`].
pub(super) fn layernorm_backward(
    cuda: &Cuda,
    dx: ViewMut,
    [dw, db]: [ViewMut; 2],
    dy: View,
    x: View,
    w: View,
    stats: View,
    m: usize,
    write: WriteMode,
) {
    let (op, d) = ("layernorm_backward", w.len());
    for (name, len) in [("dx", dx.len()), ("dy", dy.len()), ("x", x.len())] {
        expect_len(op, name, len, m * d);
    }
    expect_len(op, "stats", stats.len(), 2 * m);
    expect_len(op, "dw", dw.len(), d);
    expect_len(op, "db", db.len(), d);
    let (at, dy, x, stats) = (
        RowLayout::from_contiguous_rows(m, d),
        TensorArg::from(dy),
        TensorArg::from(x),
        f32_gpu_address(stats),
    );
    sum_rows(cuda, f32_gpu_address(dw.as_view()), dy, RowFactor::LayerNormed(x, stats), at);
    sum_rows(cuda, f32_gpu_address(db.as_view()), dy, RowFactor::One, at);
    let add = i64::from(write == WriteMode::Accumulate);
    let (dx, w, rows, width) = (TensorArg::from(&dx), TensorArg::from(w), m as i64, d as i64);
    let names = [c"layernorm_backward", c"layernorm_backward_bf16", c"layernorm_backward_bf16_long"];
    let [dy_type, x_type, w_type] = require_bf16([dy, x, w]);
    let name = select_kernel(d, &[(dx, Dtype::F32), dy_type, x_type, w_type], names);
    let arguments: [&dyn KernelArg; 8] = [&dx, &dy, &x, &w, &stats, &rows, &width, &add];
    cuda.launch_row_warps(NORM, name, m, d, &arguments);
}

/// Implements [`crate::Ops::bias_forward`].
pub(super) fn bias_forward(cuda: &Cuda, y: ViewMut, bias: View, m: usize, n: usize) {
    expect_len("bias_forward", "y", y.len(), m * n);
    expect_len("bias_forward", "bias", bias.len(), n);
    cuda.launch_row_blocks(
        NORM,
        c"bias_forward",
        m,
        n,
        &[&TensorArg::from(&y), &TensorArg::from(bias), &(n as i64)],
    );
}

/// Implements [`crate::Ops::bias_backward`].
pub(super) fn bias_backward(cuda: &Cuda, dbias: ViewMut, dy: View, m: usize, n: usize) {
    expect_len("bias_backward", "dbias", dbias.len(), n);
    expect_len("bias_backward", "dy", dy.len(), m * n);
    sum_rows(
        cuda,
        f32_gpu_address(dbias.as_view()),
        dy.into(),
        RowFactor::One,
        RowLayout::from_contiguous_rows(m, n),
    );
}
