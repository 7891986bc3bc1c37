//! Crate `ckpt`: writes, reads, verifies, repairs and converts checkpoints.
//!
//! Of the workspace's crates, `ckpt` depends only on `diagnostic`. The crate does not use
//! collectives.
//!
//! A native checkpoint is a directory `step-00000010` with one safetensors file per rank and a
//! `manifest.json`, which maps logical tensors to byte ranges and has a BLAKE3 hash per block. A
//! checkpoint is complete or absent. A save has three steps:
//!
//! 1. Rank 0: [`StagingDir::create`] creates a hidden staging directory.
//! 2. Every rank: [`write_shard`] writes a file to the staging directory and returns a small
//!    [`ShardReport`].
//! 3. Rank 0: [`commit_save`] checks that the shards contain every tensor exactly once, writes the
//!    manifest, renames the directory and updates `latest`. [`prune_checkpoints`] then removes the
//!    oldest checkpoints.
//!
//! [`Checkpoint::open`] opens a native checkpoint for any number of ranks, [`verify_checkpoints`]
//! checks every byte, and [`gather_weights`] exports a Hugging Face directory. Checkpoints of other
//! programs are read in place ([`open_checkpoint`], [`ExternalCheckpoint`]).
//!
//! Functions fail with [`CkptError`]. Each error has a stable code and converts to a
//! [`diagnostic::Diagnostic`].
#[cfg(target_endian = "big")]
compile_error!("checkpoints are little-endian; big-endian machines are not supported");

mod catalog;
mod checkpoint;
mod checkpoint_dir;
mod checkpoint_watch;
mod commit;
mod convert;
mod diagnosis;
mod diff;
mod disk;
mod dtype;
mod element_ranges;
mod error;
mod external;
pub mod fault_points;
pub mod format_errors;
pub mod formats;
mod gather;
mod hash;
pub mod host_local;
mod manifest;
mod manifest_error;
mod parity;
mod passthrough;
pub mod peft;
mod pickle;
mod remote_shards;
mod repair;
pub mod rng_files;
mod shard_writer;
mod storage_host;
mod stripes;
mod tensor_source;
#[cfg(test)]
mod tests;
mod training_state;
#[doc(hidden)]
pub mod untrusted;
mod verify;

pub use catalog::{ModelSpec, RunFacts, TensorInfo, TensorRole, TextFile, TiedWeight, WeightShape};
pub use checkpoint::{BlockFetcher, BlockRange, BlockSink, Checkpoint};
pub use checkpoint_dir::{
    NewestCheckpoint, OpenedCheckpoint, find_latest, list_checkpoints, open_checkpoint, open_newest,
    open_with_trained_names, step_dir_name,
};
pub use checkpoint_watch::{CheckpointWatch, DirectoryReport, DirectoryStatus};
pub use commit::{CommittedCheckpoint, StagingDir, commit_save, commit_save_with_parity, prune_checkpoints};
pub use convert::{
    ConvertError, ConvertNotice, ConvertOptions, ConvertReport, ConvertTarget, UngroupedWeights,
    convert_checkpoint, find_ungrouped_weights,
};
pub use diagnosis::Diagnosis;
pub use diff::{
    DiffOptions, DiffReport, DiffSide, DtypeDiff, ElementDiff, ElementPair, FloatTensorDiff,
    IntegerTensorDiff, RoundingCast, ShapeDiff, diff_checkpoints,
};
pub use dtype::Dtype;
pub use error::{
    CkptError, Damage, DamageReason, MissingPart, OptionProblem, OutputProblem, ReadFailure, RemoteShard,
    Result, SaveProblem, UnsupportedFeature,
};
pub use external::{ExternalCheckpoint, ExternalFacts, StatePart};
pub use gather::{GatherOptions, GatherReport, GatheredFile, gather_weights};
pub use hash::Hash;
pub use parity::{ParityFileReport, write_parity};
pub use passthrough::{ParamGroup, PassthroughState};
pub use pickle::PythonObject;
pub use repair::{RepairOptions, RepairReport, repair_checkpoints};
pub use shard_writer::{PieceElements, PieceReport, ShardReport, TensorPiece, write_shard};
pub use tensor_source::{ReadRequest, TensorSource};
pub use training_state::{LossScale, ParamGroupInfo, TrainingState};
pub use verify::{
    CheckpointReport, VerifyOptions, VerifyReport, verify_checkpoints, verify_checkpoints_with,
};
