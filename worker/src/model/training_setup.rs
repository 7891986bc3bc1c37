//! [`TrainingSetup`]: what a job selects of a model before training: precision, adapters, dropout,
//! trained parameters, router losses.
use super::{error::Result, lora::LoraConfig};
use crate::params::ParamUnit;
use jobspec::ExpertsSpec;

/// The options of a model that a job selects before training.
pub trait TrainingSetup {
    /// Adds LoRA adapters to matrices of the layers. The parameters of the adapters become part of
    /// [`crate::model::Architecture::param_units`].
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::LoraTargetUnknown`] if a target matches no matrix.
    fn add_lora_adapters(&mut self, lora: &LoraConfig) -> Result<()>;
    /// Switches the matmuls of the layers to FP8.
    ///
    /// # Errors
    ///
    /// Fails with [`crate::model::ModelError::Fp8MoeUnsupported`] for a model with experts, or with
    /// [`crate::model::ModelError::Fp8SizeUnsupported`] for a dimension of an unsupported size.
    fn enable_fp8(&mut self) -> Result<()>;
    /// Sets the run's seed, which selects the dropout masks. The seed of a new model is 0.
    fn set_dropout_seed(&mut self, seed: u64);
    /// Restricts the backward pass to the gradients of trained parameters. `units` are those of
    /// [`crate::model::Architecture::param_units`] with the trained parameters marked. Gradients of
    /// other parameters have unspecified values.
    fn set_trained_params(&mut self, units: &[ParamUnit]);
    /// Sets the coefficients of the router losses that `train.experts` specifies. Has no effect on
    /// a dense model.
    fn set_router_losses(&mut self, _spec: &ExpertsSpec) {}
}
