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
mod codec;
mod convert;
mod diff;
pub mod error;
pub mod fault_points;
mod format_constants;
mod gather;
mod hash;
mod layout;
mod open;
mod parallel;
mod repair;
pub mod rng_files;
mod rng_stream_kind;
mod save;
mod tensor;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod untrusted;
mod verify;
mod watch;

pub use catalog::{
    ExternalCheckpoint, ExternalFacts, F32ReadRequest, LossScale, ModelSpec, ParamGroup, ParamGroupInfo,
    PassthroughState, RunFacts, TensorInfo, TensorSource, TextFile, TiedWeight, TrainingState,
    TrainingStatePart, WeightShape,
};
pub use codec::pickle::{PythonObject, parse_plain_pickle};
pub use convert::{
    ConvertNotice, ConvertOptions, ConvertReport, ConvertTarget, UngroupedWeights, convert_checkpoint,
    find_ungrouped_weights,
};
pub use diff::{
    DiffOptions, DiffReport, DiffSide, DtypeDiff, ElementDiff, ElementPair, FloatTensorDiff,
    IntegerTensorDiff, RoundingCast, ShapeDiff, diff_checkpoints,
};
pub use error::{
    CkptError, CloneableIoError, ConvertError, Damage, DamageReason, Diagnosis, MissingPart, OptionProblem,
    OutputProblem, RemoteShard, Result, SaveProblem, UnsupportedFeature,
};
pub use gather::{GatherOptions, GatherReport, GatheredFile, gather_weights, gather_weights_until};
pub use hash::Hash;
pub use layout::native::{
    BlockFetcher, BlockRange, BlockSink, Checkpoint, MemoryShard, find_latest_checkpoint, list_checkpoints,
    parse_step_dir_name, step_dir_name,
};
pub use layout::peft;
pub use open::{
    NewestCheckpoint, OpenedCheckpoint, open_checkpoint, open_checkpoint_for_training, open_newest_native,
};
pub use repair::{RepairOptions, RepairReport, repair_checkpoints};
pub use save::{
    CommittedCheckpoint, ParityFileReport, PieceElements, ShardReport, StagingDir, TensorPiece,
    WrittenPieceReport, commit_save, commit_save_with_parity, host_local, memory_store, prune_checkpoints,
    write_parity, write_shard, write_shard_until,
};
pub use tensor::{Dtype, TensorRole};
pub use verify::{
    CheckpointReport, VerifyOptions, VerifyReport, verify_checkpoints, verify_checkpoints_with,
};
pub use watch::{CheckpointWatch, DirectoryReport, DirectoryStatus};
