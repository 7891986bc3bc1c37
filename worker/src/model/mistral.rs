//! The model family Mistral. Every layer attends to a sliding window if `sliding_window` is set.
use super::{ModelFamily, decoder, hf_config::HfConfigFields};
use serde_json::json;

/// The model family of `MistralForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "mistral",
    architecture: "MistralForCausalLM",
    build: |hf_config, tokens| {
        let fields = HfConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::from_fields(&fields)?;
        config.sliding_window = fields.read_optional_size("sliding_window")?.map(|w| w as usize);
        config.sliding_layers.fill(config.sliding_window.is_some());
        fields.reject_unknown_keys()?;
        Ok(decoder::build_decoder(config, hf_config, tokens))
    },
    build_hf_config: |spec| {
        let family_keys = json!({"sliding_window": null});
        decoder::build_decoder_hf_config(spec, "mistral", "MistralForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
