//! The first half of a layer: norm, q k v, their norms, rotation, attention, output projection.
use super::{
    Decoder,
    adapt::{O, QKV},
};
use crate::model::{Activations, LayerInput, each, lora::Scratch};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{AttentionShape, HeadRows, Write},
};

impl Decoder {
    fn shape(&self, input: &LayerInput) -> AttentionShape {
        let batch = input.batch;
        let (heads, kv_heads, head_dim) = (self.n.heads, self.n.kv_heads, self.n.head_dim);
        AttentionShape {
            scale: self.n.attention_scale,
            softcap: self.n.attention_cap,
            dropout: self.dropout[input.layer].of_attention(batch),
            ..AttentionShape::new(batch.b, batch.t, heads, kv_heads, head_dim)
        }
    }

    fn slides(&self, input: &LayerInput) -> bool {
        self.n.sliding.get(input.layer).is_some_and(|s| *s)
    }

    /// Position of the first token that each token of this layer may attend to.
    fn starts<'a>(&self, input: &LayerInput<'a>) -> &'a [u32] {
        if self.slides(input) { &input.batch.windowed } else { &input.batch.starts }
    }

    /// cos and sin of this layer.
    fn angles(&self, input: &LayerInput) -> (View<'_>, View<'_>) {
        let own = self.sliding_tables.as_ref().filter(|_| self.slides(input));
        own.unwrap_or(&self.tables).first(input.batch.t)
    }

    /// q's heads, then k's, inside rows of q, k and v.
    fn head_rows(&self, rows: usize) -> [HeadRows; 2] {
        let (heads, kv_heads, head_dim) = (self.n.heads, self.n.kv_heads, self.n.head_dim);
        let q = HeadRows { rows, first: 0, heads, head_dim, stride: self.qkv_width() };
        [q, HeadRows { first: heads * head_dim, heads: kv_heads, ..q }]
    }

    /// Leaves the projected output in the buffer of the residual stream; the input is added later.
    pub(super) fn attention_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, batch, s) = (input.params, input.batch, &self.spans);
        let (m, d, width, eps) = (batch.rows(), self.n.hidden, self.qkv_width(), self.n.eps);
        let [rstd1, qkv, o, lse, mid, _, _, raw, head_rstd, branch, branch_rstd] = each::<11>(saved);
        let [norm, _, _, _, _, _, room, _, _, low @ ..] = each::<14>(scratch);
        let mut low = Scratch::new(low);
        let w_in = self.norm_factors(ops, p.slice(s.input_norm.clone()), room);
        ops.rmsnorm_forward(norm.view_mut(), rstd1.view_mut(), input.x, w_in, m, d, eps);
        let (w_qkv, bias) = (p.slice(s.qkv.clone()), s.qkv_bias.clone().map(|b| p.slice(b)));
        self.linear.forward(ops, qkv.view_mut(), norm.view(), w_qkv, bias, (m, d, width));
        self.adapters_forward(ops, input, QKV, norm.view(), qkv.view_mut(), &mut low);
        self.qk_norm_forward(ops, p, qkv, raw, head_rstd, room, m);
        let (cos, sin) = self.angles(input);
        let (rotated, head_dim) = (self.n.heads + self.n.kv_heads, self.n.head_dim);
        ops.rope_forward(qkv.view_mut(), cos, sin, batch.b, batch.t, rotated, head_dim, width);
        ops.attention_forward(
            o.view_mut(),
            lse.view_mut(),
            qkv.view(),
            self.starts(input),
            self.shape(input),
        );
        let w_o = p.slice(s.o.clone());
        let mut out = if s.attention_out_norm.is_some() { branch.view_mut() } else { mid.view_mut() };
        let bias = s.o_bias.clone().map(|b| p.slice(b));
        self.linear.forward(ops, out.reborrow(), o.view(), w_o, bias, (m, self.o_width(), d));
        self.adapters_forward(ops, input, O, o.view(), out, &mut low);
        if let Some(at) = &s.attention_out_norm {
            let w = self.norm_factors(ops, p.slice(at.clone()), room);
            ops.rmsnorm_forward(mid.view_mut(), branch_rstd.view_mut(), branch.view(), w, m, d, eps);
        }
    }

    /// `dx` becomes the gradient of the layer's input.
    pub(super) fn attention_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    ) {
        let (p, batch, x, s) = (input.params, input.batch, input.x, &self.spans);
        let (m, d, width) = (batch.rows(), self.n.hidden, self.qkv_width());
        let [rstd1, qkv, o, lse, _, _, _, raw, head_rstd, branch, branch_rstd] = each::<11>(saved);
        let [norm, dnorm, _, _, d_o, dqkv, room, _, _, low @ ..] = each::<14>(scratch);
        let mut low = Scratch::new(low);
        let dout = match &s.attention_out_norm {
            None => dx.as_view(),
            Some(at) => {
                let (w, rstd) = (self.norm_factors(ops, p.slice(at.clone()), room), branch_rstd.view());
                let (dbranch, dw) = (norm.view_mut(), g.slice_mut(at.clone()));
                ops.rmsnorm_backward(dbranch, dw, dx.as_view(), branch.view(), w, rstd, m, d, Write::Set);
                norm.view()
            }
        };
        if let Some(bias) = &s.o_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dout, m, d);
        }
        let dout = self.linear.gradient(ops, dout, dnorm);
        self.output_backward(ops, input, g, dout, o.view(), d_o.view_mut());
        self.adapters_backward_weight(ops, input, O, g, (o.view(), dout), &mut low);
        self.adapters_backward_input(ops, input, O, d_o.view_mut(), &mut low);
        let (starts, shape) = (self.starts(input), self.shape(input));
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
        let (cos, sin) = self.angles(input);
        let (rotated, head_dim) = (self.n.heads + self.n.kv_heads, self.n.head_dim);
        ops.rope_backward(dqkv.view_mut(), cos, sin, batch.b, batch.t, rotated, head_dim, width);
        self.qk_norm_backward(ops, p, g, dqkv, raw.view(), head_rstd.view(), room, m);
        if let Some(bias) = &s.qkv_bias {
            ops.bias_backward(g.slice_mut(bias.clone()), dqkv.view(), m, width);
        }
        let w_in = self.norm_factors(ops, p.slice(s.input_norm.clone()), room);
        ops.rmsnorm_forward(norm.view_mut(), rstd1.view_mut(), x, w_in, m, d, self.n.eps);
        let wanted = self.wanted[input.layer];
        if wanted.qkv {
            let dw_qkv = g.slice_mut(s.qkv.clone());
            self.linear.backward_weight(ops, dw_qkv, dqkv.view(), norm.view(), (m, d, width));
        }
        let w_qkv = p.slice(s.qkv.clone());
        self.linear.backward_input(ops, dnorm.view_mut(), dqkv.view(), w_qkv, (m, d, width));
        self.adapters_backward_weight(ops, input, QKV, g, (norm.view(), dqkv.view()), &mut low);
        self.adapters_backward_input(ops, input, QKV, dnorm.view_mut(), &mut low);
        let dw_in = g.slice_mut(s.input_norm.clone());
        ops.rmsnorm_backward(dx, dw_in, dnorm.view(), x, w_in, rstd1.view(), m, d, Write::Add);
    }

    /// The output projection backwards: `d_o` from `dx`.
    fn output_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        g: &mut ViewMut,
        dx: View,
        o: View,
        d_o: ViewMut,
    ) {
        let (p, m) = (input.params, input.batch.rows());
        let (s, d, o_width) = (&self.spans, self.n.hidden, self.o_width());
        if self.wanted[input.layer].o {
            self.linear.backward_weight(ops, g.slice_mut(s.o.clone()), dx, o, (m, o_width, d));
        }
        self.linear.backward_input(ops, d_o, dx, p.slice(s.o.clone()), (m, o_width, d));
    }

    /// Norms the heads of q and k in place, and leaves what they were in `raw`.
    fn qk_norm_forward(
        &self,
        ops: &dyn Ops,
        p: View,
        qkv: &mut Buf,
        raw: &mut Buf,
        rstd: &mut Buf,
        room: &mut Buf,
        m: usize,
    ) {
        let Some(weights) = &self.spans.qk_norm else { return };
        let (raw_q, raw_k) = raw.view_mut().split_at(m * self.o_width());
        let (rstd_q, rstd_k) = rstd.view_mut().split_at(m * self.n.heads);
        let kept = [(raw_q, rstd_q), (raw_k, rstd_k)];
        for ((shape, w), (raw, rstd)) in self.head_rows(m).into_iter().zip(weights).zip(kept) {
            let w = self.norm_factors(ops, p.slice(w.clone()), room);
            ops.rmsnorm_heads_forward(qkv.view_mut(), raw, rstd, w, shape, self.n.eps);
        }
    }

    fn qk_norm_backward(
        &self,
        ops: &dyn Ops,
        p: View,
        g: &mut ViewMut,
        dqkv: &mut Buf,
        raw: View,
        rstd: View,
        room: &mut Buf,
        m: usize,
    ) {
        let Some(weights) = &self.spans.qk_norm else { return };
        let (q, h) = (m * self.o_width(), m * self.n.heads);
        let kept =
            [(raw.slice(0..q), rstd.slice(0..h)), (raw.slice(q..raw.len()), rstd.slice(h..rstd.len()))];
        for ((shape, w), (raw, rstd)) in self.head_rows(m).into_iter().zip(weights).zip(kept) {
            let dw = g.slice_mut(w.clone());
            let w = self.norm_factors(ops, p.slice(w.clone()), room);
            ops.rmsnorm_heads_backward(dqkv.view_mut(), dw, raw, rstd, w, shape);
        }
    }
}
