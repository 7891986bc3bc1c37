//! Saves the training state of all ranks as checkpoints, and resumes from checkpoints. Also detects
//! which hosts share the checkpoint directory.
pub(crate) mod host_local;
pub mod memory_copies;
pub mod resume;
pub mod save;
mod shard_write;
pub mod storage_topology;
pub mod tensor_mapping;
