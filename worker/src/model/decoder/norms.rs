//! The norms of a [`DecoderModel`]: the factors of every norm, the norms of q and k, and the
//! backward pass of the output norms of attention and MLP.
use super::DecoderModel;
use crate::model::{LayerInput, Model};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{HeadLayout, WriteMode},
};
use std::ops::Range;

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
        norm_buffer: &mut Buf,
    ) -> View<'a> {
        let Some(span) = span else { return dy };
        let (m, d) = (input.batch.rows(), self.config.hidden_size);
        let w = self.compute_norm_factors(ops, input.params.slice(span.clone()), norm_buffer);
        let dw = g.slice_mut(span.clone());
        ops.rmsnorm_backward(dx.view_mut(), dw, dy, x, w, rstd, m, d, WriteMode::Overwrite);
        dx.view()
    }

    /// Returns the layout of the heads of q, and of the heads of k, within rows of q, k and v.
    fn q_and_k_head_layouts(&self, rows: usize) -> [HeadLayout; 2] {
        let (heads, kv_heads, head_dim) = (self.config.heads, self.config.kv_heads, self.config.head_dim);
        let q = HeadLayout { rows, first_column: 0, heads, head_dim, stride: self.qkv_width() };
        [q, HeadLayout { first_column: heads * head_dim, heads: kv_heads, ..q }]
    }

    /// Normalizes each head of q and k in `qkv` in place. Writes the values before the norms to
    /// `raw` and their 1/rms to `rstd`, for the backward pass. Does nothing if the family has no
    /// q/k norms.
    pub(super) fn qk_norm_forward(
        &self,
        ops: &dyn Ops,
        p: View,
        qkv: &mut Buf,
        raw: &mut Buf,
        rstd: &mut Buf,
        norm_buffer: &mut Buf,
        m: usize,
    ) {
        let Some(weights) = &self.spans.qk_norm else { return };
        let (raw_q, raw_k) = raw.view_mut().split_at(m * self.attention_width());
        let (rstd_q, rstd_k) = rstd.view_mut().split_at(m * self.config.heads);
        let saved = [(raw_q, rstd_q), (raw_k, rstd_k)];
        for ((shape, w), (raw, rstd)) in self.q_and_k_head_layouts(m).into_iter().zip(weights).zip(saved) {
            let w = self.compute_norm_factors(ops, p.slice(w.clone()), norm_buffer);
            ops.rmsnorm_heads_forward(qkv.view_mut(), raw, rstd, w, shape, self.config.norm_eps);
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
        raw: View,
        rstd: View,
        norm_buffer: &mut Buf,
        m: usize,
    ) {
        let Some(weights) = &self.spans.qk_norm else { return };
        let (q, h) = (m * self.attention_width(), m * self.config.heads);
        let saved =
            [(raw.slice(0..q), rstd.slice(0..h)), (raw.slice(q..raw.len()), rstd.slice(h..rstd.len()))];
        for ((shape, w), (raw, rstd)) in self.q_and_k_head_layouts(m).into_iter().zip(weights).zip(saved) {
            let dw = g.slice_mut(w.clone());
            let w = self.compute_norm_factors(ops, p.slice(w.clone()), norm_buffer);
            ops.rmsnorm_heads_backward(dqkv.view_mut(), dw, raw, rstd, w, shape);
        }
    }
}
