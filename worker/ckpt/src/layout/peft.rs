//! Reads and writes LoRA adapters in PEFT's format: `adapter_config.json` and
//! `adapter_model.safetensors`.
//!
//! In a checkpoint, the adapter of the matrix `X.weight` consists of the tensors `X.lora_A.weight`
//! `[rank, in]` and `X.lora_B.weight` `[out, rank]`. In PEFT's files, the names of these tensors
//! begin with [`PEFT_NAME_PREFIX`]. An unknown setting that could change the arithmetic is rejected
//! with an error that names it.
use super::hf::weights;
use crate::catalog::{ExternalCheckpoint, ExternalCheckpointBuilder};
use crate::codec::disk::Directory;
use crate::error::{AdapterConfigError, CkptError, MissingPart, Result, UnsupportedFeature};
use crate::format_constants::ADAPTER_CONFIG_FILE;
use crate::tensor::TensorRole;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Prefix of the names of all tensors in PEFT's adapter files.
pub const PEFT_NAME_PREFIX: &str = "base_model.model.";
/// Beginning of the names of the files with an adapter's weights.
pub(crate) const ADAPTER_MODEL_STEM: &str = "adapter_model";
/// End of the name of a LoRA matrix A.
const LORA_A_SUFFIX: &str = ".lora_A.weight";
/// End of the name of a LoRA matrix B.
const LORA_B_SUFFIX: &str = ".lora_B.weight";
/// Maximum size in bytes of an `adapter_config.json`.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// Maximum accepted rank of a LoRA adapter.
const LORA_RANK_MAX: u64 = 1 << 16;

/// Returns true if `name` is the name of a LoRA matrix A or B.
pub fn is_lora_matrix(name: &str) -> bool {
    name.ends_with(LORA_A_SUFFIX) || name.ends_with(LORA_B_SUFFIX)
}

/// Returns the names of the LoRA matrices A and B for the weight `weight`. Returns `None` if its
/// name does not end in `.weight`.
pub(crate) fn lora_matrix_names(weight: &str) -> Option<[String; 2]> {
    let module = weight.strip_suffix(".weight")?;
    Some([format!("{module}{LORA_A_SUFFIX}"), format!("{module}{LORA_B_SUFFIX}")])
}

/// Returns the name of the weight that the LoRA matrix `adapter` adapts. Returns `None` if
/// `adapter` is not the name of a LoRA matrix.
pub(crate) fn adapted_weight_name(adapter: &str) -> Option<String> {
    let module = adapter.strip_suffix(LORA_A_SUFFIX).or_else(|| adapter.strip_suffix(LORA_B_SUFFIX))?;
    Some(format!("{module}.weight"))
}

/// The settings in PEFT's `adapter_config.json` that influence the computation or that an export
/// needs.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// Rank of the LoRA matrices.
    pub rank: u32,
    /// Numerator of the factor by which the output of an adapter is multiplied (see
    /// [`AdapterConfig::output_scale`]).
    pub alpha: f64,
    /// Whether the factor is `alpha / √rank` (rsLoRA) instead of `alpha / rank`.
    pub use_rslora: bool,
    /// Dropout probability of the inputs of an adapter in training.
    pub dropout: f64,
    /// Modules that have adapters (`target_modules`), given by the whole name of the module or the
    /// end of the name after a dot.
    pub targets: Vec<String>,
    /// Whether the model stores its matrices as `[in, out]` instead of `[out, in]`.
    pub fan_in_fan_out: bool,
}

/// Keys of `adapter_config.json` that do not influence the computation, and whose values are
/// ignored.
const IRRELEVANT_SETTINGS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];
/// The keys of `adapter_config.json` that launch reads, because they influence the computation or
/// must be in an exported adapter.
const KNOWN_SETTINGS: &[&str] = &[
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
    /// Reads and parses the file `adapter_config.json` in the directory `directory`.
    ///
    /// # Errors
    /// Fails with [`CkptError::Damaged`] if the file is not a JSON object. Fails with
    /// [`CkptError::Unsupported`] if a setting is invalid or not supported.
    pub fn read(directory: &Path) -> Result<AdapterConfig> {
        let text = Directory::open(directory)?.read_file(ADAPTER_CONFIG_FILE, CONFIG_BYTES_MAX)?;
        AdapterConfig::from_json(&text).map_err(|error| match error {
            AdapterConfigError::Json(_) => CkptError::damaged(directory, ADAPTER_CONFIG_FILE, error),
            error => CkptError::unsupported(directory, error),
        })
    }

    /// Parses the text of `adapter_config.json`.
    ///
    /// # Errors
    /// Fails if the text is not a JSON object, or a setting is invalid or not supported.
    pub fn from_json(text: &[u8]) -> std::result::Result<AdapterConfig, AdapterConfigError> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(map)) => AdapterConfig::parse_object(&map),
            Ok(_) => Err(AdapterConfigError::Json("not an object".into())),
            Err(error) => Err(AdapterConfigError::Json(error.to_string())),
        }
    }

    /// Parses the JSON object in `adapter_config.json`.
    ///
    /// # Errors
    /// Fails if a setting has an invalid or unsupported value. Also fails if an unknown setting has
    /// a value other than null, false or empty.
    pub fn parse_object(map: &Map<String, Value>) -> std::result::Result<AdapterConfig, AdapterConfigError> {
        let get = |key: &str| map.get(key).filter(|v| !v.is_null());
        for (key, allowed) in [
            ("peft_type", vec![json!("LORA")]),
            ("task_type", vec![json!("CAUSAL_LM")]),
            ("bias", vec![json!("none")]),
            // methods that initialize only the adapters; other methods change the model's matrices
            ("init_lora_weights", vec![json!(true), json!(false), json!("gaussian")]),
        ] {
            if let Some(v) = get(key).filter(|v| !allowed.contains(v)) {
                return Err(AdapterConfigError::unsupported(key, v));
            }
        }
        let flag = |key: &str| match get(key) {
            None => Ok(false),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(AdapterConfigError::invalid(key, v, "true or false")),
        };
        let number = |key: &str, default: f64, expected: &'static str, fits: fn(f64) -> bool| match get(key) {
            None => Ok(default),
            Some(v) => v
                .as_f64()
                .filter(|x| (*x as f32).is_finite() && fits(*x))
                .ok_or_else(|| AdapterConfigError::invalid(key, v, expected)),
        };
        let rank = get("r").map_or(Some(8), Value::as_u64).filter(|r| (1..=LORA_RANK_MAX).contains(r));
        let rank = rank.ok_or_else(|| {
            let found = get("r").unwrap_or(&Value::Null);
            AdapterConfigError::invalid("r", found, "a whole number from 1 to 65536")
        })?;
        let config = AdapterConfig {
            rank: rank as u32,
            alpha: number("lora_alpha", 8.0, "a positive number", |x| x as f32 > 0.0)?,
            use_rslora: flag("use_rslora")?,
            dropout: number("lora_dropout", 0.0, "a number from 0 to 1", |x| (0.0..1.0).contains(&x))?,
            targets: parse_target_modules(get("target_modules"))?,
            fan_in_fan_out: flag("fan_in_fan_out")?,
        };
        let off = |v: &Value| match v {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            _ => false,
        };
        let known = |key: &str| KNOWN_SETTINGS.contains(&key) || IRRELEVANT_SETTINGS.contains(&key);
        match map.iter().find(|(key, v)| !known(key) && !off(v)) {
            None => Ok(config),
            Some((key, v)) => {
                let key = key.chars().take(60).collect::<String>();
                let key = key.escape_debug();
                Err(AdapterConfigError::unsupported(&key.to_string(), v))
            }
        }
    }

    /// Converts the settings to the JSON content of `adapter_config.json`. `base` is the directory
    /// of the base model, or `None` if it is unknown.
    pub fn to_json(&self, base: Option<&str>) -> Value {
        let whole = self.alpha.fract() == 0.0 && self.alpha < 1e15;
        let alpha = if whole { json!(self.alpha as u64) } else { json!(self.alpha) };
        json!({
            "alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": base, "bias": "none",
            "fan_in_fan_out": self.fan_in_fan_out, "inference_mode": true, "init_lora_weights": true,
            "layers_pattern": null, "layers_to_transform": null, "lora_alpha": alpha, "lora_dropout": self.dropout,
            "modules_to_save": null, "peft_type": "LORA", "r": self.rank, "rank_pattern": {}, "revision": null,
            "target_modules": self.targets, "task_type": "CAUSAL_LM", "use_dora": false, "use_rslora": self.use_rslora,
        })
    }

    /// Returns the factor by which the matmul B · A of a LoRA adapter is multiplied: `alpha /
    /// rank`, or `alpha / √rank` for rsLoRA.
    pub fn output_scale(&self) -> f64 {
        let rank = f64::from(self.rank);
        self.alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

/// Parses the setting `target_modules`, which must be a list of at least one name. Returns the
/// sorted names.
fn parse_target_modules(v: Option<&Value>) -> std::result::Result<Vec<String>, AdapterConfigError> {
    let wrong = |v: &Value| AdapterConfigError::invalid("target_modules", v, "a list of names");
    let v = v.ok_or(AdapterConfigError::NoTargets)?;
    let names = v.as_array().filter(|names| !names.is_empty()).ok_or_else(|| wrong(v))?;
    let text =
        |name: &Value| name.as_str().filter(|n| !n.is_empty()).map(str::to_owned).ok_or_else(|| wrong(v));
    let mut names =
        names.iter().map(text).collect::<std::result::Result<Vec<String>, AdapterConfigError>>()?;
    // PEFT writes a set in arbitrary order
    names.sort_unstable();
    Ok(names)
}

/// Opens the checkpoint of LoRA adapters in PEFT's format in the directory `path`. Removes
/// [`PEFT_NAME_PREFIX`] from the names of the tensors.
///
/// # Errors
/// Fails if the file of adapter weights is missing or damaged, or has tensors other than LoRA
/// matrices.
pub fn open_peft_adapters(path: &Path) -> Result<ExternalCheckpoint> {
    let mut builder = ExternalCheckpointBuilder::new(path)?;
    let files = [format!("{ADAPTER_MODEL_STEM}.safetensors"), format!("{ADAPTER_MODEL_STEM}.bin")];
    let mut found = None;
    for file in &files {
        if found.is_none() && builder.directory.file_size(file)?.is_some() {
            found = Some(file);
        }
    }
    let Some(file) = found else {
        return Err(CkptError::missing(path, MissingPart::AnyFileOf(files.to_vec())));
    };
    weights::add_weights_file(&mut builder, file)?;
    for entry in &mut builder.entries {
        let info = &mut entry.info;
        match info
            .name
            .strip_prefix(PEFT_NAME_PREFIX)
            .filter(|name| info.role == TensorRole::Weight && is_lora_matrix(name))
        {
            Some(name) => info.name = name.to_owned(),
            None => {
                let (file, tensor) = (file.clone(), info.name.clone());
                return Err(CkptError::unsupported(
                    path,
                    UnsupportedFeature::NotAnAdapterTensor { file, tensor },
                ));
            }
        }
    }
    builder.facts.kind = "PEFT adapter";
    builder.facts.writer = "PEFT".into();
    builder.finish()
}
