//! `launch ckpt`: inspects, verifies, converts and repairs checkpoints.
//!
//! No other module of the launcher reads checkpoints. Results are written to stdout, and messages
//! to stderr.
mod convert;
mod describe;
mod diff;
mod repair;
pub(crate) mod resume;
mod rng;
mod watch;

use self::describe::format_bytes;
use super::output_error;
use crate::{
    cli::OptionValueError,
    report::{command_output, replace_all_control_characters},
};
use ckpt::{Dtype, GatherOptions, NewestCheckpoint, OpenedCheckpoint, VerifyReport};
use clap::{Args, Subcommand, ValueEnum};
use contract::exit;
use serde_json::Value;
use std::{
    fmt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

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
    Inspect {
        /// Checkpoint of launch, DeepSpeed, torch, HF Trainer or Accelerate, or a directory of
        /// checkpoints (the newest is used)
        #[arg(value_name = "CHECKPOINT")]
        dir: PathBuf,
    },
    /// Check every byte of a checkpoint, or of all checkpoints in a directory; exit code 4 on
    /// damage
    Verify {
        /// Checkpoint, or directory of checkpoints
        #[arg(value_name = "CHECKPOINT")]
        path: PathBuf,
        /// Also search for NaN and infinite values, and warn about them
        #[arg(long)]
        values: bool,
        /// Also exit with code 4 on warnings, such as an outdated `latest`, a missing RNG state or
        /// NaN values
        #[arg(long)]
        strict: bool,
    },
    /// Write full weights as a Hugging Face directory
    Gather {
        /// Checkpoint, or directory of checkpoints (the newest is used)
        #[arg(value_name = "CHECKPOINT")]
        dir: PathBuf,
        /// Directory to create
        out: PathBuf,
        /// Element type to write [default: that of the trained weights, fp32 or bf16]
        #[arg(long, value_enum)]
        dtype: Option<DtypeOption>,
        /// Largest size of a weight file
        #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
        max_shard_size: u64,
        /// Replace a directory that an earlier gather created
        #[arg(long)]
        force: bool,
        /// Merge LoRA adapters into the weights [default: write the adapters only, for PEFT]
        #[arg(long)]
        merge_lora: bool,
    },
    /// Write a checkpoint in another format, or for another ZeRO stage or world size
    Convert(convert::ConvertArgs),
    /// Compare two checkpoints of any format; exit code 1 if they differ
    Diff {
        /// First checkpoint
        a: PathBuf,
        /// Second checkpoint
        b: PathBuf,
        /// Ignore the optimizer state
        #[arg(long)]
        weights_only: bool,
    },
    /// Reconcile the RNG states of HF Trainer or Accelerate for another world size
    Rng(rng::RngArgs),
    /// Rebuild damaged or missing files of a checkpoint from other files, in a new directory; exit
    /// code 4 if the result is not complete
    Repair(repair::RepairArgs),
    /// Report each new checkpoint in a directory, and optionally verify and gather it
    Watch(watch::WatchArgs),
}

/// The element type of `--dtype`.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum DtypeOption {
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

/// Runs a subcommand of `launch ckpt` and returns the exit code. With `json`, the subcommand prints
/// its result as JSON.
pub(crate) fn run(args: CkptArgs, json: bool) -> diagnostic::Result<u8> {
    match args.command {
        CkptCommand::Inspect { dir } => run_inspect(&dir, json),
        CkptCommand::Verify { path, values, strict } => run_verify(&path, values, strict, json),
        CkptCommand::Gather { dir, out, dtype, max_shard_size, force, merge_lora } => {
            let dtype = dtype.map(Dtype::from);
            run_gather(&dir, &out, &GatherOptions { dtype, max_shard_size, force, merge_lora }, json)
        }
        CkptCommand::Convert(args) => convert::run(&args, json),
        CkptCommand::Diff { a, b, weights_only } => diff::run(&a, &b, weights_only, json),
        CkptCommand::Rng(args) => rng::run(args, json),
        CkptCommand::Repair(args) => repair::run(args, json),
        CkptCommand::Watch(args) => watch::run(args, json),
    }
}

/// Writes a message and a line end to stderr.
fn log_line(line: fmt::Arguments<'_>) {
    command_output::write_message(&format!("{line}\n"));
}

/// Writes the result of a subcommand to stdout. Fails if the write fails.
fn print_result(text: &str) -> diagnostic::Result<()> {
    command_output::write_data(text).map_err(|error| output_error(&error))
}

/// Opens the checkpoint at a path or, if the path is a directory of checkpoints, the newest usable
/// one. Logs the chosen checkpoint, its warnings, and newer checkpoints that are unusable.
fn open_checkpoint(path: &Path) -> diagnostic::Result<OpenedCheckpoint> {
    let found = ckpt::open_checkpoint(path)?;
    match &found {
        OpenedCheckpoint::Native(newest) => {
            let NewestCheckpoint { checkpoint, skipped } = &**newest;
            for error in skipped {
                log_line(format_args!("warning: skipped an unusable checkpoint: {error}"));
            }
            if checkpoint.path() != path {
                log_line(format_args!("using {}", checkpoint.path().display()));
            }
        }
        OpenedCheckpoint::External(external) => {
            for warning in external.facts().incomplete.iter().chain(&external.facts().warnings) {
                log_line(format_args!("warning: {}", replace_all_control_characters(warning)));
            }
            for notice in &external.facts().notices {
                log_line(format_args!("note: {}", replace_all_control_characters(notice)));
            }
        }
    }
    Ok(found)
}

/// Runs `launch ckpt inspect`: prints the properties and tensors of a checkpoint, without the
/// values.
fn run_inspect(dir: &Path, json: bool) -> diagnostic::Result<u8> {
    let text = match (open_checkpoint(dir)?, json) {
        (OpenedCheckpoint::Native(newest), true) => {
            format!("{}\n", describe::describe_native_as_json(&newest.checkpoint))
        }
        (OpenedCheckpoint::Native(newest), false) => describe::describe_native_as_text(&newest.checkpoint),
        (OpenedCheckpoint::External(external), true) => {
            format!("{}\n", describe::describe_external_as_json(&external))
        }
        (OpenedCheckpoint::External(external), false) => describe::describe_external_as_text(&external),
    };
    print_result(&text)?;
    Ok(exit::DONE)
}

/// Runs `launch ckpt verify`: verifies the checkpoint, or all checkpoints in the directory, at
/// `path` and prints the result.
///
/// With `values`, NaN and infinite values are counted. Returns exit code 4 if a checkpoint is
/// damaged or, with `strict`, if there are warnings.
fn run_verify(path: &Path, values: bool, strict: bool, json: bool) -> diagnostic::Result<u8> {
    let report = ckpt::verify_checkpoints_with(path, ckpt::VerifyOptions { values })?;
    let sound = report.is_sound() && (!strict || report.warnings.is_empty());
    if json {
        let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
        value["sound"] = sound.into();
        print_result(&format!("{value}\n"))?;
    } else {
        print_result(&format_verify_report(&report))?;
    }
    for warning in &report.warnings {
        let level = if strict { "error" } else { "warning" };
        log_line(format_args!("{level}: {}", replace_all_control_characters(warning)));
    }
    for note in &report.notes {
        log_line(format_args!("note: {}", replace_all_control_characters(note)));
    }
    Ok(if sound { exit::DONE } else { exit::CHECKPOINT })
}

/// Formats the report of a verification as text, with one line for each checkpoint and each
/// problem.
fn format_verify_report(report: &VerifyReport) -> String {
    let mut text = String::new();
    for c in &report.checkpoints {
        let (path, size) = (c.path.display(), format_bytes(c.bytes));
        text.push_str(&match c.problems.len() {
            0 if !c.elsewhere.is_empty() => {
                let remote = format_count(c.elsewhere.len(), "file");
                format!("partial  {path}  {} blocks, {size} sound; {remote} on other hosts\n", c.blocks)
            }
            0 => format!("sound    {path}  {} blocks, {size}\n", c.blocks),
            n => format!("DAMAGED  {path}  {}\n", format_count(n, "problem")),
        });
        text.extend(
            c.problems
                .iter()
                .map(|p| format!("         {}\n", replace_all_control_characters(&p.to_string()))),
        );
    }
    for problem in &report.problems {
        let (path, problem) = (report.path.display(), replace_all_control_characters(&problem.to_string()));
        text.push_str(&format!("DAMAGED  {path}\n         {problem}\n"));
    }
    text
}

/// Formats a count with the singular or plural of a noun: `1 file`, `2 files`.
fn format_count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Runs `launch ckpt gather`: writes the full weights of a checkpoint to `out` and prints the path.
fn run_gather(dir: &Path, out: &Path, options: &GatherOptions, json: bool) -> diagnostic::Result<u8> {
    let found = open_checkpoint(dir)?;
    let source = found.source();
    let mut progress = ProgressLine::new("gathering");
    let result = ckpt::gather_weights(source, out, options, |done, total| progress.update(done, total));
    progress.clear();
    let report = result?;
    if !report.config {
        log_line(format_args!(
            "note: the checkpoint has no config.json; copy that of the model to the weights"
        ));
    }
    if !report.left_out.is_empty() {
        let names = replace_all_control_characters(&report.left_out.join(", "));
        log_line(format_args!("note: buffers that are not floating point are left out: {names}"));
    }
    if !report.not_finite.is_empty() {
        let names = replace_all_control_characters(&report.not_finite.join(", "));
        log_line(format_args!("warning: tensors with NaN or infinite values: {names}"));
    }
    let step = source.completed_steps();
    if json {
        let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
        value["step"] = step.into();
        print_result(&format!("{value}\n"))?;
    } else {
        log_line(format_args!(
            "gathered {} of step {} as {}: {} in {}",
            format_count(report.tensors as usize, "tensor"),
            step.map_or("unknown".to_owned(), |s| s.to_string()),
            report.dtype,
            format_bytes(report.bytes),
            format_count(report.files.len(), "file"),
        ));
        print_result(&format!("{}\n", report.path.display()))?;
    }
    Ok(exit::DONE)
}

/// A line on stderr that shows the progress of an operation in bytes. The line is redrawn at most
/// ten times a second. Draws nothing if stderr is not a terminal.
struct ProgressLine {
    action: &'static str,
    drawn: Option<Instant>,
    on_terminal: bool,
}

impl ProgressLine {
    /// Creates a progress line that is not drawn yet. `action` names the operation as a present
    /// participle, such as `converting`.
    fn new(action: &'static str) -> ProgressLine {
        ProgressLine { action, drawn: None, on_terminal: command_output::stderr_is_terminal() }
    }

    /// Redraws the line with `done` of `total` bytes. Does nothing within 100 ms of the last
    /// drawing.
    fn update(&mut self, done: u64, total: u64) {
        let due = self.drawn.is_none_or(|t| t.elapsed() >= Duration::from_millis(100));
        if self.on_terminal && due {
            self.drawn = Some(Instant::now());
            let (action, done, total) = (self.action, format_bytes(done), format_bytes(total));
            command_output::write_message(&format!("\r\x1b[K{action}: {done} of {total}"));
        }
    }

    /// Erases the progress line from the terminal if the line was drawn.
    fn clear(&self) {
        if self.drawn.is_some() {
            command_output::write_message("\r\x1b[K");
        }
    }
}

/// Parses a size with an optional unit, such as `5GB`, `1.5 MiB` or `4096`. Returns the size in
/// bytes. Fails if the size is less than 1 byte or not less than 10¹⁸ bytes.
fn parse_size(text: &str) -> Result<u64, OptionValueError> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| OptionValueError::Size)?;
    let unit: u64 = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(OptionValueError::Size),
    };
    let bytes = number * unit as f64;
    if !(1.0..1e18).contains(&bytes) {
        return Err(OptionValueError::Size);
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt::TensorRole;
    use serde_json::json;

    /// Returns the exit code of a command's result. Does not print the error of a failed command.
    fn take_exit_code(result: diagnostic::Result<u8>) -> u8 {
        result.unwrap_or_else(|error| error.category().exit_code())
    }

    #[test]
    fn sizes_with_units_are_parsed() {
        assert_eq!(parse_size("5GB"), Ok(5_000_000_000));
        assert_eq!(parse_size("1.5 MiB"), Ok(1_572_864));
        assert_eq!(parse_size("4096"), Ok(4096));
        for wrong in ["", "GB", "0", "5XB", "-1GB", "1e9", "nan", "99999999TB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    /// Saves a checkpoint of step 3 in the directory `root` and returns the path of the checkpoint.
    /// The checkpoint has one weight of 4 elements and no optimizer state.
    pub(super) fn save_sample_checkpoint(root: &Path) -> PathBuf {
        let staging = ckpt::StagingDir::create(root, 3, 16).expect("begun");
        let piece = ckpt::TensorPiece {
            name: "w",
            role: TensorRole::Weight,
            start_element: 0,
            data: (&[1.0, 2.0, 3.0, 1e6][..]).into(),
        };
        let report = ckpt::write_shard(staging.path(), 0, 1, &[piece]).expect("written");
        let model = json!({
            "family": "llama", "hf_config": {}, "weights": [{"name": "w", "shape": [2, 2]}],
            "ties": [{"alias": "head", "target": "w"}],
        });
        let facts = json!({
            "step": 3, "world": 1, "stage": 2, "run_seed": 1, "tokens": 77, "program": "launch test",
            "cursor": {"epoch": 1}, "rng": null, "groups": [{"lr": 0.1}], "model": model, "tokenizer": [], "job": null,
        });
        let facts = serde_json::from_value(facts).expect("facts");
        ckpt::commit_save(staging, facts, vec![report]).expect("complete").path
    }

    /// Returns the parsed command `launch ckpt verify PATH` without options.
    fn verify_command(path: PathBuf) -> CkptCommand {
        CkptCommand::Verify { path, values: false, strict: false }
    }

    #[test]
    fn warnings_fail_the_verification_only_with_strict() {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden/hf_ddp/checkpoint-3");
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("checkpoint-3");
        std::fs::create_dir(&path).expect("made");
        for entry in std::fs::read_dir(golden).expect("a directory") {
            let from = entry.expect("an entry").path();
            std::fs::copy(&from, path.join(from.file_name().expect("a name"))).expect("copied");
        }
        let code = |strict| {
            let command = CkptCommand::Verify { path: path.clone(), values: true, strict };
            take_exit_code(run(CkptArgs { command }, true))
        };
        assert_eq!((code(false), code(true)), (exit::DONE, exit::DONE), "no warnings");
        std::fs::remove_file(path.join("rng_state_1.pth")).expect("removed");
        assert_eq!((code(false), code(true)), (exit::DONE, exit::CHECKPOINT));
    }

    #[test]
    fn external_checkpoints_are_inspected_verified_and_gathered() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden");
        let dir = tempfile::tempdir().expect("a directory");
        let run = |command| take_exit_code(run(CkptArgs { command }, true));
        let ckpt = golden.join("z2_frozen");
        assert_eq!(run(CkptCommand::Inspect { dir: ckpt.clone() }), exit::DONE);
        assert_eq!(run(verify_command(ckpt.clone())), exit::DONE);
        for kind in ["accelerate_z2", "fsdp_full", "universal", "dcp"] {
            let dir = golden.join("tiny").join(kind);
            assert_eq!(run(CkptCommand::Inspect { dir: dir.clone() }), exit::DONE, "{kind}");
            assert_eq!(run(verify_command(dir)), exit::DONE, "{kind}");
        }
        let (out, dtype) = (dir.path().join("out"), Some(DtypeOption::Bf16));
        let gather = CkptCommand::Gather {
            dir: ckpt,
            out: out.clone(),
            dtype,
            max_shard_size: 1 << 30,
            force: false,
            merge_lora: false,
        };
        assert_eq!(run(gather), exit::DONE);
        assert!(out.join("model.safetensors").exists());
        // A tag that lacks most of its files.
        std::fs::create_dir(dir.path().join("global_step1")).expect("made");
        let lone = dir.path().join("global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt");
        std::fs::write(lone, "nothing").expect("written");
        assert_eq!(run(CkptCommand::Inspect { dir: dir.path().to_owned() }), exit::CHECKPOINT);
        assert_eq!(run(verify_command(dir.path().to_owned())), exit::CHECKPOINT);
    }

    /// Parses and runs `launch ckpt` with these arguments. Returns the exit code.
    fn run_ckpt_command(words: &[&str]) -> u8 {
        use clap::Parser;
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            args: CkptArgs,
        }
        match Cli::try_parse_from(std::iter::once(&"ckpt").chain(words)) {
            Ok(cli) => take_exit_code(run(cli.args, false)),
            Err(_) => exit::USAGE,
        }
    }

    /// Checks that contradicting options and impossible limits are rejected before a file is read
    /// or written.
    #[test]
    fn contradicting_or_impossible_options_are_rejected() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        save_sample_checkpoint(&root);
        let (root, out) = (root.display().to_string(), dir.path().join("out"));
        let shown = out.display().to_string();
        let convert = |options: &[&str]| {
            run_ckpt_command(&[&["convert", root.as_str(), shown.as_str()], options].concat())
        };
        for options in [
            &["--to", "safetensors", "--stage", "3"][..],
            &["--to", "safetensors", "--world-size", "2"],
            &["--to", "safetensors", "--memory", "100MB"],
            &["--to", "native", "--sub-group-size", "1000"],
            &["--to", "native", "--world-size", "0"],
            &["--to", "native", "--world", "65537"],
            &["--to", "native", "--memory", "1MB"],
            &["--to", "deepspeed", "--stage", "4"],
            &["--to", "deepspeed", "--sub-group-size", "0"],
            &["--to", "somewhere"],
        ] {
            assert_eq!(convert(options), exit::USAGE, "{options:?}");
            assert!(!out.exists(), "{options:?}");
        }
        assert_eq!(convert(&["--to", "native", "--world-size", "2"]), exit::DONE);
        let file = dir.path().join("file.pt");
        std::fs::write(&file, "not a torch file").expect("written");
        let file = file.display().to_string();
        assert_eq!(run_ckpt_command(&["watch", &file]), exit::USAGE);
        assert_eq!(run_ckpt_command(&["watch", &root, "--gather", &root]), exit::USAGE);
        assert_eq!(run_ckpt_command(&["watch", &root, "--settle", "0"]), exit::USAGE);
        assert_eq!(run_ckpt_command(&["verify", &file]), exit::CHECKPOINT);
        assert_eq!(run_ckpt_command(&["rng", &root, "--world-size", "0"]), exit::USAGE);
        assert_eq!(run_ckpt_command(&["repair", &root, "--in-place", "--out", "x"]), exit::USAGE);
        assert_eq!(run_ckpt_command(&["diff", &root, &file]), exit::CHECKPOINT);
    }

    #[test]
    fn every_outcome_of_a_ckpt_command_has_its_exit_code() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        let path = save_sample_checkpoint(&root);
        let out = dir.path().join("out");
        let run = |command| take_exit_code(run(CkptArgs { command }, true));
        let gather = |dtype, force| CkptCommand::Gather {
            dir: root.clone(),
            out: out.clone(),
            dtype,
            max_shard_size: 1 << 30,
            force,
            merge_lora: false,
        };
        assert_eq!(run(CkptCommand::Inspect { dir: root.clone() }), exit::DONE);
        assert_eq!(run(verify_command(root.clone())), exit::DONE);
        assert_eq!(run(gather(Some(DtypeOption::Fp16), false)), exit::FAILED, "1e6 exceeds fp16");
        assert_eq!(run(gather(Some(DtypeOption::Bf16), false)), exit::DONE);
        assert_eq!(run(gather(Some(DtypeOption::Bf16), false)), exit::USAGE, "not overwritten");
        assert_eq!(run(gather(None, true)), exit::DONE);
        std::fs::write(path.join("shard-00000-of-00001.safetensors"), "cut").expect("written");
        assert_eq!(run(verify_command(root.clone())), exit::CHECKPOINT);
        assert_eq!(run(CkptCommand::Inspect { dir: path }), exit::CHECKPOINT);
        assert_eq!(run(gather(None, true)), exit::CHECKPOINT);
        assert_eq!(run(CkptCommand::Inspect { dir: dir.path().join("nowhere") }), exit::CHECKPOINT);
        let report = ckpt::verify_checkpoints(&root).expect("a directory");
        assert!(!report.is_sound());
        assert_eq!(format_verify_report(&report).split_whitespace().next(), Some("DAMAGED"));
    }
}
