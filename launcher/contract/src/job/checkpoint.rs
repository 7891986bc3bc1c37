//! `checkpoint` and `resume`: when and where a job saves, and from which checkpoint it resumes.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `checkpoint`: when and where the built-in training saves, and which checkpoints are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// The directory of the checkpoints, relative to the workdir. The name of the job has already
    /// replaced the placeholder `{name}`.
    pub dir: PathBuf,
    /// The interval between checkpoints, in steps or time.
    pub every: SaveInterval,
    /// The number of checkpoints to keep; 0 to keep all. The newest complete checkpoints are kept.
    pub keep: u32,
    /// Whether training continues while a copy of the state is written. Otherwise training waits
    /// for the write.
    pub r#async: bool,
    /// Whether XOR parity is also written, from which one missing or damaged shard can be rebuilt.
    pub parity: bool,
    /// Whether the run fails if its hosts do not share `dir`. Otherwise each host keeps the shards
    /// of its ranks in its own directory.
    #[serde(default)]
    pub require_shared: bool,
    /// Whether the weights of the last checkpoint are gathered into `model.safetensors` in bf16
    /// after the last step.
    pub gather_16bit_weights_on_model_save: bool,
}

/// `checkpoint.every`: the interval between checkpoints. A checkpoint is always saved at the end of
/// training, and when the run is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveInterval {
    /// No checkpoints before the end of training.
    Never,
    /// A checkpoint after every such number of optimizer steps.
    Steps(u64),
    /// A checkpoint after every such number of milliseconds, which rank 0 measures at step
    /// boundaries.
    Duration(u64),
}

/// `resume`: the checkpoint that a run resumes from, and the policy for its RNG streams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResumeSpec {
    /// The checkpoint that the run resumes from, if any.
    pub from: ResumeFrom,
    /// The policy for the RNG streams if the checkpoint was written by another number of workers.
    pub rng: RngPolicy,
}

/// `resume.from`: the checkpoint that a run resumes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResumeFrom {
    /// The newest complete checkpoint in `checkpoint.dir`. The run begins at step 0 if there is
    /// none.
    Auto,
    /// No checkpoint. The run begins at step 0.
    Never,
    /// The checkpoint at this path, or the newest checkpoint in the directory at this path. The run
    /// fails if there is none.
    Path(PathBuf),
}

/// `resume.rng`: the policy for the RNG streams of a checkpoint that another number of workers
/// wrote (docs/numerics.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RngPolicy {
    /// Ranks that are new get new streams. The other ranks keep the streams of the checkpoint.
    Reconcile,
    /// The run fails if the number of workers differs from that of the checkpoint.
    Strict,
    /// All ranks get new streams.
    Reseed,
}
