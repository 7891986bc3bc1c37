//! Llama 1 to 3 and models with the same architecture; biases if `attention_bias` and `mlp_bias`
//! are set.
use super::{ModelFamily, decoder, hf_config::ConfigFields};
use serde_json::json;

/// `LlamaForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "llama",
    architecture: "LlamaForCausalLM",
    build: |hf_config, tokens| {
        let fields = ConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::read(&fields)?;
        let bias = fields.flag("attention_bias")?;
        (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) =
            (bias, bias, fields.flag("mlp_bias")?);
        fields.require_one_of("rope_interleaved", &[json!(false)])?;
        fields.require_one_of("is_llama_config", &[json!(true)])?;
        fields.reject_unknown_keys()?;
        Ok(decoder::build(config, hf_config, tokens))
    },
    spec_to_hf_config: |spec| {
        let family_keys = json!({"attention_bias": false, "mlp_bias": false});
        decoder::spec_to_hf_config(spec, "llama", "LlamaForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
