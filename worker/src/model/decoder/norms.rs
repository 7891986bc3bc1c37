//! The norms of a [`Model`]: those before and after attention and MLP, and those of q and k.
use super::{
    decoder_config::{NormKind, QkNormExtent},
    model::Model,
    row_norm::{InputNorm, RowNorm},
};
use crate::model::{block_arguments::LayerInput, dropout_module::DropoutModule};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{HeadLayout, WriteMode},
};
use std::ops::Range;

impl Model {
    /// Returns the factors by which a norm multiplies the normalized elements, which are its weight
    /// or, in some model families, 1 + its weight. If the family's norms add one to their weight,
    /// writes 1 + `weight` to `buffer` in f32 and returns it. Otherwise returns `weight`, and
    /// `buffer` does not change.
    fn compute_norm_factors<'a>(&self, ops: &dyn Ops, weight: View<'a>, buffer: &'a mut Buf) -> View<'a> {
        if self.config.norm_kind != NormKind::RmsAddOne {
            return weight;
        }
        let n = weight.len();
        ops.cast(buffer.view_mut().slice(0..n), weight);
        ops.add_scalar(buffer.view_mut().slice(0..n), 1.0);
        buffer.view().slice(0..n)
    }

    /// Creates the RMSNorm or LayerNorm whose parameters are the range `span` of the flat parameter
    /// vector `params`. `buffer` may be overwritten with the norm's factors.
    pub(super) fn create_row_norm<'a>(
        &self,
        ops: &'a dyn Ops,
        params: View<'a>,
        span: Range<usize>,
        buffer: &'a mut Buf,
    ) -> RowNorm<'a> {
        let bias_start = span.start + self.config.sizes.hidden;
        let factors = self.compute_norm_factors(ops, params.slice(span.start..bias_start), buffer);
        let bias = (bias_start < span.end).then(|| params.slice(bias_start..span.end));
        RowNorm { ops, factors, bias, span, eps: self.config.norm_eps }
    }

    /// Creates the norm whose parameters are the range `span` of a layer's flat parameter vector,
    /// or returns `None` if the model family has no such norm. `buffer` may be overwritten with the
    /// norm's factors.
    pub(super) fn create_norm_if_present<'a>(
        &self,
        input: &LayerInput<'a>,
        span: Option<&Range<usize>>,
        buffer: &'a mut Buf,
    ) -> Option<RowNorm<'a>> {
        span.map(|span| self.create_row_norm(input.ops, input.params, span.clone(), buffer))
    }

    /// Creates the norm before attention or before the MLP, or a placeholder that normalizes
    /// nothing if the model family has no such norm. The parameters are as in
    /// [`Model::create_norm_if_present`].
    pub(super) fn create_input_norm<'a>(
        &self,
        input: &LayerInput<'a>,
        span: Option<&Range<usize>>,
        buffer: &'a mut Buf,
    ) -> InputNorm<'a> {
        InputNorm { ops: input.ops, norm: self.create_norm_if_present(input, span, buffer) }
    }

    /// Computes the backward pass of the dropout and the norm that some model families apply to the
    /// output of attention or of the MLP. The norm's parameters are at `span` in the layer's
    /// parameters. `dy` is the gradient of the output, and `(x, stats)` are the norm's input and
    /// its statistics. Writes the gradients of the parameters to `g`, the gradient of the layer's
    /// unit.
    ///
    /// Returns the gradient of the input, which is computed in `buffer`. This is `dy` if there is
    /// neither norm nor dropout.
    pub(super) fn branch_output_backward<'a>(
        &self,
        input: &LayerInput,
        (span, dropout): (Option<&Range<usize>>, &DropoutModule),
        g: &mut ViewMut,
        dy: View<'a>,
        buffer: &'a mut Buf,
        x_and_stats: (View, View),
        factors: &mut Buf,
    ) -> View<'a> {
        let Some(norm) = self.create_norm_if_present(input, span, factors) else {
            return dropout.dropout_backward(input.ops, input.batch, self.config.sizes.hidden, dy, buffer);
        };
        norm.backward(g, buffer.view_mut(), dy, x_and_stats, WriteMode::Overwrite);
        buffer.view()
    }

    /// Returns which columns of the qkv rows (q, k and v of one token each) are normalized
    /// together: those of each head, or those of all heads. These are the columns of each head
    /// separately or of all heads, as `extent` selects.
    fn create_qk_norm_layouts(&self, rows: usize, extent: QkNormExtent) -> [HeadLayout; 2] {
        let sizes = self.config.sizes;
        let layout = |first_column, heads: usize| {
            let (heads, head_dim) = match extent {
                QkNormExtent::PerHead => (heads, sizes.head_dim),
                QkNormExtent::AllHeads => (1, heads * sizes.head_dim),
            };
            HeadLayout { rows, first_column, heads, head_dim, stride: sizes.qkv_width() }
        };
        [layout(0, sizes.heads), layout(sizes.attention_width(), sizes.kv_heads)]
    }

    /// Normalizes q and k in place in `qkv`, whose rows contain q, k and v of one token each.
    /// Writes the values before the norms to `raw` and their 1/rms to `rstd`, for the backward
    /// pass. Does nothing if the family has no norms of q and k.
    pub(super) fn qk_norm_forward(
        &self,
        input: &LayerInput,
        qkv: &mut Buf,
        raw: &mut Buf,
        rstd: &mut Buf,
        norm_factors: &mut Buf,
    ) {
        let (Some(extent), Some(weights)) = (self.config.qk_norm, &self.spans.qk_norm) else { return };
        let (ops, m) = (input.ops, input.batch.row_count());
        let [q, k] = self.create_qk_norm_layouts(m, extent);
        let (raw_q, raw_k) = raw.view_mut().split_at(m * q.width());
        let (rstd_q, rstd_k) = rstd.view_mut().split_at(m * q.heads);
        for (layout, w, raw, rstd) in [(q, &weights[0], raw_q, rstd_q), (k, &weights[1], raw_k, rstd_k)] {
            let w = self.compute_norm_factors(ops, input.params.slice(w.clone()), norm_factors);
            ops.rmsnorm_heads_forward(qkv.view_mut(), raw, rstd, w, layout, self.config.norm_eps);
        }
    }

    /// Computes the backward pass of the norms that are applied to q and k. On entry, `dqkv`
    /// contains the gradients of the norms' outputs; on return, those of their inputs. Adds the
    /// gradients of the norms' weights to `g`, the gradient of the layer's unit. Does nothing if
    /// the family has no q/k norms.
    pub(super) fn qk_norm_backward(
        &self,
        input: &LayerInput,
        g: &mut ViewMut,
        dqkv: &mut Buf,
        (raw, rstd): (View, View),
        norm_factors: &mut Buf,
    ) {
        let (Some(extent), Some(weights)) = (self.config.qk_norm, &self.spans.qk_norm) else { return };
        let (ops, m) = (input.ops, input.batch.row_count());
        let [q, k] = self.create_qk_norm_layouts(m, extent);
        let (width, parts) = (m * q.width(), m * q.heads);
        let of_q = (q, &weights[0], raw.slice(0..width), rstd.slice(0..parts));
        let of_k = (k, &weights[1], raw.slice(width..raw.len()), rstd.slice(parts..rstd.len()));
        for (layout, w, raw, rstd) in [of_q, of_k] {
            let dw = g.slice_mut(w.clone());
            let w = self.compute_norm_factors(ops, input.params.slice(w.clone()), norm_factors);
            ops.rmsnorm_heads_backward(dqkv.view_mut(), dw, raw, rstd, w, layout);
        }
    }
}
