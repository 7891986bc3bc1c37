//! [`GpuCheckArgs`]: the arguments of `launch gpu-check`, and the type of its implementation.
use clap::Args;

/// A function that runs the check that [`GpuCheckArgs`] describes, and prints the results to
/// stdout. Returns whether all results agree with the CPU.
///
/// Crate `launcher` does not depend on crate `worker`, which implements the check. The `main`
/// function of the executable passes the implementation to [`crate::main`].
pub type RunGpuCheck = fn(GpuCheckArgs) -> diagnostic::Result<bool>;

/// Arguments of `launch gpu-check`.
#[derive(Clone, Copy, Debug, Args)]
pub struct GpuCheckArgs {
    /// Number of the GPU, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Compare only a few shapes, and measure no speeds; train no models without --tiny
    #[arg(long)]
    pub quick: bool,
    /// Train very small models, for slow GPUs
    #[arg(long)]
    pub tiny: bool,
    /// Compare operations only; train no models
    #[arg(long, group = "task")]
    pub ops: bool,
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
