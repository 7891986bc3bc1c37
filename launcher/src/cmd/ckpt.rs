//! `launch ckpt`: inspects, verifies, converts and repairs checkpoints.
//!
//! No other module of the launcher reads checkpoints. Results are written to stdout, and messages
//! to stderr.
mod convert;
mod describe;
mod diff;
mod gather;
mod inspect;
mod open;
mod output;
pub(crate) mod program_resume;
mod repair;
pub(crate) mod resume_path;
mod rng;
mod verify;
mod watch;

use super::context::CommandContext;
use clap::{Args, Subcommand};

/// Arguments of `launch ckpt`.
#[derive(Debug, Args)]
pub(crate) struct CkptArgs {
    #[command(subcommand)]
    command: CkptCommand,
}

/// The subcommands of `launch ckpt`.
#[derive(Debug, Subcommand)]
enum CkptCommand {
    /// Show the contents of a checkpoint
    Inspect(inspect::InspectArgs),
    /// Check every byte of a checkpoint, or of all checkpoints in a directory; exit code 4 if one
    /// is damaged
    Verify(verify::VerifyArgs),
    /// Write full weights as a Hugging Face directory
    Gather(gather::GatherArgs),
    /// Write a checkpoint in another format, or for another ZeRO stage or world size
    Convert(convert::ConvertArgs),
    /// Compare two checkpoints of any format; exit code 1 if they differ
    Diff(diff::DiffArgs),
    /// Assign the RNG states of HF Trainer or Accelerate to another number of ranks
    Rng(rng::RngArgs),
    /// Rebuild damaged or missing files of a checkpoint from other files, in a new directory; exit
    /// code 4 if the result is not complete
    Repair(repair::RepairArgs),
    /// Report each new checkpoint in a directory, and optionally verify and gather it
    Watch(watch::WatchArgs),
}

/// Runs a subcommand of `launch ckpt` and returns the exit code.
pub(crate) fn run(args: CkptArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    run_subcommand(args.command, context.format.json)
}

/// Runs a subcommand of `launch ckpt`, such as `verify`, and returns the exit code or the error to
/// report. With `json`, the subcommand prints its result as JSON.
fn run_subcommand(command: CkptCommand, json: bool) -> diagnostic::Result<u8> {
    match command {
        CkptCommand::Inspect(args) => inspect::run(args, json),
        CkptCommand::Verify(args) => verify::run(args, json),
        CkptCommand::Gather(args) => gather::run(args, json),
        CkptCommand::Convert(args) => convert::run(args, json),
        CkptCommand::Diff(args) => diff::run(args, json),
        CkptCommand::Rng(args) => rng::run(args, json),
        CkptCommand::Repair(args) => repair::run(args, json),
        CkptCommand::Watch(args) => watch::run(args, json),
    }
}

#[cfg(test)]
mod tests;
