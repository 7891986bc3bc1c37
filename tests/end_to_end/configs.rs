//! Checks that every example job in configs/ can be planned, that planning changes no file, and
//! that the small examples run.

use crate::{
    emulated_gpu,
    support::{
        self,
        environment::{TestDirectory, create_test_directory, launch_command},
    },
};
use serde_json::Value;
use std::{fs, os::unix::fs::symlink, path::Path, process::Output};

/// Returns the root directory of the repository.
fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs `launch ARGS…` in a directory and waits for its end.
fn run_launch(args: &[&str], directory: &Path) -> Output {
    let home = create_test_directory();
    let mut command = launch_command(home.path(), args);
    command.current_dir(directory).output().expect("launch starts")
}

/// Creates a directory in which the example jobs find their files: links to those of the
/// repository, and the model that the quick start writes.
fn create_example_directory() -> TestDirectory {
    let directory = create_test_directory();
    for name in ["CHANGELOG.md", "README.md", "configs", "docs", "launcher", "tests", "worker"] {
        symlink(repository_root().join(name), directory.path().join(name)).expect("a link");
    }
    let quick_start = ["configs/quickstart.yaml", "--set", "train.steps=1"];
    let output = run_launch(&quick_start, directory.path());
    assert_eq!(output.status.code(), Some(0), "{}", support::output_to_text(&output));
    directory
}

/// Returns the sorted names of the YAML files in configs/.
fn list_example_configs() -> Vec<String> {
    let entries = fs::read_dir(repository_root().join("configs")).expect("configs/");
    let names = entries.map(|e| e.expect("entry").file_name().into_string().expect("UTF-8"));
    let mut names: Vec<String> = names.filter(|n| n.ends_with(".yaml")).collect();
    names.sort();
    assert!(names.len() > 15, "{names:?}");
    names
}

/// Plans every example on a machine with eight emulated GPUs, which some examples require.
#[test]
fn each_example_can_be_planned() {
    let directory = create_example_directory();
    for name in list_example_configs() {
        let file = format!("configs/{name}");
        let output = launch_command(directory.path(), &["plan", &file, "--json"])
            .env("LD_LIBRARY_PATH", emulated_gpu::library_directory())
            .env("LAUNCH_GPUS", "8")
            .output()
            .expect("launch starts");
        assert_eq!(output.status.code(), Some(0), "{file}: {}", support::output_to_text(&output));
        let plan: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let stem = name.trim_end_matches(".yaml");
        assert_eq!(plan["name"], stem);
        let ranks = plan["ranks"].as_array().expect("ranks");
        assert_eq!(plan["world"], ranks.len());
        for (rank, planned) in ranks.iter().enumerate() {
            assert_eq!(planned["env"]["RANK"], rank.to_string());
            let trains = planned["command"].is_null();
            assert_eq!(trains, planned["memory"]["total"].as_u64().is_some_and(|m| m > 1 << 20), "{file}");
        }
        let job_dir = directory.path().join("runs").join(stem);
        assert_eq!(plan["run_dir"].as_str(), job_dir.join("{run}").to_str());
        assert!(stem == "quickstart" || !job_dir.exists(), "planning creates no directory");
    }
}

#[test]
fn each_small_example_runs() {
    let directory = create_example_directory();
    for name in ["finetune", "lora", "chat", "data-mixture", "resume-external", "evaluation", "export"] {
        let file = format!("configs/{name}.yaml");
        let output = run_launch(&[&file, "--set", "train.steps=4"], directory.path());
        assert_eq!(output.status.code(), Some(0), "{file}: {}", support::output_to_text(&output));
        let weights = directory.path().join("runs").join(name).join("checkpoints/weights");
        assert!(weights.join("gathered.json").exists(), "{file} writes no weights");
    }
    let output = run_launch(&["configs/command.yaml"], directory.path());
    assert_eq!(output.status.code(), Some(0), "{}", support::output_to_text(&output));
}

#[test]
fn the_slurm_example_becomes_a_batch_script() {
    let output = run_launch(&["sbatch", "configs/slurm.yaml", "--print"], repository_root());
    let script = String::from_utf8_lossy(&output.stdout);
    assert!(script.lines().any(|line| line == "#SBATCH --nodes=4"), "{}", support::output_to_text(&output));
}

#[test]
fn the_readme_lists_each_example() {
    let readme = fs::read_to_string(repository_root().join("README.md")).expect("README.md");
    let missing: Vec<_> = list_example_configs()
        .into_iter()
        .filter(|name| !readme.contains(&format!("(configs/{name})")))
        .collect();
    assert!(missing.is_empty(), "README.md does not list {missing:?}");
}

#[test]
fn the_job_that_a_dry_run_prints_has_the_same_plan() {
    let directory = create_test_directory();
    fs::write(directory.path().join("README.md"), "text to train on. ".repeat(500)).expect("data");
    let tiny = repository_root().join("configs/tiny.yaml");
    let tiny = tiny.to_str().expect("UTF-8");
    let shown = run_launch(&[tiny, "--dry-run", "--set", "cluster.workers_per_host=2"], directory.path());
    assert_eq!(shown.status.code(), Some(0), "{}", String::from_utf8_lossy(&shown.stderr));
    let text = String::from_utf8(shown.stdout).expect("UTF-8");
    let (plan, job) = text.split_once("# the job with all defaults\n").expect("both parts");
    let table = plan.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    assert_eq!(table.count(), 2, "one row for each rank: {plan}");
    fs::write(directory.path().join("whole.yaml"), job).expect("written");
    let again = run_launch(&["whole.yaml", "--dry-run"], directory.path());
    assert_eq!(String::from_utf8(again.stdout).expect("UTF-8"), text);
    let entries: Vec<_> =
        fs::read_dir(directory.path()).expect("directory").map(|e| e.expect("entry").file_name()).collect();
    assert_eq!(entries.len(), 2, "a dry run creates no file: {entries:?}");
}

#[test]
fn mistakes_are_reported_on_stderr_with_exit_code_2() {
    let directory = create_test_directory();
    fs::write(directory.path().join("job.yaml"), "train:\n  data: {files: [nothing-*.txt]}\n")
        .expect("written");
    let mut messages = String::new();
    for args in [
        &["plan", "job.yaml"][..],
        &["job.yaml"],
        &["job.yaml", "--set", "train.stepz=3"],
        &["absent.yaml"],
        &["job.yaml", "--set", "run.workdir=/nonexistent"],
        &["plna", "job.yaml"],
        &["job.yaml", "--wrong"],
        &[],
    ] {
        let output = run_launch(args, directory.path());
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{args:?}: {stderr}");
        messages += &format!("{}\n{stderr}\n", [&["launch"][..], args].concat().join(" "));
    }
    support::assert_snapshot(directory.path(), "mistakes", &messages, &[]);
    assert!(!directory.path().join("runs").exists());
}

#[test]
fn with_json_a_rejected_job_has_a_failure_event() {
    let output = run_launch(&["absent.yaml", "--json"], repository_root());
    let lines: Vec<Value> = String::from_utf8(output.stdout)
        .expect("UTF-8")
        .lines()
        .map(|l| serde_json::from_str(l).expect("an event"))
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!((&lines[0]["event"], &lines[1]["event"]), (&"failure".into(), &"done".into()));
    assert_eq!(lines[1]["exit_code"], 2);
}
