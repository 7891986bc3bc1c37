//! Detects workers that the kernel has killed because memory ran out (OOM).
//!
//! The detection uses the control group's counter of OOM kills. If the counter is not readable, the
//! detection uses the pids of killed processes in the kernel log.
use super::kernel_log::KernelLog;
use crate::discover::read_oom_kill_count;
use std::path::Path;

/// Detects which workers the kernel kills for lack of memory (OOM), from the control group's
/// counter of such kills or the kernel log.
#[derive(Debug)]
pub(super) struct OomWatch {
    /// The number of OOM kills of this control group that happened before the start of the watch or
    /// were attributed to a process. `None` if the counter is not readable.
    known_kills: Option<u64>,
    log: Option<KernelLog>,
    /// The pids of OOM-killed processes that the kernel log reported since the start of the watch.
    killed_pids: Vec<u32>,
}

impl OomWatch {
    /// Starts to watch for OOM kills, through the control group's counter of such kills or, if that
    /// is not readable, the kernel log.
    pub(super) fn start() -> Self {
        let known_kills = read_oom_kill_count(Path::new("/"));
        let log = if known_kills.is_none() { KernelLog::open() } else { None };
        OomWatch { known_kills, log, killed_pids: Vec::new() }
    }

    /// Decides whether a process that died of SIGKILL was killed by the kernel for lack of memory.
    /// Attributes one counted OOM kill to the process.
    ///
    /// The process must belong to this control group. The caller must call this function once for
    /// each process that died of SIGKILL.
    pub(super) fn attribute_oom_kill(&mut self, pid: u32) -> bool {
        match &mut self.known_kills {
            Some(known) => {
                let is_new = read_oom_kill_count(Path::new("/")).is_some_and(|count| count > *known);
                // Each OOM kill explains the end of one process.
                *known += u64::from(is_new);
                is_new
            }
            None => {
                if let Some(log) = &mut self.log {
                    log.read_new_records(|record| self.killed_pids.extend(parse_killed_pid(record)));
                }
                self.killed_pids.contains(&pid)
            }
        }
    }
}

/// Parses the pid of a process that the kernel has killed for lack of memory from a record of the
/// kernel log. An example of a record is `… Out of memory: Killed process 123 (name) …`. Returns
/// `None` if the record does not report an OOM kill.
fn parse_killed_pid(record: &str) -> Option<u32> {
    let (before, after) = record.split_once("Killed process ")?;
    let is_oom = before.to_ascii_lowercase().contains("out of memory");
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|_| is_oom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_records_of_the_kernel_log_are_parsed() {
        let record = "4,123,456,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB";
        assert_eq!(parse_killed_pid(record), Some(4242));
        assert_eq!(parse_killed_pid("3,1,2,-;Out of memory: Killed process 7 (a b) x"), Some(7));
        for other in ["", "6,1,2,-;Killed process 9 (x)", "Out of memory: Killed process x", "out of memory"]
        {
            assert_eq!(parse_killed_pid(other), None, "{other}");
        }
    }

    #[test]
    fn the_test_process_was_not_killed_by_the_kernel() {
        assert!(!OomWatch::start().attribute_oom_kill(std::process::id()));
    }
}
