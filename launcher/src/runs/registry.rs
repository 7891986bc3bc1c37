//! Records the runs of this user in a state directory, and determines which runs are active and how
//! the others ended.
use super::{atomic_file::write_atomically, process_identity::ProcessIdentity};
use crate::{
    clock::read_unix_time_ms,
    plan::{MAX_WORKERS, Plan},
    private_files::{create_or_truncate_private_file, create_private_dir, identify_file, open_own_file},
};
use jobspec::env;
use protocol::{control::BatchJobRecord, event::Event};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// The version of the format of `run.json`, the file in a run directory that describes the run and
/// its controller.
const RECORD_VERSION: u32 = 1;
/// The name of the file in a run directory to which the controller writes the events of the run
/// (the journal).
pub(crate) const JOURNAL_FILE: &str = "events.jsonl";
/// The largest size, in bytes, of a valid `run.json`, the file that describes a run and its
/// controller. A longer file is not a valid record.
const MAX_RECORD_BYTES: u64 = 256 << 10;
/// The largest number of attempts to read a valid `run.json`, because a controller may be replacing
/// this file during a read. A controller that takes over a run replaces the file, and a file that
/// is being replaced looks like that of another run.
const MAX_RECORD_READS: usize = 3;
/// The longest run ID, in bytes, that is accepted in `run.json`, the file that describes a run.
const MAX_ID_BYTES: usize = 128;
/// The longest job name, in bytes, that is accepted in `run.json`, the file that describes a run.
const MAX_NAME_BYTES: usize = 128;
/// The longest host name or boot id, in bytes, that is accepted in `run.json`. Host names have at
/// most 253 bytes.
const MAX_HOST_BYTES: usize = 255;
/// The longest path of a run directory, in bytes, that is accepted in `run.json`.
const MAX_RUN_DIR_BYTES: usize = libc::PATH_MAX as usize;
/// The largest number of runs that the state directory of this user lists, each as a link to the
/// run's `run.json`. The links of the oldest ended runs are removed first.
const MAX_RECORDS: usize = 500;
/// The largest number of entries of one directory that are read when runs are searched.
const MAX_DIR_ENTRIES: usize = 10_000;
/// The largest number of `run.json` files that are read when runs are searched. Others are ignored.
const MAX_READ_RECORDS: usize = 20_000;
/// The time that is added to `run.controller_timeout` before a run without a controller counts as
/// lost. The margin is needed because a controller updates the modification time of its journal
/// only from time to time.
const UNATTENDED_MARGIN: Duration = Duration::from_secs(60);
/// The number of bytes that are read from the end of a run's journal (its file of events) to find
/// the last optimizer step.
const JOURNAL_TAIL_BYTES: u64 = 256 << 10;

/// The content of `run.json`, the file in a run directory that describes the run and the process
/// that controls it, without the command line of the run, which [`read_command`] reads. A command
/// line may have many thousand bytes, and the records of all runs are in memory together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// The format version of the record, which is the [`RECORD_VERSION`] of the version of launch
    /// that wrote the record.
    pub(crate) version: u32,
    /// The ID of the run.
    pub(crate) run: String,
    /// The name of the job.
    pub(crate) name: String,
    /// The absolute path of the run directory.
    pub(crate) run_dir: PathBuf,
    /// The number of workers in the first attempt of the run (the world size).
    pub(crate) world: u32,
    /// The start of the run, in milliseconds since 1970.
    pub(crate) began_ms: u64,
    /// How long the workers continue when the controller is lost, in milliseconds; `None` if they
    /// end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) controller_timeout_ms: Option<u64>,
    /// The batch job that started the run; `None` if no scheduler did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) batch_job: Option<BatchJobRecord>,
    /// The controller's process.
    #[serde(rename = "by")]
    pub(crate) controller: ProcessIdentity,
}

/// The content of `run.json` in the form in which it is written.
#[derive(Serialize)]
struct RecordFile<'a> {
    #[serde(flatten)]
    record: &'a RunRecord,
    command: &'a [String],
}

/// The part of the content of `run.json` that [`read_command`] returns.
#[derive(Default, Deserialize)]
struct RecordedCommand {
    /// The command line that started the run.
    command: Vec<String>,
}

/// A run (execution of a job) of this user: its description, its current state and its last
/// optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    /// The content of the run's `run.json`.
    pub(crate) record: RunRecord,
    /// Whether the run is active, or how it ended.
    pub(crate) state: RunState,
    /// The last optimizer step that the journal records; `None` before the first step.
    pub(crate) step: Option<u64>,
}

/// The state of a run: running, without a controller, controlled from another machine, ended, or
/// lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RunState {
    /// The controller's process exists on this machine.
    Running,
    /// The journal records the end of the run, with exit code and duration in seconds.
    Ended(u8, f64),
    /// The controller was started on another machine. The journal records no end.
    Elsewhere,
    /// The controller was started on this machine and has ended, but the workers may continue
    /// without it. The journal records no end.
    Unattended,
    /// The controller was started on this machine and has ended, no workers can continue without
    /// it, and the journal records no end.
    Lost(RunLossReason),
}

/// The reason why a run is lost, which means that its controller ended without recording the end of
/// the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunLossReason {
    /// The controller ended without recording an end, for example because it was killed.
    ControllerDied,
    /// The machine was restarted after the start of the controller.
    HostRebooted,
}

/// Writes `run.json`, which names this process as the controller of a new run, and adds the run to
/// the user's list of runs. Removes the oldest links of other runs if there are too many.
/// `controller_timeout_ms` is how long the workers continue when the controller is lost.
/// `batch_job` is the batch job that started the run.
pub(crate) fn register_run(
    plan: &Plan,
    name: &str,
    command: &[String],
    controller_timeout_ms: Option<u64>,
    batch_job: Option<BatchJobRecord>,
) -> io::Result<()> {
    let record = RunRecord {
        version: RECORD_VERSION,
        run: plan.run.0.clone(),
        name: name.to_owned(),
        run_dir: plan.run_dir.clone(),
        world: plan.world,
        began_ms: read_unix_time_ms(),
        controller_timeout_ms,
        batch_job,
        controller: ProcessIdentity::current()?,
    };
    write_record(&record, command)
}

/// Records in `run.json` that this process is now the controller of a run, which it has taken over
/// from a lost controller.
pub(crate) fn register_takeover(run_dir: &Path) -> io::Result<()> {
    let record = read_record(&run_dir.join("run.json"));
    let record = record.ok_or_else(|| io::Error::other("the run directory has no valid `run.json`"))?;
    let command = read_command(&record);
    write_record(&RunRecord { controller: ProcessIdentity::current()?, ..record }, &command)
}

/// Reads the command line that started a run from `run.json`. Returns an empty list if the file is
/// no longer readable or has no command line.
pub(crate) fn read_command(record: &RunRecord) -> Vec<String> {
    let read = open_own_file(&record.run_dir.join("run.json")).and_then(|file| {
        let mut bytes = Vec::new();
        file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes)?;
        Ok(serde_json::from_slice::<RecordedCommand>(&bytes)?)
    });
    read.unwrap_or_default().command
}

/// Writes a run's description and command line to `run.json` in its run directory, and links this
/// file from the directory that lists this user's runs. Removes the oldest links of other runs if
/// there are too many.
fn write_record(record: &RunRecord, command: &[String]) -> io::Result<()> {
    let bytes = serde_json::to_vec_pretty(&RecordFile { record, command })?;
    write_atomically(&record.run_dir, "run.json", &bytes)?;
    let Some(directory) = resolve_state_dir() else { return Ok(()) };
    create_private_dir(&directory)?;
    remove_old_records(&directory);
    // After the removal of the run directory, the symbolic link dangles and leaves no stale record.
    match symlink(record.run_dir.join("run.json"), directory.join(format!("{}.json", record.run))) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        created => created,
    }
}

/// Returns the path of the directory in which this user's runs are listed, as links to their
/// `run.json` files. Returns `None` if neither `XDG_STATE_HOME` nor `HOME` is an absolute path.
fn resolve_state_dir() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute(env::XDG_STATE_HOME).or_else(|| Some(absolute(env::HOME)?.join(".local/state")));
    state.map(|state| state.join("launch/runs"))
}

/// Removes links to the oldest runs from `directory`, the list of this user's runs, so that fewer
/// than [`MAX_RECORDS`] links remain. Keeps the links of active runs. The names of links sort by
/// the start time of the run.
fn remove_old_records(directory: &Path) {
    let mut names = list_json_files(directory);
    names.sort_unstable();
    let excess = names.len().saturating_sub(MAX_RECORDS - 1);
    for file in &names[..excess] {
        if read_record(file).is_none_or(|record| !record.controller.is_alive()) {
            // Another controller may remove the same link.
            _ = fs::remove_file(file);
        }
    }
}

/// Returns the paths of the files in a directory whose names end with `.json` and do not begin with
/// a dot.
fn list_json_files(directory: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(directory).into_iter().flatten().flatten().take(MAX_DIR_ENTRIES).map(|e| e.path());
    let visible = |path: &PathBuf| path.file_name().is_some_and(|n| !n.to_string_lossy().starts_with('.'));
    entries.filter(|path| path.extension().is_some_and(|e| e == "json") && visible(path)).collect()
}

/// Returns all runs of this user's state directory and of the directory `runs` below `base`, from
/// the newest to the oldest run. Skips unreadable records.
pub(crate) fn list_runs(base: &Path) -> Vec<Run> {
    let mut records: BTreeMap<String, RunRecord> = BTreeMap::new();
    let linked = resolve_state_dir().map(|d| list_json_files(&d)).unwrap_or_default();
    let children = |dir: PathBuf| {
        fs::read_dir(dir).into_iter().flatten().flatten().take(MAX_DIR_ENTRIES).map(|entry| entry.path())
    };
    let local = children(base.join("runs")).flat_map(children).map(|run| run.join("run.json"));
    let files = linked.into_iter().chain(local).take(MAX_READ_RECORDS);
    for record in files.filter_map(|file| read_record(&file)) {
        records.entry(record.run.clone()).or_insert(record);
    }
    let mut runs: Vec<Run> = records.into_values().map(load_run).collect();
    runs.sort_unstable_by(|a, b| (b.record.began_ms, &b.record.run).cmp(&(a.record.began_ms, &a.record.run)));
    runs
}

/// Returns the description and the state of the run with the run directory `directory`, from its
/// `run.json` and its journal. Returns `None` if the directory has no valid `run.json`.
pub(crate) fn load_run_in_directory(directory: &Path) -> Option<Run> {
    read_record(&directory.join("run.json")).map(load_run)
}

/// Reads `run.json`, the description of a run and its controller, at the path `file`. Returns
/// `None` if the file is unreadable or invalid, has another version than [`RECORD_VERSION`], does
/// not belong to this user, or names the run directory of another record.
fn read_record(file: &Path) -> Option<RunRecord> {
    (0..MAX_RECORD_READS).find_map(|_| read_record_once(file))
}

/// Tries once to read `run.json`, the description of a run and its controller, at the path `file`.
/// Returns `None` for the reasons for which [`read_record`] does, and if the file is replaced while
/// it is read.
fn read_record_once(file: &Path) -> Option<RunRecord> {
    let (mut bytes, opened) = (Vec::new(), open_own_file(file).ok()?);
    let identity = identify_file(&opened.metadata().ok()?);
    opened.take(MAX_RECORD_BYTES).read_to_end(&mut bytes).ok()?;
    let record = parse_run_record(&bytes)?;
    let in_run_dir = fs::metadata(record.run_dir.join("run.json"));
    let is_of_run = in_run_dir.is_ok_and(|metadata| identify_file(&metadata) == identity);
    is_of_run.then_some(record)
}

/// Parses the text of `run.json`, the description of a run and its controller, and checks its
/// version and the lengths of its values. Returns `None` if the text is invalid, has another
/// version than [`RECORD_VERSION`], or has values that no controller writes: the ID is part of file
/// names, the path of the run directory is absolute, and the number of workers is limited.
pub(crate) fn parse_run_record(text: &[u8]) -> Option<RunRecord> {
    let record: RunRecord = serde_json::from_slice(text).ok()?;
    let is_id_character = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let is_id = (1..=MAX_ID_BYTES).contains(&record.run.len()) && record.run.chars().all(is_id_character);
    let is_valid = record.version == RECORD_VERSION
        && is_id
        && record.name.len() <= MAX_NAME_BYTES
        && (1..=MAX_WORKERS).contains(&record.world)
        && record.batch_job.as_ref().is_none_or(BatchJobRecord::has_valid_lengths)
        && [&record.controller.host, &record.controller.boot].iter().all(|text| text.len() <= MAX_HOST_BYTES)
        && record.run_dir.as_os_str().len() <= MAX_RUN_DIR_BYTES
        && record.run_dir.is_absolute();
    is_valid.then_some(record)
}

/// Determines the state and the last step of a run, from the process of its controller and its
/// journal (file of events).
pub(crate) fn load_run(record: RunRecord) -> Run {
    let alive = record.controller.is_alive();
    let journal = read_journal_end(&record.run_dir.join(JOURNAL_FILE), alive);
    let step = journal.step;
    let end = journal.end.or_else(|| read_recorded_run_end(&record.run));
    let may_continue = record.controller_timeout_ms.is_some_and(|timeout_ms| {
        let limit = Duration::from_millis(timeout_ms) + UNATTENDED_MARGIN;
        journal.modified.is_some_and(|at| at.elapsed().map_or(true, |age| age < limit))
    });
    let state = match end {
        _ if alive => RunState::Running,
        Some((code, seconds)) => RunState::Ended(code, seconds),
        None if !record.controller.is_on_this_host() => RunState::Elsewhere,
        None if may_continue => RunState::Unattended,
        None if !record.controller.is_on_this_boot() => RunState::Lost(RunLossReason::HostRebooted),
        None => RunState::Lost(RunLossReason::ControllerDied),
    };
    Run { record, state, step }
}

/// What the last part of a run's journal (its file of events) shows: the last optimizer step, how
/// the run ended, and when the file last changed.
#[derive(Debug, Default, PartialEq)]
struct JournalEnd {
    /// The last optimizer step; `None` if the end of the journal records none.
    step: Option<u64>,
    /// The exit code and the duration in seconds, if the journal records the end of the run.
    end: Option<(u8, f64)>,
    /// The time at which a controller last used the journal.
    modified: Option<SystemTime>,
}

/// Reads the last step and the end of a run from the last part of its journal (its file of events).
/// A run that is active (`is_active`) has no end.
fn read_journal_end(journal: &Path, is_active: bool) -> JournalEnd {
    let mut bytes = Vec::new();
    let read = open_own_file(journal).and_then(|mut file| {
        let metadata = file.metadata()?;
        file.seek(SeekFrom::Start(metadata.len().saturating_sub(JOURNAL_TAIL_BYTES)))?;
        file.take(JOURNAL_TAIL_BYTES).read_to_end(&mut bytes)?;
        metadata.modified()
    });
    let mut journal = JournalEnd { modified: read.ok(), ..JournalEnd::default() };
    // The newest lines are the last ones, and usually few of them are needed.
    for line in String::from_utf8_lossy(&bytes).lines().rev() {
        match Event::from_json(line) {
            Ok(Event::Step { step, .. } | Event::Checkpoint { step, .. }) => {
                journal.step = journal.step.or(Some(step));
            }
            Ok(Event::Done { exit_code, seconds, step }) => {
                journal.step = journal.step.or(step);
                journal.end = journal.end.or(Some((exit_code, seconds)));
            }
            _ => {}
        }
        if journal.step.is_some() && (is_active || journal.end.is_some()) {
            break;
        }
    }
    journal
}

/// Returns the path of the file in which the end of the run `run` is stored if its journal (file of
/// events) was not writable.
fn resolve_run_end_path(run: &str) -> Option<PathBuf> {
    Some(resolve_state_dir()?.join(format!("{run}.end")))
}

/// Writes the exit code and duration, in seconds, of a run to this user's state directory instead
/// of the run's journal (file of events).
pub(crate) fn record_run_end_outside_journal(run: &str, exit_code: u8, seconds: f64) -> io::Result<()> {
    let file = resolve_run_end_path(run).ok_or_else(|| io::Error::other("there is no state directory"))?;
    create_private_dir(file.parent().unwrap_or(Path::new("/")))?;
    create_or_truncate_private_file(&file)?.write_all(&serde_json::to_vec(&(exit_code, seconds))?)
}

/// Reads the exit code and duration, in seconds, that this user's state directory stores for a run
/// whose journal was not writable.
fn read_recorded_run_end(run: &str) -> Option<(u8, f64)> {
    let mut bytes = Vec::new();
    open_own_file(&resolve_run_end_path(run)?).ok()?.take(MAX_RECORD_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a record of run `r` of job `n` with this run directory and controller.
    fn make_record(run_dir: &Path, controller: ProcessIdentity) -> RunRecord {
        RunRecord {
            version: RECORD_VERSION,
            run: "r".into(),
            name: "n".into(),
            run_dir: run_dir.into(),
            world: 1,
            began_ms: 5,
            controller_timeout_ms: None,
            batch_job: None,
            controller,
        }
    }

    #[test]
    fn the_state_follows_from_the_process_and_the_journal() {
        let dir = tempfile::tempdir().expect("a directory");
        let this = ProcessIdentity::current().expect("this process");
        let gone = this.with_other_start();
        let state = |controller: &ProcessIdentity| load_run(make_record(dir.path(), controller.clone()));
        assert_eq!(state(&this).state, RunState::Running);
        assert_eq!(state(&gone).state, RunState::Lost(RunLossReason::ControllerDied));
        assert_eq!(state(&this.with_other_boot()).state, RunState::Lost(RunLossReason::HostRebooted));
        assert_eq!(state(&this.with_other_host()).state, RunState::Elsewhere);
        let continues =
            RunRecord { controller_timeout_ms: Some(60_000), ..make_record(dir.path(), gone.clone()) };
        fs::write(dir.path().join("events.jsonl"), "").expect("a journal");
        assert_eq!(load_run(continues.clone()).state, RunState::Unattended);
        let journal =
            fs::File::options().append(true).open(dir.path().join("events.jsonl")).expect("a journal");
        let long_ago = SystemTime::now() - UNATTENDED_MARGIN - Duration::from_secs(61);
        journal.set_modified(long_ago).expect("modified");
        assert_eq!(load_run(continues).state, RunState::Lost(RunLossReason::ControllerDied));
        let journal =
            "{\"event\":\"done\",\"exit_code\":143,\"step\":7,\"seconds\":2.5,\"time\":1}\n{\"event\":\"st";
        fs::write(dir.path().join("events.jsonl"), journal).expect("a journal");
        let run = state(&gone);
        assert_eq!((run.state, run.step), (RunState::Ended(143, 2.5), Some(7)));
        assert_eq!(state(&this.with_other_host()).state, RunState::Ended(143, 2.5));
    }

    #[test]
    fn runs_below_a_directory_are_listed_and_damaged_records_are_skipped() {
        let dir = tempfile::tempdir().expect("a directory");
        let run_dir = dir.path().join("runs/job/r");
        fs::create_dir_all(&run_dir).expect("a directory");
        fs::create_dir_all(dir.path().join("runs/job/other")).expect("a directory");
        fs::write(dir.path().join("runs/job/other/run.json"), "{\"version\": 1").expect("a file");
        let expected = make_record(&run_dir, ProcessIdentity::current().expect("this process"));
        let command = vec!["launch".to_owned(), "job.yaml".to_owned()];
        let bytes = serde_json::to_vec(&RecordFile { record: &expected, command: &command }).expect("JSON");
        fs::write(run_dir.join("run.json"), bytes).expect("a file");
        assert_eq!(read_command(&expected), command);
        let listed: Vec<RunRecord> =
            list_runs(dir.path()).into_iter().map(|r| r.record).filter(|e| e.run == "r").collect();
        assert_eq!(listed, std::slice::from_ref(&expected));
        assert_eq!(load_run_in_directory(&run_dir).map(|r| r.record), Some(expected));
    }

    /// Checks that `run.json` files that another user, or the author of an archive, put below the
    /// current directory are skipped, and that pipes in place of such files do not block.
    #[test]
    fn planted_records_are_skipped_and_never_block() {
        let dir = tempfile::tempdir().expect("a directory");
        let make_run = |name: &str| {
            let run_dir = dir.path().join("runs/job").join(name);
            fs::create_dir_all(&run_dir).expect("a directory");
            run_dir
        };
        let this = ProcessIdentity::current().expect("this process");
        let write = |run_dir: &Path, record: &RunRecord| {
            fs::write(run_dir.join("run.json"), serde_json::to_vec(record).expect("JSON")).expect("a file");
        };
        let real = make_run("real");
        let record = make_record(&real, this);
        write(&real, &RunRecord { run: "real".into(), ..record.clone() });
        // A record that names the directory of another run.
        write(&make_run("copied"), &RunRecord { run: "copied".into(), ..record.clone() });
        let pipe = make_run("pipe");
        nix::unistd::mkfifo(&pipe.join("run.json"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        fs::create_dir(make_run("directory").join("run.json")).expect("a directory");
        let (open, other) = (make_run("open"), make_run("other"));
        write(&open, &RunRecord { run: "open".into(), run_dir: open.clone(), ..record.clone() });
        let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(open.join("run.json"), everybody).expect("changed");
        let mut expected = vec!["real"];
        write(&other, &RunRecord { run: "other".into(), run_dir: other.clone(), ..record });
        match nix::unistd::geteuid().is_root() {
            true => std::os::unix::fs::chown(other.join("run.json"), Some(65_534), None).expect("given away"),
            false => expected.insert(0, "other"),
        }
        // The journal of a listed run may be a pipe, too.
        nix::unistd::mkfifo(&real.join(JOURNAL_FILE), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let of_base = list_runs(dir.path()).into_iter().filter(|r| r.record.run_dir.starts_with(dir.path()));
        let mut names: Vec<String> = of_base.map(|r| r.record.run).collect();
        names.sort_unstable();
        assert_eq!(names, expected);
        assert!(load_run_in_directory(&pipe).is_none());
    }

    /// Checks the names of the members of `run.json`, which other versions of launch read.
    #[test]
    fn the_names_in_a_record_are_stable() {
        let controller = ProcessIdentity { host: "h".into(), boot: "b".into(), pid: 7, start_ticks: 9 };
        let record = make_record(Path::new("/r"), controller);
        let json = serde_json::to_value(RecordFile { record: &record, command: &[] }).expect("JSON");
        let expected = serde_json::json!({
            "version": 1, "run": "r", "name": "n", "run_dir": "/r", "world": 1, "began_ms": 5, "command": [],
            "by": {"host": "h", "boot": "b", "pid": 7, "started": 9},
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn the_batch_job_of_a_record_is_read_back_and_its_length_is_limited() {
        let this = ProcessIdentity::current().expect("this process");
        let read_back = |id: String| {
            let batch_job = BatchJobRecord { id, label: "Slurm job 7".into(), restarts: Some(2) };
            let record =
                RunRecord { batch_job: Some(batch_job), ..make_record(Path::new("/r"), this.clone()) };
            let read = parse_run_record(&serde_json::to_vec(&record).expect("JSON"));
            (read.clone(), read == Some(record))
        };
        assert!(read_back("slurm:c:7".into()).1);
        for id in [String::new(), "x".repeat(4096)] {
            assert_eq!(read_back(id).0, None);
        }
    }

    #[test]
    fn the_values_of_a_record_have_limited_lengths() {
        let this = ProcessIdentity::current().expect("this process");
        let is_accepted =
            |record: RunRecord| parse_run_record(&serde_json::to_vec(&record).expect("JSON")).is_some();
        let record = make_record(Path::new("/r"), this.clone());
        let long = "x".repeat(MAX_RUN_DIR_BYTES);
        assert!(is_accepted(record.clone()));
        let controllers = [
            ProcessIdentity { host: long.clone(), ..this.clone() },
            ProcessIdentity { boot: long.clone(), ..this },
        ];
        for controller in controllers {
            assert!(!is_accepted(RunRecord { controller, ..record.clone() }));
        }
        assert!(!is_accepted(RunRecord { name: long.clone(), ..record.clone() }));
        assert!(!is_accepted(RunRecord { run_dir: Path::new("/").join(long), ..record }));
    }

    #[test]
    fn the_last_step_and_the_end_are_found_in_any_order() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join(JOURNAL_FILE);
        let step = |step: u64| {
            format!(
                "{{\"event\":\"checkpoint\",\"step\":{step},\"path\":\"/c\",\"bytes\":1,\"seconds\":1,\"time\":1}}\n"
            )
        };
        let done = |step: &str| {
            format!("{{\"event\":\"done\",\"exit_code\":3,\"step\":{step},\"seconds\":2.5,\"time\":1}}\n")
        };
        let (end, no_end) = (Some((3, 2.5)), None);
        for (journal, expected) in [
            (step(1) + &step(2), (Some(2), no_end)),
            (step(1) + &done("4") + "{", (Some(4), end)),
            (step(1) + &done("null"), (Some(1), end)),
            (step(1) + &done("4") + &step(5), (Some(5), end)),
            (String::new(), (None, no_end)),
        ] {
            fs::write(&file, &journal).expect("a journal");
            let found = read_journal_end(&file, false);
            assert_eq!((found.step, found.end), expected, "{journal}");
            assert_eq!(read_journal_end(&file, true).step, expected.0, "{journal}");
        }
    }

    #[test]
    fn old_records_are_removed_unless_the_run_is_active() {
        let dir = tempfile::tempdir().expect("a directory");
        let this = ProcessIdentity::current().expect("this process");
        for i in 0..MAX_RECORDS + 3 {
            let controller = if i == 0 { this.clone() } else { this.with_other_start() };
            let run_dir = dir.path().join(format!("run-{i}"));
            fs::create_dir(&run_dir).expect("a directory");
            let bytes = serde_json::to_vec(&make_record(&run_dir, controller)).expect("JSON");
            fs::write(run_dir.join("run.json"), bytes).expect("a file");
            symlink(run_dir.join("run.json"), dir.path().join(format!("2026-{i:05}.json"))).expect("a link");
        }
        remove_old_records(dir.path());
        let remaining = list_json_files(dir.path());
        assert_eq!(remaining.len(), MAX_RECORDS);
        assert!(remaining.contains(&dir.path().join("2026-00000.json")), "it is active");
        assert!(!remaining.contains(&dir.path().join("2026-00003.json")));
    }
}
