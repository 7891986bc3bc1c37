//! The decoder-only transformer of all families except GPT-2, with RMSNorm, rotary embedding,
//! grouped-query attention, and SwiGLU, GeGLU or experts.
//!
//! [`DecoderConfig`] has the options in which families differ.
mod attention;
mod decoder_blocks;
mod decoder_buffers;
mod decoder_config;
mod decoder_model;
mod decoder_moe_config;
mod layer_layout;
mod mlp;
mod moe_block;
mod norms;

use super::{error::Result, hf_config::HfConfigFields, model_interface::Model};
pub(super) use decoder_config::{
    DECODER_KEY_NAMES, DecoderConfig, LayerNorms, QkNorm, list_decoder_config_keys,
};
use decoder_model::DecoderModel;
pub(super) use decoder_moe_config::{DecoderMoeConfig, ExpertTensorNames};
use serde_json::{Map, Value};

/// Builds a decoder for sequences of at most `tokens` tokens. `read_config` reads the fields of
/// `hf_config`, the config.json. Rejects the fields that it does not read.
pub(super) fn build_decoder(
    hf_config: &Map<String, Value>,
    tokens: usize,
    read_config: impl FnOnce(&HfConfigFields) -> Result<DecoderConfig>,
) -> Result<Box<dyn Model>> {
    let fields = HfConfigFields::new(hf_config);
    let config = read_config(&fields)?;
    fields.reject_unknown_keys()?;
    Ok(Box::new(DecoderModel::new(config, hf_config, tokens)))
}
