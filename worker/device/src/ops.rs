//! The operations a model is made of: each forward with its backward directly below, shapes beside the arguments.
//!
//! All matrices are row-major. Weights lie as Hugging Face stores them: `w[out, in]`. Nothing here allocates after
//! warm-up except through the scratch that the implementation keeps.
//!
//! **Element types.** Activations, their gradients and weights may be `f32` or 16 bits ([`crate::Dtype`]), each argument by
//! itself. An op computes in `f32` and rounds its result once. Statistics (`rstd`, `lse`, `loss`), tables, what a
//! router computes, gradients of weights and optimizer states are `f32`.
//!
//! **Determinism.** The result of every op is a function of its arguments alone: bit-equal for any number of threads
//! and for any alignment of the buffers. Reductions over rows have one fixed shape.
mod shapes;

use crate::fp8::Fp8;
use crate::mem::{Buf, View, ViewMut};
use crate::storage::Storage;
pub use shapes::{
    AdamW, AttentionDropout, AttentionShape, ClassifierGrads, Dropout, FP8_COLUMNS, Fp8Matrix, Group,
    HeadRows, IGNORE, LayerNorm, Lion, NORM_BLOCK, RouterGradient, RouterShape, Sgd, StochasticRounding,
    Write,
};

/// What every backend implements.
pub trait Ops: Storage {
    // --- matmul: y = x·wᵀ and its two backward products -------------------------------------------------------------

    /// `y[m,n] (=|+=) x[m,k] · w[n,k]ᵀ`
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: Write);
    /// `dx[m,k] (=|+=) dy[m,n] · w[n,k]`
    fn matmul_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        m: usize,
        n: usize,
        k: usize,
        write: Write,
    );
    /// `dw[n,k] (=|+=) dy[m,n]ᵀ · x[m,k]`
    fn matmul_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        m: usize,
        n: usize,
        k: usize,
        write: Write,
    );

    /// `y[m,n] = x[m,k] · w[n,k]ᵀ + bias[n]`: as both ops one after the other, but rounded once.
    fn matmul_bias_forward(
        &self,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: Option<View>,
        m: usize,
        n: usize,
        k: usize,
    ) {
        self.matmul_forward(y.reborrow(), x, w, m, n, k, Write::Set);
        if let Some(bias) = bias {
            self.bias_forward(y, bias, m, n);
        }
    }

    // --- the same for a weight stored as `w[in, out]` (GPT-2's Conv1D) -----------------------------------------------

    /// `y[m,out] = x[m,inp] · w[inp,out]`
    fn conv1d_forward(&self, y: ViewMut, x: View, w: View, m: usize, inp: usize, out: usize) {
        self.matmul_backward_input(y, x, w, m, inp, out, Write::Set);
    }
    /// `y[m,out] = x[m,inp] · w[inp,out] + bias[out]`: as both ops one after the other, but rounded once.
    fn conv1d_bias_forward(
        &self,
        mut y: ViewMut,
        x: View,
        w: View,
        bias: View,
        m: usize,
        inp: usize,
        out: usize,
    ) {
        self.conv1d_forward(y.reborrow(), x, w, m, inp, out);
        self.bias_forward(y, bias, m, out);
    }
    /// `dx[m,inp] = dy[m,out] · w[inp,out]ᵀ`
    fn conv1d_backward_input(&self, dx: ViewMut, dy: View, w: View, m: usize, inp: usize, out: usize) {
        self.matmul_forward(dx, dy, w, m, inp, out, Write::Set);
    }
    /// `dw[inp,out] = x[m,inp]ᵀ · dy[m,out]`
    fn conv1d_backward_weight(&self, dw: ViewMut, dy: View, x: View, m: usize, inp: usize, out: usize) {
        self.matmul_backward_weight(dw, x, dy, m, inp, out, Write::Set);
    }

    // --- products in fp8 --------------------------------------------------------------------------------------------

    /// `c[m,n] (=|+=) a[m,k] · b[k,n]`, `n` a multiple of [`FP8_COLUMNS`], operands not both E5M2. Each operand is divided by its
    /// scale ([`crate::Fp8::scale`] of its largest finite magnitude) and rounded to its kind, products of such numbers are summed in
    /// `f32`, and the sum is multiplied by both scales. What isn't finite stays so: NaN and in E4M3, which has no infinity,
    /// infinities, too, make NaN of every result that they are a term of.
    fn fp8_product(&self, c: ViewMut, a: Fp8Matrix, b: Fp8Matrix, m: usize, n: usize, k: usize, write: Write);

    // --- embedding ----------------------------------------------------------------------------------------------

    /// `x[m,d] = w[tokens[m], d]`; every token is below the number of rows (checked by the caller).
    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize);
    /// `dw[tokens[m], d] += dx[m,d]`, summed in the order of `m`.
    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize);

    // --- RMSNorm ------------------------------------------------------------------------------------------------

    /// `y[m,d] = x · rstd · w`, `rstd[m] = 1/√(mean(x²) + eps)`
    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32);
    /// Residual add and norm in one pass: `x[m,d] += delta[m,d]` in place, then as above.
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
    );
    /// `dx[m,d] (=|+=) …`, `dw[d] += …`
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
    );

    /// RMSNorm of each head alone, in place on `x[rows, stride]`, with one weight `w[head_dim]` for all of them. What the
    /// heads were is left in `raw[rows, heads·head_dim]`, and 1/rms of each in `rstd[rows, heads]`.
    fn rmsnorm_heads_forward(&self, x: ViewMut, raw: ViewMut, rstd: ViewMut, w: View, h: HeadRows, eps: f32);
    /// In place on `dx[rows, stride]`: gradient of the normed heads in, of the heads before out. `dw[head_dim] += …`
    fn rmsnorm_heads_backward(&self, dx: ViewMut, dw: ViewMut, raw: View, rstd: View, w: View, h: HeadRows);

    // --- LayerNorm --------------------------------------------------------------------------------------------------

    /// `y[m,d] = (x − mean)·rstd·w + b`, `rstd = 1/√(mean((x − mean)²) + eps)`; `stats[m,2]` keeps mean and rstd of
    /// each row.
    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNorm, m: usize);
    /// Residual add and norm in one pass: `x[m,d] += delta[m,d]` in place, then as above.
    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNorm,
        m: usize,
    );
    /// `dx[m,d] (=|+=) …`, `dw[d] += …`, `db[d] += …`
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
    );

    // --- bias ---------------------------------------------------------------------------------------------------

    /// `y[m,n] += bias[n]`
    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize);
    /// `dbias[n] += Σ_m dy[m,n]`
    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize);

    // --- rotary position embedding (Hugging Face "rotate half") -----------------------------------------------------

    /// In place on `x`, `b·t` rows of `stride` elements whose first `heads·head_dim` are rotated; `cos`, `sin`: `[t, head_dim/2]`.
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
    );
    /// The inverse rotation, in place on the gradient.
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
    );

    // --- attention ------------------------------------------------------------------------------------------------

    /// Causal grouped-query attention, memory linear in `t`.
    ///
    /// `qkv[b·t, (heads + 2·kv_heads)·head_dim]` holds q, then k, then v in each row; `o[b·t, heads·head_dim]`;
    /// `lse[b, heads, t]` is kept for the backward. `starts[b·t]`: position in its sequence of the first token that
    /// this token may attend to (its document's start; all 0 without packing). `lse` is of all probabilities, dropped or not.
    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape);
    /// `dqkv` is overwritten; same layout as `qkv`.
    fn attention_backward(
        &self,
        dqkv: ViewMut,
        d_o: View,
        o: View,
        lse: View,
        qkv: View,
        starts: &[u32],
        shape: AttentionShape,
    );

    /// A gradient as this backend's products take it: itself, or rounded to the type of `room`, which is as long, once for
    /// several products.
    fn operand<'a>(&self, x: View<'a>, room: &'a mut Buf) -> View<'a> {
        let _ = room;
        x
    }

    // --- SwiGLU ---------------------------------------------------------------------------------------------------

    /// `y[m,f] = silu(gate) · up`; `gate_up[m, 2f]` holds gate, then up in each row.
    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize);
    /// `dgate_up` is overwritten; `dy` becomes `y`, which the next gradient needs and nobody kept.
    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize);

    // --- experts ------------------------------------------------------------------------------------------------

    /// `probs[m, experts]` is the softmax of `logits`, `lse[m]` its log-sum-exp; `chosen[m, per_token]` are the experts with
    /// the largest probabilities, best first and of equal ones the lower number first, `weights[m, per_token]` theirs.
    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen: &mut [u32],
        logits: View,
        shape: RouterShape,
    );
    /// `dlogits` is overwritten. The choice itself has no gradient.
    fn router_backward(&self, dlogits: ViewMut, dweights: View, given: RouterGradient, shape: RouterShape);

    /// `y[i, d] = x[rows[i], d]`
    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize);
    /// `y[m, d] (=|+=) Σ_k weights[m, k] · x[places[m, k], d]`, in the order of `k`; without weights they are 1.
    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        places: &[u32],
        m: usize,
        d: usize,
        write: Write,
    );
    /// `out[m] = Σ_i a[m, i] · b[m, i]`
    fn row_dots(&self, out: ViewMut, a: View, b: View, d: usize);
    /// `x[m, d] *= factors[m]`
    fn scale_rows(&self, x: ViewMut, factors: View, d: usize);

    /// Of each group: `y[rows, n] = x[rows, k] · w[n, k]ᵀ`, where `w` begins at the group's matrix. A group without rows costs
    /// nothing.
    fn grouped_forward(&self, y: ViewMut, x: View, w: View, groups: &[Group], n: usize, k: usize);
    /// Of each group: `dx[rows, k] = dy[rows, n] · w[n, k]`
    fn grouped_backward_input(&self, dx: ViewMut, dy: View, w: View, groups: &[Group], n: usize, k: usize);
    /// Of each group: `dw[n, k] = dy[rows, n]ᵀ · x[rows, k]`, zeros without rows; what lies between the matrices stays.
    fn grouped_backward_weight(&self, dw: ViewMut, dy: View, x: View, groups: &[Group], n: usize, k: usize);

    // --- GELU, tanh form --------------------------------------------------------------------------------------------

    /// `y = ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, element by element.
    fn gelu_forward(&self, y: ViewMut, x: View);
    /// `dx` is overwritten; `dy` becomes `y`.
    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View);
    /// `y[m,f] = gelu(gate) · up`; `gate_up[m, 2f]` holds gate, then up in each row.
    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize);
    /// `dgate_up` is overwritten; `dy` becomes `y`.
    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize);

    // --- head and loss ----------------------------------------------------------------------------------------------

    /// Cross-entropy of `x[m,d]·w[v,d]ᵀ`, in chunks of rows so that the logits never exist whole.
    ///
    /// `loss[m]` gets each row's loss (0 where `labels[m] == IGNORE`). When `grads` is given, also
    /// `dx[m,d] = Σ`, `dw[v,d] (=|+=)` with dlogits multiplied by `scale`.
    fn classifier(
        &self,
        loss: ViewMut,
        x: View,
        w: View,
        labels: &[u32],
        m: usize,
        d: usize,
        v: usize,
        grads: Option<ClassifierGrads>,
    ) {
        self.capped_classifier(loss, x, w, labels, m, d, v, None, grads);
    }
    /// As [`Ops::classifier`], where a logit l becomes `cap·tanh(l / cap)` first.
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
    );
    /// `logits[m,v]` written whole, for inference and tests.
    fn logits(&self, logits: ViewMut, x: View, w: View, m: usize, d: usize, v: usize) {
        self.matmul_forward(logits, x, w, m, v, d, Write::Set);
    }

    // --- flat vectors -------------------------------------------------------------------------------------------------

    /// `y = x`, rounded to the nearest (ties to even) where `y` is narrower, widened exactly where it is wider.
    fn cast(&self, y: ViewMut, x: View);
    /// `y = x`, `f32` to bf16, by [`StochasticRounding`]: the expected value is `x`. What bf16 has is not changed, infinities and
    /// NaN included; nothing finite becomes infinite.
    fn round_stochastically(&self, y: ViewMut, x: View, draw: &StochasticRounding);
    /// `y += x`
    fn add(&self, y: ViewMut, x: View);
    /// `y *= s`
    fn scale(&self, y: ViewMut, s: f32);
    /// `y += s`
    fn offset(&self, y: ViewMut, s: f32);
    /// `y = a·y + b·x`, each product and the sum rounded.
    fn blend(&self, y: ViewMut, a: f32, x: View, b: f32);
    /// `y = cap·tanh(y / cap)`
    fn softcap(&self, y: ViewMut, cap: f32);
    /// `y[columns, rows] = x[rows, columns]ᵀ`
    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize);
    /// Zeros what is dropped, scales the rest.
    fn dropout(&self, x: ViewMut, d: &Dropout);
    /// Sum of squares in f64.
    fn sum_of_squares(&self, x: View) -> f64;
    /// Momentum of a gradient g' = scale·g: `buffer += (1 − mu)·(g' − buffer)`, and Nesterov's step ahead in place of the
    /// gradient: `g = g' + mu·(buffer − g')`.
    fn nesterov(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32);
    /// Sum of squares of each consecutive [`NORM_BLOCK`] elements (the last may be short), each in one fixed order, in f64.
    fn norm_blocks(&self, out: &mut [f64], x: View);
    /// [`Ops::norm_blocks`] of several vectors, one after the other.
    fn norm_blocks_of(&self, vectors: &[View]) -> Vec<f64> {
        let count = |x: &View| x.len().div_ceil(NORM_BLOCK);
        let mut all = vec![0.0; vectors.iter().map(count).sum()];
        let mut rest = &mut all[..];
        for x in vectors {
            let (out, after) = rest.split_at_mut(count(x));
            self.norm_blocks(out, *x);
            rest = after;
        }
        all
    }
    /// One AdamW update of a flat range.
    fn adamw(&self, p: ViewMut, g: View, exp_avg: ViewMut, exp_avg_sq: ViewMut, h: &AdamW);
    /// One SGD update of a flat range; `momentum_buffer` is empty when momentum is 0.
    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, h: &Sgd);
    /// One Lion update of a flat range.
    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, h: &Lion);
}

/// Stops the program when a product in fp8 isn't one that every backend has.
#[track_caller]
pub(crate) fn check_fp8(c: usize, a: &Fp8Matrix, b: &Fp8Matrix, [m, n, k]: [usize; 3]) {
    assert!(n.is_multiple_of(FP8_COLUMNS), "fp8_product: {n} columns are no multiple of {FP8_COLUMNS}");
    assert!((a.kind, b.kind) != (Fp8::E5M2, Fp8::E5M2), "fp8_product: both operands are E5M2");
    for (name, len, want) in [("c", c, m * n), ("a", a.x.len(), m * k), ("b", b.x.len(), k * n)] {
        assert!(len == want, "fp8_product: {name} has {len} elements, the shape asks for {want}");
    }
}
