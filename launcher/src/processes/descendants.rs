//! Finds and kills the processes that a job left behind.
//!
//! The calling process must be the subreaper of the job's processes. These processes are then its
//! descendants in whatever session or process group they are.
use nix::{errno::Errno, sys::signal::Signal, unistd::Pid};
use std::{collections::HashMap, fs, os::fd::FromRawFd, os::fd::OwnedFd};

/// The parent, the start time and the CPU time of a process, which were read from `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessStat {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    /// The start time in clock ticks since boot. Start time and pid identify a process uniquely.
    pub(crate) start_time: u64,
    /// The CPU time of the process and of the children that the process waited for, in clock ticks.
    pub(crate) ticks: u64,
    /// Whether a signal has stopped the process. `false` if a debugger has stopped the process.
    pub(crate) stopped: bool,
}

/// Sends SIGKILL to every descendant of this process, except for the processes `spared` and their
/// descendants. Returns the pids of the signalled processes.
///
/// Descendants may start other processes during the call. The caller must therefore repeat the call
/// until no descendant is left.
pub(crate) fn kill_descendants(spared: &[u32]) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<ProcessStat>> = HashMap::new();
    for process in list_processes() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut killed = Vec::new();
    let mut parents = vec![Pid::this().as_raw()];
    while let Some(parent) = parents.pop() {
        for process in children.remove(&parent).unwrap_or_default() {
            if spared.contains(&process.pid.unsigned_abs()) {
                continue;
            }
            parents.push(process.pid);
            if signal_if_unchanged(process, Signal::SIGKILL) {
                killed.push(process.pid);
            }
        }
    }
    killed
}

/// Returns the process IDs of the child processes of this process, without zombies.
pub(crate) fn list_children() -> Vec<u32> {
    let parent = Pid::this().as_raw();
    list_processes().iter().filter(|p| p.parent == parent).map(|p| p.pid.unsigned_abs()).collect()
}

/// Reads the parent, the start time and the CPU time of every process in `/proc`, except for
/// zombies.
pub(crate) fn list_processes() -> Vec<ProcessStat> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter_map(read_process_stat)
        .collect()
}

/// Reads the parent, the start time and the CPU time of the process `pid` from /proc. Returns
/// `None` if there is no such process or the process is a zombie.
fn read_process_stat(pid: i32) -> Option<ProcessStat> {
    parse_process_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Reads the start time of a process in clock ticks since boot. Returns `None` if the process has
/// ended or is a zombie.
pub(crate) fn read_start_ticks(pid: u32) -> Option<u64> {
    Some(read_process_stat(pid.try_into().ok()?)?.start_time)
}

/// Parses the parent, the start time and the CPU time of a process from the text of its
/// `/proc/PID/stat`. Returns `None` for a zombie or an invalid line.
///
/// The process name in the line is in parentheses and may contain any characters, including
/// parentheses.
fn parse_process_stat(pid: i32, stat: &str) -> Option<ProcessStat> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    // The four fields are utime, stime, cutime and cstime.
    let mut times = fields.by_ref().skip(9).take(4);
    let mut ticks = 0u64;
    for _ in 0..4 {
        // The times of children may be negative because of kernel bugs.
        ticks = ticks.saturating_add_signed(times.next()?.parse::<i64>().ok()?.max(0));
    }
    let start_time = fields.nth(4)?.parse().ok()?;
    let stopped = state == "T";
    (state != "Z" && state != "X").then_some(ProcessStat { pid, parent, start_time, ticks, stopped })
}

/// Sends `signal` to a process only if its start time still matches, because another process may
/// have got its pid. Returns whether the signal was sent.
pub(crate) fn signal_if_unchanged(process: ProcessStat, signal: Signal) -> bool {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process.pid, 0) };
    if fd < 0 {
        // Linux before 5.3 has no pidfds: a small window remains between this check and the signal.
        return Errno::last() == Errno::ENOSYS
            && read_process_stat(process.pid)
                .is_some_and(|current| current.start_time == process.start_time)
            && nix::sys::signal::kill(Pid::from_raw(process.pid), signal).is_ok();
    }
    // SAFETY: the kernel returned this descriptor, nothing else owns it, and descriptors fit into
    // i32.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // The descriptor refers to one process. If its start time is the expected one, the signal
    // cannot reach another process.
    let is_same =
        read_process_stat(process.pid).is_some_and(|current| current.start_time == process.start_time);
    is_same && {
        use std::os::fd::AsRawFd;
        // SAFETY: a valid pidfd, a signal number, no siginfo, no flags.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                fd.as_raw_fd(),
                signal as i32,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        rc == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines_with_any_name_are_parsed() {
        let rest = " S 17 4242 4242 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 987654 1 2";
        let expected = ProcessStat { pid: 5, parent: 17, start_time: 987_654, ticks: 10, stopped: false };
        for name in ["(sh)", "(a b) c)", "())", "( 1 S 3 )"] {
            assert_eq!(parse_process_stat(5, &format!("5 {name}{rest}")), Some(expected));
        }
        assert_eq!(parse_process_stat(5, &format!("5 (sh){}", rest.replacen('S', "Z", 1))), None);
        for broken in ["", "5 (sh", "5 (sh) S", "5 (sh) S x 1 2"] {
            assert_eq!(parse_process_stat(5, broken), None);
        }
    }

    #[test]
    fn the_test_process_is_listed_with_its_parent() {
        let process = read_process_stat(Pid::this().as_raw()).unwrap();
        assert_eq!(process.parent, Pid::parent().as_raw());
        // The CPU time of the process may increase between two readings and is not compared.
        let is_same = |p: &ProcessStat| {
            (p.pid, p.parent, p.start_time) == (process.pid, process.parent, process.start_time)
        };
        assert!(list_processes().iter().any(is_same));
    }

    #[test]
    fn a_process_with_another_start_time_is_not_killed() {
        let process = read_process_stat(Pid::this().as_raw()).unwrap();
        let other = ProcessStat { start_time: process.start_time + 1, ..process };
        assert!(!signal_if_unchanged(other, Signal::SIGKILL));
    }
}
