//! `launch ckpt watch`: reports each new checkpoint in a directory, and verifies and gathers the
//! checkpoint if requested.
use super::output::write_stderr_line;
use crate::{
    change_watcher::{ChangeWatcher, WatchTarget},
    cmd::output::{print_json, print_line},
};
use ckpt::{CheckpointWatch, CkptError, DirectoryReport, DirectoryStatus, GatherOptions, VerifyOptions};
use clap::Args;
use diagnostic::{Category, Diagnostic, codes::command, terminal_text::filter_line};
use protocol::exit;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// The time between two scans of the directory that `launch ckpt watch` watches, while checkpoints
/// are being written there.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// The longest time between two scans of the directory that `launch ckpt watch` watches. The scans
/// find changes that the operating system does not report.
const MAX_SCAN_INTERVAL: Duration = Duration::from_secs(10);

/// Arguments of `launch ckpt watch`.
#[derive(Clone, Debug, Args)]
pub(super) struct WatchArgs {
    /// Directory to watch, which need not exist yet
    #[arg(value_name = "DIR")]
    pub(super) dir: PathBuf,
    /// Verify every byte of each checkpoint
    #[arg(long)]
    pub(super) verify: bool,
    /// Write the weights of each sound checkpoint to OUT/NAME as a Hugging Face directory
    #[arg(long, value_name = "OUT")]
    pub(super) gather: Option<PathBuf>,
    /// Seconds without a change after which a complete external checkpoint is processed
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(super) settle: u64,
    /// Seconds without a change after which an incomplete checkpoint is reported
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(super) limit: u64,
}

/// Runs `launch ckpt watch`: watches a directory until SIGINT or SIGTERM arrives. Returns exit code
/// 130 after SIGINT and 0 after SIGTERM.
///
/// After the first signal, the command finishes the checkpoint in progress. A second signal ends
/// the command immediately.
pub(super) fn run(args: WatchArgs, json: bool) -> diagnostic::Result<u8> {
    check_options(&args)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| event_loop_error(&error))?;
    let code = runtime.block_on(watch_directory(args, json));
    // After a second signal the checkpoint in progress is abandoned.
    runtime.shutdown_background();
    code
}

/// Builds the error that `launch ckpt watch` cannot start its asynchronous runtime, which waits for
/// signals and changes.
fn event_loop_error(error: &std::io::Error) -> Diagnostic {
    Diagnostic::error(command::ASYNC_RUNTIME_FAILED, "cannot start the event loop")
        .with_category(Category::Failed)
        .with_cause(error)
}

/// Fails if `launch ckpt watch` is to watch a file instead of a directory, or to write gathered
/// weights (`--gather`) into the watched directory. Gathered weights have the name of their
/// checkpoint and thus need another directory.
fn check_options(args: &WatchArgs) -> diagnostic::Result<()> {
    if args.dir.is_file() {
        let path = args.dir.display().to_string();
        let message = format!("{path} is a file; expected a directory of checkpoints");
        return Err(Diagnostic::error(command::WATCH_DIRECTORY_INVALID, message).with_subject(path));
    }
    let is_watched = |out: &PathBuf| match (out.canonicalize(), args.dir.canonicalize()) {
        (Ok(out), Ok(dir)) => out == dir,
        _ => *out == args.dir,
    };
    if args.gather.as_ref().is_some_and(is_watched) {
        let message = "`--gather` names the watched directory, in which checkpoints have the same names";
        return Err(Diagnostic::error(command::WATCH_DIRECTORY_INVALID, message)
            .with_subject("--gather")
            .with_help("choose another directory"));
    }
    Ok(())
}

/// Scans the watched directory after each change and reports new checkpoints until SIGINT or
/// SIGTERM arrives. Returns the exit code of the command.
///
/// While a checkpoint has no status yet or the directory does not exist, the directory is scanned
/// every [`SCAN_INTERVAL`].
async fn watch_directory(args: WatchArgs, json: bool) -> diagnostic::Result<u8> {
    let handler = |kind| signal(kind).map_err(|error| event_loop_error(&error));
    let (mut interrupt, mut terminate) =
        (handler(SignalKind::interrupt())?, handler(SignalKind::terminate())?);
    let mut watcher = ChangeWatcher::start(WatchTarget::Tree(args.dir.clone()));
    let mut watch =
        CheckpointWatch::new(&args.dir, Duration::from_secs(args.settle), Duration::from_secs(args.limit));
    loop {
        let args = args.clone();
        let mut work = tokio::task::spawn_blocking(move || {
            let result = report_new_checkpoints(&mut watch, &args, json);
            (watch, result)
        });
        let mut ending = None;
        let (next, result) = loop {
            tokio::select! {
                joined = &mut work => break joined.map_err(|e| event_loop_error(&std::io::Error::other(e)))?,
                _ = interrupt.recv() => match ending.replace(exit::INTERRUPTED) {
                    Some(_) => return Ok(exit::INTERRUPTED),
                    None => continue,
                },
                _ = terminate.recv() => match ending.replace(exit::DONE) {
                    Some(_) => return Ok(exit::DONE),
                    None => continue,
                },
            }
        };
        result?;
        watch = next;
        if let Some(code) = ending {
            return Ok(code);
        }
        let limit = if watch.is_settled() { MAX_SCAN_INTERVAL } else { SCAN_INTERVAL };
        let next_change = async {
            tokio::time::sleep(SCAN_INTERVAL).await;
            watcher.wait_for_change(limit - SCAN_INTERVAL).await;
        };
        tokio::select! {
            () = next_change => {}
            _ = interrupt.recv() => return Ok(exit::INTERRUPTED),
            _ = terminate.recv() => return Ok(exit::DONE),
        }
    }
}

/// Scans the watched directory once, processes each new checkpoint, and prints an event for each.
fn report_new_checkpoints(
    watch: &mut CheckpointWatch,
    args: &WatchArgs,
    json: bool,
) -> diagnostic::Result<()> {
    for report in watch.poll(Instant::now())? {
        let event = process_checkpoint(&report, args);
        if json { print_json(&event) } else { print_line(format_event_line(&event)) }?;
        for note in event["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            write_stderr_line(format_args!("{note}"));
        }
    }
    Ok(())
}

/// Verifies and gathers one new checkpoint, as far as the options of `launch ckpt watch` request
/// this, and returns the event to print. Errors are part of the event, because the next checkpoint
/// may be usable.
fn process_checkpoint(report: &DirectoryReport, args: &WatchArgs) -> Value {
    let mut event = json!({"event": "checkpoint", "path": report.path, "state": "complete", "notes": []});
    let mut notes: Vec<String> = Vec::new();
    match &report.status {
        DirectoryStatus::Complete { step, missing } => {
            event["step"] = json!(step);
            notes.extend(missing.iter().map(|m| format!("note: {} has no {m}", report.path.display())));
        }
        DirectoryStatus::Incomplete { why } => {
            event["state"] = "incomplete".into();
            event["why"] = why.as_str().into();
            return event;
        }
    }
    if args.verify {
        let problems = verify_checkpoint(&report.path, &mut notes);
        event["sound"] = problems.is_empty().into();
        if !problems.is_empty() {
            event["state"] = "damaged".into();
            event["problems"] = json!(problems);
            event["notes"] = json!(notes);
            return event;
        }
    }
    if let Some(out) = &args.gather {
        let directory = out.join(report.path.file_name().unwrap_or_default());
        match gather_weights(&report.path, &directory) {
            Ok(()) => event["gathered"] = json!(directory),
            Err(CkptError::OutputRejected { .. }) => {
                notes.push(format!("note: {} exists already", directory.display()));
                event["gathered"] = json!(directory);
            }
            Err(error) => {
                event["gather_error"] = error.to_string().into();
                event["code"] = error.code().name().into();
            }
        }
    }
    event["notes"] = json!(notes);
    event
}

/// Verifies every byte of a checkpoint, and counts NaN and infinite values. Returns the problems
/// and appends the warnings to `notes`.
fn verify_checkpoint(path: &Path, notes: &mut Vec<String>) -> Vec<String> {
    match ckpt::verify_checkpoints_with(path, VerifyOptions { values: true }) {
        Ok(report) => {
            notes.extend(report.warnings.iter().map(|w| format!("warning: {w}")));
            report.all_problems().map(|(_, p)| p.to_string()).collect()
        }
        Err(e) => vec![e.to_string()],
    }
}

/// Writes the full weights of the checkpoint at `path` to the new directory `out` in the layout of
/// Hugging Face.
fn gather_weights(path: &Path, out: &Path) -> Result<(), CkptError> {
    let found = ckpt::open_checkpoint(path)?;
    ckpt::gather_weights(found.tensor_source(), out, &GatherOptions::default(), |_, _| ()).map(drop)
}

/// Formats the event of a processed checkpoint as a line of text: state, path and results.
fn format_event_line(event: &Value) -> String {
    let text = |key: &str| event[key].as_str().map(filter_line).unwrap_or_default();
    let mut line = format!("{:10} {}", text("state"), text("path"));
    if let Some(step) = event["step"].as_u64() {
        line += &format!("  step {step}");
    }
    if event["sound"] == true {
        line += "  sound";
    }
    for problem in event["problems"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        line += &format!("; {}", filter_line(problem));
    }
    if !event["why"].is_null() {
        line += &format!("  {}", text("why"));
    }
    if !event["gathered"].is_null() {
        line += &format!("  gathered in {}", text("gathered"));
    }
    if !event["gather_error"].is_null() {
        line += &format!("  not gathered: {}", text("gather_error"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::super::tests::save_sample_checkpoint;
    use super::*;

    #[test]
    fn sound_checkpoints_are_gathered_and_damaged_ones_are_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, out) = (dir.path().join("checkpoints"), dir.path().join("out"));
        let path = save_sample_checkpoint(&root);
        let args =
            WatchArgs { dir: root.clone(), verify: true, gather: Some(out.clone()), settle: 1, limit: 1 };
        let report = DirectoryReport {
            path: path.clone(),
            status: DirectoryStatus::Complete { step: Some(3), missing: vec![] },
        };
        let event = process_checkpoint(&report, &args);
        assert_eq!((&event["state"], &event["sound"]), (&json!("complete"), &json!(true)), "{event}");
        assert!(out.join("step-00000003/model.safetensors").exists());
        let weights = out.join("step-00000003").display().to_string();
        let line = format!("complete   {}  step 3  sound  gathered in {weights}", path.display());
        assert_eq!(format_event_line(&event), line);
        // A restart processes the checkpoint a second time and must not overwrite a file.
        let again = process_checkpoint(&report, &args);
        assert_eq!((&again["gathered"], &again["gather_error"]), (&json!(weights), &Value::Null));
        assert_eq!(again["notes"].as_array().map(Vec::len), Some(1));
        let shard = path.join("shard-00000-of-00001.safetensors");
        let mut bytes = std::fs::read(&shard).expect("read");
        *bytes.last_mut().expect("not empty") ^= 1;
        std::fs::write(&shard, bytes).expect("written");
        std::fs::remove_dir_all(&out).expect("removed");
        let event = process_checkpoint(&report, &args);
        assert_eq!(event["state"], "damaged", "{event}");
        assert_eq!(event["problems"].as_array().map(Vec::len), Some(1), "{event}");
        assert!(!out.exists());
        let incomplete =
            DirectoryReport { path, status: DirectoryStatus::Incomplete { why: "rank 3 is missing".into() } };
        assert_eq!(process_checkpoint(&incomplete, &args)["state"], "incomplete");
    }
}
