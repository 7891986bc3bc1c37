//! Makes a rank on one of three hosts hang.
use super::*;
use serde_json::json;

/// A script in which rank 1 does not enter the third collective.
const SCRIPT: &str = r#"
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
for _ in range(2):
    dist.all_reduce(x)
def hold_up():
    time.sleep(600)
if dist.get_rank() == 1:
    hold_up()
dist.all_reduce(x)
"#;

#[test]
fn the_agents_of_three_hosts_find_the_rank_that_holds_up_the_others() {
    let test = "cluster::hangs::the_agents_of_three_hosts_find_the_rank_that_holds_up_the_others";
    let Some(python) = support::find_python_or_skip(test) else { return };
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    fs::write(job_dir.path("hang.py"), SCRIPT).unwrap();
    let python = serde_json::to_string(&python).unwrap();
    let job = format!(
        "name: tiny\ncluster: {{workers_per_host: 1}}\n\
         run: {{command: [{python}, hang.py], grace_period: 1s, hang_timeout: 3s, env: {{OMP_NUM_THREADS: '1'}}}}\n"
    );
    let args = write_job(&job_dir, &hosts, "hang", &job, "[\"h[0-2]\"]");
    let ran = start_run(&job_dir, &args, &[]).wait_for_end();
    assert_eq!(ran.failure_code(), "hang-detected");
    let reason = &ran.expect_failure()["reason"];
    let verdict = &reason["verdict"];
    assert_eq!((&verdict["entered"], &verdict["undetermined"]), (&json!([0, 2]), &json!([])), "{reason:#}");
    assert_eq!(verdict["collective"], json!({"group": "0", "seq": 3, "operation": "gloo:all_reduce"}));
    assert_eq!(verdict["not_entered"].as_array().map(Vec::len), Some(1), "{reason:#}");
    let place = &verdict["not_entered"][0];
    assert_eq!((&place["rank"], &place["frame"]["function"]), (&json!(1), &json!("hold_up")), "{reason:#}");
    assert_nothing_left(&hosts, &HOSTS[..3]);
}

#[test]
fn a_rank_of_the_training_on_three_hosts_is_named() {
    let test = "cluster::hangs::a_rank_of_the_training_on_three_hosts_is_named";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let job = format!("{TINY_JOB}run: {{hang_timeout: 3s, env: {{LAUNCH_FAULT: '4:loop@2'}}}}\n");
    let args = write_job(&job_dir, &hosts, "train", &job, "[\"h[0-2]\"]");
    let ran = start_run(&job_dir, &args, &["checkpoint.every=never"]).wait_for_end();
    assert_eq!(ran.failure_code(), "hang-detected");
    let reason = &ran.expect_failure()["reason"];
    let verdict = &reason["verdict"];
    assert_eq!(
        (&verdict["kind"], &verdict["undetermined"]),
        (&json!("not_entered"), &json!([])),
        "{reason:#}"
    );
    assert_eq!(verdict["entered"], json!([0, 1, 2, 3, 5]), "{reason:#}");
    assert_eq!(verdict["not_entered"].as_array().map(Vec::len), Some(1), "{reason:#}");
    let place = &verdict["not_entered"][0];
    assert_eq!(
        (&place["rank"], &place["task"]),
        (&json!(4), &json!("reading samples (step 3)")),
        "{reason:#}"
    );
    assert_nothing_left(&hosts, &HOSTS[..3]);
}
