//! The architecture of GPT-2: learned positions, LayerNorm, GELU, and matrices stored as
//! `[in, out]` (`Conv1D` of transformers).
mod gpt2_blocks;
mod gpt2_buffers;
mod gpt2_config;
mod gpt2_layer;
mod gpt2_layer_layout;
mod gpt2_model;

use super::{error::Result, hf_config::HfConfigFields, model_interface::Model};
pub(super) use gpt2_config::DROPOUT_KEYS;
use gpt2_config::Gpt2Config;
use gpt2_model::Gpt2Model;
use serde_json::{Map, Value};

/// Builds a GPT-2 model from its config.json.
pub(super) fn build_gpt2_model(hf_config: &Map<String, Value>) -> Result<Box<dyn Model>> {
    let fields = HfConfigFields::new(hf_config);
    let config = Gpt2Config::from_fields(&fields)?;
    fields.reject_unknown_keys()?;
    Ok(Box::new(Gpt2Model::new(config, hf_config)))
}
