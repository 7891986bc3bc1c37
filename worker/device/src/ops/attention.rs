//! Attention as an op, and the rotary position embedding of its queries and keys.
use super::arguments::expect_lens;
use crate::buffer::{View, ViewMut};

/// Ops for rotary position embedding: the rotation and its backward pass.
pub trait RopeOps {
    /// Applies rotary position embedding (Su et al., 2021) to the attention heads in `x` in place,
    /// in the "rotate half" form of Hugging Face. The tables `cos` and `sin` are `[t, head_dim/2]`.
    fn rope_forward(&self, x: ViewMut, cos: View, sin: View, shape: RopeShape);
    /// Computes the gradient of rotary position embedding in place, by applying the inverse
    /// rotation to the attention heads in `dx`.
    fn rope_backward(&self, dx: ViewMut, cos: View, sin: View, shape: RopeShape);
}

/// Sizes of a matrix with one row per token, to which rotary position embedding is applied:
/// sequences, tokens, heads, head dimension and row length. The matrix has `b·t` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    /// Number of sequences.
    pub b: usize,
    /// Number of tokens of each sequence.
    pub t: usize,
    /// Number of heads at the beginning of each row that are rotated.
    pub heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Number of elements in a row of the matrix.
    pub stride: usize,
}

impl RopeShape {
    /// Panics if the attention heads exceed the rows of the matrix, or if the number of elements of
    /// `x`, `cos` or `sin` is wrong.
    pub(crate) fn check_lengths(&self, x: usize, cos: usize, sin: usize) {
        let (op, RopeShape { b, t, heads, head_dim, stride }) = ("rope", *self);
        assert!(
            head_dim % 2 == 0 && heads * head_dim <= stride,
            "{op}: {heads} heads of {head_dim} elements do not fit rows of {stride}"
        );
        let table = t * head_dim / 2;
        expect_lens(op, [("x", x, b * t * stride), ("cos", cos, table), ("sin", sin, table)]);
    }
}

/// The operations for causal grouped-query attention: the forward and the backward pass.
pub trait AttentionOps {
    /// Computes causal grouped-query attention with memory linear in the sequence length (Dao et
    /// al., "FlashAttention", 2022).
    ///
    /// - `o[b·t, heads·head_dim]` is the output.
    /// - `lse[b, heads, t]` receives the log-sum-exp of each query's scores, before dropout, for
    ///   the backward pass.
    /// - `qkv[b·t, (heads + 2·kv_heads)·head_dim]` has the queries, then the keys, then the values
    ///   of a token in each row.
    /// - `starts[b·t]` is the position, in its sequence, of the first token to which each token may
    ///   attend: the start of its document or of its window, or 0 if there is neither.
    fn attention_forward(&self, o: ViewMut, lse: ViewMut, qkv: View, starts: &[u32], shape: AttentionShape);
    /// Computes the gradient of attention with respect to queries, keys and values, and writes it
    /// to `dqkv`. `dqkv` has the layout of `qkv`. `d_o` is the gradient of the output `o`. `o` and
    /// `lse` must be the outputs of the forward pass. `qkv`, `starts` and `shape` must be the
    /// arguments of the forward pass.
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
}

/// Shape and options of causal grouped-query attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Number of sequences.
    pub b: usize,
    /// Number of tokens of each sequence.
    pub t: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads. `heads` must be a multiple of this number.
    pub kv_heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Factor of the scores, above 0: the score of query `q` and key `k` is `scale·(q·k)`.
    pub scale: f32,
    /// Softcap of the scores. With `Some(cap)`, every score `s` becomes `cap·tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Dropout of the attention probabilities; `None` for no dropout.
    pub dropout: Option<AttentionDropout>,
}

impl AttentionShape {
    /// Creates the shape of attention with the scale `1/√head_dim`, without softcap and dropout.
    pub fn new(b: usize, t: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        AttentionShape { b, t, heads, kv_heads, head_dim, scale, softcap: None, dropout: None }
    }

    /// Panics if the sizes or the dropout of the attention operation `op` are invalid, or if an
    /// argument has a wrong number of elements. `o`, `lse` and `qkv` are lengths.
    pub(crate) fn check_arguments(&self, op: &str, o: usize, lse: usize, qkv: usize, starts: &[u32]) {
        let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = *self;
        assert!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "{op}: {heads} query heads are not a multiple of {kv_heads} key heads"
        );
        assert!(head_dim > 0, "{op}: head_dim is 0");
        if let Some(dropout) = &self.dropout {
            dropout.check_probability_and_shape(op, self);
        }
        expect_lens(op, [("o", o, b * t * heads * head_dim), ("lse", lse, b * heads * t)]);
        let width = (heads + 2 * kv_heads) * head_dim;
        expect_lens(op, [("qkv", qkv, b * t * width), ("starts", starts.len(), b * t)]);
    }
}

/// Dropout of attention probabilities: the probability, and the source of its random numbers.
/// Probabilities that are kept are multiplied by `1 / (1 − probability)`.
///
/// Query `q` of query head `h` and key `k` (`q` and `k` are positions in their sequence) take one
/// random word. It is word `(k / 16) mod 4` of the Philox block `16·⌊k / 64⌋ + k mod 16`, at the
/// sample `first_sequence + sequence` and the step `h·2²⁴ + q`
/// ([`crate::philox::compute_random_words`]). The attention probability is dropped if the word is
/// below `⌊probability·2³²⌋`. Which probabilities are dropped therefore does not depend on tiles,
/// threads or micro-batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// Key of the Philox generator.
    pub key: [u32; 2],
    /// Probability of dropping an element, at least 0 and below 1.
    pub probability: f64,
    /// Number of the batch's first sequence among all training samples, from which random numbers
    /// are derived.
    pub first_sequence: u64,
}

impl AttentionDropout {
    /// Returns the number below which a random 32-bit word causes an attention probability to be
    /// dropped: the dropout probability times 2³².
    pub(crate) fn drop_threshold(&self) -> u32 {
        (self.probability * 4_294_967_296.0) as u32
    }

    /// Returns the factor `1 / (1 − probability)` by which dropout multiplies the attention
    /// probabilities that are kept.
    pub(crate) fn keep_scale(&self) -> f32 {
        (1.0 / (1.0 - self.probability)) as f32
    }

    /// Panics if the dropout probability is not in 0..1, or if positions, heads or sequences exceed
    /// the range of the random generator. The range is 2²⁴ positions, 2¹⁶ heads and 2⁴³ sequences.
    pub(crate) fn check_probability_and_shape(&self, op: &str, shape: &AttentionShape) {
        let p = self.probability;
        assert!((0.0..1.0).contains(&p), "{op}: the dropout probability is {p}, not in 0..1");
        let (t, heads) = (shape.t, shape.heads);
        assert!(
            t <= 1 << 24 && heads <= 1 << 16,
            "{op}: dropout supports at most 2^24 positions and 2^16 heads, not {t} and {heads}"
        );
        let first = self.first_sequence;
        assert!(
            first + shape.b as u64 <= 1 << 43,
            "{op}: sequence {first} is beyond the range of the random generator"
        );
    }
}
