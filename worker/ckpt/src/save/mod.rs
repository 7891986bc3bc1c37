//! Saves checkpoints in launch's own (native) format: writes the ranks' files (shards) and parity
//! files, and makes the checkpoint visible atomically (commit).
pub(crate) mod commit;
pub mod host_local;
pub mod memory_store;
mod output_path;
pub(crate) mod output_record;
mod parity;
mod shard_writer;

pub use commit::{CommittedCheckpoint, StagingDir, commit_save, commit_save_with_parity, prune_checkpoints};
pub(crate) use commit::{ReplaceMethod, publish_directory, update_latest, write_manifest};
pub(crate) use output_path::resolve_output_path;
pub(crate) use parity::rebuild_from_parity;
pub use parity::{ParityFileReport, write_parity};
pub use shard_writer::{
    PieceElements, ShardReport, TensorPiece, WrittenPieceReport, write_shard, write_shard_until,
};
