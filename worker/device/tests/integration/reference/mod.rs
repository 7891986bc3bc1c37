//! The definition of every op in f64, and helpers that compare results with it.
#![allow(dead_code, reason = "each test binary uses a part of this module")]

use device::{
    Cpu,
    ops::{AttentionShape, IGNORE_LABEL},
    philox::compute_random_words,
};

/// Small random number generator (xorshift64*). The same seed gives the same numbers.
pub(crate) struct TestRng(u64);

impl TestRng {
    pub(crate) fn new(seed: u64) -> Self {
        TestRng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns the next random number, which has 48 bits.
    pub(crate) fn draw_number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// Returns a uniformly distributed number in `0..n`.
    pub(crate) fn draw_below(&mut self, n: usize) -> usize {
        (self.draw_number() % n as u64) as usize
    }

    /// Returns a uniformly distributed number in [−1, 1).
    pub(crate) fn draw_signed_unit(&mut self) -> f32 {
        (self.draw_number() % (1 << 24)) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Returns `len` uniformly distributed numbers in [−1, 1).
    pub(crate) fn draw_vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.draw_signed_unit()).collect()
    }

    /// Returns the position at which the document of each token starts, for `b` sequences of `t`
    /// tokens. The documents' lengths are random, with the mean `mean`.
    pub(crate) fn draw_document_starts(&mut self, b: usize, t: usize, mean: usize) -> Vec<u32> {
        let mut starts = Vec::new();
        for _ in 0..b {
            let mut start = 0;
            for q in 0..t {
                if q > 0 && self.draw_below(mean) == 0 {
                    start = q;
                }
                starts.push(start as u32);
            }
        }
        starts
    }
}

/// Returns a CPU backend with two threads for each instruction set.
pub(crate) fn open_backends() -> Vec<Cpu> {
    Cpu::new_for_all_instruction_sets(2)
}

pub(crate) fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Returns the dot product Σ a·b.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Asserts that the values `got` are close to `want`. Each difference is at most `tolerance` times
/// the largest magnitude in `want`, or `tolerance` × 1e-3 if that is larger. `what` names the
/// values in failures.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(1e-3f64, |m, w| m.max(w.abs()));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(g) - w).abs() / size;
        assert!(error <= tolerance, "{what}[{i}]: got {g}, want {w} (relative to {size}: {error:e})");
    }
}

/// Asserts that the gradient `got` matches central differences of `f` at every `step`-th element of
/// `x`.
#[track_caller]
pub(crate) fn assert_gradient(
    what: &str,
    got: &[f32],
    x: &[f64],
    step: usize,
    tolerance: f64,
    mut f: impl FnMut(&[f64]) -> f64,
) {
    assert_eq!(got.len(), x.len(), "{what}");
    const H: f64 = 1e-4;
    let mut x = x.to_vec();
    let mut checked = Vec::new();
    for i in (0..x.len()).step_by(step) {
        let old = x[i];
        x[i] = old + H;
        let above = f(&x);
        x[i] = old - H;
        let below = f(&x);
        x[i] = old;
        checked.push((i, (above - below) / (2.0 * H)));
    }
    let (at, want): (Vec<usize>, Vec<f64>) = checked.into_iter().unzip();
    let got: Vec<f32> = at.iter().map(|&i| got[i]).collect();
    assert_close(what, &got, &want, tolerance);
}

/// Computes the matmul `y[m,n] = x[m,k]·w[n,k]ᵀ`.
pub(crate) fn compute_matmul(x: &[f64], w: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut y = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            y[i * n + j] = dot(&x[i * k..(i + 1) * k], &w[j * k..(j + 1) * k]);
        }
    }
    y
}

/// Looks up the embeddings of tokens, `[tokens, d]`.
pub(crate) fn compute_embedding(w: &[f64], tokens: &[u32], d: usize) -> Vec<f64> {
    tokens.iter().flat_map(|&t| w[t as usize * d..(t as usize + 1) * d].to_vec()).collect()
}

/// Computes RMSNorm of each row of `w.len()` elements.
pub(crate) fn compute_rmsnorm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let d = w.len();
    let row = |x: &[f64]| {
        let rstd = 1.0 / (dot(x, x) / d as f64 + eps).sqrt();
        x.iter().zip(w).map(|(x, w)| x * rstd * w).collect::<Vec<_>>()
    };
    x.chunks(d).flat_map(row).collect()
}

/// Computes LayerNorm of each row of `w.len()` elements.
pub(crate) fn compute_layernorm(x: &[f64], w: &[f64], b: &[f64], eps: f64) -> Vec<f64> {
    let d = w.len();
    let row = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / d as f64;
        let centred: Vec<f64> = x.iter().map(|x| x - mean).collect();
        let rstd = 1.0 / (dot(&centred, &centred) / d as f64 + eps).sqrt();
        centred.iter().zip(w).zip(b).map(|((c, w), b)| c * rstd * w + b).collect::<Vec<_>>()
    };
    x.chunks(d).flat_map(row).collect()
}

/// Computes the tanh approximation of GELU of one number.
pub(crate) fn compute_gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Computes GeGLU of each row of `gate_up`, which has `f` gates and then `f` ups.
pub(crate) fn compute_geglu(gate_up: &[f64], f: usize) -> Vec<f64> {
    let row = |r: &[f64]| (0..f).map(|i| compute_gelu(r[i]) * r[f + i]).collect::<Vec<_>>();
    gate_up.chunks(2 * f).flat_map(row).collect()
}

/// Computes rotary position embeddings: rotates the pair of elements (i, i + head_dim/2) of each
/// head by an angle. `cos` and `sin` are `[t, head_dim/2]`.
pub(crate) fn compute_rope(
    x: &[f64],
    cos: &[f64],
    sin: &[f64],
    t: usize,
    heads: usize,
    head_dim: usize,
    stride: usize,
) -> Vec<f64> {
    let half = head_dim / 2;
    let mut y = x.to_vec();
    for (r, row) in y.chunks_mut(stride).enumerate() {
        for h in 0..heads {
            for i in 0..half {
                let (c, s) = (cos[r % t * half + i], sin[r % t * half + i]);
                let (a, b) = (row[h * head_dim + i], row[h * head_dim + half + i]);
                row[h * head_dim + i] = a * c - b * s;
                row[h * head_dim + half + i] = b * c + a * s;
            }
        }
    }
    y
}

/// Returns the factor by which dropout multiplies the probability of key `k` for query `q`: 0, or 1
/// / (1 − probability).
fn compute_dropout_factor(shape: &AttentionShape, seq: usize, h: usize, q: usize, k: usize) -> f64 {
    let Some(d) = shape.dropout else { return 1.0 };
    let block = (16 * (k / 64) + k % 16) as u64;
    let step = (h as u64) * (1 << 24) + q as u64;
    let word = compute_random_words(d.key, block, d.first_sequence + seq as u64, step)[k / 16 % 4];
    if f64::from(word) < (d.probability * 4_294_967_296.0).floor() {
        0.0
    } else {
        1.0 / (1.0 - d.probability)
    }
}

/// Computes causal grouped-query attention. Returns the outputs and the log-sum-exps of the scores.
pub(crate) fn compute_attention(qkv: &[f64], starts: &[u32], shape: AttentionShape) -> (Vec<f64>, Vec<f64>) {
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let stride = (heads + 2 * kv_heads) * head_dim;
    let mut o = vec![0.0; b * t * heads * head_dim];
    let mut lse = vec![0.0; b * heads * t];
    for seq in 0..b {
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            for q in 0..t {
                let at = |token: usize, head: usize| {
                    let first = (seq * t + token) * stride + head * head_dim;
                    &qkv[first..first + head_dim]
                };
                let keys: Vec<usize> = (starts[seq * t + q] as usize..=q).collect();
                let score = |&k: &usize| {
                    let score = dot(at(q, h), at(k, heads + kv)) * f64::from(shape.scale);
                    shape.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let max = scores.iter().fold(f64::NEG_INFINITY, |m, &s| m.max(s));
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                lse[(seq * heads + h) * t + q] = max + total.ln();
                for (k, s) in keys.iter().zip(&scores) {
                    let p = (s - max).exp() / total * compute_dropout_factor(&shape, seq, h, q, *k);
                    for (j, v) in at(*k, heads + kv_heads + kv).iter().enumerate() {
                        o[((seq * t + q) * heads + h) * head_dim + j] += p * v;
                    }
                }
            }
        }
    }
    (o, lse)
}

/// Computes SwiGLU of each row of `gate_up`, which has `f` gates and then `f` ups.
pub(crate) fn compute_swiglu(gate_up: &[f64], f: usize) -> Vec<f64> {
    let row = |r: &[f64]| (0..f).map(|i| r[i] / (1.0 + (-r[i]).exp()) * r[f + i]).collect::<Vec<_>>();
    gate_up.chunks(2 * f).flat_map(row).collect()
}

/// Returns the cross-entropy loss of each row, which is 0 for rows whose label is [`IGNORE_LABEL`].
pub(crate) fn compute_cross_entropy(x: &[f64], w: &[f64], labels: &[u32], d: usize, v: usize) -> Vec<f64> {
    compute_capped_cross_entropy(x, w, labels, d, v, None)
}

/// Returns the cross-entropy loss of each row, after a softcap of the logits.
pub(crate) fn compute_capped_cross_entropy(
    x: &[f64],
    w: &[f64],
    labels: &[u32],
    d: usize,
    v: usize,
    cap: Option<f32>,
) -> Vec<f64> {
    let mut logits = compute_matmul(x, w, labels.len(), v, d);
    if let Some(cap) = cap.map(f64::from) {
        logits.iter_mut().for_each(|l| *l = cap * (*l / cap).tanh());
    }
    let row = |(logits, &label): (&[f64], &u32)| {
        if label == IGNORE_LABEL {
            return 0.0;
        }
        let max = logits.iter().fold(f64::NEG_INFINITY, |m, &l| m.max(l));
        max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln() - logits[label as usize]
    };
    logits.chunks(v).zip(labels).map(row).collect()
}
