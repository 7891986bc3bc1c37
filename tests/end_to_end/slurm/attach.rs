//! Tests that a job in Slurm outlives its controller, and that `launch attach` on another node of
//! the allocation continues it.
use super::cluster::{SlurmCluster, wait_until};
use crate::support::slowed_worker::SlowedWorker;
use serde_json::Value;

/// The batch script of the job. It does not end with the controller, so Slurm does not end the job
/// when the controller is killed.
const BATCH_SCRIPT: &str = "#!/bin/bash\n#SBATCH -N2 --exclusive -o attach.out\n\
    ./launch job.yaml --set checkpoint.every=never &\necho $! > controller.pid\n\
    until [ -e finish ]; do sleep 0.2; done\n";

#[test]
fn a_job_outlives_its_controller_and_another_node_takes_it_over() {
    let test = "a_job_outlives_its_controller_and_another_node_takes_it_over";
    let Some(cluster) = SlurmCluster::start(test, 2) else { return };
    let expected = cluster.write_training_job(2, 300);
    std::fs::write(cluster.shared_path("attach.sh"), BATCH_SCRIPT).unwrap();
    let _slowed = SlowedWorker::start_in(cluster.dir.join("h1"));
    let job = cluster.run_on_node_successfully("h0", "sbatch --parsable attach.sh");
    let context = || format!("{}\n{}", cluster.describe_job(&job), cluster.read_shared_file("attach.out"));
    let wait_for_step = |step: u64| {
        wait_until("a step", context, || (cluster.read_last_step("tiny") >= step).then_some(()));
    };
    wait_for_step(20);
    let batch_host = cluster.read_job_field(&job, "BatchHost");
    cluster.run_on_node_successfully(&batch_host, "kill -9 $(cat controller.pid)");
    let reported = cluster.read_last_step("tiny");
    assert!(reported < 200, "the training is not over before its controller is lost: step {reported}");
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(cluster.read_last_step("tiny"), reported, "the journal has no writer");

    let other = if batch_host == "h1" { "h2" } else { "h1" };
    let attach = format!(
        "srun --jobid={job} --overlap -N1 -n1 -w {other} ./launch attach $(ls -d runs/tiny/2*) --json"
    );
    let attached = cluster.run_on_node("h0", &attach);
    let shown = crate::support::output_to_text(&attached);
    assert!(attached.status.success(), "{shown}\n{}", context());
    let events = cluster.read_events("tiny");
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    let counts = ["start", "placement", "takeover", "restart", "failure", "done"].map(count);
    assert_eq!(counts, [1, 1, 1, 0, 0, 1], "{shown}");
    let steps: Vec<&Value> =
        events.iter().filter(|event| event["event"] == "step").map(|event| &event["step"]).collect();
    assert!(steps.iter().zip(1_u64..).all(|(step, number)| **step == number), "{steps:?}");
    assert!(cluster.collect_step_bits("tiny") == expected, "the losses differ");
    std::fs::write(cluster.shared_path("finish"), "").unwrap();
    cluster.wait_for_job_end(&job, "COMPLETED");
    cluster.assert_nothing_left();
}
