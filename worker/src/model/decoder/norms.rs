//! The norms of a [`DecoderModel`]: the factors of every norm, the norms of q and k, and the norms
//! of the inputs and outputs of attention and MLP.
use super::{decoder_config::QkNorm, decoder_model::DecoderModel};
use crate::model::blocks::LayerInput;
use device::{
    Buf, Ops, View, ViewMut,
    ops::{HeadLayout, WriteMode},
};
use std::ops::Range;

/// A norm of the rows of a layer's residual stream, or of a branch of this stream.
#[derive(Clone)]
pub(super) struct RowNorm<'a> {
    /// The factors by which the norm multiplies the normalized elements.
    pub(super) factors: View<'a>,
    /// The range of the norm's weight in the flat vector of the layer.
    span: Range<usize>,
}

impl DecoderModel {
    /// Returns the factors by which a norm multiplies the normalized elements. If the family's
    /// norms add one to their weight, writes 1 + `weight` to `buffer` in f32 and returns it.
    /// Otherwise returns `weight`, and `buffer` does not change.
    pub(super) fn compute_norm_factors<'a>(
        &self,
        ops: &dyn Ops,
        weight: View<'a>,
        buffer: &'a mut Buf,
    ) -> View<'a> {
        if !self.config.norms_add_one {
            return weight;
        }
        let n = weight.len();
        ops.cast(buffer.view_mut().slice(0..n), weight);
        ops.add_scalar(buffer.view_mut().slice(0..n), 1.0);
        buffer.view().slice(0..n)
    }

    /// Returns the norm whose weight is at `span` in the parameters `p` of the layer, or `None` if
    /// the family has no such norm. `buffer` may be overwritten with the norm's factors.
    pub(super) fn prepare_norm<'a>(
        &self,
        ops: &dyn Ops,
        p: View<'a>,
        span: Option<&Range<usize>>,
        buffer: &'a mut Buf,
    ) -> Option<RowNorm<'a>> {
        let span = span?.clone();
        Some(RowNorm { factors: self.compute_norm_factors(ops, p.slice(span.clone()), buffer), span })
    }

    /// Returns the input of attention or the MLP for rows `x` of the residual stream. Writes the
    /// normalized rows to `normed` and their 1/rms to `rstd`, and returns `normed`. Returns `x`
    /// itself if there is no norm.
    pub(super) fn input_norm_forward<'a>(
        &self,
        ops: &dyn Ops,
        norm: Option<&RowNorm>,
        x: View<'a>,
        normed: &'a mut Buf,
        rstd: &mut Buf,
    ) -> View<'a> {
        let Some(norm) = norm else { return x };
        let d = self.config.sizes.hidden;
        let (m, eps) = (x.len() / d, self.config.norm_eps);
        ops.rmsnorm_forward(normed.view_mut(), rstd.view_mut(), x, norm.factors, m, d, eps);
        normed.view()
    }

    /// Adds the layer's input to `residual`, and returns the input of the MLP or the router, as
    /// [`DecoderModel::input_norm_forward`] does.
    pub(super) fn add_input_norm_forward<'a>(
        &self,
        ops: &dyn Ops,
        norm: Option<&RowNorm>,
        input: &LayerInput,
        residual: &'a mut Buf,
        normed: &'a mut Buf,
        rstd: &mut Buf,
    ) -> View<'a> {
        let Some(norm) = norm else {
            ops.add(residual.view_mut(), input.x);
            return residual.view();
        };
        let (m, d, eps) = (input.batch.rows(), self.config.sizes.hidden, self.config.norm_eps);
        let (y, sum) = (normed.view_mut(), residual.view_mut());
        ops.add_rmsnorm_forward(y, rstd.view_mut(), sum, input.x, norm.factors, m, d, eps);
        normed.view()
    }

    /// Adds the gradient of rows `x` of the residual stream to `dx`. `dy` is the gradient of the
    /// rows that [`DecoderModel::input_norm_forward`] returned for `x`. Adds the gradient of the
    /// norm's weight to `g`, the gradient of the layer's unit.
    pub(super) fn input_norm_backward(
        &self,
        ops: &dyn Ops,
        norm: Option<&RowNorm>,
        g: &mut ViewMut,
        dy: View,
        (x, rstd): (View, View),
        dx: ViewMut,
    ) {
        let Some(norm) = norm else { return ops.add(dx, dy) };
        let d = self.config.sizes.hidden;
        let (m, dw) = (x.len() / d, g.slice_mut(norm.span.clone()));
        ops.rmsnorm_backward(dx, dw, dy, x, norm.factors, rstd, m, d, WriteMode::Accumulate);
    }

    /// Computes the gradients of the norm that follows attention or the MLP. The norm's weight is
    /// at `span` in the layer's parameters. `dy` is the gradient of the norm's output, and
    /// `(x, rstd)` are the norm's input and its 1/rms. Writes the gradient of the weight to `g`,
    /// the gradient of the layer's unit, and the gradient of the norm's input to `dx`.
    ///
    /// Returns the gradient of the norm's input. This is `dy` if the family has no such norm.
    pub(super) fn output_norm_backward<'a>(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        span: Option<&Range<usize>>,
        g: &mut ViewMut,
        dy: View<'a>,
        dx: &'a mut Buf,
        (x, rstd): (View, View),
        factors: &mut Buf,
    ) -> View<'a> {
        let Some(norm) = self.prepare_norm(ops, input.params, span, factors) else { return dy };
        let (m, d) = (input.batch.rows(), self.config.sizes.hidden);
        let dw = g.slice_mut(norm.span);
        ops.rmsnorm_backward(dx.view_mut(), dw, dy, x, norm.factors, rstd, m, d, WriteMode::Overwrite);
        dx.view()
    }

    /// Returns the layout of the normalized parts of q, and of those of k, within rows of q, k and
    /// v. A part is a head, or all heads of a token.
    fn normalized_part_layouts(&self, rows: usize, extent: QkNorm) -> [HeadLayout; 2] {
        let sizes = self.config.sizes;
        let layout = |first_column, heads: usize| {
            let (heads, head_dim) = match extent {
                QkNorm::PerHead => (heads, sizes.head_dim),
                QkNorm::AllHeads => (1, heads * sizes.head_dim),
            };
            HeadLayout { rows, first_column, heads, head_dim, stride: sizes.qkv_width() }
        };
        [layout(0, sizes.heads), layout(sizes.attention_width(), sizes.kv_heads)]
    }

    /// Normalizes q and k in `qkv` in place. Writes the values before the norms to `raw` and their
    /// 1/rms to `rstd`, for the backward pass. Does nothing if the family has no q/k norms.
    pub(super) fn qk_norm_forward(
        &self,
        ops: &dyn Ops,
        p: View,
        qkv: &mut Buf,
        raw: &mut Buf,
        rstd: &mut Buf,
        norm_factors: &mut Buf,
        m: usize,
    ) {
        let (Some(extent), Some(weights)) = (self.config.qk_norm, &self.spans.qk_norm) else { return };
        let [q, k] = self.normalized_part_layouts(m, extent);
        let (raw_q, raw_k) = raw.view_mut().split_at(m * q.width());
        let (rstd_q, rstd_k) = rstd.view_mut().split_at(m * q.heads);
        for (layout, w, raw, rstd) in [(q, &weights[0], raw_q, rstd_q), (k, &weights[1], raw_k, rstd_k)] {
            let w = self.compute_norm_factors(ops, p.slice(w.clone()), norm_factors);
            ops.rmsnorm_heads_forward(qkv.view_mut(), raw, rstd, w, layout, self.config.norm_eps);
        }
    }

    /// Computes the gradients of the norms of q and k. On entry, `dqkv` contains the gradients of
    /// the norms' outputs; on return, those of their inputs. Adds the gradients of the norms'
    /// weights to `g`, the gradient of the layer's unit. Does nothing if the family has no q/k
    /// norms.
    pub(super) fn qk_norm_backward(
        &self,
        ops: &dyn Ops,
        p: View,
        g: &mut ViewMut,
        dqkv: &mut Buf,
        (raw, rstd): (View, View),
        norm_factors: &mut Buf,
        m: usize,
    ) {
        let (Some(extent), Some(weights)) = (self.config.qk_norm, &self.spans.qk_norm) else { return };
        let [q, k] = self.normalized_part_layouts(m, extent);
        let (width, parts) = (m * q.width(), m * q.heads);
        let of_q = (q, &weights[0], raw.slice(0..width), rstd.slice(0..parts));
        let of_k = (k, &weights[1], raw.slice(width..raw.len()), rstd.slice(parts..rstd.len()));
        for (layout, w, raw, rstd) in [of_q, of_k] {
            let dw = g.slice_mut(w.clone());
            let w = self.compute_norm_factors(ops, p.slice(w.clone()), norm_factors);
            ops.rmsnorm_heads_backward(dqkv.view_mut(), dw, raw, rstd, w, layout);
        }
    }
}
