//! Implementation of [`Ops`] on the CPU.
use super::backend::Cpu;
use super::matmul::{MatmulShape, matmul, matmul_with_bias};
use super::packing::Operand;
use super::{
    attention, attention_backward, bias, classifier, elements, elementwise, embedding, expert_rows,
    fp8_matmul, gelu, grouped_matmul, layer_norm, optimizers, reductions, rms_norm, rms_norm_heads, rope,
    router, stochastic_rounding, swiglu,
};
use crate::buffer::{View, ViewMut};
use crate::ops::expect_len;
use crate::ops::{
    AdamWHyperparams, AttentionShape, ClassifierGrads, Fp8Operand, HeadLayout, LayerNormParams,
    LionHyperparams, Ops, RouterBackwardInputs, RouterShape, RowGroup, SampleDropout, SgdHyperparams,
    StochasticRounding, WriteMode,
};

/// Computes `y[m,n] = a·b + bias`. Panics if a length does not fit the shape. `op` is the op's name
/// in panics.
fn check_and_matmul_with_bias(
    cpu: &Cpu,
    op: &str,
    y: ViewMut,
    a: Operand,
    b: Operand,
    bias: Option<View>,
    (m, n, k): (usize, usize, usize),
) {
    expect_len(op, "y", y.len(), m * n);
    expect_len(op, "x", a.data.len(), m * k);
    expect_len(op, "w", b.data.len(), n * k);
    expect_len(op, "bias", bias.map_or(n, |b| b.len()), n);
    let shape = MatmulShape { m, n, k, ldc: n, write: WriteMode::Overwrite };
    matmul_with_bias(cpu, cpu.as_output(y), a, b, bias.map(Into::into), shape);
}

/// Converts the parameters of a LayerNorm to the inputs of the CPU's kernels.
fn convert_layer_norm_params(norm: LayerNormParams<'_>) -> layer_norm::LayerNormParamInputs<'_> {
    layer_norm::LayerNormParamInputs { w: norm.w.into(), b: norm.b.into(), eps: norm.eps }
}

impl Ops for Cpu {
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: WriteMode) {
        expect_len("matmul_forward", "y", y.len(), m * n);
        expect_len("matmul_forward", "x", x.len(), m * k);
        expect_len("matmul_forward", "w", w.len(), n * k);
        let a = Operand { data: x.into(), row_stride: k, depth_stride: 1 };
        let b = Operand { data: w.into(), row_stride: k, depth_stride: 1 };
        matmul(self, self.as_output(y), a, b, MatmulShape { m, n, k, ldc: n, write });
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
        let a = Operand { data: dy.into(), row_stride: n, depth_stride: 1 };
        let b = Operand { data: w.into(), row_stride: 1, depth_stride: k };
        matmul(self, self.as_output(dx), a, b, MatmulShape { m, n: k, k: n, ldc: k, write });
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
        let a = Operand { data: dy.into(), row_stride: 1, depth_stride: n };
        let b = Operand { data: x.into(), row_stride: 1, depth_stride: k };
        matmul(self, self.as_output(dw), a, b, MatmulShape { m: n, n: k, k: m, ldc: k, write });
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
        let a = Operand { data: x.into(), row_stride: k, depth_stride: 1 };
        let b = Operand { data: w.into(), row_stride: k, depth_stride: 1 };
        check_and_matmul_with_bias(self, "matmul_bias_forward", y, a, b, bias, (m, n, k));
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
        let a = Operand { data: x.into(), row_stride: inp, depth_stride: 1 };
        let b = Operand { data: w.into(), row_stride: 1, depth_stride: out };
        check_and_matmul_with_bias(self, "conv1d_bias_forward", y, a, b, Some(bias), (m, out, inp));
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
        fp8_matmul::matmul_fp8(self, c, a, b, [m, n, k], write);
    }

    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize) {
        embedding::forward(self, self.as_output(x), w.into(), tokens, d);
    }

    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
        embedding::backward(self, dw.host(), dx.into(), tokens, d);
    }

    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32) {
        rms_norm::forward(self, self.as_output(y), rstd.host(), x.into(), w.into(), m, d, eps);
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
        rms_norm::forward_with_residual(
            self,
            self.as_output(y),
            rstd.host(),
            self.as_output(x),
            delta.into(),
            w.into(),
            m,
            d,
            eps,
        );
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
        let (dx, dy, x, w) = (self.as_output(dx), dy.into(), x.into(), w.into());
        rms_norm::backward(self, dx, dw.host(), dy, x, w, rstd.host(), m, d, write);
    }

    fn rmsnorm_heads_forward(
        &self,
        x: ViewMut,
        raw: ViewMut,
        rstd: ViewMut,
        w: View,
        layout: HeadLayout,
        eps: f32,
    ) {
        rms_norm_heads::forward(
            self,
            self.as_output(x),
            self.as_output(raw),
            rstd.host(),
            w.into(),
            layout,
            eps,
        );
    }

    fn rmsnorm_heads_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        raw: View,
        rstd: View,
        w: View,
        layout: HeadLayout,
    ) {
        rms_norm_heads::backward(
            self,
            self.as_output(dx),
            dw.host(),
            raw.into(),
            rstd.host(),
            w.into(),
            layout,
        );
    }

    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNormParams, m: usize) {
        layer_norm::forward(
            self,
            self.as_output(y),
            stats.host(),
            x.into(),
            convert_layer_norm_params(norm),
            m,
        );
    }

    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNormParams,
        m: usize,
    ) {
        let (y, x) = (self.as_output(y), self.as_output(x));
        layer_norm::forward_with_residual(
            self,
            y,
            stats.host(),
            x,
            delta.into(),
            convert_layer_norm_params(norm),
            m,
        );
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
        let grads = [dw.host(), db.host()];
        let (dx, dy, x, w) = (self.as_output(dx), dy.into(), x.into(), w.into());
        layer_norm::backward(self, dx, grads, dy, x, w, stats.host(), m, write);
    }

    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize) {
        bias::forward(self, self.as_output(y), bias.into(), m, n);
    }

    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize) {
        bias::backward(self, dbias.host(), dy.into(), m, n);
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
        let shape = rope::RopeShape { b, t, heads, head_dim, stride };
        rope::rotate_heads(self, self.as_output(x), cos.host(), sin.host(), shape, 1.0);
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
        let shape = rope::RopeShape { b, t, heads, head_dim, stride };
        rope::rotate_heads(self, self.as_output(dx), cos.host(), sin.host(), shape, -1.0);
    }

    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape) {
        attention::forward(self, self.as_output(o), lse.host(), qkv.into(), starts, shape);
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
        let inputs = attention_backward::AttentionBackwardInputs {
            d_o: d_o.into(),
            o: o.into(),
            lse: lse.host(),
            qkv: qkv.into(),
            starts,
        };
        attention_backward::backward(self, self.as_output(dqkv), inputs, shape);
    }

    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        swiglu::forward(self, self.as_output(y), gate_up.into(), m, f);
    }

    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        swiglu::backward(self, self.as_output(dgate_up), self.as_output(dy), gate_up.into(), m, f);
    }

    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen_experts: &mut [u32],
        logits: View,
        shape: RouterShape,
    ) {
        let out = router::RouterOutputs {
            probs: probs.host(),
            weights: weights.host(),
            lse: lse.host(),
            chosen_experts,
        };
        router::forward(self, out, logits.host(), shape);
    }

    fn router_backward(
        &self,
        dlogits: ViewMut,
        dweights: View,
        inputs: RouterBackwardInputs,
        shape: RouterShape,
    ) {
        router::backward(self, dlogits.host(), dweights.host(), inputs, shape);
    }

    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize) {
        expert_rows::gather_rows(self, self.as_output(y), x.into(), rows, d);
    }

    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        row_indices: &[u32],
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        let sum = expert_rows::WeightedRowSum {
            x: x.into(),
            weights: weights.map(View::host),
            row_indices,
            d,
            write,
        };
        expert_rows::combine_rows(self, self.as_output(y), m, sum);
    }

    fn dot_rows(&self, out: ViewMut, a: View, b: View, d: usize) {
        expert_rows::dot_rows(self, out.host(), a.into(), b.into(), d);
    }

    fn scale_rows(&self, x: ViewMut, factors: View, d: usize) {
        expert_rows::scale_rows(self, self.as_output(x), factors.host(), d);
    }

    fn grouped_forward(&self, y: ViewMut, x: View, w: View, groups: &[RowGroup], n: usize, k: usize) {
        grouped_matmul::forward(self, self.as_output(y), x.into(), w.into(), groups, n, k);
    }

    fn grouped_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        grouped_matmul::backward_input(self, self.as_output(dx), dy.into(), w.into(), groups, n, k);
    }

    fn grouped_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    ) {
        grouped_matmul::backward_weight(self, dw.host(), dy.into(), x.into(), groups, n, k);
    }

    fn gelu_forward(&self, y: ViewMut, x: View) {
        gelu::forward(self, self.as_output(y), x.into());
    }

    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View) {
        gelu::backward(self, self.as_output(dx), self.as_output(dy), x.into());
    }

    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        gelu::geglu_forward(self, self.as_output(y), gate_up.into(), m, f);
    }

    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        gelu::geglu_backward(self, self.as_output(dgate_up), self.as_output(dy), gate_up.into(), m, f);
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
        let shape = classifier::ClassifierShape { m, d, v, cap };
        classifier::compute_loss_in_chunks(self, loss.host(), x.into(), w.into(), labels, shape, grads);
    }

    fn add(&self, y: ViewMut, x: View) {
        elementwise::add(self, self.as_output(y), x.into());
    }

    fn scale(&self, y: ViewMut, s: f32) {
        elementwise::scale(self, self.as_output(y), s);
    }

    fn cast(&self, y: ViewMut, x: View) {
        elements::cast(self, y, x.into());
    }

    fn round_stochastically(&self, y: ViewMut, x: View, rounding: &StochasticRounding) {
        rounding.check(&y);
        stochastic_rounding::round_stochastically(self, y.half_bits(), x.host(), *rounding);
    }

    fn add_scalar(&self, y: ViewMut, s: f32) {
        elementwise::add_scalar(self, y.host(), s);
    }

    fn axpby(&self, y: ViewMut, a: f32, x: View, b: f32) {
        elementwise::axpby(self, y.host(), a, x.host(), b);
    }

    fn softcap(&self, y: ViewMut, cap: f32) {
        elementwise::softcap(self, y.host(), cap);
    }

    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize) {
        elementwise::transpose(self, y.host(), x.host(), rows, columns);
    }

    fn dropout(&self, x: ViewMut, dropout: &SampleDropout) {
        elementwise::dropout(self, self.as_output(x), dropout);
    }

    fn sum_squares(&self, x: View) -> f64 {
        reductions::sum_squares(x.host())
    }

    fn nesterov_momentum(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
        optimizers::nesterov_momentum(self, buffer.host(), g.host(), mu, scale);
    }

    fn sum_squares_by_block(&self, out: &mut [f64], x: View) {
        reductions::sum_squares_by_block(self, out, x.host());
    }

    fn adamw(&self, p: ViewMut, g: View, exp_avg: ViewMut, exp_avg_sq: ViewMut, hyper: &AdamWHyperparams) {
        optimizers::adamw(self, p.host(), g.host(), exp_avg.host(), exp_avg_sq.host(), hyper);
    }

    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, hyper: &SgdHyperparams) {
        optimizers::sgd(self, p.host(), g.host(), momentum_buffer.host(), hyper);
    }

    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, hyper: &LionHyperparams) {
        optimizers::lion(self, p.host(), g.host(), exp_avg.host(), hyper);
    }
}
