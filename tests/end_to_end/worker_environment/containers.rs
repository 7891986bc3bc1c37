//! Tests `run.container`: workers in real containers of Charliecloud, and the end of containers
//! that continue without the process of their runtime, as those of Docker do.
use crate::support::{FinishedRun, JobDirectory, environment::isolated_command, output_to_text, report_skip};
use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Child,
    thread,
    time::{Duration, Instant},
};

/// The longest wait for workers.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A replacement for `docker` whose containers continue when their client is killed. `rm` ends a
/// container.
const DOCKER: &str = r#"#!/bin/sh
cd "$(dirname "$0")"
if [ "$1" = rm ]; then echo "$3" >> removed; exit 0; fi
echo "$@" >> started
while [ "$1" != image ]; do shift; done
shift
cd "$OLDPWD"
exec "$@"
"#;

/// Writes a job of 2 workers that run the shell script `script`. `container` is the value of
/// `run.container`.
fn create_job(container: &str, script: &str) -> JobDirectory {
    let job_dir = JobDirectory::new();
    let text = format!(
        "name: contained\ncluster: {{workers_per_host: 2}}\nrun:\n  command: [sh, -c, {script:?}]\n  container: \
         {container}\n  grace_period: 1s\n"
    );
    fs::write(job_dir.path("job.yaml"), text).unwrap();
    job_dir
}

/// Creates an image with busybox and the file `/marker`, in which the working directory exists.
pub(super) fn create_image(job_dir: &JobDirectory) {
    let image = Path::new(&job_dir.path("image")).to_path_buf();
    let workdir = fs::canonicalize(job_dir.path("")).unwrap();
    for directory in ["bin", "dev", "etc", "proc", "sys", "tmp", "home", "root", "usr/bin"] {
        fs::create_dir_all(image.join(directory)).unwrap();
    }
    fs::create_dir_all(image.join(workdir.strip_prefix("/").unwrap())).unwrap();
    for file in ["passwd", "group", "hosts", "resolv.conf"] {
        fs::write(image.join("etc").join(file), "").unwrap();
    }
    fs::copy("/bin/busybox", image.join("bin/busybox")).unwrap();
    for program in ["sh", "cat", "sleep", "touch"] {
        symlink("busybox", image.join("bin").join(program)).unwrap();
    }
    fs::write(image.join("marker"), "inside\n").unwrap();
}

/// Waits until the files `ready.0` and `ready.1` exist.
fn wait_until_ready(job_dir: &JobDirectory) {
    let began = Instant::now();
    while (0..2).any(|rank| !Path::new(&job_dir.path(&format!("ready.{rank}"))).exists()) {
        assert!(began.elapsed() < WAIT_LIMIT, "the workers did not start");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether containers of Charliecloud can be created on this machine.
pub(super) fn has_charliecloud() -> bool {
    let found = isolated_command("ch-run", Path::new("/")).arg("--version").env("USER", "root").output();
    found.is_ok_and(|output| output.status.success()) && Path::new("/bin/busybox").exists()
}

#[test]
fn workers_and_commands_run_in_a_container() {
    if !has_charliecloud() {
        return report_skip("workers_and_commands_run_in_a_container", "no ch-run; run scripts/setup-tests");
    }
    let script = "trap 'echo saved >> out.$RANK; exit 0' TERM; cat /marker > out.$RANK; touch ready.$RANK; while :; do \
                  sleep 0.05; done";
    let job_dir = create_job("{image: image, runtime: charliecloud}", script);
    create_image(&job_dir);
    let mut child: Child = job_dir.launch_command(&["job.yaml"]).spawn().unwrap();
    wait_until_ready(&job_dir);
    let exec = |words: &[&str]| {
        let args = [&["exec", "contained", "--rank", "1", "--"][..], words].concat();
        output_to_text(&job_dir.run_launch(&args))
    };
    assert_eq!(exec(&["sh", "-c", "cat /marker; echo rank $RANK"]), "inside\nrank 1\n");
    let stopped = job_dir.run_launch(&["stop"]);
    assert!(stopped.status.success(), "{}", output_to_text(&stopped));
    child.wait().unwrap();
    for rank in 0..2 {
        assert_eq!(fs::read_to_string(job_dir.path(&format!("out.{rank}"))).unwrap(), "inside\nsaved\n");
    }
}

#[test]
fn containers_of_killed_workers_are_ended() {
    let script = "trap '' TERM; touch ready.$RANK; test $RANK != 1 || exit 0; while :; do sleep 0.05; done";
    let job_dir = create_job("{image: image, runtime: docker, options: [--shm-size, 1g]}", script);
    let bin = job_dir.path("bin");
    fs::create_dir(&bin).unwrap();
    let docker = Path::new(&bin).join("docker");
    fs::write(&docker, DOCKER).unwrap();
    fs::set_permissions(&docker, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", Path::new(&bin).display(), std::env::var("PATH").unwrap());
    let mut child: Child = job_dir.launch_command(&["job.yaml"]).env("PATH", path).spawn().unwrap();
    wait_until_ready(&job_dir);
    let stopped = job_dir.run_launch(&["stop"]);
    assert!(stopped.status.success(), "{}", output_to_text(&stopped));
    child.wait().unwrap();
    let read = |name: &str| fs::read_to_string(Path::new(&bin).join(name)).unwrap_or_default();
    let (started, removed) = (read("started"), read("removed"));
    assert!(started.contains("--shm-size 1g image sh -c"), "{started}");
    assert!(started.contains("--env RANK ") && !started.contains("RANK=0"), "{started}");
    // Rank 1 has ended by itself, and rank 0 was killed.
    assert_eq!(removed.lines().count(), 1, "{removed}");
    assert!(removed.trim_end().ends_with("-0-0"), "{removed}");
}

#[test]
fn unusable_containers_are_rejected() {
    let run = |container: &str| {
        let job_dir = create_job(container, "touch started");
        fs::create_dir(job_dir.path("image")).unwrap();
        let ran = FinishedRun::from_output(&job_dir.run_launch(&["job.yaml", "--json"]));
        assert!(!Path::new(&job_dir.path("started")).exists());
        (ran.code, ran.failure_code().to_owned(), ran.failure_message().to_owned())
    };
    let (code, failure, message) = run("{image: image, runtime: enroot}");
    assert_eq!((code, failure.as_str()), (3, "container-runtime-missing"), "{message}");
    assert!(message.contains("`enroot`"), "{message}");
    let (code, failure, message) = run("{image: image, runtime: podman, mounts: [/no/such/data]}");
    assert_eq!((code, failure.as_str()), (3, "container-mount-unusable"), "{message}");

    let train = JobDirectory::new();
    let (code, error) = train.expect_rejection(&[
        "plan",
        "job.yaml",
        "--json",
        "--set",
        "run.container={image: a.sif, runtime: apptainer}",
    ]);
    assert_eq!(code, 2);
    assert!(error.to_string().contains("runs without a container"), "{error}");
}
