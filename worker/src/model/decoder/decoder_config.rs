//! [`DecoderConfig`]: the sizes and options of a decoder, read from config.json. For models that
//! job.yaml describes, this module also creates the config.json.
use super::decoder_moe_config::DecoderMoeConfig;
use crate::{
    model::{
        error::{ModelError, Result},
        hf_config::{ConfigKeyNames, HfConfigFields, into_object_entries, invalid_value_error},
        model_sizes::ModelSizes,
        rotary_embedding::RopeConfig,
    },
    params::ParamInit,
};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// The key of config.json for the dropout rate of attention probabilities.
const ATTENTION_DROPOUT_KEY: &str = "attention_dropout";

/// The config.json keys for dropout rates, maximum position and layer widths as Llama and all other
/// model families except GPT-2 name them.
pub(in crate::model) const LLAMA_CONFIG_KEY_NAMES: ConfigKeyNames = ConfigKeyNames {
    dropout_rates: &[ATTENTION_DROPOUT_KEY],
    max_positions: "max_position_embeddings",
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
};

/// The names of a model's tensors and modules in its files. Names of modules of a layer do not
/// contain the name of the layer.
pub(in crate::model) struct TensorNames {
    /// The name of the embedding module.
    pub(in crate::model) embedding: &'static str,
    /// The name of the list of layers.
    pub(in crate::model) layers: &'static str,
    /// The names of the projections of q, k and v, or the name of one module that computes all
    /// three.
    pub(in crate::model) qkv: &'static [&'static str],
    /// The name of the output projection of attention.
    pub(in crate::model) o: &'static str,
    /// The names of the gate and up projections of the MLP. For an MLP without a gate, only the
    /// name of its first projection.
    pub(in crate::model) gate_up: &'static [&'static str],
    /// The name of the down projection of the MLP.
    pub(in crate::model) down: &'static str,
    /// The name of the norm of the head's input.
    pub(in crate::model) final_norm: &'static str,
    /// The prefix of stored names that is absent in files of the model without its head
    /// (`base_model_prefix` in transformers), if such files are supported.
    pub(in crate::model) base_prefix: Option<&'static str>,
    /// The names of tensors of a layer that are constants. Older checkpoints contain constants;
    /// they are not loaded.
    pub(in crate::model) constants: &'static [&'static str],
}

impl TensorNames {
    /// The names of tensors and modules in files of Llama and all other families except GPT-2.
    const LLAMA: TensorNames = TensorNames {
        embedding: "model.embed_tokens",
        layers: "model.layers",
        qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        o: "self_attn.o_proj",
        gate_up: &["mlp.gate_proj", "mlp.up_proj"],
        down: "mlp.down_proj",
        final_norm: "model.norm",
        base_prefix: None,
        constants: &[],
    };
}

/// The names of the norm modules within a decoder layer, such as `input_layernorm`, without the
/// prefix that names the layer. An absent norm is `None`.
#[derive(Clone, Copy)]
pub(in crate::model) struct NormModuleNames {
    /// The name of the norm of the input of attention.
    pub(in crate::model) attention_in: Option<&'static str>,
    /// The name of the norm of the output of attention, which is applied before the residual
    /// addition.
    pub(in crate::model) attention_out: Option<&'static str>,
    /// The name of the norm of the input of the MLP. Required for layers with experts.
    pub(in crate::model) mlp_in: Option<&'static str>,
    /// The name of the norm of the output of the MLP, which is applied before the residual
    /// addition.
    pub(in crate::model) mlp_out: Option<&'static str>,
}

impl NormModuleNames {
    /// The names of the two norm modules in a Llama layer: one normalizes the input of attention,
    /// the other the input of the MLP.
    const PRE_NORM_NAMES: NormModuleNames = NormModuleNames {
        attention_in: Some("input_layernorm"),
        attention_out: None,
        mlp_in: Some("post_attention_layernorm"),
        mlp_out: None,
    };
}

/// The kind of norm that a model uses: RMSNorm or LayerNorm. Norms of q and k are always RMSNorms.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum NormKind {
    /// RMSNorm, which multiplies by the weight.
    Rms,
    /// RMSNorm that multiplies by 1 + weight.
    RmsAddOne,
    /// LayerNorm with a bias.
    Layer,
}

/// Whether q and k are normalized separately for each head, or over all heads of a token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum QkNormExtent {
    /// Each head is normalized separately, with common weights.
    PerHead,
    /// The heads of a token are normalized together.
    AllHeads,
}

/// The computation between the two matmuls of an MLP: a gated linear unit or an activation
/// function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Activation {
    /// SwiGLU (Shazeer 2020): SiLU of the gate, multiplied by up.
    Swiglu,
    /// GeGLU (Shazeer 2020): GELU (tanh approximation) of the gate, multiplied by up.
    Geglu,
    /// GELU (tanh approximation), without gate.
    Gelu,
}

/// Learned position embeddings of a model: the name of their module, and the number of positions.
#[derive(Clone, Copy)]
pub(in crate::model) struct LearnedPositions {
    /// The name of the module.
    pub(in crate::model) name: &'static str,
    /// The number of positions, the length of the longest sequence.
    pub(in crate::model) count: usize,
}

/// The configuration of a dropout module of a model: its name in transformers, and its rate.
#[derive(Clone, Copy)]
pub(in crate::model) struct DropoutConfig {
    /// The rate, from 0 to below 1.
    pub(in crate::model) rate: f64,
    /// The name of the module in transformers, without the name of its layer.
    pub(in crate::model) name: &'static str,
}

/// The sizes of a decoder-only transformer, and all options in which model families differ.
pub(in crate::model) struct DecoderConfig {
    /// The sizes. With rotary embeddings, `head_dim` is even.
    pub(in crate::model) sizes: ModelSizes,
    /// Width of the MLP between its two matmuls.
    pub(in crate::model) intermediate_size: usize,
    /// The names of the model's tensors.
    pub(in crate::model) names: TensorNames,
    /// Whether matrices are stored as `[in, out]`, as in `Conv1D` of transformers, instead of
    /// `[out, in]`.
    pub(in crate::model) has_transposed_matrices: bool,
    /// Epsilon of every norm.
    pub(in crate::model) norm_eps: f32,
    /// Rotary position embedding of layers with full attention; `None` for learned positions.
    pub(in crate::model) rope: Option<RopeConfig>,
    /// The learned positions; `None` for rotary position embedding.
    pub(in crate::model) learned_positions: Option<LearnedPositions>,
    /// Whether the head uses the embedding matrix.
    pub(in crate::model) ties_embeddings: bool,
    /// Standard deviation of the initial weights of matrices.
    pub(in crate::model) init_std: f32,
    /// Standard deviation of the initial weights of the projections onto the residual stream.
    pub(in crate::model) output_init_std: f32,
    /// Whether the q, k and v projections have biases.
    pub(in crate::model) has_qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub(in crate::model) has_o_bias: bool,
    /// Whether the gate, up and down projections have biases.
    pub(in crate::model) has_mlp_bias: bool,
    /// The norms of q and k before the rotation; `None` if q and k are not normalized.
    pub(in crate::model) qk_norm: Option<QkNormExtent>,
    /// The kind of the norms.
    pub(in crate::model) norm_kind: NormKind,
    /// The norms of a layer.
    pub(in crate::model) norms: NormModuleNames,
    /// The activation of the MLP.
    pub(in crate::model) activation: Activation,
    /// Factor by which embedded tokens are multiplied; `None` for 1.
    pub(in crate::model) embedding_scale: Option<f32>,
    /// Factor by which attention scores are multiplied.
    pub(in crate::model) attention_scale: f64,
    /// Whether attention scores are divided by the number of the layer, counted from 1.
    pub(in crate::model) scales_by_layer_index: bool,
    /// Softcap of attention scores: a score s becomes cap·tanh(s / cap).
    pub(in crate::model) attention_softcap: Option<f32>,
    /// Softcap of logits: a logit s becomes cap·tanh(s / cap).
    pub(in crate::model) logit_softcap: Option<f32>,
    /// Dropout of attention probabilities.
    pub(in crate::model) attention_dropout: DropoutConfig,
    /// Dropout of the output of attention. Not supported together with a norm of this output.
    pub(in crate::model) attention_out_dropout: Option<DropoutConfig>,
    /// Dropout of the output of the MLP. Not supported together with a norm of this output.
    pub(in crate::model) mlp_out_dropout: Option<DropoutConfig>,
    /// Dropout of the output of the embedding. The name in this config is the full name of the
    /// module.
    pub(in crate::model) embedding_dropout: Option<DropoutConfig>,
    /// Rotary position embedding of sliding-window layers; `None` if it equals `rope`.
    pub(in crate::model) sliding_rope: Option<RopeConfig>,
    /// The token whose embedding gets no gradient (`padding_idx` of `torch.nn.Embedding`).
    pub(in crate::model) padding_token: Option<u32>,
    /// Number of tokens to which a token of a sliding-window layer attends, including itself.
    pub(in crate::model) sliding_window: Option<usize>,
    /// For each layer, whether the layer attends only to the sliding window.
    pub(in crate::model) sliding_layers: Vec<bool>,
    /// The mixture-of-experts layers; `None` for a dense model.
    pub(in crate::model) moe: Option<DecoderMoeConfig>,
}

/// The largest number of tensors of a model. A description of each tensor is in memory.
const MAX_TENSORS: u128 = 1 << 19;
/// The largest number of parameters of a model. Numbers of bytes and operations that are computed
/// from it do not overflow.
const MAX_PARAMETERS: u128 = 1 << 46;
/// The largest number of tensors of a layer that are not part of an expert.
const MAX_DENSE_TENSORS_PER_LAYER: u128 = 24;

impl DecoderConfig {
    /// Fails if the model has too many tensors or parameters. Each size alone is in its range, but
    /// an untrusted config.json may combine large ones.
    pub(in crate::model) fn check_total_size(&self) -> Result<()> {
        let wide = |size: usize| size as u128;
        let ModelSizes { vocab, hidden, layers, .. } = self.sizes;
        let (experts, expert_elements) = self.moe.as_ref().map_or((0, 0), |moe| {
            let shape = moe.shape;
            (wide(shape.experts), 3 * wide(shape.intermediate) * wide(shape.hidden) + wide(shape.hidden))
        });
        let head_widths = wide(self.sizes.heads) + wide(self.sizes.kv_heads);
        let attention = 2 * wide(hidden) * head_widths * wide(self.sizes.head_dim);
        let mlp = 3 * wide(hidden) * wide(self.intermediate_size);
        let per_layer = attention + mlp + experts * expert_elements;
        let parameters = wide(layers) * per_layer + 2 * wide(vocab) * wide(hidden);
        let tensors = wide(layers) * (MAX_DENSE_TENSORS_PER_LAYER + 3 * experts);
        let limits = [("tensors", tensors, MAX_TENSORS), ("parameters", parameters, MAX_PARAMETERS)];
        match limits.into_iter().find(|(_, count, limit)| count > limit) {
            Some((quantity, count, limit)) => Err(ModelError::TooLarge { quantity, count, limit }),
            None => Ok(()),
        }
    }

    /// Reads those keys of config.json that all decoder families share, and checks that their
    /// values are consistent.
    pub(in crate::model) fn from_fields(fields: &HfConfigFields) -> Result<Self> {
        fields.require_one_of("hidden_act", &[json!("silu"), json!("swish")])?;
        Self::from_fields_with_rope(fields, RopeConfig::from_fields(fields)?)
    }

    /// Reads the config.json keys that all decoder families share, except those of the activation
    /// function and of the rotary embedding, for which the caller passes `rope`.
    pub(in crate::model) fn from_fields_with_rope(fields: &HfConfigFields, rope: RopeConfig) -> Result<Self> {
        let attention_dropout = fields.read_dropout_rate(ATTENTION_DROPOUT_KEY, 0.0)?;
        fields.require_one_of("pretraining_tp", &[json!(1)])?;
        fields.require_one_of("is_encoder_decoder", &[json!(false)])?;
        fields.require_one_of("add_cross_attention", &[json!(false)])?;
        fields.require_one_of("chunk_size_feed_forward", &[json!(0)])?;
        fields.require_one_of("partial_rotary_factor", &[json!(1)])?;
        let (hidden, heads) = (fields.read_size("hidden_size")?, fields.read_size("num_attention_heads")?);
        let kv_heads = fields.read_optional_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            return Err(invalid_value_error("num_key_value_heads", &kv_heads.into(), expected));
        }
        let head_dim = match fields.read_optional_size("head_dim")? {
            Some(n) => n,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a divisor of hidden_size ({hidden})");
                return Err(invalid_value_error("num_attention_heads", &heads.into(), expected));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(invalid_value_error("head_dim", &head_dim.into(), "an even number"));
        }
        fields.read_size("max_position_embeddings")?;
        let layers = fields.read_layer_count("num_hidden_layers")?;
        let vocab_size = fields.read_size("vocab_size")? as usize;
        let sizes = ModelSizes {
            vocab: vocab_size,
            hidden: hidden as usize,
            layers,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
        };
        let mut config =
            DecoderConfig::new_with_defaults(sizes, fields.read_size("intermediate_size")? as usize);
        config.norm_eps = fields.read_positive_number("rms_norm_eps", 1e-6)? as f32;
        config.rope = Some(rope);
        config.ties_embeddings = fields.read_flag("tie_word_embeddings")?;
        config.init_std = fields.read_positive_number("initializer_range", 0.02)? as f32;
        config.output_init_std = config.init_std;
        config.attention_dropout.rate = attention_dropout;
        config.padding_token = read_padding_token(fields, vocab_size);
        Ok(config)
    }

    /// Creates a decoder's config with the given sizes, Llama's tensor names, and the options that
    /// most model families have. Neither rotary embedding nor learned positions are set.
    pub(in crate::model) fn new_with_defaults(sizes: ModelSizes, intermediate_size: usize) -> Self {
        DecoderConfig {
            sizes,
            intermediate_size,
            names: TensorNames::LLAMA,
            has_transposed_matrices: false,
            norm_eps: 1e-6,
            rope: None,
            learned_positions: None,
            ties_embeddings: false,
            init_std: 0.02,
            output_init_std: 0.02,
            has_qkv_bias: false,
            has_o_bias: false,
            has_mlp_bias: false,
            qk_norm: None,
            norm_kind: NormKind::Rms,
            norms: NormModuleNames::PRE_NORM_NAMES,
            activation: Activation::Swiglu,
            embedding_scale: None,
            attention_scale: 1.0 / (sizes.head_dim as f64).sqrt(),
            scales_by_layer_index: false,
            attention_softcap: None,
            logit_softcap: None,
            attention_dropout: DropoutConfig { rate: 0.0, name: "self_attn.dropout" },
            attention_out_dropout: None,
            mlp_out_dropout: None,
            embedding_dropout: None,
            sliding_rope: None,
            padding_token: None,
            sliding_window: None,
            sliding_layers: vec![false; sizes.layers],
            moe: None,
        }
    }

    /// Returns whether layer number `layer` has experts instead of a dense MLP.
    pub(super) fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.moe_layers.get(layer).is_some_and(|is_moe| *is_moe))
    }

    /// Returns the width of the MLP between its two matmuls, in layers without experts; 0 if every
    /// layer has experts.
    pub(super) fn dense_mlp_width(&self) -> usize {
        let has_dense_layers = (0..self.sizes.layers).any(|l| !self.is_moe_layer(l));
        if has_dense_layers { self.intermediate_size } else { 0 }
    }

    /// Returns the number of output columns of the MLP's first matmul (gate and up) in layers
    /// without experts, or 0 if every layer has experts.
    pub(super) fn gate_up_width(&self) -> usize {
        self.names.gate_up.len() * self.dense_mlp_width()
    }

    /// Returns the initial values of a norm's weights: zeros in model families whose norms multiply
    /// by 1 + weight, otherwise ones.
    pub(super) fn initial_norm_weights(&self) -> ParamInit {
        if self.norm_kind == NormKind::RmsAddOne { ParamInit::Zeros } else { ParamInit::Ones }
    }

    /// Returns the number of parameters of one norm before or after attention or the MLP: the
    /// weights and, for LayerNorm, the biases.
    pub(super) fn params_per_norm(&self) -> usize {
        self.sizes.hidden * if self.norm_kind == NormKind::Layer { 2 } else { 1 }
    }

    /// Returns how many statistics, such as the mean, a norm saves per token for its backward pass:
    /// 2 for LayerNorm and 1 for RMSNorm.
    pub(super) fn norm_stats_per_row(&self) -> usize {
        if self.norm_kind == NormKind::Layer { 2 } else { 1 }
    }

    /// Returns the common prefix of the names of the tensors of layer number `layer`, without a
    /// trailing dot.
    pub(super) fn layer_prefix(&self, layer: usize) -> String {
        format!("{}.{layer}", self.names.layers)
    }

    /// Reads the key `attention_bias` of config.json, a flag that gives all four attention
    /// projections (q, k, v and o) biases if it is true.
    pub(in crate::model) fn read_attention_bias(&mut self, fields: &HfConfigFields) -> Result<()> {
        self.has_qkv_bias = fields.read_flag("attention_bias")?;
        self.has_o_bias = self.has_qkv_bias;
        Ok(())
    }

    /// Reads the key `sliding_window` of config.json, which limits the attention of every layer to
    /// a sliding window.
    pub(in crate::model) fn read_sliding_window(&mut self, fields: &HfConfigFields) -> Result<()> {
        self.sliding_window = fields.read_optional_size("sliding_window")?.map(|w| w as usize);
        self.sliding_layers.fill(self.sliding_window.is_some());
        Ok(())
    }

    /// Reads the keys of config.json that select which layers of Qwen models attend to a sliding
    /// window.
    pub(in crate::model) fn read_sliding_layers(&mut self, fields: &HfConfigFields) -> Result<()> {
        const FIRST_SLIDING_LAYER_KEY: &str = "max_window_layers";
        let enabled = fields.read_flag("use_sliding_window")?;
        let window = fields.read_optional_size("sliding_window")?.filter(|_| enabled);
        let first = match fields.read_value(FIRST_SLIDING_LAYER_KEY) {
            None => 28,
            Some(v) => v
                .as_u64()
                .ok_or_else(|| invalid_value_error(FIRST_SLIDING_LAYER_KEY, v, "a number of layers"))?,
        };
        self.sliding_window = window.map(|n| n as usize);
        self.sliding_layers = (0..self.sizes.layers).map(|l| window.is_some() && l as u64 >= first).collect();
        self.read_layer_types(fields)
    }

    /// Reads the key `layer_types` of config.json, which states for each layer whether attention is
    /// full or limited to a sliding window. If set, the key overrides the other keys that select
    /// layers with a sliding window.
    pub(in crate::model) fn read_layer_types(&mut self, fields: &HfConfigFields) -> Result<()> {
        const LAYER_TYPES_KEY: &str = "layer_types";
        let Some(value) = fields.read_value(LAYER_TYPES_KEY) else { return Ok(()) };
        let invalid = || {
            invalid_value_error(
                LAYER_TYPES_KEY,
                value,
                "`full_attention` or `sliding_attention` for each layer",
            )
        };
        let types = value.as_array().filter(|t| t.len() == self.sizes.layers).ok_or_else(invalid)?;
        for (is_sliding, layer_type) in self.sliding_layers.iter_mut().zip(types) {
            *is_sliding = match layer_type.as_str() {
                Some("full_attention") => false,
                Some("sliding_attention") if self.sliding_window.is_some() => true,
                Some("sliding_attention") => {
                    let expected = "only `full_attention`, because the model has no sliding window";
                    return Err(invalid_value_error(LAYER_TYPES_KEY, layer_type, expected));
                }
                _ => return Err(invalid()),
            };
        }
        Ok(())
    }
}

/// Reads the key `pad_token_id` of config.json, or returns `None` if there is no padding token. A
/// negative number counts from the end of the vocabulary, as in `padding_idx` of
/// `torch.nn.Embedding`.
fn read_padding_token(fields: &HfConfigFields, vocab_size: usize) -> Option<u32> {
    let id = fields.read_value("pad_token_id")?.as_i64()?;
    let id = if id < 0 { id.checked_add(vocab_size as i64)? } else { id };
    u32::try_from(id).ok()
}

/// Builds the config.json of the model that job.yaml describes, with the keys shared by all decoder
/// families plus the keys in `family_keys`.
pub(in crate::model) fn build_decoder_config_json(
    spec: &ModelSpec,
    family_keys: Value,
) -> Map<String, Value> {
    let shared = json!({
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": spec.initializer_range,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": null,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": spec.vocab_size,
    });
    let mut map = into_object_entries(shared);
    map.extend(into_object_entries(family_keys));
    map
}
