//! `launch ckpt inspect`: shows the contents of a checkpoint.
use super::{describe, open::open_checkpoint};
use crate::cmd::output::{print_json, print_text};
use ckpt::OpenedCheckpoint;
use clap::Args;
use std::path::PathBuf;

/// Arguments of `launch ckpt inspect`.
#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// Checkpoint of launch, DeepSpeed, torch, HF Trainer or Accelerate, or a directory of
    /// checkpoints (the newest is used)
    #[arg(value_name = "CHECKPOINT")]
    pub(super) dir: PathBuf,
}

/// Runs `launch ckpt inspect`: prints the properties and tensors of a checkpoint, without the
/// values.
pub(super) fn run(args: InspectArgs, json: bool) -> diagnostic::Result<u8> {
    match (open_checkpoint(&args.dir)?, json) {
        (OpenedCheckpoint::Native(newest), true) => {
            print_json(&describe::describe_native_as_json(&newest.checkpoint))
        }
        (OpenedCheckpoint::Native(newest), false) => {
            print_text(&describe::describe_native_as_text(&newest.checkpoint))
        }
        (OpenedCheckpoint::External(external), true) => {
            print_json(&describe::describe_external_as_json(&external))
        }
        (OpenedCheckpoint::External(external), false) => {
            print_text(&describe::describe_external_as_text(&external))
        }
    }
}
