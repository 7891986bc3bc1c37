//! [`Model`]: a model as the training loop sees it, namely parameter units and functions that
//! compute blocks from given parameters.
//!
//! A model holds no parameters and knows nothing about sharding. The caller passes the parameters
//! of a whole unit as one flat vector, and the model writes gradients of whole units. The units are
//! the embedding, the layers, and the head, in this order.
mod decoder;
mod dropout;
mod error;
mod gemma;
mod gpt2;
mod hf_config;
mod linear;
mod llama;
pub mod lora;
mod mistral;
mod mixtral;
pub mod moe;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;

pub use error::{ModelError, Result};

use crate::params::ParamUnit;
use contract::job::{ExpertsSpec, ModelSpec};
use device::{Buf, Dtype, Ops, View, ViewMut};
use serde_json::{Map, Value};
use std::path::Path;

/// One micro-batch. Its vectors have one element per token, sequence after sequence.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The number of sequences.
    pub sequences: usize,
    /// The number of tokens per sequence.
    pub seq_len: usize,
    /// The input tokens, each below the vocabulary size.
    pub tokens: Vec<u32>,
    /// The target token of each position, or [`device::ops::IGNORE_LABEL`] for no loss.
    pub labels: Vec<u32>,
    /// For each token the first position of its sequence that it may attend to: the beginning of
    /// its document.
    pub starts: Vec<u32>,
    /// For each token the first position that it may attend to in sliding-window layers. Empty if
    /// the model has no such layers.
    pub window_starts: Vec<u32>,
    /// In training, the number of the first sequence within the run, which selects the dropout
    /// masks. `None` disables dropout.
    pub first_sample: Option<u64>,
}

impl Batch {
    /// The number of tokens, which is the number of rows of every activation.
    pub fn rows(&self) -> usize {
        self.sequences * self.seq_len
    }

    /// Fills [`Batch::window_starts`] for layers in which a token attends to at most `window`
    /// tokens, including itself.
    pub fn set_window_starts(&mut self, window: usize) {
        let seq_len = self.seq_len.max(1);
        let window_start =
            |(i, &start): (usize, &u32)| start.max((i % seq_len + 1).saturating_sub(window) as u32);
        self.window_starts.clear();
        self.window_starts.extend(self.starts.iter().enumerate().map(window_start));
    }

    /// The number of positions with a loss.
    pub fn count_targets(&self) -> u64 {
        self.labels.iter().filter(|&&l| l != device::ops::IGNORE_LABEL).count() as u64
    }
}

/// Buffers for activations or scratch values; the model decides their number, lengths and meaning.
pub struct ActivationBuffers(pub Vec<Buf>);

impl ActivationBuffers {
    /// Allocates zeroed buffers of these lengths. Elements are of type `dtype`, except in the
    /// buffers whose indices are in `f32_indices`.
    pub fn new(ops: &dyn Ops, lengths: &[usize], dtype: Dtype, f32_indices: &[usize]) -> Self {
        let dtype_of = |i: usize| if f32_indices.contains(&i) { Dtype::F32 } else { dtype };
        ActivationBuffers(lengths.iter().enumerate().map(|(i, &n)| ops.zeroed(dtype_of(i), n)).collect())
    }
}

/// The indices of the buffers that are f32 in every precision, such as 1/rms and log-sum-exp.
#[derive(Clone, Copy, Debug, Default)]
pub struct F32Buffers {
    /// Indices into [`Model::saved_lengths`].
    pub saved: &'static [usize],
    /// Indices into [`Model::scratch_lengths`].
    pub scratch: &'static [usize],
}

/// The input of a layer. The backward pass gets the same input as the forward pass.
pub struct LayerInput<'a> {
    /// The parameters of the layer's unit, flat.
    pub params: View<'a>,
    /// The micro-batch.
    pub batch: &'a Batch,
    /// The residual stream before the layer, `[rows, hidden]`.
    pub x: View<'a>,
    /// The number of the layer, from 0.
    pub layer: usize,
}

/// The parameters that the head computes with.
pub struct HeadParams<'a> {
    /// The parameters of the head's unit, flat.
    pub head: View<'a>,
    /// The parameters of the embedding unit, flat; present only if
    /// [`Model::has_tied_embeddings`].
    pub embedding: Option<View<'a>>,
}

/// The output buffers of the head's backward pass. Each is overwritten.
pub struct HeadGrads<'a> {
    /// The gradient of the head's input, `[rows, hidden]`.
    pub dx: ViewMut<'a>,
    /// The gradient of the head's unit, flat.
    pub head: ViewMut<'a>,
    /// The gradient of the embedding unit, flat; present if [`Model::has_tied_embeddings`] and the
    /// embedding is trained.
    pub embedding: Option<ViewMut<'a>>,
    /// The factor of the gradients of logits.
    pub scale: f32,
}

/// A second name of a stored tensor, as in `_tied_weights_keys` of transformers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedWeight {
    /// The name that is not stored.
    pub alias: String,
    /// The name of the stored tensor.
    pub target: String,
}

/// A model architecture with its config.
///
/// Shapes: `rows` is the number of tokens of the micro-batch, `hidden` the width of the residual
/// stream.
pub trait Model: Send + Sync {
    /// The parameter units: embedding, layers, head. Experts are in separate units
    /// ([`moe::MoeModel::expert_params`]).
    fn units(&self) -> Vec<ParamUnit>;
    /// Adds LoRA adapters to matrices of the layers. Their parameters become part of
    /// [`Model::units`].
    ///
    /// # Errors
    /// [`ModelError::LoraTargetUnknown`].
    fn add_lora(&mut self, lora: &lora::Lora) -> Result<()>;
    /// Inputs and outputs of each matmul of a layer, without experts and adapters.
    fn linear_shapes(&self) -> Vec<(usize, usize)>;
    /// Computes the matmuls of the layers in FP8 from now on.
    ///
    /// # Errors
    /// [`ModelError::Fp8MoeUnsupported`] or [`ModelError::Fp8SizeUnsupported`].
    fn enable_fp8(&mut self) -> Result<()>;
    /// Sets the run's seed, which selects the dropout masks. The seed of a new model is 0.
    fn set_dropout_seed(&mut self, _seed: u64) {}
    /// Selects the gradients to compute: those of the parameters that `units` (as in
    /// [`Model::units`]) marks as trained. Gradients of other parameters have unspecified values.
    fn set_trained(&mut self, _units: &[ParamUnit]) {}
    /// Moves constants, such as the tables of rotary embedding, to the device of `ops`.
    fn move_to_device(&mut self, _ops: &dyn Ops) {}
    /// The width of the residual stream.
    fn hidden_size(&self) -> usize;
    /// The number of tokens in the vocabulary.
    fn vocab_size(&self) -> usize;
    /// The number of elements of q, k and v of one token together.
    fn qkv_width(&self) -> usize;
    /// Whether the head uses the embedding matrix (`tie_word_embeddings`).
    fn has_tied_embeddings(&self) -> bool;
    /// The second names of stored tensors.
    fn tied_weights(&self) -> Vec<TiedWeight>;
    /// Whether matrices are stored as `[in, out]`, like transformers' `Conv1D`, instead of
    /// `[out, in]`. PEFT calls this `fan_in_fan_out`.
    fn stores_transposed_matrices(&self) -> bool {
        false
    }
    /// The prefix of stored names that files of the model without its head omit, as
    /// `base_model_prefix` of transformers.
    fn base_model_prefix(&self) -> Option<&'static str> {
        None
    }
    /// Whether a stored tensor of this name is a constant, which older checkpoints contain and
    /// which is not loaded.
    fn is_constant_tensor(&self, _name: &str) -> bool {
        false
    }
    /// The number of query heads, the number of key and value heads, and the width of a head.
    fn attention_dims(&self) -> [usize; 3];
    /// The tokens that a token of a sliding-window layer attends to; `None` if every layer has full
    /// attention.
    fn sliding_window(&self) -> Option<usize> {
        None
    }
    /// The mixture-of-experts interface; `None` for a dense model.
    fn moe(&self) -> Option<&dyn moe::MoeModel> {
        None
    }
    /// Sets the coefficients of the router losses that `train.experts` specifies. Has no effect on
    /// a dense model.
    fn set_router_losses(&mut self, _spec: &ExpertsSpec) {}
    /// The config.json that the model was built from.
    fn hf_config(&self) -> &Map<String, Value>;
    /// Floating-point operations of matmuls per token in forward and backward pass, without
    /// recomputation, for sequences of `seq_len` tokens.
    fn flops_per_token(&self, seq_len: usize) -> f64;

    /// The lengths of the buffers in which a layer's forward pass saves values for its backward
    /// pass, for `b` sequences of `t` tokens.
    fn saved_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// The lengths of the scratch buffers that all blocks share, for `b` sequences of `t` tokens.
    fn scratch_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// The saved and scratch buffers that are f32 in every precision. Ops panic if a buffer has
    /// another type than they require.
    fn f32_buffers(&self) -> F32Buffers;

    /// Computes the embedding of each token and writes it to `x`, `[rows, hidden]`. `params` is the
    /// flat vector of the embedding unit.
    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &Batch, x: ViewMut);
    /// Adds the gradient of the embedding to `grads`, the flat gradient of the embedding unit.
    /// `dx`, `[rows, hidden]`, is the gradient of the embedding's output; its values are
    /// unspecified afterwards.
    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &Batch, dx: ViewMut);

    /// Computes a layer: writes `y`, `[rows, hidden]`, and saves values for the backward pass.
    /// Without `y` only the saved values are computed (recomputation).
    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    );
    /// Computes the gradients of a layer. `dx`, `[rows, hidden]`, is the gradient of the output on
    /// entry and of the input on return. `grads`, the gradient of the layer's unit, is overwritten.
    fn layer_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    );

    /// Computes the logits `out`, `[vocab]`, of one row `x`, `[hidden]`, of the head's input.
    fn logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        out: ViewMut,
        scratch: &mut ActivationBuffers,
    );

    /// Computes the cross-entropy `loss`, `[rows]`, from the head's input `x`, `[rows, hidden]`.
    /// With `grads` the backward pass is computed, too.
    fn head_loss(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &Batch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    );
}

/// Builds a model from its config.json, for sequences of at most the given number of tokens.
type BuildModel = fn(&Map<String, Value>, usize) -> Result<Box<dyn Model>>;

/// A model family that can be trained: its names, and how to build its models.
pub struct ModelFamily {
    /// The name in job.yaml, which is `model_type` in config.json.
    pub name: &'static str,
    /// The name in `architectures` of config.json: a class of transformers.
    pub architecture: &'static str,
    /// Builds a model; rejects configs with unsupported keys or values.
    build: BuildModel,
    /// Makes the config.json of a model that job.yaml describes.
    spec_to_hf_config: fn(&ModelSpec) -> Map<String, Value>,
    /// The keys of dropout rates in config.json.
    dropout_keys: &'static [&'static str],
}

/// Every supported model family. A new family is a file in `model/` and an entry here.
pub const FAMILIES: &[ModelFamily] = &[
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

/// The family of a config.json, from `architectures` and `model_type`.
fn find_family(config: &Map<String, Value>) -> Result<&'static ModelFamily> {
    let architectures: Vec<&str> = match config.get("architectures") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let Some(family) = FAMILIES.iter().find(|f| architectures == [f.architecture]) else {
        return Err(ModelError::ArchitectureUnsupported {
            architectures: architectures.iter().take(4).map(|name| hf_config::shorten(name)).collect(),
            supported: FAMILIES.iter().map(|f| f.architecture).collect(),
        });
    };
    match config.get("model_type").and_then(Value::as_str) {
        Some(model_type) if model_type != family.name => Err(ModelError::ModelTypeMismatch {
            model_type: hf_config::shorten(model_type),
            architecture: family.architecture,
            expected: family.name,
        }),
        _ => Ok(family),
    }
}

/// The parts of a model directory's config.json that are compared with the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigSummary {
    /// The name of the model family.
    pub family: &'static str,
    /// The number of tokens in the vocabulary.
    pub vocab_size: u32,
    /// The largest number of tokens of a sequence.
    pub max_positions: u32,
}

/// Reads the parts of a model directory's config.json that are compared with the job.
///
/// # Errors
/// The config cannot be read, or its architecture is not supported.
pub fn read_config_summary(directory: &Path) -> Result<ConfigSummary> {
    let config = hf_config::read_hf_config(directory)?;
    let family = find_family(&config)?;
    let fields = hf_config::ConfigFields::new(&config);
    let positions = if family.name == gpt2::FAMILY.name { "n_positions" } else { "max_position_embeddings" };
    let (vocab_size, max_positions) = (fields.size("vocab_size")?, fields.size(positions)?);
    Ok(ConfigSummary { family: family.name, vocab_size, max_positions })
}

/// Builds the model of a job ([`build`]) with the router losses that `train.experts` specifies.
///
/// # Errors
/// The config is unusable or has unsupported keys or values.
pub fn build_with_experts(spec: &ModelSpec, experts: &ExpertsSpec, seq_len: u32) -> Result<Box<dyn Model>> {
    let mut model = build(spec, seq_len)?;
    model.set_router_losses(experts);
    Ok(model)
}

/// Builds the model of a job for sequences of at most `seq_len` tokens.
///
/// `vocab_size` and `max_position_embeddings` of `spec` must be set, and `from` must be an absolute
/// path or relative to the current directory.
///
/// # Errors
/// The config is unusable or has unsupported keys or values.
pub fn build(spec: &ModelSpec, seq_len: u32) -> Result<Box<dyn Model>> {
    if let Some(directory) = &spec.from {
        let mut config = hf_config::read_hf_config(directory)?;
        let family = find_family(&config)?;
        hf_config::set_dropout(&mut config, family.dropout_keys, spec.dropout);
        return (family.build)(&config, seq_len as usize);
    }
    let family =
        FAMILIES.iter().find(|f| f.name == spec.family).ok_or_else(|| ModelError::FamilyUnknown {
            family: hf_config::shorten(&spec.family),
            supported: FAMILIES.iter().map(|f| f.name).collect(),
        })?;
    let mut config = (family.spec_to_hf_config)(spec);
    hf_config::set_dropout(&mut config, family.dropout_keys, spec.dropout);
    // A key of the job has an effect if the family's config has one of these keys.
    let expert_keys = [
        ("num_experts", spec.num_experts, ["num_experts", "num_local_experts"]),
        ("num_experts_per_tok", spec.num_experts_per_tok, ["num_experts_per_tok"; 2]),
        ("moe_intermediate_size", spec.moe_intermediate_size, ["moe_intermediate_size"; 2]),
    ];
    for (key, value, config_keys) in expert_keys {
        if value.is_some() && !config_keys.iter().any(|key| config.contains_key(*key)) {
            return Err(ModelError::KeyWithoutEffect { key, family: family.name });
        }
    }
    (family.build)(&config, seq_len as usize)
}

/// Exclusive access to the first `N` buffers at once.
///
/// # Panics
/// There are fewer than `N` buffers.
fn split_buffers<const N: usize>(buffers: &mut ActivationBuffers) -> [&mut Buf; N] {
    let mut buffers = buffers.0.iter_mut();
    std::array::from_fn(|_| buffers.next().expect("the model declares at least N buffers"))
}
