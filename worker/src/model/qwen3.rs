//! The model family Qwen 3. Each head of q and k has an RMSNorm, and some layers may attend to a
//! sliding window.
use super::{ModelFamily, decoder, hf_config::HfConfigFields};
use serde_json::json;

/// The model family of `Qwen3ForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen3",
    architecture: "Qwen3ForCausalLM",
    build: |hf_config, tokens| {
        let fields = HfConfigFields::new(hf_config);
        // Required here: transformers' default is 128, not hidden_size / num_attention_heads.
        fields.read_size("head_dim")?;
        let mut config = decoder::DecoderConfig::from_fields(&fields)?;
        let bias = fields.read_flag("attention_bias")?;
        (config.has_qkv_bias, config.has_o_bias, config.has_qk_norm) = (bias, bias, true);
        config.read_sliding_layers(&fields)?;
        fields.reject_unknown_keys()?;
        Ok(decoder::build_decoder(config, hf_config, tokens))
    },
    build_hf_config: |spec| {
        let family_keys =
            json!({"attention_bias": false, "use_sliding_window": false, "sliding_window": null});
        decoder::build_decoder_hf_config(spec, "qwen3", "Qwen3ForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
