//! [`build_model`]: builds the model of a job from a model directory or from `train.model`.
use super::{
    decoder::Model,
    error::{ModelError, Result},
    families::MODEL_FAMILIES,
    family::ModelFamily,
    hf_config::{HfConfigFields, parse_hf_config, read_hf_config, set_dropout_rates, shorten_text},
};
use jobspec::{ExpertsSpec, ModelSpec};
use serde_json::{Map, Value};
use std::path::Path;

/// Returns the model family whose class the key `architectures` of a config.json names. Fails if no
/// family has these `architectures`, or `model_type` contradicts them.
fn find_model_family(config: &Map<String, Value>) -> Result<&'static ModelFamily> {
    let architectures: Vec<&str> = match config.get("architectures") {
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let Some(family) = MODEL_FAMILIES.iter().find(|f| architectures == [f.architecture]) else {
        return Err(ModelError::ArchitectureUnsupported {
            architectures: architectures.iter().take(4).map(|name| shorten_text(name)).collect(),
            supported: MODEL_FAMILIES.iter().map(|f| f.architecture).collect(),
        });
    };
    match config.get("model_type").and_then(Value::as_str) {
        Some(model_type) if model_type != family.name => Err(ModelError::ModelTypeMismatch {
            model_type: shorten_text(model_type),
            architecture: family.architecture,
            expected: family.name,
        }),
        _ => Ok(family),
    }
}

/// The family, vocabulary size and largest sequence length that a model directory's config.json
/// states, for checks before a job starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelConfigSummary {
    /// The name of the model family.
    pub family: &'static str,
    /// The number of tokens in the vocabulary.
    pub vocab_size: u32,
    /// The largest number of tokens of a sequence.
    pub max_positions: u32,
}

/// Reads the family, vocabulary size and largest sequence length from a model directory's
/// config.json, for checks before a job starts.
///
/// # Errors
///
/// Fails if the config cannot be read, or if its architecture is not supported.
pub fn read_model_config_summary(directory: &Path) -> Result<ModelConfigSummary> {
    let config = read_hf_config(directory)?;
    let family = find_model_family(&config)?;
    let fields = HfConfigFields::new(&config);
    let vocab_size = fields.read_size("vocab_size")?;
    let max_positions = fields.read_size(family.key_names.max_positions)?;
    Ok(ModelConfigSummary { family: family.name, vocab_size, max_positions })
}

/// Builds the model of a job, and sets the factors of its router losses to those that
/// `train.experts` specifies.
///
/// # Errors
///
/// Fails if the config is unusable or has unsupported keys or values.
pub fn build_model_with_router_losses(
    spec: &ModelSpec,
    experts: &ExpertsSpec,
    seq_len: u32,
) -> Result<Model> {
    let mut model = build_model(spec, seq_len)?;
    model.set_router_loss_coefficients(experts);
    Ok(model)
}

/// Builds the model that `text`, the content of a config.json, describes, for sequences of at most
/// `seq_len` tokens.
///
/// # Errors
///
/// Fails if the text is not a JSON object, or has unsupported keys or values.
pub(crate) fn build_model_from_text(text: &[u8], seq_len: u32) -> Result<Model> {
    let config = parse_hf_config(text, Path::new("config.json"))?;
    find_model_family(&config)?.build_model(&config, seq_len as usize)
}

/// Builds the model of a job from a model directory or from the sizes in job.yaml, for sequences of
/// at most `seq_len` tokens.
///
/// `vocab_size` and `max_position_embeddings` of `spec` must be set, and `from` must be an absolute
/// path or relative to the current directory.
///
/// # Errors
///
/// Fails if the config is unusable or has unsupported keys or values.
pub fn build_model(spec: &ModelSpec, seq_len: u32) -> Result<Model> {
    if let Some(directory) = &spec.from {
        let mut config = read_hf_config(directory)?;
        let family = find_model_family(&config)?;
        set_dropout_rates(&mut config, family.key_names.dropout_rates, spec.dropout);
        return family.build_model(&config, seq_len as usize);
    }
    let family =
        MODEL_FAMILIES.iter().find(|f| f.name == spec.family).ok_or_else(|| ModelError::FamilyUnknown {
            family: shorten_text(&spec.family),
            supported: MODEL_FAMILIES.iter().map(|f| f.name).collect(),
        })?;
    let mut config = family.build_hf_config(spec);
    set_dropout_rates(&mut config, family.key_names.dropout_rates, spec.dropout);
    // A key of the job has an effect if the family's config has one of these keys.
    let expert_keys = [
        ("num_experts", spec.num_experts, ["num_experts", "num_local_experts"]),
        ("num_experts_per_tok", spec.num_experts_per_tok, ["num_experts_per_tok"; 2]),
        ("moe_intermediate_size", spec.moe_intermediate_size, ["moe_intermediate_size"; 2]),
    ];
    for (key, value, config_keys) in expert_keys {
        if value.is_some() && !config_keys.iter().any(|key| config.contains_key(*key)) {
            return Err(ModelError::KeyWithoutEffect { key, family: family.name });
        }
    }
    family.build_model(&config, seq_len as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that sizes which are in their ranges are rejected if the model of them is huge. The
    /// test would otherwise need gigabytes of memory.
    #[test]
    fn a_model_with_too_many_tensors_or_parameters_is_rejected() {
        let find_excess = |sizes: &str| {
            let text = format!("train: {{model: {{vocab_size: 257, {sizes}}}, data: {{files: [a.txt]}}}}");
            let source = jobspec::JobSource::Text { name: "job.yaml".into(), text };
            let (job, _, _) = jobspec::load_job(source, &[]).expect("a job");
            let mut spec = job.train.expect("a section").model;
            spec.max_position_embeddings = 64;
            match build_model(&spec, 64) {
                Err(ModelError::TooLarge { quantity, .. }) => quantity,
                Err(error) => panic!("{error}"),
                Ok(_) => "",
            }
        };
        let experts = "family: qwen3_moe, hidden_size: 16, moe_intermediate_size: 16, num_experts_per_tok: 2";
        assert_eq!(
            find_excess(&format!("{experts}, num_hidden_layers: 4096, num_experts: 65536")),
            "tensors"
        );
        let wide = "family: llama, hidden_size: 1048576, intermediate_size: 4194304, num_hidden_layers: 4096";
        assert_eq!(find_excess(&format!("{wide}, num_attention_heads: 8192, head_dim: 128")), "parameters");
        // The tables of the rotary embedding are not computed here.
        assert_eq!(
            find_excess(
                "family: llama, hidden_size: 16, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 65536"
            ),
            ""
        );
    }
}
