//! [`Ops`]: the operations of which models and optimizers consist. The method for the backward pass
//! of an op follows the method for its forward pass.
//!
//! Matrices are row-major, and `y[m, n]` denotes a matrix of `m` rows and `n` columns. Weights have
//! the layout of Hugging Face, `w[out, in]`. Once its scratch memory is allocated, an op allocates
//! nothing.
//!
//! **Element types.** Activations, their gradients and weights may be `f32` or 16 bits
//! ([`crate::Dtype`]), each argument independently. An op computes in `f32` and rounds its result
//! once, to nearest, ties to even. Statistics (`rstd`, `lse`, `loss`), the tables of rotary
//! embeddings, outputs of the router, gradients of weights, and optimizer states are `f32`.
//!
//! **Determinism.** The result of an op depends only on its arguments. It is bit-equal for any
//! number of threads and any alignment of the buffers, because every sum has one fixed order.
//!
//! **Errors.** Ops return no errors. A failure is recorded in the backend's status
//! ([`Storage::status`]). A wrong length or type is a bug, and panics.
mod shapes;

use crate::buffer::{Buf, View, ViewMut};
use crate::fp8::Fp8Format;
use crate::storage::Storage;
pub use shapes::{
    AdamWHyperparams, AttentionDropout, AttentionShape, ClassifierGrads, FP8_COLUMN_MULTIPLE, Fp8Operand,
    HeadLayout, IGNORE_LABEL, LayerNormParams, LionHyperparams, NORM_BLOCK_LEN, RouterBackwardInputs,
    RouterShape, RowGroup, SampleDropout, SgdHyperparams, StochasticRounding, WriteMode,
};

/// The operations that every backend implements: the CPU ([`crate::Cpu`]) and NVIDIA GPUs
/// ([`crate::Cuda`]).
pub trait Ops: Storage {
    // --- matmul ----------------------------------------------------------------------------------

    /// Computes a linear layer without bias: `y[m,n] (=|+=) x[m,k] · w[n,k]ᵀ`.
    fn matmul_forward(&self, y: ViewMut, x: View, w: View, m: usize, n: usize, k: usize, write: WriteMode);
    /// Computes the gradient of a linear layer's input: `dx[m,k] (=|+=) dy[m,n] · w[n,k]`.
    fn matmul_backward_input(
        &self,
        dx: ViewMut,
        dy: View,
        w: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    );
    /// Computes the gradient of a linear layer's weight: `dw[n,k] (=|+=) dy[m,n]ᵀ · x[m,k]`.
    fn matmul_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    );

    /// Computes a linear layer: `y[m,n] = x[m,k] · w[n,k]ᵀ + bias[n]`. Without `bias`, only the
    /// matmul is computed. A CPU rounds the result once, after the bias was added.
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
        self.matmul_forward(y.reborrow(), x, w, m, n, k, WriteMode::Overwrite);
        if let Some(bias) = bias {
            self.bias_forward(y, bias, m, n);
        }
    }

    // --- matmul with a weight stored as `w[in, out]`: GPT-2's Conv1D -----------------------------

    /// Computes a Conv1D layer without bias: `y[m,out] = x[m,inp] · w[inp,out]`.
    fn conv1d_forward(&self, y: ViewMut, x: View, w: View, m: usize, inp: usize, out: usize) {
        self.matmul_backward_input(y, x, w, m, inp, out, WriteMode::Overwrite);
    }
    /// Computes a Conv1D layer: `y[m,out] = x[m,inp] · w[inp,out] + bias[out]`, rounded once after
    /// the bias was added.
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
    /// Computes the gradient of a Conv1D layer's input: `dx[m,inp] = dy[m,out] · w[inp,out]ᵀ`.
    fn conv1d_backward_input(&self, dx: ViewMut, dy: View, w: View, m: usize, inp: usize, out: usize) {
        self.matmul_forward(dx, dy, w, m, inp, out, WriteMode::Overwrite);
    }
    /// Computes the gradient of a Conv1D layer's weight: `dw[inp,out] = x[m,inp]ᵀ · dy[m,out]`.
    fn conv1d_backward_weight(&self, dw: ViewMut, dy: View, x: View, m: usize, inp: usize, out: usize) {
        self.matmul_backward_weight(dw, x, dy, m, inp, out, WriteMode::Overwrite);
    }

    // --- matmul in fp8 ---------------------------------------------------------------------------

    /// Computes an fp8 matmul: `c[m,n] (=|+=) a[m,k] · b[k,n]`.
    ///
    /// Each operand is divided by its scale and rounded to its format. The scale is
    /// [`Fp8Format::compute_scale`] of the largest finite magnitude of the operand. The terms are
    /// summed in `f32`, and the sum is multiplied by both scales. An element of `c` is NaN if a NaN
    /// is among its terms. E4M3 has no infinity, so an infinite element of an E4M3 operand counts
    /// as NaN.
    ///
    /// Panics unless `n` is a multiple of [`FP8_COLUMN_MULTIPLE`] and at most one operand is E5M2.
    fn fp8_matmul(
        &self,
        c: ViewMut,
        a: Fp8Operand,
        b: Fp8Operand,
        m: usize,
        n: usize,
        k: usize,
        write: WriteMode,
    );

    // --- embedding -------------------------------------------------------------------------------

    /// Looks up token embeddings: `x[m,d] = w[tokens[m], d]`. Every token must be below the number
    /// of rows of `w`.
    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize);
    /// Adds the gradient of the embedding's weight: `dw[tokens[m], d] += dx[m,d]`, in the order of
    /// `m`.
    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize);

    // --- RMSNorm ---------------------------------------------------------------------------------

    /// Computes RMSNorm (Zhang and Sennrich, 2019) of each row: `y[m,d] = x·rstd·w`, where
    /// `rstd[m] = 1/√(mean(x²) + eps)`.
    fn rmsnorm_forward(&self, y: ViewMut, rstd: ViewMut, x: View, w: View, m: usize, d: usize, eps: f32);
    /// Adds `x[m,d] += delta[m,d]` in place, then computes [`Ops::rmsnorm_forward`] of the rounded
    /// sum.
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
    /// Computes the gradients of RMSNorm. With x̂ = x·rstd and g = dy·w:
    /// `dx[m,d] (=|+=) rstd·(g − x̂·mean(g·x̂))` and `dw[d] += Σ_m dy·x̂`.
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
    );

    /// Computes RMSNorm of each head separately, in place on `x[rows, stride]`, with one weight
    /// `w[head_dim]` for all heads. Stores the heads before the norm in `raw[rows, heads·head_dim]`
    /// and the reciprocal root mean square of each head in `rstd[rows, heads]`.
    fn rmsnorm_heads_forward(
        &self,
        x: ViewMut,
        raw: ViewMut,
        rstd: ViewMut,
        w: View,
        layout: HeadLayout,
        eps: f32,
    );
    /// Computes the gradients of [`Ops::rmsnorm_heads_forward`]. Replaces the gradient of the
    /// normalized heads in `dx[rows, stride]` by the gradient of `raw`, and adds `dw[head_dim] += Σ
    /// dy·x̂` over all rows and heads.
    fn rmsnorm_heads_backward(
        &self,
        dx: ViewMut,
        dw: ViewMut,
        raw: View,
        rstd: View,
        w: View,
        layout: HeadLayout,
    );

    // --- LayerNorm -------------------------------------------------------------------------------

    /// Computes LayerNorm of each row: `y[m,d] = (x − mean)·rstd·w + b`, where
    /// `rstd = 1/√(mean((x − mean)²) + eps)`. Stores mean and rstd of each row in `stats[m,2]`.
    fn layernorm_forward(&self, y: ViewMut, stats: ViewMut, x: View, norm: LayerNormParams, m: usize);
    /// Adds `x[m,d] += delta[m,d]` in place, then computes [`Ops::layernorm_forward`] of the
    /// rounded sum.
    fn add_layernorm_forward(
        &self,
        y: ViewMut,
        stats: ViewMut,
        x: ViewMut,
        delta: View,
        norm: LayerNormParams,
        m: usize,
    );
    /// Computes the gradients of LayerNorm. With x̂ = (x − mean)·rstd and g = dy·w:
    /// `dx[m,d] (=|+=) rstd·(g − mean(g) − x̂·mean(g·x̂))`, `dw[d] += Σ_m dy·x̂`, and
    /// `db[d] += Σ_m dy`.
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
    );

    // --- bias ------------------------------------------------------------------------------------

    /// Adds a bias to every row: `y[m,n] += bias[n]`.
    fn bias_forward(&self, y: ViewMut, bias: View, m: usize, n: usize);
    /// Adds the gradient of a bias: `dbias[n] += Σ_m dy[m,n]`.
    fn bias_backward(&self, dbias: ViewMut, dy: View, m: usize, n: usize);

    // --- rotary position embedding ---------------------------------------------------------------

    /// Applies rotary position embedding (Su et al., 2021) in the "rotate half" form of Hugging
    /// Face, in place. `x` has `b·t` rows of `stride` elements, of which the first `heads·head_dim`
    /// are rotated. The tables `cos` and `sin` are `[t, head_dim/2]`.
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
    /// Applies the inverse rotation of [`Ops::rope_forward`] to the gradient, in place.
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

    // --- attention -------------------------------------------------------------------------------

    /// Computes causal grouped-query attention with memory linear in `t` (Dao et al.,
    /// "FlashAttention", 2022).
    ///
    /// - `o[b·t, heads·head_dim]` is the output.
    /// - `lse[b, heads, t]` receives the log-sum-exp of each query's scores, before dropout, for
    ///   the backward pass.
    /// - `qkv[b·t, (heads + 2·kv_heads)·head_dim]` has the queries, then the keys, then the values
    ///   of a token in each row.
    /// - `starts[b·t]` is the position, in its sequence, of the first token to which each token may
    ///   attend: the start of its document or of its window, or 0 if there is neither.
    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape);
    /// Computes the gradient of attention with respect to `qkv`, and overwrites `dqkv` with it.
    /// `dqkv` has the layout of `qkv`. `d_o` is the gradient of the output `o`. `o` and `lse` must
    /// be the outputs of the forward pass, and the other arguments those of the forward pass.
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

    /// Converts `x` to the element type in which this backend multiplies it. Returns `x` itself if
    /// the type is right already. Otherwise returns a copy in `buf`, rounded to the type of `buf`,
    /// which must have the length of `x`. Converting a gradient before several matmuls rounds it
    /// only once.
    fn as_matmul_operand<'a>(&self, x: View<'a>, buf: &'a mut Buf) -> View<'a> {
        let _ = buf;
        x
    }

    // --- SwiGLU ----------------------------------------------------------------------------------

    /// Computes SwiGLU (Shazeer, 2020): `y[m,f] = silu(gate)·up`. Each row of `gate_up[m, 2f]` has
    /// the gate, then up.
    fn swiglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize);
    /// Computes the gradient of SwiGLU. Overwrites `dgate_up` with the gradient, and `dy` with the
    /// output `y` of the forward pass, which the gradient of the next matmul's weight needs.
    fn swiglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize);

    // --- experts ---------------------------------------------------------------------------------

    /// Selects the experts of each token from the router's `logits[m, experts]`.
    ///
    /// - `probs[m, experts]` receives the softmax of each row of `logits`.
    /// - `lse[m]` receives the log-sum-exp of each row of `logits`.
    /// - `chosen_experts[m, experts_per_token]` receives the experts with the largest probabilities
    ///   in descending order; of equal ones the lower index comes first.
    /// - `weights[m, experts_per_token]` receives the factors of the chosen experts' outputs. These
    ///   are the experts' probabilities, divided by their sum over the token's chosen experts if
    ///   [`RouterShape::normalize_weights`] is set.
    fn router_forward(
        &self,
        probs: ViewMut,
        weights: ViewMut,
        lse: ViewMut,
        chosen_experts: &mut [u32],
        logits: View,
        shape: RouterShape,
    );
    /// Computes the gradient of the router's logits and overwrites `dlogits` with it. `dweights` is
    /// the gradient of the output `weights` of [`Ops::router_forward`]. The selection of experts
    /// itself has no gradient.
    fn router_backward(
        &self,
        dlogits: ViewMut,
        dweights: View,
        inputs: RouterBackwardInputs,
        shape: RouterShape,
    );

    /// Gathers rows: `y[i, d] = x[rows[i], d]`.
    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize);
    /// Computes weighted sums of rows: `y[m, d] (=|+=) Σ_k weights[m, k] · x[row_indices[m, k],
    /// d]`, in the order of `k`. If `weights` is `None`, every weight is 1.
    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        row_indices: &[u32],
        m: usize,
        d: usize,
        write: WriteMode,
    );
    /// Computes the dot product of each pair of rows: `out[m] = Σ_i a[m, i] · b[m, i]`, where
    /// `i < d`.
    fn dot_rows(&self, out: ViewMut, a: View, b: View, d: usize);
    /// Multiplies each row by its factor: `x[m, d] *= factors[m]`.
    fn scale_rows(&self, x: ViewMut, factors: View, d: usize);

    /// Computes a grouped matmul. For each group: `y[rows, n] = x[rows, k] · w[n, k]ᵀ`, where the
    /// matrix begins at element `matrix_offset` of `w`. Empty groups cost nothing.
    fn grouped_forward(&self, y: ViewMut, x: View, w: View, groups: &[RowGroup], n: usize, k: usize);
    /// Computes the gradient of a grouped matmul's input. For each group: `dx[rows, k] = dy[rows,
    /// n] · w[n, k]`.
    fn grouped_backward_input(&self, dx: ViewMut, dy: View, w: View, groups: &[RowGroup], n: usize, k: usize);
    /// Computes the gradient of a grouped matmul's weights. For each group: `dw[n, k] = dy[rows,
    /// n]ᵀ · x[rows, k]`, which is zero for an empty group. Elements of `dw` outside the groups'
    /// matrices are not written.
    fn grouped_backward_weight(
        &self,
        dw: ViewMut,
        dy: View,
        x: View,
        groups: &[RowGroup],
        n: usize,
        k: usize,
    );

    // --- GELU, tanh approximation ----------------------------------------------------------------

    /// Computes the tanh approximation of GELU (Hendrycks and Gimpel, 2016):
    /// `y = ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
    fn gelu_forward(&self, y: ViewMut, x: View);
    /// Computes the gradient of GELU. Overwrites `dx` with the gradient, and `dy` with the output
    /// `y` of the forward pass.
    fn gelu_backward(&self, dx: ViewMut, dy: ViewMut, x: View);
    /// Computes GeGLU (Shazeer, 2020): `y[m,f] = gelu(gate)·up`. Each row of `gate_up[m, 2f]` has
    /// the gate, then up.
    fn geglu_forward(&self, y: ViewMut, gate_up: View, m: usize, f: usize);
    /// Computes the gradient of GeGLU. Overwrites `dgate_up` with the gradient, and `dy` with the
    /// output `y` of the forward pass.
    fn geglu_backward(&self, dgate_up: ViewMut, dy: ViewMut, gate_up: View, m: usize, f: usize);

    // --- output layer and loss -------------------------------------------------------------------

    /// Computes the cross-entropy loss of the logits `x[m,d] · w[v,d]ᵀ` in chunks of rows, so that
    /// only the logits of one chunk are in memory.
    ///
    /// `loss[m]` receives the loss of each row, which is 0 where `labels[m]` is [`IGNORE_LABEL`].
    /// If `grads` is given, also computes `dx[m,d] = dlogits · w` and `dw[v,d] (=|+=) dlogitsᵀ ·
    /// x`, where `dlogits` is multiplied by [`ClassifierGrads::scale`].
    fn compute_classifier_loss(
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
        self.compute_softcapped_classifier_loss(loss, x, w, labels, m, d, v, None, grads);
    }
    /// Computes the loss and gradients of [`Ops::compute_classifier_loss`] for softcapped logits: a
    /// logit `l` becomes `cap·tanh(l / cap)`. If `cap` is `None`, the logits are not capped.
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
    );
    /// Computes the logits of all rows: `logits[m,v] = x[m,d] · w[v,d]ᵀ`. Inference and tests use
    /// this op.
    fn compute_logits(&self, logits: ViewMut, x: View, w: View, m: usize, d: usize, v: usize) {
        self.matmul_forward(logits, x, w, m, v, d, WriteMode::Overwrite);
    }

    // --- vectors ---------------------------------------------------------------------------------

    /// Converts elements to the type of `y`: `y = x`. If `y` has fewer bits, elements are rounded
    /// to nearest, ties to even.
    fn cast(&self, y: ViewMut, x: View);
    /// Rounds `f32` to bf16 stochastically, so that the expected value of `y` is `x`. Values that
    /// bf16 can represent stay unchanged, including infinities and NaN. Finite values stay finite.
    fn round_stochastically(&self, y: ViewMut, x: View, rounding: &StochasticRounding);
    /// Adds elementwise: `y += x`.
    fn add(&self, y: ViewMut, x: View);
    /// Multiplies every element by a number: `y *= s`.
    fn scale(&self, y: ViewMut, s: f32);
    /// Adds a number to every element: `y += s`.
    fn add_scalar(&self, y: ViewMut, s: f32);
    /// Computes `y = a·y + b·x`. Both products and the sum are rounded.
    fn axpby(&self, y: ViewMut, a: f32, x: View, b: f32);
    /// Limits elements smoothly to ±`cap`: `y = cap·tanh(y / cap)`.
    fn softcap(&self, y: ViewMut, cap: f32);
    /// Transposes a matrix: `y[columns, rows] = x[rows, columns]ᵀ`.
    fn transpose(&self, y: ViewMut, x: View, rows: usize, columns: usize);
    /// Applies dropout in place: sets dropped elements to 0 and multiplies the others by
    /// `1 / (1 − probability)`.
    fn dropout(&self, x: ViewMut, dropout: &SampleDropout);
    /// Returns the sum of the squares of all elements, computed in `f64`.
    fn sum_squares(&self, x: View) -> f64;
    /// Applies Nesterov momentum to the gradient, in place. With g' = scale·g:
    /// `buffer += (1 − mu)·(g' − buffer)`, then `g = g' + mu·(buffer − g')`.
    fn nesterov_momentum(&self, buffer: ViewMut, g: ViewMut, mu: f64, scale: f32);
    /// Computes the sum of squares of each block of [`NORM_BLOCK_LEN`] consecutive elements of `x`,
    /// and overwrites `out` with the sums, one per block. The last block may be shorter. The
    /// elements of a block are summed in `f64`, in one fixed order.
    fn sum_squares_by_block(&self, out: &mut [f64], x: View);
    /// Returns the sums of [`Ops::sum_squares_by_block`] for several vectors, concatenated.
    fn sum_squares_by_block_concat(&self, vectors: &[View]) -> Vec<f64> {
        let count = |x: &View| x.len().div_ceil(NORM_BLOCK_LEN);
        let mut sums = vec![0.0; vectors.iter().map(count).sum()];
        let mut rest = &mut sums[..];
        for x in vectors {
            let (out, after) = rest.split_at_mut(count(x));
            self.sum_squares_by_block(out, *x);
            rest = after;
        }
        sums
    }
    /// Updates parameters `p` with AdamW and the gradient `g`. Also updates the optimizer state:
    /// the first moment `exp_avg` and the second moment `exp_avg_sq`.
    fn adamw(&self, p: ViewMut, g: View, exp_avg: ViewMut, exp_avg_sq: ViewMut, hyper: &AdamWHyperparams);
    /// Updates parameters `p` with SGD and the gradient `g`. Also updates `momentum_buffer`, which
    /// must be empty if the momentum is 0.
    fn sgd(&self, p: ViewMut, g: View, momentum_buffer: ViewMut, hyper: &SgdHyperparams);
    /// Updates parameters `p` with Lion and the gradient `g`. Also updates `exp_avg`, the moving
    /// average of the gradients.
    fn lion(&self, p: ViewMut, g: View, exp_avg: ViewMut, hyper: &LionHyperparams);
}

/// Panics unless the lengths and formats meet the requirements of [`Ops::fp8_matmul`]. `c` is the
/// length of the result.
#[track_caller]
pub(crate) fn check_fp8_shapes(c: usize, a: &Fp8Operand, b: &Fp8Operand, [m, n, k]: [usize; 3]) {
    assert!(
        n.is_multiple_of(FP8_COLUMN_MULTIPLE),
        "fp8_matmul: n is {n}, not a multiple of {FP8_COLUMN_MULTIPLE}"
    );
    assert!((a.format, b.format) != (Fp8Format::E5M2, Fp8Format::E5M2), "fp8_matmul: both operands are E5M2");
    for (name, len, expected) in [("c", c, m * n), ("a", a.x.len(), m * k), ("b", b.x.len(), k * n)] {
        expect_len("fp8_matmul", name, len, expected);
    }
}

/// Panics unless the argument `name` of the op `op` has the length that the shape requires.
#[track_caller]
pub(crate) fn expect_len(op: &str, name: &str, len: usize, expected: usize) {
    assert!(len == expected, "{op}: {name} has {len} elements, but the shape needs {expected}");
}
