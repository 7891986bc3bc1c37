//! External checkpoints: facts, files, and the parts of files that hold each tensor.
mod builder;
mod checkpoint;
mod crc_check;
mod facts;
mod fused_experts;
mod partial_crcs;
mod stored_files;
mod tensor_part;
mod unfuse_experts;

pub(crate) use builder::{
    ExternalCheckpointBuilder, GLOBALS, TrainedNames, parse_optimizer_state_role, to_whole_step,
};
pub use checkpoint::ExternalCheckpoint;
pub(crate) use checkpoint::ExternalTensor;
pub use facts::{ExternalFacts, StatePart};
pub(crate) use fused_experts::{FusedExperts, FusedMember};
pub(crate) use stored_files::{StoredFile, StoredFiles};
pub(crate) use tensor_part::TensorPart;
