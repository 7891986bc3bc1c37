//! Tests jobs with real processes: what the workers inherit, how jobs end, and that no process
//! remains.
//!
//! Every process of a job inherits a marker in its environment. The tests find the processes in
//! `/proc` by this marker, even after their parents, process groups and sessions have ended.
use crate::support::{
    self,
    environment::{TestDirectory, create_test_directory, launch_command},
    poll_pauses::PollPauses,
    process_list::{find_processes_with_variable, read_command_line},
};
use nix::{
    fcntl::OFlag,
    pty::{grantpt, posix_openpt, ptsname_r, unlockpt},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
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

mod cleanup;
mod output;
mod several_hosts;
mod signals;
mod training;

/// How long a test waits for a process or a file. After that, the test fails.
const WAIT_LIMIT: Duration = Duration::from_secs(180);

/// A job file in a temporary directory, whose processes are marked by an environment variable.
struct MarkedJob {
    dir: TestDirectory,
    /// The environment variable that marks the processes of this job, as `NAME=VALUE`.
    marker: String,
}

impl MarkedJob {
    /// Creates a job whose workers run a shell script. `run` has further lines of the `run:`
    /// section.
    fn with_shell_script(workers: u32, script: &str, run: &[&str]) -> MarkedJob {
        let command = serde_json::to_string(&["sh", "-c", script]).unwrap();
        let mut lines = vec![format!("command: {command}")];
        lines.extend(run.iter().map(|line| line.to_string()));
        let run: String = lines.iter().map(|line| format!("  {line}\n")).collect();
        MarkedJob::new(&format!("name: test\ncluster: {{workers_per_host: {workers}}}\nrun:\n{run}"))
    }

    /// Creates a job of two workers that trains a small model for `steps` steps.
    fn with_training(steps: u32) -> MarkedJob {
        let job = MarkedJob::new(&format!(
            "name: test\ncluster: {{workers_per_host: 2}}\n\
             train:\n  model: {{family: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}\n  \
             data: {{files: [text.txt], tokenizer: bytes, seq_len: 32}}\n  batch: {{global: 4, micro: 1}}\n  steps: {steps}\n"
        ));
        fs::write(job.path("text.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(200)).unwrap();
        job
    }

    /// Creates a directory with this job file and a unique marker.
    fn new(yaml: &str) -> MarkedJob {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let dir = create_test_directory();
        fs::write(dir.path().join("job.yaml"), yaml).unwrap();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        MarkedJob { dir, marker: format!("LAUNCH_TEST_MARKER={}-{count}", std::process::id()) }
    }

    /// Returns the path of a file in the directory of the job.
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command `launch job.yaml ARGS…` with the marker in its environment and pipes for
    /// stdout and stderr.
    fn launch_command(&self, args: &[&str]) -> Command {
        let (name, value) = self.marker.split_once('=').unwrap();
        let mut command = launch_command(self.dir.path(), &[&["job.yaml"], args].concat());
        command.env(name, value).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `launch job.yaml ARGS…` with this job until the job ends. Panics if a process of the
    /// job remains.
    fn run(&self, args: &[&str]) -> EndedJob {
        self.run_command(self.launch_command(args))
    }

    /// Runs a command that starts the job, and waits for its end. Panics if a process of the job
    /// remains.
    fn run_command(&self, mut command: Command) -> EndedJob {
        let output = command.output().unwrap();
        assert_eq!(self.list_processes(), BTreeMap::new(), "processes remain");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        EndedJob { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Starts the job and does not wait for its end.
    fn start(&self, args: &[&str]) -> RunningJob<'_> {
        let mut child = self.launch_command(args).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        RunningJob { job: self, child, stdout }
    }

    /// Returns the processes of this job by pid, with their command lines.
    fn list_processes(&self) -> BTreeMap<i32, String> {
        let pids = find_processes_with_variable(&self.marker).into_iter();
        pids.map(|pid| (pid, read_command_line(pid))).collect()
    }

    /// Waits until no process of this job remains. Panics after [`WAIT_LIMIT`].
    fn wait_until_no_process_remains(&self) {
        let start = Instant::now();
        let mut pauses = PollPauses::new();
        while !self.list_processes().is_empty() {
            assert!(start.elapsed() < WAIT_LIMIT, "processes remain: {:?}", self.list_processes());
            pauses.pause();
        }
    }

    /// Returns the pid of the only process of this job whose command line contains `part`. Panics
    /// if there is no such process, or several.
    fn find_process(&self, part: &str) -> Pid {
        let found: Vec<_> =
            self.list_processes().into_iter().filter(|(_, line)| line.contains(part)).collect();
        assert_eq!(found.len(), 1, "{part}: {:?}", self.list_processes());
        Pid::from_raw(found[0].0)
    }

    /// Returns the directory of the newest run.
    fn find_newest_run_dir(&self) -> PathBuf {
        let mut runs: Vec<_> =
            fs::read_dir(self.path("runs/test")).unwrap().map(|e| e.unwrap().path()).collect();
        runs.retain(|p| p.join("events.jsonl").exists());
        runs.sort();
        runs.pop().unwrap()
    }

    /// Reads the log of a rank in the newest run.
    fn read_rank_log(&self, rank: u32) -> String {
        fs::read_to_string(self.find_newest_run_dir().join(format!("logs/rank-{rank}.log"))).unwrap()
    }

    /// Compares `messages`, the text that launch has printed, with the snapshot `name` of this
    /// module. Before the comparison, removes the warning about too few CPU cores, and the lines
    /// that shells print when their children are killed, and replaces the sizes of checkpoints,
    /// which contain the step.
    #[track_caller]
    fn assert_snapshot(&self, name: &str, messages: &str) {
        let filters = [
            (r"launch: warning\[cpu-oversubscribed\]: .*\n", ""),
            (r"\[ranks? [-, \d]+\] Terminated\n", ""),
            (r"\(\d+\.\d KiB in", "([SIZE] in"),
        ];
        support::assert_snapshot(self.dir.path(), name, messages, &filters);
    }
}

/// A job whose controller has ended.
struct EndedJob {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

impl EndedJob {
    /// Returns the exit code of the controller. Panics if a signal killed the controller.
    fn exit_code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("{:?}\n{}", self.status, self.stderr))
    }

    /// Parses each line of the controller's stdout as a JSON event.
    fn parse_events(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    }

    /// Returns the only event with the name `name` on the controller's stdout. Panics if there is
    /// no such event, or several.
    fn expect_one_event(&self, name: &str) -> Value {
        let mut found: Vec<_> = self.parse_events().into_iter().filter(|e| e["event"] == name).collect();
        assert_eq!(found.len(), 1, "{name}: {}", self.stdout);
        found.remove(0)
    }
}

/// A job whose controller is running.
struct RunningJob<'a> {
    job: &'a MarkedJob,
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl RunningJob<'_> {
    /// Reads stdout up to the first line that contains `part`, and returns the line. Panics if
    /// stdout ends before.
    fn read_until(&mut self, part: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "stdout ended before {part:?}");
            if line.contains(part) {
                return line;
            }
        }
    }

    /// Reads stdout, which is JSON, up to the first event of this name.
    fn read_until_event(&mut self, name: &str) -> Value {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "stdout ended before {name:?}");
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == name {
                return event;
            }
        }
    }

    /// Sends `signal` to the controller of the job.
    fn send_signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits for the end of the controller. No process of the job may remain, unless a signal
    /// killed the controller.
    fn wait_for_end(mut self) -> EndedJob {
        let mut stderr = self.child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).map(|_| text).unwrap()
        });
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        let status = self.child.wait().unwrap();
        if status.signal().is_none() {
            assert_eq!(self.job.list_processes(), BTreeMap::new(), "processes remain");
        }
        EndedJob { status, stdout, stderr: stderr.join().unwrap() }
    }
}

/// Waits until a file exists. Panics after [`WAIT_LIMIT`].
fn wait_for_file(path: &Path) {
    let start = Instant::now();
    let mut pauses = PollPauses::new();
    while !path.exists() {
        assert!(start.elapsed() < WAIT_LIMIT, "{} was not created", path.display());
        pauses.pause();
    }
}

// ---- what a worker inherits ----

#[test]
fn every_rank_has_its_environment_variables() {
    let job = MarkedJob::with_shell_script(
        3,
        "env > env.$RANK; pwd >> env.$RANK; ls -l /proc/self/fd > fd.$RANK",
        &["env: {MINE: \"a b\"}"],
    );
    assert_eq!(job.run(&[]).exit_code(), 0);
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
        assert_eq!(env.lines().last().unwrap(), job.dir.path().to_str().unwrap());
    }
    assert!(ports[0] > 0 && ports.iter().all(|p| *p == ports[0]), "{ports:?}");
}

#[test]
fn a_worker_inherits_only_stdio_and_default_signal_handling() {
    // without close-on-exec: the controller inherits these descriptors
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let job = MarkedJob::new("name: test\nrun: {command: [ls, /proc/self/fd], logs: {prefix: false}}\n");
    assert_eq!(job.run(&[]).stdout, "0\n1\n2\n3\n", "ls itself opens descriptor 3");
    drop((reader, writer));
    let script = "readlink /proc/self/fd/0; ulimit -Sn; exec grep -e SigIgn -e SigBlk /proc/self/status";
    let ended = MarkedJob::with_shell_script(1, script, &["logs: {prefix: false}"]).run(&[]);
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
fn a_successful_job_shows_the_output_of_rank_0_and_logs_all_ranks() {
    let job = MarkedJob::with_shell_script(2, "echo out $RANK; echo err $RANK >&2", &[]);
    let ended = job.run(&[]);
    assert_eq!(ended.exit_code(), 0);
    assert_eq!(ended.stdout, "[rank 0] out 0\n");
    job.assert_snapshot("successful_job", &ended.stderr);
    for rank in 0..2 {
        let log = job.read_rank_log(rank);
        let mut lines: Vec<_> = log.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, [format!("err {rank}"), format!("out {rank}")]);
    }
}

#[test]
fn the_first_failure_ends_the_job_and_is_reported_once() {
    let script = "echo working $RANK; if [ $RANK = 1 ]; then echo no disk >&2; exit 3; fi; sleep 1000";
    let job = MarkedJob::with_shell_script(3, script, &[]);
    let ended = job.run(&[]);
    assert_eq!(ended.exit_code(), 1);
    job.assert_snapshot("first_failure", &ended.stderr);
    let job = MarkedJob::with_shell_script(3, script, &[]);
    let ended = job.run(&["--json"]);
    let failure = ended.expect_one_event("failure");
    let reason = json!({ "kind": "exit", "code": 3 });
    assert_eq!((&failure["rank"], &failure["reason"]), (&1.into(), &reason));
    assert_eq!(failure["tail"], json!(["working 1", "no disk"]));
    assert_eq!(ended.expect_one_event("done")["exit_code"], 1);
    let journal = fs::read_to_string(job.find_newest_run_dir().join("events.jsonl")).unwrap();
    let remove_journal_fields = |line: &str| {
        let mut event: Value = serde_json::from_str(line).unwrap();
        let fields = event.as_object_mut().unwrap();
        assert!(fields.remove("time").is_some_and(|time| time.is_f64()));
        assert!(fields.remove("report").is_some_and(|report| report.is_array()));
        event
    };
    let journal: Vec<Value> = journal.lines().map(remove_journal_fields).collect();
    assert_eq!(journal, ended.parse_events(), "the journal has the events that --json prints");
}

#[test]
fn the_signal_that_killed_a_worker_is_reported() {
    for (name, number, signal) in [("KILL", 9, "SIGKILL"), ("SEGV", 11, "SIGSEGV"), ("35", 35, "signal 35")] {
        let job =
            MarkedJob::with_shell_script(2, &format!("[ $RANK = 0 ] && kill -{name} $$; sleep 1000"), &[]);
        let ended = job.run(&["--json"]);
        assert_eq!(ended.exit_code(), 1);
        let reason = ended.expect_one_event("failure")["reason"].clone();
        assert_eq!((&reason["name"], &reason["number"]), (&signal.into(), &number.into()), "{reason}");
    }
}

#[test]
fn a_program_that_cannot_be_started_is_reported_with_the_reason() {
    let job = MarkedJob::new("");
    let mut messages = String::new();
    for (command, code) in [
        ("[no-such-program]", "worker-program-missing"),
        ("[./missing.sh]", "worker-program-missing"),
        ("[/etc/passwd]", "worker-program-not-executable"),
    ] {
        let yaml = format!("name: test\ncluster: {{workers_per_host: 2}}\nrun: {{command: {command}}}\n");
        fs::write(job.path("job.yaml"), yaml).unwrap();
        let ended = job.run(&["--json"]);
        let failure = ended.expect_one_event("failure");
        assert_eq!((ended.exit_code(), &failure["code"]), (3, &code.into()), "{failure}");
        assert_eq!(failure["reason"]["kind"], "start_failed", "{failure}");
        messages += &format!("{command}: {}\n", failure["message"].as_str().unwrap());
    }
    job.assert_snapshot("programs_that_cannot_be_started", &messages);
}

#[test]
fn a_job_may_have_many_more_workers_than_cores() {
    let cores = std::thread::available_parallelism().unwrap().get() as u32;
    let workers = 4 * cores + 1;
    let job = MarkedJob::with_shell_script(workers, "echo $RANK > done.$RANK", &[]);
    let ended = job.run(&["--json"]);
    assert_eq!(ended.exit_code(), 0);
    let message = ended.expect_one_event("notice")["message"].as_str().unwrap().to_owned();
    let message = message.replace(&format!("{workers} workers"), "[N] workers");
    job.assert_snapshot("more_workers_than_cores", &message.replace(&format!("{cores} CPU"), "[N] CPU"));
    assert!((0..workers).all(|rank| job.path(&format!("done.{rank}")).exists()));
}

#[test]
fn a_failing_job_does_not_disturb_another_job() {
    let waiting =
        MarkedJob::with_shell_script(2, "echo up; until [ -e go ]; do sleep 0.01; done; echo fine", &[]);
    let mut running = waiting.start(&[]);
    running.read_until("up");
    let failing = MarkedJob::with_shell_script(2, "exit 1", &[]);
    assert_eq!(failing.run(&[]).exit_code(), 1);
    fs::write(waiting.path("go"), "").unwrap();
    let ended = running.wait_for_end();
    assert_eq!((ended.exit_code(), ended.stdout.as_str()), (0, "[rank 0] fine\n"));
}

/// Starts a job whose controller has a pseudo-terminal as stdin, stdout and stderr. Returns the
/// controller and the master side of the pseudo-terminal, through which the test reads the output.
fn start_on_terminal(job: &MarkedJob, args: &[&str]) -> (Child, fs::File) {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let terminal = posix_openpt(flags).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname_r(&terminal).unwrap();
    let mut command = job.launch_command(args);
    // without TERM, the terminal counts as one that cannot move its cursor
    command.env("TERM", "xterm");
    let open = || fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(&name);
    let stdio = || Stdio::from(open().unwrap());
    command.stdin(stdio()).stdout(stdio()).stderr(stdio());
    // SAFETY: setsid and ioctl are async-signal-safe, and so allowed between fork and exec.
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
    // SAFETY: `into_raw_fd` gives up the ownership of the descriptor.
    (child, unsafe { fs::File::from_raw_fd(terminal.into_raw_fd()) })
}

/// Reads the output of programs on a pseudo-terminal until all of them have closed the terminal.
/// `terminal` is the master side of the pseudo-terminal.
fn read_terminal(mut terminal: fs::File) -> String {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    // a closed terminal returns the error EIO
    while let Ok(n @ 1..) = terminal.read(&mut buffer) {
        bytes.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
