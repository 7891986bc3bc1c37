//! Tests jobs whose nodes join: one `launch` on each of several hosts in namespaces, which have no
//! sshd.
use crate::support::{
    FinishedRun, JobDirectory, environment::LAUNCH_EXECUTABLE, output_to_text, poll_pauses::PollPauses,
    simulated_hosts::SimulatedHosts,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    process::{Child, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The longest wait for a condition.
const WAIT_LIMIT: Duration = Duration::from_secs(90);
/// A program that runs until a file named `finish` exists.
const WAITING_PROGRAM: &str = "echo $RANK >> started; until [ -e finish ]; do sleep 0.1; done";

/// Hosts without sshd, and a directory that all of them see under the same path.
struct Nodes {
    hosts: SimulatedHosts,
    prefix: &'static str,
    job_dir: JobDirectory,
}

impl Nodes {
    /// Starts `count` hosts called `PREFIX0`, `PREFIX1` and so on, and writes two files with
    /// different keys. Returns `None` if the test is skipped.
    fn start(test: &str, prefix: &'static str, count: u32) -> Option<Nodes> {
        let job_dir = JobDirectory::new();
        for (name, key) in [("key", "a"), ("other-key", "b")] {
            fs::write(job_dir.path(name), key.repeat(64)).unwrap();
            fs::set_permissions(job_dir.path(name), fs::Permissions::from_mode(0o600)).unwrap();
        }
        let hosts = SimulatedHosts::start_without_sshd(test, (prefix, count), &job_dir.path(""))?;
        Some(Nodes { hosts, prefix, job_dir })
    }

    /// Starts `launch ARGS…` on the host with this number, with these environment variables.
    fn spawn(&self, host: u32, variables: &[&str], args: &[&str]) -> Child {
        let directory = self.job_dir.path("");
        let directory = directory.display();
        let enter = format!("cd {directory} && exec env \"$@\"");
        let path = format!("PATH={}", std::env::var("PATH").unwrap_or_default());
        let mut words =
            vec!["sh", "-c", &enter, "sh", "-i", "HOME=/root", "XDG_STATE_HOME=/tmp/state", &path];
        words.extend(variables);
        words.push(LAUNCH_EXECUTABLE);
        words.extend(args);
        let mut command = self.hosts.create_command(&format!("{}{host}", self.prefix), &words);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("launch starts")
    }

    /// Starts node `rank` of a job with `nodes` nodes. The node gets its rank, the address of node
    /// 0 and the key file `key` from command-line options.
    fn spawn_by_rank(&self, (rank, nodes): (u32, u32), key: &str, args: &[&str]) -> Child {
        let address = format!("{}0:29411", self.prefix);
        let (rank_text, nodes) = (rank.to_string(), nodes.to_string());
        let mut words = vec!["run", "--nodes", &nodes, "--node-rank", &rank_text, "--rendezvous", &address];
        words.extend(["--key-file", key]);
        words.extend(args);
        self.spawn(rank, &[], &words)
    }

    /// Returns the pid, on this machine, of the process of a host whose command line contains
    /// `part`.
    fn find_process(&self, host: u32, part: &str) -> Option<i32> {
        let processes = self.hosts.list_processes(&format!("{}{host}", self.prefix));
        processes.into_iter().find(|(_, line)| line.contains(part)).map(|(pid, _)| pid)
    }

    /// Sends a signal to the `launch` that was started on a host.
    fn signal(&self, host: u32, signal: Signal) {
        let pid = self.find_process(host, "launch run").or_else(|| self.find_process(host, "--node-rank"));
        kill(Pid::from_raw(pid.expect("launch runs")), signal).unwrap();
    }

    /// Waits until no process of a job is left on any of the first `count` hosts.
    fn assert_nothing_left(&self, count: u32) {
        wait_until("no process is left", || {
            (0..count).all(|host| self.hosts.list_processes(&format!("{}{host}", self.prefix)).is_empty())
        });
    }
}

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

/// Waits for the end of a process and checks its exit code. Returns its output.
#[track_caller]
fn expect_code(child: Child, code: i32) -> Output {
    let output = child.wait_with_output().expect("the process ends");
    assert_eq!(output.status.code(), Some(code), "{}", output_to_text(&output));
    output
}

#[test]
fn nodes_join_by_the_variables_of_torchrun_and_train_like_one_machine() {
    let test = "join::nodes_join_by_the_variables_of_torchrun_and_train_like_one_machine";
    let Some(nodes) = Nodes::start(test, "h", 4) else { return };
    let whole =
        nodes.job_dir.run(&["resume.from=never", "checkpoint.every=never"]).expect_success().collect_losses();
    let spawn = |rank: u32| {
        let rank_variable = format!("PET_NODE_RANK={rank}");
        let address = ["PET_NNODES=4", "PET_MASTER_ADDR=h0", "PET_MASTER_PORT=29500", "LAUNCH_KEY_FILE=key"];
        let variables = [&address[..], &[rank_variable.as_str()]].concat();
        nodes.spawn(rank, &variables, &["job.yaml", "--json", "--set", "checkpoint.dir=joined"])
    };
    // The nodes arrive in any order, and the controller is not the first.
    let others = [spawn(3), spawn(1)];
    thread::sleep(Duration::from_millis(500));
    let first = spawn(0);
    thread::sleep(Duration::from_millis(500));
    let late = spawn(2);
    let ran = FinishedRun::from_output(&expect_code(first, 0));
    assert_eq!(ran.collect_losses(), whole);
    assert_eq!(ran.events_named("start")[0]["world"], 8);
    assert_eq!(
        ran.events_named("placement")[0]["hosts"],
        serde_json::json!(["node-0", "node-1", "node-2", "node-3"])
    );
    for child in others.into_iter().chain([late]) {
        let text = output_to_text(&expect_code(child, 0));
        assert!(text.contains("joined node 0 at h0:29500") && text.contains("launch: done"), "{text}");
    }
    nodes.assert_nothing_left(4);
}

#[test]
fn pods_of_an_indexed_job_find_node_0_by_its_name() {
    let test = "join::pods_of_an_indexed_job_find_node_0_by_its_name";
    let Some(nodes) = Nodes::start(test, "job-", 3) else { return };
    let program = "env | grep -E '^(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_ADDR|OMPI)' | \
                   sort > environment.$RANK";
    let spawn = |index: u32| {
        let index_variable = format!("JOB_COMPLETION_INDEX={index}");
        let variables = [index_variable.as_str(), "PET_NPROC_PER_NODE=2", "OMPI_UNIVERSE_SIZE=9"];
        nodes.spawn(
            index,
            &variables,
            &["run", "--nodes", "3", "--key-file", "key", "--", "sh", "-c", program],
        )
    };
    let children = [spawn(2), spawn(0), spawn(1)];
    for child in children {
        expect_code(child, 0);
    }
    let master = nodes.hosts.format_address(1);
    for rank in 0..6 {
        let text = fs::read_to_string(nodes.job_dir.path(&format!("environment.{rank}"))).unwrap();
        let (group, local) = (rank / 2, rank % 2);
        let expected = format!(
            "GROUP_RANK={group}\nGROUP_WORLD_SIZE=3\nLOCAL_RANK={local}\nMASTER_ADDR={master}\nRANK={rank}\nWORLD_SIZE=6\n"
        );
        assert_eq!(text, expected, "rank {rank}");
    }
    nodes.assert_nothing_left(3);
}

#[test]
fn torchruns_command_line_on_each_node_joins_without_ranks() {
    let test = "join::torchruns_command_line_on_each_node_joins_without_ranks";
    let Some(nodes) = Nodes::start(test, "h", 2) else { return };
    let program = "echo $GROUP_RANK of $GROUP_WORLD_SIZE > place.$RANK";
    let spawn = |host: u32| {
        let options =
            ["torchrun", "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h0:29400"];
        let words = [&options[..], &["--no-python", "sh", "-c", program]].concat();
        nodes.spawn(host, &["LAUNCH_INSECURE=1"], &words)
    };
    let children = [spawn(1), spawn(0)];
    for child in children {
        expect_code(child, 0);
    }
    for rank in 0..2 {
        let text = fs::read_to_string(nodes.job_dir.path(&format!("place.{rank}"))).unwrap();
        assert_eq!(text, format!("{rank} of 2\n"));
    }
    nodes.assert_nothing_left(2);
}

#[test]
fn deepspeeds_command_line_without_ssh_joins_on_each_node() {
    let test = "join::deepspeeds_command_line_without_ssh_joins_on_each_node";
    let Some(nodes) = Nodes::start(test, "h", 2) else { return };
    fs::write(nodes.job_dir.path("hostfile"), "h0 slots=2\nh1 slots=2\n").unwrap();
    let program = "echo $LOCAL_RANK of $LOCAL_SIZE on $CROSS_RANK of $CROSS_SIZE, $WORLD_SIZE > place.$RANK";
    let spawn = |host: u32| {
        let rank = host.to_string();
        let options = ["deepspeed", "--hostfile", "hostfile", "--no_ssh", "--node_rank", &rank];
        let words = [&options[..], &["--no_local_rank", "--no_python", "sh", "-c", program]].concat();
        nodes.spawn(host, &["LAUNCH_INSECURE=1", "DS_ACCELERATOR=cpu"], &words)
    };
    let children = [spawn(1), spawn(0)];
    for child in children {
        expect_code(child, 0);
    }
    for rank in 0..4 {
        let text = fs::read_to_string(nodes.job_dir.path(&format!("place.{rank}"))).unwrap();
        assert_eq!(text, format!("{} of 2 on {} of 2, 4\n", rank % 2, rank / 2));
    }
    nodes.assert_nothing_left(2);
}

#[test]
fn a_restarted_node_joins_again_and_others_are_rejected() {
    let test = "join::a_restarted_node_joins_again_and_others_are_rejected";
    let Some(nodes) = Nodes::start(test, "h", 3) else { return };
    let program = ["--set", "run.restarts=1", "--", "sh", "-c", WAITING_PROGRAM];
    let first = nodes.spawn_by_rank((0, 3), "key", &program);
    let kept = nodes.spawn_by_rank((1, 3), "key", &program);
    let killed = nodes.spawn_by_rank((2, 3), "key", &program);
    let count_started =
        || fs::read_to_string(nodes.job_dir.path("started")).map_or(0, |text| text.lines().count());
    wait_until("three workers run", || count_started() == 3);

    // Each rejection is reported on both sides.
    let expect_rejection = |child: Child, message: &str| {
        let text = output_to_text(&expect_code(child, 3));
        assert!(text.contains(message), "{message}: {text}");
    };
    expect_rejection(
        nodes.spawn_by_rank((1, 3), "other-key", &program),
        "node 0 at h0:29411 has another key",
    );
    expect_rejection(
        nodes.spawn_by_rank((2, 3), "key", &program),
        "the node rank 2, with which h2 has joined",
    );
    let other = ["--set", "run.restarts=2", "--", "sh", "-c", WAITING_PROGRAM];
    expect_rejection(
        nodes.spawn_by_rank((1, 3), "key", &other),
        "differs from that of node 0 in `run.restarts`",
    );
    expect_rejection(nodes.spawn_by_rank((1, 2), "key", &program), "expects 2 nodes, and node 0 expects 3");
    let second = nodes.spawn_by_rank((0, 3), "key", &program);
    expect_rejection(second, "another job uses the rendezvous address h0:29411");
    let second = nodes.spawn_by_rank((0, 3), "other-key", &program);
    expect_rejection(second, "has another key");

    let pid = nodes.find_process(2, "--node-rank").expect("node 2 runs");
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    drop(killed);
    let restarted = nodes.spawn_by_rank((2, 3), "key", &program);
    wait_until("three workers run again", || count_started() == 6);
    fs::write(nodes.job_dir.path("finish"), "").unwrap();
    let text = output_to_text(&expect_code(first, 0));
    for part in
        ["has another key", "with which h2 has joined", "differs from that of node 0", "lost host node-2"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    expect_code(kept, 0);
    expect_code(restarted, 0);
    nodes.assert_nothing_left(3);
}

#[test]
fn a_signal_to_any_node_saves_and_a_lost_node_0_ends_the_others() {
    let test = "join::a_signal_to_any_node_saves_and_a_lost_node_0_ends_the_others";
    let Some(nodes) = Nodes::start(test, "h", 2) else { return };
    let args = ["job.yaml", "--set", "train.steps=100000", "--set", "checkpoint.every=100000", "--json"];
    let spawn = |rank| nodes.spawn_by_rank((rank, 2), "key", &args);
    let (first, second) = (spawn(0), spawn(1));
    let has_checkpoint = || {
        fs::read_dir(nodes.job_dir.checkpoint_dir()).is_ok_and(|mut entries| {
            entries.any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("step-"))
        })
    };
    wait_until("workers run", || nodes.find_process(1, "worker").is_some());
    thread::sleep(Duration::from_secs(1));
    assert!(!has_checkpoint());
    nodes.signal(1, Signal::SIGTERM);
    expect_code(second, 143);
    let ran = FinishedRun::from_output(&expect_code(first, 143));
    assert!(has_checkpoint(), "{}", ran.stderr);
    nodes.assert_nothing_left(2);

    let (first, second) = (spawn(0), spawn(1));
    wait_until("workers run", || nodes.find_process(1, "worker").is_some());
    nodes.signal(0, Signal::SIGKILL);
    let text = output_to_text(&expect_code(second, 3));
    assert!(text.contains("lost the connection to node 0"), "{text}");
    drop(first);
    nodes.assert_nothing_left(2);
}

/// Checks nodes that join: node 0 reports all of them with their network, and the others end with
/// its exit code. A node of a run is rejected.
#[test]
fn check_inspects_nodes_that_join() {
    let Some(nodes) = Nodes::start("join::check_inspects_nodes_that_join", "h", 3) else { return };
    let spawn = |rank: u32, command: &[&str]| {
        let rank_text = rank.to_string();
        let options =
            ["--nodes", "3", "--node-rank", &rank_text, "--rendezvous", "h0:29411", "--key-file", "key"];
        nodes.spawn(rank, &[], &[command, &options].concat())
    };
    let check = ["check", "job.yaml", "--network", "--json"];
    let (first, second) = (spawn(0, &check), spawn(1, &check));
    let rejected = output_to_text(&expect_code(spawn(2, &["run", "job.yaml"]), 3));
    assert!(rejected.contains("`launch check`"), "{rejected}");
    let third = spawn(2, &check);
    let output = first.wait_with_output().expect("the check ends");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let names: Vec<&str> =
        report["hosts"].as_array().unwrap().iter().filter_map(|h| h["host"].as_str()).collect();
    assert_eq!(names, ["node-0", "node-1", "node-2"], "{}", output_to_text(&output));
    let directions = report["network"]["directions"].as_array().unwrap();
    assert!(directions.len() == 6 && directions.iter().all(|d| d["reached"] == true), "{report}");
    let code = output.status.code().expect("an exit code");
    for child in [second, third] {
        expect_code(child, code);
    }
    nodes.assert_nothing_left(3);
}
