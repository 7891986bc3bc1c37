//! [`RowNorm`]: an RMSNorm or LayerNorm that is applied to the rows of the residual stream.
use device::{
    Buf, Ops, View, ViewMut,
    ops::{LayerNormParams, WriteMode},
};
use std::ops::Range;

/// An RMSNorm or LayerNorm with its parameters, which normalizes rows of the width of the residual
/// stream, one row per token.
pub(super) struct RowNorm<'a> {
    pub(super) ops: &'a dyn Ops,
    /// The factors by which the norm multiplies the normalized elements.
    pub(super) factors: View<'a>,
    /// The bias of a LayerNorm; `None` for RMSNorm.
    pub(super) bias: Option<View<'a>>,
    /// The range of the norm's parameters in the flat vector of their unit. A bias follows the
    /// weight.
    pub(super) span: Range<usize>,
    pub(super) eps: f32,
}

impl RowNorm<'_> {
    /// Normalizes each row of `x`, the hidden state of one token, and writes the results to `y`.
    /// Writes the result to `y`, and the statistics of the rows, which the backward pass needs, to
    /// `stats`.
    pub(super) fn forward(&self, y: ViewMut, stats: ViewMut, x: View) {
        let (w, d, eps) = (self.factors, self.factors.len(), self.eps);
        let m = x.len() / d;
        match self.bias {
            None => self.ops.rmsnorm_forward(y, stats, x, w, m, d, eps),
            Some(b) => self.ops.layernorm_forward(y, stats, x, LayerNormParams { w, b, eps }, m),
        }
    }

    /// Adds `delta` to the residual stream `x` in place, writes the normalized sum to `y`, and
    /// saves its statistics for the backward pass in `stats`.
    pub(super) fn add_and_norm_forward(&self, y: ViewMut, stats: ViewMut, x: ViewMut, delta: View) {
        let (w, d, eps) = (self.factors, self.factors.len(), self.eps);
        let m = x.len() / d;
        match self.bias {
            None => self.ops.add_rmsnorm_forward(y, stats, x, delta, w, m, d, eps),
            Some(b) => self.ops.add_layernorm_forward(y, stats, x, delta, LayerNormParams { w, b, eps }, m),
        }
    }

    /// Computes the backward pass of this norm: the gradients of its input and of its parameters.
    /// Writes the gradient of its input to `dx` or adds it to `dx`, and adds the gradients of its
    /// parameters to `g`, the gradient of their parameter unit. `dy` is the gradient of the norm's
    /// output, and `(x, stats)` are its input and the statistics.
    pub(super) fn backward(
        &self,
        g: &mut ViewMut,
        dx: ViewMut,
        dy: View,
        (x, stats): (View, View),
        write: WriteMode,
    ) {
        let (w, d, dw) = (self.factors, self.factors.len(), g.slice_mut(self.span.clone()));
        let m = x.len() / d;
        match self.bias {
            None => self.ops.rmsnorm_backward(dx, dw, dy, x, w, stats, m, d, write),
            Some(_) => {
                let (dw, db) = dw.split_at(d);
                self.ops.layernorm_backward(dx, dw, db, dy, x, w, stats, m, write);
            }
        }
    }
}

/// The norm that is applied to the input of attention or of the MLP, or a placeholder in model
/// families without such a norm.
pub(super) struct InputNorm<'a> {
    pub(super) ops: &'a dyn Ops,
    pub(super) norm: Option<RowNorm<'a>>,
}

impl InputNorm<'_> {
    /// Returns the input of attention or of the MLP: the normalized residual stream `x`, or `x`
    /// itself in model families without a norm at this place. Writes the normalized rows to
    /// `normed` and their statistics to `stats`, and returns `normed`. Returns `x` itself if there
    /// is no norm.
    pub(super) fn forward<'x>(&self, x: View<'x>, normed: &'x mut Buf, stats: &mut Buf) -> View<'x> {
        let Some(norm) = &self.norm else { return x };
        norm.forward(normed.view_mut(), stats.view_mut(), x);
        normed.view()
    }

    /// Adds the layer's input `x` to the output of attention in place, and returns the normalized
    /// sum, or the sum itself in model families without this norm. The result is the input of the
    /// MLP or the router.
    pub(super) fn add_and_norm_forward<'x>(
        &self,
        residual: &'x mut Buf,
        x: View,
        normed: &'x mut Buf,
        stats: &mut Buf,
    ) -> View<'x> {
        let Some(norm) = &self.norm else {
            self.ops.add(residual.view_mut(), x);
            return residual.view();
        };
        norm.add_and_norm_forward(normed.view_mut(), stats.view_mut(), residual.view_mut(), x);
        normed.view()
    }

    /// Computes the gradients of the parameters and of the input of the norm before attention or
    /// the MLP, and adds the gradient of the input to `dx`. `dy` is the gradient of the rows that
    /// [`InputNorm::forward`] returned for `x`. Adds the gradients of the norm's parameters to `g`,
    /// the gradient of the layer's unit.
    pub(super) fn backward(&self, g: &mut ViewMut, dx: ViewMut, dy: View, x_and_stats: (View, View)) {
        match &self.norm {
            None => self.ops.add(dx, dy),
            Some(norm) => norm.backward(g, dx, dy, x_and_stats, WriteMode::Accumulate),
        }
    }
}
