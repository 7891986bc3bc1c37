//! Tests that runs on three hosts survive a stalled run directory, and controllers that are
//! suspended, killed, or lost with their host. A run that outlives its controller has the same
//! steps, losses and weights as an undisturbed run.
mod agent_tree;
mod controller_timeout;
mod disk;
mod programs;
mod random_kills;
mod stalled_restart;
mod stalling_directory;

use crate::support::{
    FinishedRun, JobDirectory, TINY_JOB, environment::LAUNCH_EXECUTABLE, output_to_text,
    poll_pauses::PollPauses, simulated_hosts::SimulatedHosts, slowed_worker::SlowedWorker,
};
use disk::RunDirectoryDisk;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use stalling_directory::StallingDirectory;
use std::{
    env, fs,
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The hosts of the runs.
const HOSTS: [&str; 3] = ["h0", "h1", "h2"];
/// The longest wait for a condition.
const WAIT_LIMIT: Duration = Duration::from_secs(90);
/// The shell command of each rank: prints increasing numbers and appends them to the file
/// `count.RANK`, until a file named `finish` exists.
const COUNTING_SCRIPT: &str =
    "i=0; until [ -e finish ]; do i=$((i+1)); echo tick $i; echo $i >> count.$RANK; sleep 0.1; done";

/// Waits until a condition holds. Panics with `what` after [`WAIT_LIMIT`].
#[track_caller]
fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let began = Instant::now();
    let mut pauses = PollPauses::new();
    while !is_true() {
        assert!(began.elapsed() < WAIT_LIMIT, "not within {WAIT_LIMIT:?}: {what}");
        pauses.pause();
    }
}

/// Returns the number of seconds that an environment variable contains; `seconds` if the variable
/// is not set.
fn read_seconds_variable(variable: &str, seconds: u64) -> Duration {
    let value = env::var(variable).ok().and_then(|value| value.parse().ok());
    Duration::from_secs(value.unwrap_or(seconds))
}

/// The largest number of hosts that get the executable without a copy over SSH.
const MAX_HOSTS_WITH_EXECUTABLE: u32 = 4;

/// Hosts, and a directory that all of them and this machine see under the same path.
struct RunHosts {
    // The hosts end before the disks are unmounted, and the disks before their directories are
    // removed.
    hosts: SimulatedHosts,
    disk: Option<RunDirectoryDisk>,
    stalling: Option<StallingDirectory>,
    job_dir: JobDirectory,
}

impl RunHosts {
    /// Starts `count` hosts. With `has_disk`, the run directories are on a separate disk. Returns
    /// `None` if the test is skipped.
    fn start(test: &str, count: u32, has_disk: bool) -> Option<RunHosts> {
        let job_dir = JobDirectory::new();
        fs::create_dir(job_dir.path("runs")).unwrap();
        let disk = match has_disk {
            true => Some(RunDirectoryDisk::mount(test, &job_dir.path("disk.img"), &job_dir.path("runs"))?),
            false => None,
        };
        RunHosts::start_in_directory(test, count, job_dir, (disk, None))
    }

    /// Starts three hosts with a directory `stalling` that can be stalled. Returns `None` if the
    /// test is skipped.
    fn start_with_stalling_directory(test: &str) -> Option<RunHosts> {
        let job_dir = JobDirectory::new();
        ["runs", "stalling"].iter().for_each(|name| fs::create_dir(job_dir.path(name)).unwrap());
        let stalling = StallingDirectory::mount(test, &job_dir.path("stalling"))?;
        RunHosts::start_in_directory(test, 3, job_dir, (None, Some(stalling)))
    }

    /// Starts `count` hosts that all see the directory of `job_dir`. `disk` and `stalling` are the
    /// test file systems that are mounted in this directory. Returns `None` if the test is skipped.
    fn start_in_directory(
        test: &str,
        count: u32,
        job_dir: JobDirectory,
        (disk, stalling): (Option<RunDirectoryDisk>, Option<StallingDirectory>),
    ) -> Option<RunHosts> {
        // The large tree of agents also distributes the executable.
        let start = match count > MAX_HOSTS_WITH_EXECUTABLE {
            true => SimulatedHosts::start_with_shared_directory,
            false => SimulatedHosts::start_with_executable,
        };
        let hosts = start(test, count, &job_dir.path(""))?;
        fs::create_dir_all(job_dir.path(".home/.ssh")).unwrap();
        fs::copy(hosts.ssh_config_path(), job_dir.path(".home/.ssh/config")).unwrap();
        Some(RunHosts { hosts, disk, stalling, job_dir })
    }

    /// Writes the job file of a run. Returns the arguments that start the run in the background.
    fn write_job(&self, name: &str, job: &str, hosts: &[&str], set: &[&str]) -> Vec<String> {
        let text = job.replace("name: tiny", &format!("name: {name}"));
        fs::write(self.job_dir.path(&format!("{name}.yaml")), text).unwrap();
        let root = self.job_dir.path("").display().to_string();
        let root = root.trim_end_matches('/');
        let mut args = vec!["run".to_owned(), format!("{name}.yaml"), "--detach".into(), "--json".into()];
        for setting in [
            format!("cluster.hosts=[{}]", hosts.join(", ")),
            format!("run.workdir={root}"),
            format!("run.logs.dir={root}/runs/{name}"),
        ] {
            args.extend(["--set".to_owned(), setting]);
        }
        args.extend(set.iter().flat_map(|setting| ["--set".to_owned(), (*setting).to_owned()]));
        args
    }

    /// Starts a run in the background, with a controller on this machine.
    #[track_caller]
    fn start_run(&self, name: &str, job: &str, set: &[&str]) -> BackgroundRun<'_> {
        self.start_run_on(&HOSTS, name, job, set)
    }

    /// Starts a run on these hosts in the background, with a controller on this machine.
    #[track_caller]
    fn start_run_on(&self, hosts: &[&str], name: &str, job: &str, set: &[&str]) -> BackgroundRun<'_> {
        let args = self.write_job(name, job, hosts, set);
        let output = self.job_dir.run_launch(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", output_to_text(&output));
        let started: Value = serde_json::from_slice(&output.stdout).unwrap();
        let controller = Some(started["pid"].as_i64().unwrap() as i32);
        BackgroundRun { hosts: self, directory: self.job_dir.path(&format!("runs/{name}")), controller }
    }

    /// Starts a training of `steps` steps in the background.
    #[track_caller]
    fn start_training(&self, name: &str, steps: u64, set: &[&str]) -> BackgroundRun<'_> {
        let steps = format!("train.steps={steps}");
        let set = [&[steps.as_str(), "cluster.workers_per_host=1"], set].concat();
        self.start_run(name, TINY_JOB, &set)
    }

    /// Trains `steps` steps without a disturbance, on this machine.
    fn train_undisturbed(&self, steps: u64) -> FinishedRun {
        let steps = format!("train.steps={steps}");
        self.job_dir.run(&[&steps, "resume.from=never", "checkpoint.dir=undisturbed"]).expect_success()
    }

    /// Checks that the last checkpoint of a run has the weights and the optimizer's state of the
    /// undisturbed run.
    #[track_caller]
    fn check_weights(&self, checkpoints: &str, step: u64) {
        let path = |directory: &str| format!("{directory}/step-{step:08}");
        let (a, b) = (path("undisturbed"), path(checkpoints));
        let compared = self.job_dir.run_launch(&["ckpt", "diff", &a, &b]);
        assert!(compared.status.success(), "{}", output_to_text(&compared));
    }

    /// Waits until the hosts have no process of a job, apart from sessions of sshd.
    #[track_caller]
    fn wait_for_no_process(&self) {
        self.wait_for_no_process_on(&HOSTS);
    }

    /// Waits until these hosts have no process of a job, apart from sessions of sshd.
    #[track_caller]
    fn wait_for_no_process_on(&self, hosts: &[&str]) {
        let began = Instant::now();
        let mut pauses = PollPauses::new();
        loop {
            let mut left: Vec<_> = hosts.iter().flat_map(|host| self.hosts.list_processes(host)).collect();
            // A session whose client is lost with its host ends after minutes.
            left.retain(|(_, line)| !line.starts_with("sshd:"));
            if left.is_empty() {
                return;
            }
            assert!(began.elapsed() < WAIT_LIMIT, "processes are left: {left:?}");
            pauses.pause();
        }
    }

    /// Finds the agent of a host that has a worker whose command line begins with `worker_line`.
    #[track_caller]
    fn find_agent(&self, host: &str, worker_line: &str) -> Pid {
        let processes = self.hosts.list_processes(host);
        let worker = processes.iter().find(|(_, line)| line.starts_with(worker_line));
        let (worker, _) = worker.unwrap_or_else(|| panic!("no worker on {host}: {processes:?}"));
        let status = fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
        Pid::from_raw(parent.trim().parse().unwrap())
    }
}

/// A run whose controller is in the background.
struct BackgroundRun<'a> {
    hosts: &'a RunHosts,
    directory: PathBuf,
    /// The pid of the controller; `None` if the controller is on another host.
    controller: Option<i32>,
}

impl BackgroundRun<'_> {
    /// Sends a signal to the controller.
    #[track_caller]
    fn signal_controller(&self, signal: Signal) {
        kill(Pid::from_raw(self.controller.unwrap()), signal).unwrap();
    }

    /// Starts `launch attach` for this run in the foreground.
    fn start_attach(&self) -> Child {
        let directory = self.directory.display().to_string();
        let mut command = self.hosts.job_dir.launch_command(&["attach", &directory, "--json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Takes over the run with a controller in the background. Returns the exit code and the
    /// output.
    fn attach_in_background(&mut self) -> (i32, String) {
        let directory = self.directory.display().to_string();
        let output = self.hosts.job_dir.run_launch(&["attach", &directory, "--detach", "--json"]);
        if output.status.success() {
            let started: Value = serde_json::from_slice(&output.stdout).unwrap();
            self.controller = Some(started["pid"].as_i64().unwrap() as i32);
        }
        (output.status.code().unwrap_or(-1), output_to_text(&output))
    }

    /// Kills the controller, and takes over the run after a random pause. Checks that a third
    /// controller is rejected.
    #[track_caller]
    fn kill_and_replace_controller(&mut self, random: &mut u64) {
        self.signal_controller(Signal::SIGKILL);
        thread::sleep(Duration::from_millis(draw_number(random, 500)));
        let (code, text) = self.attach_in_background();
        assert_eq!(code, 0, "{text}");
        let (code, text) = self.attach_in_background();
        assert!(code == 3 && text.contains("run-has-controller"), "{code} {text}");
    }

    /// Reads the complete lines of the journal.
    fn read_journal(&self) -> FinishedRun {
        let text = fs::read_to_string(self.directory.join("events.jsonl")).unwrap_or_default();
        let complete = text.rfind('\n').map_or("", |end| &text[..=end]);
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let events: Vec<Value> = complete.lines().map(parse).collect();
        let done = events.iter().find(|event| event["event"] == "done");
        let code = done.and_then(|event| event["exit_code"].as_i64()).unwrap_or(-1) as i32;
        FinishedRun { code, events, stderr: String::new() }
    }

    /// Returns the last step in the journal; 0 without one.
    fn last_step(&self) -> u64 {
        self.read_journal().collect_losses().last().map_or(0, |step| step.0)
    }

    /// Reads the events of the journal after its first `offset` bytes. Returns them, and the offset
    /// of their end.
    fn read_events_after(&self, offset: usize) -> (Vec<Value>, usize) {
        let text = fs::read(self.directory.join("events.jsonl")).unwrap_or_default();
        let added = text.get(offset..).unwrap_or_default();
        let end = added.iter().rposition(|byte| *byte == b'\n').map_or(0, |position| position + 1);
        let events = added[..end].split_inclusive(|byte| *byte == b'\n');
        (events.map(|line| serde_json::from_slice(line).unwrap()).collect(), offset + end)
    }

    /// Waits until the journal has the end of the run, and returns its events. Panics if no event
    /// is added for [`WAIT_LIMIT`].
    #[track_caller]
    fn wait_for_end(&self) -> FinishedRun {
        let (mut offset, mut has_ended) = (0, false);
        while !has_ended {
            wait_until("the journal has another event", || {
                let (events, end) = self.read_events_after(offset);
                offset = end;
                has_ended = events.iter().any(|event| event["event"] == "done");
                !events.is_empty()
            });
        }
        self.read_journal()
    }

    /// Waits until the run has made a step after this call. Panics if the run ends.
    #[track_caller]
    fn wait_for_step(&self) {
        let (_, mut offset) = self.read_events_after(0);
        wait_until("the run makes progress", || {
            let (events, end) = self.read_events_after(offset);
            offset = end;
            let has_ended = events.iter().any(|event| event["event"] == "done");
            assert!(!has_ended, "the run has ended: {:?}", self.read_journal().notice_messages());
            events.iter().any(|event| event["event"] == "step")
        });
    }
}

/// Checks that a journal has one start and one end without a failure, this number of takeovers, and
/// each step once with the losses of the undisturbed run.
#[track_caller]
fn check_undisturbed_journal(ran: &FinishedRun, undisturbed: &FinishedRun, takeovers: usize) {
    let count = |name: &str| ran.events_named(name).len();
    let counts = ["start", "placement", "restart", "failure", "done", "takeover"].map(count);
    assert_eq!(counts, [1, 1, 0, 0, 1, takeovers], "{:?}", ran.notice_messages());
    assert_eq!(ran.code, 0);
    assert_eq!(ran.events.last().unwrap()["event"], "done");
    assert_eq!(ran.collect_losses(), undisturbed.collect_losses());
}

/// Returns the time in seconds since 1970.
fn read_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Checks that a training has made steps between two times, without a pause of two seconds or more.
#[track_caller]
fn check_steps_between(ran: &FinishedRun, what: &str, (from, to): (f64, f64)) {
    let times = ran.events_named("step").into_iter().map(|event| event["time"].as_f64().unwrap());
    let mut last = from;
    for time in times.filter(|time| (from..to).contains(time)).chain([to]) {
        assert!(time - last < 2.0, "{what}: no step for {:.1} s", time - last);
        last = time;
    }
}

/// Returns the state of the run of this job in the output of `launch ps`. The run directory may be
/// stalled, so the command must not write to it.
#[track_caller]
fn read_listed_state(hosts: &RunHosts, job: &str) -> String {
    let output = hosts.job_dir.run_launch(&["ps", "--json"]);
    assert!(output.status.success(), "{}", output_to_text(&output));
    let runs: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let run = runs.iter().find(|run| run["name"] == job);
    run.unwrap_or_else(|| panic!("{job} in {runs:?}"))["state"].as_str().unwrap().to_owned()
}

/// Disturbs a running training and, at the same time, a running program in several ways: the run
/// directory stalls, its disk is full, and the controllers are suspended. Checks that both continue
/// during each disturbance.
#[test]
fn stalled_and_full_run_directories_and_suspended_controllers_disturb_no_run() {
    let test = "takeovers::stalled_and_full_run_directories_and_suspended_controllers_disturb_no_run";
    let Some(hosts) = RunHosts::start(test, 3, true) else { return };
    let disk = hosts.disk.as_ref().unwrap();
    let stall = read_seconds_variable("LAUNCH_TEST_STALL_SECONDS", 20);
    let suspension = read_seconds_variable("LAUNCH_TEST_SUSPEND_SECONDS", 10);
    let full_disk = Duration::from_secs(10);
    // A slowed training makes at most 15 steps per second.
    let steps = 150 + 15 * (stall + suspension + full_disk).as_secs();
    let undisturbed = hosts.train_undisturbed(steps);
    let training =
        hosts.start_training("training", steps, &["checkpoint.every=never", "checkpoint.dir=saved"]);
    let slowed = SlowedWorker::start(&hosts.hosts, "h1");
    let job = format!(
        "name: tiny\ncluster: {{workers_per_host: 1}}\nrun: {{command: [sh, -c, '{COUNTING_SCRIPT}']}}\n"
    );
    let program = hosts.start_run("program", &job, &[]);
    let read_count = |rank: usize| -> u64 {
        let text = fs::read_to_string(hosts.job_dir.path(&format!("count.{rank}"))).unwrap_or_default();
        text.lines().last().and_then(|line| line.parse().ok()).unwrap_or(0)
    };
    wait_until("the program counts", || (0..3).all(|rank| read_count(rank) > 0));
    let disturb = |what: &'static str, pause: Duration| {
        let (before, from) = ([0, 1, 2].map(read_count), read_time());
        thread::sleep(pause);
        for (rank, before) in before.into_iter().enumerate() {
            assert!(read_count(rank) >= before + 2 * pause.as_secs(), "{what}: rank {rank} continues");
        }
        for job in ["training", "program"] {
            assert_eq!(read_listed_state(&hosts, job), "running", "{what}: {job}");
        }
        (what, from, read_time())
    };
    disk.freeze();
    let stalled = disturb("the run directory stalls", stall);
    disk.thaw();
    disk.fill();
    let full = disturb("the disk is full", full_disk);
    disk.free();
    let before = training.last_step();
    [&training, &program].iter().for_each(|run| run.signal_controller(Signal::SIGSTOP));
    disturb("the controllers are suspended", suspension);
    [&training, &program].iter().for_each(|run| run.signal_controller(Signal::SIGCONT));
    thread::sleep(Duration::from_secs(2));
    // The events of the suspension have the time at which the controller has read them.
    let made = training.last_step() - before;
    assert!(made >= suspension.as_secs(), "{made} steps while the controller is suspended");
    assert!(training.last_step() < steps, "the training is not over before its last disturbance");
    drop(slowed);
    fs::write(hosts.job_dir.path("finish"), "").unwrap();
    let trained = training.wait_for_end();
    check_undisturbed_journal(&trained, &undisturbed, 0);
    for (what, from, to) in [stalled, full] {
        check_steps_between(&trained, what, (from, to));
    }
    hosts.check_weights("saved", steps);
    let ended = program.wait_for_end();
    assert_eq!((ended.code, ended.events_named("restart").len()), (0, 0), "{:?}", ended.notice_messages());
    for job in ["training", "program"] {
        wait_until("the listed end of the run", || read_listed_state(&hosts, job) == "done");
    }
    for rank in 0..3 {
        let log = fs::read_to_string(program.directory.join(format!("logs/rank-{rank}.log"))).unwrap();
        let ticks: Vec<String> = (1..=read_count(rank)).map(|i| format!("tick {i}")).collect();
        assert_eq!(log.lines().collect::<Vec<_>>(), ticks, "the log of rank {rank} is complete");
    }
    hosts.wait_for_no_process();
}

/// Takes away the host of the first controller, kills the second controller, and lets the third one
/// end the run.
#[test]
fn a_training_outlives_the_host_of_its_controller() {
    let test = "takeovers::a_training_outlives_the_host_of_its_controller";
    let Some(hosts) = RunHosts::start(test, 4, false) else { return };
    let steps = 400;
    let undisturbed = hosts.train_undisturbed(steps);
    let (count, set) = (format!("train.steps={steps}"), "cluster.workers_per_host=1");
    let set = [count.as_str(), set, "checkpoint.dir=saved", "checkpoint.every=never"];
    let args =
        hosts.write_job("training", TINY_JOB, &HOSTS, &[&set[..], &["run.controller_lease=3s"]].concat());
    let args: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
    let root = hosts.job_dir.path("").display().to_string();
    hosts.hosts.run_shell("h3", &format!("cd {root} && {LAUNCH_EXECUTABLE} {}", args.join(" ")));
    let slowed = SlowedWorker::start(&hosts.hosts, "h1");
    let mut run =
        BackgroundRun { hosts: &hosts, directory: hosts.job_dir.path("runs/training"), controller: None };
    wait_until("the journal has steps", || run.last_step() >= 3);
    hosts.hosts.run_hosts_command(&["crash", "h3"]);
    let lost_at = read_time();
    thread::sleep(Duration::from_secs(4));
    let unattended = (lost_at, read_time());
    for takeovers in 1..=2 {
        let before = run.last_step();
        let began = Instant::now();
        let (code, text) = run.attach_in_background();
        assert_eq!(code, 0, "{text}");
        wait_until("the journal has later steps", || run.last_step() > before + 5);
        let elapsed = began.elapsed();
        println!("takeover {takeovers} shows progress after {elapsed:.2?}");
        assert!(elapsed < Duration::from_secs(10), "takeover {takeovers} took {elapsed:?}");
        let (code, text) = run.attach_in_background();
        assert!(code == 3 && text.contains("run-has-controller"), "one controller at a time: {code} {text}");
        if takeovers == 1 {
            run.signal_controller(Signal::SIGKILL);
            thread::sleep(Duration::from_secs(1));
        }
    }
    assert!(run.last_step() < steps, "the training is not over before the last takeover");
    // The last controller shows the progress, and has the exit code of the run.
    run.signal_controller(Signal::SIGKILL);
    let attached = run.start_attach();
    drop(slowed);
    let shown = FinishedRun::from_output(&attached.wait_with_output().unwrap()).expect_success();
    assert!(!shown.events_named("step").is_empty(), "live progress: {:?}", shown.events);
    let ran = run.wait_for_end();
    check_undisturbed_journal(&ran, &undisturbed, 3);
    check_steps_between(&ran, "the host of the controller is lost", unattended);
    hosts.check_weights("saved", steps);
    hosts.wait_for_no_process();
}

#[test]
fn a_lost_controller_ends_the_run_within_its_lease_if_the_job_asks_for_it() {
    let test = "takeovers::a_lost_controller_ends_the_run_within_its_lease_if_the_job_asks_for_it";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    let set = ["run.on_controller_loss=stop", "run.controller_lease=3s"];
    for (name, signal) in [("killed", Signal::SIGKILL), ("suspended", Signal::SIGSTOP)] {
        let run = hosts.start_training(name, 1_000_000, &set);
        let slowed = SlowedWorker::start(&hosts.hosts, "h1");
        wait_until("the journal has steps", || run.last_step() >= 3);
        let began = Instant::now();
        run.signal_controller(signal);
        drop(slowed);
        hosts.wait_for_no_process();
        let elapsed = began.elapsed();
        println!("{name}: no process after {elapsed:.2?}");
        assert!(elapsed < Duration::from_secs(6), "{name}: {elapsed:?}");
        if signal == Signal::SIGSTOP {
            run.signal_controller(Signal::SIGKILL);
        }
    }
}

/// Returns the number of kills from the environment variable `LAUNCH_TEST_KILLS`, or `default` if
/// it is not set.
fn read_kill_count(default: u64) -> u64 {
    env::var("LAUNCH_TEST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(default)
}

/// Returns the seed for [`draw_number`] from the environment variable `LAUNCH_TEST_SEED`, or
/// `default` if it is not set.
fn read_kill_seed(default: u64) -> u64 {
    env::var("LAUNCH_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(default)
}

/// Returns the next pseudo-random number below `below`, and updates the generator's state `state`.
fn draw_number(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % below
}
