//! Scripts in processes forked from one Python that has imported what they need (scripts/oracle/warm.py).
#![allow(clippy::unwrap_used)] // a test that panics has failed
use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// What the scripts with HF Trainer, Accelerate and DeepSpeed import.
pub(crate) const TRAINERS: [&str; 5] = [
    "torch._dynamo",
    "deepspeed.comm.torch",
    "transformers.trainer",
    "accelerate",
    "transformers.models.llama.modeling_llama",
];

/// A Python that waits for scripts; it ends with this.
pub(crate) struct Warm {
    server: Child,
    python: PathBuf,
    socket: PathBuf,
    _place: tempfile::TempDir,
}

impl Warm {
    pub(crate) fn start(python: &Path, modules: &[&str]) -> Warm {
        let place = tempfile::tempdir().unwrap();
        let socket = place.path().join("socket");
        let mut command = Command::new(python);
        command.arg(script()).arg("serve").arg(&socket).args(modules);
        command.envs([("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("DS_ACCELERATOR", "cpu")]);
        command.env("TRANSFORMERS_VERBOSITY", "warning");
        let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "ready\n", "the Python with {modules:?} doesn't start");
        Warm { server, python: python.to_owned(), socket, _place: place }
    }

    /// What runs a script in it, in place of `python`.
    pub(crate) fn python(&self) -> [String; 6] {
        let [python, script, socket] =
            [&self.python, Path::new(script()), &self.socket].map(|p| p.to_str().unwrap().to_owned());
        // nothing is imported but what the few lines need
        [python, "-I".into(), "-S".into(), script, "run".into(), socket]
    }

    /// A command that runs a script in it.
    pub(crate) fn command(&self, script: &str) -> Command {
        let [python, rest @ ..] = self.python();
        let mut command = Command::new(python);
        command.args(rest).arg(script).stdin(Stdio::null());
        command
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        // the end of its stdin is its own
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}

fn script() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/warm.py")
}
