//! `launch gpu-check`: compares operations and training on a GPU with the CPU.
pub(crate) mod args;

use super::context::CommandContext;
use args::GpuCheckArgs;
use protocol::exit;

/// Runs `launch gpu-check`.
pub(crate) fn run(args: GpuCheckArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let agrees = (context.run_gpu_check)(args)?;
    Ok(if agrees { exit::DONE } else { exit::FAILED })
}
