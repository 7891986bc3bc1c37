//! [`WorkerUsageMeter`]: measures the resource usage of workers from the kernel's counters of their
//! processes.
use super::sampled_worker::SampledWorker;
use crate::{agent::activity::list_process_trees, discover::read_throttled_us};
use protocol::control::WorkerUsage;
use std::{collections::HashMap, fs, path::Path};

/// The largest number of threads per process whose waiting time for a CPU is measured.
const MAX_THREADS: usize = 64;
/// The largest number of processes of one worker whose resource usage is measured.
const MAX_PROCESSES: usize = 64;
/// How many times the resource usage of a worker's program is measured for each search for new
/// child processes of the program.
const SAMPLES_PER_CHILD_SEARCH: u32 = 5;
/// The number of clock ticks per second, which is fixed on Linux (`USER_HZ`).
const TICKS_PER_SECOND: u64 = 100;

/// The sums of memory, CPU time, waiting time and major page faults over one worker's processes,
/// and whether the worker's first process is stopped.
#[derive(Clone, Copy, Debug, Default)]
struct WorkerProcessCounters {
    rss: u64,
    cpu_us: u64,
    run_delay_us: u64,
    throttled_us: u64,
    major_faults: u64,
    is_stopped: bool,
}

/// Measures the resource usage of workers, from the differences between the kernel's counters of
/// their processes at two measurements.
#[derive(Debug, Default)]
pub(super) struct WorkerUsageMeter {
    /// By the pid of the worker's first process.
    previous: HashMap<u32, WorkerProcessCounters>,
    /// The processes of programs, by the pid of the first one.
    trees: HashMap<u32, Vec<i32>>,
    /// The number of measurements.
    count: u32,
}

impl WorkerUsageMeter {
    /// Measures the resource usage of the workers since the previous call or, for new workers,
    /// since their start. Reads files below `root`.
    pub(super) fn measure(&mut self, root: &Path, workers: &[SampledWorker]) -> Vec<WorkerUsage> {
        let programs: Vec<u32> = workers.iter().filter(|w| w.is_program).map(|w| w.pid).collect();
        if self.count.is_multiple_of(SAMPLES_PER_CHILD_SEARCH)
            || programs.iter().any(|pid| !self.trees.contains_key(pid))
        {
            let trees = if programs.is_empty() { Vec::new() } else { list_process_trees(&programs) };
            self.trees = programs.into_iter().zip(trees).collect();
        }
        self.count = self.count.wrapping_add(1);
        let mut current = HashMap::with_capacity(workers.len());
        let mut usages = Vec::with_capacity(workers.len());
        for worker in workers {
            let leader = [worker.pid as i32];
            let pids = self.trees.get(&worker.pid).map_or(&leader[..], Vec::as_slice);
            let now = read_counters(root, worker.pid, pids);
            let before = self.previous.get(&worker.pid).copied().unwrap_or_default();
            usages.push(WorkerUsage {
                rank: worker.rank,
                rss: now.rss,
                cpu_us: now.cpu_us.saturating_sub(before.cpu_us),
                run_delay_us: now.run_delay_us.saturating_sub(before.run_delay_us),
                throttled_us: now.throttled_us.saturating_sub(before.throttled_us),
                major_faults: now.major_faults.saturating_sub(before.major_faults),
                is_stopped: now.is_stopped,
            });
            current.insert(worker.pid, now);
        }
        self.previous = current;
        usages
    }
}

/// Reads and sums the kernel's counters of the processes `pids`, which belong to one worker with
/// the first process `leader`.
fn read_counters(root: &Path, leader: u32, pids: &[i32]) -> WorkerProcessCounters {
    let mut sum = WorkerProcessCounters {
        throttled_us: read_throttled_us(root, leader).unwrap_or(0),
        ..WorkerProcessCounters::default()
    };
    for pid in pids.iter().take(MAX_PROCESSES) {
        let directory = root.join(format!("proc/{pid}"));
        let stat = fs::read_to_string(directory.join("stat")).unwrap_or_default();
        let Some(counters) = parse_stat(&stat) else { continue };
        sum.rss = sum.rss.saturating_add(counters.rss);
        sum.cpu_us = sum.cpu_us.saturating_add(counters.cpu_us);
        sum.major_faults = sum.major_faults.saturating_add(counters.major_faults);
        sum.is_stopped |= counters.is_stopped && *pid == leader as i32;
        let threads = fs::read_dir(directory.join("task")).into_iter().flatten().flatten();
        for thread in threads.take(MAX_THREADS) {
            let schedstat = fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
            sum.run_delay_us = sum.run_delay_us.saturating_add(parse_run_delay_us(&schedstat));
        }
    }
    sum
}

/// Parses memory, CPU time and page faults of a process from the content of `/proc/PID/stat`. The
/// fields after the name of the process are numbered from 3 in proc(5).
fn parse_stat(stat: &str) -> Option<WorkerProcessCounters> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let ticks = number(14)?.saturating_add(number(15)?);
    Some(WorkerProcessCounters {
        rss: number(24)?.saturating_mul(page_bytes()),
        cpu_us: ticks.saturating_mul(1_000_000 / TICKS_PER_SECOND),
        major_faults: number(12)?,
        is_stopped: fields.first() == Some(&"T"),
        ..WorkerProcessCounters::default()
    })
}

/// Parses how long a thread has waited for a CPU, in microseconds, from the content of its file
/// `schedstat` in `/proc`.
fn parse_run_delay_us(schedstat: &str) -> u64 {
    schedstat.split_whitespace().nth(1).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) / 1000
}

/// Returns the size of a page of memory in bytes, as the kernel reports it.
fn page_bytes() -> u64 {
    // SAFETY: sysconf only reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_a_worker_are_read() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            fs::write(path, text).expect("file");
        };
        let stat = |state: &str, faults: u64, ticks: u64| {
            format!("7 (a) b) {state} 1 7 7 0 -1 0 5 0 {faults} 0 {ticks} 10 0 0 20 0 1 0 9 4096 25 0 0")
        };
        write("proc/7/stat", &stat("R", 3, 100));
        write("proc/7/task/7/schedstat", "5000000 2000000 9\n");
        write("proc/7/task/8/schedstat", "5000000 1000000 9\n");
        write("proc/7/cgroup", "0::/a\n");
        write("sys/fs/cgroup/a/cpu.stat", "throttled_usec 1000\n");
        let worker = SampledWorker { rank: 4, pid: 7, is_program: false };
        let mut counters = WorkerUsageMeter::default();
        let first = counters.measure(root.path(), &[worker])[0];
        assert_eq!((first.rank, first.rss, first.cpu_us), (4, 25 * page_bytes(), 1_100_000));
        assert_eq!((first.run_delay_us, first.throttled_us, first.major_faults), (3000, 1000, 3));
        write("proc/7/stat", &stat("T", 10, 150));
        write("proc/7/task/8/schedstat", "5000000 4000000 9\n");
        write("sys/fs/cgroup/a/cpu.stat", "throttled_usec 51000\n");
        let second = counters.measure(root.path(), &[worker])[0];
        let expected = WorkerUsage {
            rank: 4,
            rss: first.rss,
            cpu_us: 500_000,
            run_delay_us: 3000,
            throttled_us: 50_000,
            major_faults: 7,
            is_stopped: true,
        };
        assert_eq!(second, expected);
        let gone = SampledWorker { rank: 5, pid: 8, is_program: false };
        assert_eq!(
            counters.measure(root.path(), &[gone])[0],
            WorkerUsage { rank: 5, ..WorkerUsage::default() }
        );
    }
}
