//! The model family Mistral. Every layer attends to a sliding window if `sliding_window` is set.
use crate::model::{
    decoder::{DECODER_KEY_NAMES, DecoderConfig, build_decoder, list_decoder_config_keys},
    family::ModelFamily,
};
use serde_json::json;

/// The model family of `MistralForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "mistral",
    architecture: "MistralForCausalLM",
    build: |hf_config, tokens| {
        build_decoder(hf_config, tokens, |fields| {
            let mut config = DecoderConfig::from_fields(fields)?;
            config.sliding_window = fields.read_optional_size("sliding_window")?.map(|w| w as usize);
            config.sliding_layers.fill(config.sliding_window.is_some());
            Ok(config)
        })
    },
    list_config_keys: |spec| list_decoder_config_keys(spec, json!({"sliding_window": null})),
    key_names: DECODER_KEY_NAMES,
};
