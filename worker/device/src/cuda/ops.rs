//! Implementation of [`Ops`] on a GPU.
use super::activation::{self, GateActivation, RopeShape};
use super::backend::Cuda;
use super::matmul_operand::{MatmulOperand, matmul, matmul_with_bias};
use super::{attention, classifier, elementwise, expert_rows, fp8, norm};
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::ops::expect_len;
use crate::ops::{
    AdamWHyperparams, AttentionShape, ClassifierGrads, Fp8Operand, HeadLayout, LayerNormParams,
    LionHyperparams, NORM_BLOCK_LEN, Ops, RouterBackwardInputs, RouterShape, RowGroup, SampleDropout,
    SgdHyperparams, StochasticRounding, WriteMode,
};

/// Returns the range of the elements of a group's rows, which have `width` elements each.
fn group_elements(group: &RowGroup, width: usize) -> std::ops::Range<usize> {
    group.rows.start * width..group.rows.end * width
}

impl Ops for Cuda {
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: WriteMode) {
        expect_len("matmul_forward", "y", y.len(), m * n);
        expect_len("matmul_forward", "x", x.len(), m * k);
        expect_len("matmul_forward", "w", w.len(), n * k);
        let c = MatmulOperand::new(y.as_view(), n, false);
        matmul(self, c, MatmulOperand::new(x, k, false), MatmulOperand::new(w, k, true), [m, n, k], write);
    }

    fn matmul_bias_forward(
        &self,
        y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        m: usize,
        n: usize,
        k: usize,
    ) {
        let Some(bias) = bias else { return self.matmul_forward(y, x, w, m, n, k, WriteMode::Overwrite) };
        expect_len("matmul_bias_forward", "y", y.len(), m * n);
        expect_len("matmul_bias_forward", "x", x.len(), m * k);
        expect_len("matmul_bias_forward", "w", w.len(), n * k);
        let (a, b) = (MatmulOperand::new(x, k, false), MatmulOperand::new(w, k, true));
        matmul_with_bias(self, y, a, b, bias, [m, n, k]);
    }

    fn conv1d_bias_forward(
        &self,
        y: ViewMut,
        x: View,
        w: View,
        bias: View,
        m: usize,
        inp: usize,
        out: usize,
    ) {
        expect_len("conv1d_bias_forward", "y", y.len(), m * out);
        expect_len("conv1d_bias_forward", "x", x.len(), m * inp);
        expect_len("conv1d_bias_forward", "w", w.len(), inp * out);
        let (a, b) = (MatmulOperand::new(x, inp, false), MatmulOperand::new(w, out, false));
        matmul_with_bias(self, y, a, b, bias, [m, out, inp]);
    }

    fn matmul_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    ) {
        expect_len("matmul_backward_input", "dx", dx.len(), m * k);
        expect_len("matmul_backward_input", "dy", dy.len(), m * n);
        expect_len("matmul_backward_input", "w", w.len(), n * k);
        let c = MatmulOperand::new(dx.as_view(), k, false);
        matmul(self, c, MatmulOperand::new(dy, n, false), MatmulOperand::new(w, k, false), [m, k, n], write);
    }

    fn matmul_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    ) {
        expect_len("matmul_backward_weight", "dw", dw.len(), n * k);
        expect_len("matmul_backward_weight", "dy", dy.len(), m * n);
        expect_len("matmul_backward_weight", "x", x.len(), m * k);
        let c = MatmulOperand::new(dw.as_view(), k, false);
        matmul(self, c, MatmulOperand::new(dy, n, true), MatmulOperand::new(x, k, false), [n, k, m], write);
    }

    fn as_matmul_operand<'a>(&self, x: View<'a>, buf: &'a mut Buf) -> View<'a> {
        if (x.dtype(), buf.dtype()) != (Dtype::F32, Dtype::Bf16) {
            return x;
        }
        let n = x.len();
        elementwise::cast(self, buf.view_mut().slice(0..n), x);
        buf.view().slice(0..n)
    }

    fn fp8_matmul(
        &self,
        c: ViewMut,
        a: Fp8Operand,
        b: Fp8Operand,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    ) {
        fp8::matmul_fp8(self, c, a, b, [m, n, k], write);
    }

    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize) {
        expert_rows::gather_rows(self, "embedding_forward", x, w, tokens, d);
    }

    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
        expert_rows::embedding_backward(self, dw, dx, tokens, d);
    }

    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32) {
        expect_len("rmsnorm_forward", "x", x.len(), m * d);
        expect_len("rmsnorm_forward", "w", w.len(), d);
        norm::rmsnorm_forward(self, y, rstd, x.into(), None, w, m, eps);
    }

    fn add_rmsnorm_forward(
        &self,
        y: ViewMut,
        rstd: ViewMut,
        x: ViewMut,
        delta: View,
        w: View,
        m: usize,
        d: usize,
        eps: f32,
    ) {
        expect_len("add_rmsnorm_forward", "x", x.len(), m * d);
        expect_len("add_rmsnorm_forward", "w", w.len(), d);
        norm::rmsnorm_forward(self, y, rstd, (&x).into(), Some(delta), w, m, eps);
    }

    fn rmsnorm_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        dy: View,
        x: View,
        w: View,
        rstd: View,
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        expect_len("rmsnorm_backward", "w", w.len(), d);
        norm::rmsnorm_backward(self, dx, dw, dy, x, w, rstd, m, write);
    }

    fn rmsnorm_heads_forward(
        &self,
        x: ViewMut,
        raw: ViewMut,
        rstd: ViewMut,
        w: View,
        h: HeadLayout,
        eps: f32,
    ) {
        norm::rmsnorm_heads_forward(self, x, raw, rstd, w, h, eps);
    }

    fn rmsnorm_heads_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        raw: View,
        rstd: View,
        w: View,
        h: HeadLayout,
    ) {
        norm::rmsnorm_heads_backward(self, dx, dw, raw, rstd, w, h);
    }

    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, layer_norm: LayerNormParams, m: usize) {
        expect_len("layernorm_forward", "x", x.len(), m * layer_norm.w.len());
        norm::layernorm_forward(self, y, stats, x.into(), None, layer_norm, m);
    }

    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        layer_norm: LayerNormParams,
        m: usize,
    ) {
        expect_len("add_layernorm_forward", "x", x.len(), m * layer_norm.w.len());
        norm::layernorm_forward(self, y, stats, (&x).into(), Some(delta), layer_norm, m);
    }

    fn layernorm_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        db: ViewMut,
        dy: View,
        x: View,
        w: View,
        stats: View,
        m: usize,
        write: WriteMode,
    ) {
        norm::layernorm_backward(self, dx, [dw, db], dy, x, w, stats, m, write);
    }

    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize) {
        norm::bias_forward(self, y, bias, m, n);
    }

    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize) {
        norm::bias_backward(self, dbias, dy, m, n);
    }

    fn rope_forward(
        &self,
        x: ViewMut,
        cos: View,
        sin: View,
        b: usize,
        t: usize,
        heads: usize,
        head_dim: usize,
        stride: usize,
    ) {
        activation::rotate_heads(self, x, cos, sin, RopeShape { b, t, heads, head_dim, stride }, 1.0);
    }

    fn rope_backward(
        &self,
        dx: ViewMut,
        cos: View,
        sin: View,
        b: usize,
        t: usize,
        heads: usize,
        head_dim: usize,
        stride: usize,
    ) {
        activation::rotate_heads(self, dx, cos, sin, RopeShape { b, t, heads, head_dim, stride }, -1.0);
    }

    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape) {
        attention::forward(self, o, lse, qkv, starts, shape);
    }

    fn attention_backward(
        &self,
        dqkv: ViewMut,
        d_o: View,
        o: View,
        lse: View,
        qkv: View,
        starts: &[u32],
        shape: AttentionShape,
    ) {
        attention::backward(self, dqkv, d_o, o, lse, qkv, starts, shape);
    }

    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated_forward(self, y, gate_up, m, f, GateActivation::Silu);
    }

    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated_backward(self, dgate_up, dy, gate_up, m, f, GateActivation::Silu);
    }

    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen: &mut [u32],
        logits: View,
        shape: RouterShape,
    ) {
        expert_rows::router_forward(self, probs, weights, lse, chosen, logits, shape);
    }

    fn router_backward(
        &self,
        dlogits: ViewMut,
        dweights: View,
        router: RouterBackwardInputs,
        shape: RouterShape,
    ) {
        expert_rows::router_backward(self, dlogits, dweights, router, shape);
    }

    fn gather_rows(&self, y: ViewMut, x: View, indices: &[u32], d: usize) {
        expert_rows::gather_rows(self, "gather_rows", y, x, indices, d);
    }

    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        indices: &[u32],
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        expert_rows::combine_rows(self, y, x, weights, indices, m, d, write);
    }

    fn dot_rows(&self, out: ViewMut, a: View, b: View, d: usize) {
        expert_rows::dot_rows(self, out, a, b, d);
    }

    fn scale_rows(&self, x: ViewMut, factors: View, d: usize) {
        expert_rows::scale_rows(self, x, factors, d);
    }

    fn grouped_forward(&self, mut y: ViewMut, x: View, w: View, groups: &[RowGroup], n: usize, k: usize) {
        for group in groups {
            let (y, w) = (
                y.reborrow().slice(group_elements(group, n)),
                w.slice(group.matrix_offset..group.matrix_offset + n * k),
            );
            self.matmul_forward(
                y,
                x.slice(group_elements(group, k)),
                w,
                group.rows.len(),
                n,
                k,
                WriteMode::Overwrite,
            );
        }
    }

    fn grouped_backward_input(
        &self,
        mut dx: ViewMut,
        dy: View,
        w: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        for group in groups {
            let (dx, w) = (
                dx.reborrow().slice(group_elements(group, k)),
                w.slice(group.matrix_offset..group.matrix_offset + n * k),
            );
            self.matmul_backward_input(
                dx,
                dy.slice(group_elements(group, n)),
                w,
                group.rows.len(),
                n,
                k,
                WriteMode::Overwrite,
            );
        }
    }

    fn grouped_backward_weight(
        &self,
        mut dw: ViewMut,
        dy: View,
        x: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        for group in groups {
            let dw = dw.reborrow().slice(group.matrix_offset..group.matrix_offset + n * k);
            let (dy, x) = (dy.slice(group_elements(group, n)), x.slice(group_elements(group, k)));
            self.matmul_backward_weight(dw, dy, x, group.rows.len(), n, k, WriteMode::Overwrite);
        }
    }

    fn gelu_forward(&self, y: ViewMut, x: View) {
        activation::gelu_forward(self, y, x);
    }

    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View) {
        activation::gelu_backward(self, dx, dy, x);
    }

    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated_forward(self, y, gate_up, m, f, GateActivation::Gelu);
    }

    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated_backward(self, dgate_up, dy, gate_up, m, f, GateActivation::Gelu);
    }

    fn compute_softcapped_classifier_loss(
        &self,
        loss: ViewMut,
        x: View,
        w: View,
        labels: &[u32],
        m: usize,
        d: usize,
        v: usize,
        cap: Option<f32>,
        grads: Option<ClassifierGrads>,
    ) {
        classifier::compute_loss_in_chunks(
            self,
            loss,
            x,
            w,
            labels,
            classifier::ClassifierShape { m, d, v, cap },
            grads,
        );
    }

    fn cast(&self, y: ViewMut, x: View) {
        elementwise::cast(self, y, x);
    }

    fn round_stochastically(&self, y: ViewMut, x: View, draw: &StochasticRounding) {
        draw.check(&y);
        elementwise::round_stochastically(self, y, x, draw);
    }

    fn add(&self, y: ViewMut, x: View) {
        elementwise::add(self, y, x);
    }

    fn scale(&self, y: ViewMut, s: f32) {
        elementwise::scale(self, y, s);
    }

    fn add_scalar(&self, y: ViewMut, s: f32) {
        elementwise::add_scalar(self, y, s);
    }

    fn axpby(&self, y: ViewMut, a: f32, x: View, b: f32) {
        elementwise::axpby(self, y, a, x, b);
    }

    fn softcap(&self, y: ViewMut, cap: f32) {
        elementwise::softcap(self, y, cap);
    }

    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize) {
        elementwise::transpose(self, y, x, rows, columns);
    }

    fn dropout(&self, x: ViewMut, d: &SampleDropout) {
        elementwise::dropout(self, x, d);
    }

    fn sum_squares(&self, x: View) -> f64 {
        elementwise::sum_squares_by_block(self, &[x]).iter().sum()
    }

    fn nesterov_momentum(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
        elementwise::nesterov_momentum(self, buffer, g, mu, scale);
    }

    fn sum_squares_by_block(&self, out: &mut [f64], x: View) {
        expect_len("sum_squares_by_block", "out", out.len(), x.len().div_ceil(NORM_BLOCK_LEN));
        out.copy_from_slice(&elementwise::sum_squares_by_block(self, &[x]));
    }

    fn sum_squares_by_block_concat(&self, vectors: &[View]) -> Vec<f64> {
        elementwise::sum_squares_by_block(self, vectors)
    }

    fn adamw(&self, p: ViewMut, g: View, exp_avg: ViewMut, exp_avg_sq: ViewMut, h: &AdamWHyperparams) {
        elementwise::adamw(self, p, g, exp_avg, exp_avg_sq, h);
    }

    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, h: &SgdHyperparams) {
        elementwise::sgd(self, p, g, momentum_buffer, h);
    }

    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, h: &LionHyperparams) {
        elementwise::lion(self, p, g, exp_avg, h);
    }
}
