//! Detects processes that the kernel killed because memory ran out.
//!
//! The control group counts OOM kills. Where the counter is not readable, the kernel log has the
//! pids of killed processes.
use super::kernel_log::KernelLog;
use crate::discover::read_oom_kill_count;
use std::path::Path;

/// Detects OOM kills that happen after the start of the watch.
#[derive(Debug)]
pub(super) struct OomWatch {
    /// The number of OOM kills of this control group that were attributed to a process or happened
    /// before the start; `None` if the counter is not readable.
    known_kills: Option<u64>,
    log: Option<KernelLog>,
    /// Pids of killed processes in the kernel log.
    killed_pids: Vec<u32>,
}

impl OomWatch {
    /// Reads the current number of OOM kills, or opens the kernel log at its end.
    pub(super) fn start() -> Self {
        let known_kills = read_oom_kill_count(Path::new("/"));
        let log = if known_kills.is_none() { KernelLog::open() } else { None };
        OomWatch { known_kills, log, killed_pids: Vec::new() }
    }

    /// Returns whether a process of this control group that died of SIGKILL was killed because
    /// memory ran out, and attributes one counted OOM kill to it. The caller must call this once
    /// for each process that died of SIGKILL.
    pub(super) fn attribute_oom_kill(&mut self, pid: u32) -> bool {
        match &mut self.known_kills {
            Some(known) => {
                let is_new = read_oom_kill_count(Path::new("/")).is_some_and(|count| count > *known);
                // Each kill accounts for one process.
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

/// Parses the pid in a record such as `… Out of memory: Killed process 123 (name) …`; `None` if the
/// record does not report an OOM kill.
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
