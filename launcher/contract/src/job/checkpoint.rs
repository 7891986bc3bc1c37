//! `checkpoint` and `resume`: when and where a job saves, and what it begins with.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `checkpoint`: when and where the built-in training saves, and what is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// The directory of the checkpoints, with `{name}` replaced; relative to the workdir.
    pub dir: PathBuf,
    /// How often a checkpoint is saved.
    pub every: SaveInterval,
    /// The number of newest complete checkpoints that are kept; 0 for all.
    pub keep: u32,
    /// Whether the state is copied first and written while training continues.
    pub r#async: bool,
    /// Whether XOR parity is written, from which one lost or damaged shard can be rebuilt.
    pub parity: bool,
    /// Whether hosts that do not share `dir` are rejected. Otherwise each host keeps the shards of
    /// its ranks.
    #[serde(default)]
    pub require_shared: bool,
    /// Whether the last checkpoint of the run is gathered into `model.safetensors` (bf16).
    pub gather_16bit_weights_on_model_save: bool,
}

/// How often a checkpoint is saved. One is always saved at the end and when the run is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveInterval {
    /// Only at the end and when the run is stopped.
    Never,
    /// After this many optimizer steps.
    Steps(u64),
    /// After this time, milliseconds, by the clock of rank 0 at step boundaries.
    Duration(u64),
}

/// `resume`: what a run begins with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResumeSpec {
    /// The checkpoint to resume from.
    pub from: ResumeFrom,
    /// How random streams are adapted to another number of workers.
    pub rng: RngPolicy,
}

/// The checkpoint to resume from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResumeFrom {
    /// The newest complete checkpoint in `checkpoint.dir`, if there is one.
    Auto,
    /// None; the run begins at step 0.
    Never,
    /// This checkpoint, or the newest in this directory; its absence is an error.
    Path(PathBuf),
}

/// How random streams that do not fit the number of workers are treated (docs/numerics.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RngPolicy {
    /// New ranks get new streams; the others keep theirs.
    Reconcile,
    /// The run is rejected.
    Strict,
    /// All streams are seeded again.
    Reseed,
}
