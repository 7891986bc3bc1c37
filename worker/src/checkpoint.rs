//! Checkpoints of all ranks: saving, resuming, and directories that hosts do not share.
pub(crate) mod host_local;
pub mod mapping;
pub mod memory_copies;
pub mod resume;
pub mod save;
mod shard_write;
pub mod storage_topology;
