//! `launch gpu-check`: compares operations and training on a GPU with the CPU.
pub(crate) mod args;

use super::context::CommandContext;
use args::GpuCheckArgs;
use protocol::exit;

/// Runs `launch gpu-check`: compares a GPU with the CPU, and prints the results. Returns exit code
/// 1 if a result differs.
pub(crate) fn run(args: GpuCheckArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let agrees = (context.run_gpu_check)(args)?;
    Ok(if agrees { exit::DONE } else { exit::FAILED })
}
