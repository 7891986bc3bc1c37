//! [`AdapterConfigError`]: why an `adapter_config.json` is rejected.
use crate::format_constants::ADAPTER_CONFIG_FILE;
use diagnostic::Code;
use diagnostic::codes::checkpoint as codes;
use serde_json::Value;

/// Why the file `adapter_config.json`, in which PEFT describes LoRA adapters, is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterConfigError {
    /// The file is not a JSON object.
    #[error("invalid JSON: {0}")]
    Json(String),
    /// A setting has an unsupported value.
    #[error("{ADAPTER_CONFIG_FILE}: `{key}: {value}` is not supported")]
    Unsupported {
        /// Name of the setting.
        key: String,
        /// Value of the setting as JSON, shortened.
        value: String,
    },
    /// A setting has an invalid value.
    #[error("{ADAPTER_CONFIG_FILE}: `{key}` is {value}, expected {expected}")]
    Invalid {
        /// Name of the setting.
        key: String,
        /// Value of the setting as JSON, shortened.
        value: String,
        /// Description of the valid values.
        expected: &'static str,
    },
    /// `target_modules` is missing.
    #[error("{ADAPTER_CONFIG_FILE} has no `target_modules`")]
    NoTargets,
}

impl AdapterConfigError {
    /// Returns the error that an `adapter_config.json` sets the key `key` to the unsupported value
    /// `value`.
    pub(crate) fn unsupported(key: &str, value: &Value) -> Self {
        AdapterConfigError::Unsupported { key: key.to_owned(), value: format_shortened(value) }
    }

    /// Returns the error that an `adapter_config.json` sets the key `key` to the invalid value
    /// `value`. `expected` describes the valid values.
    pub(crate) fn invalid(key: &str, value: &Value, expected: &'static str) -> Self {
        AdapterConfigError::Invalid { key: key.to_owned(), value: format_shortened(value), expected }
    }

    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            AdapterConfigError::Json(_) => codes::CHECKPOINT_JSON_INVALID,
            _ => codes::ADAPTER_CONFIG_UNSUPPORTED,
        }
    }
}

/// Formats a value as JSON, shortened to 60 characters for a message.
fn format_shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.chars().count() > 60 {
        true => text.chars().take(60).chain("…".chars()).collect(),
        false => text,
    }
}
