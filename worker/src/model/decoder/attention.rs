//! Forward and backward pass of the first half of a decoder layer: norm, projections of q, k and v,
//! norms of q and k, rotation, attention, output projection, and norm of the output.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    decoder_model::DecoderModel,
};
use crate::model::{activation_buffers::ActivationBuffers, blocks::LayerInput};
use device::{Buf, Ops, View, ViewMut, ops::AttentionShape};

impl DecoderModel {
    /// Returns shape, scale, softcap and dropout of the layer's attention, as the attention ops
    /// need them.
    fn create_attention_shape(&self, input: &LayerInput) -> AttentionShape {
        let (batch, sizes) = (input.batch, self.config.sizes);
        AttentionShape {
            scale: self.config.attention_scale,
            softcap: self.config.attention_softcap,
            dropout: self.dropout[input.layer].create_attention_dropout(batch),
            ..AttentionShape::new(batch.sequences, batch.seq_len, sizes.heads, sizes.kv_heads, sizes.head_dim)
        }
    }

    /// Returns whether the layer attends only to a sliding window.
    fn is_sliding_layer(&self, input: &LayerInput) -> bool {
        self.config.sliding_layers.get(input.layer).is_some_and(|is_sliding| *is_sliding)
    }

    /// Returns, for each token, the first position to which the token attends in this layer.
    fn attention_starts<'a>(&self, input: &LayerInput<'a>) -> &'a [u32] {
        if self.is_sliding_layer(input) { &input.batch.window_starts } else { &input.batch.starts }
    }

    /// Returns cos and sin of the rotary embedding in this layer, `[t, head_dim/2]` each.
    fn rope_cos_sin(&self, input: &LayerInput) -> (View<'_>, View<'_>) {
        let sliding = self.sliding_rope_tables.as_ref().filter(|_| self.is_sliding_layer(input));
        sliding.unwrap_or(&self.rope_tables).slice_first_positions(input.batch.seq_len)
    }

    /// Rotates q and k in place.
    fn rotate_forward(&self, ops: &dyn Ops, input: &LayerInput, qkv: &mut Buf) {
        let (sizes, (cos, sin)) = (self.config.sizes, self.rope_cos_sin(input));
        let (b, t, rotated) = (input.batch.sequences, input.batch.seq_len, sizes.heads + sizes.kv_heads);
        ops.rope_forward(qkv.view_mut(), cos, sin, b, t, rotated, sizes.head_dim, sizes.qkv_width());
    }

    /// Replaces the gradients of the rotated q and k by those of q and k before the rotation.
    fn rotate_backward(&self, ops: &dyn Ops, input: &LayerInput, dqkv: &mut Buf) {
        let (sizes, (cos, sin)) = (self.config.sizes, self.rope_cos_sin(input));
        let (b, t, rotated) = (input.batch.sequences, input.batch.seq_len, sizes.heads + sizes.kv_heads);
        ops.rope_backward(dqkv.view_mut(), cos, sin, b, t, rotated, sizes.head_dim, sizes.qkv_width());
    }

    /// Computes attention of a layer. Saves the projected output in the buffer of the residual
    /// stream. The second half of the layer adds the layer's input to this buffer.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let SavedBuffers {
            attention_in_rstd,
            qkv,
            attention,
            lse,
            residual,
            raw_qk,
            qk_rstd,
            attention_out,
            attention_out_rstd,
            ..
        } = saved.borrow_set_mut();
        let ScratchBuffers { norm, norm_factors, mut lora, .. } = scratch.borrow_set_mut();
        let norm_in = self.prepare_norm(ops, p, s.attention_in_norm.as_ref(), norm_factors);
        let x = self.input_norm_forward(ops, norm_in.as_ref(), input.x, norm, attention_in_rstd);
        self.linears.forward(ops, input, &s.qkv, x, qkv.view_mut(), &mut lora);
        self.qk_norm_forward(ops, p, qkv, raw_qk, qk_rstd, norm_factors, m);
        self.rotate_forward(ops, input, qkv);
        ops.attention_forward(
            attention.view_mut(),
            lse.view_mut(),
            qkv.view(),
            self.attention_starts(input),
            self.create_attention_shape(input),
        );
        let has_norm_out = s.attention_out_norm.is_some();
        let out = if has_norm_out { attention_out.view_mut() } else { residual.view_mut() };
        self.linears.forward(ops, input, &s.o, attention.view(), out, &mut lora);
        if let Some(norm_out) = self.prepare_norm(ops, p, s.attention_out_norm.as_ref(), norm_factors) {
            let (d, eps) = (self.config.sizes.hidden, self.config.norm_eps);
            let (y, rstd) = (residual.view_mut(), attention_out_rstd.view_mut());
            ops.rmsnorm_forward(y, rstd, attention_out.view(), norm_out.factors, m, d, eps);
        }
    }

    /// Computes the gradients of attention. Writes the parameter gradients to `g`, the gradient of
    /// the layer's unit. `dx` is the gradient of the residual stream after attention on entry, and
    /// of the layer's input on return.
    pub(super) fn attention_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, s, m) = (input.params, &self.spans, input.batch.rows());
        let SavedBuffers {
            attention_in_rstd,
            qkv,
            attention,
            lse,
            raw_qk,
            qk_rstd,
            attention_out,
            attention_out_rstd,
            ..
        } = saved.borrow_set_mut();
        let ScratchBuffers { norm, dnorm, dattention, dqkv, norm_factors, mut lora, .. } =
            scratch.borrow_set_mut();
        let (span, out) = (s.attention_out_norm.as_ref(), (attention_out.view(), attention_out_rstd.view()));
        let dout = self.output_norm_backward(ops, input, span, g, dx.as_view(), norm, out, norm_factors);
        self.linears.backward_bias(ops, input, &s.o, g, dout);
        let dout = self.linears.format.round_gradient(ops, dout, dnorm);
        let xy = (attention.view(), dout);
        self.linears.backward(ops, input, &s.o, g, dattention.view_mut(), xy, &mut lora);
        let (starts, shape) = (self.attention_starts(input), self.create_attention_shape(input));
        let (do_, o) = (dattention.view(), attention.view());
        ops.attention_backward(dqkv.view_mut(), do_, o, lse.view(), qkv.view(), starts, shape);
        self.rotate_backward(ops, input, dqkv);
        self.qk_norm_backward(ops, p, g, dqkv, (raw_qk.view(), qk_rstd.view()), norm_factors, m);
        self.linears.backward_bias(ops, input, &s.qkv, g, dqkv.view());
        let norm_in = self.prepare_norm(ops, p, s.attention_in_norm.as_ref(), norm_factors);
        let x = self.input_norm_forward(ops, norm_in.as_ref(), input.x, norm, attention_in_rstd);
        let xy = (x, dqkv.view());
        self.linears.backward(ops, input, &s.qkv, g, dnorm.view_mut(), xy, &mut lora);
        let x = (input.x, attention_in_rstd.view());
        self.input_norm_backward(ops, norm_in.as_ref(), g, dnorm.view(), x, dx);
    }
}
