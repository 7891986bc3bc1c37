//! The model family Qwen 2 and 2.5. The projections of q, k and v have biases, and some layers may
//! attend to a sliding window.
use super::{ModelFamily, decoder, hf_config::HfConfigFields};
use serde_json::json;

/// The model family of `Qwen2ForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen2",
    architecture: "Qwen2ForCausalLM",
    build: |hf_config, tokens| {
        let fields = HfConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::from_fields(&fields)?;
        config.has_qkv_bias = true;
        config.read_sliding_layers(&fields)?;
        fields.require_one_of("use_mrope", &[json!(false)])?;
        fields.reject_unknown_keys()?;
        Ok(decoder::build_decoder(config, hf_config, tokens))
    },
    build_hf_config: |spec| {
        let family_keys = json!({"use_sliding_window": false, "sliding_window": null});
        decoder::build_decoder_hf_config(spec, "qwen2", "Qwen2ForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
