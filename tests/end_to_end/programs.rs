//! Tests `launch run` of a program without a job file, and secrets that a job only refers to, with
//! the real executable.
use crate::support::{
    FinishedRun, JobDirectory, expand_details, list_files_below, output_to_text, parse_rejection,
};
use serde_json::Value;
use std::fs;

#[test]
fn a_program_runs_as_workers_without_a_job_file() {
    let job_dir = JobDirectory::new();
    let script = "echo \"$RANK of $WORLD_SIZE: $1 $MASTER_PORT\" > out.$RANK";
    let ran = job_dir.run_launch(&["run", "--workers", "3", "--", "sh", "-c", script, "sh", "it's \"é\n"]);
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    for rank in 0..3 {
        let text = fs::read_to_string(job_dir.path(&format!("out.{rank}"))).unwrap();
        assert!(text.starts_with(&format!("{rank} of 3: it's \"é\n ")), "{text}");
    }
    let failed =
        FinishedRun::from_output(&job_dir.run_launch(&["run", "--json", "--", "sh", "-c", "exit 7"]));
    assert_eq!((failed.code, failed.failure_code()), (1, "worker-exited"));
    assert_eq!(failed.expect_failure()["reason"]["code"], 7);
}

/// A job that reads one secret from a file and one from the environment.
const JOB: &str = "\
name: secrets
run:
  command: [sh, -c, 'echo \"$TOKEN and $KEY\" > got; echo \"${#TOKEN}\"; cat /proc/$PPID/cmdline >> lines; exit 3']
  env: {TOKEN: {from_file: token.txt}, KEY: {from_env: LAUNCH_TEST_KEY}}
";

#[test]
fn secrets_reach_the_workers_and_nothing_else() {
    let (token, key) = ("sesame-e7c1", "swordfish-09aa");
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("job.yaml"), JOB).unwrap();
    fs::write(job_dir.path("token.txt"), format!("{token}\n")).unwrap();
    let launch = |args: &[&str]| job_dir.launch_command(args).env("LAUNCH_TEST_KEY", key).output().unwrap();
    for args in [
        &["job.yaml"][..],
        &["job.yaml", "--json"],
        &["job.yaml", "--dry-run"],
        &["job.yaml", "--dry-run", "--json"],
        &["plan", "job.yaml", "--json"],
    ] {
        let text = output_to_text(&launch(args));
        assert!(!text.contains(token) && !text.contains(key), "{args:?}: {text}");
        assert!(text.contains("secrets"), "{args:?}: {text}");
    }
    assert_eq!(fs::read_to_string(job_dir.path("got")).unwrap(), format!("{token} and {key}\n"));
    for file in list_files_below(&job_dir.path("")) {
        let bytes = fs::read(job_dir.path(&file)).unwrap();
        let found =
            String::from_utf8_lossy(&bytes).contains(token) || String::from_utf8_lossy(&bytes).contains(key);
        assert_eq!(found, file == "got" || file == "token.txt" && found, "{file}");
    }
}

#[test]
fn a_missing_secret_is_named_before_anything_starts() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("job.yaml"), JOB).unwrap();
    let launch = |args: &[&str]| job_dir.launch_command(args).output().unwrap();
    let (exit_code, error) = parse_rejection(&launch(&["plan", "job.yaml", "--json"]));
    let mistakes = expand_details(&error);
    let codes: Vec<&Value> = mistakes.iter().map(|mistake| &mistake["code"]).collect();
    assert_eq!((exit_code, codes), (2, vec![&"job-env-value-missing".into(); 2]), "{error}");
    assert!(mistakes.iter().all(|mistake| mistake["location"]["line"] == 4), "{error}");
    let run = launch(&["job.yaml"]);
    assert_eq!(run.status.code(), Some(2));
    job_dir.assert_snapshot("missing_secrets", &output_to_text(&run));
    assert!(!job_dir.path("got").exists());
}
