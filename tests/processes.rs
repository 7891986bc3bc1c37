//! Real processes: what a job's workers get, how it ends, and that nothing of it is ever left behind.
//!
//! Every process of a job inherits a marker in its environment, by which it is found in `/proc` whatever became of its
//! parents, group and session.
#![allow(clippy::unwrap_used)] // a test that panics has failed
use nix::{
    fcntl::OFlag,
    pty::{grantpt, posix_openpt, ptsname_r, unlockpt},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::{FromRawFd, IntoRawFd},
        unix::{
            fs::OpenOptionsExt,
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

// Modules of a test lie beside it only when they say so.
#[path = "processes/cleanup.rs"]
mod cleanup;
#[path = "processes/output.rs"]
mod output;
#[path = "processes/several_hosts.rs"]
mod several_hosts;
#[path = "processes/signals.rs"]
mod signals;
#[path = "processes/training.rs"]
mod training;

const LAUNCH: &str = env!("CARGO_BIN_EXE_launch");
/// Longest wait for anything; far more than it takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A job file in a directory of its own.
struct Job {
    dir: tempfile::TempDir,
    marker: String,
}

impl Job {
    /// A shell script as ranks. `run` are more lines of the `run:` section.
    fn shell(workers: u32, script: &str, run: &[&str]) -> Job {
        let command = serde_json::to_string(&["sh", "-c", script]).unwrap();
        let mut lines = vec![format!("command: {command}")];
        lines.extend(run.iter().map(|line| line.to_string()));
        let run: String = lines.iter().map(|line| format!("  {line}\n")).collect();
        Job::new(&format!("name: test\ncluster: {{workers_per_host: {workers}}}\nrun:\n{run}"))
    }

    /// A training job of two workers that takes long.
    fn training(steps: u32) -> Job {
        let job = Job::new(&format!(
            "name: test\ncluster: {{workers_per_host: 2}}\n\
             train:\n  model: {{family: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}\n  \
             data: {{files: [text.txt], tokenizer: bytes, seq_len: 32}}\n  batch: {{global: 4, micro: 1}}\n  steps: {steps}\n"
        ));
        fs::write(job.path("text.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(200)).unwrap();
        job
    }

    fn new(yaml: &str) -> Job {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("job.yaml"), yaml).unwrap();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Job { dir, marker: format!("LAUNCH_TEST_MARKER={}-{count}", std::process::id()) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let (name, value) = self.marker.split_once('=').unwrap();
        let mut command = Command::new(LAUNCH);
        command.arg("job.yaml").args(args).current_dir(&self.dir).env(name, value);
        command.env("XDG_STATE_HOME", self.path(".state"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs it to its end; at that very moment nothing of it is left.
    fn run(&self, args: &[&str]) -> Ended {
        let output = self.command(args).output().unwrap();
        assert_eq!(self.alive(), BTreeMap::new(), "left behind");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    fn start(&self, args: &[&str]) -> Started<'_> {
        let mut child = self.command(args).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Started { job: self, child, stdout }
    }

    /// The living processes of this job: pid and command line.
    fn alive(&self) -> BTreeMap<i32, String> {
        let marker = self.marker.as_bytes();
        let has_marker = |pid: &i32| {
            fs::read(format!("/proc/{pid}/environ")).is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == marker))
        };
        let pids =
            fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
        pids.filter(has_marker).map(|pid| (pid, cmdline(pid))).collect()
    }

    fn gone(&self) {
        let start = Instant::now();
        while !self.alive().is_empty() {
            assert!(start.elapsed() < LIMIT, "still there: {:?}", self.alive());
            std::thread::yield_now();
        }
    }

    /// The one process whose command line contains `what`.
    fn find(&self, what: &str) -> Pid {
        let found: Vec<_> = self.alive().into_iter().filter(|(_, line)| line.contains(what)).collect();
        assert_eq!(found.len(), 1, "{what}: {:?}", self.alive());
        Pid::from_raw(found[0].0)
    }

    fn run_dir(&self) -> PathBuf {
        let mut runs: Vec<_> =
            fs::read_dir(self.path("runs/test")).unwrap().map(|e| e.unwrap().path()).collect();
        runs.retain(|p| p.join("events.jsonl").exists());
        runs.sort();
        runs.pop().unwrap()
    }

    fn log(&self, rank: u32) -> String {
        fs::read_to_string(self.run_dir().join(format!("logs/rank-{rank}.log"))).unwrap()
    }
}

fn cmdline(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

struct Ended {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl Ended {
    fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("{:?}\n{}", self.status, self.stderr))
    }

    fn events(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    }

    fn event(&self, name: &str) -> Value {
        let mut found: Vec<_> = self.events().into_iter().filter(|e| e["event"] == name).collect();
        assert_eq!(found.len(), 1, "{name}: {}", self.stdout);
        found.remove(0)
    }
}

struct Started<'a> {
    job: &'a Job,
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Started<'_> {
    /// Reads stdout until a line contains `what`.
    fn until(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the end came before {what:?}");
            if line.contains(what) {
                return line;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    fn end(mut self) -> Ended {
        let mut stderr = self.child.stderr.take().unwrap();
        let talk = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).map(|_| text).unwrap()
        });
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        let status = self.child.wait().unwrap();
        if status.signal().is_none() {
            assert_eq!(self.job.alive(), BTreeMap::new(), "left behind");
        }
        Ended { status, stdout, stderr: talk.join().unwrap() }
    }
}

fn wait_for(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < LIMIT, "{} never came", path.display());
        std::thread::yield_now();
    }
}

// ---- what a worker gets ----

#[test]
fn every_rank_has_its_environment() {
    let job = Job::shell(
        3,
        "env > env.$RANK; pwd >> env.$RANK; ls -l /proc/self/fd > fd.$RANK",
        &["env: {MINE: \"a b\"}"],
    );
    assert_eq!(job.run(&[]).code(), 0);
    let mut ports = Vec::new();
    for rank in 0..3 {
        let env = fs::read_to_string(job.path(&format!("env.{rank}"))).unwrap();
        let get = |name: &str| {
            let line = env.lines().find(|l| l.starts_with(&format!("{name}=")));
            line.unwrap_or_else(|| panic!("no {name} in {env}")).split_once('=').unwrap().1.to_owned()
        };
        assert_eq!(get("RANK"), rank.to_string());
        assert_eq!(get("LOCAL_RANK"), rank.to_string());
        assert_eq!((get("WORLD_SIZE"), get("LOCAL_WORLD_SIZE")), ("3".into(), "3".into()));
        assert_eq!((get("MASTER_ADDR"), get("MINE")), ("127.0.0.1".into(), "a b".into()));
        ports.push(get("MASTER_PORT").parse::<u16>().unwrap());
        assert!(!env.contains("LAUNCH_CONTROL_FD") && !env.contains("LAUNCH_SHM_FD"), "{env}");
        assert_eq!(env.lines().last().unwrap(), job.dir.path().canonicalize().unwrap().to_str().unwrap());
    }
    assert!(ports[0] > 0 && ports.iter().all(|p| *p == ports[0]), "{ports:?}");
}

#[test]
fn a_worker_inherits_three_descriptors_and_default_signals() {
    let (reader, writer) = nix::unistd::pipe().unwrap(); // without close-on-exec: a leak to inherit
    let job = Job::new("name: test\nrun: {command: [ls, /proc/self/fd], logs: {prefix: false}}\n");
    assert_eq!(job.run(&[]).stdout, "0\n1\n2\n3\n", "3 is the directory that ls reads");
    drop((reader, writer));
    let script = "readlink /proc/self/fd/0; ulimit -Sn; exec grep -e SigIgn -e SigBlk /proc/self/status";
    let ended = Job::shell(1, script, &["logs: {prefix: false}"]).run(&[]);
    let words: Vec<&str> = ended.stdout.split_whitespace().collect();
    let nothing = "0000000000000000";
    let (files, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let files = files.to_string();
    assert_eq!(
        words,
        ["/dev/null", files.as_str(), "SigBlk:", nothing, "SigIgn:", nothing],
        "{}",
        ended.stdout
    );
}

// ---- how a job ends ----

#[test]
fn a_job_that_goes_well() {
    let job = Job::shell(2, "echo out $RANK; echo err $RANK >&2", &[]);
    let ended = job.run(&[]);
    assert_eq!(ended.code(), 0);
    assert_eq!(ended.stdout, "[rank 0] out 0\n");
    assert!(ended.stderr.contains("[rank 0] err 0") && !ended.stderr.contains("err 1"), "{}", ended.stderr);
    for rank in 0..2 {
        let log = job.log(rank);
        let mut lines: Vec<_> = log.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, [format!("err {rank}"), format!("out {rank}")]);
    }
}

#[test]
fn the_first_failure_ends_the_job_and_is_told_once() {
    let script = "echo working $RANK; if [ $RANK = 1 ]; then echo no disk >&2; exit 3; fi; sleep 1000";
    let job = Job::shell(3, script, &[]);
    let ended = job.run(&[]);
    assert_eq!(ended.code(), 1);
    assert_eq!(ended.stderr.matches("error[worker-exited]: rank 1 (pid ").count(), 1, "{}", ended.stderr);
    for part in ["code 3", "| no disk", "logs/rank-1.log", "ranks 0, 2: killed by SIGTERM"] {
        assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
    }
    let job = Job::shell(3, script, &[]);
    let ended = job.run(&["--json"]);
    let failure = ended.event("failure");
    let reason = serde_json::json!({ "kind": "exit", "code": 3 });
    assert_eq!((&failure["rank"], &failure["reason"]), (&1.into(), &reason));
    assert_eq!(failure["tail"], serde_json::json!(["working 1", "no disk"]));
    assert_eq!(ended.event("done")["exit_code"], 1);
    let journal = fs::read_to_string(job.run_dir().join("events.jsonl")).unwrap();
    let untimed = |line: &str| {
        let mut event: Value = serde_json::from_str(line).unwrap();
        assert!(event.as_object_mut().unwrap().remove("time").is_some_and(|time| time.is_f64()));
        event
    };
    let journal: Vec<Value> = journal.lines().map(untimed).collect();
    assert_eq!(journal, ended.events(), "the journal has what --json prints, and when it was");
}

#[test]
fn death_by_signal_is_named() {
    for (name, number, signal) in [("KILL", 9, "SIGKILL"), ("SEGV", 11, "SIGSEGV"), ("35", 35, "signal 35")] {
        let job = Job::shell(2, &format!("[ $RANK = 0 ] && kill -{name} $$; sleep 1000"), &[]);
        let ended = job.run(&["--json"]);
        assert_eq!(ended.code(), 1);
        let reason = ended.event("failure")["reason"].clone();
        assert_eq!((&reason["name"], &reason["number"]), (&signal.into(), &number.into()), "{reason}");
    }
}

#[test]
fn programs_that_can_not_start_say_why() {
    for (command, why) in [
        ("[no-such-program]", "no such program in PATH"),
        ("[./missing.sh]", "no such file"),
        ("[/etc/passwd]", "not an executable file"),
    ] {
        let job =
            Job::new(&format!("name: test\ncluster: {{workers_per_host: 2}}\nrun: {{command: {command}}}\n"));
        let ended = job.run(&[]);
        assert_ne!(ended.code(), 0);
        assert!(ended.stderr.contains(why), "{}", ended.stderr);
    }
}

#[test]
fn many_more_workers_than_cores() {
    let cores = std::thread::available_parallelism().unwrap().get() as u32;
    let workers = 4 * cores + 1;
    let job = Job::shell(workers, "echo $RANK > done.$RANK", &[]);
    let ended = job.run(&[]);
    assert_eq!(ended.code(), 0);
    assert!(ended.stderr.contains("CPU cores"), "{}", ended.stderr);
    assert!((0..workers).all(|rank| job.path(&format!("done.{rank}")).exists()));
}

#[test]
fn two_jobs_do_not_touch_each_other() {
    let patient = Job::shell(2, "echo up; until [ -e go ]; do sleep 0.01; done; echo fine", &[]);
    let mut running = patient.start(&[]);
    running.until("up");
    let failing = Job::shell(2, "exit 1", &[]);
    assert_eq!(failing.run(&[]).code(), 1);
    fs::write(patient.path("go"), "").unwrap();
    let ended = running.end();
    assert_eq!((ended.code(), ended.stdout.as_str()), (0, "[rank 0] fine\n"));
}

fn wait_for_workers(job: &Job, count: usize) {
    let start = Instant::now();
    while job.alive().values().filter(|line| line.contains("sleep 1005") && line.starts_with("sleep")).count()
        < count
    {
        assert!(start.elapsed() < LIMIT);
        std::thread::yield_now();
    }
}

/// A controller on a terminal of its own.
fn on_terminal(job: &Job, args: &[&str]) -> (Child, fs::File) {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let terminal = posix_openpt(flags).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname_r(&terminal).unwrap();
    let mut command = job.command(args);
    let open = || fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(&name);
    let end = || Stdio::from(open().unwrap());
    command.stdin(end()).stdout(end()).stderr(end());
    // SAFETY: two system calls that are allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            if libc::ioctl(0, libc::TIOCSCTTY, 0) == -1 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let child = command.spawn().unwrap();
    // SAFETY: the descriptor is taken out of its only owner.
    (child, unsafe { fs::File::from_raw_fd(terminal.into_raw_fd()) })
}

/// All that a terminal shows until its programs are gone.
fn rest_of(mut terminal: fs::File) -> String {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    // At the end a terminal gives EIO.
    while let Ok(n @ 1..) = terminal.read(&mut buffer) {
        all.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&all).into_owned()
}
