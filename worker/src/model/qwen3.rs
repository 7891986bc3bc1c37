//! Qwen 3: each head of q and k has an RMSNorm, and some layers may attend to a sliding window.
use super::{ModelFamily, decoder, hf_config::ConfigFields};
use serde_json::json;

/// `Qwen3ForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen3",
    architecture: "Qwen3ForCausalLM",
    build: |hf_config, tokens| {
        let fields = ConfigFields::new(hf_config);
        // Required here: transformers' default is 128, not hidden_size / num_attention_heads.
        fields.size("head_dim")?;
        let mut config = decoder::DecoderConfig::read(&fields)?;
        let bias = fields.flag("attention_bias")?;
        (config.has_qkv_bias, config.has_o_bias, config.has_qk_norm) = (bias, bias, true);
        config.read_sliding_layers(&fields)?;
        fields.reject_unknown_keys()?;
        Ok(decoder::build(config, hf_config, tokens))
    },
    spec_to_hf_config: |spec| {
        let family_keys =
            json!({"attention_bias": false, "use_sliding_window": false, "sliding_window": null});
        decoder::spec_to_hf_config(spec, "qwen3", "Qwen3ForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
