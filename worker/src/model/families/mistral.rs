//! The model family Mistral: how its config.json is read and created. Every layer attends to a
//! sliding window if `sliding_window` is set.
use crate::model::{
    decoder::{DecoderConfig, LLAMA_CONFIG_KEY_NAMES, build_decoder_config_json},
    family::ModelFamily,
};
use serde_json::json;

/// The model family of the transformers class `MistralForCausalLM`: the family's names, and
/// functions that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "mistral",
    architecture: "MistralForCausalLM",
    read_config: |fields| {
        let mut config = DecoderConfig::from_fields(fields)?;
        config.read_sliding_window(fields)?;
        Ok(config)
    },
    list_config_keys: |spec| build_decoder_config_json(spec, json!({"sliding_window": null})),
    key_names: LLAMA_CONFIG_KEY_NAMES,
};
