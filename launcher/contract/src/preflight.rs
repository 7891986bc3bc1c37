//! [`Preflight`]: what the worker's side knows about a job before anything starts.
//!
//! The launcher does not depend on the crate `worker`; the executable's `main` passes it this
//! trait.
use crate::{ids::Rank, job::JobSpec, probe::LibraryReport};
use diagnostic::Diagnostic;
use std::path::PathBuf;

/// The peak memory of one rank, bytes: of its GPU when it trains on one, else of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// The rank.
    pub rank: Rank,
    /// Purposes and their bytes, largest first, e.g. `("optimizer states", 12_345_678)`.
    pub parts: Vec<(String, u64)>,
    /// Sum of the parts.
    pub total: u64,
}

/// What the checks of a job found. The subject of each diagnostic is a key, e.g.
/// `train.batch.global`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreflightReport {
    /// Reasons not to start.
    pub errors: Vec<Diagnostic>,
    /// Remarks that do not prevent the start.
    pub warnings: Vec<Diagnostic>,
    /// Number of trainable parameters.
    pub parameters: u64,
    /// One estimate per rank; empty when the data cannot be read.
    pub memory: Vec<MemoryEstimate>,
}

/// Checks of a `train` section that need no run.
pub trait Preflight: Sync {
    /// Whether a job that trains on GPUs can use those of this machine. The error lists the
    /// libraries and directories that were searched.
    fn check_gpus(&self, job: &JobSpec) -> diagnostic::Result<()>;
    /// The libraries that training on GPUs opens on this machine. The directories of the job are
    /// searched first.
    fn gpu_libraries(&self, directories: &[PathBuf]) -> Vec<LibraryReport>;
    /// Checks the job against the files that it names (data, tokenizer, model) for `world` workers
    /// of `threads` threads each. Writes nothing.
    fn check_job(&self, job: &JobSpec, world: u32, threads: u32) -> PreflightReport;
}
