//! [`Preflight`]: the trait by which the launcher checks a built-in training job before it starts
//! any process.
//!
//! Crate `launcher` does not depend on crate `worker`. The `main` function of the executable passes
//! an implementation of this trait to the launcher.
use crate::probe::LibraryReport;
use diagnostic::Diagnostic;
use jobspec::{JobSpec, ids::Rank};
use std::path::PathBuf;

/// The largest number of workers of the built-in training.
pub const MAX_TRAINING_WORKERS: u32 = 1024;

/// The estimated peak memory of one rank: GPU memory in training on GPUs, host memory in training
/// on CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// The rank whose memory is estimated.
    pub rank: Rank,
    /// The uses of the memory, each with its size in bytes, largest first. An example is
    /// `("optimizer states", 12_345_678)`.
    pub parts: Vec<(String, u64)>,
    /// The sum of the parts, in bytes.
    pub total: u64,
}

/// What the checks of a built-in training before its start have found: errors, warnings, and
/// estimates of the memory of each rank. The subject of each diagnostic is the path of a key, e.g.
/// `train.batch.global`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreflightReport {
    /// Errors, because of which the job must not start.
    pub errors: Vec<Diagnostic>,
    /// Warnings, with which the job can start.
    pub warnings: Vec<Diagnostic>,
    /// The number of trained parameters of the model.
    pub parameters: u64,
    /// The memory estimate of each rank; empty if the data cannot be read.
    pub memory: Vec<MemoryEstimate>,
    /// The size, in bytes, of the state of each rank that `checkpoint.memory` copies to the memory
    /// of hosts. Empty without that section, and if the data cannot be read.
    pub state_bytes: Vec<u64>,
}

/// Checks a built-in training job (GPUs, libraries, data, model and memory) before its workers are
/// started.
pub trait Preflight: Sync {
    /// Checks that the built-in training can use the GPUs of this machine, and returns the memory,
    /// in bytes, of the GPU with the least memory.
    ///
    /// # Errors
    ///
    /// Fails if the GPUs are not usable, for example because a CUDA library is missing. The error
    /// lists the libraries and directories that were searched.
    fn check_gpus(&self, job: &JobSpec) -> diagnostic::Result<u64>;
    /// Opens the libraries that training on GPUs uses on this machine, and returns the result for
    /// each library. The libraries are searched in `directories` first.
    fn inspect_gpu_libraries(&self, directories: &[PathBuf]) -> Vec<LibraryReport>;
    /// Checks before a built-in training starts that the data, tokenizer and model of the job exist
    /// and agree with the keys of job.yaml. Writes no files.
    fn check_job(&self, job: &JobSpec, world: u32, threads: u32) -> PreflightReport;
}
