//! Forward and backward pass of a layer of GPT-2 (`GPT2Block` of transformers): attention and MLP,
//! each after a LayerNorm.
use super::{
    gpt2_buffers::{SavedBuffers, ScratchBuffers},
    gpt2_layer_layout::WeightBiasSpans,
    gpt2_model::Gpt2Model,
};
use crate::model::{activation_buffers::ActivationBuffers, blocks::LayerInput};
use device::{
    Ops, View, ViewMut,
    ops::{AttentionShape, LayerNormParams, WriteMode},
};

impl Gpt2Model {
    /// Returns the parameters of a LayerNorm from `p`, the parameters of the layer.
    fn layer_norm_params<'a>(&self, p: View<'a>, at: &WeightBiasSpans) -> LayerNormParams<'a> {
        LayerNormParams { w: p.slice(at.w.clone()), b: p.slice(at.b.clone()), eps: self.config.norm_eps }
    }

    /// Computes the gradients of a LayerNorm with input `x` and statistics `stats`. `dy` is the
    /// gradient of its output. Adds the gradients of weight and bias to `g`, the gradient of the
    /// layer's unit, and the gradient of the input to `dx`.
    fn layer_norm_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        at: &WeightBiasSpans,
        g: &mut ViewMut,
        dy: View,
        (x, stats): (View, View),
        dx: ViewMut,
    ) {
        let (dw, db) = g.slice_mut(at.w.start..at.b.end).split_at(at.w.len());
        let (w, m) = (input.params.slice(at.w.clone()), input.batch.rows());
        ops.layernorm_backward(dx, dw, db, dy, x, w, stats, m, WriteMode::Accumulate);
    }

    /// Returns shape, scale and dropout of the attention of a layer.
    fn create_attention_shape(&self, input: &LayerInput) -> AttentionShape {
        let sizes = self.config.sizes;
        let scale = if self.config.scales_scores { 1.0 / (sizes.head_dim as f64).sqrt() } else { 1.0 };
        let layer_divisor = if self.config.scales_by_layer_index { (input.layer + 1) as f64 } else { 1.0 };
        let (b, t) = (input.batch.sequences, input.batch.seq_len);
        AttentionShape {
            scale: (scale / layer_divisor) as f32,
            dropout: self.layer_dropout[input.layer].attention.create_attention_dropout(input.batch),
            ..AttentionShape::new(b, t, sizes.heads, sizes.kv_heads, sizes.head_dim)
        }
    }

    /// Computes attention of a layer. Saves the projected output in the buffer of the residual
    /// stream. [`Gpt2Model::mlp_forward`] adds the layer's input to this buffer.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (s, m, d) = (&self.spans, input.batch.rows(), self.config.sizes.hidden);
        let SavedBuffers { ln_1_stats, qkv, attention, lse, residual, .. } = saved.borrow_set_mut();
        let ScratchBuffers { norm, mut lora, .. } = scratch.borrow_set_mut();
        let ln_1 = self.layer_norm_params(input.params, &s.ln_1);
        ops.layernorm_forward(norm.view_mut(), ln_1_stats.view_mut(), input.x, ln_1, m);
        self.linears.forward(ops, input, &s.c_attn, norm.view(), qkv.view_mut(), &mut lora);
        let (starts, shape) = (&input.batch.starts, self.create_attention_shape(input));
        ops.attention_forward(attention.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        let (x, y) = (attention.view(), residual.view_mut());
        self.linears.forward(ops, input, &s.attn_proj, x, y, &mut lora);
        let dropout = &self.layer_dropout[input.layer].attention_out;
        dropout.apply_dropout(ops, input.batch, d, residual.view_mut());
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
        let (s, m, d) = (&self.spans, input.batch.rows(), self.config.sizes.hidden);
        let SavedBuffers { ln_1_stats, qkv, attention, lse, .. } = saved.borrow_set_mut();
        let ScratchBuffers { norm, dnorm, dattention, dqkv, mut lora, .. } = scratch.borrow_set_mut();
        let dropout = &self.layer_dropout[input.layer].attention_out;
        let dout = dropout.dropout_backward(ops, input.batch, d, dx.as_view(), norm);
        self.linears.backward_bias(ops, input, &s.attn_proj, g, dout);
        let dout = self.linears.format.round_gradient(ops, dout, dnorm);
        let xy = (attention.view(), dout);
        self.linears.backward(ops, input, &s.attn_proj, g, dattention.view_mut(), xy, &mut lora);
        let (starts, shape) = (&input.batch.starts, self.create_attention_shape(input));
        let (dy, y) = (dattention.view(), attention.view());
        ops.attention_backward(dqkv.view_mut(), dy, y, lse.view(), qkv.view(), starts, shape);
        let ln_1 = self.layer_norm_params(input.params, &s.ln_1);
        ops.layernorm_forward(norm.view_mut(), ln_1_stats.view_mut(), input.x, ln_1, m);
        self.linears.backward_bias(ops, input, &s.c_attn, g, dqkv.view());
        let xy = (norm.view(), dqkv.view());
        self.linears.backward(ops, input, &s.c_attn, g, dnorm.view_mut(), xy, &mut lora);
        let x = (input.x, ln_1_stats.view());
        self.layer_norm_backward(ops, input, &s.ln_1, g, dnorm.view(), x, dx);
    }

    /// Adds the layer's input to the projected output of attention, and computes the MLP. Writes
    /// the layer's output to `y`. If `y` is `None`, computes only the saved values.
    pub(super) fn mlp_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (s, m, d) = (&self.spans, input.batch.rows(), self.config.sizes.hidden);
        let SavedBuffers { residual, ln_2_stats, fc, .. } = saved.borrow_set_mut();
        let ScratchBuffers { norm, act, mut lora, .. } = scratch.borrow_set_mut();
        let ln_2 = self.layer_norm_params(input.params, &s.ln_2);
        let (rows, stats) = (norm.view_mut(), ln_2_stats.view_mut());
        ops.add_layernorm_forward(rows, stats, residual.view_mut(), input.x, ln_2, m);
        self.linears.forward(ops, input, &s.c_fc, norm.view(), fc.view_mut(), &mut lora);
        let Some(mut y) = y else { return };
        ops.gelu_forward(act.view_mut(), fc.view());
        self.linears.forward(ops, input, &s.mlp_proj, act.view(), y.reborrow(), &mut lora);
        self.layer_dropout[input.layer].mlp_out.apply_dropout(ops, input.batch, d, y.reborrow());
        ops.add(y, residual.view());
    }

    /// Computes the gradients of the MLP. Writes the parameter gradients to `g`, the gradient of
    /// the layer's unit. `dx` is the gradient of the layer's output on entry, and of the residual
    /// stream after attention on return.
    pub(super) fn mlp_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let (s, m, d) = (&self.spans, input.batch.rows(), self.config.sizes.hidden);
        let SavedBuffers { residual, ln_2_stats, fc, .. } = saved.borrow_set_mut();
        let ScratchBuffers { norm, dnorm, act, dfc, mut lora, .. } = scratch.borrow_set_mut();
        let dropout = &self.layer_dropout[input.layer].mlp_out;
        let dout = dropout.dropout_backward(ops, input.batch, d, dx.as_view(), norm);
        self.linears.backward_bias(ops, input, &s.mlp_proj, g, dout);
        let dout = self.linears.format.round_gradient(ops, dout, dnorm);
        if self.linears.has_adapters() {
            ops.gelu_forward(act.view_mut(), fc.view());
            self.linears.backward_adapters(ops, input, &s.mlp_proj, g, (act.view(), dout), &mut lora);
        }
        self.linears.backward_input(ops, input, &s.mlp_proj, dfc.view_mut(), dout, &mut lora);
        // Writes the output of GELU to `dfc` and the gradient of its input to `act`.
        ops.gelu_backward(act.view_mut(), dfc.view_mut(), fc.view());
        self.linears.backward_weight(ops, input, &s.mlp_proj, g, (dfc.view(), dout));
        let ln_2 = self.layer_norm_params(input.params, &s.ln_2);
        ops.layernorm_forward(norm.view_mut(), ln_2_stats.view_mut(), residual.view(), ln_2, m);
        self.linears.backward_bias(ops, input, &s.c_fc, g, act.view());
        let xy = (norm.view(), act.view());
        self.linears.backward(ops, input, &s.c_fc, g, dnorm.view_mut(), xy, &mut lora);
        let x = (residual.view(), ln_2_stats.view());
        self.layer_norm_backward(ops, input, &s.ln_2, g, dnorm.view(), x, dx);
    }
}
