//! What a job leaves behind: processes that reparented to us (we are their subreaper), whatever session or group they moved to.
use nix::{errno::Errno, sys::signal::Signal, unistd::Pid};
use std::{collections::HashMap, fs, os::fd::FromRawFd, os::fd::OwnedFd};

/// A process as `/proc` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) parent: i32,
    /// Clock ticks since boot: with the pid it names one process for ever.
    pub(super) started: u64,
    /// CPU time of it and of the children it waited for, clock ticks.
    pub(super) ticks: u64,
    /// By a signal, not by a debugger.
    pub(super) stopped: bool,
}

/// Sends SIGKILL to every descendant of this process except `spare` and what descends from them; returns whom it hit.
/// Processes may be born meanwhile: call again until none is left.
pub(crate) fn kill_descendants(spare: &[u32]) -> Vec<i32> {
    let own = Pid::this().as_raw();
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in processes() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut hit = Vec::new();
    let mut parents = vec![own];
    while let Some(parent) = parents.pop() {
        for process in children.remove(&parent).unwrap_or_default() {
            if spare.contains(&process.pid.unsigned_abs()) {
                continue;
            }
            parents.push(process.pid);
            if kill_exactly(process) {
                hit.push(process.pid);
            }
        }
    }
    hit
}

/// The children of this process.
pub(crate) fn children() -> Vec<u32> {
    let own = Pid::this().as_raw();
    processes().iter().filter(|p| p.parent == own).map(|p| p.pid.unsigned_abs()).collect()
}

/// Every process that is alive (not a zombie) and visible to us.
pub(super) fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).filter_map(process).collect()
}

fn process(pid: i32) -> Option<Process> {
    parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// `/proc/PID/stat`: the name, in parentheses, may hold anything, parentheses too.
fn parse_stat(pid: i32, stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    // utime, stime, cutime, cstime
    let mut times = fields.by_ref().skip(9).take(4);
    let mut ticks = 0u64;
    for _ in 0..4 {
        // The last two may be negative where the kernel errs.
        ticks = ticks.saturating_add_signed(times.next()?.parse::<i64>().ok()?.max(0));
    }
    let started = fields.nth(4)?.parse().ok()?;
    let stopped = state == "T";
    (state != "Z" && state != "X").then_some(Process { pid, parent, started, ticks, stopped })
}

/// Kills this very process: its pid may have been given to another since it was seen. `true`: a signal was sent.
fn kill_exactly(seen: Process) -> bool {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, seen.pid, 0) };
    if fd < 0 {
        // Without pidfds (Linux before 5.3) the last look is the one below.
        return Errno::last() == Errno::ENOSYS
            && process(seen.pid).is_some_and(|now| now.started == seen.started)
            && nix::sys::signal::kill(Pid::from_raw(seen.pid), Signal::SIGKILL).is_ok();
    }
    // SAFETY: the kernel just returned this descriptor and nothing else owns it; descriptors fit an i32.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // The descriptor pins one process; if that is still the one seen, the signal can't hit another.
    let same = process(seen.pid).is_some_and(|now| now.started == seen.started);
    same && {
        use std::os::fd::AsRawFd;
        // SAFETY: a valid pidfd, a signal number, no siginfo, no flags.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                fd.as_raw_fd(),
                libc::SIGKILL,
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
    fn stat_lines_with_any_name_are_read() {
        let rest = " S 17 4242 4242 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 987654 1 2";
        let want = Process { pid: 5, parent: 17, started: 987_654, ticks: 10, stopped: false };
        for name in ["(sh)", "(a b) c)", "())", "( 1 S 3 )"] {
            assert_eq!(parse_stat(5, &format!("5 {name}{rest}")), Some(want));
        }
        assert_eq!(parse_stat(5, &format!("5 (sh){}", rest.replacen('S', "Z", 1))), None);
        for broken in ["", "5 (sh", "5 (sh) S", "5 (sh) S x 1 2"] {
            assert_eq!(parse_stat(5, broken), None);
        }
    }

    #[test]
    fn this_process_is_seen_with_its_parent() {
        let own = process(Pid::this().as_raw()).unwrap();
        assert_eq!(own.parent, Pid::parent().as_raw());
        // the time it has used goes on
        let same = |p: &Process| (p.pid, p.parent, p.started) == (own.pid, own.parent, own.started);
        assert!(processes().iter().any(same));
    }

    #[test]
    fn a_process_that_is_not_the_one_seen_is_left_alone() {
        let own = process(Pid::this().as_raw()).unwrap();
        assert!(!kill_exactly(Process { started: own.started + 1, ..own }));
    }
}
