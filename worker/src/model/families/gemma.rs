//! The model families Gemma 2 and Gemma 3 (text models).
//!
//! Both have scaled embeddings, GeGLU, norms that multiply by 1 + weight before and after
//! attention and MLP, and sliding-window layers between layers with full attention. Gemma 2 caps
//! attention scores and logits; Gemma 3 has q/k norms, and a separate rotation in sliding-window
//! layers.
use crate::model::{
    decoder::{
        Activation, DecoderConfig, LLAMA_CONFIG_KEY_NAMES, NormKind, NormModuleNames, QkNormExtent,
        build_decoder_config_json,
    },
    error::{ModelError, Result},
    family::ModelFamily,
    hf_config::{HfConfigFields, invalid_value_error},
    rotary_embedding::RopeConfig,
};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// The names of the four norm modules in a decoder layer of Gemma 2 and Gemma 3, before and after
/// attention and before and after the MLP.
const NORM_NAMES: NormModuleNames = NormModuleNames {
    attention_in: Some("input_layernorm"),
    attention_out: Some("post_attention_layernorm"),
    mlp_in: Some("pre_feedforward_layernorm"),
    mlp_out: Some("post_feedforward_layernorm"),
};

/// The model family of the transformers class `Gemma2ForCausalLM`: the family's names, and
/// functions that read and create its config.json.
pub(super) const GEMMA2: ModelFamily = ModelFamily {
    name: "gemma2",
    architecture: "Gemma2ForCausalLM",
    read_config: |fields| {
        let rope = RopeConfig::from_fields(fields)?;
        let mut config = read_gemma_config(fields, rope, 2)?;
        config.attention_softcap = read_softcap(fields, "attn_logit_softcapping", Some(50.0))?;
        config.logit_softcap = read_softcap(fields, "final_logit_softcapping", Some(30.0))?;
        Ok(config)
    },
    list_config_keys: |spec| {
        let family_keys =
            json!({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096});
        build_gemma_config_json(spec, family_keys)
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};

/// The model family of the transformers class `Gemma3ForCausalLM`: the family's names, and
/// functions that read and create its config.json.
pub(super) const GEMMA3: ModelFamily = ModelFamily {
    name: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    read_config: |fields| {
        let pattern = fields.read_optional_size("sliding_window_pattern")?;
        let pattern = pattern.or(fields.read_optional_size("_sliding_window_pattern")?).unwrap_or(6);
        let (rope, sliding_rope) = read_rope_configs(fields)?;
        let mut config = read_gemma_config(fields, rope, pattern as usize)?;
        config.sliding_rope = sliding_rope;
        // transformers accepts this key but ignores it.
        fields.require_one_of("attn_logit_softcapping", &[Value::Null])?;
        config.logit_softcap = read_softcap(fields, "final_logit_softcapping", None)?;
        config.qk_norm = Some(QkNormExtent::PerHead);
        Ok(config)
    },
    list_config_keys: |spec| {
        let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        let parameters = json!({"full_attention": rope(spec.rope_theta), "sliding_attention": rope(10000.0)});
        let family_keys =
            json!({"sliding_window": 512, "sliding_window_pattern": 6, "rope_parameters": parameters});
        let mut hf_config = build_gemma_config_json(spec, family_keys);
        for key in ["rope_theta", "rope_scaling"] {
            hf_config.remove(key);
        }
        hf_config
    },
    key_names: LLAMA_CONFIG_KEY_NAMES,
};

/// Reads those keys of config.json that Gemma 2 and Gemma 3 have in common. `rope` is the rotary
/// embedding of layers with full attention. Every `pattern`-th layer has full attention, unless the
/// config key `layer_types` overrides this pattern.
fn read_gemma_config(fields: &HfConfigFields, rope: RopeConfig, pattern: usize) -> Result<DecoderConfig> {
    let gelu = json!("gelu_pytorch_tanh");
    fields.require_one_of("hidden_act", std::slice::from_ref(&gelu))?;
    fields.require_one_of("hidden_activation", &[gelu])?;
    fields.require_one_of("attention_bias", &[json!(false)])?;
    fields.require_one_of("use_bidirectional_attention", &[json!(false)])?;
    fields.read_value("cache_implementation");
    // Required here: transformers' default is 256, not hidden_size / num_attention_heads.
    fields.read_size("head_dim")?;
    let mut config = DecoderConfig::from_fields_with_rope(fields, rope)?;
    (config.norm_kind, config.norms, config.activation) =
        (NormKind::RmsAddOne, NORM_NAMES, Activation::Geglu);
    config.ties_embeddings = fields.read_flag_or("tie_word_embeddings", true)?;
    config.embedding_scale = Some((config.sizes.hidden as f64).sqrt() as f32);
    config.attention_scale = 1.0 / fields.read_positive_number("query_pre_attn_scalar", 256.0)?.sqrt();
    let window = match fields.contains_key("sliding_window") {
        true => fields.read_optional_size("sliding_window")?,
        false => Some(4096),
    };
    config.sliding_window = window.map(|w| w as usize);
    config.sliding_layers =
        (0..config.sizes.layers).map(|l| window.is_some() && (l + 1) % pattern != 0).collect();
    config.read_layer_types(fields)?;
    Ok(config)
}

/// Reads the softcap, the smooth limit of attention scores or logits, from the key `key` of
/// config.json. Returns `None` if the value is null, and `default` if the key is absent.
fn read_softcap(fields: &HfConfigFields, key: &'static str, default: Option<f64>) -> Result<Option<f32>> {
    let default = if fields.contains_key(key) { None } else { default };
    match fields.read_optional_number(key)?.or(default) {
        Some(cap) if cap as f32 <= 0.0 => Err(invalid_value_error(key, &cap.into(), "a number above 0")),
        cap => Ok(cap.map(|x| x as f32)),
    }
}

/// Reads the rotary embeddings from config.json: that of layers with full attention and that of
/// sliding-window layers. The config keys are `rope_parameters` (transformers 5), or `rope_theta`,
/// `rope_scaling` and `rope_local_base_freq` (transformers 4).
fn read_rope_configs(fields: &HfConfigFields) -> Result<(RopeConfig, Option<RopeConfig>)> {
    const NEW_KEY: &str = "rope_parameters";
    const OLD_KEY: &str = "rope_scaling";
    let full_theta = fields.read_positive_number("rope_theta", 1e6)?;
    let sliding_theta = fields.read_positive_number("rope_local_base_freq", 1e4)?;
    let old = fields.read_value(OLD_KEY);
    let Some(new) = fields.read_value(NEW_KEY) else {
        let unscaled = Ok(RopeConfig::unscaled(full_theta));
        let full = old.map_or(unscaled, |v| RopeConfig::parse_config_value(OLD_KEY, v, full_theta))?;
        return Ok((full, Some(RopeConfig::unscaled(sliding_theta))));
    };
    let invalid =
        || invalid_value_error(NEW_KEY, new, "a mapping with `full_attention` and `sliding_attention`");
    let map = new.as_object().filter(|m| m.len() == 2).ok_or_else(invalid)?;
    let read = |layer_type: &str, theta| {
        RopeConfig::parse_config_value(NEW_KEY, map.get(layer_type).ok_or_else(invalid)?, theta)
    };
    if old.is_some() {
        return Err(ModelError::KeysContradict { key: OLD_KEY, other: NEW_KEY });
    }
    Ok((read("full_attention", full_theta)?, Some(read("sliding_attention", sliding_theta)?)))
}

/// Builds the config.json of a Gemma model that job.yaml describes, without the keys
/// `architectures` and `model_type`, which name the family. `family_keys` are the keys in which
/// Gemma 2 and Gemma 3 differ.
fn build_gemma_config_json(spec: &ModelSpec, family_keys: Value) -> Map<String, Value> {
    let mut hf_config = build_decoder_config_json(spec, family_keys);
    hf_config.remove("hidden_act");
    hf_config.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
    hf_config.insert("query_pre_attn_scalar".into(), spec.head_dim.into());
    hf_config
}
