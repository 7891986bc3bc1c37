//! Writes the stacks of hanging workers to their logs: the state and kernel stack of every thread,
//! and Python stacks if py-spy is installed.
use super::{activity, process};
use std::{
    fmt::Write as _,
    fs::{self, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The time limit of one run of py-spy, which dumps the Python stacks of one process.
const PY_SPY_TIMEOUT: Duration = Duration::from_secs(2);
/// The time limit of all runs of py-spy together, which dump the Python stacks of all workers of
/// the host.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(6);
/// The largest number of processes of a worker, of threads of a process, and of frames of a stack
/// that are written to a worker's log. The others are left out.
const MAX_WRITTEN_ITEMS: usize = 64;
/// The size, in bytes, to which a `/proc` file or a dump of py-spy is truncated.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// A worker whose stacks are to be written, and the log to which the stacks are appended.
#[derive(Clone, Debug)]
pub(super) struct StackTarget {
    pub(super) pid: u32,
    pub(super) log: PathBuf,
}

/// Appends the stacks of the threads of each hanging worker to the worker's log. Omits parts that
/// cannot be read or written. Blocks for little more than [`TOTAL_TIMEOUT`] at most.
pub(super) fn write_stacks(workers: &[StackTarget]) {
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
    for worker in workers {
        for pid in activity::list_process_tree(worker.pid).into_iter().take(MAX_WRITTEN_ITEMS) {
            let remaining = deadline.saturating_duration_since(Instant::now()).min(PY_SPY_TIMEOUT);
            if remaining.is_zero() {
                return;
            }
            match process::run_py_spy_dump(pid, remaining, MAX_TEXT_BYTES) {
                Some(text) if !text.is_empty() => append_to_log(&worker.log, &text),
                Some(_) => {}
                None => return, // py-spy is not installed
            }
        }
    }
}

/// Formats the state, wait channel, system call and kernel stack of every thread of a process as
/// text.
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
