//! Arguments of [`crate::Ops`] other than buffers: shapes, hyper-parameters and write modes.
use crate::buffer::{Dtype, View, ViewMut};
use crate::fp8::Fp8Format;

/// Whether an op overwrites its output (`=`) or adds to its output (`+=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The result replaces the output. The previous content of the output is not read.
    Overwrite,
    /// The result is added elementwise to the previous content of the output.
    Accumulate,
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
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor of the scores, above 0: the score of query `q` and key `k` is `scale·(q·k)`.
    pub scale: f32,
    /// Softcap of the scores. With `Some(cap)`, every score `s` becomes `cap·tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Dropout of the attention probabilities; `None` for no dropout.
    pub dropout: Option<AttentionDropout>,
}

/// Dropout of attention probabilities. Probabilities that are kept are multiplied by `1 / (1 −
/// probability)`.
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
    /// Number of the batch's first sequence in the random stream.
    pub first_sequence: u64,
}

impl AttentionDropout {
    /// Returns the threshold below which a random word drops its probability.
    pub(crate) fn drop_threshold(&self) -> u32 {
        (self.probability * 4_294_967_296.0) as u32
    }

    /// Returns the factor `1 / (1 − probability)` of the attention probabilities that are kept.
    pub(crate) fn keep_scale(&self) -> f32 {
        (1.0 / (1.0 - self.probability)) as f32
    }

    /// Panics if the probability is invalid, or if the shape exceeds the counter of the random
    /// generator: 2²⁴ positions, 2¹⁶ heads and 2⁴³ sequences.
    pub(crate) fn check(&self, op: &str, shape: &AttentionShape) {
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

impl AttentionShape {
    /// Creates the shape of attention with the scale `1/√head_dim`, without softcap and dropout.
    pub fn new(b: usize, t: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        AttentionShape { b, t, heads, kv_heads, head_dim, scale, softcap: None, dropout: None }
    }
}

/// Layout of consecutive heads inside the rows of a wider matrix, such as the query heads inside
/// the rows of qkv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    /// Number of rows of the matrix.
    pub rows: usize,
    /// Column of the first head's first element.
    pub first_column: usize,
    /// Number of heads, which follow one another without gaps.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a row of the matrix.
    pub stride: usize,
}

impl HeadLayout {
    /// Returns the number of elements of all heads of one row.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Shape of a router. A router selects the experts of each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterShape {
    /// Number of tokens. The logits of each token are one row.
    pub m: usize,
    /// Number of experts of the layer.
    pub experts: usize,
    /// Number of experts to which each token is sent, at least 1.
    pub experts_per_token: usize,
    /// True if the probabilities of a token's selected experts are divided by their sum.
    pub normalize_weights: bool,
}

/// Inputs of [`crate::Ops::router_backward`] in addition to the gradient of the chosen experts'
/// weights.
#[derive(Clone, Copy)]
pub struct RouterBackwardInputs<'a> {
    /// Probabilities that the forward pass computed, `[m, experts]`.
    pub probs: View<'a>,
    /// Log-sum-exp of each row's logits from the forward pass, `[m]`.
    pub lse: View<'a>,
    /// Experts that the forward pass selected, `[m, experts_per_token]`.
    pub chosen_experts: &'a [u32],
    /// Gradient of the load-balancing loss with respect to the probabilities, `[experts]`. All rows
    /// of `probs` have this gradient.
    pub balance_grad: &'a [f32],
    /// Coefficient of the z-loss Σ lse², whose gradient is added.
    pub z_loss_coef: f32,
}

/// Consecutive rows that a grouped matmul multiplies by one matrix: the tokens of one expert and
/// the expert's weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// The group's rows. Groups are sorted by their rows and do not overlap.
    pub rows: std::ops::Range<usize>,
    /// Index of the matrix's first element in the vector of all groups' matrices.
    pub matrix_offset: usize,
}

/// Operand of an fp8 matmul. The op divides the operand by a scale and rounds it to fp8.
#[derive(Clone, Copy)]
pub struct Fp8Operand<'a> {
    /// The matrix's elements, of any type.
    pub x: View<'a>,
    /// The format to which the op rounds the elements.
    pub format: Fp8Format,
    /// True if the matrix is stored transposed.
    pub transposed: bool,
}

/// Divisor of the number of columns of every fp8 matmul's result, because cuBLASLt requires result
/// rows whose size is a multiple of 16 bytes.
pub const FP8_COLUMN_MULTIPLE: usize = 16;

/// Parameters of a LayerNorm over rows of `d` elements.
#[derive(Clone, Copy)]
pub struct LayerNormParams<'a> {
    /// Weight of each column, `[d]`.
    pub w: View<'a>,
    /// Bias of each column, `[d]`.
    pub b: View<'a>,
    /// Number that is added to the variance before the square root.
    pub eps: f32,
}

/// Hyper-parameters of one AdamW update with decoupled weight decay. The arithmetic is that of
/// `torch.optim.AdamW` for a single tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWHyperparams {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment `exp_avg`.
    pub beta1: f64,
    /// Decay of the second moment `exp_avg_sq`.
    pub beta2: f64,
    /// Number that is added to the denominator of the update.
    pub eps: f64,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// Number of this update, from 1; used by the bias correction.
    pub step: u64,
    /// Factor by which the update first multiplies the gradient. The factor contains the division
    /// by the number of tokens and gradient clipping.
    pub grad_scale: f32,
}

/// Hyper-parameters of one SGD update. The arithmetic is that of `torch.optim.SGD` with dampening
/// 0, without Nesterov momentum, and with weight decay added to the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdHyperparams {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the momentum buffer; 0 for no momentum.
    pub momentum: f64,
    /// Factor of the parameter that is added to its gradient.
    pub weight_decay: f64,
    /// Factor by which the update first multiplies the gradient. The factor contains the division
    /// by the number of tokens and gradient clipping.
    pub grad_scale: f32,
}

/// Hyper-parameters of one Lion update with decoupled weight decay (Chen et al., "Symbolic
/// Discovery of Optimization Algorithms", 2023).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionHyperparams {
    /// Learning rate.
    pub lr: f64,
    /// Weight of `exp_avg` in its weighted sum with the gradient; the sign of the sum is the
    /// update.
    pub beta1: f64,
    /// Decay of `exp_avg`, the moving average of the gradients.
    pub beta2: f64,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// Factor by which the update first multiplies the gradient. The factor contains the division
    /// by the number of tokens and gradient clipping.
    pub grad_scale: f32,
}

/// Dropout of a vector that consists of consecutive samples of equal length.
///
/// Element `i` of a sample takes word `i mod 4` of the Philox block `⌊i / 4⌋` at the step 0
/// ([`crate::philox::compute_random_words`]). The element is dropped if the word is below
/// `⌊probability·2³²⌋`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleDropout {
    /// Key of the Philox generator.
    pub key: [u32; 2],
    /// Probability of dropping an element, at least 0 and below 1.
    pub probability: f64,
    /// Elements of a sample.
    pub sample_len: usize,
    /// Number of the vector's first sample in the random stream.
    pub first_sample: u64,
}

impl SampleDropout {
    /// Returns the threshold below which a random word drops its element.
    pub(crate) fn drop_threshold(&self) -> u64 {
        (self.probability * 4_294_967_296.0) as u64
    }

    /// Returns the factor `1 / (1 − probability)` of the elements that are kept.
    pub(crate) fn keep_scale(&self) -> f32 {
        (1.0 / (1.0 - self.probability)) as f32
    }
}

/// Random numbers of stochastic rounding for a range of a tensor. A value between two neighbouring
/// bf16 numbers becomes the number with the larger magnitude with a probability of `(|value| −
/// |lower|) / (|upper| − |lower|)`, where `|lower|` and `|upper|` are the magnitudes of the two
/// numbers.
///
/// Element `i` of the tensor takes the upper 16 bits of word `i mod 4` of the Philox block `⌊i /
/// 4⌋` at the sample 0 and the step `step` ([`crate::philox::compute_random_words`]). The result
/// therefore does not depend on how the tensor is divided into ranges.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StochasticRounding {
    /// Key of the Philox generator.
    pub key: [u32; 2],
    /// Index of the range's first element in its tensor.
    pub first_element: u64,
    /// Number of the optimizer step.
    pub step: u64,
}

impl StochasticRounding {
    /// Panics if the result is not bf16, or if elements or the step exceed the counter of the
    /// random generator: 2⁴⁵ elements and 2⁴² steps.
    #[track_caller]
    pub(crate) fn check(&self, y: &ViewMut) {
        let (op, dtype) = ("round_stochastically", y.dtype());
        let end = self.first_element.saturating_add(y.len() as u64);
        assert!(dtype == Dtype::Bf16, "{op}: the result is {dtype:?}, not Bf16");
        assert!(
            end <= 1 << 45 && self.step < 1 << 42,
            "{op}: element {end} at step {} is beyond the range of the random generator",
            self.step
        );
    }
}

/// Label of a position that has no loss, such as a token of a prompt.
pub const IGNORE_LABEL: u32 = u32::MAX;

/// Number of consecutive elements of a tensor whose squares are summed first for the gradient norm.
/// Sharding does not change these blocks, and therefore does not change the norm.
pub const NORM_BLOCK_LEN: usize = 4096;

/// Outputs of the backward pass of [`crate::Ops::compute_classifier_loss`].
pub struct ClassifierGrads<'a> {
    /// Gradient of the classifier's input, `[m, d]`; overwritten.
    pub dx: ViewMut<'a>,
    /// Gradient of the output layer's weight, `[v, d]`; empty if it is not needed.
    pub dw: ViewMut<'a>,
    /// Whether `dw` is overwritten or added to.
    pub dw_write: WriteMode,
    /// Factor by which the gradient of the logits is multiplied.
    pub scale: f32,
}
