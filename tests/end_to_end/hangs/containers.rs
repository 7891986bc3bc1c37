//! A rank of a program in a container that hangs on purpose: the verdict is that of a program
//! without a container.
use super::assert_job_holds_up;
use crate::support::{self, JobDirectory, environment::isolated_command, output_to_text, report_skip};
use std::{fs, os::unix::fs::symlink, path::Path};

/// Returns the directories that contain the interpreter `python` with its packages: that of the
/// environment, and that of the interpreter from which the environment was created.
fn list_python_directories(python: &Path) -> Vec<String> {
    let mut command = isolated_command(python, Path::new("/"));
    let output = command.args(["-c", "import sys; print(sys.base_prefix)"]).output().unwrap();
    assert!(output.status.success(), "{}", output_to_text(&output));
    let base = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    // The environment is a link to another directory of the test cache.
    let cache = python.ancestors().nth(3).unwrap().to_str().unwrap().to_owned();
    let is_outside_of_usr = |path: &String| !Path::new(path).starts_with("/usr");
    ["/usr".to_owned()].into_iter().chain([base, cache].into_iter().filter(is_outside_of_usr)).collect()
}

/// Creates an image for programs of this host: the directories in which `mounts` and the working
/// directory are mounted.
fn create_image(job_dir: &JobDirectory, mounts: &[String]) {
    let image = job_dir.path("image");
    let image = Path::new(&image);
    let workdir = fs::canonicalize(job_dir.path("")).unwrap();
    let standard = ["/dev", "/etc", "/proc", "/sys", "/tmp", "/home", "/root"].map(Path::new);
    let mounted = mounts.iter().map(Path::new).chain([workdir.as_path()]);
    for directory in standard.into_iter().chain(mounted) {
        fs::create_dir_all(image.join(directory.strip_prefix("/").unwrap())).unwrap();
    }
    for name in ["bin", "lib", "lib64", "sbin"] {
        symlink(format!("usr/{name}"), image.join(name)).unwrap();
    }
    for file in ["passwd", "group", "hosts", "resolv.conf"] {
        fs::write(image.join("etc").join(file), "").unwrap();
    }
}

#[test]
fn a_rank_in_a_container_that_never_enters_a_collective_is_named() {
    let test = "a_rank_in_a_container_that_never_enters_a_collective_is_named";
    let version = isolated_command("ch-run", Path::new("/")).arg("--version").env("USER", "root").output();
    if !version.is_ok_and(|output| output.status.success()) || !Path::new("/bin").is_symlink() {
        return report_skip(test, "no ch-run, or /bin is not a part of /usr; run scripts/setup-tests");
    }
    let Some(python) = support::find_python_or_skip(test) else { return };
    let job_dir = JobDirectory::new();
    let mounts = list_python_directories(&python);
    create_image(&job_dir, &mounts);
    let mounts: Vec<String> = mounts.iter().map(|path| format!("{path}:{path}")).collect();
    let mounts = serde_json::to_string(&mounts).unwrap();
    let container = format!(", container: {{image: image, runtime: charliecloud, mounts: {mounts}}}");
    assert_job_holds_up(&job_dir, &python, "sleep", &container, "sleeps");
}
