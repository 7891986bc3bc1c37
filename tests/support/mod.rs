//! Runs of the real executable in a directory of their own.
#![allow(dead_code)] // each test file uses a part of it

pub(crate) mod continued;
pub(crate) mod hosts;
pub(crate) mod scripts;
pub(crate) mod warm;

use serde_json::Value;
use std::{
    env,
    fmt::Write as _,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

/// A directory with a corpus and a job; everything a run writes stays in it.
pub(crate) struct Place {
    dir: tempfile::TempDir,
}

/// What a finished run said and left.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) events: Vec<Value>,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn of(output: &Output) -> Ran {
        let events = String::from_utf8_lossy(&output.stdout);
        let event = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        Ran {
            code: output.status.code().unwrap_or(-1),
            events: events.lines().map(event).collect(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub(crate) fn kind(&self, kind: &str) -> Vec<&Value> {
        self.events.iter().filter(|e| e["event"] == kind).collect()
    }

    /// (step, loss, gradient norm) of each step, floats as bits.
    pub(crate) fn losses(&self) -> Vec<(u64, u64, u64)> {
        let bits = |v: &Value| v.as_f64().expect("a number").to_bits();
        let steps = self.kind("step").into_iter();
        steps
            .map(|e| (e["step"].as_u64().expect("a step"), bits(&e["loss"]), bits(&e["grad_norm"])))
            .collect()
    }

    #[track_caller]
    pub(crate) fn succeeded(self) -> Ran {
        assert_eq!(self.code, 0, "exit code; it said:\n{}", self.stderr);
        self
    }

    /// The one root cause.
    pub(crate) fn cause(&self) -> String {
        let failures = self.kind("failure");
        assert_eq!(failures.len(), 1, "one root cause; it said:\n{}", self.stderr);
        failures[0]["cause"].as_str().expect("text").to_string()
    }
}

impl Place {
    /// `train` is the indented body of the job's `train:` section beside data and model; see [`TINY`].
    pub(crate) fn new() -> Place {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let place = Place { dir };
        fs::write(place.path("corpus.txt"), corpus()).expect("corpus");
        fs::write(place.path("job.yaml"), TINY).expect("job");
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn checkpoints(&self) -> PathBuf {
        self.path("runs/tiny/checkpoints")
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_launch"));
        c.current_dir(self.dir.path()).args(args).stdin(Stdio::null());
        // The user's own list of runs is none of a test's business.
        c.env("XDG_STATE_HOME", self.dir.path().join(".state"));
        c
    }

    /// `launch ARGS…`, waited for.
    pub(crate) fn launch(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("launch starts")
    }

    fn settings<'a>(&self, set: &[&'a str]) -> Vec<&'a str> {
        ["job.yaml", "--json"].into_iter().chain(set.iter().flat_map(|s| ["--set", s])).collect()
    }

    /// The job with these settings, waited for.
    pub(crate) fn run(&self, set: &[&str]) -> Ran {
        Ran::of(&self.launch(&self.settings(set)))
    }

    /// The job with these settings and an environment variable.
    pub(crate) fn run_with(&self, set: &[&str], name: &str, value: &str) -> Ran {
        Ran::of(&self.command(&self.settings(set)).env(name, value).output().expect("launch starts"))
    }

    /// The job with these settings, running.
    pub(crate) fn start(&self, set: &[&str]) -> Child {
        let mut c = self.command(&self.settings(set));
        c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("launch starts")
    }

    pub(crate) fn forget_checkpoints(&self) {
        _ = fs::remove_dir_all(self.checkpoints());
    }
}

/// Sizes that nothing divides.
pub(crate) const TINY: &str = "\
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

/// Some text that a tiny model can learn something of.
pub(crate) fn corpus() -> String {
    let mut text = String::new();
    for i in 0..400u32 {
        let animal = ["fox", "hen", "cat", "owl"][(i * i % 7 % 4) as usize];
        let place = ["barn", "field", "river"][(i % 3) as usize];
        writeln!(text, "Line {i}: the {animal} goes to the {place} and counts {}.", i * 37 % 101)
            .expect("to memory");
    }
    text
}

/// Files below a directory, relative, sorted.
pub(crate) fn files_below(dir: &Path) -> Vec<String> {
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

/// The Python that scripts/setup-tests made. Without one the test is skipped by name, or fails where LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn python(test: &str) -> Option<PathBuf> {
    python_of(test, "python", "transformers")
}

/// A Python with DeepSpeed, as [`python`].
#[allow(dead_code)] // only some test files need it
pub(crate) fn deepspeed(test: &str) -> Option<PathBuf> {
    python_of(test, "deepspeed", "DeepSpeed")
}

/// A Python with the oldest torch whose programs are run, as [`python`]; only `scripts/setup-tests --all` makes it.
#[allow(dead_code)] // only some test files need it
pub(crate) fn old_torch(test: &str) -> Option<PathBuf> {
    python_of(test, "old-torch", "an old torch (setup-tests --all)")
}

fn python_of(test: &str, name: &str, with: &str) -> Option<PathBuf> {
    let cache = env::var_os("LAUNCH_TEST_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache/launch-tests")));
    let python = cache.map(|cache| cache.join(name).join("bin/python")).filter(|python| python.exists());
    if python.is_none() {
        skip(test, &format!("no Python with {with}; scripts/setup-tests makes one"));
    }
    python
}

/// Tells that a test can't run here; a failure where LAUNCH_TEST_REQUIRE is `all`.
pub(crate) fn skip(test: &str, why: &str) {
    let why = format!("{test}: {why}");
    assert!(env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{why}");
    eprintln!("SKIPPED {why}");
    if let Some(list) = env::var_os("LAUNCH_TEST_SKIPS") {
        let mut list = fs::OpenOptions::new().append(true).create(true).open(list).expect("list of skips");
        writeln!(list, "{why}").expect("list of skips");
    }
}
