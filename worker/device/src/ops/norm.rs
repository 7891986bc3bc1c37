//! Normalizations as ops (RMSNorm, LayerNorm), and the bias.
use super::arguments::{WriteMode, expect_lens};
use crate::buffer::{View, ViewMut};

/// Ops for RMSNorm (Zhang and Sennrich, 2019): the forward and the backward pass.
pub trait RmsNormOps {
    /// Computes RMSNorm (Zhang and Sennrich, 2019) of each row: `y[m,d] = x·rstd·w`, where
    /// `rstd[m] = 1/√(mean(x²) + eps)`.
    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32);
    /// Adds `delta` to `x[m,d]` in place (a residual connection), and computes RMSNorm of each row
    /// of the new `x`.
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
    );
    /// Computes the gradients of RMSNorm with respect to its input and its weight. With x̂ = x·rstd
    /// and g = dy·w: `dx[m,d] (=|+=) rstd·(g − x̂·mean(g·x̂))` and `dw[d] += Σ_m dy·x̂`.
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
    );
}

/// Operations that apply RMSNorm to each attention head separately, as Qwen3 does for queries and
/// keys.
pub trait HeadNormOps {
    /// Applies RMSNorm in place to each attention head in the rows of `x[rows, stride]`, with the
    /// same weight `w[head_dim]` for all heads. Stores the heads before the norm in `raw[rows,
    /// heads·head_dim]` and the reciprocal root mean square of each head in `rstd[rows, heads]`.
    fn rmsnorm_heads_forward(
        &self,
        x: ViewMut,
        raw: ViewMut,
        rstd: ViewMut,
        w: View,
        layout: HeadLayout,
        eps: f32,
    );
    /// Computes the gradients of the RMSNorm of each attention head, with respect to the input and
    /// the weight. Replaces the gradient of the normalized heads in `dx[rows, stride]` by the
    /// gradient of `raw`, and adds `dw[head_dim] += Σ dy·x̂` over all rows and heads.
    fn rmsnorm_heads_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        raw: View,
        rstd: View,
        w: View,
        layout: HeadLayout,
    );
}

/// Where attention heads are stored inside the rows of a matrix, such as the query heads in rows
/// that contain queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// Number of rows of the matrix.
    pub rows: usize,
    /// Column of the first head's first element.
    pub first_column: usize,
    /// Number of heads, which follow one another without gaps.
    pub heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Number of elements in a row of the matrix.
    pub stride: usize,
}

impl HeadLayout {
    /// Returns the number of elements that all heads of one row have together.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Panics if the heads exceed the rows of the matrix, or if an argument of the RMSNorm
    /// operation `op` has a wrong number of elements.
    pub(crate) fn check_norm_lengths(&self, op: &str, x: usize, raw: usize, rstd: usize, w: usize) {
        let HeadLayout { rows, first_column, heads, head_dim, stride } = *self;
        assert!(head_dim > 0, "{op}: head_dim is 0");
        assert!(
            first_column + self.width() <= stride,
            "{op}: {heads} heads from element {first_column} on do not fit rows of {stride}"
        );
        expect_lens(op, [("x", x, rows * stride), ("raw", raw, rows * self.width())]);
        expect_lens(op, [("rstd", rstd, rows * heads), ("w", w, head_dim)]);
    }
}

/// Ops for LayerNorm (Ba et al., 2016): the forward and the backward pass.
pub trait LayerNormOps {
    /// Computes LayerNorm of each row: `y[m,d] = (x − mean)·rstd·w + b`, where
    /// `rstd = 1/√(mean((x − mean)²) + eps)`. Stores mean and rstd of each row in `stats[m,2]`.
    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNormParams, m: usize);
    /// Adds `delta` to `x[m,d]` in place (a residual connection), and computes LayerNorm of each
    /// row of the new `x`.
    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNormParams,
        m: usize,
    );
    /// Computes the gradients of LayerNorm with respect to its input, weight and bias. With x̂ = (x
    /// − mean)·rstd and g = dy·w: `dx[m,d] (=|+=) rstd·(g − mean(g) − x̂·mean(g·x̂))`, `dw[d] +=
    /// Σ_m dy·x̂`, and `db[d] += Σ_m dy`.
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
    );
}

/// The parameters of a LayerNorm: weight, bias and epsilon.
#[derive(Clone, Copy)]
pub struct LayerNormParams<'a> {
    /// Weight of each column, `[d]`.
    pub w: View<'a>,
    /// Bias of each column, `[d]`.
    pub b: View<'a>,
    /// Number that is added to the variance before the square root.
    pub eps: f32,
}

/// Ops for a bias, a vector that is added to every row.
pub trait BiasOps {
    /// Adds a bias to every row: `y[m,n] += bias[n]`.
    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize);
    /// Adds the gradient of a bias, the sum of all rows of `dy`, to `dbias`: `dbias[n] += Σ_m
    /// dy[m,n]`.
    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize);
}
