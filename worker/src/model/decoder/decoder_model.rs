//! [`DecoderModel`]: a decoder-only transformer, its [`Architecture`] and its [`TrainingSetup`].
use super::{
    decoder_config::DecoderConfig,
    layer_layout::{DecoderLayerSpans, build_layer_unit},
};
use crate::{
    model::{
        architecture::{Architecture, ModelSizes, TiedWeight},
        dropout_module::DropoutModule,
        error::{ModelError, Result},
        linear_layers::LinearLayers,
        linear_layout::LayerLinears,
        lora::LoraConfig,
        moe::select_router_loss_coefficients,
        rotary_embedding::RopeTables,
        training_setup::TrainingSetup,
    },
    params::{ParamInit, ParamSpec, ParamUnit},
};
use jobspec::ExpertsSpec;
use serde_json::{Map, Value};
use std::ops::Range;

/// The stored name of the embedding matrix.
const EMBEDDING_NAME: &str = "model.embed_tokens.weight";
/// The stored name of the head's matrix, which is not stored if it is tied to the embedding.
const LM_HEAD_NAME: &str = "lm_head.weight";

/// A decoder-only transformer with its config.
pub(super) struct DecoderModel {
    pub(super) config: DecoderConfig,
    /// The config.json from which `config` was read.
    hf_config: Map<String, Value>,
    /// The rotary embedding of layers with full attention.
    pub(super) rope_tables: RopeTables,
    /// The rotary embedding of sliding-window layers; `None` if it equals `rope_tables`.
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
    /// The dropout of attention probabilities of each layer.
    pub(super) dropout: Vec<DropoutModule>,
}

impl DecoderModel {
    /// Creates a decoder for sequences of at most `tokens` tokens. `hf_config` is the config.json
    /// from which `config` was read.
    pub(super) fn new(config: DecoderConfig, hf_config: &Map<String, Value>, tokens: usize) -> Self {
        let head_dim = config.sizes.head_dim;
        let rope_tables = RopeTables::new(&config.rope, tokens, head_dim);
        let sliding_rope_tables = config.sliding_rope.map(|rope| RopeTables::new(&rope, tokens, head_dim));
        let spans = build_layer_unit(&config, None).1;
        let active_expert_elements = |l: usize| match &config.moe {
            Some(moe) if config.is_moe_layer(l) => moe.shape.per_token * moe.shape.expert_len(),
            _ => 0,
        };
        let layer_matrix_elements = |l: usize| -> usize {
            let params = build_layer_unit(&config, Some(l)).0.params;
            let dense = params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum::<usize>();
            active_expert_elements(l) + dense
        };
        let matrix_elements = (0..config.sizes.layers).map(layer_matrix_elements).sum();
        let mut model = DecoderModel {
            needs_router_grad: vec![true; config.sizes.layers],
            linears: LinearLayers::new(false),
            config,
            hf_config: hf_config.clone(),
            rope_tables,
            sliding_rope_tables,
            spans,
            matrix_elements,
            needs_head_grad: true,
            dropout: Vec::new(),
        };
        model.set_dropout_seed(0);
        model
    }

    /// Returns the range of the router's matrix, `[experts, hidden]`, in the flat vector of a layer
    /// with experts. The range is empty for a dense model.
    pub(super) fn router_span(&self) -> Range<usize> {
        let at = self.spans.gate_up.weight.start;
        let experts = self.config.moe.as_ref().map_or(0, |moe| moe.shape.experts);
        at..at + experts * self.config.sizes.hidden
    }
}

impl Architecture for DecoderModel {
    fn hf_config(&self) -> &Map<String, Value> {
        &self.hf_config
    }

    fn sizes(&self) -> ModelSizes {
        self.config.sizes
    }

    fn param_units(&self) -> Vec<ParamUnit> {
        let sizes = self.config.sizes;
        let matrix = |name: &str| ParamSpec {
            name: name.into(),
            shape: vec![sizes.vocab, sizes.hidden],
            init: ParamInit::Normal(self.config.init_std),
        };
        let mut head = vec![ParamSpec {
            name: "model.norm.weight".into(),
            shape: vec![sizes.hidden],
            init: self.config.initial_norm_weights(),
        }];
        if !self.has_tied_embeddings() {
            head.push(matrix(LM_HEAD_NAME));
        }
        let layers = (0..sizes.layers)
            .map(|l| self.linears.append_adapter_params(l, build_layer_unit(&self.config, Some(l)).0));
        std::iter::once(ParamUnit::new("embedding", vec![matrix(EMBEDDING_NAME)]))
            .chain(layers)
            .chain(std::iter::once(ParamUnit::new("head", head)))
            .collect()
    }

    fn linear_shapes(&self) -> Vec<(usize, usize)> {
        let (sizes, f) = (self.config.sizes, self.config.dense_mlp_width());
        let d = sizes.hidden;
        vec![(d, sizes.qkv_width()), (sizes.attention_width(), d), (d, 2 * f), (f, d)]
    }

    fn has_tied_embeddings(&self) -> bool {
        self.config.ties_embeddings
    }

    fn tied_weights(&self) -> Vec<TiedWeight> {
        let tie = TiedWeight { alias: LM_HEAD_NAME.into(), target: EMBEDDING_NAME.into() };
        if self.has_tied_embeddings() { vec![tie] } else { Vec::new() }
    }

    fn sliding_window(&self) -> Option<usize> {
        self.config.sliding_window.filter(|_| self.config.sliding_layers.contains(&true))
    }

    fn compute_flops_per_token(&self, t: usize) -> f64 {
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
}

impl TrainingSetup for DecoderModel {
    /// Adds LoRA adapters to the targeted matrices of the layers. Experts and routers have none.
    fn add_lora_adapters(&mut self, lora: &LoraConfig) -> Result<()> {
        let layer = |l| {
            let (unit, spans) = build_layer_unit(&self.config, Some(l));
            LayerLinears {
                prefix: format!("model.layers.{l}."),
                unit_len: unit.len(),
                linears: spans.into_linears(),
            }
        };
        let layers: Vec<LayerLinears> = (0..self.config.sizes.layers).map(layer).collect();
        self.linears.add_adapters(lora, &layers, self.config.moe.is_some())
    }

    fn enable_fp8(&mut self) -> Result<()> {
        if self.config.moe.is_some() {
            return Err(ModelError::Fp8MoeUnsupported);
        }
        let sizes = self.config.sizes;
        self.linears.enable_fp8(&[
            ("hidden_size", sizes.hidden),
            ("intermediate_size", self.config.intermediate_size),
            ("num_attention_heads * head_dim", sizes.attention_width()),
            ("(num_attention_heads + 2 * num_key_value_heads) * head_dim", sizes.qkv_width()),
        ])
    }

    fn set_dropout_seed(&mut self, seed: u64) {
        let module = |l| {
            DropoutModule::new(
                self.config.attention_dropout,
                seed,
                &format!("model.layers.{l}.self_attn.dropout"),
            )
        };
        self.dropout = (0..self.config.sizes.layers).map(module).collect();
    }

    fn set_trained_params(&mut self, units: &[ParamUnit]) {
        let layers = &units[1..units.len() - 1];
        self.linears.set_trained_params(layers, self.spans.list_linears());
        let needs_router_grad =
            |(l, u): (usize, &ParamUnit)| self.config.is_moe_layer(l) && u.has_trained_in(self.router_span());
        self.needs_router_grad = layers.iter().enumerate().map(needs_router_grad).collect();
        let matrix = if self.has_tied_embeddings() { units.first() } else { units.last() };
        self.needs_head_grad = matrix.is_some_and(|u| u.is_trained(u.params.len() - 1));
    }

    fn set_router_losses(&mut self, spec: &ExpertsSpec) {
        if let Some(moe) = &mut self.config.moe {
            moe.losses = select_router_loss_coefficients(spec, moe.losses.aux);
        }
    }
}
