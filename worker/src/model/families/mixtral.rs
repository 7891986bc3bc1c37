//! The model family Mixtral: how its config.json is read and created. Every layer has experts, and
//! attends to a sliding window if `sliding_window` is set.
use crate::model::{
    decoder::{
        DecoderConfig, DecoderMoeConfig, ExpertTensorNames, LLAMA_CONFIG_KEY_NAMES, build_decoder_config_json,
    },
    family::ModelFamily,
};
use serde_json::json;

/// The model family of the transformers class `MixtralForCausalLM`: the family's names, and
/// functions that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "mixtral",
    architecture: "MixtralForCausalLM",
    read_config: |fields| {
        let mut config = DecoderConfig::from_fields(fields)?;
        config.read_sliding_window(fields)?;
        let names = ExpertTensorNames { block: "block_sparse_moe", matrices: ["w1", "w3", "w2"] };
        let experts = ("num_local_experts", fields.read_size("num_local_experts")?);
        let (sizes, width) = (config.sizes, config.intermediate_size);
        let mut moe = DecoderMoeConfig::from_fields(fields, experts, sizes, width, names)?;
        fields.require_one_of("router_jitter_noise", &[json!(0)])?;
        moe.shape.normalize_weights = true;
        config.moe = Some(moe);
        Ok(config)
    },
    list_config_keys: |spec| {
        let family_keys = json!({
            "num_local_experts": spec.num_experts.unwrap_or(8),
            "num_experts_per_tok": spec.num_experts_per_tok.unwrap_or(2),
            "output_router_logits": false,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "sliding_window": null,
        });
        build_decoder_config_json(spec, family_keys)
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};
