//! The model family Llama: Llama 1 to 3, and models with that architecture and optional biases.
use super::{ModelFamily, decoder, hf_config::HfConfigFields};
use serde_json::json;

/// The model family of `LlamaForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "llama",
    architecture: "LlamaForCausalLM",
    build: |hf_config, tokens| {
        let fields = HfConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::from_fields(&fields)?;
        let bias = fields.read_flag("attention_bias")?;
        (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) =
            (bias, bias, fields.read_flag("mlp_bias")?);
        fields.require_one_of("rope_interleaved", &[json!(false)])?;
        fields.require_one_of("is_llama_config", &[json!(true)])?;
        fields.reject_unknown_keys()?;
        Ok(decoder::build_decoder(config, hf_config, tokens))
    },
    build_hf_config: |spec| {
        let family_keys = json!({"attention_bias": false, "mlp_bias": false});
        decoder::build_decoder_hf_config(spec, "llama", "LlamaForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
