//! Forward and backward pass of the first half of a decoder layer, which is attention: from the
//! norm of the layer's input to the output projection.
use super::{
    decoder_buffers::{SavedBuffers, ScratchBuffers},
    model::Model,
};
use crate::model::block_arguments::{LayerBuffers, LayerInput};
use device::{
    Buf, ViewMut,
    ops::{AttentionShape, RopeShape},
};

impl Model {
    /// Returns the sizes, scale, softcap and dropout with which attention is computed in the layer
    /// and for the micro-batch in `input`.
    fn create_attention_shape(&self, input: &LayerInput) -> AttentionShape {
        let (batch, sizes) = (input.batch, self.config.sizes);
        let divisor = if self.config.scales_by_layer_index { (input.layer + 1) as f64 } else { 1.0 };
        AttentionShape {
            scale: (self.config.attention_scale / divisor) as f32,
            softcap: self.config.attention_softcap,
            dropout: self.layer_dropout[input.layer].attention.create_attention_dropout(batch),
            ..AttentionShape::new(batch.sequences, batch.seq_len, sizes.heads, sizes.kv_heads, sizes.head_dim)
        }
    }

    /// Returns whether attention in the layer with the number `input.layer` is limited to a sliding
    /// window of recent tokens.
    fn is_sliding_layer(&self, input: &LayerInput) -> bool {
        self.config.sliding_layers.get(input.layer).is_some_and(|is_sliding| *is_sliding)
    }

    /// Returns the first position to which each token of the micro-batch attends: the start of the
    /// token's document or, with sliding-window attention, of the token's window.
    fn select_attention_starts<'a>(&self, input: &LayerInput<'a>) -> &'a [u32] {
        if self.is_sliding_layer(input) { &input.batch.window_starts } else { &input.batch.starts }
    }

    /// Rotates q and k in `qkv` in place by rotary position embedding, or computes the backward
    /// pass of the rotation if `is_backward` is set. The backward pass replaces the gradients of
    /// the rotated q and k by those of q and k before the rotation. Does nothing without rotary
    /// embedding.
    fn apply_rotary_embedding(&self, input: &LayerInput, qkv: &mut Buf, is_backward: bool) {
        let sliding = self.sliding_rope_tables.as_ref().filter(|_| self.is_sliding_layer(input));
        let Some(tables) = sliding.or(self.rope_tables.as_ref()) else { return };
        let (ops, sizes, b, t) = (input.ops, self.config.sizes, input.batch.sequences, input.batch.seq_len);
        let (cos, sin) = tables.slice_first_positions(t);
        let (heads, head_dim, stride) = (sizes.heads + sizes.kv_heads, sizes.head_dim, sizes.qkv_width());
        let shape = RopeShape { b, t, heads, head_dim, stride };
        match is_backward {
            false => ops.rope_forward(qkv.view_mut(), cos, sin, shape),
            true => ops.rope_backward(qkv.view_mut(), cos, sin, shape),
        }
    }

    /// Computes the forward pass of a layer's attention, from the norm of the layer's input to the
    /// output projection. Saves the projected output in the buffer of the residual stream. The
    /// second half of the layer adds the layer's input to this buffer.
    pub(super) fn attention_half_forward(&self, input: &LayerInput, buffers: &mut LayerBuffers) {
        let (ops, s) = (input.ops, &self.spans);
        let SavedBuffers {
            attention_in_stats,
            qkv,
            attention,
            lse,
            residual,
            raw_qk,
            qk_rstd,
            attention_out,
            attention_out_stats,
            ..
        } = buffers.saved.borrow_as_struct_mut();
        let ScratchBuffers { norm, norm_factors, mut lora, .. } = buffers.scratch.borrow_as_struct_mut();
        let norm_in = self.create_input_norm(input, s.attention_in_norm.as_ref(), norm_factors);
        let x = norm_in.forward(input.x, norm, attention_in_stats);
        self.linears.select_linear(input, &s.qkv).forward(x, qkv.view_mut(), &mut lora);
        self.qk_norm_forward(input, qkv, raw_qk, qk_rstd, norm_factors);
        self.apply_rotary_embedding(input, qkv, false);
        let (starts, shape) = (self.select_attention_starts(input), self.create_attention_shape(input));
        ops.attention_forward(attention.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        let o = self.linears.select_linear(input, &s.o);
        match self.create_norm_if_present(input, s.attention_out_norm.as_ref(), norm_factors) {
            Some(norm_out) => {
                o.forward(attention.view(), attention_out.view_mut(), &mut lora);
                norm_out.forward(residual.view_mut(), attention_out_stats.view_mut(), attention_out.view());
            }
            None => {
                o.forward(attention.view(), residual.view_mut(), &mut lora);
                let dropout = &self.layer_dropout[input.layer].attention_out;
                dropout.apply_dropout(ops, input.batch, self.config.sizes.hidden, residual.view_mut());
            }
        }
    }

    /// Computes the backward pass of a layer's first half, which is attention: from the output
    /// projection back to the norm of the layer's input. Writes the parameter gradients to `g`, the
    /// gradient of the layer's unit. `dx` is the gradient of the residual stream after attention on
    /// entry, and of the layer's input on return.
    pub(super) fn attention_half_backward(
        &self,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        buffers: &mut LayerBuffers,
    ) {
        let (ops, s) = (input.ops, &self.spans);
        let SavedBuffers {
            attention_in_stats,
            qkv,
            attention,
            lse,
            raw_qk,
            qk_rstd,
            attention_out,
            attention_out_stats,
            ..
        } = buffers.saved.borrow_as_struct_mut();
        let ScratchBuffers { norm, dnorm, dattention, dqkv, norm_factors, mut lora, .. } =
            buffers.scratch.borrow_as_struct_mut();
        let (qkv_linear, o) =
            (self.linears.select_linear(input, &s.qkv), self.linears.select_linear(input, &s.o));
        let branch = (s.attention_out_norm.as_ref(), &self.layer_dropout[input.layer].attention_out);
        let out = (attention_out.view(), attention_out_stats.view());
        let dout = self.branch_output_backward(input, branch, g, dx.as_view(), norm, out, norm_factors);
        o.backward_bias(g, dout);
        let dout = self.linears.format.round_gradient(ops, dout, dnorm);
        o.backward(g, dattention.view_mut(), (attention.view(), dout), &mut lora);
        let (starts, shape) = (self.select_attention_starts(input), self.create_attention_shape(input));
        let (dy, y) = (dattention.view(), attention.view());
        ops.attention_backward(dqkv.view_mut(), dy, y, lse.view(), qkv.view(), starts, shape);
        self.apply_rotary_embedding(input, dqkv, true);
        self.qk_norm_backward(input, g, dqkv, (raw_qk.view(), qk_rstd.view()), norm_factors);
        qkv_linear.backward_bias(g, dqkv.view());
        let norm_in = self.create_input_norm(input, s.attention_in_norm.as_ref(), norm_factors);
        let x = norm_in.forward(input.x, norm, attention_in_stats);
        qkv_linear.backward(g, dnorm.view_mut(), (x, dqkv.view()), &mut lora);
        norm_in.backward(g, dx, dnorm.view(), (input.x, attention_in_stats.view()));
    }
}
