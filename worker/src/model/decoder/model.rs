//! [`Model`]: a decoder-only transformer with its parameters, names and options for training.
use super::{
    decoder_config::{DecoderConfig, DropoutConfig},
    layer_layout::{DecoderLayerSpans, build_layer_unit},
};
use crate::{
    model::{
        dropout_module::DropoutModule,
        error::{ModelError, Result},
        hf_config::ConfigKeyNames,
        linear_layers::LinearLayers,
        linear_layout::AdaptableLayerMatmuls,
        lora::LoraConfig,
        model_sizes::{ModelSizes, TiedWeight},
        moe::select_router_loss_coefficients,
        rotary_embedding::RopeTables,
    },
    params::{ParamInit, ParamSpec, ParamUnit},
};
use jobspec::ExpertsSpec;
use serde_json::{Map, Value};
use std::ops::Range;

/// The name under which files store the output layer's matrix, unless the matrix is tied to the
/// embedding.
const LM_HEAD_NAME: &str = "lm_head.weight";

/// A decoder-only transformer of any supported model family, which knows its config and its
/// parameters' names and positions, but does not contain the parameters' values.
///
/// A model describes its parameter units, and computes one block at a time from the parameters that
/// are passed to it.
pub struct Model {
    pub(super) config: DecoderConfig,
    /// The names of config keys, for errors.
    key_names: ConfigKeyNames,
    /// The config.json from which `config` was read.
    hf_config: Map<String, Value>,
    /// The tables of the rotary embedding of layers with full attention; `None` with learned
    /// positions.
    pub(super) rope_tables: Option<RopeTables>,
    /// The tables of the rotary embedding of sliding-window layers; `None` if they equal
    /// `rope_tables`.
    pub(super) sliding_rope_tables: Option<RopeTables>,
    /// The layout of a dense layer. A layer with experts has an equal layout up to the norm before
    /// its router.
    pub(super) spans: DecoderLayerSpans,
    /// The number of matrix elements of all layers by which one token is multiplied, for counting
    /// floating-point operations.
    matrix_elements: usize,
    /// The matmuls of the layers.
    pub(super) linears: LinearLayers,
    /// For each layer, whether the gradient of the router's matrix is computed.
    pub(super) needs_router_grad: Vec<bool>,
    /// Whether the gradient of the head's matrix is computed.
    pub(super) needs_head_grad: bool,
    /// The dropout of the embedding.
    pub(super) embedding_dropout: DropoutModule,
    /// The dropout modules of each layer.
    pub(super) layer_dropout: Vec<LayerDropout>,
}

/// The dropout modules of one layer, for attention probabilities and for the outputs of attention
/// and MLP.
pub(super) struct LayerDropout {
    /// The dropout of attention probabilities.
    pub(super) attention: DropoutModule,
    /// The dropout of the output of attention.
    pub(super) attention_out: DropoutModule,
    /// The dropout of the output of the MLP.
    pub(super) mlp_out: DropoutModule,
}

impl Model {
    /// Creates a decoder-only transformer with the sizes and options `config`, for sequences of at
    /// most `tokens` tokens. `hf_config` is the config.json from which `config` was read, and
    /// `key_names` are the names of its keys.
    pub(in crate::model) fn new(
        config: DecoderConfig,
        key_names: ConfigKeyNames,
        hf_config: &Map<String, Value>,
        tokens: usize,
    ) -> Self {
        let tables = |rope| RopeTables::new(rope, tokens, config.sizes.head_dim);
        let active_expert_elements = |l: usize| match &config.moe {
            Some(moe) if config.is_moe_layer(l) => moe.shape.per_token * moe.shape.expert_len(),
            _ => 0,
        };
        let layer_matrix_elements = |l: usize| -> usize {
            let params = build_layer_unit(&config, Some(l)).0.params;
            let dense = params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum::<usize>();
            active_expert_elements(l) + dense
        };
        let mut model = Model {
            key_names,
            hf_config: hf_config.clone(),
            rope_tables: config.rope.map(tables),
            sliding_rope_tables: config.sliding_rope.map(tables),
            spans: build_layer_unit(&config, None).1,
            matrix_elements: (0..config.sizes.layers).map(layer_matrix_elements).sum(),
            linears: LinearLayers::new(config.has_transposed_matrices),
            needs_router_grad: vec![true; config.sizes.layers],
            needs_head_grad: true,
            embedding_dropout: DropoutModule::new(0.0, 0, ""),
            layer_dropout: Vec::new(),
            config,
        };
        model.set_dropout_seed(0);
        model
    }

    /// Returns the range of the router's matrix, `[experts, hidden]`, in the flat vector with the
    /// parameters of a layer that has experts. The range is empty if the model has no experts.
    pub(super) fn router_span(&self) -> Range<usize> {
        let at = self.spans.gate_up.weight.start;
        let experts = self.config.moe.as_ref().map_or(0, |moe| moe.shape.experts);
        at..at + experts * self.config.sizes.hidden
    }

    /// Returns the number of elements of the embedding matrix, `vocab` times `hidden`, which is
    /// also that of the output layer's matrix. Learned positions follow the embedding's matrix in
    /// its unit.
    pub(super) fn embedding_matrix_len(&self) -> usize {
        self.config.sizes.vocab * self.config.sizes.hidden
    }

    /// Returns the keys and values of the config.json from which this model was built.
    pub fn hf_config(&self) -> &Map<String, Value> {
        &self.hf_config
    }

    /// Returns the sizes of the model: vocabulary, width, layers and heads.
    pub fn sizes(&self) -> ModelSizes {
        self.config.sizes
    }

    /// Returns the parameter units of the model (groups of parameters that are gathered and
    /// released together): the embedding, each layer, and the head. Experts are in separate units
    /// ([`crate::model::MoeModel::expert_params`]).
    pub fn param_units(&self) -> Vec<ParamUnit> {
        let (config, d) = (&self.config, self.config.sizes.hidden);
        let param = |name: String, shape: Vec<usize>, init| ParamSpec { name, shape, init };
        let matrix = |name: String, rows| param(name, vec![rows, d], ParamInit::Normal(config.init_std));
        let mut embedding = vec![matrix(self.embedding_name(), config.sizes.vocab)];
        embedding.extend(config.learned_positions.map(|p| matrix(format!("{}.weight", p.name), p.count)));
        let norm = config.names.final_norm;
        let mut head = vec![param(format!("{norm}.weight"), vec![d], config.initial_norm_weights())];
        if config.params_per_norm() > d {
            head.push(param(format!("{norm}.bias"), vec![d], ParamInit::Zeros));
        }
        if !self.has_tied_embeddings() {
            head.push(matrix(LM_HEAD_NAME.into(), config.sizes.vocab));
        }
        let layers = (0..config.sizes.layers)
            .map(|l| self.linears.append_adapter_params(l, build_layer_unit(config, Some(l)).0));
        std::iter::once(ParamUnit::new("embedding", embedding))
            .chain(layers)
            .chain(std::iter::once(ParamUnit::new("head", head)))
            .collect()
    }

    /// Returns the input and output width of each of the four matmuls with weights in a layer (qkv,
    /// o, gate_up, down), not counting experts and LoRA adapters.
    pub fn list_matmul_sizes(&self) -> Vec<(usize, usize)> {
        let (sizes, config) = (self.config.sizes, &self.config);
        let d = sizes.hidden;
        vec![
            (d, sizes.qkv_width()),
            (sizes.attention_width(), d),
            (d, config.gate_up_width()),
            (config.dense_mlp_width(), d),
        ]
    }

    /// Returns whether the output layer uses the embedding matrix as its weight
    /// (`tie_word_embeddings`).
    pub fn has_tied_embeddings(&self) -> bool {
        self.config.ties_embeddings
    }

    /// Returns the name of the embedding matrix in files.
    fn embedding_name(&self) -> String {
        format!("{}.weight", self.config.names.embedding)
    }

    /// Returns the model's tied weights, each as the name under which files store the tensor and
    /// the tensor's second name.
    pub fn tied_weights(&self) -> Vec<TiedWeight> {
        let tie = TiedWeight { alias: LM_HEAD_NAME.into(), target: self.embedding_name() };
        if self.has_tied_embeddings() { vec![tie] } else { Vec::new() }
    }

    /// Returns whether checkpoint files store the matrices as `[in, out]`, as in `Conv1D` of
    /// transformers, instead of `[out, in]`. PEFT calls this `fan_in_fan_out`.
    pub fn stores_transposed_matrices(&self) -> bool {
        self.config.has_transposed_matrices
    }

    /// Returns the prefix of tensor names, such as `transformer.` in GPT-2, that is absent in files
    /// of a model without output layer (`base_model_prefix` of transformers).
    pub fn base_model_prefix(&self) -> Option<&'static str> {
        self.config.names.base_prefix
    }

    /// Returns whether `name` is the name of a constant, such as a causal mask, that older
    /// checkpoints store among the tensors. Constants are not loaded.
    pub fn is_constant_tensor(&self, name: &str) -> bool {
        let names = &self.config.names;
        let prefix = names.base_prefix.unwrap_or_default();
        let without_prefix = |name| str::strip_prefix(name, prefix).unwrap_or(name);
        let in_layers = without_prefix(name).strip_prefix(without_prefix(names.layers));
        let in_layer = in_layers.and_then(|n| n.strip_prefix('.')?.split_once('.'));
        in_layer.is_some_and(|(_, tensor)| names.constants.contains(&tensor))
    }

    /// Returns the number of tokens to which a token attends in sliding-window layers, including
    /// itself, or `None` if every layer has full attention.
    pub fn sliding_window(&self) -> Option<usize> {
        self.config.sliding_window.filter(|_| self.config.sliding_layers.contains(&true))
    }

    /// Computes how many floating-point operations the matmuls of the forward and backward pass
    /// need per token, without recomputation, for sequences of `t` tokens.
    pub fn compute_flops_per_token(&self, t: usize) -> f64 {
        let sizes = self.config.sizes;
        let matrix_elements = self.matrix_elements as f64 + (sizes.vocab * sizes.hidden) as f64;
        let whole = t as f64;
        // Twice the mean number of keys that a token attends to.
        let keys = |is_sliding: &bool| match self.config.sliding_window {
            Some(w) if *is_sliding && w < t => 2.0 * w as f64 - (w * w) as f64 / whole,
            _ => whole,
        };
        let keys: f64 = self.config.sliding_layers.iter().map(keys).sum();
        6.0 * matrix_elements + 6.0 * keys * sizes.attention_width() as f64
    }

    /// Adds LoRA adapters to those matrices of the layers that the job's LoRA targets select.
    /// Experts and routers have none. The parameters of the adapters become part of
    /// [`Model::param_units`].
    ///
    /// # Errors
    ///
    /// Fails with [`ModelError::LoraTargetUnknown`] if a target matches no matrix.
    pub fn add_lora_adapters(&mut self, lora: &LoraConfig) -> Result<()> {
        let layer = |l| {
            let (unit, spans) = build_layer_unit(&self.config, Some(l));
            let prefix = format!("{}.", self.config.layer_prefix(l));
            AdaptableLayerMatmuls { prefix, unit_len: unit.len(), linears: spans.into_linears() }
        };
        let layers: Vec<AdaptableLayerMatmuls> = (0..self.config.sizes.layers).map(layer).collect();
        self.linears.add_adapters(lora, &layers, self.config.moe.is_some())
    }

    /// Switches the matmuls with the layers' weight matrices to fp8 precision.
    ///
    /// # Errors
    ///
    /// Fails with [`ModelError::Fp8MoeUnsupported`] for a model with experts, or with
    /// [`ModelError::Fp8SizeUnsupported`] for a dimension of an unsupported size.
    pub fn enable_fp8(&mut self) -> Result<()> {
        if self.config.moe.is_some() {
            return Err(ModelError::Fp8MoeUnsupported);
        }
        let (sizes, keys) = (self.config.sizes, self.key_names);
        self.linears.enable_fp8(&[
            (keys.hidden_size, sizes.hidden),
            (keys.intermediate_size, self.config.intermediate_size),
            ("num_attention_heads * head_dim", sizes.attention_width()),
            ("(num_attention_heads + 2 * num_key_value_heads) * head_dim", sizes.qkv_width()),
        ])
    }

    /// Sets the run's seed, from which the dropout masks are derived. The seed of a new model is 0.
    pub fn set_dropout_seed(&mut self, seed: u64) {
        let config = &self.config;
        let module = |prefix: &str, dropout: Option<DropoutConfig>| {
            let DropoutConfig { rate, name } = dropout.unwrap_or(DropoutConfig { rate: 0.0, name: "" });
            DropoutModule::new(rate, seed, &format!("{prefix}{name}"))
        };
        let layer = |l| {
            let prefix = format!("{}.", config.layer_prefix(l));
            LayerDropout {
                attention: module(&prefix, Some(config.attention_dropout)),
                attention_out: module(&prefix, config.attention_out_dropout),
                mlp_out: module(&prefix, config.mlp_out_dropout),
            }
        };
        self.layer_dropout = (0..config.sizes.layers).map(layer).collect();
        self.embedding_dropout = module("", config.embedding_dropout);
    }

    /// Limits the backward pass to the gradients of the parameters that `units`, the model's
    /// parameter units, mark as trained. `units` are those of [`Model::param_units`]. Gradients of
    /// other parameters have unspecified values.
    pub fn set_trained_params(&mut self, units: &[ParamUnit]) {
        let layers = &units[1..units.len() - 1];
        self.linears.set_trained_params(layers, self.spans.list_linears());
        let needs_router_grad = |(l, u): (usize, &ParamUnit)| {
            self.config.is_moe_layer(l) && u.has_trained_elements_in(self.router_span())
        };
        self.needs_router_grad = layers.iter().enumerate().map(needs_router_grad).collect();
        self.needs_head_grad = match self.has_tied_embeddings() {
            true => units[0].is_trained(0),
            false => units.last().is_some_and(|head| head.is_trained(head.params.len() - 1)),
        };
    }

    /// Sets the factors of the router losses (load-balancing loss and z-loss) to those in the job's
    /// `train.experts`. Has no effect on a dense model.
    pub fn set_router_loss_coefficients(&mut self, spec: &ExpertsSpec) {
        if let Some(moe) = &mut self.config.moe {
            moe.losses = select_router_loss_coefficients(spec, moe.losses.aux);
        }
    }
}
