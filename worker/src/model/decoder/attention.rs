//! Forward and backward pass of the first half of a decoder layer: norm, projections of q, k and v,
//! norms of q and k, rotation, attention, and output projection.
use super::{
    DecoderModel,
    layer_adapters::{O_ADAPTERS, QKV_ADAPTERS},
};
use crate::model::{ActivationBuffers, LayerInput, Model, borrow_first_buffers, lora::LoraScratchBuffers};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{AttentionShape, HeadLayout, WriteMode},
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

    /// Returns the layout of the heads of q, and of the heads of k, within rows of q, k and v.
    fn q_and_k_head_layouts(&self, rows: usize) -> [HeadLayout; 2] {
        let (heads, kv_heads, head_dim) = (self.config.heads, self.config.kv_heads, self.config.head_dim);
        let q = HeadLayout { rows, first_column: 0, heads, head_dim, stride: self.qkv_width() };
        [q, HeadLayout { first_column: heads * head_dim, heads: kv_heads, ..q }]
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
        let dout = match &s.attention_out_norm {
            None => dx.as_view(),
            Some(at) => {
                let (w, rstd) =
                    (self.compute_norm_factors(ops, p.slice(at.clone()), norm_buffer), branch_rstd.view());
                let (dbranch, dw) = (norm.view_mut(), g.slice_mut(at.clone()));
                ops.rmsnorm_backward(
                    dbranch,
                    dw,
                    dx.as_view(),
                    branch.view(),
                    w,
                    rstd,
                    m,
                    d,
                    WriteMode::Overwrite,
                );
                norm.view()
            }
        };
        if let Some(bias) = &s.o_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dout, m, d);
        }
        let dout = self.linear.round_gradient(ops, dout, dnorm);
        self.output_projection_backward(ops, input, g, dout, o.view(), d_o.view_mut());
        self.adapters_backward_weight(ops, input, O_ADAPTERS, g, (o.view(), dout), &mut lora_scratch);
        self.adapters_backward_input(ops, input, O_ADAPTERS, d_o.view_mut(), &mut lora_scratch);
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
        let grad_mask = self.grad_masks[input.layer];
        if grad_mask.qkv {
            let dw_qkv = g.slice_mut(s.qkv.clone());
            self.linear.backward_weight(ops, dw_qkv, dqkv.view(), norm.view(), (m, d, width));
        }
        let w_qkv = p.slice(s.qkv.clone());
        self.linear.backward_input(ops, dnorm.view_mut(), dqkv.view(), w_qkv, (m, d, width));
        self.adapters_backward_weight(
            ops,
            input,
            QKV_ADAPTERS,
            g,
            (norm.view(), dqkv.view()),
            &mut lora_scratch,
        );
        self.adapters_backward_input(ops, input, QKV_ADAPTERS, dnorm.view_mut(), &mut lora_scratch);
        let dw_in = g.slice_mut(s.input_norm.clone());
        ops.rmsnorm_backward(dx, dw_in, dnorm.view(), x, w_in, rstd1.view(), m, d, WriteMode::Accumulate);
    }

    /// Computes the gradients of the output projection from `dx`, the gradient of its output.
    /// Writes the gradient of the weight to `g`, and the gradient of the attention output to `d_o`.
    fn output_projection_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: View,
        o: View,
        d_o: ViewMut,
    ) {
        let (p, m) = (input.params, input.batch.rows());
        let (s, d, o_width) = (&self.spans, self.config.hidden_size, self.attention_width());
        if self.grad_masks[input.layer].o {
            self.linear.backward_weight(ops, g.slice_mut(s.o.clone()), dx, o, (m, o_width, d));
        }
        self.linear.backward_input(ops, d_o, dx, p.slice(s.o.clone()), (m, o_width, d));
    }

    /// Normalizes each head of q and k in `qkv` in place. Writes the values before the norms to
    /// `raw` and their 1/rms to `rstd`, for the backward pass. Does nothing if the family has no
    /// q/k norms.
    fn qk_norm_forward(
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
    fn qk_norm_backward(
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
