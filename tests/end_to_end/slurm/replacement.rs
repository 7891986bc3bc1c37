//! Tests that the batch script of `launch sbatch` replaces a controller that dies.
use super::cluster::{SlurmCluster, wait_until};
use serde_json::Value;

#[test]
fn a_batch_job_survives_the_death_of_its_controller() {
    let test = "a_batch_job_survives_the_death_of_its_controller";
    let Some(cluster) = SlurmCluster::start(test, 2) else { return };
    let expected = cluster.write_training_job(2, 500);
    let submit = "./launch sbatch job.yaml --set checkpoint.every=never -- --exclusive";
    let job = cluster.run_on_node_successfully("h0", submit);
    let has_trained = || (cluster.read_last_step("tiny") >= 20).then_some(());
    wait_until("a step", || cluster.describe_job(&job), has_trained);
    let batch_host = cluster.read_job_field(&job, "BatchHost");
    let find_controller = "sed -n 's/.*\"pid\": *\\([0-9]*\\).*/\\1/p' runs/tiny/2*/run.json | head -1";
    cluster.run_on_node_successfully(&batch_host, &format!("kill -9 $({find_controller})"));
    let reported = cluster.read_last_step("tiny");
    assert!(reported < 400, "the training is not over before its controller is lost: step {reported}");
    cluster.wait_for_job_end(&job, "COMPLETED");
    let events = cluster.read_events("tiny");
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    let counts = ["start", "placement", "takeover", "restart", "failure", "done"].map(count);
    assert_eq!(counts, [1, 1, 1, 0, 0, 1], "{}", cluster.describe_job(&job));
    let steps: Vec<&Value> =
        events.iter().filter(|event| event["event"] == "step").map(|event| &event["step"]).collect();
    assert!(steps.iter().zip(1_u64..).all(|(step, number)| **step == number), "{steps:?}");
    assert!(cluster.collect_step_bits("tiny") == expected, "the losses differ");
    assert_eq!(cluster.read_job_field(&job, "Restarts"), "0");
    cluster.assert_nothing_left();
}
