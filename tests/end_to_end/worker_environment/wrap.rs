//! Tests `run.wrap`: programs that start the workers of some ranks.
use crate::support::{FinishedRun, JobDirectory, output_to_text};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    process::Child,
    thread,
    time::{Duration, Instant},
};

/// A wrapper that runs the command in a child process, as profilers do.
const WRAPPER: &str = "#!/bin/sh\necho \"$1 begins\" >> wrapped\nlabel=$1\nshift\n\"$@\"\ncode=$?\necho \"$label ends with $code\" >> wrapped\nexit $code\n";

/// Creates a directory with the wrapper `wrap.sh` and a job of 3 workers that run the shell script
/// `script`. `wrap` is the value of `run.wrap`.
fn create_job(wrap: &str, script: &str) -> JobDirectory {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("wrap.sh"), WRAPPER).unwrap();
    fs::set_permissions(job_dir.path("wrap.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    let text = format!(
        "name: wrapped\ncluster: {{workers_per_host: 3}}\nrun: {{command: [sh, -c, {script:?}], wrap: {wrap}}}\n"
    );
    fs::write(job_dir.path("job.yaml"), text).unwrap();
    job_dir
}

/// Reads the lines that the wrappers wrote, sorted.
fn read_lines(job_dir: &JobDirectory) -> Vec<String> {
    let text = fs::read_to_string(job_dir.path("wrapped")).unwrap_or_default();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn wrappers_start_the_selected_ranks() {
    let wrap = "[{ranks: '0,2', command: [./wrap.sh, 'outer-{rank}']}, {ranks: 2, command: [./wrap.sh, 'inner-{local_rank}-{attempt}-%q{X}']}]";
    let job_dir = create_job(wrap, "echo done $RANK >> wrapped");
    FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"])).expect_success();
    let expected = [
        "done 0",
        "done 1",
        "done 2",
        "inner-2-0-%q{X} begins",
        "inner-2-0-%q{X} ends with 0",
        "outer-0 begins",
        "outer-0 ends with 0",
        "outer-2 begins",
        "outer-2 ends with 0",
    ];
    assert_eq!(read_lines(&job_dir), expected);
    let plan = output_to_text(&job_dir.run_launch(&["plan", "job.yaml"]));
    assert!(plan.contains("wrapper of ranks 0,2: ./wrap.sh 'outer-{rank}'\n"), "{plan}");
}

#[test]
fn the_exit_code_of_a_wrapper_is_that_of_the_worker() {
    let job_dir =
        create_job("[{ranks: all, command: [./wrap.sh, a]}]", "test $RANK != 1 || exit 7; exec sleep 60");
    let ran = FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"]));
    assert_eq!((ran.code, ran.failure_code()), (1, "worker-exited"));
    let failure = ran.expect_failure();
    assert_eq!((&failure["reason"]["code"], &failure["rank"]), (&7.into(), &1.into()), "{failure}");
}

#[test]
fn signals_reach_the_process_below_a_wrapper() {
    let script =
        "trap 'echo saved $RANK >> wrapped; exit 0' TERM; touch ready.$RANK; while :; do sleep 0.05; done";
    let job_dir = create_job("[{ranks: all, command: [./wrap.sh, a]}]", script);
    // The wrapper ignores the signal, which is sent to the process group of the worker.
    fs::write(job_dir.path("wrap.sh"), "#!/bin/sh\ntrap : TERM\nshift\n\"$@\"\n").unwrap();
    let mut child: Child = job_dir.launch_command(&["job.yaml"]).spawn().unwrap();
    let began = Instant::now();
    while (0..3).any(|rank| !job_dir.path(&format!("ready.{rank}")).exists()) {
        assert!(began.elapsed() < Duration::from_secs(60), "the workers did not start");
        thread::sleep(Duration::from_millis(20));
    }
    let stopped = job_dir.run_launch(&["stop"]);
    assert!(stopped.status.success(), "{}", output_to_text(&stopped));
    child.wait().unwrap();
    assert_eq!(read_lines(&job_dir), ["saved 0", "saved 1", "saved 2"]);
}

#[test]
fn unusable_wrappers_are_rejected() {
    let job_dir = create_job("[{ranks: all, command: [no-such-profiler, -o, x]}]", "touch started");
    let ran = FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"]));
    assert_eq!((ran.code, ran.failure_code()), (3, "worker-wrapper-missing"));
    assert!(ran.failure_message().contains("no-such-profiler"), "{}", ran.failure_message());
    assert!(!job_dir.path("started").exists());

    let train = JobDirectory::new();
    let (code, error) = train.expect_rejection(&[
        "plan",
        "job.yaml",
        "--json",
        "--set",
        "run.wrap=[{ranks: all, command: [nice]}]",
    ]);
    assert_eq!(code, 2);
    assert!(error.to_string().contains("the built-in training cannot be wrapped"), "{error}");

    let many = create_job("[{ranks: 9, command: [nice]}]", "true");
    let plan = output_to_text(&many.run_launch(&["plan", "job.yaml"]));
    assert!(plan.contains("warning[wrap-rank-unknown]"), "{plan}");
}
