//! Runs the real executable in temporary directories, and compares its messages with snapshots.

pub(crate) mod environment;
pub(crate) mod fork_server;
pub(crate) mod live_run;
pub(crate) mod openmetrics;
pub(crate) mod poll_pauses;
pub(crate) mod process_list;
pub(crate) mod resumed_job;
pub(crate) mod served_page;
pub(crate) mod simulated_hosts;
pub(crate) mod slowed_worker;
pub(crate) mod tmux_terminal;
pub(crate) mod token_cache_locks;
pub(crate) mod trainer_script;

use environment::{TestDirectory, create_test_directory, launch_command};
use serde_json::Value;
use std::{
    env,
    fmt::Write as _,
    fs,
    io::Write as _,
    panic::Location,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

/// A temporary directory with a corpus and a job file. Runs write only into it.
pub(crate) struct JobDirectory {
    dir: TestDirectory,
}

/// The exit code, events and stderr of a run that has ended.
pub(crate) struct FinishedRun {
    pub(crate) code: i32,
    pub(crate) events: Vec<Value>,
    pub(crate) stderr: String,
}

impl FinishedRun {
    /// Parses each line of stdout as an event.
    pub(crate) fn from_output(output: &Output) -> FinishedRun {
        let events = String::from_utf8_lossy(&output.stdout);
        let event = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        FinishedRun {
            code: output.status.code().unwrap_or(-1),
            events: events.lines().map(event).collect(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Returns the events with this name.
    pub(crate) fn events_named(&self, name: &str) -> Vec<&Value> {
        self.events.iter().filter(|e| e["event"] == name).collect()
    }

    /// Returns the number, loss and gradient norm of each step. Floats are returned as their bits.
    pub(crate) fn collect_losses(&self) -> Vec<(u64, u64, u64)> {
        let bits = |v: &Value| v.as_f64().expect("a number").to_bits();
        let steps = self.events_named("step").into_iter();
        steps
            .map(|e| (e["step"].as_u64().expect("a step"), bits(&e["loss"]), bits(&e["grad_norm"])))
            .collect()
    }

    /// Asserts that the run succeeded, and returns the run. Panics if the exit code is not 0.
    #[track_caller]
    pub(crate) fn expect_success(self) -> FinishedRun {
        assert_eq!(self.code, 0, "exit code; stderr:\n{}", self.stderr);
        self
    }

    /// Asserts that the run failed, and returns the only `failure` event. Panics if there is not
    /// exactly one.
    #[track_caller]
    pub(crate) fn expect_failure(&self) -> &Value {
        let failures = self.events_named("failure");
        assert_eq!(failures.len(), 1, "one failure event; stderr:\n{}", self.stderr);
        failures[0]
    }

    /// Returns the diagnostic code in the run's only `failure` event.
    #[track_caller]
    pub(crate) fn failure_code(&self) -> &str {
        self.expect_failure()["code"].as_str().expect("a code")
    }

    /// Returns the message in the run's only `failure` event.
    #[track_caller]
    pub(crate) fn failure_message(&self) -> &str {
        self.expect_failure()["message"].as_str().expect("text")
    }

    /// Returns the kind of the reason in the run's only `failure` event.
    #[track_caller]
    pub(crate) fn failure_reason_kind(&self) -> &str {
        self.expect_failure()["reason"]["kind"].as_str().expect("a kind")
    }

    /// Returns the diagnostics in the run's only `failure` event. A summary is replaced by the
    /// diagnostics that it summarizes.
    #[track_caller]
    pub(crate) fn failure_diagnostics(&self) -> Vec<&Value> {
        let diagnostics = self.expect_failure()["diagnostics"].as_array().expect("diagnostics");
        diagnostics.iter().flat_map(expand_details).collect()
    }

    /// Returns the messages of the run's `notice` events.
    pub(crate) fn notice_messages(&self) -> Vec<String> {
        let message = |e: &Value| e["message"].as_str().expect("text").to_owned();
        self.events_named("notice").into_iter().map(message).collect()
    }
}

/// Returns the details of a diagnostic that `--json` printed, or the diagnostic if it has no
/// details.
pub(crate) fn expand_details(diagnostic: &Value) -> Vec<&Value> {
    match diagnostic["details"].as_array() {
        Some(details) => details.iter().collect(),
        None => vec![diagnostic],
    }
}

/// Returns stdout and then stderr of a process.
pub(crate) fn output_to_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

impl JobDirectory {
    /// Creates a directory with the job [`TINY_JOB`] and its corpus.
    pub(crate) fn new() -> JobDirectory {
        let dir = create_test_directory();
        let job_dir = JobDirectory { dir };
        fs::write(job_dir.path("corpus.txt"), generate_corpus()).expect("corpus");
        fs::write(job_dir.path("job.yaml"), TINY_JOB).expect("job");
        job_dir
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the directory in which the job saves its checkpoints.
    pub(crate) fn checkpoint_dir(&self) -> PathBuf {
        self.path("runs/tiny/checkpoints")
    }

    /// Returns the command `launch ARGS…`, isolated in this directory.
    pub(crate) fn launch_command(&self, args: &[&str]) -> Command {
        launch_command(self.dir.path(), args)
    }

    /// Runs `launch ARGS…` and waits for its end.
    pub(crate) fn run_launch(&self, args: &[&str]) -> Output {
        self.launch_command(args).output().expect("launch starts")
    }

    /// Runs `launch --json ARGS…` and returns the exit code and the diagnostic. Panics if the
    /// command succeeds.
    #[track_caller]
    pub(crate) fn expect_rejection(&self, args: &[&str]) -> (i32, Value) {
        parse_rejection(&self.run_launch(&[&["--json"], args].concat()))
    }

    /// Returns the arguments that run the job with these settings and `--json`.
    fn build_run_arguments<'a>(&self, set: &[&'a str]) -> Vec<&'a str> {
        ["job.yaml", "--json"].into_iter().chain(set.iter().flat_map(|s| ["--set", s])).collect()
    }

    /// Runs the job with these settings and waits for its end.
    pub(crate) fn run(&self, set: &[&str]) -> FinishedRun {
        FinishedRun::from_output(&self.run_launch(&self.build_run_arguments(set)))
    }

    /// Runs the job with these settings and one environment variable, and waits for its end.
    pub(crate) fn run_with_env(&self, set: &[&str], name: &str, value: &str) -> FinishedRun {
        FinishedRun::from_output(
            &self
                .launch_command(&self.build_run_arguments(set))
                .env(name, value)
                .output()
                .expect("launch starts"),
        )
    }

    /// Starts the job with these settings and pipes for stdout and stderr, and does not wait.
    pub(crate) fn start(&self, set: &[&str]) -> Child {
        let mut c = self.launch_command(&self.build_run_arguments(set));
        c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("launch starts")
    }

    /// Compares messages with the snapshot `name`. The directory and everything that
    /// [`assert_snapshot`] lists are replaced by placeholders.
    #[track_caller]
    pub(crate) fn assert_snapshot(&self, name: &str, messages: &str) {
        assert_snapshot(self.dir.path(), name, messages, &[]);
    }

    /// Deletes the job's checkpoint directory.
    pub(crate) fn delete_checkpoints(&self) {
        _ = fs::remove_dir_all(self.checkpoint_dir());
    }
}

/// Returns the exit code of a command that failed with `--json`, and the diagnostic that it
/// printed. Panics if the command succeeded or did not print exactly one diagnostic.
#[track_caller]
pub(crate) fn parse_rejection(output: &Output) -> (i32, Value) {
    let text = output_to_text(output);
    let code = output.status.code().unwrap_or_else(|| panic!("killed: {text}"));
    assert_ne!(code, 0, "succeeded: {text}");
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let objects = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut errors: Vec<Value> = objects.filter(|object| object["event"] == "error").collect();
    assert_eq!(errors.len(), 1, "one error: {text}");
    (code, errors.remove(0))
}

/// Compares messages with the snapshot `name` of the calling module (tests/end_to_end/snapshots).
/// Replaces by placeholders:
/// `directory`, the repository, run names, the host name, pids, CPU features, times, all but the
/// first directory of a library search, and the matches of `filters` (regular expression,
/// placeholder).
#[track_caller]
pub(crate) fn assert_snapshot(directory: &Path, name: &str, messages: &str, filters: &[(&str, &str)]) {
    let directory = regex::escape(directory.display().to_string().trim_end_matches('/'));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
    let host = format!(r"\b{}\b", regex::escape(host.trim()));
    let mut all_filters = filters.to_vec();
    all_filters.extend([
        (directory.as_str(), "[DIR]"),
        (env!("CARGO_MANIFEST_DIR"), "[REPOSITORY]"),
        (r"\d{8}-\d{6}-[0-9a-f]{4}", "[RUN]"),
        (host.as_str(), "[HOST]"),
        (r"searched: ([^,;\n]+), [^;\n]*", "searched: $1, […]"),
        (r"\bpid \d+, \w+, \d+ threads?", "pid [PID], [CPU FEATURES], [N] threads"),
        (r"\bpid \d+", "pid [PID]"),
        (r"\b\d+(\.\d+)? (s|ms)\b", "[TIME]"),
        (r"\bdone in \d+(:\d\d)+", "done in [TIME]"),
    ]);
    let snapshots = format!("../snapshots/{}", find_test_module());
    insta::with_settings!({
        filters => all_filters,
        snapshot_path => snapshots,
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, {
        insta::assert_snapshot!(name, messages);
    });
}

/// Returns the name of the end-to-end test module that contains the code from which this function
/// was called indirectly.
#[track_caller]
fn find_test_module() -> &'static str {
    let file = Location::caller().file();
    let module = file.rsplit_once("end_to_end/").map_or(file, |(_, path)| path);
    module.split(['/', '.']).next().unwrap_or(module)
}

/// A job whose tensor sizes are not divisible by common world sizes.
pub(crate) const TINY_JOB: &str = "\
name: tiny
cluster: {workers_per_host: 2}
train:
  model: {family: llama, hidden_size: 42, intermediate_size: 57, num_hidden_layers: 2, num_attention_heads: 3, num_key_value_heads: 1}
  data: {files: [corpus.txt], seq_len: 24}
  zero: {stage: 3}
  batch: {global: 8, micro: 1}
  optimizer: {lr: 3e-3}
  schedule: {warmup_steps: 2}
  clip_norm: 1.0
  steps: 20
  seed: 11
checkpoint: {every: 10, keep: 2}
";

/// Generates a text with patterns that a tiny model can learn.
pub(crate) fn generate_corpus() -> String {
    let mut text = String::new();
    for i in 0..400u32 {
        let animal = ["fox", "hen", "cat", "owl"][(i * i % 7 % 4) as usize];
        let location = ["barn", "field", "river"][(i % 3) as usize];
        writeln!(text, "Line {i}: the {animal} goes to the {location} and counts {}.", i * 37 % 101)
            .expect("to memory");
    }
    text
}

/// Lists the files below a directory by their relative paths, sorted.
pub(crate) fn list_files_below(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_path_buf()];
    while let Some(d) = todo.pop() {
        for entry in fs::read_dir(&d).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                todo.push(path);
            } else {
                found.push(path.strip_prefix(dir).expect("below").display().to_string());
            }
        }
    }
    found.sort();
    found
}

/// Returns the Python that scripts/setup-tests installed. Without it, returns `None` to skip the
/// test, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_python_or_skip(test: &str) -> Option<PathBuf> {
    find_environment_or_skip(test, "python", "transformers")
}

/// Returns the Python with a validator of JSON Schemas. Without it, returns `None` to skip the
/// test, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_schema_python_or_skip(test: &str) -> Option<PathBuf> {
    find_environment_or_skip(test, "schema", "jsonschema")
}

/// Returns the Python with the schemas of Kubernetes and JobSet. Without it, returns `None` to skip
/// the test, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_kubernetes_python_or_skip(test: &str) -> Option<PathBuf> {
    find_environment_or_skip(test, "kubernetes", "kubernetes-validate")
}

/// Returns the Python with Prometheus's client, which parses metrics. Without it, returns `None` to
/// skip the check, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_prometheus_python_or_skip(test: &str) -> Option<PathBuf> {
    find_environment_or_skip(test, "prometheus", "prometheus-client")
}

/// Returns `promtool` of Prometheus, which checks metrics. Without it, returns `None` to skip the
/// check, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_promtool_or_skip(test: &str) -> Option<PathBuf> {
    let program = find_in_cache("promtool/bin/promtool");
    if program.is_none() {
        report_skip(test, "no promtool; run scripts/setup-tests --all");
    }
    program
}

/// Returns the program `py-spy`, a profiler of Python programs. Without it, returns `None` to skip
/// the test, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_py_spy_or_skip(test: &str) -> Option<PathBuf> {
    let program = find_in_cache("py-spy/bin/py-spy");
    if program.is_none() {
        report_skip(test, "no py-spy; run scripts/setup-tests");
    }
    program
}

/// Returns the Python with DeepSpeed. Without it, returns `None` to skip the test, or panics if
/// LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_deepspeed_python_or_skip(test: &str) -> Option<PathBuf> {
    find_environment_or_skip(test, "deepspeed", "DeepSpeed")
}

/// Returns the Python with the oldest supported torch, which `scripts/setup-tests --all` installs.
/// Without it, returns `None` to skip the test, or panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn find_old_torch_python_or_skip(test: &str) -> Option<PathBuf> {
    find_environment_or_skip(test, "old-torch", "an old torch (setup-tests --all)")
}

/// Returns the Python of the environment `name`, which `scripts/setup-tests --NAME` installs.
/// Without it, returns `None`, and lists the test as skipped. Not even continuous integration
/// installs these environments, because they are large. `with` describes what the environment
/// contains.
pub(crate) fn find_optional_python(test: &str, name: &str, with: &str) -> Option<PathBuf> {
    let python = find_environment(name);
    if python.is_none() {
        list_skip(test, &format!("no Python with {with}; run scripts/setup-tests --{name}"));
    }
    python
}

/// Returns the Python of the environment `name` in the test cache; `None` if it is not installed.
fn find_environment(name: &str) -> Option<PathBuf> {
    find_in_cache(&format!("{name}/bin/python"))
}

/// Returns the file `path` of the test cache; `None` if it does not exist.
fn find_in_cache(path: &str) -> Option<PathBuf> {
    let cache = env::var_os("LAUNCH_TEST_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache/launch-tests")));
    cache.map(|cache| cache.join(path)).filter(|file| file.exists())
}

/// Returns the Python of the environment `name` in the test cache. Without it, returns `None` to
/// skip the test, or panics if LAUNCH_TEST_REQUIRE is `all`. `with` describes what the environment
/// contains.
fn find_environment_or_skip(test: &str, name: &str, with: &str) -> Option<PathBuf> {
    let python = find_environment(name);
    if python.is_none() {
        report_skip(test, &format!("no Python with {with}; run scripts/setup-tests"));
    }
    python
}

/// Reports on stderr, and in the file that LAUNCH_TEST_SKIPS names, that a test cannot run on this
/// machine. Panics if LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn report_skip(test: &str, why: &str) {
    assert!(env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{test}: {why}");
    list_skip(test, why);
}

/// Reports on stderr, and in the file that LAUNCH_TEST_SKIPS names, that a test is skipped.
fn list_skip(test: &str, why: &str) {
    let why = format!("{test}: {why}");
    eprintln!("SKIPPED {why}");
    if let Some(list) = env::var_os("LAUNCH_TEST_SKIPS") {
        let mut list = fs::OpenOptions::new().append(true).create(true).open(list).expect("list of skips");
        writeln!(list, "{why}").expect("list of skips");
    }
}
