//! [`SlowedWorker`]: makes the steps of a training slow without using CPU time, so that the
//! training lasts longer than a disturbance.
use super::simulated_hosts::{SimulatedHosts, list_processes_of_host};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long the worker is suspended each time.
const SUSPENDED_TIME: Duration = Duration::from_millis(60);
/// How long the worker runs between two suspensions, at least.
const RUNNING_TIME: Duration = Duration::from_millis(6);
/// The CPU time that a worker that is not waiting gets between two suspensions. On a busy machine,
/// a worker may not run at all within [`RUNNING_TIME`], and would never make a step.
const RUNNING_CPU_TIME: Duration = Duration::from_millis(4);
/// The longest time for which a worker runs between two suspensions to get its CPU time.
const MAX_RUNNING_TIME: Duration = Duration::from_secs(2);
/// The CPU time that a worker which replaces another one gets before it is suspended for the first
/// time. With suspensions, its start would take minutes on a busy machine.
const START_CPU_TIME: Duration = Duration::from_millis(500);
/// The longest time for which a worker that replaces another one is not suspended.
const MAX_START_TIME: Duration = Duration::from_secs(20);
/// The pause before another search for the process of a worker, if none was found.
const SEARCH_INTERVAL: Duration = Duration::from_millis(200);

/// Suspends the built-in worker of a host again and again. The workers of the other hosts wait for
/// it. Dropping the value lets the worker run.
pub(crate) struct SlowedWorker {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SlowedWorker {
    /// Starts to suspend the worker of a host, and each worker that replaces it.
    pub(crate) fn start(hosts: &SimulatedHosts, host: &str) -> SlowedWorker {
        SlowedWorker::start_in(hosts.host_directory(host))
    }

    /// Starts to suspend a worker of the host with this directory, and each worker that replaces
    /// it. The file `pid1` in the directory has the pid of the host's first process.
    pub(crate) fn start_in(directory: PathBuf) -> SlowedWorker {
        let ends = Arc::new(AtomicBool::new(false));
        let has_to_end = ends.clone();
        let find_worker = move || {
            let processes = list_processes_of_host(&directory);
            let worker = processes.iter().find(|(_, line)| line.starts_with("launch worker"));
            worker.map(|(pid, _)| Pid::from_raw(*pid))
        };
        let thread = thread::spawn(move || {
            let (mut worker, mut is_replacement) = (None, false);
            while !has_to_end.load(Ordering::Relaxed) {
                let Some(pid) = worker.filter(|pid| kill(*pid, Signal::SIGSTOP).is_ok()) else {
                    worker = find_worker();
                    match worker {
                        Some(pid) if is_replacement => wait_for_start(pid, &has_to_end),
                        Some(_) => is_replacement = true,
                        None => thread::sleep(SEARCH_INTERVAL),
                    }
                    continue;
                };
                thread::sleep(SUSPENDED_TIME);
                let before = read_cpu_time(pid);
                // An error means that the worker has been killed.
                _ = kill(pid, Signal::SIGCONT);
                let continued = Instant::now();
                thread::sleep(RUNNING_TIME);
                while continued.elapsed() < MAX_RUNNING_TIME
                    && read_cpu_time(pid) < before + RUNNING_CPU_TIME
                    && has_runnable_thread(pid)
                {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        SlowedWorker { ends, thread: Some(thread) }
    }
}

impl Drop for SlowedWorker {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

/// Waits until a new worker has used the CPU time of its start, has ended, or is to run freely.
fn wait_for_start(pid: Pid, has_to_end: &AtomicBool) {
    let found = Instant::now();
    while found.elapsed() < MAX_START_TIME
        && !has_to_end.load(Ordering::Relaxed)
        && (Duration::from_nanos(1)..START_CPU_TIME).contains(&read_cpu_time(pid))
    {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Reads a file with this name of each thread of a process. Returns nothing for a process that has
/// ended.
fn read_thread_files(pid: Pid, name: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| fs::read_to_string(thread.path().join(name)).ok()).collect()
}

/// Returns the CPU time that all threads of a process have used.
fn read_cpu_time(pid: Pid) -> Duration {
    let nanoseconds = |text: String| text.split(' ').next()?.parse::<u64>().ok();
    Duration::from_nanos(read_thread_files(pid, "schedstat").into_iter().filter_map(nanoseconds).sum())
}

/// Returns whether a thread of a process runs or waits for a CPU, or is not continued yet.
fn has_runnable_thread(pid: Pid) -> bool {
    // The name of the thread before the state may contain spaces and parentheses.
    let state = |text: &String| text.rsplit_once(") ").and_then(|(_, fields)| fields.chars().next());
    read_thread_files(pid, "stat").iter().any(|text| matches!(state(text), Some('R' | 'T' | 'D')))
}
