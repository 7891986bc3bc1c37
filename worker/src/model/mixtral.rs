//! The model family Mixtral. Every layer has experts, and attends to a sliding window if
//! `sliding_window` is set.
use super::{
    ModelFamily,
    decoder::{self, ExpertTensorNames},
    hf_config::HfConfigFields,
};
use serde_json::json;

/// The model family of `MixtralForCausalLM` of transformers.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "mixtral",
    architecture: "MixtralForCausalLM",
    build: |hf_config, tokens| {
        let fields = HfConfigFields::new(hf_config);
        let mut config = decoder::DecoderConfig::from_fields(&fields)?;
        config.sliding_window = fields.read_optional_size("sliding_window")?.map(|w| w as usize);
        config.sliding_layers.fill(config.sliding_window.is_some());
        let names = ExpertTensorNames { block: "block_sparse_moe", matrices: ["w1", "w3", "w2"] };
        let experts = ("num_local_experts", fields.read_size("num_local_experts")?);
        config.read_experts(&fields, experts, config.intermediate_size, names)?;
        fields.require_one_of("router_jitter_noise", &[json!(0)])?;
        if let Some(moe) = &mut config.moe {
            moe.shape.normalize_weights = true;
        }
        fields.reject_unknown_keys()?;
        Ok(decoder::build_decoder(config, hf_config, tokens))
    },
    build_hf_config: |spec| {
        let family_keys = json!({
            "num_local_experts": spec.num_experts.unwrap_or(8),
            "num_experts_per_tok": spec.num_experts_per_tok.unwrap_or(2),
            "output_router_logits": false,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "sliding_window": null,
        });
        decoder::build_decoder_hf_config(spec, "mixtral", "MixtralForCausalLM", family_keys)
    },
    dropout_keys: &[decoder::ATTENTION_DROPOUT],
};
