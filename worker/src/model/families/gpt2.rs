//! The model family GPT-2: learned positions, LayerNorm, GELU, and matrices stored as `[in, out]`.
use crate::model::{
    decoder::{
        Activation, DecoderConfig, DropoutConfig, LearnedPositions, NormKind, NormModuleNames, TensorNames,
    },
    error::Result,
    family::ModelFamily,
    hf_config::{ConfigKeyNames, HfConfigFields, into_object_entries, invalid_value_error},
    model_sizes::ModelSizes,
};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// The model family of the transformers class `GPT2LMHeadModel`: the family's names, and functions
/// that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "gpt2",
    architecture: "GPT2LMHeadModel",
    read_config,
    list_config_keys: build_config_json,
    key_names: CONFIG_KEY_NAMES,
};

/// The keys in GPT-2's config.json for three dropout rates: of attention probabilities, of the
/// embedding, and of the outputs of attention and MLP.
const DROPOUT_KEYS: [&str; 3] = ["attn_pdrop", "embd_pdrop", "resid_pdrop"];

/// The names of the config.json keys for dropout rates, maximum positions and layer widths in
/// GPT-2.
const CONFIG_KEY_NAMES: ConfigKeyNames = ConfigKeyNames {
    dropout_rates: &DROPOUT_KEYS,
    max_positions: "n_positions",
    hidden_size: "n_embd",
    intermediate_size: "n_inner",
};

/// The names of the norm modules of a GPT-2 layer.
const NORM_NAMES: NormModuleNames =
    NormModuleNames { attention_in: Some("ln_1"), attention_out: None, mlp_in: Some("ln_2"), mlp_out: None };

/// The names of the tensors and modules in files of GPT-2. `attn.bias` is the causal mask, and
/// `attn.masked_bias` the score of masked positions.
const TENSOR_NAMES: TensorNames = TensorNames {
    embedding: "transformer.wte",
    layers: "transformer.h",
    qkv: &["attn.c_attn"],
    o: "attn.c_proj",
    gate_up: &["mlp.c_fc"],
    down: "mlp.c_proj",
    final_norm: "transformer.ln_f",
    base_prefix: Some("transformer."),
    constants: &["attn.bias", "attn.masked_bias"],
};

/// Keys in the config.json of GPT-2 that have no effect on training.
const IGNORED_KEYS: [&str; 10] = [
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

/// Reads the sizes and options of a model from the config.json of GPT-2, and checks that they are
/// consistent.
fn read_config(fields: &HfConfigFields) -> Result<DecoderConfig> {
    let activations = [json!("gelu_new"), json!("gelu_pytorch_tanh")];
    fields.require_one_of("activation_function", &activations)?;
    fields.require_one_of("add_cross_attention", &[json!(false)])?;
    fields.require_one_of("is_encoder_decoder", &[json!(false)])?;
    fields.require_one_of("chunk_size_feed_forward", &[json!(0)])?;
    let dropout_rates = DROPOUT_KEYS.map(|key| fields.read_dropout_rate(key, 0.1));
    for key in IGNORED_KEYS {
        fields.read_value(key);
    }
    let (hidden, heads) = (fields.read_size("n_embd")?, fields.read_size("n_head")?);
    if !hidden.is_multiple_of(heads) {
        let expected = format!("a divisor of n_embd ({hidden})");
        return Err(invalid_value_error("n_head", &heads.into(), expected));
    }
    let hidden_size = hidden as usize;
    let sizes = ModelSizes {
        vocab: fields.read_size("vocab_size")? as usize,
        hidden: hidden_size,
        layers: fields.read_layer_count("n_layer")?,
        heads: heads as usize,
        kv_heads: heads as usize,
        head_dim: (hidden / heads) as usize,
    };
    let positions = fields.read_size("n_positions")? as usize;
    let intermediate_size = fields.read_optional_size("n_inner")?.map_or(4 * hidden_size, |n| n as usize);
    let mut config = DecoderConfig::new_with_defaults(sizes, intermediate_size);
    (config.names, config.has_transposed_matrices) = (TENSOR_NAMES, true);
    (config.norm_kind, config.norms, config.activation) = (NormKind::Layer, NORM_NAMES, Activation::Gelu);
    (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) = (true, true, true);
    config.learned_positions = Some(LearnedPositions { name: "transformer.wpe", count: positions });
    config.norm_eps = fields.read_positive_number("layer_norm_epsilon", 1e-5)? as f32;
    config.ties_embeddings = fields.read_flag_or("tie_word_embeddings", true)?;
    config.init_std = fields.read_positive_number("initializer_range", 0.02)? as f32;
    // The more layers, the smaller are the initial weights of the output projections, as in
    // `GPT2PreTrainedModel`.
    config.output_init_std = config.init_std / (2.0 * sizes.layers as f32).sqrt();
    if !fields.read_flag_or("scale_attn_weights", true)? {
        config.attention_scale = 1.0;
    }
    config.scales_by_layer_index = fields.read_flag("scale_attn_by_inverse_layer_idx")?;
    let [attention, embedding, residual] = dropout_rates;
    let (attention, embedding, residual) = (attention?, embedding?, residual?);
    config.attention_dropout = DropoutConfig { rate: attention, name: "attn.attn_dropout" };
    config.embedding_dropout = Some(DropoutConfig { rate: embedding, name: "transformer.drop" });
    config.attention_out_dropout = Some(DropoutConfig { rate: residual, name: "attn.resid_dropout" });
    config.mlp_out_dropout = Some(DropoutConfig { rate: residual, name: "mlp.dropout" });
    Ok(config)
}

/// Builds the config.json of a GPT-2 model that job.yaml describes, without the keys
/// `architectures` and `model_type`, which name the family.
fn build_config_json(spec: &ModelSpec) -> Map<String, Value> {
    into_object_entries(json!({
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
    }))
}
