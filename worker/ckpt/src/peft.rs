//! Folders of low-rank adapters as PEFT has them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! In a checkpoint an adapter of the matrix `X.weight` is the two tensors `X.lora_A.weight` `[rank, in]` and
//! `X.lora_B.weight` `[out, rank]`; in PEFT's files their names begin with [`PREFIX`]. What a configuration says beside the
//! numbers that are known here is refused by name wherever it changes the arithmetic.
use crate::catalog::Role;
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use crate::external::{Foreign, draft::Draft};
use crate::formats::weights;
use serde_json::{Map, Value, json};
use std::path::Path;

/// What the names in PEFT's files begin with.
pub const PREFIX: &str = "base_model.model.";
/// The configuration.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The weights, without their ending.
pub(crate) const STEM: &str = "adapter_model";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";
/// Longest configuration, bytes.
const CONFIG_MAX: u64 = 1 << 20;
/// Largest rank.
const RANK_MAX: u64 = 1 << 16;

/// Is this the name of an adapter's tensor?
pub fn is_adapter(name: &str) -> bool {
    name.ends_with(A) || name.ends_with(B)
}

/// The names of both tensors of the adapter of a matrix, `….weight`.
pub(crate) fn adapter_of(weight: &str) -> Option<[String; 2]> {
    let module = weight.strip_suffix(".weight")?;
    Some([format!("{module}{A}"), format!("{module}{B}")])
}

/// The matrix that an adapter's tensor belongs to.
pub(crate) fn matrix_of(adapter: &str) -> Option<String> {
    let module = adapter.strip_suffix(A).or_else(|| adapter.strip_suffix(B))?;
    Some(format!("{module}.weight"))
}

/// The numbers of a folder's adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    pub rank: u32,
    /// What adapters give is multiplied by `alpha / rank`,
    pub alpha: f64,
    /// or by `alpha / √rank`.
    pub rslora: bool,
    /// Share of an adapter's inputs that is dropped in training.
    pub dropout: f64,
    /// Names of modules, or what follows a dot in them.
    pub targets: Vec<String>,
    /// The model keeps its matrices as `[in, out]`.
    pub fan_in_fan_out: bool,
}

/// What has no part in the arithmetic.
const IRRELEVANT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];
const KNOWN: &[&str] = &[
    "bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "r",
    "target_modules",
    "task_type",
    "use_rslora",
];

impl AdapterConfig {
    /// Reads `adapter_config.json` of a folder.
    pub fn read(folder: &Path) -> Result<AdapterConfig> {
        let text = Folder::open(folder)?.read(ADAPTER_CONFIG, CONFIG_MAX)?;
        let wrong = |why: String| CkptError::damaged(folder, ADAPTER_CONFIG, why);
        let map = object(&text).map_err(wrong)?;
        AdapterConfig::parse(&map).map_err(|what| CkptError::Unsupported {
            path: folder.to_owned(),
            what: format!("{ADAPTER_CONFIG}: {what}"),
        })
    }

    /// The same from its content. `Err` says what is wrong or not supported.
    pub fn parse(map: &Map<String, Value>) -> std::result::Result<AdapterConfig, String> {
        let get = |key: &str| map.get(key).filter(|v| !v.is_null());
        for (key, allowed) in [
            ("peft_type", vec![json!("LORA")]),
            ("task_type", vec![json!("CAUSAL_LM")]),
            ("bias", vec![json!("none")]),
            // how new ones begin; the others change the model's own matrices
            ("init_lora_weights", vec![json!(true), json!(false), json!("gaussian")]),
        ] {
            if let Some(v) = get(key).filter(|v| !allowed.contains(v)) {
                return Err(format!("`{key}: {}` is not supported", shown(v)));
            }
        }
        let flag = |key: &str| match get(key) {
            None => Ok(false),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(format!("`{key}` is {}, not true or false", shown(v))),
        };
        let number = |key: &str, default: f64, fits: fn(f64) -> bool| match get(key) {
            None => Ok(default),
            Some(v) => v
                .as_f64()
                .filter(|x| (*x as f32).is_finite() && fits(*x))
                .ok_or_else(|| format!("`{key}` is {}, which it can't be", shown(v))),
        };
        let rank = get("r").map_or(Some(8), Value::as_u64).filter(|r| (1..=RANK_MAX).contains(r));
        let rank = rank.ok_or_else(|| {
            format!("`r` is {}, not a number from 1 to {RANK_MAX}", get("r").map_or("absent".into(), shown))
        })?;
        let config = AdapterConfig {
            rank: rank as u32,
            alpha: number("lora_alpha", 8.0, |x| x as f32 > 0.0)?,
            rslora: flag("use_rslora")?,
            dropout: number("lora_dropout", 0.0, |x| (0.0..1.0).contains(&x))?,
            targets: targets(get("target_modules"))?,
            fan_in_fan_out: flag("fan_in_fan_out")?,
        };
        let off = |v: &Value| match v {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            _ => false,
        };
        let known = |key: &str| KNOWN.contains(&key) || IRRELEVANT.contains(&key);
        match map.iter().find(|(key, v)| !known(key) && !off(v)) {
            None => Ok(config),
            Some((key, v)) => {
                let key = key.chars().take(60).collect::<String>();
                let key = key.escape_debug();
                Err(format!("`{key}: {}` is not supported", shown(v)))
            }
        }
    }

    /// The content of `adapter_config.json`; `base`: the folder of the model that the adapters are for.
    pub fn json(&self, base: Option<&str>) -> Value {
        let whole = self.alpha.fract() == 0.0 && self.alpha < 1e15;
        let alpha = if whole { json!(self.alpha as u64) } else { json!(self.alpha) };
        json!({
            "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": base, "bias": "none",
            "fan_in_fan_out": self.fan_in_fan_out, "inference_mode": true, "init_lora_weights": true,
            "layers_pattern": null, "layers_to_transform": null, "lora_alpha": alpha, "lora_dropout": self.dropout,
            "modules_to_save": null, "peft_type": "LORA", "r": self.rank, "rank_pattern": {}, "revision": null,
            "target_modules": self.targets, "task_type": "CAUSAL_LM", "use_dora": false, "use_rslora": self.rslora,
        })
    }

    /// Factor of what adapters give.
    pub fn scale(&self) -> f64 {
        let rank = f64::from(self.rank);
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

/// A JSON object.
pub(crate) fn object(text: &[u8]) -> std::result::Result<Map<String, Value>, String> {
    match serde_json::from_slice(text).map_err(|e| e.to_string())? {
        Value::Object(map) => Ok(map),
        _ => Err("it is no JSON object".into()),
    }
}

fn targets(v: Option<&Value>) -> std::result::Result<Vec<String>, String> {
    let wrong =
        |v: &Value| format!("`target_modules: {}` is not supported: it must be a list of names", shown(v));
    let v = v.ok_or("it has no `target_modules`")?;
    let names = v.as_array().filter(|names| !names.is_empty()).ok_or_else(|| wrong(v))?;
    let text =
        |name: &Value| name.as_str().filter(|n| !n.is_empty()).map(str::to_owned).ok_or_else(|| wrong(v));
    let mut names = names.iter().map(text).collect::<std::result::Result<Vec<String>, String>>()?;
    // the file has them in no order
    names.sort();
    Ok(names)
}

/// A value, short enough for a message.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.chars().count() > 60 {
        true => text.chars().take(60).chain("…".chars()).collect(),
        false => text,
    }
}

/// The adapters of a folder, by their names in a checkpoint.
pub fn open_adapters(path: &Path) -> Result<Foreign> {
    let mut draft = Draft::new(path)?;
    let files = [format!("{STEM}.safetensors"), format!("{STEM}.bin")];
    let mut found = None;
    for file in &files {
        if found.is_none() && draft.folder.size_of(file)?.is_some() {
            found = Some(file);
        }
    }
    let Some(file) = found else {
        return Err(CkptError::Missing { path: path.to_owned(), what: files.join(" or ") });
    };
    weights::add_file(&mut draft, file)?;
    for entry in &mut draft.entries {
        let info = &mut entry.info;
        match info.name.strip_prefix(PREFIX).filter(|name| info.role == Role::Weight && is_adapter(name)) {
            Some(name) => info.name = name.to_owned(),
            None => {
                let what = format!("{file}: {}, which is no adapter's matrix,", info.name);
                return Err(CkptError::Unsupported { path: path.to_owned(), what });
            }
        }
    }
    draft.facts.kind = "PEFT adapter";
    draft.facts.writer = "PEFT".into();
    draft.finish()
}
