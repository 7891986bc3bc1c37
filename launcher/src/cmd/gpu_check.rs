//! `launch gpu-check`: runs the same operations and small trainings on a GPU and on the CPU, and
//! compares the results.
pub(crate) mod args;

use super::context::CommandContext;
use args::GpuCheckArgs;
use protocol::exit;

/// Runs `launch gpu-check`: compares the results of operations on a GPU with those on the CPU, and
/// prints the comparison. Returns exit code 1 if a result differs.
pub(crate) fn run(args: GpuCheckArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let agrees = (context.run_gpu_check)(args)?;
    Ok(if agrees { exit::DONE } else { exit::FAILED })
}
