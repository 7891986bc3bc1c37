//! The model family Qwen 3: how its config.json is read and created. Each head of q and k has an
//! RMSNorm, and some layers may attend to a sliding window.
use crate::model::{
    decoder::{DecoderConfig, LLAMA_CONFIG_KEY_NAMES, QkNormExtent, build_decoder_config_json},
    family::ModelFamily,
};
use serde_json::json;

/// The model family of the transformers class `Qwen3ForCausalLM`: the family's names, and functions
/// that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen3",
    architecture: "Qwen3ForCausalLM",
    read_config: |fields| {
        // Required here: transformers' default is 128, not hidden_size / num_attention_heads.
        fields.read_size("head_dim")?;
        let mut config = DecoderConfig::from_fields(fields)?;
        config.read_attention_bias(fields)?;
        config.qk_norm = Some(QkNormExtent::PerHead);
        config.read_sliding_layers(fields)?;
        Ok(config)
    },
    list_config_keys: |spec| {
        let family_keys =
            json!({"attention_bias": false, "use_sliding_window": false, "sliding_window": null});
        build_decoder_config_json(spec, family_keys)
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};
