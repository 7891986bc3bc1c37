//! Checkpoints of other programs, such as DeepSpeed and PyTorch: what they contain, and where in
//! their files each tensor is stored.
mod builder;
mod checkpoint;
mod crc_check;
mod facts;
mod fused_experts;
mod partial_crcs;
mod stored_files;
mod strided_cache;
mod tensor_part;
mod unfuse_experts;

pub(crate) use builder::{
    ALLOWED_GLOBALS, ExternalCheckpointBuilder, TrainedWeightNames, convert_step_to_integer,
};
pub use checkpoint::ExternalCheckpoint;
pub(crate) use crc_check::verify_all_spans;
pub use facts::{ExternalFacts, TrainingStatePart};
pub(crate) use fused_experts::{FusedExperts, SeparateExpertTensor, parse_expert_matrix_name};
pub(crate) use stored_files::{StepValue, StoredFile};
pub(crate) use tensor_part::{ExternalTensor, TensorPart};
