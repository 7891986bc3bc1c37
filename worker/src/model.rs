//! What a model is to the rest of the runtime: a list of parameters and blocks as functions on given parameters.
//!
//! A model is passive. It never knows who owns parameters or how they arrive; it gets them whole, as one flat vector per
//! unit, and writes whole gradients. Units: embedding, then the layers, then the head.
mod llama;

use crate::params::Unit;
use contract::job::ModelSpec;
use device::{Buf, Ops, View, ViewMut};

/// One micro-batch of `b` sequences of `t` tokens; all three vectors are `b·t` long.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Sequences.
    pub b: usize,
    /// Tokens per sequence.
    pub t: usize,
    /// Input tokens, each below the vocabulary's size.
    pub tokens: Vec<u32>,
    /// Target of each position, or [`device::ops::IGNORE`].
    pub labels: Vec<u32>,
    /// Position of the first token that each token may attend to.
    pub starts: Vec<u32>,
}

impl Batch {
    /// Rows of every activation.
    pub fn rows(&self) -> usize {
        self.b * self.t
    }

    /// Positions with a loss.
    pub fn targets(&self) -> u64 {
        self.labels.iter().filter(|&&l| l != device::ops::IGNORE).count() as u64
    }
}

/// Buffers whose sizes and meaning the model decides.
pub struct Activations(pub Vec<Buf>);

impl Activations {
    /// Buffers of these lengths.
    pub fn new(lengths: &[usize]) -> Self {
        Activations(lengths.iter().map(|&n| Buf::zeroed(n)).collect())
    }
}

/// Where a layer's backward finds what its forward left.
pub struct LayerInput<'a> {
    /// The layer's parameters, flat.
    pub params: View<'a>,
    /// The micro-batch.
    pub batch: &'a Batch,
    /// The layer's input, `[rows, hidden]`.
    pub x: View<'a>,
}

/// What the head computes with: its own parameters, and the embedding's when they are tied.
pub struct HeadParams<'a> {
    /// The head unit, flat.
    pub head: View<'a>,
    /// The embedding unit, flat; given exactly when [`Model::tied`].
    pub embedding: Option<View<'a>>,
}

/// Where the head's backward writes; every buffer is overwritten.
pub struct HeadGrads<'a> {
    /// `[rows, hidden]`
    pub dx: ViewMut<'a>,
    /// The head unit's gradient, flat.
    pub head: ViewMut<'a>,
    /// The embedding unit's gradient, flat; given exactly when [`Model::tied`].
    pub embedding: Option<ViewMut<'a>>,
    /// Factor of dlogits.
    pub scale: f32,
}

/// A tensor that is stored once and has a second name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// The name without storage of its own.
    pub alias: String,
    /// The name that is stored.
    pub target: String,
}

/// A model family with its numbers.
pub trait Model: Send + Sync {
    /// Embedding, layers, head.
    fn units(&self) -> Vec<Unit>;
    /// Width of the residual stream.
    fn hidden(&self) -> usize;
    /// Number of tokens known.
    fn vocab(&self) -> usize;
    /// Does the head use the embedding's matrix?
    fn tied(&self) -> bool;
    /// Second names.
    fn ties(&self) -> Vec<Tie>;
    /// `config.json` as transformers writes it, without dtype.
    fn hf_config(&self, eod: u32) -> serde_json::Value;
    /// Floating-point operations of matrix products per token, forward and backward (recomputation not counted).
    fn flops_per_token(&self, t: usize) -> f64;

    /// Lengths of what a layer's forward leaves for its backward.
    fn saved_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// Lengths of the buffers that layers share.
    fn scratch_lengths(&self, b: usize, t: usize) -> Vec<usize>;

    /// `x[rows, hidden]` from tokens.
    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &Batch, x: ViewMut);
    /// Adds to the embedding unit's gradient.
    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &Batch, dx: View);

    /// `y[rows, hidden]` from `x`; without `y` only what the backward needs is left in `saved`.
    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut Activations,
        scratch: &mut Activations,
    );
    /// `dx[rows, hidden]`: gradient of `y` in, of `x` out. Overwrites the layer unit's gradient.
    fn layer_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        dx: ViewMut,
        saved: &mut Activations,
        scratch: &mut Activations,
    );

    /// Each row's loss; with `grads` also the backward.
    fn head(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &Batch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut Activations,
    );
}

/// A line of [`FAMILIES`].
pub struct Family {
    /// Name in job.yaml.
    pub name: &'static str,
    /// Makes a model, or says which number is impossible.
    pub build: fn(&ModelSpec) -> Result<Box<dyn Model>, String>,
}

/// Every family the runtime trains. To add one: a file in `model/` and a line here.
pub const FAMILIES: &[Family] = &[Family { name: "llama", build: llama::build }];

/// The model that the job names. `vocab_size` and `max_position_embeddings` must be filled in.
pub fn build(spec: &ModelSpec) -> Result<Box<dyn Model>, String> {
    let family = FAMILIES.iter().find(|f| f.name == spec.family).ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.name).collect();
        format!("unknown model family `{}`; known: {}", spec.family, known.join(", "))
    })?;
    (family.build)(spec)
}
