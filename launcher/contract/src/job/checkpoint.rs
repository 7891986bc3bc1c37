//! `checkpoint:` and `resume:`.
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `checkpoint:` — when, where, what is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// `{name}` is filled in. Relative to the workdir. Default `runs/{name}/checkpoints`.
    pub dir: PathBuf,
    pub every: Every,
    /// Newest complete checkpoints kept; 0: all.
    pub keep: u32,
    /// Copy the shards aside and write while training goes on.
    pub r#async: bool,
    /// Write XOR parity beside the shards: one lost or damaged shard can be rebuilt.
    pub parity: bool,
    /// Refuse hosts that do not share `dir`; else each keeps the shards of its own ranks.
    #[serde(default)]
    pub require_shared: bool,
    /// Gather `model.safetensors` (bf16) from the last checkpoint of the run.
    pub gather_16bit_weights_on_model_save: bool,
}

/// How often. A checkpoint is always saved at the end and on a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Every {
    Never,
    Steps(u64),
    /// Milliseconds; decided by rank 0's clock at step boundaries.
    Duration(u64),
}

/// `resume:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResumeSpec {
    pub from: ResumeFrom,
    pub rng: RngPolicy,
}

/// Where to go on from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResumeFrom {
    /// The newest complete checkpoint in `checkpoint.dir`, else from the start.
    Auto,
    Never,
    /// This checkpoint (or the newest of this directory of checkpoints), else an error.
    Path(PathBuf),
}

/// What to do with random streams that do not fit the number of workers (docs/numerics.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RngPolicy {
    Reconcile,
    Strict,
    Reseed,
}
