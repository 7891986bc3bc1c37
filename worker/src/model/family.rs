//! [`ModelFamily`]: the names of a model family, and the functions that build its models.
use super::{error::Result, model_interface::Model};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// A function that builds a model from its config.json, for sequences of at most the given number
/// of tokens.
type ModelBuilderFn = fn(&Map<String, Value>, usize) -> Result<Box<dyn Model>>;

/// A model family that can be trained: its names, and the functions that build its models.
pub struct ModelFamily {
    /// The name of the family in job.yaml, equal to `model_type` of config.json.
    pub name: &'static str,
    /// The class of transformers that `architectures` of config.json names.
    pub architecture: &'static str,
    /// Builds a model. Rejects configs with unsupported keys or values.
    pub(super) build: ModelBuilderFn,
    /// Returns the config.json of a model that job.yaml describes, without the names of the family.
    pub(super) list_config_keys: fn(&ModelSpec) -> Map<String, Value>,
    /// The config keys that have other names in other families.
    pub(super) key_names: ConfigKeyNames,
}

/// The names of config keys that differ between model families.
#[derive(Clone, Copy)]
pub(super) struct ConfigKeyNames {
    /// The keys of dropout rates.
    pub(super) dropout_rates: &'static [&'static str],
    /// The key of the largest number of tokens of a sequence.
    pub(super) max_positions: &'static str,
}

impl ModelFamily {
    /// Builds the config.json of a model that job.yaml describes.
    pub(super) fn build_hf_config(&self, spec: &ModelSpec) -> Map<String, Value> {
        let mut config = (self.list_config_keys)(spec);
        config.insert("architectures".into(), json!([self.architecture]));
        config.insert("model_type".into(), self.name.into());
        config
    }
}
