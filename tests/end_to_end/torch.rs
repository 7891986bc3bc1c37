//! Tests unmodified programs for torchrun with real torch: process groups, the TCP store, the
//! environment and recorded errors.
use crate::support::{self, FinishedRun, JobDirectory};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path};

/// Runs `script` as the ranks of a job. `cluster` and `run` are appended to these YAML sections of
/// the job. Returns the job's directory and the run.
fn run_script(
    python: &Path,
    workers: u32,
    script: &str,
    cluster: &str,
    run: &str,
) -> (JobDirectory, FinishedRun) {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("script.py"), script).unwrap();
    let python = serde_json::to_string(&python).unwrap();
    let job = format!(
        "name: torch\ncluster: {{workers_per_host: {workers}{cluster}}}\n\
         run: {{command: [{python}, script.py], grace_period: 5s{run}}}\n"
    );
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let ran = job_dir.run(&[]);
    (job_dir, ran)
}

/// A script that runs collectives in the default process group and in subgroups.
const PROCESS_GROUPS_SCRIPT: &str = r#"
import os
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), 4)
x = torch.tensor([float(rank)])
dist.all_reduce(x)
assert x.item() == 6.0, x
dist.barrier()
half = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3], use_local_synchronization=True)
y = torch.tensor([float(rank)])
dist.all_reduce(y, group=half)
assert y.item() == (2.0 if rank % 2 == 0 else 4.0), y
everyone = [None] * world
dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 1000 * rank})
assert [o["rank"] for o in everyone] == [0, 1, 2, 3]
open(f"done.{rank}", "w").write(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
dist.destroy_process_group()
os._exit(0)  # torch's threads that want Python's lock while the interpreter ends abort the process (Python up to 3.13)
"#;

#[test]
fn process_groups_initialize_with_the_store_of_the_agent_and_of_rank_0() {
    let test = "process_groups_initialize_with_the_store_of_the_agent_and_of_rank_0";
    if let Some(python) = support::find_python_or_skip(test) {
        assert_process_groups_initialize(&python);
    }
}

#[test]
fn process_groups_of_an_old_torch_initialize_with_both_stores() {
    if let Some(python) =
        support::find_old_torch_python_or_skip("process_groups_of_an_old_torch_initialize_with_both_stores")
    {
        assert_process_groups_initialize(&python);
    }
}

/// Checks that [`PROCESS_GROUPS_SCRIPT`] succeeds, both with the rendezvous store of the agent and
/// with a store of rank 0.
fn assert_process_groups_initialize(python: &Path) {
    for (store, flag) in [("agent", "True"), ("rank0", "False")] {
        let (job_dir, ran) = run_script(python, 4, PROCESS_GROUPS_SCRIPT, &format!(", store: {store}"), "");
        ran.expect_success();
        for rank in 0..4 {
            assert_eq!(fs::read_to_string(job_dir.path(&format!("done.{rank}"))).unwrap(), flag);
        }
    }
}

/// A script that uses every operation of `TCPStore`.
const STORE_SCRIPT: &str = r#"
import os, threading
from datetime import timedelta
from torch.distributed import TCPStore, PrefixStore, DistStoreError
rank = int(os.environ["RANK"])
def client(seconds=60):
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False, timedelta(seconds=seconds))
s = client()
assert s.add("count", 1 + rank) in (1, 2, 3)
s.set(f"here{rank}", "yes")
s.wait(["here0", "here1"])
assert s.get("count") == b"3"
assert s.compare_set("mine", "", f"{rank}") in (b"0", b"1")
assert s.compare_set("mine", "neither", "x") == s.get("mine")
assert s.check(["here0"]) and not s.check(["here0", "absent"])
s.append("log", "ab"); s.add("logged", 1)
p = PrefixStore("sub", s)
p.multi_set([f"k{rank}", f"m{rank}"], ["v", "w"])
p.wait([f"{k}{r}" for k in "km" for r in (0, 1)])
assert p.multi_get([f"k{1 - rank}", f"m{rank}"]) == [b"v", b"w"]
try:
    s.wait(["never"], timedelta(milliseconds=100))
    raise SystemExit("waited for nothing")
except DistStoreError:
    pass
s.set(f"again{rank}", "1")  # the connection survives a cancelled wait
s.wait(["again0", "again1"])
assert s.num_keys() >= 8
if rank == 0:
    assert s.delete_key("here0") and not s.delete_key("here0")
    s.queue_push("queue", "item 1"); s.queue_push("queue", "item 2")
    got = s.queue_pop("queue")
    assert got == b"item 1", got
    s.set("popped", "1")
else:
    s.wait(["popped"])
    assert s.queue_len("queue") == 1
    assert s.queue_pop("queue") == b"item 2"
if hasattr(s, "list_keys"):
    assert any("again0" in k for k in s.list_keys()), s.list_keys()
if hasattr(s, "barrier"):
    s.barrier("barrier", 2, timedelta(seconds=60))
large = b"x" * (4 << 20)
s.set(f"large{rank}", large)
assert s.get(f"large{1 - rank}") == large
open(f"done.{rank}", "w").close()
"#;

#[test]
fn every_operation_of_a_tcp_store_works() {
    if let Some(python) = support::find_python_or_skip("every_operation_of_a_tcp_store_works") {
        assert_store_operations_work(&python);
    }
}

#[test]
fn every_operation_of_a_tcp_store_works_with_an_old_torch() {
    if let Some(python) =
        support::find_old_torch_python_or_skip("every_operation_of_a_tcp_store_works_with_an_old_torch")
    {
        assert_store_operations_work(&python);
    }
}

/// Checks that [`STORE_SCRIPT`] succeeds with two workers.
fn assert_store_operations_work(python: &Path) {
    let (job_dir, ran) = run_script(python, 2, STORE_SCRIPT, "", "");
    ran.expect_success();
    assert!(job_dir.path("done.0").exists() && job_dir.path("done.1").exists());
}

/// The variables that torchrun sets for the second of two workers on one node, and those that
/// DeepSpeed's launcher adds, with their values. `None` allows any value.
const TORCHRUN_VARIABLES: &[(&str, Option<&str>)] = &[
    ("RANK", Some("1")),
    ("LOCAL_RANK", Some("1")),
    ("GROUP_RANK", Some("0")),
    ("ROLE_RANK", Some("1")),
    ("ROLE_NAME", Some("default")),
    ("LOCAL_WORLD_SIZE", Some("2")),
    ("WORLD_SIZE", Some("2")),
    ("GROUP_WORLD_SIZE", Some("1")),
    ("ROLE_WORLD_SIZE", Some("2")),
    ("MASTER_ADDR", Some("127.0.0.1")),
    ("MASTER_PORT", None),
    ("TORCHELASTIC_RESTART_COUNT", Some("0")),
    ("TORCHELASTIC_MAX_RESTARTS", Some("0")),
    ("TORCHELASTIC_RUN_ID", None),
    ("TORCHELASTIC_USE_AGENT_STORE", Some("True")),
    ("TORCHELASTIC_ERROR_FILE", None),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", Some("1")),
    ("OMP_NUM_THREADS", None),
    ("CROSS_RANK", Some("0")),
    ("CROSS_SIZE", Some("1")),
    ("LOCAL_SIZE", Some("2")),
];

#[test]
fn a_worker_has_the_variables_of_torchrun_and_deepspeed() {
    let dump = "import json, os\njson.dump(dict(os.environ), open('env.' + os.environ['RANK'], 'w'))";
    let (job_dir, ran) = run_script(Path::new("python3"), 2, dump, "", "");
    ran.expect_success();
    let text = fs::read_to_string(job_dir.path("env.1")).unwrap();
    let env: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
    for (name, expected) in TORCHRUN_VARIABLES {
        let value = env.get(*name).unwrap_or_else(|| panic!("no {name}"));
        assert!(expected.is_none_or(|e| e == value) && !value.is_empty(), "{name}={value}");
    }
    assert_eq!(env["PYTHONUNBUFFERED"], "1");
}

/// A script in which rank 1 raises an exception that torch's `record` decorator writes to a file.
const RAISING_SCRIPT: &str = r#"
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no such\n  layer")
    time.sleep(1000)
main()
"#;

#[test]
fn the_exception_that_a_program_recorded_is_the_root_cause() {
    let test = "the_exception_that_a_program_recorded_is_the_root_cause";
    let Some(python) = support::find_python_or_skip(test) else { return };
    let (_, ran) = run_script(&python, 2, RAISING_SCRIPT, "", "");
    assert_eq!(ran.code, 1);
    let failure = ran.expect_failure();
    assert_eq!((&failure["rank"], &failure["code"]), (&1.into(), &"worker-exited".into()));
    let reason = serde_json::json!({"kind": "exit", "code": 1, "error": "ValueError: no such layer"});
    assert_eq!(failure["reason"], reason);
    let tail = &failure["tail"];
    let traced = |v: &Value| v.as_str().is_some_and(|line| line.contains("ValueError"));
    assert!(tail.as_array().unwrap().iter().any(traced), "{tail}");
}

/// A script in which the sockets of rank 1 are shut down long before its process ends, as those of
/// a process whose GPU memory takes long to free. The process ends after `SECONDS`.
const DISCONNECTED_SCRIPT: &str = r#"
import os, socket, stat, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
if dist.get_rank() == 1:
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                connected = socket.socket(fileno=os.dup(int(name)))
                connected.getpeername()  # fails for a socket that listens
                connected.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    time.sleep(SECONDS)
    os._exit(3)
dist.all_reduce(x)
"#;

#[test]
fn a_rank_that_fails_after_its_peers_lost_it_is_the_root_cause() {
    let test = "a_rank_that_fails_after_its_peers_lost_it_is_the_root_cause";
    let Some(python) = support::find_python_or_skip(test) else { return };
    // Ranks 0 and 2 have ended before.
    let (_, ran) = run_script(&python, 3, &DISCONNECTED_SCRIPT.replace("SECONDS", "3"), "", "");
    let failure = ran.expect_failure();
    assert_eq!((&failure["rank"], &failure["code"]), (&1.into(), &"worker-exited".into()), "{failure:#}");
    assert_eq!(failure["reason"], serde_json::json!({"kind": "exit", "code": 3}));
}

#[test]
fn a_lost_connection_to_a_rank_that_does_not_fail_is_an_unknown_root_cause() {
    let test = "a_lost_connection_to_a_rank_that_does_not_fail_is_an_unknown_root_cause";
    let Some(python) = support::find_python_or_skip(test) else { return };
    let (_, ran) = run_script(&python, 2, &DISCONNECTED_SCRIPT.replace("SECONDS", "600"), "", "");
    let failure = ran.expect_failure();
    assert_eq!(
        (&failure["rank"], &failure["code"]),
        (&0.into(), &"root-cause-unknown".into()),
        "{failure:#}"
    );
    assert_eq!(failure["reason"]["kind"], "aborted_by_peer");
}

#[test]
fn a_master_port_in_use_is_reported_before_a_worker_starts() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    for store in ["agent", "rank0"] {
        let cluster = format!(", master_port: {port}, store: {store}");
        let (job_dir, ran) = run_script(Path::new("rm"), 2, "", &cluster, "");
        assert_eq!(ran.code, 3);
        assert_eq!(ran.failure_code(), "rendezvous-port-unavailable", "{}", ran.failure_message());
        assert_eq!(ran.failure_diagnostics()[0]["fields"]["port"], port, "{}", ran.expect_failure());
        assert!(job_dir.path("script.py").exists(), "a rank ran");
    }
}
