//! [`Model`]: the decoder-only transformer, which implements all model families.
//!
//! [`DecoderConfig`] has the options in which families differ: RMSNorm or LayerNorm, rotary
//! embedding or learned positions, the activation of the MLP, experts, and names of tensors.
mod attention;
mod decoder_blocks;
mod decoder_buffers;
mod decoder_config;
mod decoder_moe_config;
mod layer_layout;
mod mlp;
mod model;
mod moe_layer;
mod norms;
mod row_norm;

pub(super) use decoder_config::{
    Activation, DecoderConfig, DropoutConfig, LLAMA_CONFIG_KEY_NAMES, LearnedPositions, NormKind,
    NormModuleNames, QkNormExtent, TensorNames, build_decoder_config_json,
};
pub(super) use decoder_moe_config::{DecoderMoeConfig, ExpertTensorNames};
pub use model::Model;
pub use moe_layer::MoeModel;
