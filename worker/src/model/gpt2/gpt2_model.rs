//! [`Gpt2Model`]: a GPT-2 model, its [`Architecture`] and its [`TrainingSetup`].
use super::{
    gpt2_config::Gpt2Config,
    gpt2_layer_layout::{Gpt2LayerDropout, Gpt2LayerSpans, STORED_NAME_PREFIX, build_layer_unit_and_spans},
};
use crate::{
    model::{
        architecture::{Architecture, ModelSizes, TiedWeight},
        dropout_module::DropoutModule,
        error::Result,
        linear_layers::LinearLayers,
        linear_layout::LayerLinears,
        lora::LoraConfig,
        training_setup::TrainingSetup,
    },
    params::{ParamInit, ParamSpec, ParamUnit},
};
use serde_json::{Map, Value};

/// The stored name of the token embedding.
const EMBEDDING_NAME: &str = "transformer.wte.weight";
/// The stored name of the head's matrix, which is not stored if it is tied to the embedding.
const LM_HEAD_NAME: &str = "lm_head.weight";

/// A GPT-2 model with its config.
pub(super) struct Gpt2Model {
    pub(super) config: Gpt2Config,
    hf_config: Map<String, Value>,
    /// The layout of a layer's tensors in its unit.
    pub(super) spans: Gpt2LayerSpans,
    /// The number of elements of the matrices of one layer.
    layer_matrix_elements: usize,
    /// The matmuls of the layers.
    pub(super) linears: LinearLayers,
    /// Whether the gradient of the head's matrix is computed.
    pub(super) needs_head_grad: bool,
    /// The dropout of embedded tokens.
    pub(super) embedding_dropout: DropoutModule,
    /// The dropout modules of each layer.
    pub(super) layer_dropout: Vec<Gpt2LayerDropout>,
}

impl Gpt2Model {
    /// Creates a model. `hf_config` is the config.json from which `config` was read.
    pub(super) fn new(config: Gpt2Config, hf_config: &Map<String, Value>) -> Self {
        let (unit, spans) = build_layer_unit_and_spans(&config, 0);
        let layer_matrix_elements =
            unit.params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum();
        let mut model = Gpt2Model {
            embedding_dropout: DropoutModule::new(config.dropout_rates.embedding, 0, ""),
            layer_dropout: Vec::new(),
            linears: LinearLayers::new(true),
            config,
            hf_config: hf_config.clone(),
            spans,
            layer_matrix_elements,
            needs_head_grad: true,
        };
        model.set_dropout_seed(0);
        model
    }

    /// Returns the number of elements of the token embedding. The position embedding follows the
    /// token embedding in the embedding unit.
    pub(super) fn token_embedding_len(&self) -> usize {
        self.config.sizes.vocab * self.config.sizes.hidden
    }
}

impl Architecture for Gpt2Model {
    fn hf_config(&self) -> &Map<String, Value> {
        &self.hf_config
    }

    fn sizes(&self) -> ModelSizes {
        self.config.sizes
    }

    fn param_units(&self) -> Vec<ParamUnit> {
        let (d, init) = (self.config.sizes.hidden, ParamInit::Normal(self.config.init_std));
        let param =
            |name: &str, shape: &[usize], init| ParamSpec { name: name.into(), shape: shape.into(), init };
        let embedding = vec![
            param(EMBEDDING_NAME, &[self.config.sizes.vocab, d], init),
            param("transformer.wpe.weight", &[self.config.max_positions, d], init),
        ];
        let mut head = vec![
            param("transformer.ln_f.weight", &[d], ParamInit::Ones),
            param("transformer.ln_f.bias", &[d], ParamInit::Zeros),
        ];
        if !self.has_tied_embeddings() {
            head.push(param(LM_HEAD_NAME, &[self.config.sizes.vocab, d], init));
        }
        let layer =
            |l: usize| self.linears.append_adapter_params(l, build_layer_unit_and_spans(&self.config, l).0);
        std::iter::once(ParamUnit::new("embedding", embedding))
            .chain((0..self.config.sizes.layers).map(layer))
            .chain(std::iter::once(ParamUnit::new("head", head)))
            .collect()
    }

    fn linear_shapes(&self) -> Vec<(usize, usize)> {
        let (d, f) = (self.config.sizes.hidden, self.config.intermediate_size);
        vec![(d, 3 * d), (d, d), (d, f), (f, d)]
    }

    fn has_tied_embeddings(&self) -> bool {
        self.config.ties_embeddings
    }

    fn tied_weights(&self) -> Vec<TiedWeight> {
        let tie = TiedWeight { alias: LM_HEAD_NAME.into(), target: EMBEDDING_NAME.into() };
        if self.has_tied_embeddings() { vec![tie] } else { Vec::new() }
    }

    fn stores_transposed_matrices(&self) -> bool {
        true
    }

    fn base_model_prefix(&self) -> Option<&'static str> {
        Some(STORED_NAME_PREFIX)
    }

    /// Returns true for the causal mask `attn.bias` and the score of masked positions
    /// `attn.masked_bias`, which older files contain.
    fn is_constant_tensor(&self, name: &str) -> bool {
        let in_layer = name.strip_prefix(STORED_NAME_PREFIX).unwrap_or(name).strip_prefix("h.");
        let rest = in_layer.and_then(|n| n.split_once('.')).map(|(_, rest)| rest);
        matches!(rest, Some("attn.bias" | "attn.masked_bias"))
    }

    fn compute_flops_per_token(&self, t: usize) -> f64 {
        let matrix_elements = self.layer_matrix_elements as f64 * self.config.sizes.layers as f64
            + self.token_embedding_len() as f64;
        6.0 * matrix_elements + 6.0 * (t * self.config.sizes.layers * self.config.sizes.hidden) as f64
    }
}

impl TrainingSetup for Gpt2Model {
    fn add_lora_adapters(&mut self, lora: &LoraConfig) -> Result<()> {
        let layer = |l| {
            let (unit, spans) = build_layer_unit_and_spans(&self.config, l);
            let prefix = format!("{STORED_NAME_PREFIX}h.{l}.");
            LayerLinears { prefix, unit_len: unit.len(), linears: spans.into_linears() }
        };
        let layers: Vec<LayerLinears> = (0..self.config.sizes.layers).map(layer).collect();
        self.linears.add_adapters(lora, &layers, false)
    }

    fn enable_fp8(&mut self) -> Result<()> {
        let sizes = [("n_embd", self.config.sizes.hidden), ("n_inner", self.config.intermediate_size)];
        self.linears.enable_fp8(&sizes)
    }

    fn set_dropout_seed(&mut self, seed: u64) {
        self.embedding_dropout =
            DropoutModule::new(self.config.dropout_rates.embedding, seed, "transformer.drop");
        self.layer_dropout =
            (0..self.config.sizes.layers).map(|l| Gpt2LayerDropout::new(&self.config, l, seed)).collect();
    }

    fn set_trained_params(&mut self, units: &[ParamUnit]) {
        self.linears.set_trained_params(&units[1..units.len() - 1], self.spans.list_linears());
        self.needs_head_grad = match (units.first(), units.last()) {
            (Some(embedding), _) if self.has_tied_embeddings() => {
                embedding.has_trained_in(0..self.token_embedding_len())
            }
            (_, Some(head)) => head.has_trained_in(2 * self.config.sizes.hidden..head.len()),
            _ => true,
        };
    }
}
