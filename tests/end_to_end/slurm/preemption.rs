//! Tests preemption in partitions with both values of PreemptMode.
use super::cluster::{SlurmCluster, wait_until};
use std::collections::BTreeMap;

/// Submits a job of high priority that takes all nodes for a second, and waits until the preempted
/// job `job` runs again after `restarts` restarts.
#[track_caller]
fn preempt_job(cluster: &SlurmCluster, job: &str, nodes: u32, restarts: u32) {
    let preemptor = format!("sbatch -Q -p main -N{nodes} --exclusive -o /dev/null --wrap 'sleep 1'");
    cluster.run_on_node_successfully("h0", &preemptor);
    let again = || {
        (cluster.read_job_field(job, "Restarts") == restarts.to_string()
            && cluster.read_job_field(job, "JobState") == "RUNNING")
            .then_some(())
    };
    wait_until("the requeue", || cluster.describe_job(job), again);
}

/// Trains in a partition whose jobs are preempted, preempts the job once, and checks that the
/// losses are those of an uninterrupted run and that the run has stopped at its last step.
fn check_preempted_training(cluster: &SlurmCluster, partition: &str, expected: &BTreeMap<u64, (u64, u64)>) {
    let name = format!("tiny-{partition}");
    let submit = format!(
        "./launch sbatch job.yaml --set name={name} --set slurm.partition={partition} -- --exclusive"
    );
    let job = cluster.run_on_node_successfully("h0", &submit);
    let begun = || (cluster.find_last_step(&name) >= 10).then_some(());
    wait_until("the first steps", || cluster.describe_job(&job), begun);
    preempt_job(cluster, &job, 2, 1);
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert!(cluster.collect_step_bits(&name) == *expected, "the losses differ in partition {partition}");
    let events = cluster.read_events(&name);
    let resumed = events.iter().position(|e| e["event"] == "resume").expect("a resumed run");
    let last_step = events[..resumed].iter().rev().find(|e| e["event"] == "step").expect("a step");
    assert_eq!(events[resumed]["step"], last_step["step"], "no step is lost in partition {partition}");
    cluster.assert_notices(&name, &format!("notices_of_a_preemption_in_{partition}"));
}

#[test]
fn preempted_jobs_save_are_requeued_and_resume() {
    let Some(cluster) = SlurmCluster::start("preempted_jobs_save_are_requeued_and_resume", 2) else { return };
    let expected = cluster.write_training_job(2, 400);
    for partition in ["requeued", "cancelled"] {
        check_preempted_training(&cluster, partition, &expected);
    }
    // a program, in a batch script that does not let launch requeue the job
    let script =
        "[ -e saved ] && exit 0; trap 'touch saved; exit 0' TERM; touch up; while :; do sleep 0.1; done";
    cluster.write_program_job("{}", "grace_period: 8s", script);
    let submit = "sbatch -p requeued --parsable -N1 --exclusive -o program.out --wrap './launch job.yaml'";
    let job = cluster.run_on_node_successfully("h0", submit);
    let up = || cluster.shared_path("up").exists().then_some(());
    wait_until("the start", || cluster.describe_job(&job), up);
    preempt_job(&cluster, &job, 2, 1);
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert!(cluster.shared_path("saved").exists());
    cluster.assert_nothing_left();
}
