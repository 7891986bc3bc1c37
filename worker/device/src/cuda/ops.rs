//! Implementation of [`Ops`] on a GPU, and the choice of element types for matmuls.
use super::activation::{self, GateActivation, RopeShape};
use super::matmul::{InputFormat, Matmul, MatrixRef};
use super::{
    Address, Cuda, TensorArg, attention, classifier, dtype_code, elementwise, expect_len, expert_rows, fp8,
    gpu_address, norm, unwrap_or_panic,
};
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::ops::{
    AdamWHyperparams, AttentionShape, ClassifierGrads, Fp8Operand, HeadLayout, LayerNormParams,
    LionHyperparams, NORM_BLOCK_LEN, Ops, RouterBackwardInputs, RouterShape, RowGroup, SampleDropout,
    SgdHyperparams, StochasticRounding, WriteMode,
};

/// Operand or result of a matmul: its address, element type and layout.
#[derive(Clone, Copy)]
pub(super) struct MatmulOperand {
    pub(super) at: Address,
    pub(super) dtype: Dtype,
    /// Number of elements from row to row in memory.
    pub(super) stride: usize,
    /// True if the matrix is stored transposed.
    pub(super) transposed: bool,
}

impl MatmulOperand {
    /// Creates an operand from a view in GPU memory. Panics if the view is in host memory.
    #[track_caller]
    pub(super) fn new(v: View, stride: usize, transposed: bool) -> Self {
        MatmulOperand { at: gpu_address(v), dtype: v.dtype(), stride, transposed }
    }

    /// Returns the operand's address and layout, without its element type.
    pub(super) fn to_matrix_ref(self) -> MatrixRef {
        MatrixRef { at: self.at, stride: self.stride, transposed: self.transposed }
    }

    /// Returns the operand's address and element type as a kernel argument, without its layout.
    fn to_tensor_arg(self) -> TensorArg {
        TensorArg { at: self.at, dtype: dtype_code(self.dtype) }
    }

    /// Returns true if a row does not begin at a multiple of 16 bytes.
    fn is_unaligned(&self) -> bool {
        !self.at.is_multiple_of(16) || !(self.stride * self.dtype.size()).is_multiple_of(16)
    }
}

/// Computes the matmul `c[m, n] (=|+=) a[m, k] · b[k, n]`. `sizes` is `[m, n, k]`.
///
/// cuBLASLt needs operands of one type and a result of that type or f32. If one operand is bf16 and
/// the other f32, the f32 operand is rounded to bf16, so that tensor cores are used. This affects
/// the gradient of the residual stream, which is f32 while weights and activations are bf16.
/// Operands with other combinations of types are converted to f32.
pub(super) fn matmul(
    cuda: &Cuda,
    c: MatmulOperand,
    a: MatmulOperand,
    b: MatmulOperand,
    sizes: [usize; 3],
    write: WriteMode,
) {
    if finish_empty_matmul(cuda, c, sizes, write) {
        return;
    }
    let dtype = select_operand_type(a.dtype, b.dtype);
    if !matmul_with_operand_type(dtype, cuda, c, a, b, sizes, write) {
        matmul_with_operand_type(Dtype::F32, cuda, c, a, b, sizes, write);
    }
}

/// Computes [`matmul`] with both operands converted to `dtype`. Returns false without computing
/// anything if the operands are 16-bit and unaligned and cuBLASLt has no algorithm for them.
fn matmul_with_operand_type(
    dtype: Dtype,
    cuda: &Cuda,
    c: MatmulOperand,
    a: MatmulOperand,
    b: MatmulOperand,
    [m, n, k]: [usize; 3],
    write: WriteMode,
) -> bool {
    // The memory of converted operands lives until the matmul is enqueued.
    let (a, _a_memory) = convert_operand(cuda, a, dtype, [m, k]);
    let (b, _b_memory) = convert_operand(cuda, b, dtype, [k, n]);
    let add = write == WriteMode::Accumulate;
    let request = |c: MatmulOperand, add| {
        let (output, [a, b, c]) = (c.dtype, [a, b, c].map(MatmulOperand::to_matrix_ref));
        Matmul { m, n, k, a, b, c, inputs: InputFormat::Same(dtype), output, add, bias: None }
    };
    let is_direct = c.dtype == Dtype::F32 || c.dtype == dtype;
    let result = if is_direct { c } else { MatmulOperand { dtype: Dtype::F32, ..c } };
    if dtype != Dtype::F32
        && [a, b, result].iter().any(|x| x.is_unaligned())
        && !cuda.has_matmul_algorithm(&request(result, add))
    {
        return false;
    }
    if is_direct {
        cuda.run_matmul(&request(c, add));
    } else {
        run_with_f32_result(cuda, c, m * n, add, |c, add| cuda.run_matmul(&request(c, add)));
    }
    true
}

/// Returns the element type to which a matmul's operands of the types `a` and `b` are converted.
fn select_operand_type(a: Dtype, b: Dtype) -> Dtype {
    match (a, b) {
        _ if a == b => a,
        (Dtype::F32, Dtype::Bf16) | (Dtype::Bf16, Dtype::F32) => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Computes `y[m, n] = a[m, k] · b[k, n] + bias[n]`.
///
/// cuBLASLt adds the bias and rounds the result once if everything has one type, the bias is
/// aligned to 16 bytes, and no matrix is a vector. Otherwise a kernel adds the bias to the rounded
/// result of the matmul.
fn matmul_with_bias(
    cuda: &Cuda,
    y: ViewMut,
    a: MatmulOperand,
    b: MatmulOperand,
    bias: View,
    [m, n, k]: [usize; 3],
) {
    expect_len("matmul with bias", "bias", bias.len(), n);
    let c = MatmulOperand::new(y.as_view(), n, false);
    let run_separately = move || {
        matmul(cuda, c, a, b, [m, n, k], WriteMode::Overwrite);
        norm::bias_forward(cuda, y, bias, m, n);
    };
    let one_type = [b.dtype, c.dtype, bias.dtype()].iter().all(|dtype| *dtype == a.dtype);
    if !one_type || m < 2 || n < 2 || k == 0 || !gpu_address(bias).is_multiple_of(16) {
        return run_separately();
    }
    let (inputs, output, bias) = (InputFormat::Same(a.dtype), c.dtype, Some(gpu_address(bias)));
    let [a, b, c] = [a, b, c].map(MatmulOperand::to_matrix_ref);
    let request = Matmul { m, n, k, a, b, c, inputs, output, add: false, bias };
    if cuda.has_matmul_algorithm(&request) { cuda.run_matmul(&request) } else { run_separately() }
}

/// Handles a matmul that has nothing to compute, because `m`, `n` or `k` is 0. Returns true if so,
/// otherwise returns false without doing anything. If only `k` is 0, the matmul is a matrix of
/// zeros. It is then written to `c`, unless `write` is [`WriteMode::Accumulate`].
pub(super) fn finish_empty_matmul(
    cuda: &Cuda,
    c: MatmulOperand,
    [m, n, k]: [usize; 3],
    write: WriteMode,
) -> bool {
    let len = m * n;
    if len > 0 && k == 0 && write == WriteMode::Overwrite {
        unwrap_or_panic(cuda.gpu.enqueue_zero_fill(c.at, len * c.dtype.size()));
    }
    len == 0 || k == 0
}

/// Runs a matmul that can write only f32, and stores its `len` elements in `c`, which may have
/// another type.
///
/// `run` receives f32 scratch memory with the layout of `c`, and the flag `add`. If `add` is false,
/// `run` must overwrite the scratch memory with the matmul. If `add` is true, the scratch memory
/// contains the values of `c`, and `run` must add the matmul to them. Afterwards the content of the
/// scratch memory is converted to the type of `c` and overwrites `c`.
pub(super) fn run_with_f32_result(
    cuda: &Cuda,
    c: MatmulOperand,
    len: usize,
    add: bool,
    run: impl Fn(MatmulOperand, bool),
) {
    let memory = cuda.alloc_scratch(len * size_of::<f32>());
    let sum = MatmulOperand { at: memory.address(), dtype: Dtype::F32, ..c };
    if add {
        elementwise::convert_elements(cuda, sum.to_tensor_arg(), c.to_tensor_arg(), len);
    }
    run(sum, add);
    elementwise::convert_elements(cuda, c.to_tensor_arg(), sum.to_tensor_arg(), len);
}

/// Converts a matmul operand to the element type `dtype`. Returns the converted operand, and the
/// GPU memory that contains the converted elements. The caller must keep that memory until the
/// matmul is enqueued. Returns `x` itself and no memory if `x` has the type already.
fn convert_operand(
    cuda: &Cuda,
    x: MatmulOperand,
    dtype: Dtype,
    [rows, columns]: [usize; 2],
) -> (MatmulOperand, Option<super::DeviceMemory>) {
    if x.dtype == dtype {
        return (x, None);
    }
    // including the elements between rows
    let (rows, columns) = if x.transposed { (columns, rows) } else { (rows, columns) };
    let len = (rows - 1) * x.stride + columns;
    let memory = cuda.alloc_scratch(len * dtype.size());
    let converted = MatmulOperand { at: memory.address(), dtype, ..x };
    elementwise::convert_elements(cuda, converted.to_tensor_arg(), x.to_tensor_arg(), len);
    (converted, Some(memory))
}

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
