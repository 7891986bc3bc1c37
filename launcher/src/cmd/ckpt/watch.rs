//! `launch ckpt watch`: each checkpoint that lands in a directory is told, verified and gathered.
use super::{Failure, describe::clean, print, say};
use ckpt::{CkptError, GatherOptions, Landed, Sighting, VerifyOptions, Watch};
use clap::Args;
use contract::exit;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Arguments of `launch ckpt watch`.
#[derive(Clone, Debug, Args)]
pub(super) struct WatchArgs {
    /// The directory in which checkpoints land; it needn't exist yet
    pub(super) dir: PathBuf,
    /// Verify each one, every byte
    #[arg(long)]
    pub(super) verify: bool,
    /// Write the weights of each one that is sound to OUT/NAME as a Hugging Face folder
    #[arg(long, value_name = "OUT")]
    pub(super) gather: Option<PathBuf>,
    /// Seconds without a change after which another program's checkpoint whose content is whole counts as complete
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(super) settle: u64,
    /// Seconds without a change after which one that isn't whole is given up, until it changes again
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(super) limit: u64,
}

/// Watches until a signal: 130 after SIGINT, 0 after SIGTERM. What is under way is finished first; a second signal ends
/// it at once.
pub(super) fn run(args: WatchArgs, json: bool) -> Result<u8, Failure> {
    check(&args)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::Output)?;
    let code = runtime.block_on(watch(args, json));
    // a second signal doesn't wait for what is under way
    runtime.shutdown_background();
    code
}

/// Refuses what would wait for ever, or take its own results for checkpoints.
fn check(args: &WatchArgs) -> Result<(), Failure> {
    if args.dir.is_file() {
        let why = format!("{} is a file; give the directory in which checkpoints land", args.dir.display());
        return Err(Failure::Usage(why));
    }
    let same = |out: &PathBuf| match (out.canonicalize(), args.dir.canonicalize()) {
        (Ok(out), Ok(dir)) => out == dir,
        _ => *out == args.dir,
    };
    if args.gather.as_ref().is_some_and(same) {
        let why = "--gather can't be the directory that is watched: weights have the checkpoints' names";
        return Err(Failure::Usage(why.into()));
    }
    Ok(())
}

async fn watch(args: WatchArgs, json: bool) -> Result<u8, Failure> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut watch = Watch::new(&args.dir, Duration::from_secs(args.settle), Duration::from_secs(args.limit));
    loop {
        let args = args.clone();
        let mut work = tokio::task::spawn_blocking(move || {
            let done = round(&mut watch, &args, json);
            (watch, done)
        });
        let mut ending = None;
        let (next, done) = loop {
            tokio::select! {
                result = &mut work => break result.map_err(|e| std::io::Error::other(e.to_string()))?,
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
        done?;
        watch = next;
        if let Some(code) = ending {
            return Ok(code);
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = interrupt.recv() => return Ok(exit::INTERRUPTED),
            _ = terminate.recv() => return Ok(exit::DONE),
        }
    }
}

/// One look, and what is to be done with what has landed.
fn round(watch: &mut Watch, args: &WatchArgs, json: bool) -> Result<(), Failure> {
    for sighting in watch.look(Instant::now())? {
        let event = handle(&sighting, args);
        match json {
            true => print(&format!("{event}\n"))?,
            false => print(&format!("{}\n", line(&event)))?,
        }
        for note in event["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            say(format_args!("{}", clean(note)));
        }
    }
    Ok(())
}

/// Verifies and gathers one checkpoint; what came of it. Errors end nothing: the next checkpoint may be better.
fn handle(sighting: &Sighting, args: &WatchArgs) -> Value {
    let mut event = json!({"event": "checkpoint", "path": sighting.path, "state": "complete", "notes": []});
    let mut notes: Vec<String> = Vec::new();
    match &sighting.landed {
        Landed::Complete { step, missing } => {
            event["step"] = json!(step);
            notes.extend(
                missing.iter().map(|m| format!("note: {m} is missing in {}", sighting.path.display())),
            );
        }
        Landed::Incomplete { why } => {
            event["state"] = "incomplete".into();
            event["why"] = why.as_str().into();
            return event;
        }
    }
    if args.verify {
        let problems = verified(&sighting.path, &mut notes);
        event["sound"] = problems.is_empty().into();
        if !problems.is_empty() {
            event["state"] = "damaged".into();
            event["problems"] = json!(problems);
            event["notes"] = json!(notes);
            return event;
        }
    }
    if let Some(out) = &args.gather {
        let place = out.join(sighting.path.file_name().unwrap_or_default());
        match gathered(&sighting.path, &place) {
            Ok(()) => event["gathered"] = json!(place),
            Err(CkptError::Refused { .. }) => {
                notes.push(format!("note: {} is there already", place.display()));
                event["gathered"] = json!(place);
            }
            Err(e) => event["gather_error"] = e.to_string().into(),
        }
    }
    event["notes"] = json!(notes);
    event
}

fn verified(path: &Path, notes: &mut Vec<String>) -> Vec<String> {
    match ckpt::verify_with(path, VerifyOptions { values: true }) {
        Ok(report) => {
            notes.extend(report.warnings.iter().map(|w| format!("warning: {w}")));
            report.problems().map(|(_, p)| p.to_string()).collect()
        }
        Err(e) => vec![e.to_string()],
    }
}

fn gathered(path: &Path, out: &Path) -> Result<(), CkptError> {
    let found = ckpt::find(path)?;
    ckpt::gather(found.source(), out, &GatherOptions::default(), |_, _| ()).map(drop)
}

/// The event for a person.
fn line(event: &Value) -> String {
    let text = |key: &str| event[key].as_str().map(clean).unwrap_or_default();
    let mut line = format!("{:10} {}", text("state"), text("path"));
    if let Some(step) = event["step"].as_u64() {
        line += &format!("  step {step}");
    }
    if event["sound"] == true {
        line += "  sound";
    }
    for problem in event["problems"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        line += &format!("; {}", clean(problem));
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
    use super::super::tests::saved;
    use super::*;

    #[test]
    fn what_lands_is_verified_and_gathered_and_what_is_damaged_is_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, out) = (dir.path().join("checkpoints"), dir.path().join("out"));
        let path = saved(&root);
        let args =
            WatchArgs { dir: root.clone(), verify: true, gather: Some(out.clone()), settle: 1, limit: 1 };
        let sighting =
            Sighting { path: path.clone(), landed: Landed::Complete { step: Some(3), missing: vec![] } };
        let event = handle(&sighting, &args);
        assert_eq!((&event["state"], &event["sound"]), (&json!("complete"), &json!(true)), "{event}");
        assert!(out.join("step-00000003/model.safetensors").exists());
        assert!(line(&event).contains("step 3  sound  gathered in"), "{}", line(&event));
        // again, after a restart: nothing is written over
        assert!(handle(&sighting, &args)["notes"][0].as_str().is_some_and(|n| n.contains("there already")));
        let shard = path.join("shard-00000-of-00001.safetensors");
        let mut bytes = std::fs::read(&shard).expect("read");
        *bytes.last_mut().expect("not empty") ^= 1;
        std::fs::write(&shard, bytes).expect("written");
        std::fs::remove_dir_all(&out).expect("removed");
        let event = handle(&sighting, &args);
        assert_eq!(event["state"], "damaged", "{event}");
        assert!(!out.exists() && line(&event).contains("block 0"), "{}", line(&event));
        let stuck = Sighting { path, landed: Landed::Incomplete { why: "rank 3 is missing".into() } };
        assert_eq!(handle(&stuck, &args)["state"], "incomplete");
    }
}
