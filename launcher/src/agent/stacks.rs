//! Writes the stacks of hanging workers to their logs: the state and kernel stack of every thread,
//! and Python stacks if py-spy is installed.
use super::{activity, process};
use protocol::hang::StackFrame;
use serde::Deserialize;
use std::{
    fmt::Write as _,
    fs::{self, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// The time limit of one run of py-spy, which dumps the Python stacks of one process.
const PY_SPY_TIMEOUT: Duration = Duration::from_secs(2);
/// The time limit of all runs of py-spy for one worker. The workers of the host are examined at the
/// same time.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(6);
/// The limit on how many processes of a worker, how many threads of each process and how many
/// frames of each stack are written to the worker's log. The others are left out.
const MAX_WRITTEN_ITEMS: usize = 64;
/// The size, in bytes, to which the content of one file in `/proc` about a hanging worker's thread
/// is truncated.
const MAX_TEXT_BYTES: usize = 64 << 10;
/// The size, in bytes, of a dump of py-spy above which the dump is ignored.
const MAX_PY_SPY_BYTES: usize = 1 << 20;
/// The length, in bytes, to which a name or a path in a dump of py-spy is truncated.
const MAX_NAME_BYTES: usize = 400;

/// A worker whose stacks are to be written, and the log to which the stacks are appended.
#[derive(Clone, Debug)]
pub(super) struct StackTarget {
    pub(super) pid: u32,
    pub(super) log: PathBuf,
}

/// The id, the name and the stack frames of one thread in the JSON output of `py-spy dump`.
#[derive(Deserialize)]
struct PySpyThread {
    #[serde(default)]
    os_thread_id: Option<i64>,
    #[serde(default)]
    thread_name: Option<String>,
    /// The innermost frame is the first one.
    frames: Vec<PySpyFrame>,
}

/// The function, file and line of one stack frame in the JSON output of `py-spy dump`.
#[derive(Deserialize)]
struct PySpyFrame {
    name: String,
    filename: String,
    line: i64,
}

/// Appends the stacks of the threads of each hanging worker to the worker's log. Omits parts that
/// cannot be read or written. Blocks for little more than [`TOTAL_TIMEOUT`] at most.
///
/// Returns, for each worker, the Python stack of the main thread of its first process with Python,
/// innermost frame first. The stack is empty without py-spy.
pub(super) fn write_stacks(workers: &[StackTarget]) -> Vec<Vec<StackFrame>> {
    // Reading /proc is fast, so the kernel's information about all workers is written first.
    for worker in workers {
        let text: String = activity::list_process_tree(worker.pid)
            .into_iter()
            .take(MAX_WRITTEN_ITEMS)
            .map(describe_threads)
            .collect();
        append_to_log(&worker.log, &format!("launch: no progress; the stacks of the processes:\n{text}"));
    }
    let deadline = Instant::now() + TOTAL_TIMEOUT;
    thread::scope(|scope| {
        let start = |worker| {
            // Without a thread, the Python stacks are left out.
            thread::Builder::new().spawn_scoped(scope, move || write_python_stacks(worker, deadline)).ok()
        };
        let threads: Vec<_> = workers.iter().map(start).collect();
        let join = |thread: Option<thread::ScopedJoinHandle<'_, _>>| thread?.join().ok();
        threads.into_iter().map(|thread| join(thread).unwrap_or_default()).collect()
    })
}

/// Appends the Python stacks of the processes of a worker to the worker's log, if py-spy is
/// installed. Returns the stack of the main thread of the first process with Python.
fn write_python_stacks(worker: &StackTarget, deadline: Instant) -> Vec<StackFrame> {
    let mut main_stack = Vec::new();
    for pid in activity::list_process_tree(worker.pid).into_iter().take(MAX_WRITTEN_ITEMS) {
        let remaining = deadline.saturating_duration_since(Instant::now()).min(PY_SPY_TIMEOUT);
        if remaining.is_zero() {
            break;
        }
        let Some(dump) = process::run_py_spy_dump(pid, remaining, MAX_PY_SPY_BYTES) else {
            break; // py-spy is not installed
        };
        // The dump of a process without Python is empty.
        let threads: Vec<PySpyThread> = serde_json::from_str(&dump).unwrap_or_default();
        if threads.is_empty() {
            continue;
        }
        append_to_log(&worker.log, &format_python_stacks(pid, &threads));
        let main = threads.iter().find(|thread| thread.os_thread_id == Some(pid.into()));
        if let Some(main) = main.filter(|_| main_stack.is_empty()) {
            main_stack = main.frames.iter().take(MAX_WRITTEN_ITEMS).map(PySpyFrame::to_stack_frame).collect();
        }
    }
    main_stack
}

/// Formats the stacks in a dump of py-spy as text.
fn format_python_stacks(pid: i32, threads: &[PySpyThread]) -> String {
    let mut text = format!("Python stacks of process {pid}:\n");
    for thread in threads.iter().take(MAX_WRITTEN_ITEMS) {
        let (id, name) = (thread.os_thread_id.unwrap_or(0), thread.thread_name.as_deref().unwrap_or("?"));
        // Writing to a String cannot fail.
        _ = writeln!(text, "  thread {id} ({})", truncate_name(name));
        for frame in thread.frames.iter().take(MAX_WRITTEN_ITEMS) {
            _ = writeln!(text, "    {}", frame.to_stack_frame());
        }
    }
    text
}

/// Truncates a name of a dump of py-spy to [`MAX_NAME_BYTES`], and replaces control characters.
fn truncate_name(text: &str) -> String {
    let text = &text[..text.floor_char_boundary(MAX_NAME_BYTES)];
    text.replace(char::is_control, "?")
}

impl PySpyFrame {
    fn to_stack_frame(&self) -> StackFrame {
        StackFrame {
            file: truncate_name(&self.filename),
            line: u32::try_from(self.line).unwrap_or(0),
            function: truncate_name(&self.name),
        }
    }
}

/// Returns a text with the state, system call, kernel stack and kernel wait function of every
/// thread of the process with this pid.
fn describe_threads(pid: i32) -> String {
    let root = PathBuf::from(format!("/proc/{pid}"));
    let command = read_truncated(&root.join("cmdline")).replace('\0', " ");
    let mut text = format!("  process {pid}: {}\n", command.trim());
    let threads = fs::read_dir(root.join("task")).into_iter().flatten().flatten().take(MAX_WRITTEN_ITEMS);
    for thread in threads {
        let status = read_truncated(&thread.path().join("status"));
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name));
            line.unwrap_or("?").trim().to_owned()
        };
        let channel = read_truncated(&thread.path().join("wchan"));
        let call = read_truncated(&thread.path().join("syscall"));
        let call = call.split_whitespace().next().unwrap_or("?").to_owned();
        // Writing to a String cannot fail.
        _ = writeln!(
            text,
            "    thread {} ({}): state {}, waits in {}, system call {call}",
            thread.file_name().to_string_lossy(),
            field("Name:"),
            field("State:"),
            if channel.is_empty() || channel == "0" { "-" } else { &channel },
        );
        for frame in read_truncated(&thread.path().join("stack")).lines().take(MAX_WRITTEN_ITEMS) {
            _ = writeln!(text, "      {frame}");
        }
    }
    text
}

/// Reads a file, such as one of a thread in `/proc`, and truncates the text to [`MAX_TEXT_BYTES`].
/// Returns an empty text if the file cannot be read.
fn read_truncated(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_TEXT_BYTES)]).trim_end().to_owned()
}

/// Appends a text and a line end to the existing log of a rank with one write. Ignores errors.
fn append_to_log(log: &Path, text: &str) {
    // The output pump appends to the log, too. A single write keeps lines whole.
    let file = OpenOptions::new().append(true).open(log);
    _ = file.and_then(|mut file| file.write_all(format!("{}\n", text.trim_end()).as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_of_py_spy_is_formatted() {
        let dump = r#"[{"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7,
            "active": true, "owns_gil": false, "frames": [
                {"name": "hold_up", "filename": "/a/train.py", "module": null, "short_filename": "train.py",
                 "line": 17, "locals": null, "is_entry": false},
                {"name": "<module>", "filename": "/a/train.py", "line": -1}]},
            {"thread_name": null, "frames": []}]"#;
        let threads: Vec<PySpyThread> = serde_json::from_str(dump).expect("valid");
        insta::assert_snapshot!(format_python_stacks(7, &threads), @r"
        Python stacks of process 7:
          thread 7 (MainThread)
            hold_up (/a/train.py:17)
            <module> (/a/train.py:0)
          thread 0 (?)
        ");
    }

    #[test]
    fn the_stacks_of_the_test_process_are_appended() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("rank-0.log");
        fs::write(&log, "its own output\n").expect("written");
        write_stacks(&[StackTarget { pid: std::process::id(), log: log.clone() }]);
        let text = fs::read_to_string(&log).expect("read");
        let lines: Vec<&str> = text.lines().take(3).collect();
        insta::with_settings!({ filters => [(r"process \d+: .*", "process [PID]: [COMMAND]")] }, {
            insta::assert_snapshot!(lines.join("\n"));
        });
        assert_eq!(text.matches(&format!("process {}:", std::process::id())).count(), 1, "{text}");
        let states = text.lines().filter_map(|line| line.split_once("): state ")?.1.chars().next());
        assert!(states.clone().count() > 0 && states.clone().all(|s| "RSD".contains(s)), "{text}");
    }
}
