//! [`Model`]: the interface between the training loop and model architectures. A model describes
//! its parameter units, and computes one block at a time from the parameters that are passed to it.
//!
//! A model holds no parameters and does not depend on sharding. The caller passes the parameters of
//! a whole unit as one flat vector, and the model writes gradients of whole units. The units are
//! the embedding, the layers, and the head, in this order.
mod decoder;
mod dropout_module;
mod error;
mod gemma;
mod gpt2;
mod hf_config;
mod linear_precision;
mod llama;
pub mod lora;
mod mistral;
mod mixtral;
pub mod moe;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rotary_embedding;

pub use error::{ModelError, Result};

use crate::params::ParamUnit;
use contract::job::{ExpertsSpec, ModelSpec};
use device::{Buf, Dtype, Ops, View, ViewMut};
use serde_json::{Map, Value};
use std::path::Path;

/// The inputs and labels of one micro-batch. Each vector has one element per token, sequence after
/// sequence.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// The number of sequences.
    pub sequences: usize,
    /// The number of tokens per sequence.
    pub seq_len: usize,
    /// The input tokens, each below the vocabulary size.
    pub tokens: Vec<u32>,
    /// The target token of each position, or [`device::ops::IGNORE_LABEL`] for no loss.
    pub labels: Vec<u32>,
    /// For each token, the first position of its sequence to which the token attends. This is the
    /// beginning of the token's document.
    pub starts: Vec<u32>,
    /// For each token, the first position to which the token attends in sliding-window layers.
    /// Empty if the model has no sliding-window layers.
    pub window_starts: Vec<u32>,
    /// In training, the number of the first sequence within the run, which selects the dropout
    /// masks. `None` disables dropout.
    pub first_sample: Option<u64>,
}

impl MicroBatch {
    /// Returns the number of tokens, which is the number of rows of every activation.
    pub fn rows(&self) -> usize {
        self.sequences * self.seq_len
    }

    /// Fills [`MicroBatch::window_starts`] for layers in which a token attends to at most `window`
    /// tokens, including itself.
    pub fn set_window_starts(&mut self, window: usize) {
        let seq_len = self.seq_len.max(1);
        let window_start =
            |(i, &start): (usize, &u32)| start.max((i % seq_len + 1).saturating_sub(window) as u32);
        self.window_starts.clear();
        self.window_starts.extend(self.starts.iter().enumerate().map(window_start));
    }

    /// Counts the positions whose label counts for the loss.
    pub fn count_targets(&self) -> u64 {
        self.labels.iter().filter(|&&l| l != device::ops::IGNORE_LABEL).count() as u64
    }
}

/// Buffers for activations or scratch values. The model determines their number, lengths and
/// contents.
pub struct ActivationBuffers(pub Vec<Buf>);

impl ActivationBuffers {
    /// Allocates zeroed buffers with these numbers of elements. The buffers at `f32_indices` have
    /// elements of type f32, and all others of type `dtype`.
    pub fn new(ops: &dyn Ops, lengths: &[usize], dtype: Dtype, f32_indices: &[usize]) -> Self {
        let dtype_of = |i: usize| if f32_indices.contains(&i) { Dtype::F32 } else { dtype };
        ActivationBuffers(lengths.iter().enumerate().map(|(i, &n)| ops.zeroed(dtype_of(i), n)).collect())
    }
}

/// The indices of the buffers that are f32 in every precision, such as 1/rms and log-sum-exp.
#[derive(Clone, Copy, Debug, Default)]
pub struct F32BufferIndices {
    /// Indices into the result of [`Model::saved_buffer_lengths`].
    pub saved: &'static [usize],
    /// Indices into the result of [`Model::scratch_buffer_lengths`].
    pub scratch: &'static [usize],
}

/// The input of a layer's forward pass, which the backward pass receives, too.
pub struct LayerInput<'a> {
    /// The flat vector of the parameters of the layer's unit.
    pub params: View<'a>,
    /// The micro-batch of which the layer is computed.
    pub batch: &'a MicroBatch,
    /// The residual stream before the layer, `[rows, hidden]`.
    pub x: View<'a>,
    /// The number of the layer, from 0.
    pub layer: usize,
}

/// The parameters that the head uses.
pub struct HeadParams<'a> {
    /// The flat vector of the parameters of the head's unit.
    pub head: View<'a>,
    /// The flat vector of the parameters of the embedding unit. `None` if
    /// [`Model::has_tied_embeddings`] is false.
    pub embedding: Option<View<'a>>,
}

/// The output buffers of the head's backward pass. The backward pass overwrites all buffers.
pub struct HeadGrads<'a> {
    /// The gradient of the head's input, `[rows, hidden]`.
    pub dx: ViewMut<'a>,
    /// The flat vector of the gradient of the head's unit.
    pub head: ViewMut<'a>,
    /// The flat vector of the gradient of the embedding unit. `None` if
    /// [`Model::has_tied_embeddings`] is false or the embedding is frozen.
    pub embedding: Option<ViewMut<'a>>,
    /// The factor by which the gradients of the logits are multiplied.
    pub scale: f32,
}

/// A second name of a stored tensor (`_tied_weights_keys` in transformers).
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
    /// Returns the parameter units: embedding, layers, head. Experts are in separate units
    /// ([`moe::MoeModel::expert_params`]).
    fn param_units(&self) -> Vec<ParamUnit>;
    /// Adds LoRA adapters to matrices of the layers. The parameters of the adapters become part of
    /// [`Model::param_units`].
    ///
    /// # Errors
    ///
    /// Fails with [`ModelError::LoraTargetUnknown`] if a target matches no matrix.
    fn add_lora_adapters(&mut self, lora: &lora::LoraConfig) -> Result<()>;
    /// Returns the number of inputs and outputs of each matmul of a layer, without experts and
    /// adapters.
    fn linear_shapes(&self) -> Vec<(usize, usize)>;
    /// Switches the matmuls of the layers to FP8.
    ///
    /// # Errors
    ///
    /// Fails with [`ModelError::Fp8MoeUnsupported`] for a model with experts, or with
    /// [`ModelError::Fp8SizeUnsupported`] for a dimension of an unsupported size.
    fn enable_fp8(&mut self) -> Result<()>;
    /// Sets the run's seed, which selects the dropout masks. The seed of a new model is 0.
    fn set_dropout_seed(&mut self, _seed: u64) {}
    /// Restricts the backward pass to the gradients of trained parameters. `units` are those of
    /// [`Model::param_units`] with the trained parameters marked. Gradients of other parameters
    /// have unspecified values.
    fn set_trained_params(&mut self, _units: &[ParamUnit]) {}
    /// Moves constants, such as the tables of rotary embedding, to the device of `ops`.
    fn move_to_device(&mut self, _ops: &dyn Ops) {}
    /// Returns the width of the residual stream.
    fn hidden_size(&self) -> usize;
    /// Returns the number of tokens in the vocabulary.
    fn vocab_size(&self) -> usize;
    /// Returns the number of elements of q, k and v of one token together.
    fn qkv_width(&self) -> usize;
    /// Returns whether the head uses the embedding matrix (`tie_word_embeddings`).
    fn has_tied_embeddings(&self) -> bool;
    /// Returns the second names of tied weights, with the names under which the tensors are stored.
    fn tied_weights(&self) -> Vec<TiedWeight>;
    /// Returns whether matrices are stored as `[in, out]`, as in `Conv1D` of transformers, instead
    /// of `[out, in]`. PEFT calls this `fan_in_fan_out`.
    fn stores_transposed_matrices(&self) -> bool {
        false
    }
    /// Returns the prefix of stored names that is absent in files of the model without its head
    /// (`base_model_prefix` in transformers).
    fn base_model_prefix(&self) -> Option<&'static str> {
        None
    }
    /// Returns whether the tensor of this name is a constant. Older checkpoints contain constants;
    /// they are not loaded.
    fn is_constant_tensor(&self, _name: &str) -> bool {
        false
    }
    /// Returns the number of query heads, the number of key and value heads, and the width of a
    /// head.
    fn attention_dims(&self) -> [usize; 3];
    /// Returns the number of tokens to which a token attends in sliding-window layers, including
    /// itself, or `None` if every layer has full attention.
    fn sliding_window(&self) -> Option<usize> {
        None
    }
    /// Returns the mixture-of-experts interface of the model, or `None` for a dense model.
    fn as_moe_model(&self) -> Option<&dyn moe::MoeModel> {
        None
    }
    /// Sets the coefficients of the router losses that `train.experts` specifies. Has no effect on
    /// a dense model.
    fn set_router_losses(&mut self, _spec: &ExpertsSpec) {}
    /// Returns the config.json from which the model was built.
    fn hf_config(&self) -> &Map<String, Value>;
    /// Computes the floating-point operations of matmuls per token in forward and backward pass,
    /// without recomputation, for sequences of `seq_len` tokens.
    fn compute_flops_per_token(&self, seq_len: usize) -> f64;

    /// Computes the lengths, in elements, of the buffers in which a layer's forward pass saves
    /// values for its backward pass. The micro-batch has `b` sequences of `t` tokens.
    fn saved_buffer_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// Computes the lengths, in elements, of the scratch buffers that all blocks share. The
    /// micro-batch has `b` sequences of `t` tokens.
    fn scratch_buffer_lengths(&self, b: usize, t: usize) -> Vec<usize>;
    /// Returns the indices of the saved and scratch buffers that are f32 in every precision.
    fn f32_buffer_indices(&self) -> F32BufferIndices;

    /// Computes the embedding of each token and writes it to `x`, `[rows, hidden]`. `params` is the
    /// flat vector of the embedding unit.
    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, x: ViewMut);
    /// Adds the gradient of the embedding to `grads`, the flat gradient of the embedding unit.
    /// `dx`, `[rows, hidden]`, is the gradient of the embedding's output. Leaves unspecified values
    /// in `dx`.
    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, dx: ViewMut);

    /// Computes a layer. Writes the output to `y`, `[rows, hidden]`, and values for the backward
    /// pass to `saved`. If `y` is `None`, computes only the saved values (recomputation).
    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    );
    /// Computes the gradients of a layer. `dx`, `[rows, hidden]`, is the gradient of the layer's
    /// output on entry and of its input on return. Overwrites `grads`, the gradient of the layer's
    /// unit.
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
    fn compute_logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        out: ViewMut,
        scratch: &mut ActivationBuffers,
    );

    /// Computes the cross-entropy `loss`, `[rows]`, from the head's input `x`, `[rows, hidden]`.
    /// Also computes the backward pass if `grads` are given.
    fn compute_head_loss(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &MicroBatch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    );
}

/// A function that builds a model from its config.json, for sequences of at most the given number
/// of tokens.
type ModelBuilderFn = fn(&Map<String, Value>, usize) -> Result<Box<dyn Model>>;

/// A model family that can be trained: its names, and the functions that build its models.
pub struct ModelFamily {
    /// The name of the family in job.yaml, equal to `model_type` of config.json.
    pub name: &'static str,
    /// The class of transformers that `architectures` of config.json names.
    pub architecture: &'static str,
    /// Builds a model. Rejects configs with unsupported keys or values.
    build: ModelBuilderFn,
    /// Builds the config.json of a model that job.yaml describes.
    build_hf_config: fn(&ModelSpec) -> Map<String, Value>,
    /// The keys of dropout rates in config.json.
    dropout_keys: &'static [&'static str],
}

/// The supported model families.
pub const MODEL_FAMILIES: &[ModelFamily] = &[
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

/// Returns the model family of a config.json. Fails if no family has its `architectures`, or
/// `model_type` contradicts them.
fn find_model_family(config: &Map<String, Value>) -> Result<&'static ModelFamily> {
    let architectures: Vec<&str> = match config.get("architectures") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let Some(family) = MODEL_FAMILIES.iter().find(|f| architectures == [f.architecture]) else {
        return Err(ModelError::ArchitectureUnsupported {
            architectures: architectures.iter().take(4).map(|name| hf_config::shorten_text(name)).collect(),
            supported: MODEL_FAMILIES.iter().map(|f| f.architecture).collect(),
        });
    };
    match config.get("model_type").and_then(Value::as_str) {
        Some(model_type) if model_type != family.name => Err(ModelError::ModelTypeMismatch {
            model_type: hf_config::shorten_text(model_type),
            architecture: family.architecture,
            expected: family.name,
        }),
        _ => Ok(family),
    }
}

/// The values of a model directory's config.json that the preflight compares with the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelConfigSummary {
    /// The name of the model family.
    pub family: &'static str,
    /// The number of tokens in the vocabulary.
    pub vocab_size: u32,
    /// The largest number of tokens of a sequence.
    pub max_positions: u32,
}

/// Reads the values of a model directory's config.json that the preflight compares with the job.
///
/// # Errors
///
/// Fails if the config cannot be read, or if its architecture is not supported.
pub fn read_model_config_summary(directory: &Path) -> Result<ModelConfigSummary> {
    let config = hf_config::read_hf_config(directory)?;
    let family = find_model_family(&config)?;
    let fields = hf_config::HfConfigFields::new(&config);
    let positions = if family.name == gpt2::FAMILY.name { "n_positions" } else { "max_position_embeddings" };
    let (vocab_size, max_positions) = (fields.read_size("vocab_size")?, fields.read_size(positions)?);
    Ok(ModelConfigSummary { family: family.name, vocab_size, max_positions })
}

/// Builds the model of a job ([`build_model`]), and sets the router losses that `train.experts`
/// specifies.
///
/// # Errors
///
/// Fails if the config is unusable or has unsupported keys or values.
pub fn build_model_with_router_losses(
    spec: &ModelSpec,
    experts: &ExpertsSpec,
    seq_len: u32,
) -> Result<Box<dyn Model>> {
    let mut model = build_model(spec, seq_len)?;
    model.set_router_losses(experts);
    Ok(model)
}

/// Builds the model of a job for sequences of at most `seq_len` tokens.
///
/// `vocab_size` and `max_position_embeddings` of `spec` must be set, and `from` must be an absolute
/// path or relative to the current directory.
///
/// # Errors
///
/// Fails if the config is unusable or has unsupported keys or values.
pub fn build_model(spec: &ModelSpec, seq_len: u32) -> Result<Box<dyn Model>> {
    if let Some(directory) = &spec.from {
        let mut config = hf_config::read_hf_config(directory)?;
        let family = find_model_family(&config)?;
        hf_config::set_dropout_rates(&mut config, family.dropout_keys, spec.dropout);
        return (family.build)(&config, seq_len as usize);
    }
    let family =
        MODEL_FAMILIES.iter().find(|f| f.name == spec.family).ok_or_else(|| ModelError::FamilyUnknown {
            family: hf_config::shorten_text(&spec.family),
            supported: MODEL_FAMILIES.iter().map(|f| f.name).collect(),
        })?;
    let mut config = (family.build_hf_config)(spec);
    hf_config::set_dropout_rates(&mut config, family.dropout_keys, spec.dropout);
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

/// Returns exclusive references to the first `N` buffers.
///
/// # Panics
///
/// Panics if there are fewer than `N` buffers.
fn borrow_first_buffers<const N: usize>(buffers: &mut ActivationBuffers) -> [&mut Buf; N] {
    let mut buffers = buffers.0.iter_mut();
    std::array::from_fn(|_| buffers.next().expect("the model declares at least N buffers"))
}
