//! What the worker's side knows about a `train:` section without running it: asked by `launch plan` and before a start.
//!
//! The launcher never depends on the worker's crate; the executable's `main` hands it this trait.
use crate::{ids::Rank, job::JobSpec, probe::LibraryLook};
use std::path::PathBuf;

/// A problem of job.yaml found by meaning, not by syntax. `path` is the key, e.g. `train.batch.global`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub path: String,
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// One rank's memory at its peak, bytes: the host's, or a GPU's where it trains on one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    pub rank: Rank,
    /// What needs how much, largest first, e.g. `("optimizer states", 12_345_678)`.
    pub parts: Vec<(String, u64)>,
    pub total: u64,
}

/// What is known of a job before it runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Refuse to start.
    pub problems: Vec<Finding>,
    /// Say so and go on.
    pub warnings: Vec<Finding>,
    /// Trainable parameters.
    pub parameters: u64,
    pub memory: Vec<MemoryEstimate>,
}

/// Judges a `train:` section.
pub trait TrainJudge: Sync {
    /// Can this machine's GPUs be used for a job that trains on them? If not, why: what was looked for, and where.
    fn gpus(&self, job: &JobSpec) -> Result<(), String>;
    /// The libraries that training on this machine's GPUs opens; the job's own folders are looked through first.
    fn libraries(&self, folders: &[PathBuf]) -> Vec<LibraryLook>;
    /// Reads what the job names (data file sizes, tokenizer), writes nothing.
    fn judge(&self, job: &JobSpec, world: u32, threads: u32) -> Verdict;
}
