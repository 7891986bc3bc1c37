//! Tests requeued jobs whose `resume.from` is not `auto`: they continue from the newest checkpoint
//! of their earlier runs.
use super::cluster::{SlurmCluster, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;

/// Submits the training job `name` with these settings, and waits until a run has reported this
/// step. Returns the ID.
fn submit_and_wait_for_step(cluster: &SlurmCluster, name: &str, set: &[&str], step: u64) -> String {
    let set: String = set.iter().map(|set| format!(" --set {set}")).collect();
    let submit = format!("./launch sbatch job.yaml --set name={name}{set} -- --exclusive");
    let job = cluster.run_on_node_successfully("h0", &submit);
    wait_for_step(cluster, &job, name, step);
    job
}

/// Waits until a run of a job has reported this step or a later one.
#[track_caller]
fn wait_for_step(cluster: &SlurmCluster, job: &str, name: &str, step: u64) {
    let has_step = || (cluster.read_last_step(name) >= step).then_some(());
    wait_until(&format!("step {step}"), || cluster.describe_job(job), has_step);
}

/// Waits until a job runs after so many requeues.
#[track_caller]
fn wait_for_restart(cluster: &SlurmCluster, job: &str, restarts: u32) {
    let runs_again = || {
        (cluster.read_job_field(job, "Restarts") == restarts.to_string()
            && cluster.read_job_field(job, "JobState") == "RUNNING")
            .then_some(())
    };
    wait_until("the requeue", || cluster.describe_job(job), runs_again);
}

/// Crashes the node of the batch script of a job, so that Slurm itself requeues the job, and starts
/// the node again.
fn crash_batch_host(cluster: &SlurmCluster, job: &str) {
    let node = cluster.read_job_field(job, "BatchHost");
    assert!(cluster.run_cluster_script(&["crash", &node]).status.success());
    wait_for_restart(cluster, job, 1);
    assert!(cluster.run_cluster_script(&["boot", &node]).status.success());
}

/// Checks that each run of a job after the first one has continued from a checkpoint that the job
/// itself has saved, and that the losses of all runs are the expected ones. Returns the steps from
/// which the runs have continued.
#[track_caller]
fn check_continued_runs(
    cluster: &SlurmCluster,
    name: &str,
    expected: &BTreeMap<u64, (u64, u64)>,
    runs: usize,
) -> Vec<u64> {
    let events = cluster.read_events(name);
    let mut continued = Vec::new();
    for run in events.split(|event| event["event"] == "start").skip(2) {
        let resume = run.iter().find(|event| event["event"] == "resume").expect("a resume");
        let path = resume["path"].as_str().expect("a path");
        assert!(path.contains(&format!("runs/{name}/checkpoints/step-")), "{path}");
        let diagnostics = run.iter().filter_map(|event| event["diagnostics"].as_array()).flatten();
        let codes: Vec<(&Value, &Value)> =
            diagnostics.map(|diagnostic| (&diagnostic["code"], &diagnostic["fields"]["path"])).collect();
        assert!(codes.contains(&(&"resume-batch-job".into(), &path.into())), "{codes:?}");
        continued.push(resume["step"].as_u64().expect("a step"));
    }
    assert_eq!(continued.len(), runs - 1, "{continued:?}");
    assert!(cluster.collect_step_bits(name) == *expected, "the losses of {name} differ");
    continued
}

#[test]
fn requeued_jobs_continue_whatever_resume_from_states() {
    let Some(cluster) = SlurmCluster::start("requeued_jobs_continue_whatever_resume_from_states", 3) else {
        return;
    };
    let expected = cluster.write_training_job(2, 500);
    // An older checkpoint of another training, of a higher step, is in the same directory.
    let unrelated = "./launch job.yaml --set name=unrelated --set cluster.hosts=local --set train.seed=5 \
                     --set train.steps=600 --set checkpoint.dir=runs/tiny/checkpoints";
    cluster.run_on_node_successfully("h1", unrelated);
    assert!(cluster.shared_path("runs/tiny/checkpoints/step-00000600").exists());
    let job = submit_and_wait_for_step(&cluster, "tiny", &["resume.from=never"], 60);
    assert!(cluster.read_events("tiny").iter().all(|event| event["event"] != "resume"));
    crash_batch_host(&cluster, &job);
    wait_for_step(&cluster, &job, "tiny", cluster.read_last_step("tiny") + 20);
    // launch itself requeues the job at its time limit.
    cluster.run_on_node_successfully("h0", &format!("scancel -b -s USR1 {job}"));
    cluster.wait_for_job_end(&job, "COMPLETED");
    let continued = check_continued_runs(&cluster, "tiny", &expected, 3);
    assert!(continued[0] >= 25 && continued[1] > continued[0], "{continued:?}");

    // A job that began from a checkpoint at a path
    let local = "./launch job.yaml --set cluster.hosts=local";
    cluster.run_on_node_successfully("h1", &format!("{local} --set name=begun --set train.steps=30"));
    let from_path = "resume.from=runs/begun/checkpoints/step-00000030";
    let undisturbed = format!("{local} --set name=undisturbed --set {from_path}");
    cluster.run_on_node_successfully("h1", &undisturbed);
    let expected = cluster.collect_step_bits("undisturbed");
    assert_eq!(expected.first_key_value().map(|(step, _)| *step), Some(31));
    let job = submit_and_wait_for_step(&cluster, "path", &[from_path], 50);
    cluster.run_on_node_successfully("h0", &format!("scancel -b -s USR1 {job}"));
    cluster.wait_for_job_end(&job, "COMPLETED");
    let continued = check_continued_runs(&cluster, "path", &expected, 2);
    assert!(continued[0] >= 50, "{continued:?}");
    cluster.assert_nothing_left();
}
