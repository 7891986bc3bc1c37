//! [`HookDirectory`]: the directory with the hang hook (a Python module that workers load), and
//! with the files that the hook writes for the agent.
//!
//! The watchdog of an agent that was killed removes the directory. Agents without a watchdog leave
//! it, and the next agent on the host removes it.
use super::dump_path::build_dump_prefix;
use crate::{agent::progress::CollectiveActivity, private_files::open_own_file_without_links};
use jobspec::{ContainerMount, env, ids::Rank};
use protocol::{
    control::WorkerPlan,
    hang::{CollectiveEntry, GroupCounters, RankEvidence, StackFrame, ThreadState, Transfer},
};
use serde::Deserialize;
use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The number of the real-time signal that makes a process with the hang hook (a Python module)
/// write its Python stacks through Python's faulthandler.
pub(super) const STACKS_SIGNAL: i32 = 51;
/// The Python source code of the hang hook, a module that workers load so that the agent learns
/// about their collectives and stacks.
const HOOK_SOURCE: &str = include_str!("sitecustomize.py");
/// The name of the subdirectory with the hang hook's Python code inside an agent's hang hook
/// directory. Containers get it read-only.
const MODULE_DIRECTORY: &str = "python";
/// A shell script that makes Python load the hang hook, and then executes its arguments as a
/// command. It runs in the container, because the image may set `PYTHONPATH`, too.
const CONTAINER_SCRIPT: &str =
    "export PYTHONPATH=\"$LAUNCH_HANG_DIR/python${PYTHONPATH:+:$PYTHONPATH}\"; exec \"$@\"";
/// The number of collectives that torch's flight recorder keeps, as the text of the environment
/// variable that configures it.
const FLIGHT_RECORDER_ENTRIES: &str = "2000";
/// The largest file, in bytes, of a rank's hang hook (a Python module in the worker) that the agent
/// reads.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The limit on how many process groups and how many stack frames the agent keeps from one rank's
/// hang hook.
pub(super) const MAX_ITEMS_PER_RANK: usize = 64;
/// The limit on how many collectives the agent keeps from one rank: those of torch's two flight
/// recorders, for NCCL and for other backends.
pub(super) const MAX_ENTRIES_PER_RANK: usize = 2 * MAX_ITEMS_PER_RANK;
/// The length, in bytes, to which the agent truncates each text in the answer of a rank's hang hook
/// (a Python module in the worker).
pub(super) const MAX_TEXT_BYTES: usize = 400;
/// The shortest and the longest interval at which the hang hook (a Python module in each worker)
/// publishes the counters of collectives.
const PUBLISH_INTERVAL_RANGE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// The prefix of the names of agents' temporary directories that contain the hang hook (a Python
/// module for workers).
const DIRECTORY_NAME_PREFIX: &str = "launch-hang-";
/// The name of the lock file that an agent keeps locked in its directory of the hang hook (a Python
/// module for workers) while the agent uses the directory.
const LOCK_FILE: &str = "lock";
/// The age at which an unlocked directory of a hang hook (a Python module for workers) counts as
/// left behind by a killed agent. A younger one may have been created by an agent that has not yet
/// locked the file.
const ABANDONED_AGE: Duration = Duration::from_secs(60);

/// How much earlier than the real time of a write the modification time of the written file may be,
/// because kernels round modification times down.
const FILE_TIME_GRANULARITY: Duration = Duration::from_millis(20);

/// The private temporary directory of an agent that contains the hang hook (a Python module for
/// workers), and that is deleted when the value is dropped.
pub(in crate::agent) struct HookDirectory {
    path: PathBuf,
    _lock: File,
}

/// Returns the path of this agent's temporary directory for the hang hook (a Python module for
/// workers), and chooses the path at the first call. If the watchdog calls this function before it
/// forks, the watchdog and the agent know the same path.
pub(in crate::agent) fn choose_directory_path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        // Containers may share the directory for temporary files, but not their pids.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("{DIRECTORY_NAME_PREFIX}{}-{}", std::process::id(), time.as_nanos());
        std::env::temp_dir().join(name)
    })
}

impl HookDirectory {
    /// Creates the directory with the hang hook (a Python module for workers) in the system's
    /// directory for temporary files.
    pub(in crate::agent) fn create() -> io::Result<HookDirectory> {
        let path = choose_directory_path();
        remove_abandoned_directories(path.parent().unwrap_or(path), SystemTime::now());
        DirBuilder::new().mode(0o700).create(path)?;
        let directory = HookDirectory { path: path.to_owned(), _lock: lock_directory(path)? };
        if directory.path.to_str().is_none_or(|path| path.contains(':')) {
            // `PYTHONPATH` cannot contain such a path.
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let module = directory.path.join(MODULE_DIRECTORY);
        DirBuilder::new().mode(0o700).create(&module)?;
        fs::write(module.join("sitecustomize.py"), HOOK_SOURCE)?;
        Ok(directory)
    }

    /// Returns the path of the directory with the hang hook.
    pub(in crate::agent) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds the environment variables of the hang hook to a worker's environment, including
    /// `PYTHONPATH`, through which Python loads the hook. `python_path` is the value of
    /// `PYTHONPATH` without the hook.
    pub(in crate::agent) fn add_variables(
        &self,
        worker: &mut Vec<(String, String)>,
        python_path: Option<String>,
        timeout: Duration,
    ) {
        let module = self.path.join(MODULE_DIRECTORY).display().to_string();
        let path = match python_path {
            Some(rest) if !rest.is_empty() => format!("{module}:{rest}"),
            _ => module,
        };
        self.add_hook_variables(worker, timeout);
        worker.retain(|(name, _)| name != env::PYTHONPATH);
        worker.push((env::PYTHONPATH.to_owned(), path));
    }

    /// Adds the variables that the hang hook itself reads to the environment of a worker.
    fn add_hook_variables(&self, worker: &mut Vec<(String, String)>, timeout: Duration) {
        let interval = (timeout / 8).clamp(PUBLISH_INTERVAL_RANGE.0, PUBLISH_INTERVAL_RANGE.1);
        let variables = [
            (env::LAUNCH_HANG_DIR, self.path.display().to_string()),
            (env::LAUNCH_HANG_SIGNAL, STACKS_SIGNAL.to_string()),
            (env::LAUNCH_HANG_INTERVAL_MS, interval.as_millis().to_string()),
        ];
        worker.retain(|(name, _)| !variables.iter().any(|(set, _)| set == name));
        worker.extend(variables.map(|(name, value)| (name.to_owned(), value)));
    }

    /// Makes Python load the hang hook (a Python module for workers) in a worker's container, by
    /// changing the worker's command and environment. The first words of `worker.wrapper` become a
    /// shell script of the container.
    pub(in crate::agent) fn add_to_container(&self, worker: &mut WorkerPlan, timeout: Duration) {
        self.add_hook_variables(&mut worker.env, timeout);
        let words = ["sh", "-c", CONTAINER_SCRIPT, "sh"].map(str::to_owned);
        worker.wrapper.splice(..0, words);
    }

    /// Lists the two mounts that a container needs for the hang hook: its directory, writable, and
    /// the subdirectory with the hook's code, read-only.
    pub(in crate::agent) fn list_container_mounts(&self) -> Vec<ContainerMount> {
        let mount = |path: &Path, read_only: bool| {
            let path = path.display().to_string();
            ContainerMount { source: path.clone(), target: path, read_only }
        };
        vec![mount(&self.path, false), mount(&self.path.join(MODULE_DIRECTORY), true)]
    }

    /// Adds to a worker's environment the variables that switch on torch's flight recorder and
    /// NCCL's warnings, unless the user has set them. The function `is_given` returns whether a
    /// variable is set, and is also called with its earlier name. After a timeout, torch writes the
    /// recorded collectives to a file next to the log of the worker, which belongs to the attempt
    /// `attempt`.
    pub(in crate::agent) fn add_recorder_variables(
        worker: &mut WorkerPlan,
        attempt: u32,
        is_given: impl Fn(&str) -> bool,
    ) {
        let dump = build_dump_prefix(&worker.log, attempt).display().to_string();
        let variables = [
            (env::TORCH_FR_BUFFER_SIZE, FLIGHT_RECORDER_ENTRIES.to_owned()),
            (env::TORCH_FR_DUMP_ON_TIMEOUT, "1".to_owned()),
            (env::TORCH_FR_DUMP_TEMP_FILE, dump),
        ];
        let given = |(new, old): (&str, &str)| is_given(new) || is_given(old);
        let missing = variables
            .into_iter()
            .zip(env::OLD_FLIGHT_RECORDER_VARIABLES)
            .filter(|((n, _), o)| !given((n, o)));
        worker.env.extend(missing.map(|((name, value), _)| (name.to_owned(), value)));
        // A variable would replace the value in a file.
        if !is_given(env::NCCL_DEBUG) && !list_nccl_files().iter().any(|file| sets_nccl_debug(file)) {
            worker.env.push((env::NCCL_DEBUG.to_owned(), "WARN".to_owned()));
        }
    }

    /// Returns how many collectives the processes of the rank `rank` have entered and completed,
    /// and whether one of them waits in a collective. Returns `None` if no process of the rank has
    /// initialized torch's process groups.
    pub(in crate::agent) fn read_collective_activity(&self, rank: Rank) -> Option<CollectiveActivity> {
        let processes = list_rank_processes(&self.path, rank);
        let statuses = processes.iter().filter(|p| p.is_alive()).map(HookProcess::read_status);
        statuses.filter_map(HookStatus::collective_activity).reduce(|first, second| CollectiveActivity {
            count: first.count.wrapping_add(second.count),
            is_waiting: first.is_waiting || second.is_waiting,
        })
    }
}

impl Drop for HookDirectory {
    fn drop(&mut self) {
        // The directory is in the directory for temporary files.
        _ = fs::remove_dir_all(&self.path);
    }
}

/// Lists the configuration files, such as `/etc/nccl.conf`, from which NCCL reads settings such as
/// `NCCL_DEBUG`. The files may not exist.
fn list_nccl_files() -> Vec<PathBuf> {
    let home = std::env::var_os(env::HOME).map(|home| Path::new(&home).join(".nccl.conf"));
    let user = std::env::var_os(env::NCCL_CONF_FILE).map(PathBuf::from).or(home);
    user.into_iter().chain([PathBuf::from("/etc/nccl.conf")]).collect()
}

/// Returns whether the NCCL configuration file `file` sets `NCCL_DEBUG`.
fn sets_nccl_debug(file: &Path) -> bool {
    let mut text = String::new();
    let read = File::open(file).and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut text));
    let sets = |line: &str| line.split_once('=').is_some_and(|(name, _)| name.trim() == env::NCCL_DEBUG);
    read.is_ok() && text.lines().any(sets)
}

/// Creates and locks the lock file in the new directory `path` of a hang hook (a Python module for
/// workers), so that other agents do not remove the directory.
fn lock_directory(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).open(path.join(LOCK_FILE))?;
    file.try_lock()?;
    Ok(file)
}

/// Removes the directories for hang hooks (Python modules for workers) that killed agents of this
/// user have left behind in `parent`. Ignores errors.
fn remove_abandoned_directories(parent: &Path, now: SystemTime) {
    let uid = nix::unistd::geteuid().as_raw();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_named = entry.file_name().to_str().is_some_and(|name| name.starts_with(DIRECTORY_NAME_PREFIX));
        // The metadata are those of the entry, also if it is a symbolic link.
        let Ok(metadata) = entry.metadata().map(|metadata| is_named.then_some(metadata)) else { continue };
        let Some(metadata) = metadata.filter(|m| m.is_dir() && m.uid() == uid) else { continue };
        let age = metadata.modified().map(|at| now.duration_since(at).unwrap_or_default());
        let lock = open_own_file_without_links(&entry.path().join(LOCK_FILE));
        let is_locked = lock.is_ok_and(|lock| lock.try_lock().is_err());
        if !is_locked && age.is_ok_and(|age| age > ABANDONED_AGE) {
            _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// A process of a worker that has loaded the hang hook (a Python module of launch) and has
/// initialized torch's process groups.
pub(super) struct HookProcess {
    pid: u32,
    /// The path of the files of the process without their ending.
    base: PathBuf,
}

impl HookProcess {
    /// Finds the process of a rank that has loaded the hang hook (a Python module of launch) and
    /// uses torch's process groups. `tree` are the pids of the processes of the worker. A process
    /// in a container of Docker is not one of them, and is recognized by its environment.
    pub(super) fn find_for_rank(directory: &Path, rank: Rank, tree: &[i32]) -> Option<HookProcess> {
        let processes = list_rank_processes(directory, rank);
        let of_tree = processes.iter().position(|process| tree.contains(&(process.pid as i32)));
        let found = of_tree.or_else(|| processes.iter().position(|p| p.has_environment(directory, rank)));
        found.and_then(|at| processes.into_iter().nth(at))
    }

    /// Returns whether the process belongs to the rank `rank` and uses the hang hook in
    /// `directory`, according to its environment variables. The pid in an old file may belong to
    /// another process by now.
    fn has_environment(&self, directory: &Path, rank: Rank) -> bool {
        let file = File::open(format!("/proc/{}/environ", self.pid));
        let mut environment = Vec::new();
        let read = file.and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut environment));
        let variables =
            [format!("{}={}", env::LAUNCH_HANG_DIR, directory.display()), format!("{}={rank}", env::RANK)];
        let set = environment.split(|byte| *byte == 0);
        read.is_ok() && variables.iter().all(|variable| set.clone().any(|set| set == variable.as_bytes()))
    }

    /// Returns whether the process with the hang hook exists. Processes that have ended leave their
    /// files.
    fn is_alive(&self) -> bool {
        Path::new("/proc").join(self.pid.to_string()).exists()
    }

    /// Returns the pid of this process with the hang hook.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Requests that the hang hook in the process write its answer, with the process's Python
    /// stacks and collectives, to a file. Does nothing if the process does not read requests.
    pub(super) fn request_answer(&self) {
        let path = self.base.with_extension("request");
        let fifo =
            OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path);
        _ = fifo.and_then(|mut fifo| fifo.write_all(b"?"));
    }

    /// Reads the stacks and collectives that the hang hook in the process has written; returns
    /// `None` if it has not answered.
    pub(super) fn read_answer(&self) -> Option<HookAnswer> {
        serde_json::from_slice(&read_limited(&self.base.with_extension("evidence"))?).ok()
    }

    /// Reads the counters of collectives that the hang hook in the process has published last, one
    /// entry per process group.
    pub(super) fn read_groups(&self) -> Vec<GroupCounters> {
        limit_groups(self.read_status().groups)
    }

    /// Reads the process's newest counters of collectives from the status file that the hang hook
    /// in the process writes. The status is empty if there is none.
    fn read_status(&self) -> HookStatus {
        let text = read_limited(&self.base.with_extension("status")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }
}

/// The content of the status file in which the hang hook (a Python module in a worker) publishes
/// its counters of collectives.
#[derive(Default, Deserialize)]
struct HookStatus {
    /// The sum of the numbers of entered and completed collectives; `None` if the process has no
    /// process groups.
    count: Option<u64>,
    /// Whether torch's flight recorder has a collective that is not complete.
    waiting: bool,
    /// The counters of each process group; empty if they do not fit into the file.
    groups: Vec<GroupCounters>,
}

impl HookStatus {
    /// Returns a number that changes with each collective that the process enters or completes, and
    /// whether it waits in one, or `None` without process groups.
    fn collective_activity(self) -> Option<CollectiveActivity> {
        Some(CollectiveActivity { count: self.count?, is_waiting: self.waiting })
    }
}

/// What the hang hook (a Python module in a worker) answers to the agent's request for evidence:
/// the collectives and the stacks of its process.
#[derive(Deserialize)]
pub(super) struct HookAnswer {
    groups: Vec<GroupCounters>,
    entries: Vec<CollectiveEntry>,
    stacks: Vec<HookStack>,
    in_call: bool,
    /// The transfer with another rank in which the main thread waits.
    #[serde(default)]
    transfer: Option<Transfer>,
    /// Whether the process ends because of an exception about a timeout of a collective. Otherwise
    /// this is an answer to the agent.
    #[serde(default)]
    timeout: bool,
}

/// The Python stack of one thread of a worker, as the hang hook (a Python module in the worker)
/// reports it.
#[derive(Deserialize)]
struct HookStack {
    main: bool,
    frames: Vec<StackFrame>,
}

impl HookAnswer {
    /// Converts the stacks and collectives that a process's hang hook has reported to evidence
    /// about the hanging rank `rank`, and truncates long texts and lists.
    pub(super) fn into_evidence(self, rank: Rank, thread: Option<ThreadState>) -> RankEvidence {
        let skipped = self.entries.len().saturating_sub(MAX_ENTRIES_PER_RANK);
        let mut entries: Vec<CollectiveEntry> = self.entries.into_iter().skip(skipped).collect();
        for entry in &mut entries {
            let CollectiveEntry { group, operation, inputs, dtypes, outputs, output_dtypes, .. } = entry;
            [group, operation, inputs, dtypes, outputs, output_dtypes].into_iter().for_each(limit_text);
        }
        let main = self.stacks.into_iter().find(|stack| stack.main);
        let mut stack = main.map_or_else(Vec::new, |stack| stack.frames);
        stack.truncate(MAX_ITEMS_PER_RANK);
        for frame in &mut stack {
            limit_text(&mut frame.file);
            limit_text(&mut frame.function);
        }
        RankEvidence {
            rank,
            groups: limit_groups(self.groups),
            entries,
            answered: true,
            stack,
            in_native_call: self.in_call,
            transfer: self.transfer,
            thread,
            ..RankEvidence::default()
        }
    }
}

/// Limits the number of process groups that a hang hook reports, and the length of their names.
fn limit_groups(mut groups: Vec<GroupCounters>) -> Vec<GroupCounters> {
    groups.truncate(MAX_ITEMS_PER_RANK);
    for group in &mut groups {
        limit_text(&mut group.name);
        limit_text(&mut group.backend);
    }
    groups
}

/// Truncates a text that a hang hook has reported to [`MAX_TEXT_BYTES`].
fn limit_text(text: &mut String) {
    text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
}

/// Lists the processes of a rank whose hang hook has written a status file, in the order of their
/// pids.
fn list_rank_processes(directory: &Path, rank: Rank) -> Vec<HookProcess> {
    let prefix = format!("rank-{rank}.");
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let parse = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let pid = name.to_str()?.strip_prefix(&prefix)?.strip_suffix(".status")?.parse().ok()?;
        Some(HookProcess { pid, base: directory.join(format!("{prefix}{pid}.x")) })
    };
    let mut processes: Vec<HookProcess> = entries.filter_map(parse).collect();
    processes.sort_unstable_by_key(|process| process.pid);
    processes
}

/// Reads the file that the hang hook of the rank `rank` wrote after the time `since` because a
/// collective timed out. Returns `None` without such a file.
pub(super) fn read_timeout_answer(directory: &Path, rank: Rank, since: SystemTime) -> Option<HookAnswer> {
    let prefix = format!("rank-{rank}.");
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let is_named = name.to_str()?.strip_prefix(&prefix)?.ends_with(".evidence");
        let is_new = is_written_since(&entry.metadata().ok()?, since);
        let answer = (is_named && is_new).then(|| read_limited(&entry.path())).flatten()?;
        serde_json::from_slice(&answer).ok().filter(|answer: &HookAnswer| answer.timeout)
    };
    entries.filter_map(read).next()
}

/// Returns whether a file was written at or after the time `since`. Kernels round the times of
/// files down to a tick.
pub(super) fn is_written_since(file: &fs::Metadata, since: SystemTime) -> bool {
    file.modified().is_ok_and(|written| written + FILE_TIME_GRANULARITY >= since)
}

/// Reads a file of a hang hook, or returns `None` if the path is a symbolic link, or the file is
/// too large or belongs to another user.
pub(super) fn read_limited(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open_own_file_without_links(path).ok()?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= MAX_FILE_BYTES).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_answers_of_a_process_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let lock = lock_directory(directory.path()).expect("a lock");
        let hook = HookDirectory { path: directory.path().to_owned(), _lock: lock };
        assert_eq!(hook.read_collective_activity(3), None);
        let status = "{\"count\": 7, \"waiting\": true, \"groups\": [{\"name\": \"0\", \"backend\": \"gloo\", \"ranks\": [0], \
                      \"enqueued\": 4, \"completed\": 3}]}    ";
        let (this, parent) = (std::process::id(), std::os::unix::process::parent_id());
        let write = |rank: Rank, pid: u32, ending: &str, text: &str| {
            fs::write(directory.path().join(format!("rank-{rank}.{pid}.{ending}")), text).expect("written");
        };
        write(3, this, "status", status);
        let read = |rank| hook.read_collective_activity(rank).map(|read| (read.count, read.is_waiting));
        assert_eq!(read(3), Some((7, true)));
        let other = "{\"count\": 2, \"waiting\": false, \"groups\": []}";
        write(3, parent, "status", other);
        assert_eq!(read(3), Some((9, true)), "two processes of one rank");
        write(4, this, "status", "   ");
        assert_eq!(read(4), None, "nothing is published yet");
        write(5, u32::MAX, "status", status);
        assert_eq!(read(5), None, "the process has ended");
        let process = HookProcess::find_for_rank(directory.path(), 3, &[70, this as i32]).expect("found");
        assert_eq!((process.pid(), process.read_groups().len()), (this, 1));
        assert!(process.read_answer().is_none());
        write(3, this, "evidence", "{\"groups\": []");
        assert!(process.read_answer().is_none(), "an incomplete file is no answer");
        std::mem::forget(hook);
    }

    #[test]
    fn a_process_outside_of_the_worker_is_recognized_by_its_environment() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path();
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .env(env::LAUNCH_HANG_DIR, path)
            .env(env::RANK, "3")
            .spawn()
            .expect("a process");
        for rank in [3, 4] {
            fs::write(path.join(format!("rank-{rank}.{}.status", child.id())), "{}").expect("written");
        }
        let found = |rank| HookProcess::find_for_rank(path, rank, &[]).map(|process| process.pid());
        // The environment is that of this test until the child executes its program.
        let began = std::time::Instant::now();
        while found(3).is_none() && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((found(3), found(4)), (Some(child.id()), None));
        child.kill().and_then(|()| child.wait()).expect("ended");
    }

    #[test]
    fn containers_get_the_hook_read_only_and_keep_the_python_path_of_the_image() {
        let directory = tempfile::tempdir().expect("a directory");
        let lock = lock_directory(directory.path()).expect("a lock");
        let hook = HookDirectory { path: directory.path().to_owned(), _lock: lock };
        let mounts = hook.list_container_mounts();
        let module = directory.path().join(MODULE_DIRECTORY).display().to_string();
        assert_eq!((mounts[0].read_only, mounts[1].read_only), (false, true));
        assert_eq!((&mounts[1].source, &mounts[1].target), (&module, &module));
        for (of_image, expected) in [(None, module.clone()), (Some("/image"), format!("{module}:/image"))] {
            let mut command = std::process::Command::new("sh");
            command
                .args(["-c", CONTAINER_SCRIPT, "sh", "printenv", "PYTHONPATH"])
                .env_remove(env::PYTHONPATH);
            command
                .envs(of_image.map(|path| (env::PYTHONPATH, path)))
                .env(env::LAUNCH_HANG_DIR, directory.path());
            let output = command.output().expect("output");
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), expected);
        }
    }

    #[test]
    fn a_level_in_a_file_of_nccl_is_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("nccl.conf");
        assert!(!sets_nccl_debug(&file), "the file does not exist");
        for (text, expected) in
            [("#NCCL_DEBUG=INFO\nNCCL_DEBUG_FILE=x\n", false), ("NCCL_IB_HCA=mlx5\nNCCL_DEBUG=INFO", true)]
        {
            fs::write(&file, text).expect("written");
            assert_eq!(sets_nccl_debug(&file), expected, "{text}");
        }
    }

    #[test]
    fn only_directories_of_ended_agents_are_removed() {
        let parent = tempfile::tempdir().expect("a directory");
        let make = |name: &str| {
            let path = parent.path().join(name);
            fs::create_dir(&path).expect("created");
            path
        };
        let (used, ended, other) = (make("launch-hang-1-1"), make("launch-hang-2-1"), make("other"));
        let lock = lock_directory(&used).expect("a lock");
        drop(lock_directory(&ended).expect("a lock"));
        std::os::unix::fs::symlink(&other, parent.path().join("launch-hang-3-1")).expect("a link");
        let exist = || [&used, &ended, &other].map(|path| path.exists());
        remove_abandoned_directories(parent.path(), SystemTime::now());
        assert_eq!(exist(), [true, true, true], "a new directory may not be locked yet");
        let later = SystemTime::now() + 2 * ABANDONED_AGE;
        remove_abandoned_directories(parent.path(), later);
        assert_eq!(exist(), [true, false, true]);
        drop(lock);
        remove_abandoned_directories(parent.path(), later);
        assert_eq!(exist(), [false, false, true]);
    }
}
