//! Tests that a stop request ends every long operation of the built-in training within seconds, on
//! several hosts, and that no step is lost.
use super::*;
use crate::support::token_cache_locks::TokenCacheLocks;

/// The longest time from a stop request to the end of the run.
const STOP_LIMIT: Duration = Duration::from_secs(15);
/// The lines of the held-out text, whose evaluation takes much longer than a stop.
const HELD_OUT_LINES: usize = 100_000;

/// Sends SIGTERM to the controller of a run, and waits until the run ends.
#[track_caller]
fn stop_run(run: ActiveRun) -> FinishedRun {
    let began = Instant::now();
    kill(Pid::from_raw(run.child.id() as i32), Signal::SIGTERM).unwrap();
    let ran = run.wait_for_end();
    let elapsed = began.elapsed();
    println!("stopped within {elapsed:.2?}");
    assert!(elapsed < STOP_LIMIT, "the stop took {elapsed:?}: {:?}", ran.events);
    assert_eq!((ran.code, ran.events_named("failure").len()), (143, 0), "{}", ran.stderr);
    ran
}

/// Stops a training while its token cache is built, during a long evaluation, and while it
/// generates a text. The hosts share the directory of checkpoints or, during the text, do not.
#[test]
fn stop_requests_end_long_operations_on_four_hosts_and_lose_no_step() {
    let test = "cluster::stop_requests::stop_requests_end_long_operations_on_four_hosts_and_lose_no_step";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let whole = job_dir.run(&["resume.from=never", "checkpoint.every=never"]).expect_success();
    let whole = whole.collect_losses();
    let line = "The fox goes to the barn and counts to a hundred.\n";
    fs::write(job_dir.path("held-out.txt"), line.repeat(HELD_OUT_LINES)).unwrap();
    let job = format!(
        "{}  eval: {{every: 5, samples: 8, files: [held-out.txt]}}\n",
        TINY_JOB.replace("checkpoint: {every: 10, keep: 2}\n", "")
    );
    let args = write_job(&job_dir, &hosts, "stopped", &job, ALL_HOSTS);

    let locks = TokenCacheLocks::lock_all(&job_dir.path(".launch-cache"));
    let log = "run.logs.dir=/scratch/preparing";
    let preparing = start_run(&job_dir, &args, &[log]);
    let is_preparing = "until grep -q '^rank 0 of 8' /scratch/preparing/logs/rank-0.log; do sleep 0.1; done";
    hosts.run_shell("h0", &format!("{is_preparing} 2>/dev/null"));
    let ran = stop_run(preparing);
    let notices = ran.notice_messages();
    assert!(notices.iter().any(|notice| notice.contains("before the first step")), "{notices:?}");
    assert_eq!((ran.events_named("step").len(), ran.events_named("checkpoint").len()), (0, 0));
    drop(locks);
    assert_nothing_left(&hosts, &HOSTS);

    let mut evaluating = start_run(&job_dir, &args, &["train.eval.samples=1048576"]);
    evaluating.wait_for_event("step", 5);
    thread::sleep(Duration::from_secs(1));
    let first = stop_run(evaluating);
    let notices = first.notice_messages();
    assert!(notices.iter().any(|notice| notice.contains("the evaluation of step 5")), "{notices:?}");
    assert_eq!(first.events_named("checkpoint").last().expect("a checkpoint")["step"], 5);
    assert_eq!(first.events_named("eval").len(), 0);
    let rest = start_run(&job_dir, &args, &[]).wait_for_end().expect_success();
    assert_eq!([first.collect_losses(), rest.collect_losses()].concat(), whole);
    let evaluated = rest.events_named("eval").into_iter().map(|event| event["step"].as_u64().unwrap());
    assert_eq!(evaluated.collect::<Vec<_>>(), [5, 10, 15, 20]);

    let set = [
        "checkpoint.dir=/scratch/separate",
        "train.eval.sample={prompt: The fox, tokens: 4096}",
        "cluster.workers_per_host=1",
    ];
    let mut generating = start_run(&job_dir, &args, &set);
    generating.wait_for_event("step", 5);
    thread::sleep(Duration::from_secs(1));
    let first = stop_run(generating);
    assert_eq!(first.events_named("checkpoint").last().expect("a checkpoint")["step"], 5);
    assert_eq!((first.events_named("eval").len(), first.events_named("sample").len()), (0, 0));
    let rest = start_run(&job_dir, &args, &[set[0]]).wait_for_end().expect_success();
    assert_eq!([first.collect_losses(), rest.collect_losses()].concat(), whole);
    assert_nothing_left(&hosts, &HOSTS);
}
