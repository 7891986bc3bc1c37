//! [`SlowedWorker`]: makes the steps of a training slow without using CPU time, so that the
//! training lasts longer than a disturbance.
use super::simulated_hosts::{SimulatedHosts, list_processes_of_host};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How long the worker is suspended each time.
const SUSPENDED_TIME: Duration = Duration::from_millis(60);
/// How long the worker runs between two suspensions.
const RUNNING_TIME: Duration = Duration::from_millis(6);
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
        let ends = Arc::new(AtomicBool::new(false));
        let has_to_end = ends.clone();
        let directory = hosts.host_directory(host);
        let find_worker = move || {
            let processes = list_processes_of_host(&directory);
            let worker = processes.iter().find(|(_, line)| line.starts_with("launch worker"));
            worker.map(|(pid, _)| Pid::from_raw(*pid))
        };
        let thread = thread::spawn(move || {
            let mut worker: Option<Pid> = None;
            while !has_to_end.load(Ordering::Relaxed) {
                let Some(pid) = worker.filter(|pid| kill(*pid, Signal::SIGSTOP).is_ok()) else {
                    worker = find_worker();
                    if worker.is_none() {
                        thread::sleep(SEARCH_INTERVAL);
                    }
                    continue;
                };
                thread::sleep(SUSPENDED_TIME);
                // An error means that the worker has been killed.
                _ = kill(pid, Signal::SIGCONT);
                thread::sleep(RUNNING_TIME);
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
