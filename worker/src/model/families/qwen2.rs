//! The model family Qwen2, which includes Qwen 2.5: how its config.json is read and created. The
//! projections of q, k and v have biases, and some layers may attend to a sliding window.
use crate::model::{
    decoder::{DecoderConfig, LLAMA_CONFIG_KEY_NAMES, build_decoder_config_json},
    family::ModelFamily,
};
use serde_json::json;

/// The model family of the transformers class `Qwen2ForCausalLM`: the family's names, and functions
/// that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen2",
    architecture: "Qwen2ForCausalLM",
    read_config: |fields| {
        let mut config = DecoderConfig::from_fields(fields)?;
        config.has_qkv_bias = true;
        config.read_sliding_layers(fields)?;
        fields.require_one_of("use_mrope", &[json!(false)])?;
        Ok(config)
    },
    list_config_keys: |spec| {
        build_decoder_config_json(spec, json!({"use_sliding_window": false, "sliding_window": null}))
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};
