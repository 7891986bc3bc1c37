//! [`UsageSampler`]: measures every few seconds which resources this host, its GPUs and its workers
//! use.
//!
//! A separate thread reads the counters of the kernel and of the GPUs, because some reads may
//! block.
mod gpu_usage;
mod host_counters;
mod sampled_worker;
mod worker_counters;

use crate::discover::read_memory_usage;
use gpu_usage::GpuUsageReader;
use host_counters::HostCounters;
use protocol::control::{GpuUsage, HostUsage};
pub(super) use sampled_worker::SampledWorker;
use std::{
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use worker_counters::WorkerUsageMeter;

/// The time between two measurements of the resource usage of a host, its GPUs and its workers.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);
/// How many times the host's resource usage is measured for each time that its GPUs are read,
/// because the GPU driver answers slowly.
const SAMPLES_PER_GPU_READING: u32 = 3;

/// The workers whose resource usage is measured, and the attempt (start of all workers) to which
/// they belong.
#[derive(Clone, Debug, Default)]
struct SampledWorkers {
    attempt: u32,
    workers: Vec<SampledWorker>,
}

/// The handle of the thread that measures the resource usage of this host while workers run, with
/// the channel for the results.
#[derive(Debug)]
pub(super) struct UsageSampler {
    workers: Arc<Mutex<SampledWorkers>>,
    measured: mpsc::Receiver<(u32, HostUsage)>,
}

impl UsageSampler {
    /// Starts the thread that measures the resource usage of the host and its workers whenever
    /// there are workers. The thread ends with the process.
    pub(super) fn start() -> io::Result<UsageSampler> {
        let workers: Arc<Mutex<SampledWorkers>> = Arc::default();
        let (sender, measured) = mpsc::channel(1);
        let shared = workers.clone();
        thread::Builder::new().name("usage".into()).spawn(move || run_sampler(&shared, &sender))?;
        Ok(UsageSampler { workers, measured })
    }

    /// Sets the workers whose resource usage is measured from now on, and their attempt (start of
    /// all workers).
    pub(super) fn set_workers(&self, attempt: u32, workers: Vec<SampledWorker>) {
        *lock_workers(&self.workers) = SampledWorkers { attempt, workers };
    }

    /// Waits for the next measurement of the resource usage of the host and its workers. Returns it
    /// with the attempt of the workers.
    pub(super) async fn receive_measurement(&mut self) -> (u32, HostUsage) {
        match self.measured.recv().await {
            Some(measured) => measured,
            None => std::future::pending().await,
        }
    }
}

fn lock_workers(workers: &Mutex<SampledWorkers>) -> MutexGuard<'_, SampledWorkers> {
    workers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measures the resource usage of the host periodically and sends the results to the agent's event
/// loop, until the receiver is gone.
fn run_sampler(shared: &Mutex<SampledWorkers>, sender: &mpsc::Sender<(u32, HostUsage)>) {
    let mut meter = HostUsageMeter::new(Path::new("/"));
    loop {
        thread::sleep(SAMPLE_INTERVAL);
        let SampledWorkers { attempt, workers } = lock_workers(shared).clone();
        let usage = meter.measure(&workers, Instant::now());
        // A measurement that the driver has not taken yet is as good as this one.
        if let Some(usage) = usage
            && let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send((attempt, usage))
        {
            return;
        }
    }
}

/// Computes how much CPU, memory, disk, network and GPU a host and its workers have used since the
/// previous measurement.
struct HostUsageMeter<'r> {
    root: &'r Path,
    /// The counters of the host, and the time at which they were read; `None` while no worker runs.
    host: Option<(HostCounters, Instant)>,
    workers: WorkerUsageMeter,
    gpu_reader: GpuUsageReader,
    gpus: Vec<GpuUsage>,
    /// The number of measurements.
    count: u32,
}

impl<'r> HostUsageMeter<'r> {
    /// Creates a meter that reads the kernel's `proc` and `sys` file systems below the directory
    /// `root`, which is `/` except in tests.
    fn new(root: &'r Path) -> HostUsageMeter<'r> {
        HostUsageMeter {
            root,
            host: None,
            workers: WorkerUsageMeter::default(),
            gpu_reader: GpuUsageReader::default(),
            gpus: Vec::new(),
            count: 0,
        }
    }

    /// Measures the resource usage of the host, its GPUs and its workers in the time since the
    /// previous call. Returns `None` at the first call, and if no worker runs.
    fn measure(&mut self, workers: &[SampledWorker], now: Instant) -> Option<HostUsage> {
        if workers.is_empty() {
            (self.host, self.workers, self.count) = (None, WorkerUsageMeter::default(), 0);
            return None;
        }
        let counters = HostCounters::read(self.root);
        let workers = self.workers.measure(self.root, workers);
        if self.count.is_multiple_of(SAMPLES_PER_GPU_READING) {
            self.gpus = self.gpu_reader.read_usage(self.root);
        }
        self.count = self.count.wrapping_add(1);
        let (before, read_at) = self.host.replace((counters.clone(), now))?;
        let limit = read_memory_usage(self.root);
        let mut usage = counters.compute_usage_since(&before);
        usage.interval_ms = now.duration_since(read_at).as_millis() as u64;
        (usage.cgroup_memory_limit, usage.cgroup_memory_used) = (limit.map(|l| l.0), limit.map(|l| l.1));
        (usage.gpus, usage.workers) = (self.gpus.clone(), workers);
        Some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_of_this_process_is_measured_from_the_second_time_on() {
        let worker = SampledWorker { rank: 3, pid: std::process::id(), is_program: true };
        let mut meter = HostUsageMeter::new(Path::new("/"));
        let start = Instant::now();
        assert_eq!(meter.measure(&[], start), None);
        assert_eq!(meter.measure(&[worker], start), None);
        let mut sum = 0u64;
        while start.elapsed() < Duration::from_millis(300) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let usage = meter.measure(&[worker], start + Duration::from_millis(300)).expect("a measurement");
        assert_eq!((usage.interval_ms, usage.workers.len(), usage.workers[0].rank), (300, 1, 3));
        let worker_usage = usage.workers[0];
        assert!(
            worker_usage.cpu_us >= 30_000 && worker_usage.rss > 1 << 20 && !worker_usage.is_stopped,
            "{worker_usage:?}"
        );
        assert!(usage.cpus >= 1 && usage.memory_total > usage.memory_used && usage.memory_used > 0);
        assert!((0.0..=1.0).contains(&usage.cpu_share), "{}", usage.cpu_share);
        assert_eq!(meter.measure(&[], start), None);
        assert_eq!(meter.measure(&[worker], start), None, "begins again");
    }
}
