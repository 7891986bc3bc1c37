//! The CPU backend.
//!
//! Instruction set and threads are chosen at run time; neither changes a bit of any result (an instruction set without
//! fused multiply-add excepted), and neither does the machine's C library: logarithms and powers are our own build's.
mod attention;
mod attention_backward;
mod attention_dropout;
mod bias;
mod classifier;
mod elementwise;
mod embedding;
mod flat;
mod fp8;
mod gelu;
mod grouped;
mod half;
mod head_norm;
mod kernel;
mod layer_norm;
mod matmul;
mod norm;
mod pack;
mod peak;
mod pool;
mod rope;
mod router;
mod rows;
mod simd;
mod stochastic;
mod storage;
mod swiglu;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::mem::{View, ViewMut};
use crate::ops::{
    AdamW, AttentionShape, ClassifierGrads, Dropout, Fp8Matrix, Group, HeadRows, LayerNorm, Lion, Ops,
    RouterGradient, RouterShape, Sgd, StochasticRounding, Write,
};
pub use classifier::classifier_rows;
use half::Out;
use matmul::{Product, product_bias, product_to};
use pack::Operand;
use pool::{Parts, Pool, Scratch};
use simd::Level;
use std::ops::Range;

/// Ops on host memory.
pub struct Cpu {
    level: Level,
    pool: Pool,
    scratch: Scratch,
}

impl Cpu {
    /// A backend that computes on `threads` threads: the caller's and `threads − 1` of its own. With 1 everything runs
    /// on the caller's.
    ///
    /// Calls from several threads at once are sound; one of them gets the helpers, the others run alone.
    pub fn new(threads: usize) -> Self {
        assert!(threads > 0, "a CPU backend needs a thread");
        Cpu { level: Level::detect(), pool: Pool::new(threads), scratch: Scratch::default() }
    }

    /// A backend for each instruction set of this machine, best first; the first is what [`Cpu::new`] gives.
    pub fn each_level(threads: usize) -> Vec<Self> {
        let backend = |level| Cpu { level, ..Cpu::new(threads) };
        Level::available().into_iter().map(backend).collect()
    }

    /// Instruction set and threads, for the log: `avx512, 2 threads`.
    pub fn describe(&self) -> String {
        let threads = self.pool.threads();
        let s = if threads == 1 { "" } else { "s" };
        format!("{}, {threads} thread{s}", self.level.name())
    }

    /// Threads that ops run on.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Bytes of scratch memory held at the moment.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// Runs `work` on ranges that cover `0..rows`; each range holds about 16 Ki elements when a row costs as much as
    /// `width` elements.
    fn by_rows(&self, rows: usize, width: usize, work: impl Fn(Range<usize>) + Sync) {
        let per_task = ((16 << 10) / width.max(1)).max(1);
        self.pool.run(rows.div_ceil(per_task), &|task| {
            work(task * per_task..((task + 1) * per_task).min(rows));
        });
    }

    /// `y[m,n] = a·b + bias`
    fn with_bias(
        &self,
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
        let shape = Product { m, n, k, ldc: n, write: Write::Set };
        product_bias(self, self.out(y), a, b, bias.map(Into::into), shape);
    }

    /// Elements that an op writes, of whatever type.
    fn out<'a>(&'a self, v: ViewMut<'a>) -> Out<'a> {
        Out::new(self, v)
    }

    /// As [`Cpu::by_rows`] for flat vectors.
    fn by_elements(&self, len: usize, work: impl Fn(Range<usize>) + Sync) {
        self.by_rows(len, 1, work);
    }
}

/// Stops the program when an argument doesn't have the length that the shape demands.
#[track_caller]
fn expect_len(op: &str, name: &str, len: usize, want: usize) {
    assert!(len == want, "{op}: {name} has {len} elements, the shape asks for {want}");
}

fn given(norm: LayerNorm<'_>) -> layer_norm::Norm<'_> {
    layer_norm::Norm { w: norm.w.into(), b: norm.b.into(), eps: norm.eps }
}

impl Ops for Cpu {
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: Write) {
        expect_len("matmul_forward", "y", y.len(), m * n);
        expect_len("matmul_forward", "x", x.len(), m * k);
        expect_len("matmul_forward", "w", w.len(), n * k);
        let a = Operand { data: x.into(), row: k, depth: 1 };
        let b = Operand { data: w.into(), row: k, depth: 1 };
        product_to(self, self.out(y), a, b, Product { m, n, k, ldc: n, write });
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
        let a = Operand { data: dy.into(), row: n, depth: 1 };
        let b = Operand { data: w.into(), row: 1, depth: k };
        product_to(self, self.out(dx), a, b, Product { m, n: k, k: n, ldc: k, write });
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
        let a = Operand { data: dy.into(), row: 1, depth: n };
        let b = Operand { data: x.into(), row: 1, depth: k };
        product_to(self, self.out(dw), a, b, Product { m: n, n: k, k: m, ldc: k, write });
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
        let a = Operand { data: x.into(), row: k, depth: 1 };
        let b = Operand { data: w.into(), row: k, depth: 1 };
        self.with_bias("matmul_bias_forward", y, a, b, bias, (m, n, k));
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
        let a = Operand { data: x.into(), row: inp, depth: 1 };
        let b = Operand { data: w.into(), row: 1, depth: out };
        self.with_bias("conv1d_bias_forward", y, a, b, Some(bias), (m, out, inp));
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
        embedding::forward(self, self.out(x), w.into(), tokens, d);
    }

    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
        embedding::backward(self, dw.host(), dx.into(), tokens, d);
    }

    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32) {
        norm::forward(self, self.out(y), rstd.host(), x.into(), w.into(), m, d, eps);
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
        norm::add_forward(self, self.out(y), rstd.host(), self.out(x), delta.into(), w.into(), m, d, eps);
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
        let (dx, dy, x, w) = (self.out(dx), dy.into(), x.into(), w.into());
        norm::backward(self, dx, dw.host(), dy, x, w, rstd.host(), m, d, write);
    }

    fn rmsnorm_heads_forward(&self, x: ViewMut, raw: ViewMut, rstd: ViewMut, w: View, h: HeadRows, eps: f32) {
        head_norm::forward(self, self.out(x), self.out(raw), rstd.host(), w.into(), h, eps);
    }

    fn rmsnorm_heads_backward(&self, dx: ViewMut, dw: ViewMut, raw: View, rstd: View, w: View, h: HeadRows) {
        head_norm::backward(self, self.out(dx), dw.host(), raw.into(), rstd.host(), w.into(), h);
    }

    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNorm, m: usize) {
        layer_norm::forward(self, self.out(y), stats.host(), x.into(), given(norm), m);
    }

    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNorm,
        m: usize,
    ) {
        let (y, x) = (self.out(y), self.out(x));
        layer_norm::add_forward(self, y, stats.host(), x, delta.into(), given(norm), m);
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
        let grads = [dw.host(), db.host()];
        let (dx, dy, x, w) = (self.out(dx), dy.into(), x.into(), w.into());
        layer_norm::backward(self, dx, grads, dy, x, w, stats.host(), m, write);
    }

    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize) {
        bias::forward(self, self.out(y), bias.into(), m, n);
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
        let shape = rope::Shape { b, t, heads, head_dim, stride };
        rope::rotate(self, self.out(x), cos.host(), sin.host(), shape, 1.0);
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
        let shape = rope::Shape { b, t, heads, head_dim, stride };
        rope::rotate(self, self.out(dx), cos.host(), sin.host(), shape, -1.0);
    }

    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape) {
        attention::forward(self, self.out(o), lse.host(), qkv.into(), starts, shape);
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
        let given = attention_backward::Given {
            d_o: d_o.into(),
            o: o.into(),
            lse: lse.host(),
            qkv: qkv.into(),
            starts,
        };
        attention_backward::backward(self, self.out(dqkv), given, shape);
    }

    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        swiglu::forward(self, self.out(y), gate_up.into(), m, f);
    }

    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        swiglu::backward(self, self.out(dgate_up), self.out(dy), gate_up.into(), m, f);
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
        let out = router::Out { probs: probs.host(), weights: weights.host(), lse: lse.host(), chosen };
        router::forward(self, out, logits.host(), shape);
    }

    fn router_backward(&self, dlogits: ViewMut, dweights: View, given: RouterGradient, shape: RouterShape) {
        router::backward(self, dlogits.host(), dweights.host(), given, shape);
    }

    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize) {
        rows::gather(self, self.out(y), x.into(), rows, d);
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
        let sum = rows::Sum { x: x.into(), weights: weights.map(View::host), places, d, write };
        rows::combine(self, self.out(y), m, sum);
    }

    fn row_dots(&self, out: ViewMut, a: View, b: View, d: usize) {
        rows::dots(self, out.host(), a.into(), b.into(), d);
    }

    fn scale_rows(&self, x: ViewMut, factors: View, d: usize) {
        rows::scale(self, self.out(x), factors.host(), d);
    }

    fn grouped_forward(&self, y: ViewMut, x: View, w: View, groups: &[Group], n: usize, k: usize) {
        grouped::forward(self, self.out(y), x.into(), w.into(), groups, n, k);
    }

    fn grouped_backward_input(&self, dx: ViewMut, dy: View, w: View, groups: &[Group], n: usize, k: usize) {
        grouped::backward_input(self, self.out(dx), dy.into(), w.into(), groups, n, k);
    }

    fn grouped_backward_weight(&self, dw: ViewMut, dy: View, x: View, groups: &[Group], n: usize, k: usize) {
        grouped::backward_weight(self, dw.host(), dy.into(), x.into(), groups, n, k);
    }

    fn gelu_forward(&self, y: ViewMut, x: View) {
        gelu::forward(self, self.out(y), x.into());
    }

    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View) {
        gelu::backward(self, self.out(dx), self.out(dy), x.into());
    }

    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize) {
        gelu::gated_forward(self, self.out(y), gate_up.into(), m, f);
    }

    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize) {
        gelu::gated_backward(self, self.out(dgate_up), self.out(dy), gate_up.into(), m, f);
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
        let shape = classifier::Shape { m, d, v, cap };
        classifier::classifier(self, loss.host(), x.into(), w.into(), labels, shape, grads);
    }

    fn add(&self, y: ViewMut, x: View) {
        flat::add(self, self.out(y), x.into());
    }

    fn scale(&self, y: ViewMut, s: f32) {
        flat::scale(self, self.out(y), s);
    }

    fn cast(&self, y: ViewMut, x: View) {
        half::cast(self, y, x.into());
    }

    fn round_stochastically(&self, y: ViewMut, x: View, draw: &StochasticRounding) {
        draw.check(&y);
        stochastic::round_stochastically(self, y.halves(), x.host(), *draw);
    }

    fn offset(&self, y: ViewMut, s: f32) {
        elementwise::offset(self, y.host(), s);
    }

    fn blend(&self, y: ViewMut, a: f32, x: View, b: f32) {
        elementwise::blend(self, y.host(), a, x.host(), b);
    }

    fn softcap(&self, y: ViewMut, cap: f32) {
        elementwise::softcap(self, y.host(), cap);
    }

    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize) {
        elementwise::transpose(self, y.host(), x.host(), rows, columns);
    }

    fn dropout(&self, x: ViewMut, d: &Dropout) {
        elementwise::dropout(self, self.out(x), d);
    }

    fn sum_of_squares(&self, x: View) -> f64 {
        elementwise::sum_of_squares(x.host())
    }

    fn nesterov(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32) {
        elementwise::nesterov(self, buffer.host(), g.host(), mu, scale);
    }

    fn norm_blocks(&self, out: &mut [f64], x: View) {
        flat::norm_blocks(self, out, x.host());
    }

    fn adamw(&self, p: ViewMut, g: View, exp_avg: ViewMut, exp_avg_sq: ViewMut, h: &AdamW) {
        flat::adamw(self, p.host(), g.host(), exp_avg.host(), exp_avg_sq.host(), h);
    }

    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, h: &Sgd) {
        flat::sgd(self, p.host(), g.host(), momentum_buffer.host(), h);
    }

    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, h: &Lion) {
        flat::lion(self, p.host(), g.host(), exp_avg.host(), h);
    }
}
