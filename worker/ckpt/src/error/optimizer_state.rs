//! [`OptimizerStateError`]: why the `state_dict` of an optimizer is rejected.
use super::torch_file::TorchFileError;
use crate::tensor::TensorRole;

/// Why the `state_dict` of an optimizer is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerStateError {
    /// `state` is missing or not a dict.
    #[error("no dict of states")]
    NoStates,
    /// `param_groups` is missing or not a list.
    #[error("no list of param_groups")]
    NoParamGroups,
    /// A parameter is neither a number nor a name.
    #[error("a parameter is neither a number nor a name")]
    InvalidParamId,
    /// `state` has two entries for one parameter.
    #[error("{0} has two states")]
    DuplicateState(String),
    /// A parameter group is not a dict, has no list of parameters, or has too many
    /// hyper-parameters.
    #[error("a parameter group is not a dict with params, or is too large")]
    InvalidGroup,
    /// A parameter is in two parameter groups.
    #[error("{0} is in two parameter groups")]
    InTwoGroups(String),
    /// A parameter with a state is in no parameter group.
    #[error("{0} has a state but is in no parameter group")]
    InNoGroup(String),
    /// The state of a parameter is not a dict with string keys.
    #[error("the state of a parameter is not a dict with string keys")]
    InvalidState,
    /// A tensor of a state is invalid.
    #[error("{key}: {error}")]
    Tensor {
        /// Key of the state, such as `exp_avg`.
        key: String,
        /// Why the tensor is rejected.
        error: TorchFileError,
    },
    /// An optimizer state has a different number of elements than its weight.
    #[error("{role} of {weight} has the shape {shape:?}, expected {expected} elements")]
    Elements {
        /// Role of the state.
        role: TensorRole,
        /// Name of the weight.
        weight: String,
        /// Shape of the state.
        shape: Vec<u64>,
        /// Number of elements of the weight.
        expected: u64,
    },
    /// The step of a weight is not a whole number.
    #[error("{weight}: {error}")]
    Step {
        /// Name of the weight.
        weight: String,
        /// The invalid step.
        error: InvalidStep,
    },
}

/// The error that a checkpoint contains a number of optimizer steps with a fractional part, such as
/// 2.5.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("the optimizer step is {0}, which is not a whole number")]
pub struct InvalidStep(pub f64);
