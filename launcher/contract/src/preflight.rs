//! [`Preflight`]: the checks of a job by crate `worker` before anything starts.
//!
//! Crate `launcher` does not depend on crate `worker`. The executable's `main` passes the launcher
//! an implementation of this trait.
use crate::{ids::Rank, job::JobSpec, probe::LibraryReport};
use diagnostic::Diagnostic;
use std::path::PathBuf;

/// The estimated peak memory of one rank. In training on GPUs it is GPU memory, otherwise host
/// memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// The rank.
    pub rank: Rank,
    /// The purposes of the memory with their sizes in bytes, largest first, e.g. `("optimizer
    /// states", 12_345_678)`.
    pub parts: Vec<(String, u64)>,
    /// The sum of the parts, in bytes.
    pub total: u64,
}

/// The findings of the checks of a job. The subject of each diagnostic is a key, e.g.
/// `train.batch.global`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreflightReport {
    /// Errors, because of which the job must not start.
    pub errors: Vec<Diagnostic>,
    /// Warnings, with which the job can start.
    pub warnings: Vec<Diagnostic>,
    /// The number of trained parameters of the model.
    pub parameters: u64,
    /// The memory estimate of each rank; empty when the data cannot be read.
    pub memory: Vec<MemoryEstimate>,
}

/// Checks of a job with a `train` section that need no run.
pub trait Preflight: Sync {
    /// Checks that a job that trains on GPUs can use the GPUs of this machine. The error lists the
    /// libraries and directories that were searched.
    fn check_gpus(&self, job: &JobSpec) -> diagnostic::Result<()>;
    /// Opens the libraries that training on GPUs uses on this machine, and reports the result for
    /// each. `directories` are searched first.
    fn inspect_gpu_libraries(&self, directories: &[PathBuf]) -> Vec<LibraryReport>;
    /// Checks the job against the data, tokenizer and model that it names, for `world` workers of
    /// `threads` threads each. Writes no files.
    fn check_job(&self, job: &JobSpec, world: u32, threads: u32) -> PreflightReport;
}
