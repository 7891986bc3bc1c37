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
    assert_eq!(ended.stderr.matches("failed: rank 1 (pid ").count(), 1, "{}", ended.stderr);
    for part in ["exit code 3", "| no disk", "logs/rank-1.log", "rank 0, 2: killed by SIGTERM"] {
        assert!(ended.stderr.contains(part), "no {part:?} in {}", ended.stderr);
    }
    let job = Job::shell(3, script, &[]);
    let ended = job.run(&["--json"]);
    let failure = ended.event("failure");
    assert_eq!((&failure["rank"], &failure["cause"]), (&1.into(), &"exit code 3".into()));
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
    for (name, text) in
        [("KILL", "killed by SIGKILL"), ("SEGV", "killed by SIGSEGV"), ("35", "killed by signal 35")]
    {
        let job = Job::shell(2, &format!("[ $RANK = 0 ] && kill -{name} $$; sleep 1000"), &[]);
        let ended = job.run(&["--json"]);
        assert_eq!(ended.code(), 1);
        let cause = ended.event("failure")["cause"].as_str().unwrap().to_owned();
        assert!(cause.starts_with(text), "{cause}");
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

// ---- nothing is left ----

/// Leaves a process in a session of its own, and one whose parents are gone.
const FAMILY: &str = "setsid sleep 1001 & setsid sh -c 'sleep 1002 & sleep 1003 &' & sleep 1004 & ";

#[test]
fn descendants_end_with_the_job() {
    let well = format!("{FAMILY} until pgrep -f 'sleep 1003' > /dev/null; do sleep 0.01; done");
    assert_eq!(Job::shell(2, &well, &[]).run(&[]).code(), 0);
    let badly = format!("{FAMILY} [ $RANK = 1 ] && exit 5; wait");
    assert_eq!(Job::shell(2, &badly, &[]).run(&[]).code(), 1);
}

fn family() -> (Job, &'static str) {
    (
        Job::shell(2, &format!("{FAMILY} echo up $RANK; sleep 1005"), &["logs: {show: [0, 1]}", "grace: 1s"]),
        "sleep 1005",
    )
}

#[test]
fn kill_9_of_the_controller_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    running.signal(Signal::SIGKILL);
    assert_eq!(running.end().status.signal(), Some(9));
    job.gone();
}

#[test]
fn kill_9_of_the_agent_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    kill(job.find("launch agent"), Signal::SIGKILL).unwrap();
    let ended = running.end();
    assert_eq!(ended.code(), 1);
    assert!(ended.stderr.contains("the agent on") && ended.stderr.contains("SIGKILL"), "{}", ended.stderr);
}

#[test]
fn kill_9_of_a_worker_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&["--json"]);
    wait_for_workers(&job, 2);
    let worker =
        job.alive().into_iter().find(|(pid, line)| line.starts_with("sh -c") && leads(*pid)).unwrap().0;
    kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
    let line = running.until("\"failure\"");
    assert!(line.contains("SIGKILL") && line.contains(&worker.to_string()), "{line}");
    assert_eq!(running.end().code(), 1);
}

/// Whether a process leads its group.
fn leads(pid: i32) -> bool {
    nix::unistd::getpgid(Some(Pid::from_raw(pid))).is_ok_and(|group| group.as_raw() == pid)
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

#[test]
fn a_stopped_agent_whose_controller_dies_leaves_nothing() {
    let (job, _) = family();
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    let agent = job.find("launch agent");
    kill(agent, Signal::SIGSTOP).unwrap();
    running.signal(Signal::SIGKILL);
    assert_eq!(running.end().status.signal(), Some(9));
    // Once it runs again (the kernel continues orphaned groups, or a person does) it finds that it is alone.
    _ = kill(agent, Signal::SIGCONT);
    job.gone();
}

#[test]
fn children_that_were_there_before_are_left_alone() {
    let job = Job::shell(1, "true", &[]);
    let mut command = Command::new("sh");
    let script = format!("sleep 1006 & echo $! > other; exec {LAUNCH} job.yaml");
    command.args(["-c", &script]).current_dir(&job.dir).stdout(Stdio::null()).stderr(Stdio::null());
    assert_eq!(command.status().unwrap().code(), Some(0));
    let other = fs::read_to_string(job.path("other")).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(other), Signal::SIGKILL).expect("it still runs");
}

// ---- signals ----

#[test]
fn interrupt_lets_programs_finish() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 143)] {
        let script =
            "trap 'echo saved > saved.$RANK; exit 0' TERM; echo up $RANK; while :; do sleep 0.01; done";
        let job = Job::shell(2, script, &["logs: {show: [0, 1]}"]);
        let mut running = job.start(&[]);
        running.until("up");
        running.until("up");
        running.signal(signal);
        let ended = running.end();
        assert_eq!(ended.code(), code);
        assert!(ended.stderr.contains("launch: stopped after"), "{}", ended.stderr);
        assert!(job.path("saved.0").exists() && job.path("saved.1").exists());
    }
}

#[test]
fn a_second_interrupt_kills() {
    let script = "trap 'echo not yet' TERM; echo up $RANK; while :; do sleep 0.01; done";
    let job = Job::shell(2, script, &["grace: 1h", "logs: {show: [0, 1]}"]);
    let mut running = job.start(&[]);
    running.until("up");
    running.until("up");
    running.signal(Signal::SIGINT);
    running.until("not yet");
    running.signal(Signal::SIGINT);
    let ended = running.end();
    assert_eq!(ended.code(), 130);
    assert!(ended.stderr.contains("launch: killed after"), "{}", ended.stderr);
}

#[test]
fn programs_that_ignore_sigterm_are_killed_after_their_grace() {
    let script = "trap '' TERM; echo up; [ $RANK = 1 ] && exit 9; while :; do sleep 0.01; done";
    let job = Job::shell(2, script, &["grace: 200ms"]);
    let ended = job.run(&[]);
    assert_eq!(ended.code(), 1);
    assert!(ended.stderr.contains("rank 0: killed by SIGKILL"), "{}", ended.stderr);
}

#[test]
fn an_ignored_hangup_stays_ignored() {
    let job = Job::shell(1, "echo up; until [ -e go ]; do sleep 0.01; done; echo fine", &[]);
    let mut command = Command::new("nohup");
    let plain = job.command(&[]);
    command.arg(plain.get_program()).args(plain.get_args()).current_dir(&job.dir);
    command.envs(plain.get_envs().filter_map(|(k, v)| Some((k, v?))));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let mut running = Started { job: &job, child, stdout };
    running.until("up");
    running.signal(Signal::SIGHUP);
    fs::write(job.path("go"), "").unwrap();
    let ended = running.end();
    assert_eq!((ended.code(), ended.stdout.as_str()), (0, "[rank 0] fine\n"));
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

#[test]
fn ctrl_c_on_a_terminal_reaches_the_controller_alone() {
    let script =
        "trap 'echo interrupted > wrong' INT; trap 'exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let job = Job::shell(1, script, &[]);
    let (mut child, mut terminal) = on_terminal(&job, &[]);
    wait_for(&job.path("up"));
    terminal.write_all(b"\x03").unwrap();
    let shown = rest_of(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(130), "{shown}");
    assert!(!job.path("wrong").exists() && shown.contains("SIGINT: the workers got SIGTERM"), "{shown}");
    assert_eq!(job.alive(), BTreeMap::new());
}

#[test]
fn a_terminal_that_hangs_up_ends_the_job() {
    let job = Job::shell(
        1,
        "trap 'echo saved > saved; exit 0' TERM; echo up > up; while :; do sleep 0.01; done",
        &[],
    );
    let (mut child, terminal) = on_terminal(&job, &[]);
    wait_for(&job.path("up"));
    drop(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(job.path("saved").exists());
    assert_eq!(job.alive(), BTreeMap::new());
}

// ---- output ----

#[test]
fn a_flood_of_output_blocks_nobody_and_takes_no_memory() {
    let script = "yes 0123456789012345678901234567890123456789 | head -c 100000000; echo > flooded; until [ -e go ]; do sleep 0.01; done; echo the end";
    let job = Job::shell(1, script, &["logs: {prefix: false}"]);
    let running = job.start(&[]);
    wait_for(&job.path("flooded")); // although nobody reads our stdout
    for (pid, line) in job.alive().into_iter().filter(|(_, line)| line.contains("launch")) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
        let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(peak < 64 << 10, "{line} took {peak} kB");
    }
    fs::write(job.path("go"), "").unwrap();
    let ended = running.end();
    assert_eq!(ended.code(), 0);
    assert!(ended.stdout.ends_with("the end\n"), "{}", &ended.stdout[ended.stdout.len() - 300..]);
    assert!(ended.stderr.contains("lines"), "lost lines are told: {}", ended.stderr);
    let log = fs::metadata(job.run_dir().join("logs/rank-0.log")).unwrap().len();
    assert_eq!(log, 100_000_000 + "the end\n".len() as u64);
}

#[test]
fn a_log_keeps_its_size() {
    let job = Job::shell(1, "yes 123456789 | head -n 1000", &["logs: {max_size: 5000B}"]);
    assert_eq!(job.run(&[]).code(), 0);
    let log = job.log(0);
    assert!(log.starts_with(&"123456789\n".repeat(500)) && log.lines().count() == 501, "{}", log.len());
    assert!(log.lines().last().unwrap().contains("max_size"));
}

#[test]
fn nobody_reading_stdout_or_stderr_changes_nothing() {
    for args in [&[][..], &["--json"][..]] {
        let job = Job::shell(
            2,
            "for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo $i >&2; done; echo > done.$RANK",
            &[],
        );
        let mut child = job.command(args).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(job.path("done.0").exists() && job.path("done.1").exists());
        assert_eq!(job.alive(), BTreeMap::new());
    }
}

#[test]
fn last_words_are_kept_even_without_a_line_end() {
    let job = Job::shell(1, "printf 'half a line' >&2; kill -KILL $$", &[]);
    let ended = job.run(&["--json"]);
    assert_eq!(ended.event("failure")["tail"], serde_json::json!(["half a line"]));
}

// ---- the built-in runtime ----

#[test]
fn a_training_job_shows_itself_on_a_terminal() {
    let job = Job::training(20);
    let (mut child, terminal) = on_terminal(&job, &[]);
    let shown = rest_of(terminal);
    assert_eq!(child.wait().unwrap().code(), Some(0), "{shown}");
    for part in ["training", "loss", "tokens/s", "checkpoint", "launch: done in", "└step 1", "run files"] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
}

#[test]
fn a_training_job_is_told_in_few_plain_lines() {
    let ended = Job::training(100).run(&[]);
    assert_eq!((ended.code(), ended.stdout.as_str()), (0, ""), "{}", ended.stderr);
    let steps: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("step ")).collect();
    assert!((20..40).contains(&steps.len()), "{}", ended.stderr);
    assert!(
        steps[0].starts_with("step 1/100  loss ")
            && steps[steps.len() - 1].starts_with("step 100/100  loss ")
    );
    assert!(!ended.stderr.contains('\x1b') && !ended.stderr.contains('\r'), "{}", ended.stderr);
}

#[test]
fn interrupt_saves_training_and_the_same_command_goes_on() {
    let job = Job::training(100_000);
    let mut running = job.start(&["--json"]);
    running.until("\"step\":3,");
    running.signal(Signal::SIGINT);
    let ended = running.end();
    assert_eq!(ended.code(), 130, "{}", ended.stderr);
    let saved = ended.event("checkpoint")["step"].as_u64().unwrap();
    assert!(
        ended.stderr.contains("to go on") && ended.stderr.contains("job.yaml --json"),
        "{}",
        ended.stderr
    );
    let ended = job.run(&["--json", "--set", &format!("train.steps={}", saved + 2)]);
    assert_eq!(ended.code(), 0, "{}", ended.stderr);
    assert_eq!(ended.event("resume")["step"], saved);
    assert_eq!(ended.event("done")["step"], saved + 2);
}

#[test]
fn kill_9_of_a_training_worker_ends_its_peers() {
    let job = Job::training(100_000);
    let mut running = job.start(&["--json"]);
    running.until("\"step\":3,");
    let workers = job.alive().into_iter().filter(|(_, line)| line.starts_with("launch worker"));
    let victim = workers.map(|(pid, _)| pid).max().unwrap();
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    let line = running.until("\"failure\"");
    assert!(line.contains("SIGKILL") && line.contains(&victim.to_string()), "{line}");
    let ended = running.end();
    assert_eq!(ended.code(), 1);
    assert!(ended.stderr.contains("gave up after the failure"), "{}", ended.stderr);
}

#[test]
fn kill_9_of_controller_or_agent_ends_training() {
    for agent in [false, true] {
        let job = Job::training(100_000);
        let mut running = job.start(&["--json"]);
        running.until("\"step\":3,");
        match agent {
            true => kill(job.find("launch agent"), Signal::SIGKILL).unwrap(),
            false => running.signal(Signal::SIGKILL),
        }
        assert_eq!(running.end().status.code(), agent.then_some(1));
        job.gone();
    }
}

// --- several hosts, each an agent of this machine -----------------------------------------------------------------------

/// As if this machine were so many hosts.
fn on_hosts<'a>(job: &'a Job, hosts: u32, args: &[&str]) -> (Command, &'a Job) {
    let mut command = job.command(args);
    command.env("LAUNCH_LOCAL_AGENTS", hosts.to_string());
    (command, job)
}

fn ended(command: &mut Command, job: &Job) -> Ended {
    let output = command.output().unwrap();
    assert_eq!(job.alive(), BTreeMap::new(), "left behind");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn ranks_of_several_hosts_have_their_numbers() {
    let job = Job::shell(2, "echo $GROUP_RANK $LOCAL_RANK $WORLD_SIZE $CROSS_SIZE > out.$RANK", &[]);
    let (mut command, job) = on_hosts(&job, 3, &["--json"]);
    let run = ended(&mut command, job);
    assert_eq!(run.code(), 0, "{}", run.stderr);
    for rank in 0..6 {
        let text = fs::read_to_string(job.path(&format!("out.{rank}"))).unwrap();
        assert_eq!(text, format!("{} {} 6 3\n", rank / 2, rank % 2));
    }
    assert_eq!(run.event("placed")["hosts"].as_array().unwrap().len(), 3);
}

#[test]
fn a_failed_start_is_followed_by_another_with_the_same_count_everywhere() {
    let script = "echo $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS >> count.$RANK; \
                  while [ ! -e count.0 -o ! -e count.1 -o ! -e count.3 ]; do sleep 0.02; done; \
                  if [ $TORCHELASTIC_RESTART_COUNT-$RANK = 0-2 ]; then exit 3; fi; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then sleep 100; fi";
    let job = Job::shell(2, script, &["restarts: 2", "grace: 1s"]);
    let (mut command, job) = on_hosts(&job, 2, &["--json"]);
    let run = ended(&mut command, job);
    assert_eq!(run.code(), 0, "{}", run.stderr);
    for rank in 0..4 {
        assert_eq!(fs::read_to_string(job.path(&format!("count.{rank}"))).unwrap(), "0/2\n1/2\n");
    }
    let restart = run.event("restart");
    assert_eq!(
        (&restart["rank"], &restart["cause"], &restart["left"]),
        (&2.into(), &"exit code 3".into(), &1.into())
    );
    assert!(run.events().iter().all(|e| e["event"] != "failure"));
}

#[test]
fn kill_9_of_one_hosts_agent_costs_one_restart() {
    let script = "echo $RANK >> started; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || sleep 100";
    let job = Job::shell(1, script, &["restarts: 1", "grace: 1s"]);
    let (mut command, job) = on_hosts(&job, 3, &["--json"]);
    let child = command.spawn().unwrap();
    let start = Instant::now();
    while fs::read_to_string(job.path("started")).unwrap_or_default().lines().count() < 3 {
        assert!(start.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    let agents: Vec<i32> =
        job.alive().into_iter().filter(|(_, l)| l.contains("agent")).map(|(pid, _)| pid).collect();
    kill(Pid::from_raw(agents[1]), Signal::SIGKILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(job.alive(), BTreeMap::new(), "left behind");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(job.path("started")).unwrap().lines().count(), 6);
}

#[test]
fn a_stopped_rank_is_a_hang_with_its_stacks_in_the_log() {
    let job = Job::shell(
        2,
        "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 100",
        &["hang_timeout: 2s", "grace: 1s"],
    );
    let run = job.run(&["--json"]);
    assert_eq!(run.code(), 1);
    let failure = run.event("failure");
    assert!(failure["rank"] == 1 && failure["cause"].as_str().unwrap().contains("is stopped"), "{failure}");
    assert!(job.log(1).contains("state T"), "{}", job.log(1));
}

#[test]
fn a_request_to_save_kills_nobody() {
    let script = "if [ $RANK = 0 ]; then trap 'echo asked > asked' USR1; fi; touch up.$RANK; \
                  while [ ! -e asked ]; do sleep 0.05; done";
    let job = Job::shell(2, script, &[]);
    let mut child = job.command(&["--json"]).spawn().unwrap();
    wait_for(&job.path("up.0"));
    wait_for(&job.path("up.1"));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGUSR1).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "rank 1, which has no handler, wasn't killed by it");
}
