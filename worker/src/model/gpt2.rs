//! The model family GPT-2, [`Gpt2Model`]: learned positions, LayerNorm, GELU, and matrices stored
//! as `[in, out]` (`Conv1D` of transformers).
mod gpt2_layer;

use super::dropout_module::DropoutModule;
use super::error::Result;
use super::hf_config::{HfConfigFields, invalid_value_error};
use super::linear_precision::{self, LinearPrecision};
use super::lora::{self, LayerAdapters, LoraConfig};
use super::{
    ActivationBuffers, F32BufferIndices, HeadGrads, HeadParams, LayerInput, MicroBatch, Model, ModelFamily,
    TiedWeight, borrow_first_buffers,
};
use crate::params::{ParamInit, ParamSpec, ParamUnit};
use contract::job::ModelSpec;
use device::{
    Ops, View, ViewMut,
    ops::{ClassifierGrads, LayerNormParams, WriteMode},
};
use gpt2_layer::{Gpt2GradMask, Gpt2LayerDropout, Gpt2LayerSpans, build_layer_unit_and_spans};
use serde_json::{Map, Value, json};

/// The config keys of the dropout rates of attention probabilities, of the embedding, and of the
/// branches that are added to the residual stream.
const DROPOUT_KEYS: [&str; 3] = ["attn_pdrop", "embd_pdrop", "resid_pdrop"];
/// The prefix of all stored names except that of the head. Files of the model without its head have
/// names without the prefix.
const STORED_NAME_PREFIX: &str = "transformer.";
/// The stored name of the token embedding.
const EMBEDDING_NAME: &str = "transformer.wte.weight";
/// The stored name of the head's matrix, which is not stored if it is tied to the embedding.
const LM_HEAD_NAME: &str = "lm_head.weight";

/// The model family of `GPT2LMHeadModel` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "gpt2",
    architecture: "GPT2LMHeadModel",
    build: |hf_config, _| {
        let fields = HfConfigFields::new(hf_config);
        let config = Gpt2Config::from_fields(&fields)?;
        fields.reject_unknown_keys()?;
        let (unit, spans) = build_layer_unit_and_spans(&config, 0);
        let layer_matrix_elements =
            unit.params.iter().filter(|p| p.shape.len() == 2).map(ParamSpec::len).sum();
        let mut model = Gpt2Model {
            embedding_dropout: DropoutModule::new(config.dropout_rates.embedding, 0, ""),
            layer_dropout: Vec::new(),
            grad_masks: vec![Gpt2GradMask::ALL; config.layers],
            config,
            hf_config: hf_config.clone(),
            spans,
            layer_matrix_elements,
            needs_head_grad: true,
            adapters: Vec::new(),
            linear: LinearPrecision::default(),
        };
        model.set_dropout_seed(0);
        Ok(Box::new(model))
    },
    build_hf_config: build_gpt2_hf_config,
    dropout_keys: &DROPOUT_KEYS,
};

/// The sizes and options of a GPT-2 model, read from config.json.
struct Gpt2Config {
    /// Number of tokens in the vocabulary.
    vocab_size: usize,
    /// Number of learned positions, the length of the longest sequence.
    max_positions: usize,
    /// Width of the residual stream.
    hidden_size: usize,
    /// Width of the MLP between its two matmuls.
    intermediate_size: usize,
    /// Number of layers.
    layers: usize,
    /// Attention heads of each layer; divides `hidden_size`.
    heads: usize,
    /// Epsilon of every LayerNorm.
    norm_eps: f32,
    /// Whether the head uses the embedding matrix.
    ties_embeddings: bool,
    /// Standard deviation of the initial weights of matrices.
    init_std: f32,
    /// Whether attention scores are divided by √head_dim (`scale_attn_weights`).
    scales_scores: bool,
    /// Whether attention scores are divided by the number of the layer, counted from 1
    /// (`scale_attn_by_inverse_layer_idx`).
    scales_by_layer_index: bool,
    /// The dropout rates.
    dropout_rates: Gpt2DropoutRates,
}

/// The dropout rates of a GPT-2 model, each from 0 to below 1.
struct Gpt2DropoutRates {
    /// The rate of attention probabilities.
    attention: f64,
    /// The rate of the embedding.
    embedding: f64,
    /// The rate of the branches that are added to the residual stream.
    residual: f64,
}

/// Config keys of GPT-2 without effect on training: heads for other tasks, and settings of
/// transformers' attention in 16 bits.
const GPT2_IGNORED_KEYS: [&str; 10] = [
    "n_special",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "n_ctx",
];

impl Gpt2Config {
    /// Reads the config keys of GPT-2, and checks that their values are consistent.
    fn from_fields(fields: &HfConfigFields) -> Result<Self> {
        let activations = [json!("gelu_new"), json!("gelu_pytorch_tanh")];
        fields.require_one_of("activation_function", &activations)?;
        fields.require_one_of("add_cross_attention", &[json!(false)])?;
        fields.require_one_of("is_encoder_decoder", &[json!(false)])?;
        fields.require_one_of("chunk_size_feed_forward", &[json!(0)])?;
        let [attention, embedding, residual] = DROPOUT_KEYS.map(|key| fields.read_dropout_rate(key, 0.1));
        for key in GPT2_IGNORED_KEYS {
            fields.read_value(key);
        }
        let (hidden, heads) = (fields.read_size("n_embd")?, fields.read_size("n_head")?);
        if !hidden.is_multiple_of(heads) {
            return Err(invalid_value_error(
                "n_head",
                &heads.into(),
                format!("a divisor of n_embd ({hidden})"),
            ));
        }
        let hidden_size = hidden as usize;
        Ok(Gpt2Config {
            vocab_size: fields.read_size("vocab_size")? as usize,
            max_positions: fields.read_size("n_positions")? as usize,
            hidden_size,
            intermediate_size: fields.read_optional_size("n_inner")?.map_or(4 * hidden_size, |n| n as usize),
            layers: fields.read_layer_count("n_layer")?,
            heads: heads as usize,
            norm_eps: fields.read_positive_number("layer_norm_epsilon", 1e-5)? as f32,
            ties_embeddings: fields.read_flag_or("tie_word_embeddings", true)?,
            init_std: fields.read_positive_number("initializer_range", 0.02)? as f32,
            scales_scores: fields.read_flag_or("scale_attn_weights", true)?,
            scales_by_layer_index: fields.read_flag("scale_attn_by_inverse_layer_idx")?,
            dropout_rates: Gpt2DropoutRates {
                attention: attention?,
                embedding: embedding?,
                residual: residual?,
            },
        })
    }
}

/// Builds the config.json of a GPT-2 model that job.yaml describes.
fn build_gpt2_hf_config(spec: &ModelSpec) -> Map<String, Value> {
    let hf_config = json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "initializer_range": spec.initializer_range,
        "layer_norm_epsilon": 1e-5,
        "n_embd": spec.hidden_size,
        "n_head": spec.num_attention_heads,
        "n_inner": spec.intermediate_size,
        "n_layer": spec.num_hidden_layers,
        "n_positions": spec.max_position_embeddings,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": spec.vocab_size,
    });
    match hf_config {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// A GPT-2 model with its config.
struct Gpt2Model {
    config: Gpt2Config,
    hf_config: Map<String, Value>,
    /// The layout of a layer's tensors in its unit.
    spans: Gpt2LayerSpans,
    /// The number of elements of the matrices of one layer.
    layer_matrix_elements: usize,
    /// For each layer, the matrices whose gradients are computed.
    grad_masks: Vec<Gpt2GradMask>,
    /// Whether the gradient of the head's matrix is computed.
    needs_head_grad: bool,
    /// The LoRA adapters of each layer; empty without LoRA.
    adapters: Vec<LayerAdapters>,
    /// The dropout of embedded tokens.
    embedding_dropout: DropoutModule,
    /// The dropout modules of each layer.
    layer_dropout: Vec<Gpt2LayerDropout>,
    /// The precision of the layers' matmuls.
    linear: LinearPrecision,
}

impl Gpt2Model {
    /// Returns the number of elements of the token embedding. The position embedding follows the
    /// token embedding in the embedding unit.
    fn token_embedding_len(&self) -> usize {
        self.config.vocab_size * self.config.hidden_size
    }

    /// Returns the final norm and the head's matrix, `[vocab, hidden]`. The matrix is the token
    /// embedding if head and embedding are tied.
    fn select_head_weights<'a>(&self, p: &HeadParams<'a>) -> (LayerNormParams<'a>, View<'a>) {
        let d = self.config.hidden_size;
        let norm =
            LayerNormParams { w: p.head.slice(0..d), b: p.head.slice(d..2 * d), eps: self.config.norm_eps };
        let matrix = match p.embedding {
            Some(embedding) => embedding.slice(0..self.token_embedding_len()),
            None => p.head.slice(2 * d..2 * d + self.token_embedding_len()),
        };
        (norm, matrix)
    }

    /// Returns the range of the first `t` position embeddings in the embedding unit.
    fn position_embedding_span(&self, t: usize) -> std::ops::Range<usize> {
        self.token_embedding_len()..self.token_embedding_len() + t * self.config.hidden_size
    }
}

impl Model for Gpt2Model {
    fn param_units(&self) -> Vec<ParamUnit> {
        let (d, init) = (self.config.hidden_size, ParamInit::Normal(self.config.init_std));
        let param =
            |name: &str, shape: &[usize], init| ParamSpec { name: name.into(), shape: shape.into(), init };
        let embedding = vec![
            param(EMBEDDING_NAME, &[self.config.vocab_size, d], init),
            param("transformer.wpe.weight", &[self.config.max_positions, d], init),
        ];
        let mut head = vec![
            param("transformer.ln_f.weight", &[d], ParamInit::Ones),
            param("transformer.ln_f.bias", &[d], ParamInit::Zeros),
        ];
        if !self.has_tied_embeddings() {
            head.push(param(LM_HEAD_NAME, &[self.config.vocab_size, d], init));
        }
        let layer = |l: usize| {
            let unit = build_layer_unit_and_spans(&self.config, l).0;
            match self.adapters.get(l) {
                Some(adapters) => adapters.append_params(unit),
                None => unit,
            }
        };
        std::iter::once(ParamUnit::new("embedding", embedding))
            .chain((0..self.config.layers).map(layer))
            .chain(std::iter::once(ParamUnit::new("head", head)))
            .collect()
    }

    fn add_lora_adapters(&mut self, lora: &LoraConfig) -> Result<()> {
        self.adapters = gpt2_layer::create_layer_adapters(&self.config, lora)?;
        Ok(())
    }

    fn linear_shapes(&self) -> Vec<(usize, usize)> {
        let (d, f) = (self.config.hidden_size, self.config.intermediate_size);
        vec![(d, 3 * d), (d, d), (d, f), (f, d)]
    }

    fn enable_fp8(&mut self) -> Result<()> {
        linear_precision::check_fp8_sizes(&[
            ("n_embd", self.config.hidden_size),
            ("n_inner", self.config.intermediate_size),
        ])?;
        self.linear = LinearPrecision::Fp8;
        Ok(())
    }

    fn set_dropout_seed(&mut self, seed: u64) {
        self.embedding_dropout =
            DropoutModule::new(self.config.dropout_rates.embedding, seed, "transformer.drop");
        self.layer_dropout =
            (0..self.config.layers).map(|l| Gpt2LayerDropout::new(&self.config, l, seed)).collect();
    }

    fn set_trained_params(&mut self, units: &[ParamUnit]) {
        let layers = 1..units.len() - 1;
        self.grad_masks = units[layers].iter().map(|u| self.spans.select_gradients(u)).collect();
        self.needs_head_grad = match (units.first(), units.last()) {
            (Some(embedding), _) if self.has_tied_embeddings() => {
                embedding.has_trained_in(0..self.token_embedding_len())
            }
            (_, Some(head)) => head.has_trained_in(2 * self.config.hidden_size..head.len()),
            _ => true,
        };
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn qkv_width(&self) -> usize {
        3 * self.config.hidden_size
    }

    fn has_tied_embeddings(&self) -> bool {
        self.config.ties_embeddings
    }

    fn attention_dims(&self) -> [usize; 3] {
        [self.config.heads, self.config.heads, self.config.hidden_size / self.config.heads]
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

    fn hf_config(&self) -> &Map<String, Value> {
        &self.hf_config
    }

    fn compute_flops_per_token(&self, t: usize) -> f64 {
        let matrix_elements =
            self.layer_matrix_elements as f64 * self.config.layers as f64 + self.token_embedding_len() as f64;
        6.0 * matrix_elements + 6.0 * (t * self.config.layers * self.config.hidden_size) as f64
    }

    /// Returns the lengths of these buffers, by index:
    /// 0. mean and 1/σ of the layer's input, `[rows, 2]`
    /// 1. q, k and v, `[rows, 3·hidden]`
    /// 2. attention output, `[rows, hidden]`
    /// 3. log-sum-exp of attention scores, `[b, heads, t]`
    /// 4. residual stream after attention, `[rows, hidden]`
    /// 5. mean and 1/σ of buffer 4, `[rows, 2]`
    /// 6. input of GELU, `[rows, intermediate]`
    fn saved_buffer_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let (m, d) = (b * t, self.config.hidden_size);
        vec![
            2 * m,
            m * 3 * d,
            m * d,
            b * self.config.heads * t,
            m * d,
            2 * m,
            m * self.config.intermediate_size,
        ]
    }

    /// Returns the lengths of these buffers, by index:
    /// 0. normalized rows, `[rows, hidden]`
    /// 1. gradient of buffer 0
    /// 2. output of GELU, `[rows, intermediate]`
    /// 3. gradient of the input of GELU
    /// 4. gradient of the attention output
    /// 5. gradients of q, k and v
    /// 6. mean and 1/σ of the head's input, `[rows, 2]`
    ///
    /// The buffers of [`lora::LoraScratchBuffers`] follow.
    fn scratch_buffer_lengths(&self, b: usize, t: usize) -> Vec<usize> {
        let (m, d, f) = (b * t, self.config.hidden_size, self.config.intermediate_size);
        let lengths = [m * d, m * d, m * f, m * f, m * d, m * 3 * d, 2 * m];
        lengths.into_iter().chain(lora::lora_scratch_lengths(&self.adapters, m)).collect()
    }

    fn f32_buffer_indices(&self) -> F32BufferIndices {
        F32BufferIndices { saved: &[0, 3, 5], scratch: &[6, 7, 8, 9, 10, 11] }
    }

    fn embedding_forward(&self, ops: &dyn Ops, params: View, batch: &MicroBatch, mut x: ViewMut) {
        let (b, t, d) = (batch.sequences, batch.seq_len, self.config.hidden_size);
        ops.embedding_forward(x.reborrow(), params.slice(0..self.token_embedding_len()), &batch.tokens, d);
        // Every sequence is one row of t·d elements, to which the positions are added like a bias.
        ops.bias_forward(x.reborrow(), params.slice(self.position_embedding_span(t)), b, t * d);
        self.embedding_dropout.apply_dropout(ops, batch, d, x);
    }

    fn embedding_backward(&self, ops: &dyn Ops, grads: ViewMut, batch: &MicroBatch, mut dx: ViewMut) {
        let (b, t, d) = (batch.sequences, batch.seq_len, self.config.hidden_size);
        self.embedding_dropout.apply_dropout(ops, batch, d, dx.reborrow());
        let (tokens, positions) = grads.split_at(self.token_embedding_len());
        ops.embedding_backward(tokens, dx.as_view(), &batch.tokens, d);
        ops.bias_backward(positions.slice(0..t * d), dx.as_view(), b, t * d);
    }

    fn layer_forward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        y: Option<ViewMut>,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        self.attention_forward(ops, input, saved, scratch);
        self.mlp_forward(ops, input, y, saved, scratch);
    }

    fn layer_backward(
        &self,
        ops: &dyn Ops,
        input: &LayerInput,
        grads: ViewMut,
        mut dx: ViewMut,
        saved: &mut ActivationBuffers,
        scratch: &mut ActivationBuffers,
    ) {
        let mut g = grads;
        for span in self.spans.list_accumulated_spans() {
            ops.clear(g.slice_mut(span));
        }
        self.mlp_backward(ops, input, &mut g, dx.reborrow(), saved, scratch);
        self.attention_backward(ops, input, &mut g, dx, saved, scratch);
    }

    fn compute_logits(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        x: View,
        out: ViewMut,
        scratch: &mut ActivationBuffers,
    ) {
        let (d, v) = (self.config.hidden_size, self.config.vocab_size);
        let (norm, matrix) = self.select_head_weights(&params);
        let [row, _, _, _, _, _, stats] = borrow_first_buffers::<7>(scratch);
        let mut row = row.view_mut().slice(0..d);
        ops.layernorm_forward(row.reborrow(), stats.view_mut().slice(0..2), x, norm, 1);
        ops.compute_logits(out, row.as_view(), matrix, 1, d, v);
    }

    fn compute_head_loss(
        &self,
        ops: &dyn Ops,
        params: HeadParams,
        batch: &MicroBatch,
        x: View,
        loss: ViewMut,
        grads: Option<HeadGrads>,
        scratch: &mut ActivationBuffers,
    ) {
        let (m, d, v) = (batch.rows(), self.config.hidden_size, self.config.vocab_size);
        let (norm, matrix) = self.select_head_weights(&params);
        let [rows, drows, _, _, _, _, stats] = borrow_first_buffers::<7>(scratch);
        ops.layernorm_forward(rows.view_mut(), stats.view_mut(), x, norm, m);
        let Some(g) = grads else {
            return ops.compute_classifier_loss(loss, rows.view(), matrix, &batch.labels, m, d, v, None);
        };
        let (mut dnorm, rest) = g.head.split_at(2 * d);
        ops.clear(dnorm.reborrow());
        let dw = match g.embedding {
            Some(embedding) => {
                // Gradients are overwritten; the gradient of positions begins at zero.
                let (dw, positions) = embedding.split_at(self.token_embedding_len());
                ops.clear(positions);
                dw
            }
            None => rest,
        };
        // The op skips an empty gradient.
        let dw = if self.needs_head_grad { dw } else { dw.slice(0..0) };
        let out =
            ClassifierGrads { dx: drows.view_mut(), dw, dw_write: WriteMode::Overwrite, scale: g.scale };
        ops.compute_classifier_loss(loss, rows.view(), matrix, &batch.labels, m, d, v, Some(out));
        let (dw, db) = dnorm.split_at(d);
        ops.layernorm_backward(g.dx, dw, db, drows.view(), x, norm.w, stats.view(), m, WriteMode::Overwrite);
    }
}
