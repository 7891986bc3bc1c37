//! [`ModelError`]: the reasons why a model cannot be built, or does not support a feature that the
//! job requests.
use diagnostic::{Code, Diagnostic, codes::model as codes};
use std::{
    error::Error,
    path::{Path, PathBuf},
};

/// The reason why a model cannot be built, or does not support a feature that the job requests.
///
/// A config key is a key of config.json. For a model that the section `train.model` describes, the
/// config.json is built from that section.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// config.json cannot be opened or read.
    #[error("cannot read {}", path.display())]
    ConfigUnreadable {
        /// The path of config.json.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// config.json is larger than the limit.
    #[error("{} is larger than {max_bytes} bytes", path.display())]
    ConfigTooLarge {
        /// The path of config.json.
        path: PathBuf,
        /// The largest size that is read, in bytes.
        max_bytes: u64,
    },
    /// config.json is not a JSON object.
    #[error("{} is not a JSON object", path.display())]
    ConfigMalformed {
        /// The path of config.json.
        path: PathBuf,
        /// The parser's error; `None` for valid JSON of another type.
        source: Option<serde_json::Error>,
    },
    /// A required config key is absent or null.
    #[error("the model config has no `{key}`")]
    KeyMissing {
        /// The config key.
        key: String,
    },
    /// A config key has a value of the wrong type or outside of its range.
    #[error("`{key}` of the model config is {value}, expected {expected}")]
    ValueInvalid {
        /// The config key; keys of nested mappings are joined by dots.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// The values that are valid.
        expected: String,
    },
    /// A dropout rate is not a number from 0 to below 1.
    #[error("`{key}` of the model config is {value}, expected a number from 0 to below 1")]
    DropoutRateInvalid {
        /// The config key.
        key: &'static str,
        /// The value as JSON, shortened.
        value: String,
    },
    /// A config key requests a computation that is not implemented.
    #[error("`{key}` of the model config is {value}, which is not supported")]
    ValueUnsupported {
        /// The config key; keys of nested mappings are joined by dots.
        key: String,
        /// The value as JSON, shortened.
        value: String,
        /// The supported values as JSON; empty if only the absence of the key is supported.
        supported: Vec<String>,
    },
    /// Two config keys with the same meaning have different values.
    #[error("`{key}` and `{other}` of the model config contradict each other")]
    KeysContradict {
        /// One of the config keys.
        key: &'static str,
        /// The other config key.
        other: &'static str,
    },
    /// config.json has keys that are not known for the architecture and may change its computation.
    #[error("the model config has unsupported keys: {}", format_config_entries(entries))]
    KeysUnknown {
        /// The first few of these keys with their values as JSON, shortened.
        entries: Vec<(String, String)>,
    },
    /// `architectures` of config.json names no supported architecture.
    #[error("architecture {} is not supported", join_or_default(architectures, "(none)"))]
    ArchitectureUnsupported {
        /// The names in `architectures` of config.json, shortened.
        architectures: Vec<String>,
        /// The supported architectures.
        supported: Vec<&'static str>,
    },
    /// `model_type` and `architectures` of config.json name different families.
    #[error("model_type `{model_type}` contradicts architecture {architecture}, expected `{expected}`")]
    ModelTypeMismatch {
        /// `model_type` of config.json, shortened.
        model_type: String,
        /// The architecture that config.json names.
        architecture: &'static str,
        /// The model type of that architecture.
        expected: &'static str,
    },
    /// The model has too many tensors or parameters.
    #[error("the model has {count} {quantity}, of at most {limit}")]
    TooLarge {
        /// What there are too many of, such as `tensors`.
        quantity: &'static str,
        /// The number.
        count: u128,
        /// The largest supported number.
        limit: u128,
    },
    /// The job names a model family that does not exist.
    #[error("unknown model family `{family}`")]
    FamilyUnknown {
        /// The name in the job.
        family: String,
        /// The supported families.
        supported: Vec<&'static str>,
    },
    /// A key of `train.model` does not apply to the model family.
    #[error("`{key}` has no effect on family `{family}`")]
    KeyWithoutEffect {
        /// The key below `train.model`.
        key: &'static str,
        /// The model family.
        family: &'static str,
    },
    /// A mixture-of-experts architecture is configured without any layer with experts.
    #[error("`decoder_sparse_step` and `mlp_only_layers` of the model config leave no layer with experts")]
    NoMoeLayers,
    /// FP8 matmuls are not implemented for models with experts.
    #[error("`train.precision: fp8` is not supported for models with experts")]
    Fp8MoeUnsupported,
    /// A matrix dimension does not have a size that FP8 matmuls support.
    #[error("`train.precision: fp8` requires multiples of {multiple}, but {dimension} is {size}")]
    Fp8SizeUnsupported {
        /// The dimension, by its config keys.
        dimension: String,
        /// The size of the dimension.
        size: usize,
        /// The size must be a multiple of this number.
        multiple: usize,
    },
    /// A LoRA target is the name of no matrix that can have an adapter.
    #[error("LoRA target `{target}` matches no matrix of the layers")]
    LoraTargetUnknown {
        /// The target, shortened.
        target: String,
        /// The names of the matrices that can have adapters.
        supported: Vec<String>,
        /// Whether the model has experts. Matrices of experts cannot have adapters.
        has_experts: bool,
    },
}

/// The result type of functions that read a model's config or build a model: a value or a
/// [`ModelError`].
pub type Result<T> = std::result::Result<T, ModelError>;

/// Formats keys of a config.json with their values as text for an error message, separated by
/// commas.
fn format_config_entries(entries: &[(String, String)]) -> String {
    entries.iter().map(|(key, value)| format!("`{key}: {value}`")).collect::<Vec<_>>().join(", ")
}

/// Returns the texts in `items` separated by commas, or the text `empty` if the list has no items.
fn join_or_default(items: &[String], empty: &str) -> String {
    if items.is_empty() { empty.into() } else { items.join(", ") }
}

impl ModelError {
    /// Returns advice on how to change the job or the config.json so that the error no longer
    /// occurs, or no advice for some errors.
    fn list_help(&self) -> Vec<String> {
        let help = match self {
            ModelError::DropoutRateInvalid { .. } => "`train.model.dropout` sets all dropout rates".into(),
            ModelError::ValueUnsupported { key, supported, .. } if supported.is_empty() => {
                format!("only models without `{key}` are supported")
            }
            ModelError::ValueUnsupported { supported, .. } => format!("supported: {}", supported.join(", ")),
            ModelError::ArchitectureUnsupported { supported, .. }
            | ModelError::FamilyUnknown { supported, .. } => format!("supported: {}", supported.join(", ")),
            ModelError::KeysContradict { key, other } => {
                format!("remove either `{key}` or `{other}` from config.json")
            }
            ModelError::KeysUnknown { .. } => {
                "remove a key from config.json only if it does not change the model's computation".into()
            }
            ModelError::KeyWithoutEffect { key, .. } => format!("remove `train.model.{key}`"),
            ModelError::NoMoeLayers => {
                "a Qwen 3 model without experts has architecture Qwen3ForCausalLM".into()
            }
            ModelError::Fp8MoeUnsupported | ModelError::Fp8SizeUnsupported { .. } => {
                "use `train.precision: bf16`".into()
            }
            ModelError::LoraTargetUnknown { supported, has_experts, .. } => {
                let names = format!("matrices that can have adapters: {}", supported.join(", "));
                let experts = has_experts.then(|| "experts and routers cannot have adapters".into());
                return std::iter::once(names).chain(experts).collect();
            }
            _ => return Vec::new(),
        };
        vec![help]
    }
}

impl ModelError {
    /// Converts this error about the config.json in `directory` to a diagnostic that names the
    /// file.
    pub fn into_diagnostic_of_file(self, directory: &Path) -> Diagnostic {
        let names_file = matches!(
            self,
            ModelError::ConfigUnreadable { .. }
                | ModelError::ConfigTooLarge { .. }
                | ModelError::ConfigMalformed { .. }
        );
        let diagnostic = Diagnostic::from(self);
        if names_file {
            return diagnostic;
        }
        let path = directory.join("config.json").display().to_string();
        let message = format!("{path}: {}", diagnostic.message());
        diagnostic.with_message(message).with_field("path", path)
    }
}

impl From<ModelError> for Diagnostic {
    fn from(e: ModelError) -> Self {
        let error = |code: Code| Diagnostic::error(code, e.to_string());
        let file_error = |code, path: &Path| error(code).with_field("path", path.display().to_string());
        let value_error = |code, key: &str, value: &str| {
            error(code).with_field("config_key", key).with_field("value", value)
        };
        let diagnostic = match &e {
            ModelError::ConfigUnreadable { path, .. } => file_error(codes::MODEL_CONFIG_UNREADABLE, path),
            ModelError::ConfigMalformed { path, .. } => file_error(codes::MODEL_CONFIG_MALFORMED, path),
            ModelError::ConfigTooLarge { path, max_bytes } => {
                file_error(codes::MODEL_CONFIG_MALFORMED, path).with_field("max_bytes", *max_bytes)
            }
            ModelError::KeyMissing { key } => {
                error(codes::MODEL_CONFIG_KEY_MISSING).with_field("config_key", key.as_str())
            }
            ModelError::ValueInvalid { key, value, expected } => {
                value_error(codes::MODEL_CONFIG_VALUE_INVALID, key, value)
                    .with_field("expected", expected.as_str())
            }
            ModelError::DropoutRateInvalid { key, value } => {
                value_error(codes::MODEL_CONFIG_VALUE_INVALID, key, value)
                    .with_field("expected", "a number from 0 to below 1")
            }
            ModelError::ValueUnsupported { key, value, supported } => {
                value_error(codes::MODEL_CONFIG_VALUE_UNSUPPORTED, key, value)
                    .with_field("supported", supported.clone())
            }
            ModelError::KeysContradict { key, other } => error(codes::MODEL_CONFIG_CONTRADICTORY)
                .with_field("config_key", *key)
                .with_field("other_config_key", *other),
            ModelError::KeysUnknown { entries } => {
                let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
                error(codes::MODEL_CONFIG_KEY_UNKNOWN).with_field("config_keys", keys)
            }
            ModelError::ArchitectureUnsupported { architectures, supported } => {
                error(codes::MODEL_ARCHITECTURE_UNSUPPORTED)
                    .with_field("architectures", architectures.clone())
                    .with_field("supported", supported.clone())
            }
            ModelError::ModelTypeMismatch { model_type, architecture, expected } => {
                error(codes::MODEL_CONFIG_CONTRADICTORY)
                    .with_field("model_type", model_type.as_str())
                    .with_field("architecture", *architecture)
                    .with_field("expected", *expected)
            }
            ModelError::TooLarge { quantity, count, limit } => error(codes::MODEL_TOO_LARGE)
                .with_field("quantity", *quantity)
                .with_field("count", count.to_string())
                .with_field("limit", limit.to_string()),
            ModelError::FamilyUnknown { family, supported } => error(codes::MODEL_FAMILY_UNKNOWN)
                .with_field("family", family.as_str())
                .with_field("supported", supported.clone()),
            ModelError::KeyWithoutEffect { key, family } => error(codes::MODEL_KEY_WITHOUT_EFFECT)
                .with_field("key", format!("train.model.{key}"))
                .with_field("family", *family),
            ModelError::NoMoeLayers => error(codes::MODEL_WITHOUT_MOE_LAYERS),
            ModelError::Fp8MoeUnsupported => error(codes::MODEL_FP8_UNSUPPORTED),
            ModelError::Fp8SizeUnsupported { dimension, size, multiple } => {
                error(codes::MODEL_FP8_UNSUPPORTED)
                    .with_field("dimension", dimension.as_str())
                    .with_field("size", *size)
                    .with_field("multiple", *multiple)
            }
            ModelError::LoraTargetUnknown { target, supported, .. } => error(codes::LORA_TARGET_UNKNOWN)
                .with_field("target", target.as_str())
                .with_field("supported", supported.clone()),
        };
        let diagnostic = e.list_help().into_iter().fold(diagnostic, Diagnostic::with_help);
        e.source().map_or(diagnostic.clone(), |source| diagnostic.with_cause(source))
    }
}
