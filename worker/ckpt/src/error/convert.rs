//! [`ConvertError`]: the reason for which a conversion is rejected.
use crate::tensor::TensorRole;
use diagnostic::{Code, codes::checkpoint as codes};

/// Why a conversion is rejected, usually because neither the source checkpoint nor the options
/// contain information that the target format needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The optimizer states in the source checkpoint could not be assigned to weights.
    #[error("{reason}")]
    StatesUnreadable {
        /// The message that states why the optimizer states could not be assigned.
        reason: String,
    },
    /// The source checkpoint has weights and no training state, which the target format requires.
    #[error("the source contains only weights, but the target requires a training state")]
    WeightsOnly,
    /// The source checkpoint is a training state that contains neither its step nor optimizer
    /// states.
    #[error("the training state contains neither its step nor optimizer states")]
    StepAndOptimizerMissing,
    /// The source checkpoint has optimizer states, but does not contain its step.
    #[error("the training state does not contain its step")]
    StepMissing,
    /// The source checkpoint is a training state whose optimizer states are missing.
    #[error("the training state of step {step} has no optimizer states")]
    OptimizerMissing {
        /// The step of the training state.
        step: u64,
    },
    /// The optimizer keeps no states, like SGD without momentum, but the target format requires
    /// states.
    #[error("the source has no optimizer states, which the target requires")]
    OptimizerRequired,
    /// The target format requires the parameter group of each parameter, and the source checkpoint
    /// doesn't assign some parameters to a group.
    #[error("the source has {groups} parameter groups and does not assign {parameters} parameters to them")]
    GroupsUnknown {
        /// Number of parameters without a group.
        parameters: usize,
        /// Number of parameter groups in the source checkpoint.
        groups: usize,
    },
    /// The options assign a group to a parameter that does not exist, or whose group is known from
    /// the source checkpoint.
    #[error("parameter {name} has a group in the source, or does not exist; it cannot be assigned to one")]
    GroupNotAssignable {
        /// Name of the parameter.
        name: String,
    },
    /// The options assign a parameter to a group that doesn't exist.
    #[error("group {group} does not exist; the source has {groups} groups, counted from 0")]
    GroupOutOfRange {
        /// Index of the group in the options, from 0.
        group: usize,
        /// Number of parameter groups in the source checkpoint.
        groups: usize,
    },
    /// ZeRO files store parameters by position, and the order of the model's parameters is unknown.
    #[error("the order of the parameters in the optimizer group of {name} is unknown")]
    OrderUnknown {
        /// Name of the first parameter of the group.
        name: String,
    },
    /// Two groups list the same parameter.
    #[error("parameter {name} is in two groups")]
    InTwoGroups {
        /// Name of the parameter.
        name: String,
    },
    /// A parameter of a group lacks its weight or an optimizer state.
    #[error("parameter {name} is in a group but has no {role}")]
    TensorMissing {
        /// Name of the parameter.
        name: String,
        /// The role of the missing tensor.
        role: TensorRole,
    },
    /// The parameters of a group had different numbers of updates. ZeRO files store only one update
    /// count per group.
    #[error(
        "{first} had {first_updates} updates and {second} had {second_updates}, but a ZeRO checkpoint stores \
         one count per group"
    )]
    UpdatesDiffer {
        /// Name of a parameter of the group.
        first: String,
        /// Update count of the parameter `first`.
        first_updates: u64,
        /// Name of a parameter of the group with another update count.
        second: String,
        /// Update count of the parameter `second`.
        second_updates: u64,
    },
    /// The source checkpoint has an optimizer state that no optimizer of torch has, and that only
    /// native checkpoints can store.
    #[error("the source has {role}, a state of an optimizer that only native checkpoints store")]
    StateUnsupported {
        /// The role of the state.
        role: TensorRole,
    },
    /// The name of a parameter can't be a directory name. The universal format stores each
    /// parameter in a directory with its name.
    #[error("{name:?} cannot be a directory name, which the universal format requires")]
    NameNotADirectory {
        /// Name of the parameter.
        name: String,
    },
}

impl ConvertError {
    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        use ConvertError::*;
        match self {
            StatesUnreadable { .. } => codes::CONVERT_OPTIMIZER_UNREADABLE,
            WeightsOnly => codes::CONVERT_WEIGHTS_ONLY,
            StepAndOptimizerMissing | OptimizerMissing { .. } | OptimizerRequired => {
                codes::CONVERT_OPTIMIZER_MISSING
            }
            StepMissing => codes::CONVERT_STEP_MISSING,
            GroupsUnknown { .. } => codes::CONVERT_GROUPS_UNKNOWN,
            GroupNotAssignable { .. } | GroupOutOfRange { .. } => codes::PARAMETER_GROUP_INVALID,
            OrderUnknown { .. } => codes::CONVERT_PARAMETER_ORDER_UNKNOWN,
            InTwoGroups { .. } | TensorMissing { .. } => codes::OPTIMIZER_STATE_INVALID,
            UpdatesDiffer { .. } => codes::CONVERT_UPDATE_COUNTS_DIFFER,
            StateUnsupported { .. } => codes::CONVERT_STATE_UNSUPPORTED,
            NameNotADirectory { .. } => codes::CONVERT_NAME_UNSUPPORTED,
        }
    }

    /// Returns advice on how the user can convert the source checkpoint despite this error. Returns
    /// `None` for errors without advice.
    pub(crate) fn help(&self) -> Option<&'static str> {
        use ConvertError::*;
        Some(match self {
            StatesUnreadable { .. } | StepAndOptimizerMissing | OptimizerMissing { .. } => {
                "use `--to safetensors` to write the weights without the training state"
            }
            OptimizerRequired => "use `--to safetensors` or `--to native`",
            WeightsOnly => {
                "use `--to native` or `--to safetensors`; `resume.from` also starts a run from these weights"
            }
            GroupsUnknown { .. } => {
                "assign the parameters with `--group 'PATTERN=N'`, such as `--group '*norm*=1'` (parameters \
                 without a match are in group 0), or use `--to native`"
            }
            OrderUnknown { .. } | UpdatesDiffer { .. } => {
                "use `--to universal`, which stores each parameter by name"
            }
            StateUnsupported { .. } => "use `--to native`, or `--to safetensors` to write only the weights",
            NameNotADirectory { .. } => "use `--to deepspeed` or `--to native`",
            _ => return None,
        })
    }
}
