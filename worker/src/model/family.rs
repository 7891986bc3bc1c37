//! [`ModelFamily`]: the names of a model family in job.yaml and config.json, and the functions that
//! read and create the family's config.json.
use super::{
    decoder::{DecoderConfig, Model},
    error::Result,
    hf_config::{ConfigKeyNames, HfConfigFields},
};
use jobspec::ModelSpec;
use serde_json::{Map, Value, json};

/// A model family that can be trained: its names in job.yaml and config.json, and the functions
/// that read and create the family's config.json.
pub struct ModelFamily {
    /// The name of the family in job.yaml, equal to `model_type` of config.json.
    pub name: &'static str,
    /// The class of transformers that `architectures` of config.json names.
    pub architecture: &'static str,
    /// Reads the sizes and options of a model from its config.json. Rejects unsupported values.
    pub(super) read_config: fn(&HfConfigFields) -> Result<DecoderConfig>,
    /// Returns the config.json of a model that job.yaml describes, without the names of the family.
    pub(super) list_config_keys: fn(&ModelSpec) -> Map<String, Value>,
    /// The names that this family uses for those config keys whose names differ between families.
    pub(super) key_names: ConfigKeyNames,
}

impl ModelFamily {
    /// Builds a model of this family from its config.json, for sequences of at most `tokens`
    /// tokens. Rejects configs with unsupported keys or values.
    pub(super) fn build_model(&self, hf_config: &Map<String, Value>, tokens: usize) -> Result<Model> {
        let fields = HfConfigFields::new(hf_config);
        let config = (self.read_config)(&fields)?;
        fields.reject_unknown_keys()?;
        config.check_total_size()?;
        Ok(Model::new(config, self.key_names, hf_config, tokens))
    }

    /// Builds the config.json of a model of this family, with the sizes that job.yaml specifies.
    pub(super) fn build_hf_config(&self, spec: &ModelSpec) -> Map<String, Value> {
        let mut config = (self.list_config_keys)(spec);
        config.insert("architectures".into(), json!([self.architecture]));
        config.insert("model_type".into(), self.name.into());
        config
    }
}
