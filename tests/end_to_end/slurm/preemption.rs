//! Tests preemption in partitions with both values of PreemptMode.
use super::cluster::{SlurmCluster, wait_until};
use crate::support::slowed_worker::SlowedWorker;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    env, fs,
    thread::sleep,
    time::{Duration, Instant},
};

/// Submits a job of high priority that takes all nodes for a second, and waits until the preempted
/// job `job` has started again after `restarts` restarts. A short job may have ended by then.
#[track_caller]
fn preempt_job(cluster: &SlurmCluster, job: &str, nodes: u32, restarts: u32) {
    let preemptor = format!("sbatch -Q -p main -N{nodes} --exclusive -o /dev/null --wrap 'sleep 1'");
    cluster.run_on_node_successfully("h0", &preemptor);
    let again = || {
        let is_requeued = cluster.read_job_field(job, "Restarts") == restarts.to_string();
        let state = cluster.read_job_field(job, "JobState");
        let has_started = matches!(state.as_str(), "RUNNING" | "COMPLETED");
        (is_requeued && has_started).then_some(())
    };
    wait_until("the requeue", || cluster.describe_job(job), again);
}

/// Returns how often each training is preempted: `LAUNCH_TEST_PREEMPTIONS`, or once.
fn read_preemption_count() -> u32 {
    env::var("LAUNCH_TEST_PREEMPTIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(1)
}

/// Submits the training job `name` to a partition whose jobs are preempted. Returns the ID.
fn submit_training(cluster: &SlurmCluster, name: &str, partition: &str) -> String {
    let set = format!("--set name={name} --set slurm.partition={partition}");
    cluster.run_on_node_successfully("h0", &format!("./launch sbatch job.yaml {set} -- --exclusive"))
}

/// Waits until a job has reported this step.
#[track_caller]
fn wait_for_step(cluster: &SlurmCluster, job: &str, name: &str, step: u64) {
    let has_step = || (cluster.read_last_step(name) >= step).then_some(());
    wait_until(&format!("step {step}"), || cluster.describe_job(job), has_step);
}

/// Trains in a partition whose jobs are preempted, preempts the job `count` times, and checks that
/// the losses are those of an uninterrupted run and that each run has stopped at its last step.
fn check_preempted_training(
    cluster: &SlurmCluster,
    partition: &str,
    count: u32,
    expected: &BTreeMap<u64, (u64, u64)>,
) {
    let name = format!("tiny-{partition}");
    let slowed = SlowedWorker::start_in(cluster.dir.join("h1"));
    let job = submit_training(cluster, &name, partition);
    for restarts in 1..=count {
        wait_for_step(cluster, &job, &name, cluster.read_last_step(&name) + 10);
        let began = Instant::now();
        preempt_job(cluster, &job, 2, restarts);
        println!("preemption {restarts} in {partition}: runs again after {:.1?}", began.elapsed());
    }
    drop(slowed);
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert!(cluster.collect_step_bits(&name) == *expected, "the losses differ in partition {partition}");
    let events = cluster.read_events(&name);
    let (mut last_step, mut resumes) = (&Value::Null, 0);
    for event in &events {
        match event["event"].as_str() {
            Some("step") => {
                assert_eq!(event["step"].as_u64(), Some(last_step.as_u64().unwrap_or(0) + 1), "{event}");
                last_step = &event["step"];
            }
            Some("resume") => {
                assert_eq!(&event["step"], last_step, "no step is lost in partition {partition}");
                resumes += 1;
            }
            _ => {}
        }
    }
    assert_eq!(resumes, count, "each preempted run saved");
    assert_eq!(cluster.read_end_reasons(&name), vec!["preemption"; count as usize]);
    if count == 1 {
        cluster.assert_notices(&name, &format!("notices_of_a_preemption_in_{partition}"));
    }
}

/// Preempts a job during a long evaluation. The grace time is 30 seconds.
fn check_preempted_evaluation(cluster: &SlurmCluster) {
    let line = "The fox goes to the barn and counts to a hundred.\n";
    fs::write(cluster.shared_path("held-out.txt"), line.repeat(200_000)).unwrap();
    let job = cluster.read_shared_file("job.yaml");
    let evaluation = "  eval: {every: 5, samples: 1048576, files: [held-out.txt]}\ncheckpoint:";
    fs::write(cluster.shared_path("job.yaml"), job.replace("checkpoint:", evaluation)).unwrap();
    let name = "tiny-evaluated";
    let job = submit_training(cluster, name, "cancelled");
    wait_for_step(cluster, &job, name, 5);
    sleep(Duration::from_secs(1));
    preempt_job(cluster, &job, 2, 1);
    let has_resumed = || cluster.read_events(name).iter().any(|e| e["event"] == "resume").then_some(());
    wait_until("the resume", || cluster.describe_job(&job), has_resumed);
    cluster.run_on_node_successfully("h0", &format!("scancel {job}"));
    cluster.wait_for_job_end(&job, "CANCELLED");
    let events = cluster.read_events(name);
    let steps = |kind: &str| {
        let named = events.iter().filter(|event| event["event"] == kind);
        named.map(|event| event["step"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((steps("step"), steps("resume")), ((1..=5).collect(), vec![5]), "{events:?}");
    assert!(steps("eval").is_empty() && steps("checkpoint").first() == Some(&5), "{events:?}");
}

/// Preempts and then cancels a program on nodes that join: the batch script starts `launch` once on
/// each node. Slurm sends SIGTERM to all of them, also to the controller on node 0.
fn check_nodes_that_join(cluster: &SlurmCluster) {
    cluster.run_on_node_successfully("h0", "seq 100 > key && chmod 600 key");
    let script = "trap '' TERM; trap 'touch joined-saved.$RANK; exit 0' USR1; touch joined-up.$RANK; \
                  while :; do sleep 0.1; done";
    cluster.write_program_job("{}", "grace_period: 8s\n  stop_signal: SIGUSR1", script);
    let launch = "srun ./launch job.yaml --key-file key --set name=joined";
    let submit = "sbatch -p requeued --parsable -N2 --ntasks-per-node=1 --exclusive -o joined.out";
    let job = cluster.run_on_node_successfully("h0", &format!("{submit} --wrap '{launch}'"));
    let files_exist =
        |name: &str| (0..2).all(|rank| cluster.shared_path(&format!("{name}.{rank}")).exists()).then_some(());
    let context = || format!("{}\n{}", cluster.describe_job(&job), cluster.read_shared_file("joined.out"));
    for end in ["preemption", "cancelled"] {
        wait_until("the start", context, || files_exist("joined-up"));
        cluster.run_on_node_successfully("h0", "rm joined-up.*");
        match end {
            "preemption" => preempt_job(cluster, &job, 2, 1),
            _ => _ = cluster.run_on_node_successfully("h0", &format!("scancel {job}")),
        }
        wait_until("the saved state", context, || files_exist("joined-saved"));
        cluster.run_on_node_successfully("h0", "rm joined-saved.*");
    }
    cluster.wait_for_job_end(&job, "CANCELLED");
    assert_eq!(cluster.read_end_reasons("joined"), ["preemption", "cancelled"], "{}", context());
}

#[test]
fn preempted_jobs_save_are_requeued_and_resume() {
    let Some(cluster) = SlurmCluster::start("preempted_jobs_save_are_requeued_and_resume", 2) else { return };
    let count = read_preemption_count();
    let expected = cluster.write_training_job(2, 150 * u64::from(count));
    for partition in ["requeued", "cancelled"] {
        check_preempted_training(&cluster, partition, count, &expected);
    }
    check_preempted_evaluation(&cluster);
    check_nodes_that_join(&cluster);
    // a program, in a batch script that does not let launch requeue the job. The program ignores
    // the SIGTERM that Slurm sends to it (proctrack/linuxproc).
    let script = "[ -e saved ] && exit 0; trap '' TERM; trap 'touch saved; exit 0' USR1; touch up; \
                  while :; do sleep 0.1; done";
    cluster.write_program_job("{}", "grace_period: 8s\n  stop_signal: SIGUSR1", script);
    let submit = "sbatch -p requeued --parsable -N1 --exclusive -o program.out --wrap './launch job.yaml'";
    let job = cluster.run_on_node_successfully("h0", submit);
    let up = || cluster.shared_path("up").exists().then_some(());
    wait_until("the start", || cluster.describe_job(&job), up);
    preempt_job(&cluster, &job, 2, 1);
    cluster.wait_for_job_end(&job, "COMPLETED");
    assert!(cluster.shared_path("saved").exists());
    cluster.assert_nothing_left();
}
