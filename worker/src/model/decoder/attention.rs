//! Forward and backward pass of the first half of a decoder layer: norm, projections of q, k and v,
//! norms of q and k, rotation, attention, and output projection.
use super::{
    DecoderModel,
    layer_adapters::{O_ADAPTERS, QKV_ADAPTERS},
    projection::Projection,
};
use crate::model::{ActivationBuffers, LayerInput, Model, borrow_first_buffers, lora::LoraScratchBuffers};
use device::{
    Ops, View, ViewMut,
    ops::{AttentionShape, WriteMode},
};

impl DecoderModel {
    /// Returns shape, scale, softcap and dropout of the layer's attention, as the attention ops
    /// need them.
    fn create_attention_shape(&self, input: &LayerInput) -> AttentionShape {
        let batch = input.batch;
        let (heads, kv_heads, head_dim) = (self.config.heads, self.config.kv_heads, self.config.head_dim);
        AttentionShape {
            scale: self.config.attention_scale,
            softcap: self.config.attention_softcap,
            dropout: self.dropout[input.layer].create_attention_dropout(batch),
            ..AttentionShape::new(batch.sequences, batch.seq_len, heads, kv_heads, head_dim)
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

    /// Computes attention of a layer. Saves the projected output in the buffer of the residual
    /// stream. The second half of the layer adds the layer's input to this buffer.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (p, batch, s) = (input.params, input.batch, &self.spans);
        let (m, d, width, eps) =
            (batch.rows(), self.config.hidden_size, self.qkv_width(), self.config.norm_eps);
        let [rstd1, qkv, o, lse, mid, _, _, raw, head_rstd, branch, branch_rstd] =
            borrow_first_buffers::<11>(saved);
        let [norm, _, _, _, _, _, norm_buffer, _, _, lora_scratch @ ..] = borrow_first_buffers::<14>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        let w_in = self.compute_norm_factors(ops, p.slice(s.input_norm.clone()), norm_buffer);
        ops.rmsnorm_forward(norm.view_mut(), rstd1.view_mut(), input.x, w_in, m, d, eps);
        let (w_qkv, bias) = (p.slice(s.qkv.clone()), s.qkv_bias.clone().map(|b| p.slice(b)));
        self.linear.forward(ops, qkv.view_mut(), norm.view(), w_qkv, bias, (m, d, width));
        self.adapters_forward(ops, input, QKV_ADAPTERS, norm.view(), qkv.view_mut(), &mut lora_scratch);
        self.qk_norm_forward(ops, p, qkv, raw, head_rstd, norm_buffer, m);
        let (cos, sin) = self.rope_cos_sin(input);
        let (rotated, head_dim) = (self.config.heads + self.config.kv_heads, self.config.head_dim);
        ops.rope_forward(qkv.view_mut(), cos, sin, batch.sequences, batch.seq_len, rotated, head_dim, width);
        ops.attention_forward(
            o.view_mut(),
            lse.view_mut(),
            qkv.view(),
            self.attention_starts(input),
            self.create_attention_shape(input),
        );
        let w_o = p.slice(s.o.clone());
        let mut out = if s.attention_out_norm.is_some() { branch.view_mut() } else { mid.view_mut() };
        let bias = s.o_bias.clone().map(|b| p.slice(b));
        self.linear.forward(ops, out.reborrow(), o.view(), w_o, bias, (m, self.attention_width(), d));
        self.adapters_forward(ops, input, O_ADAPTERS, o.view(), out, &mut lora_scratch);
        if let Some(at) = &s.attention_out_norm {
            let w = self.compute_norm_factors(ops, p.slice(at.clone()), norm_buffer);
            ops.rmsnorm_forward(mid.view_mut(), branch_rstd.view_mut(), branch.view(), w, m, d, eps);
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
        let (p, batch, x, s) = (input.params, input.batch, input.x, &self.spans);
        let (m, d, width) = (batch.rows(), self.config.hidden_size, self.qkv_width());
        let [rstd1, qkv, o, lse, _, _, _, raw, head_rstd, branch, branch_rstd] =
            borrow_first_buffers::<11>(saved);
        let [norm, dnorm, _, _, d_o, dqkv, norm_buffer, _, _, lora_scratch @ ..] =
            borrow_first_buffers::<14>(scratch);
        let mut lora_scratch = LoraScratchBuffers::new(lora_scratch);
        let (at, branch) = (s.attention_out_norm.as_ref(), (branch.view(), branch_rstd.view()));
        let dout = self.output_norm_backward(ops, input, at, g, dx.as_view(), norm, branch, norm_buffer);
        if let Some(bias) = &s.o_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dout, m, d);
        }
        let dout = self.linear.round_gradient(ops, dout, dnorm);
        let grad_mask = self.grad_masks[input.layer];
        let projection = Projection {
            weight: s.o.clone(),
            needs_grad: grad_mask.o,
            adapters: O_ADAPTERS,
            sizes: (m, self.attention_width(), d),
        };
        let o_and_dout = (o.view(), dout);
        self.projection_backward(ops, input, projection, g, d_o.view_mut(), o_and_dout, &mut lora_scratch);
        let (starts, shape) = (self.attention_starts(input), self.create_attention_shape(input));
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
        let (cos, sin) = self.rope_cos_sin(input);
        let (rotated, head_dim) = (self.config.heads + self.config.kv_heads, self.config.head_dim);
        ops.rope_backward(
            dqkv.view_mut(),
            cos,
            sin,
            batch.sequences,
            batch.seq_len,
            rotated,
            head_dim,
            width,
        );
        self.qk_norm_backward(ops, p, g, dqkv, raw.view(), head_rstd.view(), norm_buffer, m);
        if let Some(bias) = &s.qkv_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dqkv.view(), m, width);
        }
        let w_in = self.compute_norm_factors(ops, p.slice(s.input_norm.clone()), norm_buffer);
        ops.rmsnorm_forward(norm.view_mut(), rstd1.view_mut(), x, w_in, m, d, self.config.norm_eps);
        let projection = Projection {
            weight: s.qkv.clone(),
            needs_grad: grad_mask.qkv,
            adapters: QKV_ADAPTERS,
            sizes: (m, d, width),
        };
        let x_and_dqkv = (norm.view(), dqkv.view());
        self.projection_backward(ops, input, projection, g, dnorm.view_mut(), x_and_dqkv, &mut lora_scratch);
        let dw_in = g.slice_mut(s.input_norm.clone());
        ops.rmsnorm_backward(dx, dw_in, dnorm.view(), x, w_in, rstd1.view(), m, d, WriteMode::Accumulate);
    }
}
