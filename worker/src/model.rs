//! What a model is to the rest of the runtime: a list of parameters and blocks as functions on given parameters.
//!
//! A model is passive. It never knows who owns parameters or how they arrive; it gets them whole, as one flat vector per
//! unit, and writes whole gradients. Units: embedding, then the layers, then the head.
mod config;
mod decoder;
mod dropout;
pub mod experts;
mod gemma;
mod gpt2;
mod linear;
mod llama;
pub mod lora;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rotary;

use crate::params::Unit;
use contract::job::{ExpertsSpec, ModelSpec};
use device::{Buf, Dtype, Ops, View, ViewMut};
use serde_json::{Map, Value};
use std::path::Path;

/// One micro-batch of `b` sequences of `t` tokens; its vectors are `b·t` long.
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
    /// The same for layers that attend to a sliding window; empty where the model has none.
    pub windowed: Vec<u32>,
    /// In training: the number of the first sequence in the run. It decides what dropout drops; without it nothing is.
    pub first: Option<u64>,
}

impl Batch {
    /// Rows of every activation.
    pub fn rows(&self) -> usize {
        self.b * self.t
    }

    /// Fills [`Batch::windowed`]: a token attends to `window` tokens at most, itself included.
    pub fn slide(&mut self, window: usize) {
        let t = self.t.max(1);
        let first = |(i, &start): (usize, &u32)| start.max((i % t + 1).saturating_sub(window) as u32);
        self.windowed.clear();
        self.windowed.extend(self.starts.iter().enumerate().map(first));
    }

    /// Positions with a loss.
    pub fn targets(&self) -> u64 {
        self.labels.iter().filter(|&&l| l != device::ops::IGNORE).count() as u64
    }
}

/// Buffers whose sizes and meaning the model decides.
pub struct Activations(pub Vec<Buf>);

impl Activations {
    /// Buffers of these lengths and this type; those whose indices are listed as statistics are `f32` all the same.
    pub fn new(ops: &dyn Ops, lengths: &[usize], dtype: Dtype, statistics: &[usize]) -> Self {
        let of = |i: usize| if statistics.contains(&i) { Dtype::F32 } else { dtype };
        Activations(lengths.iter().enumerate().map(|(i, &n)| ops.zeroed(of(i), n)).collect())
    }
}

/// Which buffers hold statistics (1/rms, log-sum-exp) and stay `f32` in every precision, by their indices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics {
    /// Of [`Model::saved_lengths`].
    pub saved: &'static [usize],
    /// Of [`Model::scratch_lengths`].
    pub scratch: &'static [usize],
}

/// Where a layer's backward finds what its forward left.
pub struct LayerInput<'a> {
    /// The layer's parameters, flat.
    pub params: View<'a>,
    /// The micro-batch.
    pub batch: &'a Batch,
    /// The layer's input, `[rows, hidden]`.
    pub x: View<'a>,
    /// Which layer, from 0 on.
    pub layer: usize,
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
    /// The embedding unit's gradient, flat; given when [`Model::tied`] and the embedding is trained.
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
    /// Puts adapters beside matrices of its layers; [`Model::units`] then has their parameters too.
    fn adapt(&mut self, lora: &lora::Lora) -> Result<(), String>;
    /// Inputs and outputs of its layers' matrices as they are multiplied, those of experts and adapters left out.
    fn linears(&self) -> Vec<(usize, usize)>;
    /// Multiplies its layers' matrices in fp8 from now on, or says why it can't.
    fn multiply_in_fp8(&mut self) -> Result<(), String>;
    /// Says the run's seed, which decides what dropout drops; until then it is 0.
    fn seed(&mut self, _seed: u64) {}
    /// Says which parameters of its own units (not those of experts) are trained. Gradients of the others needn't be written: they are not read.
    fn train(&mut self, _units: &[Unit]) {}
    /// Moves what it keeps beside its parameters to where ops compute.
    fn place(&mut self, _ops: &dyn Ops) {}
    /// Width of the residual stream.
    fn hidden(&self) -> usize;
    /// Number of tokens known.
    fn vocab(&self) -> usize;
    /// Elements of q, k and v of a token.
    fn attention_width(&self) -> usize;
    /// Does the head use the embedding's matrix?
    fn tied(&self) -> bool;
    /// Second names.
    fn ties(&self) -> Vec<Tie>;
    /// Are its matrices stored as `[in, out]`?
    fn in_out(&self) -> bool {
        false
    }
    /// What stored names begin with, where files of the model without its head leave it out.
    fn prefix(&self) -> Option<&'static str> {
        None
    }
    /// Is this stored tensor one that older files hold although nothing is learned in it?
    fn is_constant(&self, _name: &str) -> bool {
        false
    }
    /// Heads of queries, heads of keys and values, elements of a head.
    fn heads(&self) -> [usize; 3];
    /// Tokens that sliding layers attend to; `None`: all layers attend to the whole document.
    fn window(&self) -> Option<usize> {
        None
    }
    /// What layers with experts do, when the model has some.
    fn sparse(&self) -> Option<&dyn experts::Sparse> {
        None
    }
    /// What the job says about training them; a model without experts has nothing to say it to.
    fn train_experts(&mut self, _spec: &ExpertsSpec) {}
    /// The `config.json` that it was built from.
    fn hf_config(&self) -> &Map<String, Value>;
    /// Floating-point operations of matrix products per token, forward and backward (recomputation not counted).
    fn flops_per_token(&self, t: usize) -> f64;

    /// Lengths of what a layer's forward leaves for its backward.
    fn saved_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// Lengths of the buffers that layers share.
    fn scratch_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// Which of both are `f32` in every precision. An op that needs one as such stops the program when it isn't.
    fn statistics(&self) -> Statistics;

    /// `x[rows, hidden]` from tokens.
    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &Batch, x: ViewMut);
    /// Adds to the embedding unit's gradient; `dx` is spent.
    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &Batch, dx: ViewMut);

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

    /// Logits of one row of the head's input.
    fn logits(&self, ops: &dyn Ops, params: HeadParams, x: View, out: ViewMut, scratch: &mut Activations);

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

/// A model from its `config.json`, for sequences of at most so many tokens.
type Build = fn(&Map<String, Value>, usize) -> Result<Box<dyn Model>, String>;

/// A line of [`FAMILIES`].
pub struct Family {
    /// Name in job.yaml, and `model_type` in config.json.
    pub name: &'static str,
    /// Name in `architectures` of config.json.
    pub architecture: &'static str,
    /// Makes a model for sequences of at most so many tokens from a config.json, or says what of it isn't supported.
    build: Build,
    /// The config.json of a model that job.yaml describes.
    describe: fn(&ModelSpec) -> Map<String, Value>,
    /// Its rates of dropout in config.json.
    dropout: &'static [&'static str],
}

/// Every family the runtime trains. To add one: a file in `model/` and a line here.
pub const FAMILIES: &[Family] = &[
    gemma::GEMMA2,
    gemma::GEMMA3,
    gpt2::FAMILY,
    llama::FAMILY,
    mistral::FAMILY,
    mixtral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    qwen3_moe::FAMILY,
];

fn known(name: impl Fn(&Family) -> &'static str) -> String {
    FAMILIES.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// The family of a config.json.
fn family_of(config: &Map<String, Value>) -> Result<&'static Family, String> {
    let named: Vec<&str> = match config.get("architectures") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let found = FAMILIES.iter().find(|f| named == [f.architecture]);
    let family = found.ok_or_else(|| {
        let named = named.join(", ").chars().take(100).collect::<String>();
        format!(
            "config.json: architectures [{named}] are not supported; known: {}",
            known(|f| f.architecture)
        )
    })?;
    match config.get("model_type").and_then(Value::as_str) {
        Some(kind) if kind != family.name => {
            let kind: String = kind.chars().take(100).collect();
            Err(format!(
                "config.json: `model_type: {kind}` is not that of {}, {}",
                family.architecture, family.name
            ))
        }
        _ => Ok(family),
    }
}

/// The numbers of the model in a folder that the rest of the runtime checks: family, vocabulary and positions.
pub fn read_folder(folder: &Path) -> Result<(&'static str, u32, u32), String> {
    let config = config::read(folder)?;
    let family = family_of(&config)?;
    let f = config::Fields::new(&config);
    let positions = if family.name == gpt2::FAMILY.name { "n_positions" } else { "max_position_embeddings" };
    Ok((family.name, f.size("vocab_size")?, f.size(positions)?))
}

/// As [`build`], with what the job says about experts.
pub fn build_with(spec: &ModelSpec, experts: &ExpertsSpec, tokens: u32) -> Result<Box<dyn Model>, String> {
    let mut model = build(spec, tokens)?;
    model.train_experts(experts);
    Ok(model)
}

/// The model that the job names, for sequences of at most `tokens` tokens. `vocab_size` and `max_position_embeddings`
/// must be filled in; `from` must be a folder that can be opened as it is.
pub fn build(spec: &ModelSpec, tokens: u32) -> Result<Box<dyn Model>, String> {
    if let Some(folder) = &spec.from {
        let mut config = config::read(folder)?;
        let family = family_of(&config)?;
        config::set_dropout(&mut config, family.dropout, spec.dropout);
        return (family.build)(&config, tokens as usize);
    }
    let family = FAMILIES
        .iter()
        .find(|f| f.name == spec.family)
        .ok_or_else(|| format!("unknown model family `{}`; known: {}", spec.family, known(|f| f.name)))?;
    let mut config = (family.describe)(spec);
    config::set_dropout(&mut config, family.dropout, spec.dropout);
    let asked = [
        ("num_experts", spec.num_experts, ["num_experts", "num_local_experts"]),
        ("num_experts_per_tok", spec.num_experts_per_tok, ["num_experts_per_tok"; 2]),
        ("moe_intermediate_size", spec.moe_intermediate_size, ["moe_intermediate_size"; 2]),
    ];
    if let Some((key, ..)) =
        asked.iter().find(|(_, n, names)| n.is_some() && !names.iter().any(|n| config.contains_key(*n)))
    {
        return Err(format!("`{key}` has no effect in the family `{}`: remove it", family.name));
    }
    (family.build)(&config, tokens as usize)
}

/// All buffers of `a` at once, each exclusively.
fn each<const N: usize>(a: &mut Activations) -> [&mut Buf; N] {
    let mut it = a.0.iter_mut();
    std::array::from_fn(|_| it.next().expect("made from the lengths of this model"))
}
