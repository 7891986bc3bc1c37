//! [`DeepSpeedError`]: why DeepSpeed's files are rejected.
use super::optimizer_state::{InvalidStep, OptimizerStateError};
use super::torch_file::TorchFileError;
use crate::tensor::{Dtype, TensorRole};
use diagnostic::Code;
use diagnostic::codes::checkpoint as codes;

/// Why the files of a DeepSpeed checkpoint are rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DeepSpeedError {
    /// An entry of a model or optimizer file is missing.
    #[error("no {0}")]
    MissingField(&'static str),
    /// An entry of a model or optimizer file has an unexpected type or value.
    #[error("invalid {0}")]
    InvalidField(&'static str),
    /// A tensor in a model or optimizer file is invalid.
    #[error("{name}: {error}")]
    Tensor {
        /// Name or key of the tensor.
        name: String,
        /// Why the tensor is rejected.
        error: TorchFileError,
    },
    /// A tensor is invalid, and its name is not known.
    #[error("{0}")]
    Torch(#[from] TorchFileError),
    /// The optimizer in a model file is invalid.
    #[error("{0}")]
    Optimizer(#[from] OptimizerStateError),
    /// The flat tensor of a group is not F32.
    #[error("flat group {group} is {dtype}, expected F32")]
    FlatGroupDtype {
        /// Index of the flat group: the parameters that the flat tensor concatenates.
        group: usize,
        /// Dtype of the flat tensor.
        dtype: Dtype,
    },
    /// The optimizer file and the model file have different numbers of parameter groups.
    #[error("the file has {found} parameter groups, the model file {expected}")]
    GroupCount {
        /// Number of parameter groups of the optimizer file.
        found: usize,
        /// Number of parameter groups of the model file.
        expected: usize,
    },
    /// The flat tensors of a parameter group contradict each other or the shapes of the group's
    /// parameters.
    #[error("parameter group {group}: {error}")]
    Group {
        /// Index of the parameter group.
        group: usize,
        /// How the flat tensors and the parameters differ.
        error: LayoutError,
    },
    /// The slices of a frozen weight do not match the shape of the weight.
    #[error("frozen weight: {0}")]
    Frozen(LayoutError),
    /// The flat tensor of a parameter does not match the shape of the parameter.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// A model file lists a frozen weight without storing its values.
    #[error("frozen weight {0} is missing")]
    FrozenMissing(String),
    /// The file was written by a different rank than its name states.
    #[error("the file was written by rank {0}: files of two ranks were exchanged")]
    WrongRank(u32),
    /// Two files belong to the same rank.
    #[error("{0} belongs to the same rank")]
    DuplicateRank(String),
    /// The rank of a file is not below the world size.
    #[error("the checkpoint has only {0} ranks")]
    RankOutsideWorld(u32),
    /// A file has a different stage or world size than the rest of the checkpoint.
    #[error(
        "the file is of stage {stage} with partitions {partitions:?}, the checkpoint of stage {expected_stage} on {world} ranks"
    )]
    StageMismatch {
        /// ZeRO stage of the file.
        stage: u8,
        /// Number of partitions of each group in the file.
        partitions: Vec<u64>,
        /// ZeRO stage of the first optimizer file.
        expected_stage: u8,
        /// World size of the checkpoint.
        world: u32,
    },
    /// Model files of two ranks record different numbers of ranks.
    #[error("the file records {key} {found}, that of rank {rank} {expected}")]
    WorldSizeMismatch {
        /// Key of the model file under which DeepSpeed records the number.
        key: &'static str,
        /// Number that the file records.
        found: u64,
        /// Rank of the other file.
        rank: u32,
        /// Number that the other file records.
        expected: u64,
    },
    /// Files of two ranks have different steps.
    #[error("the file is of step {found}, that of rank {rank} of step {expected}")]
    StepMismatch {
        /// Step of the file.
        found: f64,
        /// Rank of the other file.
        rank: u32,
        /// Step of the other file.
        expected: f64,
    },
    /// An optimizer step is not a whole number.
    #[error("{0}")]
    Step(#[from] InvalidStep),
    /// The step of a weight is not a whole number.
    #[error("{name}: {error}")]
    WeightStep {
        /// Name of the weight.
        name: String,
        /// The invalid step.
        error: InvalidStep,
    },
    /// A file of a universal checkpoint was written under another name.
    #[error("the file was written as {0}.pt: files were exchanged")]
    FilesExchanged(String),
    /// A file of a universal checkpoint has no tensor.
    #[error("the file holds no tensor")]
    NoTensor,
    /// A flat tensor's shape is not recorded in any model file.
    #[error("the tensor is flat, and no model file records its shape")]
    UnknownShape,
    /// The number of FP32 master weights of a parameter group differs from the number of its
    /// optimizer states.
    #[error("group {group} has {weights} FP32 weights and {states} states")]
    MasterCount {
        /// Index of the parameter group.
        group: usize,
        /// Number of FP32 master weights of the parameter group.
        weights: usize,
        /// Number of optimizer states of the parameter group.
        states: usize,
    },
    /// The FP32 master copy of a weight has an unexpected dtype, or a different shape than the
    /// weight.
    #[error("the FP32 weight of {name} is {dtype} {found:?}, expected F32 {expected:?}")]
    MasterMismatch {
        /// Name of the weight.
        name: String,
        /// Dtype of the master weight.
        dtype: Dtype,
        /// Shape of the master weight.
        found: Vec<u64>,
        /// Shape of the weight in the module.
        expected: Vec<u64>,
    },
    /// `latest` does not contain the name of a directory.
    #[error("the file does not contain the name of a directory")]
    InvalidLatest,
}

/// Why the flat arrays in the files of a DeepSpeed checkpoint do not match the shapes of their
/// parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The shape of a parameter has too many dimensions or too many elements.
    #[error("{name} has the impossible shape {shape:?}")]
    ImpossibleShape {
        /// Name of the parameter.
        name: String,
        /// Shape of the parameter.
        shape: Vec<u64>,
    },
    /// The number of alignment paddings differs from the number of parameters.
    #[error("{paddings} paddings for {parameters} parameters")]
    PaddingCount {
        /// Number of alignment paddings that the optimizer file records.
        paddings: usize,
        /// Number of parameters of the group in the model file.
        parameters: usize,
    },
    /// The ranks hold a different number of elements than the parameters have.
    #[error("the parameters have {expected} elements, the ranks hold {found}")]
    ElementCount {
        /// Number of elements of all parameters.
        expected: u64,
        /// Number of elements that all ranks hold together.
        found: u64,
    },
    /// A rank lacks an optimizer state that other ranks have.
    #[error("rank {rank} has no {role}")]
    StateMissing {
        /// The rank without the state.
        rank: usize,
        /// Role of the missing state.
        role: TensorRole,
    },
    /// An optimizer state has a different length than the weights of its rank.
    #[error("rank {rank} has {states} elements of {role} ({dtype}) for {weights} elements of weights")]
    StateLength {
        /// The rank that stores the state.
        rank: usize,
        /// Role of the state.
        role: TensorRole,
        /// Number of elements of the state.
        states: u64,
        /// Dtype of the state.
        dtype: Dtype,
        /// Number of elements of the rank's weights.
        weights: u64,
    },
    /// A flat tensor of stage 3 ends within a parameter.
    #[error("{role} of rank {rank} has {elements} elements ({dtype}), {name} ends at {end}")]
    PartitionTooShort {
        /// Role of the flat tensor.
        role: TensorRole,
        /// The rank that stores the flat tensor.
        rank: usize,
        /// Number of elements of the flat tensor.
        elements: u64,
        /// Dtype of the flat tensor.
        dtype: Dtype,
        /// Name of the parameter.
        name: String,
        /// End of the parameter in the flat tensor, in elements.
        end: u64,
    },
    /// A flat tensor of stage 3 has a different length than the rank's slices of its parameters.
    #[error("the parameters have {expected} elements of {role} per rank, rank {rank} has {found}")]
    PartitionLength {
        /// Role of the flat tensor.
        role: TensorRole,
        /// The rank that stores the flat tensor.
        rank: usize,
        /// Number of elements of the rank's flat tensor.
        found: u64,
        /// Number of elements of the parameters per rank, padding included.
        expected: u64,
    },
    /// A slice of a frozen weight has a different length than expected.
    #[error("{name}: rank {rank} has {elements} elements ({dtype}), expected {expected}")]
    SliceLength {
        /// Name of the weight.
        name: String,
        /// The rank that stores the slice.
        rank: usize,
        /// Number of elements of the slice.
        elements: u64,
        /// Dtype of the slice.
        dtype: Dtype,
        /// Number of elements that each rank should store, padding included.
        expected: u64,
    },
    /// A tensor of a universal checkpoint has a different number of elements than its shape.
    #[error("{role} has {elements} elements, the shape {shape:?} has {expected}")]
    TensorLength {
        /// Role of the tensor.
        role: TensorRole,
        /// Number of elements of the tensor.
        elements: u64,
        /// The shape of the weight.
        shape: Vec<u64>,
        /// Number of elements that the shape gives.
        expected: u64,
    },
}

impl DeepSpeedError {
    /// Returns the stable code of this error, which `launch explain` documents.
    pub fn code(&self) -> Code {
        match self {
            DeepSpeedError::Optimizer(_) => codes::OPTIMIZER_STATE_INVALID,
            DeepSpeedError::Tensor { .. } | DeepSpeedError::Torch(_) => codes::TORCH_FILE_INVALID,
            DeepSpeedError::InvalidLatest => codes::CHECKPOINT_LATEST_DANGLING,
            _ => codes::DEEPSPEED_STATE_INVALID,
        }
    }
}
