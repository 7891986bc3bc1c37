//! Mistral: every layer attends to a sliding window if `sliding_window` is set.
use super::{ModelFamily, decoder, hf_config::ConfigFields};
use serde_json::json;

/// `MistralForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "mistral",
    architecture: "MistralForCausalLM",
    build: |hf_config, tokens| {
        let fields = ConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::read(&fields)?;
        config.sliding_window = fields.optional_size("sliding_window")?.map(|w| w as usize);
        config.sliding_layers.fill(config.sliding_window.is_some());
        fields.reject_unknown_keys()?;
        Ok(decoder::build(config, hf_config, tokens))
    },
    spec_to_hf_config: |spec| {
        let family_keys = json!({"sliding_window": null});
        decoder::spec_to_hf_config(spec, "mistral", "MistralForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
