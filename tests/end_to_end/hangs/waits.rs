//! Ranks that wait for each other in different calls: the verdict names the rank for which all of
//! them wait.
use crate::support::{self, JobDirectory};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// A script in which rank 0 waits for rank 1, rank 3 for all others, and rank 1 for rank 2, which
/// has only entered collectives of other groups.
const CHAIN: &str = r#"
import subprocess
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4)
# In rank 2, the second and the third one of these groups are the first and the second one.
_, pair, other = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2], [2, 3])]
for _ in range(2):
    dist.all_reduce(x)
if rank >= 2:
    for _ in range(5):
        dist.all_reduce(x, group=other)

def hold_up():
    subprocess.run(["sleep", "600"])

if rank == 0:
    dist.recv(x, 1)
if rank == 1:
    dist.all_reduce(x, group=pair)
if rank == 2:
    hold_up()
dist.barrier()
"#;

/// A script in which rank 1 never creates the group of all ranks.
const NO_GROUP: &str = r#"
import os, time
import torch.distributed as dist

def hold_up():
    time.sleep(600)

if os.environ["RANK"] == "1":
    hold_up()
dist.init_process_group("gloo")
"#;

/// Runs a script with this number of ranks, as a child process of a shell, and returns the verdict
/// on the hang. Returns `None` if torch is missing.
fn find_verdict(test: &str, script: &str, ranks: usize) -> Option<Value> {
    let python = support::find_python_or_skip(test)?;
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("script.py"), script).unwrap();
    let command = json!(["sh", "-c", "\"$0\" script.py; exit $?", Path::new(&python)]);
    let job = format!(
        "name: hang\ncluster: {{workers_per_host: {ranks}}}\n\
         run: {{command: {command}, grace_period: 1s, hang_timeout: 3s, env: {{OMP_NUM_THREADS: '1'}}}}\n"
    );
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let ran = job_dir.run(&[]);
    assert_eq!(ran.failure_code(), "hang-detected");
    Some(ran.expect_failure()["reason"]["verdict"].clone())
}

/// Checks that only one rank is named, and that it is in the function `hold_up` of the script.
fn assert_named(verdict: &Value, rank: u32, activity: &str) {
    assert_eq!(
        (&verdict["kind"], &verdict["undetermined"]),
        (&json!("not_entered"), &json!([])),
        "{verdict:#}"
    );
    let places = verdict["not_entered"].as_array().unwrap();
    assert_eq!((places.len(), &places[0]["rank"]), (1, &json!(rank)), "{verdict:#}");
    assert_eq!(places[0]["activity"]["kind"], activity, "{verdict:#}");
    assert_eq!(places[0]["frame"]["function"], "hold_up", "{verdict:#}");
}

#[test]
fn the_rank_at_the_end_of_a_chain_of_waiting_ranks_is_named() {
    let test = "the_rank_at_the_end_of_a_chain_of_waiting_ranks_is_named";
    let Some(verdict) = find_verdict(test, CHAIN, 4) else { return };
    let collective = json!({"group": "2", "seq": 1, "operation": "gloo:all_reduce"});
    assert_eq!((&verdict["collective"], &verdict["entered"]), (&collective, &json!([1])), "{verdict:#}");
    assert_named(&verdict, 2, "waits_for_child");
}

#[test]
fn a_rank_that_does_not_create_the_group_of_all_ranks_is_named() {
    let test = "a_rank_that_does_not_create_the_group_of_all_ranks_is_named";
    let Some(verdict) = find_verdict(test, NO_GROUP, 2) else { return };
    let call = json!({"group": "", "seq": 0, "operation": "init_process_group"});
    assert_eq!((&verdict["collective"], &verdict["entered"]), (&call, &json!([0])), "{verdict:#}");
    assert_named(&verdict, 1, "sleeps");
}
