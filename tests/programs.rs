//! Programs without a job file, and secrets by reference, with the real executable.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use std::{fs, process::Output};
use support::{JobDirectory, files_below};

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn a_program_runs_as_workers_without_a_job_file() {
    let place = JobDirectory::new();
    let script = "echo \"$RANK of $WORLD_SIZE: $1 $MASTER_PORT\" > said.$RANK";
    let ran = place.launch(&["run", "--workers", "3", "--", "sh", "-c", script, "sh", "it's \"é\n"]);
    assert!(ran.status.success(), "{}", text(&ran));
    for rank in 0..3 {
        let said = fs::read_to_string(place.path(&format!("said.{rank}"))).unwrap();
        assert!(said.starts_with(&format!("{rank} of 3: it's \"é\n ")), "{said}");
    }
    let failed = place.launch(&["run", "--", "sh", "-c", "exit 7"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed).contains("exit code 7"), "{}", text(&failed));
}

const JOB: &str = "\
name: secrets
run:
  command: [sh, -c, 'echo \"$TOKEN and $KEY\" > got; echo \"${#TOKEN}\"; cat /proc/$PPID/cmdline >> lines; exit 3']
  env: {TOKEN: {from_file: token.txt}, KEY: {from_env: LAUNCH_TEST_KEY}}
";

#[test]
fn secrets_reach_the_workers_and_nothing_else() {
    let (token, key) = ("sesame-e7c1", "swordfish-09aa");
    let place = JobDirectory::new();
    fs::write(place.path("job.yaml"), JOB).unwrap();
    fs::write(place.path("token.txt"), format!("{token}\n")).unwrap();
    let launch = |args: &[&str]| place.command(args).env("LAUNCH_TEST_KEY", key).output().unwrap();
    for args in [
        &["job.yaml"][..],
        &["job.yaml", "--json"],
        &["job.yaml", "--dry-run"],
        &["job.yaml", "--dry-run", "--json"],
        &["plan", "job.yaml", "--json"],
    ] {
        let said = text(&launch(args));
        assert!(!said.contains(token) && !said.contains(key), "{args:?}: {said}");
        assert!(said.contains("secrets"), "{args:?}: {said}");
    }
    assert_eq!(fs::read_to_string(place.path("got")).unwrap(), format!("{token} and {key}\n"));
    for file in files_below(&place.path("")) {
        let bytes = fs::read(place.path(&file)).unwrap();
        let found =
            String::from_utf8_lossy(&bytes).contains(token) || String::from_utf8_lossy(&bytes).contains(key);
        assert_eq!(found, file == "got" || file == "token.txt" && found, "{file}");
    }
}

#[test]
fn a_missing_secret_is_named_before_anything_starts() {
    let place = JobDirectory::new();
    fs::write(place.path("job.yaml"), JOB).unwrap();
    for args in [&["job.yaml"][..], &["plan", "job.yaml"]] {
        let ran = place.command(args).env_remove("LAUNCH_TEST_KEY").output().unwrap();
        assert_eq!(ran.status.code(), Some(2));
        let said = text(&ran);
        for part in ["token.txt can't be read: No such file", "`LAUNCH_TEST_KEY` isn't set", "job.yaml:4:"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
    assert!(!place.path("got").exists());
}
