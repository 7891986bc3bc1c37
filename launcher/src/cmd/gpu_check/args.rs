//! [`GpuCheckArgs`]: the arguments of `launch gpu-check`, and the type of the function that
//! implements the command.
use clap::Args;
use std::path::PathBuf;

/// A function that implements `launch gpu-check`, which compares the results of operations on a GPU
/// with those on the CPU and prints the comparison. Returns whether all results agree with the CPU.
///
/// Crate `launcher` does not depend on crate `worker`, which implements the check. The `main`
/// function of the executable passes the implementation to [`crate::main`].
pub type GpuCheckFunction = fn(GpuCheckArgs) -> diagnostic::Result<bool>;

/// Arguments of `launch gpu-check`.
#[derive(Clone, Debug, Args)]
pub struct GpuCheckArgs {
    /// Number of the GPU, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Compare only a few shapes, and measure no speeds; train no models, unless --tiny is also
    /// given
    #[arg(long)]
    pub quick: bool,
    /// Train very small models, for slow GPUs
    #[arg(long)]
    pub tiny: bool,
    /// Compare operations only; train no models
    #[arg(long, group = "task")]
    pub ops: bool,
    /// Run only these parts or groups of parts, separated by commas; `--list` prints the names
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Print the names of the parts, in the order in which they run
    #[arg(long, group = "task")]
    pub list: bool,
    /// Time in seconds for all parts together; parts that do not fit are skipped
    #[arg(long, value_name = "N", default_value_t = 540, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: u64,
    /// Time limit of each part in seconds [default: depends on the part]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub part_seconds: Option<u64>,
    /// Write all results to a JSON file, after every part
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Skip the parts that have passed in an earlier check; FILE is the --report of that check
    #[arg(long = "continue", value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Run one part in this process, and print its results as messages
    #[arg(long, value_name = "PART", group = "task", hide = true)]
    pub run_part: Option<String>,
    /// Log the launches of the part in this file
    #[arg(long, value_name = "FILE", requires = "run_part", hide = true)]
    pub launch_log: Option<PathBuf>,
    /// Run the part as rank 1, which shares the memory in this file with rank 0
    #[arg(long, value_name = "FILE", requires = "run_part", hide = true)]
    pub rank_memory: Option<PathBuf>,
    /// Print a JSON list of the models whose training is timed
    #[arg(long, group = "task")]
    pub models: bool,
    /// Time the training of model N of the list of --models, counted from 0; print the result as
    /// JSON
    #[arg(long, value_name = "N", group = "task")]
    pub model: Option<usize>,
    /// Print the time of each operation in a training step of model N of the list of --models
    #[arg(long, value_name = "N", group = "task")]
    pub profile: Option<usize>,
}
