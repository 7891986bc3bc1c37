//! What ops are told beside their buffers: shapes, numbers, and where results go.
use crate::fp8::Fp8;
use crate::mem::{Dtype, View, ViewMut};

/// `=` or `+=`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The output is overwritten; what it held is not read.
    Set,
    /// The result is added to the output.
    Add,
}

/// Shape of attention over `b` sequences of `t` tokens, and what becomes of its scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub b: usize,
    pub t: usize,
    /// Query heads.
    pub heads: usize,
    /// Key / value heads; divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor of q·k, above 0.
    pub scale: f32,
    /// A score s becomes `cap·tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// What is dropped of the probabilities.
    pub dropout: Option<AttentionDropout>,
}

/// What dropout drops of attention's probabilities; what is kept is multiplied by `1 / (1 − share)`.
///
/// The probability of key `k` for query `q` (positions in their sequence) of query head `h` is dropped by word `k / 16 mod 4` of the
/// block `16·⌊k / 64⌋ + k mod 16`, the sample `first` + sequence and the step `h·2²⁴ + q` ([`crate::philox::words`]), when it is below
/// `share·2³²`, rounded down. So it depends on nothing but these numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// Of the random numbers.
    pub key: [u32; 2],
    /// Share that is dropped, at least 0 and below 1.
    pub share: f64,
    /// Number of the first sequence.
    pub first: u64,
}

impl AttentionDropout {
    /// A word below it drops its probability.
    pub(crate) fn threshold(&self) -> u32 {
        (self.share * 4_294_967_296.0) as u32
    }

    /// Factor of what is kept.
    pub(crate) fn keep(&self) -> f32 {
        (1.0 / (1.0 - self.share)) as f32
    }

    /// Refuses what has no numbers of its own.
    pub(crate) fn check(&self, op: &str, shape: &AttentionShape) {
        assert!((0.0..1.0).contains(&self.share), "{op}: a share of {} is dropped", self.share);
        let (t, heads) = (shape.t, shape.heads);
        assert!(t <= 1 << 24 && heads <= 1 << 16, "{op}: dropout of {t} positions, {heads} heads");
        assert!(self.first + shape.b as u64 <= 1 << 43, "{op}: dropout of sequence {}", self.first);
    }
}

impl AttentionShape {
    /// Scores times 1/√head_dim, without a cap.
    pub fn new(b: usize, t: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        AttentionShape { b, t, heads, kv_heads, head_dim, scale, softcap: None, dropout: None }
    }
}

/// Some heads inside rows of a wider matrix: `rows` of `stride` elements, in each of which the heads lie side by side from
/// column `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    pub rows: usize,
    pub first: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub stride: usize,
}

impl HeadRows {
    /// Elements of the heads of one row.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// A router over `m` rows that sends each to `per_token` of `experts` experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterShape {
    pub m: usize,
    pub experts: usize,
    pub per_token: usize,
    /// The chosen probabilities are divided by their sum.
    pub normalise: bool,
}

/// What the router's backward needs beside the gradient of the weights.
#[derive(Clone, Copy)]
pub struct RouterGradient<'a> {
    /// `[m, experts]`, of the forward.
    pub probs: View<'a>,
    /// `[m]`, of the forward.
    pub lse: View<'a>,
    /// `[m, per_token]`, of the forward.
    pub chosen: &'a [u32],
    /// `[experts]`: gradient of another loss by every row's probabilities (load balancing).
    pub balance: &'a [f32],
    /// Factor of Σ lse², whose gradient is added.
    pub z: f32,
}

/// Rows that are multiplied with one matrix of a flat vector of matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// They lie behind those of the group before.
    pub rows: std::ops::Range<usize>,
    /// Where the matrix begins.
    pub matrix: usize,
}

/// An operand of a product in fp8, of any type until then.
#[derive(Clone, Copy)]
pub struct Fp8Matrix<'a> {
    pub x: View<'a>,
    /// What its elements are rounded to.
    pub kind: Fp8,
    /// Stored with rows and columns exchanged.
    pub transposed: bool,
}

/// The columns of a product in fp8 are a multiple of this: cards want rows of the result of whole 16 bytes.
pub const FP8_COLUMNS: usize = 16;

/// What a LayerNorm computes with.
#[derive(Clone, Copy)]
pub struct LayerNorm<'a> {
    /// `[d]`
    pub w: View<'a>,
    /// `[d]`
    pub b: View<'a>,
    pub eps: f32,
}

/// Numbers of one AdamW update (decoupled weight decay; arithmetic as torch.optim.AdamW, single tensor).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// 1-based.
    pub step: u64,
    /// The gradient is multiplied by this first (mean over tokens, clipping).
    pub grad_scale: f32,
}

/// Numbers of one SGD update (as torch.optim.SGD, dampening 0, no Nesterov, decay added to the gradient).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    pub grad_scale: f32,
}

/// Numbers of one Lion update (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023; decoupled decay).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub weight_decay: f64,
    pub grad_scale: f32,
}

/// What dropout drops of a vector whose samples lie one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Of the random numbers ([`crate::philox::words`]).
    pub key: [u32; 2],
    /// Share that is dropped, at least 0 and below 1.
    pub share: f64,
    /// Elements of a sample; a block of random words is for four of them.
    pub sample: usize,
    /// Number of the first sample.
    pub first: u64,
}

impl Dropout {
    /// A word below it drops its element.
    pub(crate) fn threshold(&self) -> u64 {
        (self.share * 4_294_967_296.0) as u64
    }

    /// Factor of what is kept.
    pub(crate) fn keep(&self) -> f32 {
        (1.0 / (1.0 - self.share)) as f32
    }
}

/// Which way each element of a part of a tensor is rounded: up with the share of the step that it has gone from the number below.
///
/// Element `i` of the tensor takes the upper 16 bits of word `i mod 4` of the block `⌊i / 4⌋` at the sample 0 and the step
/// ([`crate::philox::words`]), so it depends on nothing but these numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StochasticRounding {
    /// Of the random numbers.
    pub key: [u32; 2],
    /// Number of the part's first element in its tensor.
    pub first: u64,
    /// Optimizer step.
    pub step: u64,
}

impl StochasticRounding {
    /// Refuses a result of another type than bf16, and elements and steps that have no numbers of their own.
    #[track_caller]
    pub(crate) fn check(&self, y: &ViewMut) {
        let (op, dtype, end) = ("round_stochastically", y.dtype(), self.first.saturating_add(y.len() as u64));
        assert!(dtype == Dtype::Bf16, "{op}: the result is {dtype:?}, not Bf16");
        assert!(end <= 1 << 45 && self.step < 1 << 42, "{op}: element {end} at step {}", self.step);
    }
}

/// The label of a position without a loss.
pub const IGNORE: u32 = u32::MAX;

/// Elements of a logical tensor that are squared and summed together for the gradient norm.
pub const NORM_BLOCK: usize = 4096;

/// Outputs of [`Ops::classifier`]'s backward.
pub struct ClassifierGrads<'a> {
    pub dx: ViewMut<'a>,
    /// Empty: not wanted.
    pub dw: ViewMut<'a>,
    pub dw_write: Write,
    pub scale: f32,
}
