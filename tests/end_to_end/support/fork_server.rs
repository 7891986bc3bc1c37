//! Runs scripts in processes forked from a Python that has imported their modules
//! (scripts/oracle/fork_server.py).
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]
use super::environment::{TestDirectory, create_test_directory, isolated_command};
use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The Python modules that scripts with HF Trainer, Accelerate and DeepSpeed import.
/// DeepSpeed imports the last two when it creates an engine.
pub(crate) const TRAINER_MODULES: [&str; 7] = [
    "torch._dynamo",
    "deepspeed.comm.torch",
    "transformers.trainer",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "functorch.compile",
    "torch._inductor.compile_fx",
];

/// A Python process that runs each script in a forked child. Dropping the value ends the process.
pub(crate) struct ForkServer {
    server: Child,
    python: PathBuf,
    socket: PathBuf,
    directory: TestDirectory,
}

impl ForkServer {
    /// Starts a Python process that imports `modules` and then waits for scripts to run. Panics if
    /// Python cannot import them.
    pub(crate) fn start(python: &Path, modules: &[&str]) -> ForkServer {
        let directory = create_test_directory();
        let socket = directory.path().join("socket");
        let mut command = isolated_command(python, directory.path());
        command.arg(server_script()).arg("serve").arg(&socket).args(modules);
        command.envs([("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("DS_ACCELERATOR", "cpu")]);
        command.env("TRANSFORMERS_VERBOSITY", "warning");
        // Otherwise, torch._inductor starts a process for each core.
        command.env("TORCHINDUCTOR_COMPILE_THREADS", "1");
        let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "Python cannot import {modules:?}");
        ForkServer { server, python: python.to_owned(), socket, directory }
    }

    /// Returns a command line that runs a script in this server. It takes the place of `python`.
    pub(crate) fn client_command(&self) -> [String; 6] {
        let [python, script, socket] =
            [&self.python, Path::new(server_script()), &self.socket].map(|p| p.to_str().unwrap().to_owned());
        // the client imports as little as possible
        [python, "-I".into(), "-S".into(), script, "run".into(), socket]
    }

    /// Creates a command that runs a script in the server, with an empty stdin.
    pub(crate) fn script_command(&self, script: &str) -> Command {
        let [python, rest @ ..] = self.client_command();
        let mut command = isolated_command(python, self.directory.path());
        command.args(rest).arg(script);
        command
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        // the server ends when its stdin is closed
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}

/// Returns the path of scripts/oracle/fork_server.py.
fn server_script() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/fork_server.py")
}
