//! Sends signals to processes of workers, but only to processes that handle them.
//!
//! Without a handler, the default action of the signal would kill the process or have no effect.
use crate::processes::{ProcessStat, list_processes, signal_if_unchanged};
use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};
use std::collections::HashMap;

/// Sends a signal to the process with this pid if the process has a handler for the signal. Returns
/// whether the signal was sent. The process must not have been reaped.
pub(in crate::agent) fn signal_if_handled(pid: u32, signal: i32) -> bool {
    let Ok(signal) = Signal::try_from(signal) else { return false };
    handles_signal(pid as i32, signal) && kill(Pid::from_raw(pid as i32), signal).is_ok()
}

/// Sends `signal` to the process with this pid or, if it has no handler for the signal, to its
/// nearest descendants that have one. Returns whether any process got the signal. The worker must
/// not have been reaped.
///
/// A process that handles the signal decides about its own descendants, such as the processes that
/// load data for it. A shell script or another wrapper that does not handle the signal is skipped,
/// and its children are considered instead.
pub(in crate::agent) fn signal_handling_processes(pid: u32, signal: Signal) -> bool {
    let is_sent = signal_if_handled(pid, signal as i32) || signal_handling_descendants(pid, signal);
    if is_sent {
        // A stopped process handles the signal only after SIGCONT. An error means that the process
        // group has ended meanwhile.
        _ = killpg(Pid::from_raw(pid as i32), Signal::SIGCONT);
    }
    is_sent
}

/// Sends `signal` to the first process with a handler for it on each path down the process tree
/// from the process with this pid. Returns whether any process got the signal.
fn signal_handling_descendants(pid: u32, signal: Signal) -> bool {
    let mut children: HashMap<i32, Vec<ProcessStat>> = HashMap::new();
    for process in list_processes() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut is_sent = false;
    let mut parents = vec![pid as i32];
    while let Some(parent) = parents.pop() {
        for process in children.remove(&parent).unwrap_or_default() {
            if handles_signal(process.pid, signal) {
                is_sent |= signal_if_unchanged(process, signal);
            } else {
                parents.push(process.pid);
            }
        }
    }
    is_sent
}

/// Returns whether the process with this pid has a handler for a signal.
fn handles_signal(pid: i32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    has_handler(&status, signal as i32)
}

/// Returns whether `status`, the text of a process's status file in `/proc`, shows a handler for
/// the signal `signal`. `status` is the content of `/proc/PID/status`.
fn has_handler(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|l| l.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0);
    (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead, BufReader},
        os::unix::process::{CommandExt, ExitStatusExt},
        process::{Child, Command, Stdio},
    };

    /// Starts a shell script as the leader of a process group, and waits until it has printed
    /// `lines` lines. Returns the process and its output.
    fn start_script(script: &str, lines: usize) -> (Child, BufReader<std::process::ChildStdout>) {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        for _ in 0..lines {
            output.read_line(&mut String::new()).unwrap();
        }
        (child, output)
    }

    /// Reads the next line of the output of a script.
    fn read_line(output: &mut impl BufRead) -> String {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    #[test]
    fn a_process_that_handles_the_signal_gets_it_and_its_children_do_not() {
        let script = "trap 'echo parent; wait $child; exit 0' USR1; \
                      sh -c 'trap \"echo child\" USR1; echo up; sleep 0.2; :' & child=$!; \
                      echo up; wait";
        let (mut child, mut output) = start_script(script, 2);
        assert!(signal_handling_processes(child.id(), Signal::SIGUSR1));
        assert_eq!(read_line(&mut output), "parent");
        assert_eq!(read_line(&mut output), "", "the child got no signal");
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn the_child_of_a_wrapper_without_a_handler_gets_the_signal() {
        let script =
            "sh -c 'trap \"echo saved; exit 0\" USR1; echo up; while :; do sleep 0.01; done'; echo end";
        let (mut child, mut output) = start_script(script, 1);
        assert!(!signal_if_handled(child.id(), Signal::SIGUSR1 as i32));
        assert!(signal_handling_processes(child.id(), Signal::SIGUSR1));
        assert_eq!((read_line(&mut output), read_line(&mut output)), ("saved".into(), "end".into()));
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_program_without_a_handler_gets_no_signal() {
        for ignores in ["", "trap '' USR1; "] {
            let (mut child, _output) = start_script(&format!("{ignores}echo up; sleep 1000; :"), 1);
            assert!(!signal_handling_processes(child.id(), Signal::SIGUSR1));
            killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL).unwrap();
            assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
        }
    }
}
