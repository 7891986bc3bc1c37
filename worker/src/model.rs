//! Models: the decoder-only transformer [`Model`], and the model families, which select its
//! options. A model describes its parameter units, and computes one block at a time from the
//! parameters that are passed to it.
//!
//! A model holds no parameters and does not depend on sharding. The caller passes the parameters of
//! a whole unit as one flat vector, and the model writes gradients of whole units. The units are
//! the embedding, the layers, and the head, in this order.
mod activation_buffers;
mod block_arguments;
mod decoder;
mod dropout_module;
mod error;
mod families;
mod family;
mod hf_config;
mod linear_layers;
mod linear_layout;
mod linear_precision;
pub mod lora;
mod micro_batch;
mod model_builder;
mod model_sizes;
pub mod moe;
mod rotary_embedding;

pub use activation_buffers::{ActivationBuffers, BufferSpec};
pub use block_arguments::{HeadGrads, HeadInput, LayerBuffers, LayerInput};
pub use decoder::{Model, MoeModel};
pub use error::{ModelError, Result};
pub use families::MODEL_FAMILIES;
pub use family::ModelFamily;
pub use micro_batch::MicroBatch;
pub(crate) use model_builder::build_model_from_text;
pub use model_builder::{
    ModelConfigSummary, build_model, build_model_with_router_losses, read_model_config_summary,
};
pub use model_sizes::{ModelSizes, TiedWeight};
