//! Tests training on several hosts over real SSH. The losses are bit-equal on any number of hosts,
//! also after saves, faults and restarts. Also tests unmodified programs for torchrun, and two jobs
//! on the same hosts.
mod hangs;
mod kept_workers;
mod memory_copies;
mod networks;
mod slow_links;
mod stop_requests;
mod top;
mod unmodified_programs;

use crate::support::{
    self, FinishedRun, JobDirectory, TINY_JOB, poll_pauses::PollPauses,
    process_list::find_processes_with_variable, simulated_hosts::SimulatedHosts,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, ChildStdout, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The names of the simulated hosts.
const HOSTS: [&str; 4] = ["h0", "h1", "h2", "h3"];
/// The longest wait for processes to end.
const WAIT_LIMIT: Duration = Duration::from_secs(90);

/// Starts four hosts and creates a job directory that all of them see under the same path, so that
/// they share the checkpoint directory. Returns `None` if the test is skipped.
fn start_hosts(test: &str) -> Option<(JobDirectory, SimulatedHosts)> {
    let job_dir = JobDirectory::new();
    let hosts = SimulatedHosts::start_with_executable(test, 4, &job_dir.path(""))?;
    fs::create_dir(job_dir.path("home")).unwrap();
    fs::create_dir(job_dir.path("jobs")).unwrap();
    Some((job_dir, hosts))
}

/// Writes the job file `job` to `jobs/NAME.yaml`, with `name` instead of `tiny` as the job's name.
/// Returns the arguments with which `launch` starts the job on the hosts of the YAML list `list`.
fn write_job(
    job_dir: &JobDirectory,
    hosts: &SimulatedHosts,
    name: &str,
    job: &str,
    list: &str,
) -> Vec<String> {
    let text = job.replace("name: tiny", &format!("name: {name}"));
    fs::write(job_dir.path(&format!("jobs/{name}.yaml")), text).unwrap();
    let root = job_dir.path("").display().to_string();
    let set = [
        format!("cluster.hosts={list}"),
        format!("cluster.ssh.config={}", hosts.ssh_config_path().display()),
        format!("run.workdir={}", root.trim_end_matches('/')),
        "run.logs.dir=/scratch/runs/{run}".to_owned(),
    ];
    let file = [format!("jobs/{name}.yaml"), "--json".to_owned()];
    file.into_iter().chain(set.into_iter().flat_map(|s| ["--set".to_owned(), s])).collect()
}

/// A run whose events the test reads while the run is active.
struct ActiveRun {
    child: Child,
    reader: BufReader<ChildStdout>,
    /// All events that were read so far, one per line.
    stdout: String,
}

/// Starts `launch` with the arguments `args` and with `--set` for each of the settings in `more`
/// (`path=value`).
fn start_run(job_dir: &JobDirectory, args: &[String], more: &[&str]) -> ActiveRun {
    start_run_with_variables(job_dir, args, more, &[])
}

/// Does the same as [`start_run`], with additional environment variables.
fn start_run_with_variables(
    job_dir: &JobDirectory,
    args: &[String],
    more: &[&str],
    variables: &[(&str, &Path)],
) -> ActiveRun {
    let args: Vec<&str> =
        args.iter().map(String::as_str).chain(more.iter().flat_map(|s| ["--set", s])).collect();
    let mut command = job_dir.launch_command(&args);
    command.env("HOME", job_dir.path("home")).envs(variables.iter().copied());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let reader = BufReader::new(child.stdout.take().unwrap());
    ActiveRun { child, reader, stdout: String::new() }
}

impl ActiveRun {
    /// Reads events up to the first event of `kind` at `step` or a later step, and returns that
    /// event. An event without a step also matches. Panics if the run ends before.
    fn wait_for_event(&mut self, kind: &str, step: u64) -> Value {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap() == 0 {
                let mut stderr = String::new();
                self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
                panic!("no {kind} event in:\n{}\n{stderr}", self.stdout);
            }
            self.stdout.push_str(&line);
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == kind && event["step"].as_u64().unwrap_or(step) >= step {
                return event;
            }
        }
    }

    /// Reads the remaining output, and waits until the run ends.
    fn wait_for_end(mut self) -> FinishedRun {
        let mut stderr = self.child.stderr.take().unwrap();
        let stderr = thread::spawn(move || {
            let mut text = Vec::new();
            stderr.read_to_end(&mut text).map(|_| text).unwrap()
        });
        self.reader.read_to_string(&mut self.stdout).unwrap();
        let status = self.child.wait().unwrap();
        let stdout = std::mem::take(&mut self.stdout).into_bytes();
        FinishedRun::from_output(&std::process::Output { status, stdout, stderr: stderr.join().unwrap() })
    }
}

/// Waits until the hosts with these names have no process of a job. Then checks on each host that
/// shared memory is empty, and that launch's cache contains no file other than the executable.
/// Panics if processes remain after [`WAIT_LIMIT`], or if a check fails.
fn assert_nothing_left(hosts: &SimulatedHosts, names: &[&str]) {
    let began = Instant::now();
    let mut pauses = PollPauses::new();
    loop {
        let left: Vec<_> = names.iter().flat_map(|host| hosts.list_processes(host)).collect();
        if left.is_empty() {
            break;
        }
        assert!(began.elapsed() < WAIT_LIMIT, "processes are left: {left:?}");
        pauses.pause();
    }
    for host in names {
        let files = hosts.run_shell(host, "ls -A /dev/shm; ls -A /root/.cache/launch/bin | wc -l");
        assert_eq!(files, "1\n", "files on {host}");
    }
}

/// The four hosts, as a value of the key `cluster.hosts`.
const ALL_HOSTS: &str = "[\"h[0-3]\"]";

#[test]
fn losses_on_four_hosts_equal_those_of_one_machine_and_other_hosts_resume() {
    let test = "cluster::losses_on_four_hosts_equal_those_of_one_machine_and_other_hosts_resume";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let whole =
        job_dir.run(&["resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    assert_eq!(whole.len(), 20);
    // as PBS lists the hosts of a job with two MPI processes per host
    let nodefile = job_dir.path("nodefile");
    fs::write(&nodefile, "h0\nh0\nh1\nh1\nh2\nh2\nh3\nh3\n").unwrap();
    for (stage, hosts_value) in [(1, ALL_HOSTS), (3, "pbs")] {
        let name = format!("stage{stage}");
        let args = write_job(&job_dir, &hosts, &name, TINY_JOB, hosts_value);
        let stage = format!("train.zero.stage={stage}");
        let more = [stage.as_str(), "checkpoint.keep=0"];
        let variables = [("PBS_NODEFILE", nodefile.as_path())];
        let ran =
            start_run_with_variables(&job_dir, &args, &more, &variables).wait_for_end().expect_success();
        assert_eq!(ran.collect_losses(), whole, "{stage}");
        assert_eq!(ran.events_named("start")[0]["world"], 8);
        for (list, workers) in [("[h0, h1, h3]", 1), ("[h2]", 4)] {
            let args = write_job(&job_dir, &hosts, &name, TINY_JOB, list);
            let from = format!("resume.from=runs/{name}/checkpoints/step-00000010");
            let workers = format!("cluster.workers_per_host={workers}");
            let more = [stage.as_str(), &from, &workers, "checkpoint.dir=elsewhere-{name}"];
            let rest = start_run(&job_dir, &args, &more).wait_for_end().expect_success();
            assert_eq!(rest.collect_losses(), whole[10..], "{stage}, {list}");
            assert_eq!(rest.events_named("resume")[0]["world"], 8);
        }
    }
    assert_nothing_left(&hosts, &HOSTS);
}

/// Kills one worker process of the host `h1` with SIGKILL.
fn kill_worker_of_h1(hosts: &SimulatedHosts) {
    let processes = hosts.list_processes("h1");
    let worker = processes.iter().find(|(_, line)| line.split(' ').any(|word| word == "worker"));
    kill(Pid::from_raw(worker.unwrap_or_else(|| panic!("{processes:?}")).0), Signal::SIGKILL).unwrap();
}

#[test]
fn losing_a_worker_and_a_host_does_not_change_the_losses() {
    let test = "cluster::losing_a_worker_and_a_host_does_not_change_the_losses";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let long = "train.steps=150";
    let whole =
        job_dir.run(&[long, "resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    let args = write_job(&job_dir, &hosts, "again", TINY_JOB, ALL_HOSTS);
    let set = [long, "checkpoint.every=10", "run.restarts=2", "run.min_hosts=3"];
    let mut job = start_run(&job_dir, &args, &set);
    job.wait_for_event("checkpoint", 10);
    kill_worker_of_h1(&hosts);
    let first = job.wait_for_event("restart", 0);
    assert_eq!((first["host"].as_str(), first["restarts_left"].as_u64()), (Some("h1"), Some(1)), "{first}");
    assert_eq!(first["reason"]["name"], "SIGKILL", "{first}");
    job.wait_for_event("checkpoint", 30);
    hosts.run_hosts_command(&["crash", "h2"]);
    let second = job.wait_for_event("restart", 0);
    assert_eq!(
        (second["host"].as_str(), second["restarts_left"].as_u64()),
        (Some("h2"), Some(0)),
        "{second}"
    );
    let ran = job.wait_for_end().expect_success();
    let placements: Vec<_> =
        ran.events_named("placement").iter().map(|e| (e["attempt"].clone(), e["world"].clone())).collect();
    assert_eq!(placements, [(0.into(), 8.into()), (1.into(), 8.into()), (2.into(), 6.into())]);
    assert_eq!(ran.events_named("placement")[2]["hosts"], serde_json::json!(["h0", "h1", "h3"]));
    assert_eq!(ran.events_named("resume").len(), 2);
    for step in ran.collect_losses() {
        assert_eq!(step, whole[step.0 as usize - 1]);
    }
    assert_eq!(ran.collect_losses().last().unwrap().0, 150);
    assert_nothing_left(&hosts, &["h0", "h1", "h3"]);
}

#[test]
fn a_changed_hostfile_adds_and_removes_hosts_of_a_run() {
    let Some((job_dir, hosts)) = start_hosts("cluster::a_changed_hostfile_adds_and_removes_hosts_of_a_run")
    else {
        return;
    };
    let write_hostfile = |text: &str| fs::write(job_dir.path("hosts.txt"), text).unwrap();
    write_hostfile("h0\nh1\nh2\n");
    let args = write_job(&job_dir, &hosts, "listed", TINY_JOB, "{file: hosts.txt}");
    let mut job = start_run(&job_dir, &args, &["train.steps=1000000", "run.min_hosts=2"]);
    job.wait_for_event("placement", 0);
    job.wait_for_event("step", 3);
    // an invalid hostfile is only reported
    write_hostfile("h0\nh2 slots=");
    job.wait_for_event("notice", 0);
    // one host is removed and another one added
    write_hostfile("h0\nh2\nh3\n");
    job.wait_for_event("notice", 0);
    let placement = job.wait_for_event("placement", 0);
    assert_eq!((&placement["attempt"], &placement["world"]), (&1.into(), &6.into()), "{placement}");
    assert_eq!(placement["hosts"], serde_json::json!(["h0", "h2", "h3"]));
    let resumed = job.wait_for_event("resume", 0)["step"].as_u64().unwrap();
    job.wait_for_event("step", resumed + 3);
    assert_nothing_left(&hosts, &["h1"]);
    // with fewer hosts than run.min_hosts, the job keeps one that isn't listed
    write_hostfile("h0\n");
    job.wait_for_event("notice", 0);
    let placement = job.wait_for_event("placement", 0);
    assert_eq!(placement["hosts"], serde_json::json!(["h0", "h2"]));
    let resumed = job.wait_for_event("resume", 0)["step"].as_u64().unwrap();
    job.wait_for_event("step", resumed + 3);
    kill(Pid::from_raw(job.child.id() as i32), Signal::SIGINT).unwrap();
    let ran = job.wait_for_end();
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    assert!(
        ran.events_named("restart").is_empty() && ran.events_named("failure").is_empty(),
        "{}",
        ran.stderr
    );
    job_dir.assert_snapshot("notices_of_a_changed_hostfile", &ran.notice_messages().join("\n"));
    assert_nothing_left(&hosts, &["h0", "h2", "h3"]);
    let steps = ran.collect_losses();
    let undisturbed = format!("train.steps={}", steps.last().unwrap().0);
    let whole = job_dir
        .run(&[&undisturbed, "resume.from=never", "checkpoint.every=never"])
        .expect_success()
        .collect_losses();
    assert_eq!(steps, whole, "every step once, with the bits of one machine");
}

/// Checks the failure after a network partition between two hosts that the controller still
/// reaches.
#[test]
fn a_partition_between_two_hosts_ends_the_job_and_names_their_ranks() {
    let test = "cluster::a_partition_between_two_hosts_ends_the_job_and_names_their_ranks";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let args = write_job(&job_dir, &hosts, "apart", TINY_JOB, ALL_HOSTS);
    let mut job = start_run(&job_dir, &args, &["train.steps=100000"]);
    job.wait_for_event("step", 3);
    hosts.run_hosts_command(&["partition", "h1", "h2"]);
    let began = Instant::now();
    let ran = job.wait_for_end();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    println!("after {:?}: {}", began.elapsed(), ran.failure_message());
    assert_eq!((ran.code, ran.failure_reason_kind()), (1, "aborted_by_peer"), "{}", ran.expect_failure());
    assert_eq!(ran.failure_diagnostics()[0]["code"], "peer-silent", "{}", ran.expect_failure());
    // ranks 2 and 3 are on h1, 4 and 5 on h2
    let fields = &ran.failure_diagnostics()[0]["fields"];
    let ranks = ["peer", "observer"].map(|name| fields[name].as_u64().unwrap());
    let (h1, h2) = (2..=3, 4..=5);
    let is_named = |[a, b]: [u64; 2]| h1.contains(&a) && h2.contains(&b);
    assert!(is_named(ranks) || is_named([ranks[1], ranks[0]]), "{fields}");
    assert_nothing_left(&hosts, &HOSTS);
}

#[test]
fn a_run_of_another_host_is_listed_and_stopped_only_there() {
    let test = "cluster::a_run_of_another_host_is_listed_and_stopped_only_there";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let job =
        "name: tiny\ncluster: {workers_per_host: 1}\nrun: {command: [sleep, '1000'], grace_period: 1s}\n";
    let mut run = start_run(
        &job_dir,
        &write_job(&job_dir, &hosts, "seen", job, "[h0, h1]"),
        &["run.logs.dir=runs/{name}/{run}"],
    );
    run.wait_for_event("placement", 0);
    // the executable that the run copied to the host of its last rank
    let root = job_dir.path("").display().to_string();
    let launch_on_h1 = |args: &str| {
        let executable = "exe=$(ls -d /root/.cache/launch/bin/* | head -n 1)";
        hosts.run_shell("h1", &format!("cd {root}; {executable}; \"$exe\" --json {args}; echo $?"))
    };
    let listed = launch_on_h1("ps");
    let listed: Value = serde_json::from_str(listed.lines().next().unwrap()).unwrap();
    assert_eq!(listed[0]["state"], "elsewhere", "{listed}");
    let mut messages = String::new();
    for args in ["stop", "stop --now"] {
        let rejected = launch_on_h1(args);
        let (error, exit_code) = rejected.trim().rsplit_once('\n').unwrap();
        let error: Value = serde_json::from_str(error).unwrap();
        assert_eq!((&error["code"], exit_code), (&"run-on-other-host".into(), "3"), "{error}");
        messages += &format!("{args}: {}\n  help: {}\n", error["message"], error["help"]);
    }
    job_dir.assert_snapshot("stop_on_another_host", &messages);
    // the run can be stopped on this machine
    let stopped = job_dir.run_launch(&["stop"]);
    assert!(stopped.status.success(), "{}", String::from_utf8_lossy(&stopped.stderr));
    assert_eq!(run.wait_for_end().code, 143);
    assert_nothing_left(&hosts, &["h0", "h1"]);
}

#[test]
fn two_jobs_on_the_same_hosts_are_independent() {
    let Some((job_dir, hosts)) = start_hosts("cluster::two_jobs_on_the_same_hosts_are_independent") else {
        return;
    };
    let long = "train.steps=100";
    let whole =
        job_dir.run(&[long, "resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    let [left, right] = ["left", "right"].map(|name| write_job(&job_dir, &hosts, name, TINY_JOB, ALL_HOSTS));
    let (mut left, mut right) =
        (start_run(&job_dir, &left, &["train.steps=100000"]), start_run(&job_dir, &right, &[long]));
    left.wait_for_event("step", 3);
    right.wait_for_event("step", 3);
    kill(Pid::from_raw(left.child.id() as i32), Signal::SIGINT).unwrap();
    let left = left.wait_for_end();
    assert_eq!(left.code, 130, "{}", left.stderr);
    assert_eq!(right.wait_for_end().expect_success().collect_losses(), whole);
    assert_nothing_left(&hosts, &HOSTS);
}

#[test]
fn fifty_consecutive_runs_leave_nothing_on_the_hosts() {
    let Some((job_dir, hosts)) = start_hosts("cluster::fifty_consecutive_runs_leave_nothing_on_the_hosts")
    else {
        return;
    };
    let script = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT && echo $WORLD_SIZE > connected.$RANK";
    let job =
        format!("name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [bash, -c, '{script}']}}\n");
    let args = write_job(&job_dir, &hosts, "row", &job, ALL_HOSTS);
    for number in 0..50 {
        let ran = start_run(&job_dir, &args, &[]).wait_for_end();
        assert_eq!(ran.code, 0, "run {number}: {}", ran.stderr);
        for rank in 0..8 {
            let connected = job_dir.path(&format!("connected.{rank}"));
            assert_eq!(fs::read_to_string(&connected).unwrap(), "8\n", "run {number}, rank {rank}");
            fs::remove_file(connected).unwrap();
        }
        assert_nothing_left(&hosts, &HOSTS);
    }
    for host in HOSTS {
        assert_eq!(hosts.run_shell(host, "ls -A /tmp | grep -v '^[.]tmp' || true"), "", "{host}");
    }
}

#[test]
fn the_store_outlives_the_ranks_of_its_host() {
    let Some((job_dir, hosts)) = start_hosts("cluster::the_store_outlives_the_ranks_of_its_host") else {
        return;
    };
    let script = "[ $RANK -lt 2 ] && exit; until [ -e go ]; do sleep 0.05; done; exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT";
    let job =
        format!("name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [bash, -c, '{script}']}}\n");
    let mut run = start_run(&job_dir, &write_job(&job_dir, &hosts, "store", &job, ALL_HOSTS), &[]);
    run.wait_for_event("placement", 0);
    let shells =
        |host: &str| hosts.list_processes(host).iter().filter(|(_, l)| l.contains("until [ -e go ]")).count();
    let began = Instant::now();
    let mut pauses = PollPauses::new();
    while HOSTS.iter().map(|host| shells(host)).ne([0, 2, 2, 2]) {
        assert!(began.elapsed() < WAIT_LIMIT);
        pauses.pause();
    }
    fs::write(job_dir.path("go"), "").unwrap();
    run.wait_for_end().expect_success();
    assert_nothing_left(&hosts, &HOSTS);
}

#[test]
fn fifty_consecutive_runs_leave_nothing_on_this_machine() {
    let job_dir = JobDirectory::new();
    let (temporary, cache) = (job_dir.path("temporary"), job_dir.path("home"));
    for dir in [&temporary, &cache] {
        fs::create_dir(dir).unwrap();
    }
    let marker = format!("LAUNCH_TEST_MARKER={}", job_dir.path("").display());
    for number in 0..50 {
        let script = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT && echo connected";
        let args = ["run", "--workers", "3", "--json", "--", "bash", "-c", script];
        let mut command = job_dir.launch_command(&args);
        command.env("TMPDIR", &temporary).env("HOME", &cache);
        command.env("LAUNCH_TEST_MARKER", job_dir.path(""));
        let ran = FinishedRun::from_output(&command.output().unwrap());
        assert_eq!(ran.code, 0, "run {number}: {}", ran.stderr);
        assert_eq!(find_processes_with_variable(&marker), Vec::<i32>::new(), "run {number}");
        assert_eq!(support::list_files_below(&temporary), Vec::<String>::new());
    }
}
