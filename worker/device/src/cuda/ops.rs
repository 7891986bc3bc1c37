//! [`Ops`] on a card.
use super::activation::{self, Gate, Turned};
use super::matmul::{Inputs, Matrix, Product};
use super::{
    Address, Cuda, Tensor, address, attention, classifier, expect_len, flat, fp8, must, norm, number, rows,
};
use crate::mem::{Buf, Dtype, View, ViewMut};
use crate::ops::{
    AdamW, AttentionShape, ClassifierGrads, Dropout, Fp8Matrix, Group, HeadRows, LayerNorm, Lion, NORM_BLOCK,
    Ops, RouterGradient, RouterShape, Sgd, StochasticRounding, Write,
};

/// A matrix of a product.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) at: Address,
    pub(super) dtype: Dtype,
    /// Elements from row to row as it is stored.
    pub(super) stride: usize,
    /// Stored with rows and columns exchanged.
    pub(super) transposed: bool,
}

impl Operand {
    #[track_caller]
    pub(super) fn of(v: View, stride: usize, transposed: bool) -> Self {
        Operand { at: address(v), dtype: v.dtype(), stride, transposed }
    }

    pub(super) fn matrix(self) -> Matrix {
        Matrix { at: self.at, stride: self.stride, transposed: self.transposed }
    }

    fn tensor(self) -> Tensor {
        Tensor { at: self.at, dtype: number(self.dtype) }
    }

    /// Does a row begin elsewhere than at 16 bytes?
    fn is_odd(&self) -> bool {
        !self.at.is_multiple_of(16) || !(self.stride * self.dtype.size()).is_multiple_of(16)
    }
}

/// `c[m, n] (=|+=) a[m, k] · b[k, n]`.
///
/// The library wants operands of one type and a result of that type or f32. Beside a bf16 operand an f32 one is rounded to bf16,
/// or tensor cores would stand still (the gradient of the residual stream is f32, weights and activations aren't). Whatever
/// else is asked for goes through f32.
pub(super) fn product(cuda: &Cuda, c: Operand, a: Operand, b: Operand, sizes: [usize; 3], write: Write) {
    if nothing_to_sum(cuda, c, sizes, write) {
        return;
    }
    let inputs = common_type(a.dtype, b.dtype);
    if !product_of(inputs, cuda, c, a, b, sizes, write) {
        product_of(Dtype::F32, cuda, c, a, b, sizes, write);
    }
}

/// The same, the operands multiplied as `inputs`. False, and nothing done, where these are 16 bits in odd places, for which the library may
/// have no algorithm.
fn product_of(
    inputs: Dtype,
    cuda: &Cuda,
    c: Operand,
    a: Operand,
    b: Operand,
    [m, n, k]: [usize; 3],
    write: Write,
) -> bool {
    let (a_there, b_there) = (of_type(cuda, a, inputs, [m, k]), of_type(cuda, b, inputs, [k, n]));
    let (a, b) = (a_there.0, b_there.0);
    let add = write == Write::Add;
    let asked = |c: Operand, add| {
        let (output, matrices) = (c.dtype, [a, b, c].map(Operand::matrix));
        let ([a, b, c], inputs) = (matrices, Inputs::Same(inputs));
        Product { m, n, k, a, b, c, inputs, output, add, bias: None }
    };
    let is_direct = c.dtype == Dtype::F32 || c.dtype == inputs;
    let to = if is_direct { c } else { Operand { dtype: Dtype::F32, ..c } };
    if inputs != Dtype::F32 && [a, b, to].iter().any(|x| x.is_odd()) && !cuda.suits(&asked(to, add)) {
        return false;
    }
    if is_direct {
        cuda.multiply(&asked(c, add));
    } else {
        through_f32(cuda, c, m * n, add, |c, add| cuda.multiply(&asked(c, add)));
    }
    true
}

/// The type that operands of these types are multiplied in.
fn common_type(a: Dtype, b: Dtype) -> Dtype {
    match (a, b) {
        _ if a == b => a,
        (Dtype::F32, Dtype::Bf16) | (Dtype::Bf16, Dtype::F32) => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// `c[m, n] = a[m, k] · b[k, n] + bias[n]`, rounded once where the library adds the bias itself: everything is of one type, the bias
/// at 16 bytes, and no matrix a vector.
fn product_with_bias(cuda: &Cuda, y: ViewMut, a: Operand, b: Operand, bias: View, [m, n, k]: [usize; 3]) {
    expect_len("product with bias", "bias", bias.len(), n);
    let c = Operand::of(y.as_view(), n, false);
    let apart = move || {
        product(cuda, c, a, b, [m, n, k], Write::Set);
        norm::bias(cuda, y, bias, m, n);
    };
    let one_type = [b.dtype, c.dtype, bias.dtype()].iter().all(|dtype| *dtype == a.dtype);
    if !one_type || m < 2 || n < 2 || k == 0 || !address(bias).is_multiple_of(16) {
        return apart();
    }
    let (inputs, output) = (Inputs::Same(a.dtype), c.dtype);
    let matrices = [a, b, c].map(Operand::matrix);
    let asked = Product {
        m,
        n,
        k,
        a: matrices[0],
        b: matrices[1],
        c: matrices[2],
        inputs,
        output,
        add: false,
        bias: Some(address(bias)),
    };
    if cuda.suits(&asked) { cuda.multiply(&asked) } else { apart() }
}

/// Is there no term to sum? The result is then what it will be.
pub(super) fn nothing_to_sum(cuda: &Cuda, c: Operand, [m, n, k]: [usize; 3], write: Write) -> bool {
    let len = m * n;
    if len > 0 && k == 0 && write == Write::Set {
        must(cuda.card.fill_zero(c.at, len * c.dtype.size()));
    }
    len == 0 || k == 0
}

/// `run`s a product whose result has to be f32, and rounds it to `c`.
pub(super) fn through_f32(cuda: &Cuda, c: Operand, len: usize, add: bool, run: impl Fn(Operand, bool)) {
    let wide = cuda.scratch(len * size_of::<f32>());
    let sum = Operand { at: wide.at(), dtype: Dtype::F32, ..c };
    if add {
        flat::copy(cuda, sum.tensor(), c.tensor(), len);
    }
    run(sum, add);
    flat::copy(cuda, c.tensor(), sum.tensor(), len);
}

/// The operand as this type, and the memory that it lies in where it had to be copied.
fn of_type(
    cuda: &Cuda,
    x: Operand,
    dtype: Dtype,
    [rows, columns]: [usize; 2],
) -> (Operand, Option<super::Memory>) {
    if x.dtype == dtype {
        return (x, None);
    }
    // with what lies between the rows, but for the last
    let (rows, columns) = if x.transposed { (columns, rows) } else { (rows, columns) };
    let len = (rows - 1) * x.stride + columns;
    let memory = cuda.scratch(len * dtype.size());
    let there = Operand { at: memory.at(), dtype, ..x };
    flat::copy(cuda, there.tensor(), x.tensor(), len);
    (there, Some(memory))
}

/// The rows of a group, in elements.
fn part(group: &Group, width: usize) -> std::ops::Range<usize> {
    group.rows.start * width..group.rows.end * width
}

impl Ops for Cuda {
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: Write) {
        expect_len("matmul_forward", "y", y.len(), m * n);
        expect_len("matmul_forward", "x", x.len(), m * k);
        expect_len("matmul_forward", "w", w.len(), n * k);
        let c = Operand::of(y.as_view(), n, false);
        product(self, c, Operand::of(x, k, false), Operand::of(w, k, true), [m, n, k], write);
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
        let Some(bias) = bias else { return self.matmul_forward(y, x, w, m, n, k, Write::Set) };
        expect_len("matmul_bias_forward", "y", y.len(), m * n);
        expect_len("matmul_bias_forward", "x", x.len(), m * k);
        expect_len("matmul_bias_forward", "w", w.len(), n * k);
        let (a, b) = (Operand::of(x, k, false), Operand::of(w, k, true));
        product_with_bias(self, y, a, b, bias, [m, n, k]);
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
        let (a, b) = (Operand::of(x, inp, false), Operand::of(w, out, false));
        product_with_bias(self, y, a, b, bias, [m, out, inp]);
    }

    fn matmul_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        m: usize,
        n: usize,
        k: usize,
        write: Write,
    ) {
        expect_len("matmul_backward_input", "dx", dx.len(), m * k);
        expect_len("matmul_backward_input", "dy", dy.len(), m * n);
        expect_len("matmul_backward_input", "w", w.len(), n * k);
        let c = Operand::of(dx.as_view(), k, false);
        product(self, c, Operand::of(dy, n, false), Operand::of(w, k, false), [m, k, n], write);
    }

    fn matmul_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        m: usize,
        n: usize,
        k: usize,
        write: Write,
    ) {
        expect_len("matmul_backward_weight", "dw", dw.len(), n * k);
        expect_len("matmul_backward_weight", "dy", dy.len(), m * n);
        expect_len("matmul_backward_weight", "x", x.len(), m * k);
        let c = Operand::of(dw.as_view(), k, false);
        product(self, c, Operand::of(dy, n, true), Operand::of(x, k, false), [n, k, m], write);
    }

    fn operand<'a>(&self, x: View<'a>, room: &'a mut Buf) -> View<'a> {
        if (x.dtype(), room.dtype()) != (Dtype::F32, Dtype::Bf16) {
            return x;
        }
        let n = x.len();
        flat::cast(self, room.view_mut().slice(0..n), x);
        room.view().slice(0..n)
    }

    fn fp8_product(
        &self,
        c: ViewMut,
        a: Fp8Matrix,
        b: Fp8Matrix,
        m: usize,
        n: usize,
        k: usize,
        write: Write,
    ) {
        fp8::product(self, c, a, b, [m, n, k], write);
    }

    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize) {
        rows::gather(self, "embedding_forward", x, w, tokens, d);
    }

    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
        rows::embedding_backward(self, dw, dx, tokens, d);
    }

    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32) {
        expect_len("rmsnorm_forward", "x", x.len(), m * d);
        expect_len("rmsnorm_forward", "w", w.len(), d);
        norm::rms(self, y, rstd, x.into(), None, w, m, eps);
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
        norm::rms(self, y, rstd, (&x).into(), Some(delta), w, m, eps);
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
        write: Write,
    ) {
        expect_len("rmsnorm_backward", "w", w.len(), d);
        norm::rms_backward(self, dx, dw, dy, x, w, rstd, m, write);
    }

    fn rmsnorm_heads_forward(&self, x: ViewMut, raw: ViewMut, rstd: ViewMut, w: View, h: HeadRows, eps: f32) {
        norm::heads(self, x, raw, rstd, w, h, eps);
    }

    fn rmsnorm_heads_backward(&self, dx: ViewMut, dw: ViewMut, raw: View, rstd: View, w: View, h: HeadRows) {
        norm::heads_backward(self, dx, dw, raw, rstd, w, h);
    }

    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, given: LayerNorm, m: usize) {
        expect_len("layernorm_forward", "x", x.len(), m * given.w.len());
        norm::layer(self, y, stats, x.into(), None, given, m);
    }

    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        given: LayerNorm,
        m: usize,
    ) {
        expect_len("add_layernorm_forward", "x", x.len(), m * given.w.len());
        norm::layer(self, y, stats, (&x).into(), Some(delta), given, m);
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
        write: Write,
    ) {
        norm::layer_backward(self, dx, [dw, db], dy, x, w, stats, m, write);
    }

    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize) {
        norm::bias(self, y, bias, m, n);
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
        activation::rope(self, x, cos, sin, Turned { b, t, heads, head_dim, stride }, 1.0);
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
        activation::rope(self, dx, cos, sin, Turned { b, t, heads, head_dim, stride }, -1.0);
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
        activation::gated(self, y, gate_up, m, f, Gate::Silu);
    }

    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated_backward(self, dgate_up, dy, gate_up, m, f, Gate::Silu);
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
        rows::router(self, probs, weights, lse, chosen, logits, shape);
    }

    fn router_backward(&self, dlogits: ViewMut, dweights: View, given: RouterGradient, shape: RouterShape) {
        rows::router_backward(self, dlogits, dweights, given, shape);
    }

    fn gather_rows(&self, y: ViewMut, x: View, from: &[u32], d: usize) {
        rows::gather(self, "gather_rows", y, x, from, d);
    }

    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        places: &[u32],
        m: usize,
        d: usize,
        write: Write,
    ) {
        rows::combine(self, y, x, weights, places, m, d, write);
    }

    fn row_dots(&self, out: ViewMut, a: View, b: View, d: usize) {
        rows::dots(self, out, a, b, d);
    }

    fn scale_rows(&self, x: ViewMut, factors: View, d: usize) {
        rows::scale(self, x, factors, d);
    }

    fn grouped_forward(&self, mut y: ViewMut, x: View, w: View, groups: &[Group], n: usize, k: usize) {
        for group in groups {
            let (y, w) = (y.reborrow().slice(part(group, n)), w.slice(group.matrix..group.matrix + n * k));
            self.matmul_forward(y, x.slice(part(group, k)), w, group.rows.len(), n, k, Write::Set);
        }
    }

    fn grouped_backward_input(
        &self,
        mut dx: ViewMut,
        dy: View,
        w: View,
        groups: &[Group],
        n: usize,
        k: usize,
    ) {
        for group in groups {
            let (dx, w) = (dx.reborrow().slice(part(group, k)), w.slice(group.matrix..group.matrix + n * k));
            self.matmul_backward_input(dx, dy.slice(part(group, n)), w, group.rows.len(), n, k, Write::Set);
        }
    }

    fn grouped_backward_weight(
        &self,
        mut dw: ViewMut,
        dy: View,
        x: View,
        groups: &[Group],
        n: usize,
        k: usize,
    ) {
        for group in groups {
            let dw = dw.reborrow().slice(group.matrix..group.matrix + n * k);
            let (dy, x) = (dy.slice(part(group, n)), x.slice(part(group, k)));
            self.matmul_backward_weight(dw, dy, x, group.rows.len(), n, k, Write::Set);
        }
    }

    fn gelu_forward(&self, y: ViewMut, x: View) {
        activation::gelu(self, y, x);
    }

    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View) {
        activation::gelu_backward(self, dx, dy, x);
    }

    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated(self, y, gate_up, m, f, Gate::Gelu);
    }

    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        activation::gated_backward(self, dgate_up, dy, gate_up, m, f, Gate::Gelu);
    }

    fn capped_classifier(
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
        classifier::classifier(self, loss, x, w, labels, classifier::Shape { m, d, v, cap }, grads);
    }

    fn cast(&self, y: ViewMut, x: View) {
        flat::cast(self, y, x);
    }

    fn round_stochastically(&self, y: ViewMut, x: View, draw: &StochasticRounding) {
        draw.check(&y);
        flat::round_stochastically(self, y, x, draw);
    }

    fn add(&self, y: ViewMut, x: View) {
        flat::add(self, y, x);
    }

    fn scale(&self, y: ViewMut, s: f32) {
        flat::scale(self, y, s);
    }

    fn offset(&self, y: ViewMut, s: f32) {
        flat::offset(self, y, s);
    }

    fn blend(&self, y: ViewMut, a: f32, x: View, b: f32) {
        flat::blend(self, y, a, x, b);
    }

    fn softcap(&self, y: ViewMut, cap: f32) {
        flat::softcap(self, y, cap);
    }

    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize) {
        flat::transpose(self, y, x, rows, columns);
    }

    fn dropout(&self, x: ViewMut, d: &Dropout) {
        flat::dropout(self, x, d);
    }

    fn sum_of_squares(&self, x: View) -> f64 {
        flat::norm_blocks(self, &[x]).iter().sum()
    }

    fn nesterov(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
        flat::nesterov(self, buffer, g, mu, scale);
    }

    fn norm_blocks(&self, out: &mut [f64], x: View) {
        expect_len("norm_blocks", "out", out.len(), x.len().div_ceil(NORM_BLOCK));
        out.copy_from_slice(&flat::norm_blocks(self, &[x]));
    }

    fn norm_blocks_of(&self, vectors: &[View]) -> Vec<f64> {
        flat::norm_blocks(self, vectors)
    }

    fn adamw(&self, p: ViewMut, g: View, exp_avg: ViewMut, exp_avg_sq: ViewMut, h: &AdamW) {
        flat::adamw(self, p, g, exp_avg, exp_avg_sq, h);
    }

    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, h: &Sgd) {
        flat::sgd(self, p, g, momentum_buffer, h);
    }

    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, h: &Lion) {
        flat::lion(self, p, g, exp_avg, h);
    }
}
