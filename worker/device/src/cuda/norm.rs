//! Ops on a GPU that normalize rows or sum over rows: RMSNorm, LayerNorm, RMSNorm of each attention
//! head, and bias.
use super::backend::{Cuda, LaunchSize, choose_threads_per_row};
use super::bindings::Address;
use super::compile::NORM_SOURCE;
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, are_vectorizable, f32_gpu_address};
use crate::buffer::{Dtype, View, ViewMut};
use crate::ops::{
    BiasOps, HeadLayout, HeadNormOps, LayerNormOps, LayerNormParams, RmsNormOps, WriteMode, expect_lens,
};
use std::ffi::CStr;

/// Number of matrix rows that one thread block sums to a partial result when a kernel sums all
/// rows, such as for a bias gradient. This is `ROWS_PER_PARTIAL_SUM` of norm.cu.
const ROWS_PER_PARTIAL_SUM: usize = 64;
/// Number of columns of a matrix that one thread block processes when a kernel sums over rows. This
/// is `COLUMNS_PER_BLOCK` of norm.cu.
const COLUMNS_PER_BLOCK: usize = 256;

/// Kernel argument with the positions of the rows to normalize: whole rows of a matrix, or
/// attention heads within these rows. The layout of this type is that of `RowLayout` in norm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct RowLayout {
    count: usize,
    d: usize,
    heads_per_row: usize,
    stride: usize,
    first: usize,
}

// SAFETY: struct RowLayout of norm.cu.
unsafe impl KernelArg for RowLayout {}

impl RowLayout {
    /// Creates the layout of a matrix without gaps, with `rows` rows of `d` elements, for a kernel
    /// that processes each row.
    fn from_contiguous_rows(rows: usize, d: usize) -> Self {
        RowLayout { count: rows, d, heads_per_row: 1, stride: d, first: 0 }
    }

    /// Returns true if the positions and lengths of all rows are multiples of eight elements, so
    /// that kernels can read vectors of eight.
    fn are_vectorizable(&self) -> bool {
        [self.d, self.stride, self.first].iter().all(|n| n % 8 == 0)
    }

    /// Describes all attention heads in the rows of a matrix for a kernel that processes each head
    /// as a row. Panics if there are too many heads for a grid.
    fn from_heads(h: HeadLayout) -> Self {
        let count = h.rows * h.heads;
        assert!(count < 1 << 31, "rmsnorm_heads: {count} heads exceed the grid");
        let HeadLayout { first_column: first, heads, head_dim, stride, .. } = h;
        RowLayout { count, d: head_dim, heads_per_row: heads, stride, first }
    }
}

/// Selects one of three variants of a kernel by the row length `d` and by whether all tensors can
/// be read in vectors of eight elements. If the tensors can be accessed as vectors of eight
/// elements, returns the kernel `one` for up to one vector per thread, or the kernel `up_to_four`
/// for up to four. Returns the kernel `general` otherwise, and for longer rows.
fn select_kernel(
    d: usize,
    tensors: &[(TensorArg, Dtype)],
    [general, one, up_to_four]: [&'static CStr; 3],
) -> &'static CStr {
    match d.div_ceil(8 * choose_threads_per_row(d) as usize) {
        _ if !are_vectorizable(d, tensors) => general,
        0..=1 => one,
        2..=4 => up_to_four,
        _ => general,
    }
}

/// Pairs each tensor with the element type bf16, so that [`are_vectorizable`] checks whether all
/// these tensors are bf16.
fn pair_with_bf16<const N: usize>(tensors: [TensorArg; N]) -> [(TensorArg, Dtype); N] {
    tensors.map(|tensor| (tensor, Dtype::Bf16))
}

/// Factor of each row of the output gradient in a sum over rows: 1 for a bias gradient, the
/// normalized input for a norm's weight gradient.
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

/// Enqueues kernels that multiply the rows of `dy` elementwise by `factor` (1 or the normalized
/// input), sum the rows, and add the sum to `out[d]`. The order of the sum depends only on the
/// number of rows.
fn sum_rows(cuda: &Cuda, out: Address, dy: TensorArg, factor: RowFactor, at: RowLayout) {
    let RowLayout { count: rows, d, .. } = at;
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
    let tensors = pair_with_bf16([dy, x.or(dy)]);
    let is_bf16 = at.are_vectorizable() && are_vectorizable(d, &tensors);
    let name = if is_bf16 { c"sum_rows_bf16" } else { c"sum_rows" };
    assert!(rows < 1 << 31, "sum_rows: {rows} rows exceed the grid");
    let arguments: [&dyn KernelArg; 6] = [&sums.address(), &dy, &x, &stats, &at, &factor_code];
    cuda.launch(NORM_SOURCE, name, LaunchSize::Config(config), &arguments);
    let config = LaunchConfig { grid: [d.div_ceil(32) as u32, 1, 1], block: [32, 32, 1], shared: 0 };
    cuda.launch(
        NORM_SOURCE,
        c"add_partial_sums",
        LaunchSize::Config(config),
        &[&out, &sums.address(), &chunks, &d],
    );
}

impl RmsNormOps for Cuda {
    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32) {
        expect_lens("rmsnorm_forward", [("x", x.len(), m * d)]);
        launch_rms_norm(self, y, rstd, x.into(), TensorArg::NONE, w, [m, d], eps);
    }

    fn add_rmsnorm_forward(
        &self,
        y: ViewMut,
        rstd: ViewMut,
        x: ViewMut,
        delta: View,
        w: View,
        m: usize,
        d: usize,
        eps: f32,
    ) {
        expect_lens("add_rmsnorm_forward", [("x", x.len(), m * d), ("delta", delta.len(), m * d)]);
        launch_rms_norm(self, y, rstd, (&x).into(), delta.into(), w, [m, d], eps);
    }

    fn rmsnorm_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        dy: View,
        x: View,
        w: View,
        rstd: View,
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        let op = "rmsnorm_backward";
        expect_lens(op, [("dx", dx.len(), m * d), ("dy", dy.len(), m * d), ("x", x.len(), m * d)]);
        expect_lens(op, [("rstd", rstd.len(), m), ("w", w.len(), d), ("dw", dw.len(), d)]);
        let (dy, x, w) = (TensorArg::from(dy), TensorArg::from(x), TensorArg::from(w));
        let (at, rstd) = (RowLayout::from_contiguous_rows(m, d), f32_gpu_address(rstd));
        sum_rows(self, f32_gpu_address(dw.as_view()), dy, RowFactor::RmsNormed(x, rstd), at);
        let (dx, add) = (TensorArg::from(&dx), i64::from(write == WriteMode::Accumulate));
        let names = [c"rmsnorm_backward", c"rmsnorm_backward_bf16", c"rmsnorm_backward_bf16_long"];
        let [dy_type, x_type, w_type] = pair_with_bf16([dy, x, w]);
        let name = select_kernel(d, &[(dx, Dtype::F32), dy_type, x_type, w_type], names);
        let rows = LaunchSize::RowWarps { rows: m, width: d };
        self.launch(NORM_SOURCE, name, rows, &[&dx, &dy, &x, &w, &rstd, &at, &add]);
    }
}

/// Enqueues the kernel that computes RMSNorm of each row of `x`. If there is a `delta`, first adds
/// it to `x` in place.
fn launch_rms_norm(
    cuda: &Cuda,
    y: ViewMut,
    rstd: ViewMut,
    x: TensorArg,
    delta: TensorArg,
    w: View,
    [m, d]: [usize; 2],
    eps: f32,
) {
    expect_lens("rmsnorm_forward", [("y", y.len(), m * d), ("rstd", rstd.len(), m), ("w", w.len(), d)]);
    let (y, rstd, w) = (TensorArg::from(&y), f32_gpu_address(rstd.as_view()), TensorArg::from(w));
    let names = [c"rmsnorm_forward", c"rmsnorm_forward_bf16", c"rmsnorm_forward_bf16_long"];
    let name = select_kernel(d, &pair_with_bf16([y, x, delta.or(x), w]), names);
    let rows = LaunchSize::RowWarps { rows: m, width: d };
    cuda.launch(NORM_SOURCE, name, rows, &[&y, &rstd, &x, &delta, &w, &m, &d, &eps]);
}

impl HeadNormOps for Cuda {
    fn rmsnorm_heads_forward(
        &self,
        x: ViewMut,
        raw: ViewMut,
        rstd: ViewMut,
        w: View,
        h: HeadLayout,
        eps: f32,
    ) {
        h.check_norm_lengths("rmsnorm_heads_forward", x.len(), raw.len(), rstd.len(), w.len());
        let (at, rstd) = (RowLayout::from_heads(h), f32_gpu_address(rstd.as_view()));
        let (x, raw, w) = (TensorArg::from(&x), TensorArg::from(&raw), TensorArg::from(w));
        let general = c"rmsnorm_heads_forward";
        let bf16 = if at.are_vectorizable() { c"rmsnorm_heads_forward_bf16" } else { general };
        let name = select_kernel(at.d, &pair_with_bf16([x, raw, w]), [general, bf16, general]);
        let rows = LaunchSize::RowWarps { rows: at.count, width: at.d };
        self.launch(NORM_SOURCE, name, rows, &[&x, &raw, &rstd, &w, &at, &eps]);
    }

    fn rmsnorm_heads_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        raw: View,
        rstd: View,
        w: View,
        h: HeadLayout,
    ) {
        let op = "rmsnorm_heads_backward";
        h.check_norm_lengths(op, dx.len(), raw.len(), rstd.len(), w.len());
        expect_lens(op, [("dw", dw.len(), h.head_dim)]);
        let (at, rstd) = (RowLayout::from_heads(h), f32_gpu_address(rstd));
        let (d, raw, w) = (TensorArg::from(&dx), TensorArg::from(raw), TensorArg::from(w));
        // before the launch below overwrites the gradient
        sum_rows(self, f32_gpu_address(dw.as_view()), d, RowFactor::RmsNormed(raw, rstd), at);
        let general = c"rmsnorm_backward";
        let bf16 = if at.are_vectorizable() { c"rmsnorm_heads_backward_bf16" } else { general };
        let name = select_kernel(at.d, &pair_with_bf16([d, raw, w]), [general, bf16, general]);
        let rows = LaunchSize::RowWarps { rows: at.count, width: at.d };
        self.launch(NORM_SOURCE, name, rows, &[&d, &d, &raw, &w, &rstd, &at, &0i64]);
    }
}

impl LayerNormOps for Cuda {
    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNormParams, m: usize) {
        expect_lens("layernorm_forward", [("x", x.len(), m * norm.w.len())]);
        launch_layer_norm(self, y, stats, x.into(), TensorArg::NONE, norm, m);
    }

    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNormParams,
        m: usize,
    ) {
        let len = m * norm.w.len();
        expect_lens("add_layernorm_forward", [("x", x.len(), len), ("delta", delta.len(), len)]);
        launch_layer_norm(self, y, stats, (&x).into(), delta.into(), norm, m);
    }

    fn layernorm_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        db: ViewMut,
        dy: View,
        x: View,
        w: View,
        stats: View,
        m: usize,
        write: WriteMode,
    ) {
        let (op, d) = ("layernorm_backward", w.len());
        expect_lens(op, [("dx", dx.len(), m * d), ("dy", dy.len(), m * d), ("x", x.len(), m * d)]);
        expect_lens(op, [("stats", stats.len(), 2 * m), ("dw", dw.len(), d), ("db", db.len(), d)]);
        let (dy, x, w) = (TensorArg::from(dy), TensorArg::from(x), TensorArg::from(w));
        let (at, stats) = (RowLayout::from_contiguous_rows(m, d), f32_gpu_address(stats));
        sum_rows(self, f32_gpu_address(dw.as_view()), dy, RowFactor::LayerNormed(x, stats), at);
        sum_rows(self, f32_gpu_address(db.as_view()), dy, RowFactor::One, at);
        let (dx, add) = (TensorArg::from(&dx), i64::from(write == WriteMode::Accumulate));
        let names = [c"layernorm_backward", c"layernorm_backward_bf16", c"layernorm_backward_bf16_long"];
        let [dy_type, x_type, w_type] = pair_with_bf16([dy, x, w]);
        let name = select_kernel(d, &[(dx, Dtype::F32), dy_type, x_type, w_type], names);
        let rows = LaunchSize::RowWarps { rows: m, width: d };
        self.launch(NORM_SOURCE, name, rows, &[&dx, &dy, &x, &w, &stats, &m, &d, &add]);
    }
}

/// Enqueues the kernel that computes LayerNorm of each row of `x`. If there is a `delta`, first
/// adds it to `x` in place.
fn launch_layer_norm(
    cuda: &Cuda,
    y: ViewMut,
    stats: ViewMut,
    x: TensorArg,
    delta: TensorArg,
    norm: LayerNormParams,
    m: usize,
) {
    let (op, d) = ("layernorm_forward", norm.w.len());
    expect_lens(op, [("y", y.len(), m * d), ("stats", stats.len(), 2 * m), ("b", norm.b.len(), d)]);
    let (w, b, stats) = (TensorArg::from(norm.w), TensorArg::from(norm.b), f32_gpu_address(stats.as_view()));
    let y = TensorArg::from(&y);
    let names = [c"layernorm_forward", c"layernorm_forward_bf16", c"layernorm_forward_bf16_long"];
    let name = select_kernel(d, &pair_with_bf16([y, x, delta.or(x), w, b]), names);
    let rows = LaunchSize::RowWarps { rows: m, width: d };
    cuda.launch(NORM_SOURCE, name, rows, &[&y, &stats, &x, &delta, &w, &b, &m, &d, &norm.eps]);
}

impl BiasOps for Cuda {
    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize) {
        expect_lens("bias_forward", [("y", y.len(), m * n), ("bias", bias.len(), n)]);
        let rows = LaunchSize::RowBlocks { rows: m, width: n };
        self.launch(NORM_SOURCE, c"bias_forward", rows, &[&TensorArg::from(&y), &TensorArg::from(bias), &n]);
    }

    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize) {
        expect_lens("bias_backward", [("dbias", dbias.len(), n), ("dy", dy.len(), m * n)]);
        let at = RowLayout::from_contiguous_rows(m, n);
        sum_rows(self, f32_gpu_address(dbias.as_view()), dy.into(), RowFactor::One, at);
    }
}
