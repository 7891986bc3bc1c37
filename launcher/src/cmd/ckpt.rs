//! `launch ckpt`: look into checkpoints, verify them, gather their weights. The only file of the launcher that reads
//! checkpoints. stdout is data, stderr is talk.
mod convert;
mod describe;
mod diff;
mod repair;
pub(crate) mod resume;
mod rng;
mod watch;

use self::describe::{clean, human};
use crate::report::plain;
use ckpt::{CkptError, Dtype, Found, GatherOptions, Newest, VerifyReport};
use clap::{Args, Subcommand, ValueEnum};
use contract::exit;
use serde_json::Value;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Arguments of `launch ckpt`.
#[derive(Debug, Args)]
pub(crate) struct CkptArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What is in a checkpoint
    Inspect {
        /// A checkpoint (ours, or of DeepSpeed, torch, HF Trainer or Accelerate), or a directory of them: then its newest
        dir: PathBuf,
    },
    /// Check every byte of a checkpoint, or of all in a directory; exit code 4 when something is damaged
    Verify {
        /// A checkpoint, or a directory of them
        path: PathBuf,
        /// Count values that are NaN or infinite as well
        #[arg(long)]
        values: bool,
        /// Exit code 4 for warnings too: a stale `latest`, a missing random state, NaN or infinite values
        #[arg(long)]
        strict: bool,
    },
    /// Write the weights as a Hugging Face folder
    Gather {
        /// A checkpoint as for inspect, or a directory of them: then its newest
        dir: PathBuf,
        /// The folder to make
        out: PathBuf,
        /// Element type to write; without it that of the trained weights: f32, or bf16 where there are no others
        #[arg(long, value_enum)]
        dtype: Option<Precision>,
        /// A new file is begun before one would exceed this size
        #[arg(long, default_value = "5GB", value_parser = size)]
        max_shard_size: u64,
        /// Replace a folder that was made by gathering
        #[arg(long)]
        force: bool,
        /// Add low-rank adapters to the model's matrices; else a checkpoint with adapters gives a PEFT folder of them alone
        #[arg(long)]
        merge_lora: bool,
    },
    /// Write a checkpoint in another format, or for another ZeRO stage or number of ranks
    Convert(convert::ConvertArgs),
    /// What differs between two checkpoints of any formats; exit code 1 when anything does
    Diff {
        /// A checkpoint as for inspect
        a: PathBuf,
        /// Another
        b: PathBuf,
        /// Leave the optimizer's state out
        #[arg(long)]
        weights_only: bool,
    },
    /// Make the random states of HF Trainer or Accelerate fit another number of ranks
    Rng(rng::RngArgs),
    /// Rebuild what can be derived of a damaged checkpoint, in a folder beside it; exit code 4 when that isn't enough
    Repair(repair::RepairArgs),
    /// Tell each checkpoint that lands in a directory, and verify and gather it
    Watch(watch::WatchArgs),
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Precision {
    Bf16,
    Fp16,
    Fp32,
}

/// Runs `launch ckpt …`; returns the exit code.
pub(crate) fn run(args: CkptArgs, json: bool) -> u8 {
    let result = match args.command {
        Command::Inspect { dir } => inspect(&dir, json),
        Command::Verify { path, values, strict } => verify(&path, values, strict, json),
        Command::Gather { dir, out, dtype, max_shard_size, force, merge_lora } => {
            let dtype = dtype.map(|d| match d {
                Precision::Bf16 => Dtype::BF16,
                Precision::Fp16 => Dtype::F16,
                Precision::Fp32 => Dtype::F32,
            });
            gather(&dir, &out, &GatherOptions { dtype, max_shard_size, force, merge_lora }, json)
        }
        Command::Convert(args) => convert::run(&args, json),
        Command::Diff { a, b, weights_only } => diff::diff(&a, &b, weights_only, json),
        Command::Rng(args) => rng::run(args, json),
        Command::Repair(args) => repair::run(args, json),
        Command::Watch(args) => watch::run(args, json),
    };
    result.unwrap_or_else(|failure| {
        say(format_args!("error: {failure}"));
        if let Failure::Ckpt(CkptError::Damaged { path, .. } | CkptError::Missing { path, .. }) = &failure {
            say(format_args!("`launch ckpt verify {}` lists all that is wrong with it", path.display()));
        }
        failure.code()
    })
}

/// Why a command ended early.
enum Failure {
    Ckpt(CkptError),
    /// The reader of stdout is gone or full.
    Output(io::Error),
    /// Arguments that contradict each other.
    Usage(String),
}

impl Failure {
    fn code(&self) -> u8 {
        match self {
            Failure::Ckpt(e) if e.is_checkpoint_at_fault() => exit::CHECKPOINT,
            Failure::Ckpt(CkptError::Refused { .. }) | Failure::Usage(_) => exit::USAGE,
            Failure::Ckpt(_) | Failure::Output(_) => exit::FAILED,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Ckpt(e) => e.fmt(f),
            Failure::Output(e) => write!(f, "can't write to stdout: {e}"),
            Failure::Usage(why) => f.write_str(why),
        }
    }
}

impl From<CkptError> for Failure {
    fn from(e: CkptError) -> Failure {
        Failure::Ckpt(e)
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Failure {
        Failure::Output(e)
    }
}

/// A line of talk.
fn say(line: fmt::Arguments<'_>) {
    plain::say(&format!("{line}\n"));
}

/// Data.
fn print(text: &str) -> Result<(), Failure> {
    Ok(plain::data(text)?)
}

/// The checkpoint meant by a path, saying which one and what was passed over.
fn open(path: &Path) -> Result<Found, Failure> {
    let found = ckpt::find(path)?;
    match &found {
        Found::Native(newest) => {
            let Newest { checkpoint, skipped } = &**newest;
            for e in skipped {
                say(format_args!("warning: passed over: {e}"));
            }
            if checkpoint.path() != path {
                say(format_args!("using {}", checkpoint.path().display()));
            }
        }
        Found::Foreign(foreign) => {
            for warning in foreign.facts().incomplete.iter().chain(&foreign.facts().warnings) {
                say(format_args!("warning: {}", clean(warning)));
            }
            for notice in &foreign.facts().notices {
                say(format_args!("note: {}", clean(notice)));
            }
        }
    }
    Ok(found)
}

fn inspect(dir: &Path, json: bool) -> Result<u8, Failure> {
    let text = match (open(dir)?, json) {
        (Found::Native(newest), true) => format!("{}\n", describe::native_json(&newest.checkpoint)),
        (Found::Native(newest), false) => describe::native(&newest.checkpoint),
        (Found::Foreign(foreign), true) => format!("{}\n", describe::foreign_json(&foreign)),
        (Found::Foreign(foreign), false) => describe::foreign(&foreign),
    };
    print(&text)?;
    Ok(exit::DONE)
}

fn verify(path: &Path, values: bool, strict: bool, json: bool) -> Result<u8, Failure> {
    let report = ckpt::verify_with(path, ckpt::VerifyOptions { values })?;
    let sound = report.is_sound() && (!strict || report.warnings.is_empty());
    if json {
        let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
        value["sound"] = sound.into();
        print(&format!("{value}\n"))?;
    } else {
        print(&verdict(&report))?;
    }
    for warning in &report.warnings {
        let level = if strict { "error" } else { "warning" };
        say(format_args!("{level}: {}", clean(warning)));
    }
    for note in &report.notes {
        say(format_args!("note: {}", clean(note)));
    }
    Ok(if sound { exit::DONE } else { exit::CHECKPOINT })
}

/// One line per checkpoint and problem.
fn verdict(report: &VerifyReport) -> String {
    let mut text = String::new();
    for c in &report.checkpoints {
        let (path, size) = (c.path.display(), human(c.bytes));
        text.push_str(&match c.problems.len() {
            0 if !c.elsewhere.is_empty() => {
                let n = c.elsewhere.len();
                format!("partial  {path}  {} blocks, {size} sound; {n} file(s) on other hosts\n", c.blocks)
            }
            0 => format!("sound    {path}  {} blocks, {size}\n", c.blocks),
            1 => format!("DAMAGED  {path}  1 problem\n"),
            n => format!("DAMAGED  {path}  {n} problems\n"),
        });
        text.extend(c.problems.iter().map(|p| format!("         {}\n", clean(&p.to_string()))));
    }
    for p in &report.problems {
        text.push_str(&format!("DAMAGED  {}\n         {}\n", report.path.display(), clean(&p.to_string())));
    }
    text
}

fn gather(dir: &Path, out: &Path, options: &GatherOptions, json: bool) -> Result<u8, Failure> {
    let found = open(dir)?;
    let source = found.source();
    let mut progress = Progress::of("gathering");
    let gathered = ckpt::gather(source, out, options, |done, total| progress.show(done, total));
    progress.end();
    let gathered = gathered?;
    if !gathered.config {
        say(format_args!("note: the checkpoint has no config.json; put the model's own beside the weights"));
    }
    if !gathered.left_out.is_empty() {
        let names = clean(&gathered.left_out.join(", "));
        say(format_args!("note: buffers that are no floating point numbers are left out: {names}"));
    }
    if !gathered.not_finite.is_empty() {
        let names = clean(&gathered.not_finite.join(", "));
        say(format_args!("warning: NaN or infinite values are in {names}"));
    }
    let step = source.step();
    if json {
        let mut value = serde_json::to_value(&gathered).unwrap_or(Value::Null);
        value["step"] = step.into();
        print(&format!("{value}\n"))?;
    } else {
        let (tensors, files) = (gathered.tensors, gathered.files.len());
        say(format_args!(
            "{tensors} tensors of step {} as {}, {} in {files} file(s)",
            step.map_or("unknown".to_owned(), |s| s.to_string()),
            gathered.dtype,
            human(gathered.bytes)
        ));
        print(&format!("{}\n", gathered.path.display()))?;
    }
    Ok(exit::DONE)
}

/// A line on a terminal that is drawn again at most ten times a second.
struct Progress {
    doing: &'static str,
    shown: Option<Instant>,
    live: bool,
}

impl Progress {
    fn of(doing: &'static str) -> Progress {
        Progress { doing, shown: None, live: plain::live() }
    }

    fn show(&mut self, done: u64, total: u64) {
        let due = self.shown.is_none_or(|t| t.elapsed() >= Duration::from_millis(100));
        if self.live && due {
            self.shown = Some(Instant::now());
            plain::say(&format!("\r\x1b[K{} {} of {}", self.doing, human(done), human(total)));
        }
    }

    fn end(&self) {
        if self.shown.is_some() {
            plain::say("\r\x1b[K");
        }
    }
}

/// `5GB`, `500MB`, `2GiB` or a number of bytes.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size; write for example 5GB, 500MB or 2GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| wrong())?;
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
        _ => return Err(wrong()),
    };
    let bytes = number * unit as f64;
    if !(1.0..1e18).contains(&bytes) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt::Role;
    use serde_json::json;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(size("5GB"), Ok(5_000_000_000));
        assert_eq!(size("1.5 MiB"), Ok(1_572_864));
        assert_eq!(size("4096"), Ok(4096));
        for wrong in ["", "GB", "0", "5XB", "-1GB", "1e9", "nan", "99999999TB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    /// A checkpoint of step 3 with one weight of 4 elements and no optimizer state.
    pub(super) fn saved(root: &Path) -> PathBuf {
        let staging = ckpt::Staging::begin(root, 3, 16).expect("begun");
        let piece = ckpt::Piece {
            name: "w",
            role: Role::Weight,
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
        ckpt::commit(staging, facts, vec![report]).expect("complete").path
    }

    fn verify(path: PathBuf) -> Command {
        Command::Verify { path, values: false, strict: false }
    }

    #[test]
    fn warnings_fail_only_when_they_are_asked_to() {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden/hf_ddp/checkpoint-3");
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("checkpoint-3");
        std::fs::create_dir(&path).expect("made");
        for entry in std::fs::read_dir(golden).expect("there") {
            let from = entry.expect("an entry").path();
            std::fs::copy(&from, path.join(from.file_name().expect("a name"))).expect("copied");
        }
        let code = |strict| {
            let command = Command::Verify { path: path.clone(), values: true, strict };
            run(CkptArgs { command }, true)
        };
        assert_eq!((code(false), code(true)), (exit::DONE, exit::DONE), "nothing to warn of");
        std::fs::remove_file(path.join("rng_state_1.pth")).expect("removed");
        assert_eq!((code(false), code(true)), (exit::DONE, exit::CHECKPOINT));
    }

    #[test]
    fn folders_of_deepspeed_are_taken_as_well() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/ckpt/tests/golden");
        let dir = tempfile::tempdir().expect("a directory");
        let run = |command| run(CkptArgs { command }, true);
        let ckpt = golden.join("z2_frozen");
        assert_eq!(run(Command::Inspect { dir: ckpt.clone() }), exit::DONE);
        assert_eq!(run(verify(ckpt.clone())), exit::DONE);
        for kind in ["accelerate_z2", "fsdp_full", "universal", "dcp"] {
            let dir = golden.join("tiny").join(kind);
            assert_eq!(run(Command::Inspect { dir: dir.clone() }), exit::DONE, "{kind}");
            assert_eq!(run(verify(dir)), exit::DONE, "{kind}");
        }
        let (out, dtype) = (dir.path().join("out"), Some(Precision::Bf16));
        let gather = Command::Gather {
            dir: ckpt,
            out: out.clone(),
            dtype,
            max_shard_size: 1 << 30,
            force: false,
            merge_lora: false,
        };
        assert_eq!(run(gather), exit::DONE);
        assert!(out.join("model.safetensors").exists());
        // a tag without its files
        std::fs::create_dir(dir.path().join("global_step1")).expect("made");
        let lone = dir.path().join("global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt");
        std::fs::write(lone, "nothing").expect("written");
        assert_eq!(run(Command::Inspect { dir: dir.path().to_owned() }), exit::CHECKPOINT);
        assert_eq!(run(verify(dir.path().to_owned())), exit::CHECKPOINT);
    }

    /// The exit code for words as a person types them after `launch ckpt`.
    fn typed(words: &[&str]) -> u8 {
        use clap::Parser;
        #[derive(Parser)]
        struct Typed {
            #[command(flatten)]
            args: CkptArgs,
        }
        match Typed::try_parse_from(std::iter::once(&"ckpt").chain(words)) {
            Ok(typed) => run(typed.args, false),
            Err(_) => exit::USAGE,
        }
    }

    /// What has no meaning together, or no limit that can be kept, is refused before anything is read or written.
    #[test]
    fn options_that_can_not_be_had_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        saved(&root);
        let (root, out) = (root.display().to_string(), dir.path().join("out"));
        let shown = out.display().to_string();
        let convert =
            |options: &[&str]| typed(&[&["convert", root.as_str(), shown.as_str()], options].concat());
        for options in [
            &["--to", "safetensors", "--stage", "3"][..],
            &["--to", "safetensors", "--world", "2"],
            &["--to", "safetensors", "--memory", "100MB"],
            &["--to", "native", "--sub-group-size", "1000"],
            &["--to", "native", "--world", "0"],
            &["--to", "native", "--world", "65537"],
            &["--to", "native", "--memory", "1MB"],
            &["--to", "deepspeed", "--stage", "4"],
            &["--to", "deepspeed", "--sub-group-size", "0"],
            &["--to", "somewhere"],
        ] {
            assert_eq!(convert(options), exit::USAGE, "{options:?}");
            assert!(!out.exists(), "{options:?}");
        }
        assert_eq!(convert(&["--to", "native", "--world", "2"]), exit::DONE);
        let file = dir.path().join("file.pt");
        std::fs::write(&file, "no torch file").expect("written");
        let file = file.display().to_string();
        assert_eq!(typed(&["watch", &file]), exit::USAGE);
        assert_eq!(typed(&["watch", &root, "--gather", &root]), exit::USAGE);
        assert_eq!(typed(&["watch", &root, "--settle", "0"]), exit::USAGE);
        assert_eq!(typed(&["verify", &file]), exit::CHECKPOINT);
        assert_eq!(typed(&["rng", &root, "--world-size", "0"]), exit::USAGE);
        assert_eq!(typed(&["repair", &root, "--in-place", "--out", "x"]), exit::USAGE);
        assert_eq!(typed(&["diff", &root, &file]), exit::CHECKPOINT);
    }

    #[test]
    fn every_outcome_has_its_exit_code() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        let path = saved(&root);
        let out = dir.path().join("out");
        let run = |command| run(CkptArgs { command }, true);
        let gather = |dtype, force| Command::Gather {
            dir: root.clone(),
            out: out.clone(),
            dtype,
            max_shard_size: 1 << 30,
            force,
            merge_lora: false,
        };
        assert_eq!(run(Command::Inspect { dir: root.clone() }), exit::DONE);
        assert_eq!(run(verify(root.clone())), exit::DONE);
        assert_eq!(run(gather(Some(Precision::Fp16), false)), exit::FAILED, "1e6 is no fp16");
        assert_eq!(run(gather(Some(Precision::Bf16), false)), exit::DONE);
        assert_eq!(run(gather(Some(Precision::Bf16), false)), exit::USAGE, "not overwritten");
        assert_eq!(run(gather(None, true)), exit::DONE);
        std::fs::write(path.join("shard-00000-of-00001.safetensors"), "cut").expect("written");
        assert_eq!(run(verify(root.clone())), exit::CHECKPOINT);
        assert_eq!(run(Command::Inspect { dir: path }), exit::CHECKPOINT);
        assert_eq!(run(gather(None, true)), exit::CHECKPOINT);
        assert_eq!(run(Command::Inspect { dir: dir.path().join("nowhere") }), exit::CHECKPOINT);
        let report = ckpt::verify(&root).expect("there");
        let text = verdict(&report);
        assert!(text.starts_with("DAMAGED") && text.contains("it is cut short: 3 bytes of"), "{text}");
    }
}
