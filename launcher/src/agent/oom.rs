//! Detects processes that the kernel killed because memory ran out.
//!
//! The control group counts such kills. Where its counter is not readable, the kernel log has the
//! pids.
use super::kernel_log::KernelLog;
use crate::discover::oom_kills;
use std::path::Path;

/// Detects OOM kills since it was started.
#[derive(Debug)]
pub(super) struct OomWatch {
    /// Kills of this control group that are attributed to a process or happened before the start.
    known_kills: Option<u64>,
    log: Option<KernelLog>,
    /// Pids of killed processes in the kernel log.
    killed_pids: Vec<u32>,
}

impl OomWatch {
    pub(super) fn start() -> Self {
        let known_kills = oom_kills(Path::new("/"));
        let log = if known_kills.is_none() { KernelLog::open() } else { None };
        OomWatch { known_kills, log, killed_pids: Vec::new() }
    }

    /// Whether a process of this control group that died of SIGKILL was killed because memory ran
    /// out. To be called once for each such process.
    pub(super) fn was_oom_killed(&mut self, pid: u32) -> bool {
        match &mut self.known_kills {
            Some(known) => {
                let is_new = oom_kills(Path::new("/")).is_some_and(|count| count > *known);
                // Each kill accounts for one process.
                *known += u64::from(is_new);
                is_new
            }
            None => {
                if let Some(log) = &mut self.log {
                    log.read(|record| self.killed_pids.extend(parse_killed_pid(record)));
                }
                self.killed_pids.contains(&pid)
            }
        }
    }
}

/// Parses the pid in `… Out of memory: Killed process 123 (name) …`.
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
    fn kernel_records_are_parsed() {
        let record = "4,123,456,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB";
        assert_eq!(parse_killed_pid(record), Some(4242));
        assert_eq!(parse_killed_pid("3,1,2,-;Out of memory: Killed process 7 (a b) x"), Some(7));
        for other in ["", "6,1,2,-;Killed process 9 (x)", "Out of memory: Killed process x", "out of memory"]
        {
            assert_eq!(parse_killed_pid(other), None, "{other}");
        }
    }

    #[test]
    fn the_test_process_was_not_killed() {
        assert!(!OomWatch::start().was_oom_killed(std::process::id()));
    }
}
