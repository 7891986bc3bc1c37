//! The model family GPT-2: learned positions, LayerNorm, GELU, and matrices stored as `[in, out]`.
use crate::model::{
    family::{ConfigKeyNames, ModelFamily},
    gpt2::{DROPOUT_KEYS, build_gpt2_model},
};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// The model family of `GPT2LMHeadModel` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "gpt2",
    architecture: "GPT2LMHeadModel",
    build: |hf_config, _| build_gpt2_model(hf_config),
    list_config_keys: list_gpt2_config_keys,
    key_names: ConfigKeyNames { dropout_rates: &DROPOUT_KEYS, max_positions: "n_positions" },
};

/// Returns the config.json of a GPT-2 model that job.yaml describes.
fn list_gpt2_config_keys(spec: &ModelSpec) -> Map<String, Value> {
    let hf_config = json!({
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
