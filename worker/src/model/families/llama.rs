//! The model family Llama: Llama 1 to 3, and models with that architecture and optional biases.
use crate::model::{
    decoder::{DecoderConfig, LLAMA_CONFIG_KEY_NAMES, build_decoder_config_json},
    family::ModelFamily,
};
use serde_json::json;

/// The model family of the transformers class `LlamaForCausalLM`: the family's names, and functions
/// that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "llama",
    architecture: "LlamaForCausalLM",
    read_config: |fields| {
        let mut config = DecoderConfig::from_fields(fields)?;
        config.read_attention_bias(fields)?;
        config.has_mlp_bias = fields.read_flag("mlp_bias")?;
        fields.require_one_of("rope_interleaved", &[json!(false)])?;
        fields.require_one_of("is_llama_config", &[json!(true)])?;
        Ok(config)
    },
    list_config_keys: |spec| {
        build_decoder_config_json(spec, json!({"attention_bias": false, "mlp_bias": false}))
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};
