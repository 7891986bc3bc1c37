//! Implements `launch gpu-check`, which compares a GPU's operations and training with the CPU and
//! measures their speed. Needs a driver, NVRTC and cuBLASLt. `scripts/gpu-check` runs this command.
//!
//! The check consists of parts ([`parts`]). Each part runs in a separate process of this
//! executable, so that a hang or a crash of one part does not affect the others.
mod check_job;
mod curve_cases;
mod curve_training;
mod curves;
mod environment;
mod memory_file;
mod message;
mod nccl_ranks;
mod op_speed;
mod part_filter;
mod part_process;
mod part_runner;
mod parts;
mod report_file;
mod restart;
mod run_part;
mod table;
mod throughput;
mod timed_models;

pub use part_filter::PartFilter;

use part_runner::{CheckRunOptions, run_parts};
use parts::{PROFILES_GROUP, Part, list_parts, select_parts};
use run_part::{open_gpu, run_part};
use std::path::PathBuf;
use throughput::measure_model;
use timed_models::{describe_timed_models_as_json, find_model_by_number};

/// The options of the command `launch gpu-check`.
#[derive(Clone, Debug)]
pub struct GpuCheckOptions {
    /// The index of the GPU.
    pub device: usize,
    /// The parts that are left out.
    pub filter: PartFilter,
    /// The work to do.
    pub task: GpuCheckTask,
}

/// What a process of `launch gpu-check` does: run the whole check, list its parts, run one part for
/// the parent process, or time models.
#[derive(Clone, Debug)]
pub enum GpuCheckTask {
    /// Compares operations and training with the CPU, and measures their speed.
    Check {
        /// The parts or groups of parts to run. Empty: all.
        only: Vec<String>,
        /// The time for all parts together. Parts that do not fit are skipped.
        seconds: u64,
        /// The time limit of each part. `None`: a limit that depends on the part.
        part_seconds: Option<u64>,
        /// The JSON file to write after every part.
        report: Option<PathBuf>,
        /// The JSON file of an earlier check, whose passed parts are not repeated.
        resume: Option<PathBuf>,
    },
    /// Prints the names of the parts.
    ListParts(Vec<String>),
    /// Runs one part in this process, and sends its results to the parent process.
    RunPart {
        /// The name of the part.
        name: String,
        /// The file in which the launches are logged.
        launch_log: Option<PathBuf>,
        /// The memory that this process, as rank 1, shares with rank 0.
        rank_memory: Option<PathBuf>,
    },
    /// Prints, as JSON, the models whose training is timed, for `scripts/bench/compare_torch`.
    ListModels,
    /// Times the training of the model with this index, and prints the result as JSON.
    MeasureModel(usize),
    /// Prints the time of each operation of a training step of the model with this index.
    ProfileModel(usize),
}

/// Runs `launch gpu-check` and prints the results to standard output. Returns whether all results
/// agree with the CPU.
///
/// # Errors
///
/// Fails with the category `Cluster` if the GPU or a library is not usable.
pub fn run_gpu_check(options: GpuCheckOptions) -> diagnostic::Result<bool> {
    let GpuCheckOptions { device, filter, task } = options;
    let tiny = filter.tiny;
    match task {
        GpuCheckTask::Check { only, seconds, part_seconds, report, resume } => {
            let mut parts = select_parts(list_parts(filter), &only)?;
            for part in &mut parts {
                part.limit_seconds = part_seconds.unwrap_or(part.limit_seconds);
            }
            let (report, resume) = (report.as_deref(), resume.as_deref());
            return run_parts(CheckRunOptions { device, filter, seconds, report, resume }, &parts);
        }
        GpuCheckTask::ListParts(only) => {
            for part in select_parts(list_parts(filter), &only)? {
                println!("{}", part.name);
            }
        }
        GpuCheckTask::RunPart { name, launch_log, rank_memory } => {
            return run_part(&name, device, filter, launch_log.as_deref(), rank_memory.as_deref());
        }
        GpuCheckTask::ListModels => println!("{}", describe_timed_models_as_json(tiny)?),
        GpuCheckTask::MeasureModel(number) => {
            println!("{}", measure_model(&|| open_gpu(device), tiny, number)?);
        }
        GpuCheckTask::ProfileModel(number) => {
            let name = format!("{PROFILES_GROUP}/{}", find_model_by_number(tiny, number)?.part_name);
            let parts: Vec<Part> = select_parts(list_parts(filter), &[name])?;
            let seconds = parts.iter().map(|part| part.limit_seconds).sum();
            return run_parts(
                CheckRunOptions { device, filter, seconds, report: None, resume: None },
                &parts,
            );
        }
    }
    Ok(true)
}
