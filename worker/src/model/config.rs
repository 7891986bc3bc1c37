//! A Hugging Face `config.json`, read field by field: what isn't understood is refused by name, never approximated.
use super::rotary::Rope;
use serde_json::{Map, Value};
use std::{cell::RefCell, collections::BTreeSet, path::Path};

/// Longest config.json, bytes.
const CONFIG_MAX: u64 = 1 << 20;
/// What has no part in the arithmetic: names, tokens of text generation, where weights came from, how outputs are packed.
const IRRELEVANT: &[&str] = &[
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

/// Reads `config.json` of a folder.
pub(super) fn read(folder: &Path) -> Result<Map<String, Value>, String> {
    use std::io::Read;
    let path = folder.join("config.json");
    let failed = |why: String| format!("{} can't be used: {why}", path.display());
    let file = std::fs::File::open(&path).map_err(|e| failed(e.to_string()))?;
    let mut text = Vec::new();
    file.take(CONFIG_MAX + 1).read_to_end(&mut text).map_err(|e| failed(e.to_string()))?;
    if text.len() as u64 > CONFIG_MAX {
        return Err(failed(format!("it is longer than {CONFIG_MAX} bytes")));
    }
    match serde_json::from_slice(&text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(failed("it is no JSON object".into())),
        Err(e) => Err(failed(format!("it is no JSON: {e}"))),
    }
}

/// More layers than this are no model.
const LAYERS_MAX: usize = 1 << 14;

/// Sets every rate of dropout of these names to the one that the job gives, if it gives one.
pub(super) fn set_dropout(config: &mut Map<String, Value>, names: &[&str], rate: Option<f64>) {
    let Some(rate) = rate else { return };
    config.extend(names.iter().map(|name| (String::from(*name), Value::from(rate))));
}

/// The fields of a configuration; remembers which were asked for.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    asked: RefCell<BTreeSet<&'static str>>,
}

/// Largest size of any kind that a configuration may name.
const SIZE_MAX: u64 = 1 << 24;

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Fields { map, asked: RefCell::default() }
    }

    /// The value of `key`; `None` when it is absent or null.
    pub(super) fn get(&self, key: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// A number of things, at least 1.
    pub(super) fn size(&self, key: &'static str) -> Result<u32, String> {
        self.opt_size(key)?.ok_or_else(|| format!("config.json has no `{key}`"))
    }

    /// As [`Fields::size`], where the key may be absent.
    pub(super) fn opt_size(&self, key: &'static str) -> Result<Option<u32>, String> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match v.as_u64().filter(|n| (1..=SIZE_MAX).contains(n)).and_then(|n| u32::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(format!("config.json: `{key}` is {}, not a number from 1 to {SIZE_MAX}", shown(v))),
        }
    }

    /// A number that can be computed with in f32.
    pub(super) fn opt_number(&self, key: &'static str) -> Result<Option<f64>, String> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match v.as_f64().filter(|x| (*x as f32).is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(format!("config.json: `{key}` is {}, not a number", shown(v))),
        }
    }

    /// A number above 0.
    pub(super) fn positive(&self, key: &'static str, default: f64) -> Result<f64, String> {
        let x = self.opt_number(key)?.unwrap_or(default);
        if x as f32 > 0.0 { Ok(x) } else { Err(format!("config.json: `{key}` is {x}, not above 0")) }
    }

    /// `true` or `false`; absent is false.
    pub(super) fn flag(&self, key: &'static str) -> Result<bool, String> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(format!("config.json: `{key}` is {}, not true or false", shown(v))),
        }
    }

    /// As [`Fields::flag`], where absent may be true.
    pub(super) fn flag_or(&self, key: &'static str, absent: bool) -> Result<bool, String> {
        Ok(if self.get(key).is_none() { absent } else { self.flag(key)? })
    }

    /// A number of layers.
    pub(super) fn layers(&self, key: &'static str) -> Result<usize, String> {
        let layers = self.size(key)? as usize;
        match layers > LAYERS_MAX {
            true => Err(format!("{key} {layers} is more than {LAYERS_MAX}")),
            false => Ok(layers),
        }
    }

    /// A rate of dropout; `absent` is the family's own.
    pub(super) fn dropout(&self, key: &'static str, absent: f64) -> Result<f64, String> {
        self.asked.borrow_mut().insert(key);
        let Some(v) = self.map.get(key) else { return Ok(absent) };
        v.as_f64().filter(|rate| (0.0..1.0).contains(rate)).ok_or_else(|| {
            format!(
                "config.json: `{key}` is {}, not a number from 0 to below 1; `train.model.dropout` sets all rates of dropout",
                shown(v)
            )
        })
    }

    /// Refuses any value of `key` but these; absent and null are fine.
    pub(super) fn only(&self, key: &'static str, allowed: &[Value]) -> Result<(), String> {
        let same = |v: &Value, a: &Value| v == a || (v.is_number() && v.as_f64() == a.as_f64());
        match self.get(key).filter(|v| !allowed.iter().any(|a| same(v, a))) {
            None => Ok(()),
            Some(v) => {
                let known: Vec<String> = allowed.iter().map(Value::to_string).collect();
                Err(format!(
                    "config.json: `{key}: {}` is not supported; known: {}",
                    shown(v),
                    known.join(", ")
                ))
            }
        }
    }

    /// Rotary embedding, under the names of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
    pub(super) fn rope(&self) -> Result<Rope, String> {
        let theta = self.positive("rope_theta", 10000.0)?;
        let (old, new) = (self.get("rope_scaling"), self.get("rope_parameters"));
        match (old, new) {
            (Some(a), Some(b)) if a != b => {
                Err("config.json: `rope_scaling` and `rope_parameters` differ; keep the one that is meant"
                    .into())
            }
            (None, None) => Ok(Rope::plain(theta)),
            (_, Some(v)) => Rope::read("rope_parameters", v, theta),
            (Some(v), None) => Rope::read("rope_scaling", v, theta),
        }
    }

    /// Refuses every key that nobody asked for.
    pub(super) fn finish(&self) -> Result<(), String> {
        let asked = self.asked.borrow();
        let unknown: Vec<String> = self
            .map
            .iter()
            .filter(|(k, v)| !v.is_null() && !asked.contains(k.as_str()) && !IRRELEVANT.contains(&k.as_str()))
            .take(8)
            .map(|(k, v)| format!("`{}: {}`", k.chars().take(60).collect::<String>(), shown(v)))
            .collect();
        match unknown.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "config.json has keys that this version doesn't know for this model and that may change its arithmetic: {}",
                unknown.join(", ")
            )),
        }
    }
}

/// A value, short enough for a message.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.chars().count() > 60 {
        true => text.chars().take(60).chain("…".chars()).collect(),
        false => text,
    }
}
