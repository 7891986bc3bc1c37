//! Was a process killed because memory ran out? The control group counts such kills; where it can't be read, the
//! kernel's log names the pids.
use super::kernel_log::KernelLog;
use crate::discover::oom_kills;
use std::path::Path;

/// Watches for kills since it was made, or since the last that it told of.
#[derive(Debug)]
pub(super) struct OomWatch {
    /// Kills of this control group that are known.
    counted: Option<u64>,
    log: Option<KernelLog>,
    /// Pids that the kernel's log has told of.
    named: Vec<u32>,
}

impl OomWatch {
    pub(super) fn start() -> Self {
        let counted = oom_kills(Path::new("/"));
        let log = if counted.is_none() { KernelLog::open() } else { None };
        OomWatch { counted, log, named: Vec::new() }
    }

    /// A process of this control group was killed by SIGKILL: by the kernel, for want of memory?
    pub(super) fn killed(&mut self, pid: u32) -> bool {
        match &mut self.counted {
            Some(before) => {
                let more = oom_kills(Path::new("/")).is_some_and(|now| now > *before);
                // Each kill explains one process.
                *before += u64::from(more);
                more
            }
            None => {
                if let Some(log) = &mut self.log {
                    log.read(|record| self.named.extend(killed_process(record)));
                }
                self.named.contains(&pid)
            }
        }
    }
}

/// The pid in `… Out of memory: Killed process 123 (name) …`.
fn killed_process(record: &str) -> Option<u32> {
    let (before, after) = record.split_once("Killed process ")?;
    let oom = before.to_ascii_lowercase().contains("out of memory");
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|_| oom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_understood() {
        let record = "4,123,456,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB";
        assert_eq!(killed_process(record), Some(4242));
        assert_eq!(killed_process("3,1,2,-;Out of memory: Killed process 7 (a b) x"), Some(7));
        for other in ["", "6,1,2,-;Killed process 9 (x)", "Out of memory: Killed process x", "out of memory"]
        {
            assert_eq!(killed_process(other), None, "{other}");
        }
    }

    #[test]
    fn nothing_was_killed_here() {
        assert!(!OomWatch::start().killed(std::process::id()));
    }
}
