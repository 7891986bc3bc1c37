//! Runs workers on hosts over real SSH with the tools that people use: Debian's
//! environment-modules, gdb and py-spy, and a container of Charliecloud.
use super::containers::{create_image, has_charliecloud};
use crate::support::{
    self, FinishedRun, JobDirectory, output_to_text, report_skip, simulated_hosts::SimulatedHosts,
};
use std::{fs, path::Path};

/// The script of the workers: writes what the module has set, and the name of the parent process,
/// and computes long enough for a sampling profiler.
const PROGRAM: &str = r#"
import os, time
parent = open(f"/proc/{os.getppid()}/comm").read().strip()
open("tool.%s" % os.environ["RANK"], "w").write(f'{os.environ.get("FROM_MODULE")} {parent}')
def spin_for_profiler():
    end = time.monotonic() + 2
    while time.monotonic() < end: pass
spin_for_profiler()
"#;

/// Starts two hosts with a login profile that makes the module `launch-test/1.0` available. Returns
/// `None` if a tool or the hosts are missing; the test is then skipped.
fn start_hosts(test: &str, job_dir: &JobDirectory) -> Option<SimulatedHosts> {
    if !Path::new("/usr/share/modules/init/bash").exists() || !Path::new("/usr/bin/gdb").exists() {
        report_skip(test, "no environment-modules or gdb; run scripts/setup-tests");
        return None;
    }
    let hosts = SimulatedHosts::start_with_shared_directory(test, 2, &job_dir.path(""))?;
    let modules = job_dir.path("modulefiles");
    fs::create_dir_all(Path::new(&modules).join("launch-test")).unwrap();
    let module = "#%Module1.0\nsetenv FROM_MODULE loaded\n";
    fs::write(Path::new(&modules).join("launch-test/1.0"), module).unwrap();
    let profile = format!("module use {}\n", Path::new(&modules).display());
    fs::write(job_dir.path("profile"), profile).unwrap();
    for host in ["h0", "h1"] {
        hosts.run_shell(host, &format!("cp {} /root/.bash_profile", job_dir.path("profile").display()));
    }
    Some(hosts)
}

#[test]
fn workers_run_under_gdb_and_py_spy_with_a_module() {
    let test = "worker_environment::real_tools::workers_run_under_gdb_and_py_spy_with_a_module";
    let Some(profiler) = support::find_py_spy_or_skip(test) else { return };
    let job_dir = JobDirectory::new();
    let Some(hosts) = start_hosts(test, &job_dir) else { return };
    fs::write(job_dir.path("program.py"), PROGRAM).unwrap();
    let text = format!(
        "name: tools
cluster: {{hosts: [h0, h1], workers_per_host: 1, ssh: {{config: {config}}}}}
run:
  command: [python3, program.py]
  activate: {{modules: [launch-test]}}
  wrap:
    - {{ranks: 0, command: [gdb, -nx, -q, -batch, -return-child-result, -ex, run, --args]}}
    - {{ranks: 1, command: [{profiler}, record, --format, raw, --output, 'profile.{{rank}}', --]}}
",
        config = hosts.ssh_config_path().display(),
        profiler = profiler.display(),
    );
    fs::write(job_dir.path("job.yaml"), text).unwrap();
    let output = job_dir.run_launch(&["job.yaml", "--json"]);
    FinishedRun::from_output(&output).expect_success();
    let read = |name: &str| fs::read_to_string(job_dir.path(name)).unwrap_or_default();
    assert_eq!(read("tool.0"), "loaded gdb", "{}", output_to_text(&output));
    assert_eq!(read("tool.1"), "loaded py-spy", "{}", output_to_text(&output));
    assert!(read("profile.1").contains("spin_for_profiler"), "{}", read("profile.1"));
}

#[test]
fn workers_on_hosts_run_in_a_container() {
    let test = "worker_environment::real_tools::workers_on_hosts_run_in_a_container";
    if !has_charliecloud() {
        return report_skip(test, "no ch-run; run scripts/setup-tests");
    }
    let job_dir = JobDirectory::new();
    let Some(hosts) = SimulatedHosts::start_with_shared_directory(test, 2, &job_dir.path("")) else { return };
    create_image(&job_dir);
    let text = format!(
        "name: contained
cluster: {{hosts: [h0, h1], workers_per_host: 1, ssh: {{config: {config}}}}}
run:
  command: [sh, -c, 'cat /marker > out.$RANK; echo $WORLD_SIZE >> out.$RANK']
  container: {{image: image, runtime: charliecloud}}
",
        config = hosts.ssh_config_path().display(),
    );
    fs::write(job_dir.path("job.yaml"), text).unwrap();
    FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"])).expect_success();
    for rank in 0..2 {
        assert_eq!(fs::read_to_string(job_dir.path(&format!("out.{rank}"))).unwrap(), "inside\n2\n");
    }
}
