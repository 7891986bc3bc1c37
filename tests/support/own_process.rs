//! Runs tests that change their process, such as its environment, in separate processes.
use std::{
    env,
    ffi::OsStr,
    process::{Command, Output},
};

/// The environment variable that names the test that a child process runs.
const ONLY_TEST: &str = "LAUNCH_TEST_ONLY_TEST";

/// Ensures that the test `name` runs alone in a process, and returns whether this process is that
/// process. Otherwise runs the test in a child process and returns `false`, and the caller must
/// return. Panics if the test fails in the child process.
///
/// `name` is the path of the test in its binary, such as `cuda_graphs::graphs_replace_calls`. A
/// process of cargo-nextest runs one test. A process of `cargo test` runs all tests of a binary.
#[allow(dead_code, reason = "the tests of the crate `ckpt` do not use it")]
pub(crate) fn is_own_process(name: &str) -> bool {
    let is_nextest = env::var("NEXTEST_EXECUTION_MODE").is_ok_and(|mode| mode == "process-per-test");
    if is_nextest || env::var(ONLY_TEST).is_ok_and(|only| only == name) {
        return true;
    }
    let output = run_test_alone(name, ONLY_TEST, name);
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{name}: {}", texts.concat());
    false
}

/// Runs the test `name` of this binary in a child process that has the environment variable
/// `variable`, and returns the output. Panics if there is no such test.
pub(crate) fn run_test_alone(name: &str, variable: &str, value: impl AsRef<OsStr>) -> Output {
    let mut command = Command::new(env::current_exe().expect("the path of this executable"));
    let output = command.args([name, "--exact", "--nocapture"]).env(variable, value).output();
    let output = output.expect("the test starts");
    let ran = String::from_utf8_lossy(&output.stdout).contains("running 1 test");
    assert!(ran, "this binary has no test `{name}`");
    output
}
