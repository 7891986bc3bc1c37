//! Tests `run.terminal` and `launch run --pdb`: one rank uses the terminal. `script` (util-linux)
//! provides the terminal.
use crate::support::{
    JobDirectory,
    environment::{LAUNCH_EXECUTABLE, isolated_command},
    output_to_text,
    simulated_hosts::SimulatedHosts,
};
use std::{
    fs,
    io::{Read, Write},
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

/// The longest wait for a text on the terminal.
const WAIT_LIMIT: Duration = Duration::from_secs(90);

/// A shell command that runs in a terminal.
struct TerminalSession {
    child: Child,
    input: ChildStdin,
    chunks: Receiver<Vec<u8>>,
    /// The text on the terminal so far.
    text: String,
}

impl TerminalSession {
    /// Runs the shell command `command` in a new terminal.
    fn start(job_dir: &JobDirectory, command: &str) -> TerminalSession {
        let mut script = isolated_command("script", &job_dir.path(""));
        script.args(["-qec", command, "/dev/null"]).env("SHELL", "/bin/sh").env("TERM", "dumb");
        let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script");
        let (input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, chunks) = channel();
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut chunk) {
                if sender.send(chunk[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        TerminalSession { child, input, chunks, text: String::new() }
    }

    /// Waits until the terminal shows `text` after the text that was found before. Returns what it
    /// showed in between, with `text`.
    fn expect(&mut self, text: &str) -> String {
        self.expect_within(text, WAIT_LIMIT).unwrap_or_else(|| panic!("no {text:?} in {:?}", self.text))
    }

    /// Like [`TerminalSession::expect`], but returns `None` if the text is not there within `limit`
    /// or the command has ended.
    fn expect_within(&mut self, text: &str, limit: Duration) -> Option<String> {
        let began = Instant::now();
        loop {
            if let Some(position) = self.text.find(text) {
                return Some(self.text.drain(..position + text.len()).collect());
            }
            match self.chunks.recv_timeout(Duration::from_millis(100)) {
                Ok(chunk) => self.text.push_str(&String::from_utf8_lossy(&chunk)),
                Err(RecvTimeoutError::Timeout) if began.elapsed() < limit => {}
                Err(_) => return None,
            }
        }
    }

    /// Types the keys `keys` in the terminal.
    fn type_keys(&mut self, keys: &str) {
        self.input.write_all(keys.as_bytes()).unwrap();
        self.input.flush().unwrap();
    }

    /// Types Ctrl-C until Python shows that it was interrupted. One Ctrl-C is not always enough:
    /// Python's `input()` with readline waits in `select`, and a signal that arrives between the
    /// prompt and `select` has no effect until the next key.
    fn interrupt_python(&mut self) {
        for _ in 0..WAIT_LIMIT.as_secs() / 5 {
            self.type_keys("\u{3}");
            if self.expect_within("KeyboardInterrupt", Duration::from_secs(5)).is_some() {
                return;
            }
        }
        panic!("Ctrl-C had no effect; the terminal shows {:?}", self.text);
    }

    /// Waits for the end of the command, and returns the exit code and the remaining text.
    fn wait_for_end(mut self) -> (Option<i32>, String) {
        while let Ok(chunk) = self.chunks.recv_timeout(WAIT_LIMIT) {
            self.text.push_str(&String::from_utf8_lossy(&chunk));
        }
        (self.child.wait().unwrap().code(), std::mem::take(&mut self.text))
    }
}

impl Drop for TerminalSession {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The program of the workers. Rank 0 stops at a breakpoint.
const PROGRAM: &str = r#"
import os, sys, time
rank = os.environ["RANK"]
x = 41
if rank == "0":
    assert sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
    while not os.path.exists("printed"):
        time.sleep(0.05)
    breakpoint()
    open("resumed", "w").write(str(x))
else:
    print("output of another rank", flush=True)
    open("printed", "w").close()
    while not os.path.exists("resumed"):
        time.sleep(0.05)
"#;

/// Creates a job directory with the program `program.py`.
fn create_directory() -> JobDirectory {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("program.py"), PROGRAM).unwrap();
    job_dir
}

#[test]
fn rank_0_stops_at_a_breakpoint_in_the_terminal() {
    let job_dir = create_directory();
    // The shell reads from the terminal afterwards, so it must be in the foreground again.
    let command = format!(
        "stty -g > before; {LAUNCH_EXECUTABLE} run --pdb --workers 2 -- python3 program.py; echo exit code $?; \
         stty -g > after; read line; echo got $line"
    );
    let mut terminal = TerminalSession::start(&job_dir, &command);
    let shown = terminal.expect("(Pdb)");
    assert!(!shown.contains("output of another rank"), "{shown}");
    terminal.type_keys("p x + 1\n");
    terminal.expect("42");
    terminal.expect("(Pdb)");
    // Ctrl-C interrupts only the debugger. The terminal drops keys that were typed before.
    terminal.interrupt_python();
    terminal.expect("(Pdb)");
    terminal.type_keys("x = 7\n");
    terminal.expect("(Pdb)");
    terminal.type_keys("c\n");
    terminal.expect("exit code 0");
    terminal.type_keys("a line\n");
    terminal.expect("got a line");
    let (code, _) = terminal.wait_for_end();
    assert_eq!((code, fs::read_to_string(job_dir.path("resumed")).unwrap()), (Some(0), "7".to_owned()));
    let settings = ["before", "after"].map(|name| fs::read_to_string(job_dir.path(name)).unwrap());
    assert_eq!(settings[0], settings[1], "the settings of the terminal");
    let log = job_dir.run_launch(&["logs", "--rank", "1"]);
    assert!(output_to_text(&log).contains("output of another rank"), "{}", output_to_text(&log));
}

#[test]
fn a_terminal_that_is_not_available_is_an_error() {
    let job_dir = create_directory();
    let run = |args: &[&str]| {
        let args = [&["--json", "run"], args, &["--", "python3", "program.py"]].concat();
        let output = job_dir.run_launch(&args);
        assert!(!output.status.success(), "{}", output_to_text(&output));
        output_to_text(&output)
    };
    assert!(run(&["--pdb"]).contains("terminal-missing"));
    assert!(run(&["--set", "run.terminal=3"]).contains("terminal-rank-unknown"));
    assert!(run(&["--set", "run.terminal=0", "--detach"]).contains("terminal-missing"));
    let train = JobDirectory::new();
    let (code, error) = train.expect_rejection(&["plan", "job.yaml", "--set", "run.terminal=0"]);
    assert_eq!(code, 2);
    assert!(error.to_string().contains("`run.terminal` has no effect"), "{error}");
}

#[test]
fn a_rank_on_another_host_cannot_have_the_terminal() {
    const TEST: &str = "worker_environment::terminal::a_rank_on_another_host_cannot_have_the_terminal";
    let Some(hosts) = SimulatedHosts::start(TEST, 1) else { return };
    let job_dir = create_directory();
    let config = hosts.ssh_config_path();
    let text = format!(
        "cluster: {{hosts: [h0], ssh: {{config: {}}}}}\nrun: {{command: [python3, program.py], terminal: 0}}\n",
        config.display()
    );
    fs::write(job_dir.path("job.yaml"), text).unwrap();
    let mut terminal = TerminalSession::start(&job_dir, &format!("{LAUNCH_EXECUTABLE} job.yaml"));
    terminal.expect("error[terminal-rank-remote]");
    assert_ne!(terminal.wait_for_end().0, Some(0));
}
