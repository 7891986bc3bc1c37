//! Models: architectures, model families, and the interface [`Model`] between them and the training
//! loop. A model describes its parameter units, and computes one block at a time from the
//! parameters that are passed to it.
//!
//! A model holds no parameters and does not depend on sharding. The caller passes the parameters of
//! a whole unit as one flat vector, and the model writes gradients of whole units. The units are
//! the embedding, the layers, and the head, in this order.
mod activation_buffers;
mod architecture;
mod blocks;
mod decoder;
mod dropout_module;
mod error;
mod families;
mod family;
mod gpt2;
mod hf_config;
mod linear_layers;
mod linear_layout;
mod linear_precision;
pub mod lora;
mod micro_batch;
mod model_builder;
mod model_interface;
pub mod moe;
mod rotary_embedding;
mod training_setup;

pub use activation_buffers::{ActivationBuffers, BufferSpec};
pub use architecture::{Architecture, ModelSizes, TiedWeight};
pub use blocks::{Blocks, HeadGrads, HeadParams, LayerInput};
pub use error::{ModelError, Result};
pub use families::MODEL_FAMILIES;
pub use family::ModelFamily;
pub use micro_batch::MicroBatch;
pub use model_builder::{
    ModelConfigSummary, build_model, build_model_with_router_losses, read_model_config_summary,
};
pub use model_interface::Model;
pub use training_setup::TrainingSetup;
