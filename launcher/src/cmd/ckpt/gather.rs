//! `launch ckpt gather`: writes full weights as a Hugging Face directory.
use super::{
    open::open_checkpoint,
    output::{report_to_json, run_with_progress, write_stderr_line},
};
use crate::cmd::{
    option_value::parse_size,
    output::{print_json, print_line},
};
use ckpt::{Dtype, GatherOptions};
use clap::{Args, ValueEnum};
use diagnostic::quantity::{format_bytes, format_count};
use std::path::{Path, PathBuf};

/// Arguments of `launch ckpt gather`.
#[derive(Debug, Args)]
pub(super) struct GatherArgs {
    /// Checkpoint, or directory of checkpoints (the newest is used)
    #[arg(value_name = "CHECKPOINT")]
    pub(super) dir: PathBuf,
    /// Directory to create
    pub(super) out: PathBuf,
    /// Element type to write [default: that of the trained weights, fp32 or bf16]
    #[arg(long, value_enum)]
    pub(super) dtype: Option<DtypeOption>,
    /// Largest size of a weight file
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    pub(super) max_shard_size: u64,
    /// Replace a directory that an earlier gather created
    #[arg(long)]
    pub(super) force: bool,
    /// Merge LoRA adapters into the weights [default: write the adapters only, for PEFT]
    #[arg(long)]
    pub(super) merge_lora: bool,
}

/// The element types that `--dtype` of `launch ckpt gather` can name.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum DtypeOption {
    Bf16,
    Fp16,
    Fp32,
}

impl From<DtypeOption> for Dtype {
    fn from(precision: DtypeOption) -> Dtype {
        match precision {
            DtypeOption::Bf16 => Dtype::BF16,
            DtypeOption::Fp16 => Dtype::F16,
            DtypeOption::Fp32 => Dtype::F32,
        }
    }
}

/// Runs `launch ckpt gather`: writes the full weights of a checkpoint as a Hugging Face directory,
/// and prints its path.
pub(super) fn run(args: GatherArgs, json: bool) -> diagnostic::Result<u8> {
    let GatherArgs { dir, out, dtype, max_shard_size, force, merge_lora } = args;
    let options = GatherOptions { dtype: dtype.map(Dtype::from), max_shard_size, force, merge_lora };
    write_weights(&dir, &out, &options, json)
}

/// Writes the full weights of a checkpoint to the directory `out` and prints the path. Returns the
/// exit code.
pub(super) fn write_weights(
    dir: &Path,
    out: &Path,
    options: &GatherOptions,
    json: bool,
) -> diagnostic::Result<u8> {
    let found = open_checkpoint(dir)?;
    let source = found.tensor_source();
    let report =
        run_with_progress("gathering", |progress| ckpt::gather_weights(source, out, options, progress))?;
    if !report.config {
        write_stderr_line(format_args!(
            "note: the checkpoint has no config.json; copy that of the model to the weights"
        ));
    }
    if !report.left_out.is_empty() {
        let names = report.left_out.join(", ");
        write_stderr_line(format_args!("note: buffers that are not floating point are left out: {names}"));
    }
    if !report.not_finite.is_empty() {
        let names = report.not_finite.join(", ");
        write_stderr_line(format_args!("warning: tensors with NaN or infinite values: {names}"));
    }
    let step = source.completed_steps();
    if json {
        let mut value = report_to_json(&report);
        value["step"] = step.into();
        return print_json(&value);
    }
    write_stderr_line(format_args!(
        "gathered {} of step {} as {}: {} in {}",
        format_count(report.tensors, "tensor"),
        step.map_or("unknown".to_owned(), |s| s.to_string()),
        report.dtype,
        format_bytes(report.bytes),
        format_count(report.files.len(), "file"),
    ));
    print_line(report.path.display())
}
