//! The runs of this user: which there are, which go on, how the others ended.
//!
//! Each controller writes who it is into `run.json` in its run directory, and links it by the run's name from the user's
//! state directory (`$XDG_STATE_HOME/launch/runs`). Nobody needs to take it away: a process is known by its pid and the moment
//! it started, so that what a killed controller left is told from a running one.
mod choose;
mod process;

pub(crate) use choose::{Wanted, choose};
pub(crate) use process::{Handle, Me};

use crate::{controller::write_whole, plan::Plan};
use contract::{env, event::Event};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// Version of `run.json`.
const VERSION: u32 = 1;
/// Largest `run.json`, bytes.
const MOST_BYTES: u64 = 256 << 10;
/// Runs that are remembered; of older ones only their directories are left.
const KEPT: usize = 500;
/// Entries of a directory that are looked at.
const MOST_ENTRIES: usize = 10_000;
/// The end of a journal that is read for the last event, bytes.
const LAST_BYTES: u64 = 256 << 10;

/// `run.json`: who runs a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) version: u32,
    pub(crate) run: String,
    pub(crate) name: String,
    /// Absolute.
    pub(crate) run_dir: PathBuf,
    pub(crate) world: u32,
    /// Milliseconds since 1970.
    pub(crate) began_ms: u64,
    /// What was typed.
    pub(crate) command: Vec<String>,
    /// The controller.
    pub(crate) by: Me,
}

/// A run and what has become of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) entry: Entry,
    pub(crate) state: State,
    /// The last step of training that was told.
    pub(crate) step: Option<u64>,
}

/// What has become of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum State {
    Running,
    /// With this exit code after these seconds.
    Ended(u8, f64),
    /// It began on another machine and hasn't told its end.
    Elsewhere,
    /// Its controller is gone without a word: killed, or the machine went down.
    Lost,
}

/// Writes down that this process runs the plan.
pub(crate) fn register(plan: &Plan, name: &str, command: &[String]) -> io::Result<()> {
    let entry = Entry {
        version: VERSION,
        run: plan.run.0.clone(),
        name: name.to_owned(),
        run_dir: plan.run_dir.clone(),
        world: plan.world,
        began_ms: crate::agent::times::now_ms(),
        command: command.to_vec(),
        by: Me::find()?,
    };
    let bytes = serde_json::to_vec_pretty(&entry)?;
    write_whole(&plan.run_dir, "run.json", &bytes)?;
    let Some(directory) = directory() else { return Ok(()) };
    fs::create_dir_all(&directory)?;
    forget_old(&directory);
    // A link costs no write to disk, and leads nowhere when the run's files are removed.
    symlink(plan.run_dir.join("run.json"), directory.join(format!("{}.json", plan.run.0)))
}

/// Where the list lies; `None` where this user has no home.
fn directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute(env::XDG_STATE_HOME).or_else(|| Some(absolute(env::HOME)?.join(".local/state")));
    state.map(|state| state.join("launch/runs"))
}

/// Takes the oldest entries away; names of runs sort by time.
fn forget_old(directory: &Path) {
    let mut names = json_files(directory);
    names.sort();
    let old = names.len().saturating_sub(KEPT - 1);
    for file in &names[..old] {
        if read(file).is_none_or(|entry| !entry.by.is_alive()) {
            // Another controller may have been first.
            _ = fs::remove_file(file);
        }
    }
}

fn json_files(directory: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(directory).into_iter().flatten().flatten().take(MOST_ENTRIES).map(|e| e.path());
    let visible = |path: &PathBuf| path.file_name().is_some_and(|n| !n.to_string_lossy().starts_with('.'));
    entries.filter(|path| path.extension().is_some_and(|e| e == "json") && visible(path)).collect()
}

/// Every run that the list or the directory `below` knows (as `runs/NAME/RUN`), the newest first.
pub(crate) fn list(below: &Path) -> Vec<Run> {
    let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
    let listed = directory().map(|d| json_files(&d)).unwrap_or_default();
    let inside = |dir: PathBuf| {
        fs::read_dir(dir).into_iter().flatten().flatten().take(MOST_ENTRIES).map(|entry| entry.path())
    };
    let here = inside(below.join("runs")).flat_map(inside).map(|run| run.join("run.json"));
    for entry in listed.into_iter().chain(here).filter_map(|file| read(&file)) {
        entries.entry(entry.run.clone()).or_insert(entry);
    }
    let mut runs: Vec<Run> = entries.into_values().map(look).collect();
    runs.sort_by(|a, b| (b.entry.began_ms, &b.entry.run).cmp(&(a.entry.began_ms, &a.entry.run)));
    runs
}

/// The run whose directory this is.
pub(crate) fn in_directory(directory: &Path) -> Option<Run> {
    read(&directory.join("run.json")).map(look)
}

/// An entry, if it is one.
fn read(file: &Path) -> Option<Entry> {
    let mut bytes = Vec::new();
    File::open(file).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let entry: Entry = serde_json::from_slice(&bytes).ok()?;
    (entry.version == VERSION && entry.run_dir.is_absolute()).then_some(entry)
}

/// Finds out what has become of a run.
pub(crate) fn look(entry: Entry) -> Run {
    let alive = entry.by.is_alive();
    let (step, done) = last_words(&entry.run_dir.join("events.jsonl"));
    let state = match done {
        _ if alive => State::Running,
        Some((code, seconds)) => State::Ended(code, seconds),
        None if !entry.by.is_of_this_machine() => State::Elsewhere,
        None => State::Lost,
    };
    Run { entry, state, step }
}

/// The last step and the end that a journal tells of.
fn last_words(journal: &Path) -> (Option<u64>, Option<(u8, f64)>) {
    let mut bytes = Vec::new();
    let read = File::open(journal).and_then(|mut file| {
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(LAST_BYTES)))?;
        file.take(LAST_BYTES).read_to_end(&mut bytes)
    });
    if read.is_err() {
        return (None, None);
    }
    let (mut step, mut done) = (None, None);
    for line in bytes.split(|b| *b == b'\n') {
        match serde_json::from_slice(line) {
            Ok(Event::Step { step: at, .. } | Event::Checkpoint { step: at, .. }) => step = Some(at),
            Ok(Event::Done { exit_code, seconds, step: at }) => {
                step = at.or(step);
                done = Some((exit_code, seconds));
            }
            _ => {}
        }
    }
    (step, done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(run_dir: &Path, by: Me) -> Entry {
        Entry {
            version: VERSION,
            run: "r".into(),
            name: "n".into(),
            run_dir: run_dir.into(),
            world: 1,
            began_ms: 5,
            command: vec![],
            by,
        }
    }

    #[test]
    fn the_state_of_a_run_is_found_out() {
        let dir = tempfile::tempdir().expect("directory");
        let me = Me::find().expect("myself");
        let gone = me.never();
        let state = |by: &Me| look(entry(dir.path(), by.clone()));
        assert_eq!(state(&me).state, State::Running);
        assert_eq!(state(&gone).state, State::Lost);
        assert_eq!(state(&me.elsewhere()).state, State::Elsewhere);
        let journal =
            "{\"event\":\"done\",\"exit_code\":143,\"step\":7,\"seconds\":2.5,\"time\":1}\n{\"event\":\"st";
        fs::write(dir.path().join("events.jsonl"), journal).expect("written");
        let run = state(&gone);
        assert_eq!((run.state, run.step), (State::Ended(143, 2.5), Some(7)));
        assert_eq!(state(&me.elsewhere()).state, State::Ended(143, 2.5));
    }

    #[test]
    fn runs_below_a_directory_are_found_and_rubbish_is_passed_over() {
        let dir = tempfile::tempdir().expect("directory");
        let run_dir = dir.path().join("runs/job/r");
        fs::create_dir_all(&run_dir).expect("directory");
        fs::create_dir_all(dir.path().join("runs/job/other")).expect("directory");
        fs::write(dir.path().join("runs/job/other/run.json"), "{\"version\": 1").expect("written");
        let me = entry(&run_dir, Me::find().expect("myself"));
        fs::write(run_dir.join("run.json"), serde_json::to_vec(&me).expect("JSON")).expect("written");
        let found: Vec<Entry> =
            list(dir.path()).into_iter().map(|r| r.entry).filter(|e| e.run == "r").collect();
        assert_eq!(found, std::slice::from_ref(&me));
        assert_eq!(in_directory(&run_dir).map(|r| r.entry), Some(me));
    }

    #[test]
    fn old_entries_are_forgotten_unless_they_run() {
        let dir = tempfile::tempdir().expect("directory");
        let me = Me::find().expect("myself");
        for i in 0..KEPT + 3 {
            let by = if i == 0 { me.clone() } else { me.never() };
            let bytes = serde_json::to_vec(&entry(dir.path(), by)).expect("JSON");
            fs::write(dir.path().join(format!("2026-{i:05}.json")), bytes).expect("written");
        }
        forget_old(dir.path());
        let left = json_files(dir.path());
        assert_eq!(left.len(), KEPT);
        assert!(left.contains(&dir.path().join("2026-00000.json")), "it runs");
        assert!(!left.contains(&dir.path().join("2026-00003.json")));
    }
}
