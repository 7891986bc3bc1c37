//! Crate `ckpt`: writes, reads, verifies, repairs and converts checkpoints.
//!
//! Of our crates it depends only on `diagnostic`, and it does not use collectives.
//!
//! A native checkpoint is a directory `step-00000010` with one safetensors file per rank and a
//! `manifest.json`, which maps logical tensors to byte ranges and has a BLAKE3 hash per block. A
//! checkpoint is complete or absent. A save has three steps:
//!
//! 1. Rank 0: [`Staging::begin`] creates a hidden staging directory.
//! 2. Every rank: [`write_shard`] writes a file there and returns a small [`ShardReport`].
//! 3. Rank 0: [`commit`] checks that the shards contain every tensor exactly once, writes the
//!    manifest, renames the directory and updates `latest`. [`prune`] then removes the oldest
//!    checkpoints.
//!
//! [`Checkpoint::open`] reads a native checkpoint with any number of ranks, [`verify`] checks every
//! byte, and [`gather`] exports a Hugging Face directory. Checkpoints of other programs are read in
//! place ([`find`], [`ExternalCheckpoint`]).
//!
//! Errors are [`CkptError`]s; each has a stable code and converts to a [`diagnostic::Diagnostic`].
#[cfg(target_endian = "big")]
compile_error!("checkpoints are little-endian; big-endian machines are not supported");

mod catalog;
mod checkpoint;
mod commit;
mod convert;
mod diagnosis;
mod diff;
mod disk;
mod dtype;
mod error;
mod external;
pub mod fault;
pub mod format_errors;
pub mod formats;
mod gather;
mod hash;
mod host;
pub mod host_local;
mod manifest;
mod manifest_error;
mod parity;
mod partition;
mod passthrough;
pub mod peft;
mod pickle;
mod remote_shards;
mod repair;
pub mod rng_files;
mod root;
mod save;
mod source;
mod state;
mod stripes;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod untrusted;
mod verify;
mod watch;

pub use catalog::{ModelSpec, RunFacts, TensorInfo, TensorRole, TextFile, Tie, WeightShape};
pub use checkpoint::{BlockRange, BlockSink, Checkpoint, FetchBlocks};
pub use commit::{CommittedCheckpoint, Staging, commit, commit_parity, prune};
pub use convert::{
    ConvertError, ConvertNotice, ConvertOptions, ConvertReport, ConvertTarget, UngroupedWeights, convert,
    find_ungrouped,
};
pub use diagnosis::Diagnosis;
pub use diff::{
    BytesDiff, DiffOptions, DiffReport, DtypeDiff, ElementDiff, ElementPair, RoundingCast, ShapeDiff, Side,
    TensorDiff, diff,
};
pub use dtype::Dtype;
pub use error::{
    CkptError, Damage, DamageReason, MissingPart, OptionProblem, OutputProblem, ReadFailure, RemoteShard,
    Result, SaveProblem, UnsupportedFeature,
};
pub use external::{ExternalCheckpoint, ExternalFacts, StatePart};
pub use gather::{GatherOptions, GatherReport, GatheredFile, gather};
pub use hash::Hash;
pub use parity::{ParityReport, write_parity};
pub use passthrough::{ParamGroup, PassthroughState};
pub use pickle::Object;
pub use repair::{RepairOptions, RepairReport, repair};
pub use root::{NewestCheckpoint, OpenedCheckpoint, find, find_trained, latest, list, newest, step_name};
pub use save::{Elements, Piece, PieceReport, ShardReport, write_shard};
pub use source::{ReadRequest, TensorSource};
pub use state::{LossScale, ParamGroupInfo, TrainingState};
pub use verify::{CheckpointReport, VerifyOptions, VerifyReport, verify, verify_with};
pub use watch::{DirectoryReport, DirectoryStatus, DirectoryWatch};
