//! [`Model`]: the interface between the training loop and model architectures.
use super::{architecture::Architecture, blocks::Blocks, moe::MoeModel, training_setup::TrainingSetup};

/// A model architecture with its config.
pub trait Model: Architecture + Blocks + TrainingSetup + Send + Sync {
    /// Returns the mixture-of-experts interface of the model, or `None` for a dense model.
    fn as_moe_model(&self) -> Option<&dyn MoeModel> {
        None
    }
}
