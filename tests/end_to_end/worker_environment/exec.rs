//! Tests `launch exec`: commands next to workers on this machine and on other hosts.
use crate::support::{JobDirectory, output_to_text, simulated_hosts::SimulatedHosts};
use std::{
    fs,
    io::Read,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The longest wait for a process to start or to end.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A job that runs until the test ends it.
struct ActiveJob {
    job_dir: JobDirectory,
    launch: Child,
}

impl ActiveJob {
    /// Starts a job of two workers per host, and waits until they run. `cluster` is added to its
    /// section `cluster`.
    fn start(job_dir: JobDirectory, cluster: &str, hosts: u32) -> ActiveJob {
        let job = ActiveJob::begin(job_dir, cluster, "export ACTIVATED=yes\n");
        job.wait_until("the workers run", || {
            (0..2 * hosts).all(|rank| job.job_dir.path(&format!("ready.{rank}")).exists())
        });
        job
    }

    /// Starts a job of two workers per host whose `run.activate` is the shell script `activation`.
    fn begin(job_dir: JobDirectory, cluster: &str, activation: &str) -> ActiveJob {
        fs::write(job_dir.path("env.sh"), activation).unwrap();
        let text = format!(
            "name: served\ncluster: {{workers_per_host: 2{cluster}}}\nrun:\n  command: [sh, -c, 'touch ready.$RANK; exec \
             sleep 600']\n  activate: {{script: env.sh}}\n  env: {{FROM_JOB: job}}\n  grace_period: 1s\n"
        );
        fs::write(job_dir.path("job.yaml"), text).unwrap();
        let launch = job_dir.launch_command(&["job.yaml"]).stderr(Stdio::null()).spawn().unwrap();
        ActiveJob { job_dir, launch }
    }

    /// Waits until `condition` holds.
    fn wait_until(&self, what: &str, condition: impl Fn() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < WAIT_LIMIT, "waited in vain until {what}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the command `launch exec --rank RANK -- COMMAND`.
    fn exec_command(&self, rank: u32, command: &[&str]) -> Command {
        let rank = rank.to_string();
        let args = [&["exec", "served", "--rank", &rank, "--"][..], command].concat();
        self.job_dir.launch_command(&args)
    }

    /// Runs `launch exec --rank RANK -- COMMAND` to its end.
    fn run_exec(&self, rank: u32, command: &[&str]) -> Output {
        self.exec_command(rank, command).output().unwrap()
    }
}

impl Drop for ActiveJob {
    fn drop(&mut self) {
        self.job_dir.run_launch(&["stop", "--now", "--wait", "30"]);
        _ = self.launch.kill();
        _ = self.launch.wait();
    }
}

/// A shell command that prints the environment, the working directory, and the command of the
/// worker.
const DESCRIBE_SCRIPT: &str = "echo $RANK $WORLD_SIZE $FROM_JOB $ACTIVATED; pwd; tr '\\0' ' ' < /proc/$LAUNCH_WORKER_PID/cmdline; echo problem >&2; exit 7";

#[test]
fn a_command_runs_with_the_environment_of_its_rank() {
    let job = ActiveJob::start(JobDirectory::new(), "", 1);
    let output = job.run_exec(1, &["sh", "-c", DESCRIBE_SCRIPT]);
    let directory = job.job_dir.path("");
    let expected =
        format!("1 2 job yes\n{}\nsleep 600 ", directory.display().to_string().trim_end_matches('/'));
    assert_eq!((String::from_utf8_lossy(&output.stdout), output.status.code()), (expected.into(), Some(7)));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "problem\n");
    assert_eq!(job.run_exec(0, &["sh", "-c", "kill -9 $$"]).status.code(), Some(128 + 9));

    let much = job.run_exec(0, &["sh", "-c", "seq 1 200000; sleep 0.1; echo end"]);
    assert!(much.status.success());
    let numbers: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(String::from_utf8_lossy(&much.stdout) == numbers + "end\n", "output is missing or reordered");
    let began = Instant::now();
    assert!(job.run_exec(0, &["sh", "-c", "sleep 100 & exit 0"]).status.success());
    assert!(began.elapsed() < Duration::from_secs(50), "waited for a process in the background");
}

#[test]
fn a_command_waits_until_its_worker_has_started() {
    let job_dir = JobDirectory::new();
    let (begun, may_end) = (job_dir.path("activating"), job_dir.path("may_end"));
    let wait = format!("while [ ! -e '{}' ]; do sleep 0.02; done", may_end.display());
    let activation = format!("touch '{}'; {wait}; export ACTIVATED=yes\n", begun.display());
    let mut job = ActiveJob::begin(job_dir, "", &activation);
    job.wait_until("the activation runs", || begun.exists());
    let mut client = job.exec_command(1, &["sh", "-c", "echo $RANK $ACTIVATED"]);
    let mut client = client.stdout(Stdio::piped()).spawn().unwrap();
    let mut killed = job.exec_command(0, &["touch", "from_killed_client"]).spawn().unwrap();
    // the requests would be rejected in much less time
    thread::sleep(Duration::from_secs(1));
    assert_eq!(client.try_wait().unwrap(), None);
    assert_eq!(killed.try_wait().unwrap(), None);
    killed.kill().unwrap();
    killed.wait().unwrap();
    // the controller learns of the end of the client before the worker starts
    thread::sleep(Duration::from_secs(1));
    fs::write(&may_end, "").unwrap();
    let output = client.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1 yes\n");
    assert!(!job.job_dir.path("from_killed_client").exists());

    // A request that waits fails if its worker does not start.
    job.job_dir.run_launch(&["stop", "--now", "--wait", "30"]);
    job.launch.wait().unwrap();
    for file in [&begun, &may_end] {
        fs::remove_file(file).unwrap();
    }
    job.launch = job.job_dir.launch_command(&["job.yaml"]).stderr(Stdio::null()).spawn().unwrap();
    job.wait_until("the activation runs", || begun.exists());
    let mut client = job.exec_command(1, &["true"]).stderr(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(client.try_wait().unwrap(), None);
    job.job_dir.run_launch(&["stop", "--now"]);
    let output = client.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", output_to_text(&output));
    assert!(output_to_text(&output).contains("exec-rank-not-running"), "{}", output_to_text(&output));
}

#[test]
fn commands_that_cannot_run_are_rejected() {
    let job = ActiveJob::start(JobDirectory::new(), "", 1);
    for (rank, command, code) in
        [(2, "true", "exec-rank-not-running"), (0, "no-such-program", "worker-program-missing")]
    {
        let output = job.run_exec(rank, &[command]);
        assert_eq!(output.status.code(), Some(3), "{}", output_to_text(&output));
        assert!(output_to_text(&output).contains(code), "{}", output_to_text(&output));
    }
    let none = JobDirectory::new().run_launch(&["exec", "served", "--", "true"]);
    assert!(!none.status.success(), "{}", output_to_text(&none));
}

#[test]
fn a_command_ends_with_its_client_and_with_its_run() {
    let job = ActiveJob::start(JobDirectory::new(), "", 1);
    let script = "trap 'touch ended; exit' TERM; touch begun; while :; do sleep 0.05; done";
    let mut client = job.exec_command(0, &["sh", "-c", script]).spawn().unwrap();
    job.wait_until("the command runs", || job.job_dir.path("begun").exists());
    client.kill().unwrap();
    client.wait().unwrap();
    job.wait_until("the command gets SIGTERM", || job.job_dir.path("ended").exists());

    // A client that does not read stops the command, not the controller.
    let mut idle = job.exec_command(0, &["sh", "-c", "touch flooding; exec yes"]);
    let mut idle = idle.stdout(Stdio::piped()).spawn().unwrap();
    job.wait_until("the command runs", || job.job_dir.path("flooding").exists());
    assert!(job.run_exec(1, &["true"]).status.success());

    let client =
        job.exec_command(1, &["sh", "-c", "touch waiting; exec sleep 600"]).stderr(Stdio::piped()).spawn();
    job.wait_until("the command runs", || job.job_dir.path("waiting").exists());
    drop(job);
    let output = client.unwrap().wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", output_to_text(&output));
    idle.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
    idle.wait().unwrap();
}

#[test]
fn a_command_runs_on_the_host_of_its_rank() {
    check_commands_on_hosts("worker_environment::exec::a_command_runs_on_the_host_of_its_rank", 2);
}

/// The agent of the second host is connected through that of the first one.
#[test]
fn a_command_runs_below_another_agent() {
    check_commands_on_hosts("worker_environment::exec::a_command_runs_below_another_agent", 1);
}

/// Runs commands on two hosts, as the test `test`, with this `cluster.ssh.fanout`.
fn check_commands_on_hosts(test: &str, fanout: u32) {
    let job_dir = JobDirectory::new();
    let Some(hosts) = SimulatedHosts::start_with_shared_directory(test, 2, &job_dir.path("")) else { return };
    let config = hosts.ssh_config_path().display().to_string();
    let cluster = format!(", hosts: [h0, h1], ssh: {{config: {config}, fanout: {fanout}}}");
    let job = ActiveJob::start(job_dir, &cluster, 2);
    for (rank, host) in [(0, "h0"), (3, "h1")] {
        let output = job.run_exec(rank, &["sh", "-c", "hostname; echo $RANK $ACTIVATED; exit 5"]);
        let expected = format!("{host}\n{rank} yes\n");
        assert_eq!(
            (String::from_utf8_lossy(&output.stdout), output.status.code()),
            (expected.into(), Some(5)),
            "{}",
            output_to_text(&output)
        );
    }
    // More bytes than the connections between the agents hold.
    let much = job.run_exec(3, &["sh", "-c", "seq 1 200000"]);
    assert_eq!(much.stdout.iter().filter(|byte| **byte == b'\n').count(), 200_000);
    // The command ends with its client on another host, too.
    let mut client = job.exec_command(3, &["sh", "-c", "touch begun; exec sleep 611"]).spawn().unwrap();
    job.wait_until("the command runs", || job.job_dir.path("begun").exists());
    client.kill().unwrap();
    client.wait().unwrap();
    job.wait_until("the command has ended", || {
        hosts.list_processes("h1").iter().all(|(_, command)| !command.contains("611"))
    });
    drop(job);
}
