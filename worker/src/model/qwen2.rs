//! Qwen 2 and 2.5: q, k and v have biases, and some layers may attend to a sliding window.
use super::{ModelFamily, decoder, hf_config::ConfigFields};
use serde_json::json;

/// `Qwen2ForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen2",
    architecture: "Qwen2ForCausalLM",
    build: |hf_config, tokens| {
        let fields = ConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::read(&fields)?;
        config.has_qkv_bias = true;
        config.read_sliding_layers(&fields)?;
        fields.require_one_of("use_mrope", &[json!(false)])?;
        fields.reject_unknown_keys()?;
        Ok(decoder::build(config, hf_config, tokens))
    },
    spec_to_hf_config: |spec| {
        let family_keys = json!({"use_sliding_window": false, "sliding_window": null});
        decoder::spec_to_hf_config(spec, "qwen2", "Qwen2ForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
