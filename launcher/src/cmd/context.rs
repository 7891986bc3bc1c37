//! [`CommandContext`]: what a command gets in addition to its arguments, such as the output format.
use super::{gpu_check::args::GpuCheckFunction, output::OutputFormat};
use protocol::preflight::Preflight;

/// The inputs that every command of `launch` gets in addition to its arguments, such as the output
/// format and the verbosity.
pub(crate) struct CommandContext {
    /// The format in which the command prints its results.
    pub(crate) format: OutputFormat,
    /// Builds the definition of the command line, from which completions and man pages are made.
    pub(crate) build_definition: fn() -> clap::Command,
    /// The number of `-v` options.
    pub(crate) verbosity: u8,
    /// The command line of this process, which a run record stores.
    pub(crate) command_line: Vec<String>,
    /// The checks of the `train` section of a job.
    pub(crate) preflight: &'static dyn Preflight,
    /// The implementation of `launch gpu-check`.
    pub(crate) run_gpu_check: GpuCheckFunction,
}
