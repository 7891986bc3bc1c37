//! [`HfConfigFields`]: a reader for the keys of a Hugging Face `config.json`, which checks the
//! types and ranges of the values.
//!
//! A key or value that is not implemented is rejected by name. No setting is approximated or
//! silently ignored.
use super::error::{ModelError, Result};
use serde_json::{Map, Value};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs::OpenOptions,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The largest config.json that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Keys of config.json that are ignored because they do not change the computation of a training
/// step in any architecture: names, text generation, provenance, output formats.
const IGNORED_KEYS: &[&str] = &[
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "do_sample",
    "dtype",
    "early_stopping",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
];

/// Reads `config.json` of a model directory.
///
/// # Errors
///
/// Fails if the file cannot be read, is not a regular file, is larger than [`MAX_CONFIG_BYTES`], or
/// is not a JSON object.
pub(super) fn read_hf_config(directory: &Path) -> Result<Map<String, Value>> {
    let path = directory.join("config.json");
    let unreadable = |source| ModelError::ConfigUnreadable { path: path.clone(), source };
    // Without O_NONBLOCK, the open of a pipe waits for a writer.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(unreadable(io::Error::other("not a regular file")));
    }
    let mut text = Vec::new();
    file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_CONFIG_BYTES {
        return Err(ModelError::ConfigTooLarge { path, max_bytes: MAX_CONFIG_BYTES });
    }
    parse_hf_config(&text, &path)
}

/// Parses the text of a config.json. Errors name the file `path`.
///
/// # Errors
///
/// Fails if the text is not a JSON object.
pub(super) fn parse_hf_config(text: &[u8], path: &Path) -> Result<Map<String, Value>> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ModelError::ConfigMalformed { path: path.to_owned(), source: None }),
        Err(error) => Err(ModelError::ConfigMalformed { path: path.to_owned(), source: Some(error) }),
    }
}

/// The largest number of layers that a config may declare.
const MAX_LAYERS: usize = 1 << 14;

/// Those keys of config.json that have different names in different model families, such as
/// `hidden_size` in Llama and `n_embd` in GPT-2.
#[derive(Clone, Copy)]
pub(super) struct ConfigKeyNames {
    /// The keys of dropout rates.
    pub(super) dropout_rates: &'static [&'static str],
    /// The key of the largest number of tokens of a sequence.
    pub(super) max_positions: &'static str,
    /// The key of the width of the residual stream.
    pub(super) hidden_size: &'static str,
    /// The key of the width of the MLP.
    pub(super) intermediate_size: &'static str,
}

/// Returns the entries of a JSON object, or an empty map if the JSON value is no object.
pub(super) fn into_object_entries(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Sets the dropout rates at the keys `keys` of a config.json to `rate`. Does nothing if `rate` is
/// `None`.
pub(super) fn set_dropout_rates(config: &mut Map<String, Value>, keys: &[&str], rate: Option<f64>) {
    let Some(rate) = rate else { return };
    config.extend(keys.iter().map(|key| (String::from(*key), Value::from(rate))));
}

/// A reader for the keys of a Hugging Face config.json, which checks the types and ranges of the
/// values. Records the keys that were read, so that unknown keys can be rejected.
///
/// A key with value null counts as absent, except for dropout rates.
pub(super) struct HfConfigFields<'a> {
    map: &'a Map<String, Value>,
    read_keys: RefCell<BTreeSet<&'static str>>,
}

/// The largest width, count or vocabulary that a config may declare.
const MAX_SIZE_VALUE: u64 = 1 << 24;

/// Builds the error for a key of config.json with an invalid value, which also describes the
/// `expected` values.
pub(super) fn invalid_value_error(
    key: impl Into<String>,
    value: &Value,
    expected: impl Into<String>,
) -> ModelError {
    ModelError::ValueInvalid {
        key: key.into(),
        value: format_shortened_value(value),
        expected: expected.into(),
    }
}

impl<'a> HfConfigFields<'a> {
    /// Creates a reader for the config.json with the keys and values `map`, in which at first no
    /// key is marked as read.
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        HfConfigFields { map, read_keys: RefCell::default() }
    }

    /// Returns whether the config.json contains `key`, even if its value is null.
    pub(super) fn contains_key(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Returns the value of the key `key` of config.json, or `None` if the key is absent or null.
    /// Records the key as read.
    pub(super) fn read_value(&self, key: &'static str) -> Option<&'a Value> {
        self.read_keys.borrow_mut().insert(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Reads the integer at the key `key` of config.json, which is required. Fails if the key is
    /// absent, or the value is not from 1 to [`MAX_SIZE_VALUE`].
    pub(super) fn read_size(&self, key: &'static str) -> Result<u32> {
        self.read_optional_size(key)?.ok_or_else(|| ModelError::KeyMissing { key: key.into() })
    }

    /// Reads the integer at the key `key` of config.json, or returns `None` if the key is absent.
    /// Fails if the value is not from 1 to [`MAX_SIZE_VALUE`].
    pub(super) fn read_optional_size(&self, key: &'static str) -> Result<Option<u32>> {
        let Some(v) = self.read_value(key) else { return Ok(None) };
        match v.as_u64().filter(|n| (1..=MAX_SIZE_VALUE).contains(n)).and_then(|n| u32::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(invalid_value_error(key, v, format!("an integer from 1 to {MAX_SIZE_VALUE}"))),
        }
    }

    /// Reads the number at the key `key` of config.json, or returns `None` if the key is absent.
    /// Fails if the number is not finite in f32.
    pub(super) fn read_optional_number(&self, key: &'static str) -> Result<Option<f64>> {
        let Some(v) = self.read_value(key) else { return Ok(None) };
        match v.as_f64().filter(|x| (*x as f32).is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(invalid_value_error(key, v, "a number")),
        }
    }

    /// Reads the positive number at the key `key` of config.json, or returns `default` if the key
    /// is absent. Fails if the number is not positive in f32.
    pub(super) fn read_positive_number(&self, key: &'static str, default: f64) -> Result<f64> {
        let x = self.read_optional_number(key)?.unwrap_or(default);
        if x as f32 > 0.0 { Ok(x) } else { Err(invalid_value_error(key, &x.into(), "a number above 0")) }
    }

    /// Reads the boolean at the key `key` of config.json, or returns false if the key is absent.
    pub(super) fn read_flag(&self, key: &'static str) -> Result<bool> {
        self.read_flag_or(key, false)
    }

    /// Reads the boolean at the key `key` of config.json, or returns `default` if the key is
    /// absent.
    pub(super) fn read_flag_or(&self, key: &'static str, default: bool) -> Result<bool> {
        match self.read_value(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(invalid_value_error(key, v, "true or false")),
        }
    }

    /// Reads the number of layers at the key `key` of config.json, which is required. Fails if the
    /// number is above [`MAX_LAYERS`].
    pub(super) fn read_layer_count(&self, key: &'static str) -> Result<usize> {
        let layers = self.read_size(key)?;
        if layers as usize > MAX_LAYERS {
            return Err(invalid_value_error(key, &layers.into(), format!("at most {MAX_LAYERS}")));
        }
        Ok(layers as usize)
    }

    /// Reads the dropout rate (from 0 to below 1) at the key `key` of config.json, or returns
    /// `default` if the key is absent. Fails if the value is null.
    pub(super) fn read_dropout_rate(&self, key: &'static str, default: f64) -> Result<f64> {
        self.read_keys.borrow_mut().insert(key);
        let Some(v) = self.map.get(key) else { return Ok(default) };
        let rate = v.as_f64().filter(|rate| (0.0..1.0).contains(rate));
        rate.ok_or_else(|| ModelError::DropoutRateInvalid { key, value: format_shortened_value(v) })
    }

    /// Fails if the value of the key `key` of config.json is not one of the values in `supported`.
    /// Accepts an absent key.
    pub(super) fn require_one_of(&self, key: &'static str, supported: &[Value]) -> Result<()> {
        let equal = |v: &Value, s: &Value| v == s || (v.is_number() && v.as_f64() == s.as_f64());
        match self.read_value(key).filter(|v| !supported.iter().any(|s| equal(v, s))) {
            None => Ok(()),
            Some(v) => Err(ModelError::ValueUnsupported {
                key: key.into(),
                value: format_shortened_value(v),
                supported: supported.iter().filter(|s| !s.is_null()).map(Value::to_string).collect(),
            }),
        }
    }

    /// Fails if config.json has a key that was not read, except [`IGNORED_KEYS`] and keys with
    /// value null.
    pub(super) fn reject_unknown_keys(&self) -> Result<()> {
        const MAX_LISTED_KEYS: usize = 8;
        let read_keys = self.read_keys.borrow();
        let is_known = |key: &str| read_keys.contains(key) || IGNORED_KEYS.contains(&key);
        let unknown = self.map.iter().filter(|(key, v)| !v.is_null() && !is_known(key));
        let entries: Vec<(String, String)> = unknown
            .take(MAX_LISTED_KEYS)
            .map(|(key, v)| (shorten_text(key), format_shortened_value(v)))
            .collect();
        if entries.is_empty() { Ok(()) } else { Err(ModelError::KeysUnknown { entries }) }
    }
}

/// Formats a value of a config.json as JSON, shortened for error messages.
pub(super) fn format_shortened_value(value: &Value) -> String {
    let text = value.to_string();
    match text.chars().count() > MAX_SHOWN_CHARACTERS {
        true => text.chars().take(MAX_SHOWN_CHARACTERS).chain("…".chars()).collect(),
        false => text,
    }
}

/// Shortens a key or value of an untrusted config.json to a length that fits into an error message.
pub(super) fn shorten_text(text: &str) -> String {
    text.chars().take(MAX_SHOWN_CHARACTERS).collect()
}

/// Largest number of characters of a key or value of an untrusted file that a message shows.
const MAX_SHOWN_CHARACTERS: usize = 60;
