//! Tests `run.activate` with a real virtual environment, with a script, and with the commands
//! `conda` and `module` of a login profile.
use crate::support::{
    FinishedRun, JobDirectory, environment::clean_command, output_to_text, simulated_hosts::SimulatedHosts,
};
use serde_json::Value;
use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

/// A login profile that prints a greeting, and defines `conda` and `module` as their installers do.
const PROFILE: &str = r#"
echo welcome
conda() { [ "$1" = activate ] && export CONDA_DEFAULT_ENV="$2" ORDER="$ORDER conda"; }
module() { shift; for name; do [ "$name" = nothing ] && { echo "no module nothing" >&2; return 1; }; export LOADEDMODULES="$LOADEDMODULES:$name"; done; export ORDER="$ORDER module"; }
"#;

/// The script of the workers: prints what the activation changed.
const PROGRAM: &str = r#"
import json, os, sys
names = ["ORDER", "CONDA_DEFAULT_ENV", "LOADEDMODULES", "OMP_NUM_THREADS", "FROM_JOB", "VIRTUAL_ENV"]
values = {name: os.environ.get(name) for name in names}
values["prefix"] = sys.prefix
open("rank-%s.json" % os.environ["RANK"], "w").write(json.dumps(values))
"#;

/// Creates a job directory with a virtual environment `env`, an activation script `env.sh` and the
/// program `program.py`.
fn create_directory() -> JobDirectory {
    let job_dir = JobDirectory::new();
    let mut venv = clean_command("python3");
    venv.args(["-m", "venv", "--without-pip"]).arg(job_dir.path("env"));
    assert!(venv.status().expect("python3").success());
    fs::write(job_dir.path("env.sh"), "export ORDER=script OMP_NUM_THREADS=3 FROM_JOB=script\n").unwrap();
    fs::write(job_dir.path("program.py"), PROGRAM).unwrap();
    job_dir
}

/// Writes the login profile below the directory `home`.
fn write_profile(home: &Path) {
    fs::create_dir_all(home).unwrap();
    fs::write(home.join(".bash_profile"), PROFILE).unwrap();
}

/// The `run` section of a job that activates everything.
const RUN_SECTION: &str = "run:
  command: [python, program.py]
  activate: [{script: env.sh}, {conda: base}, {modules: [gcc/12, cuda]}, {venv: env}]
  env: {FROM_JOB: job}
";

/// Checks the results of the ranks in a job directory with the job [`RUN_SECTION`].
fn assert_activated(job_dir: &JobDirectory, ranks: u32) {
    for rank in 0..ranks {
        let text = fs::read(job_dir.path(&format!("rank-{rank}.json"))).unwrap();
        let values: Value = serde_json::from_slice(&text).unwrap();
        let prefix = job_dir.path("env").display().to_string();
        assert_eq!((&values["prefix"], &values["VIRTUAL_ENV"]), (&prefix.as_str().into(), &prefix.into()));
        assert_eq!(values["ORDER"], "script conda module", "{values}");
        assert_eq!(values["CONDA_DEFAULT_ENV"], "base");
        assert_eq!(values["LOADEDMODULES"], ":gcc/12:cuda");
        // A default of launch does not replace a value of the script, but the job does.
        assert_eq!((&values["OMP_NUM_THREADS"], &values["FROM_JOB"]), (&"3".into(), &"job".into()));
    }
}

#[test]
fn workers_have_the_activated_environment() {
    let job_dir = create_directory();
    write_profile(&job_dir.path(".home"));
    fs::write(job_dir.path("job.yaml"), format!("cluster: {{workers_per_host: 2}}\n{RUN_SECTION}")).unwrap();
    FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"])).expect_success();
    assert_activated(&job_dir, 2);

    let plan = output_to_text(&job_dir.run_launch(&["plan", "job.yaml", "--verbose"]));
    assert!(plan.contains("\n  + CONDA_DEFAULT_ENV=base\n") && plan.contains("\n  ~ PATH="), "{plan}");
    let plan = job_dir.run_launch(&["plan", "job.yaml", "--verbose", "--json"]);
    let plan: Value = serde_json::from_slice(&plan.stdout).expect("JSON");
    assert_eq!(plan["activation"]["added"]["LOADEDMODULES"], ":gcc/12:cuda", "{plan}");
    let plan = output_to_text(&job_dir.run_launch(&["plan", "job.yaml"]));
    assert!(!plan.contains("CONDA_DEFAULT_ENV"), "activated without --verbose: {plan}");
}

#[test]
fn a_failed_activation_is_explained() {
    let job_dir = create_directory();
    write_profile(&job_dir.path(".home"));
    fs::write(job_dir.path("license.sh"), "echo 'no license' >&2\nreturn 3\n").unwrap();
    fs::write(job_dir.path("slow.sh"), "sleep 600\n").unwrap();
    let run = |activate: &str| {
        let text =
            format!("run: {{command: [touch, started], activate: {activate}, activate_timeout: 5s}}\n");
        fs::write(job_dir.path("job.yaml"), text).unwrap();
        FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"]))
    };
    for (activate, code) in [
        ("{venv: missing}", "activation-venv-missing"),
        ("{script: missing.sh}", "activation-script-missing"),
        ("{script: license.sh}", "activation-failed"),
        ("{modules: [nothing]}", "activation-failed"),
        ("{script: slow.sh}", "activation-timeout"),
    ] {
        let began = Instant::now();
        let ran = run(activate);
        assert_eq!((ran.code, ran.failure_code()), (3, code), "{:?}", ran.expect_failure());
        assert!(began.elapsed() < Duration::from_secs(60));
    }
    let ran = run("{script: license.sh}");
    let error = ran.failure_diagnostics()[0];
    assert_eq!(
        (&error["fields"]["exit_code"], &error["fields"]["output"]),
        (&3.into(), &"no license".into())
    );
    assert!(!job_dir.path("started").exists());
    let plan = job_dir.run_launch(&["plan", "job.yaml", "--verbose"]);
    assert!(output_to_text(&plan).contains("error[activation-failed]"), "{}", output_to_text(&plan));
}

#[test]
fn the_built_in_training_reports_that_it_does_not_use_the_environment() {
    let job_dir = JobDirectory::new();
    let output = job_dir.run_launch(&["plan", "job.yaml", "--set", "run.activate={venv: env}"]);
    assert!(output.status.success(), "{}", output_to_text(&output));
    assert!(output_to_text(&output).contains("`run.activate` has no effect without `run.command`"));
}

#[test]
fn each_host_activates_its_environment() {
    const TEST: &str = "worker_environment::activation::each_host_activates_its_environment";
    let job_dir = create_directory();
    let Some(hosts) = SimulatedHosts::start_with_shared_directory(TEST, 2, &job_dir.path("")) else { return };
    fs::write(job_dir.path("profile"), PROFILE).unwrap();
    for host in ["h0", "h1"] {
        hosts.run_shell(host, &format!("cp {} /root/.bash_profile", job_dir.path("profile").display()));
    }
    let config = hosts.ssh_config_path();
    let cluster =
        format!("cluster: {{hosts: [h0, h1], workers_per_host: 2, ssh: {{config: {}}}}}\n", config.display());
    fs::write(job_dir.path("job.yaml"), format!("{cluster}{RUN_SECTION}")).unwrap();
    FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"])).expect_success();
    assert_activated(&job_dir, 4);

    hosts.run_shell("h1", "rm /root/.bash_profile");
    let ran = FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"]));
    assert_eq!((ran.code, ran.failure_code()), (3, "activation-conda-missing"));
    assert_eq!(ran.failure_diagnostics()[0]["fields"]["host"], "h1");
}
