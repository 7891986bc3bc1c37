//! Creates the commands by which tests start programs. The environment of these programs depends on
//! the test, and not on the user.
use super::process_list::{has_variable, list_processes};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    env,
    ffi::OsStr,
    fs,
    ops::Deref,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};
use tempfile::TempDir;

/// The directory of simulated hosts and clusters, and of the locks that reserve their networks. It
/// does not depend on `TMPDIR`, because networks belong to the machine.
pub(crate) const SIMULATION_ROOT: &str = "/tmp";
/// The path of the executable under test.
pub(crate) const LAUNCH_EXECUTABLE: &str = env!("CARGO_BIN_EXE_launch");

/// A temporary directory of a test. If the test fails, dropping the value kills the processes whose
/// home directory is below this directory. They would otherwise take CPU time from other tests.
pub(crate) struct TestDirectory(TempDir);

impl Deref for TestDirectory {
    type Target = TempDir;

    fn deref(&self) -> &TempDir {
        &self.0
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        if thread::panicking() {
            kill_processes_at_home(self.path());
        }
    }
}

/// Kills all processes whose home directory is below `directory`.
fn kill_processes_at_home(directory: &Path) {
    let home = format!("HOME={}/", directory.display());
    let lives_below = |pid: &i32| has_variable(*pid, |variable| variable.starts_with(home.as_bytes()));
    // A process may start another one before it is killed.
    for _ in 0..10 {
        let found: Vec<i32> = list_processes().filter(lives_below).collect();
        if found.is_empty() {
            return;
        }
        found.into_iter().for_each(|pid| _ = kill(Pid::from_raw(pid), Signal::SIGKILL));
        thread::sleep(Duration::from_millis(10));
    }
}

/// Creates a temporary directory. Its path contains no symbolic link, because programs print their
/// working directory without symbolic links.
pub(crate) fn create_test_directory() -> TestDirectory {
    let root = env::temp_dir().canonicalize().expect("a directory for temporary files");
    TestDirectory(tempfile::tempdir_in(root).expect("a temporary directory"))
}

/// Creates a command with an empty stdin whose environment has only the variables that
/// [`is_inherited`] selects. The program must need neither a home directory nor a temporary one.
pub(crate) fn clean_command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(env::vars_os().filter(|(name, _)| is_inherited(name))).stdin(Stdio::null());
    command
}

/// Creates a command that runs in `directory` with an empty stdin. Its home directory, its
/// directories of the XDG specification and its temporary directory are below `directory`, and are
/// called `.home`, `.state` and `.tmp`. [`is_inherited`] selects the other variables.
pub(crate) fn isolated_command(program: impl AsRef<OsStr>, directory: &Path) -> Command {
    let mut command = clean_command(program);
    command.current_dir(directory).env("XDG_STATE_HOME", directory.join(".state"));
    for (name, path) in [("HOME", ".home"), ("TMPDIR", ".tmp")] {
        fs::create_dir_all(directory.join(path)).expect("a directory for the program");
        command.env(name, directory.join(path));
    }
    command
}

/// Creates the command `launch ARGS…`, isolated in `directory` ([`isolated_command`]).
pub(crate) fn launch_command(directory: &Path, args: &[&str]) -> Command {
    let mut command = isolated_command(LAUNCH_EXECUTABLE, directory);
    command.args(args);
    command
}

/// Returns whether programs that a test starts inherit the environment variable `name`. They
/// inherit the search path of programs, and the locale, on which no result may depend.
fn is_inherited(name: &OsStr) -> bool {
    name == "PATH" || name == "LANG" || name.as_encoded_bytes().starts_with(b"LC_")
}
