//! The model family OLMo 2: how its config.json is read and created. The outputs of attention and
//! MLP are normalized instead of their inputs, and so are q and k, each over all heads of a token.
use crate::model::{
    decoder::{
        DecoderConfig, LLAMA_CONFIG_KEY_NAMES, NormModuleNames, QkNormExtent, build_decoder_config_json,
    },
    family::ModelFamily,
};
use serde_json::json;

/// The model family of the transformers class `Olmo2ForCausalLM`: the family's names, and functions
/// that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "olmo2",
    architecture: "Olmo2ForCausalLM",
    read_config: |fields| {
        let mut config = DecoderConfig::from_fields(fields)?;
        config.read_attention_bias(fields)?;
        config.norm_eps = fields.read_positive_number("rms_norm_eps", 1e-5)? as f32;
        config.norms = NormModuleNames {
            attention_in: None,
            attention_out: Some("post_attention_layernorm"),
            mlp_in: None,
            mlp_out: Some("post_feedforward_layernorm"),
        };
        config.qk_norm = Some(QkNormExtent::AllHeads);
        // transformers' default, which config.json may omit.
        if !fields.contains_key("pad_token_id") {
            config.padding_token = Some(1);
        }
        Ok(config)
    },
    list_config_keys: |spec| {
        build_decoder_config_json(spec, json!({"attention_bias": false, "pad_token_id": null}))
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};
