//! [`request_stacks`]: lets Python's faulthandler write the stacks of processes, and reads them.
use super::hook_directory::{STACKS_SIGNAL, read_limited};
use jobspec::ids::Rank;
use protocol::hang::StackFrame;
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// How long the agent waits for Python stacks after it has sent the signal that requests them.
const FAULTHANDLER_TIMEOUT: Duration = Duration::from_millis(500);
/// The largest number of frames that are read of a Python stack that faulthandler has written.
const MAX_FRAMES: usize = 64;
/// The text with which Python's faulthandler begins the stack of the thread that has received the
/// signal. The kernel delivers the signal to the main thread unless that thread blocks the signal.
const CURRENT_THREAD_MARKER: &str = "Current thread ";

/// Makes Python's faulthandler write the stacks of the given processes, and returns the stack of
/// each process's main thread, innermost frame first. A process without a handler of the signal
/// gets no signal, because the signal would kill it, and has an empty stack.
pub(super) fn request_stacks(directory: &Path, processes: &[(Rank, u32)]) -> Vec<Vec<StackFrame>> {
    let signalled: Vec<Option<(PathBuf, usize)>> = processes
        .iter()
        .map(|(rank, pid)| {
            let path = directory.join(format!("rank-{rank}.stacks"));
            let length = fs::metadata(&path).ok()?.len() as usize;
            handles_stacks_signal(*pid).then(|| {
                // SAFETY: kill has no memory effects. The process handles the signal.
                unsafe { libc::kill(*pid as libc::pid_t, STACKS_SIGNAL) };
                (path, length)
            })
        })
        .collect();
    if signalled.iter().any(Option::is_some) {
        thread::sleep(FAULTHANDLER_TIMEOUT);
    }
    let read = |request: &Option<(PathBuf, usize)>| {
        let (path, length) = request.as_ref()?;
        let text = read_limited(path)?;
        Some(parse_current_thread(&String::from_utf8_lossy(text.get(*length..)?)))
    };
    signalled.iter().map(|request| read(request).unwrap_or_default()).collect()
}

/// Returns whether the process with the pid `pid` has a handler of [`STACKS_SIGNAL`], the signal
/// that requests Python stacks.
pub(super) fn handles_stacks_signal(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (STACKS_SIGNAL - 1) & 1 == 1
}

/// Parses the stack of the thread that received the signal from the text that Python's faulthandler
/// has written.
fn parse_current_thread(text: &str) -> Vec<StackFrame> {
    let lines = text.lines().skip_while(|line| !line.starts_with(CURRENT_THREAD_MARKER)).skip(1);
    lines.map_while(parse_frame).take(MAX_FRAMES).collect()
}

/// Parses the file, line and function of one stack frame from a line that Python's faulthandler has
/// written.
fn parse_frame(line: &str) -> Option<StackFrame> {
    let (file, rest) = line.strip_prefix("  File \"")?.split_once("\", line ")?;
    let (number, function) = rest.split_once(" in ")?;
    Some(StackFrame { file: file.to_owned(), line: number.parse().ok()?, function: function.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stack_of_the_current_thread_is_parsed() {
        let text = "Thread 0x1 (most recent call first):\n  File \"/a.py\", line 1 in run\n\n\
                    Current thread 0x2 (most recent call first):\n  File \"/b.py\", line 11 in f\n  \
                    File \"/b.py\", line 3 in <module>\n";
        let frames = parse_current_thread(text);
        assert_eq!(
            frames.iter().map(|f| (f.line, f.function.as_str())).collect::<Vec<_>>(),
            [(11, "f"), (3, "<module>")]
        );
        assert!(parse_current_thread("  File \"/a.py\", line x").is_empty());
    }

    #[test]
    fn a_process_without_the_handler_gets_no_signal() {
        assert!(!handles_stacks_signal(std::process::id()));
    }
}
