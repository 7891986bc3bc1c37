//! `checkpoint` and `resume`: when and where a job saves, and the checkpoint that it resumes from.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `checkpoint`: when and where the built-in training saves, and which checkpoints are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// The directory of the checkpoints, relative to the workdir. The placeholder `{name}` is
    /// already replaced.
    pub dir: PathBuf,
    /// The interval between checkpoints.
    pub every: SaveInterval,
    /// The number of checkpoints that are kept; 0 for all. The newest complete ones are kept.
    pub keep: u32,
    /// Whether the state is copied first and then written while training continues.
    pub r#async: bool,
    /// Whether XOR parity is written, from which one missing or damaged shard can be rebuilt.
    pub parity: bool,
    /// Whether a run on hosts that do not share `dir` is rejected. Otherwise each host keeps the
    /// shards of its ranks.
    #[serde(default)]
    pub require_shared: bool,
    /// Whether the weights of the last checkpoint of the run are gathered into `model.safetensors`
    /// (bf16).
    pub gather_16bit_weights_on_model_save: bool,
}

/// `checkpoint.every`: the interval between checkpoints. A checkpoint is always saved at the end
/// and when the run is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveInterval {
    /// No saves in between.
    Never,
    /// A save after this number of optimizer steps.
    Steps(u64),
    /// A save after this time in milliseconds, which rank 0 measures at step boundaries.
    Duration(u64),
}

/// `resume`: the checkpoint that a run resumes from, and its RNG streams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResumeSpec {
    /// The checkpoint to resume from.
    pub from: ResumeFrom,
    /// The treatment of RNG streams in a run with another number of workers.
    pub rng: RngPolicy,
}

/// The checkpoint to resume from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResumeFrom {
    /// The newest complete checkpoint in `checkpoint.dir`; step 0 if there is none.
    Auto,
    /// No checkpoint; the run begins at step 0.
    Never,
    /// This checkpoint, or the newest one in this directory. If it does not exist, the run fails.
    Path(PathBuf),
}

/// `resume.rng`: the treatment of RNG streams of a checkpoint that was written by another number of
/// workers (docs/numerics.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RngPolicy {
    /// New ranks get new streams; the other ranks keep their streams.
    Reconcile,
    /// A different number of workers is an error.
    Strict,
    /// All ranks get new streams.
    Reseed,
}
