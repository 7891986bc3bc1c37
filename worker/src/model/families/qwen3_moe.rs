//! The model family Qwen 3 MoE: how its config.json is read and created. `decoder_sparse_step` and
//! `mlp_only_layers` select the layers that have experts. Either all layers attend to a sliding
//! window or none.
use crate::model::{
    decoder::{
        DecoderConfig, DecoderMoeConfig, ExpertTensorNames, LLAMA_CONFIG_KEY_NAMES, QkNormExtent,
        build_decoder_config_json,
    },
    error::{ModelError, Result},
    family::ModelFamily,
    hf_config::{HfConfigFields, invalid_value_error},
};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// The model family of the transformers class `Qwen3MoeForCausalLM`: the family's names, and
/// functions that read and create its config.json.
pub(super) const FAMILY: ModelFamily = ModelFamily {
    name: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    read_config,
    list_config_keys: build_config_json,
    key_names: LLAMA_CONFIG_KEY_NAMES,
};

/// Reads the sizes and options of a model from the config.json of a Qwen 3 MoE model.
fn read_config(fields: &HfConfigFields) -> Result<DecoderConfig> {
    let mut config = DecoderConfig::from_fields(fields)?;
    config.read_attention_bias(fields)?;
    config.qk_norm = Some(QkNormExtent::PerHead);
    let window = fields.read_optional_size("sliding_window")?;
    let slides = fields.read_flag("use_sliding_window")?;
    config.sliding_window = window.filter(|_| slides).map(|w| w as usize);
    config.sliding_layers.fill(config.sliding_window.is_some());
    // Without effect in this architecture, but present in models of the Hub.
    fields.read_value("max_window_layers");
    let names = ExpertTensorNames { block: "mlp", matrices: ["gate_proj", "up_proj", "down_proj"] };
    let width = fields.read_size("moe_intermediate_size")? as usize;
    let experts = ("num_experts", read_expert_count(fields)?);
    let mut moe = DecoderMoeConfig::from_fields(fields, experts, config.sizes, width, names)?;
    moe.shape.normalize_weights = fields.read_flag("norm_topk_prob")?;
    let step = fields.read_optional_size("decoder_sparse_step")?.unwrap_or(1) as usize;
    let dense_layers = read_mlp_only_layers(fields, config.sizes.layers)?;
    for (l, is_moe) in moe.moe_layers.iter_mut().enumerate() {
        *is_moe = !dense_layers.contains(&l) && (l + 1).is_multiple_of(step);
    }
    if !moe.moe_layers.contains(&true) {
        return Err(ModelError::NoMoeLayers);
    }
    config.moe = Some(moe);
    Ok(config)
}

/// Builds the config.json of a Qwen 3 MoE model that job.yaml describes, without the keys
/// `architectures` and `model_type`, which name the family.
fn build_config_json(spec: &ModelSpec) -> Map<String, Value> {
    let family_keys = json!({
        "attention_bias": false,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": spec.moe_intermediate_size.unwrap_or(spec.intermediate_size),
        "norm_topk_prob": true,
        "num_experts": spec.num_experts.unwrap_or(8),
        "num_experts_per_tok": spec.num_experts_per_tok.unwrap_or(2),
        "output_router_logits": false,
        "router_aux_loss_coef": 0.001,
        "sliding_window": null,
        "use_sliding_window": false,
    });
    build_decoder_config_json(spec, family_keys)
}

/// Reads the number of experts of a layer from `num_experts`, or from `num_local_experts`, its name
/// in newer versions of transformers. Fails if both keys are absent or have different values.
fn read_expert_count(fields: &HfConfigFields) -> Result<u32> {
    match (fields.read_optional_size("num_experts")?, fields.read_optional_size("num_local_experts")?) {
        (Some(a), Some(b)) if a != b => {
            Err(ModelError::KeysContradict { key: "num_experts", other: "num_local_experts" })
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => Err(ModelError::KeyMissing { key: "num_experts".into() }),
    }
}

/// Reads `mlp_only_layers` from config.json, the numbers of the layers that have no experts. Each
/// number must be below `layers`.
fn read_mlp_only_layers(fields: &HfConfigFields, layers: usize) -> Result<Vec<usize>> {
    const KEY: &str = "mlp_only_layers";
    let Some(value) = fields.read_value(KEY) else { return Ok(Vec::new()) };
    let layer = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&l| l < layers);
    let list = value.as_array().and_then(|l| l.iter().map(layer).collect::<Option<Vec<usize>>>());
    list.ok_or_else(|| invalid_value_error(KEY, value, format!("a list of layers below {layers}")))
}
