//! Defines [`UsageMetricsSchedule`], which converts the resource usage of hosts and ranks to named
//! metrics for MLflow and TensorBoard at regular times.
//!
//! The names begin with `system/`, which MLflow shows on a separate page. The number of metrics is
//! limited: a run on many hosts has only means and maxima over the hosts.
use protocol::{
    control::{GpuUsage, HostUsage, WorkerUsage},
    run_measurements::{HostUsageSample, RunMeasurements},
};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// The largest number of hosts that get separate metrics; in larger jobs only the mean and maximum
/// over all hosts are recorded.
const MAX_HOSTS_WITH_METRICS: usize = 16;
/// The largest number of GPUs of a host for which separate usage metrics are recorded.
const MAX_GPUS_WITH_METRICS: usize = 8;
/// The largest number of ranks for which separate metrics of step times are recorded.
const MAX_RANKS_WITH_METRICS: usize = 64;
/// The largest number of bytes of a host's name that appear in the name of a metric.
const MAX_HOST_BYTES: usize = 100;
/// The number of bytes in a megabyte.
const MEGABYTE: f64 = 1e6;

/// The shortest time between two records of a run's usage metrics in MLflow or TensorBoard.
const SHORTEST_RECORD_INTERVAL: Duration = Duration::from_secs(10);
/// The additional time between two records of the usage metrics for each metric, which limits how
/// fast the recorded data grow.
const INTERVAL_PER_METRIC: Duration = Duration::from_millis(100);

/// Decides when the usage of a run (CPU, memory, GPUs) and its step times are recorded next in
/// MLflow or TensorBoard.
#[derive(Debug)]
pub(crate) struct UsageMetricsSchedule {
    next: Instant,
    /// The attempt and the time of the measurements that were recorded last.
    newest: Option<(u32, f64)>,
}

impl UsageMetricsSchedule {
    /// Creates a schedule whose first record of the usage metrics is due at once.
    pub(crate) fn new() -> UsageMetricsSchedule {
        UsageMetricsSchedule { next: Instant::now(), newest: None }
    }

    /// Returns whether the time has come to record the usage metrics of the run again.
    pub(crate) fn is_due(&self) -> bool {
        Instant::now() >= self.next
    }

    /// Returns the usage metrics of the run if they are to be recorded now, as pairs of name and
    /// value. Returns `None` if no record is due: soon after the last one in the same attempt, or
    /// if there is no newer measurement.
    pub(crate) fn list_due_metrics(&mut self, status: &RunMeasurements) -> Option<Vec<(String, f64)>> {
        let has_restarted = self.newest.is_some_and(|(attempt, _)| attempt != status.attempt);
        let is_known = self.newest.is_some_and(|(_, time)| status.time <= time);
        if status.hosts.is_empty() || is_known || !(self.is_due() || has_restarted) {
            return None;
        }
        let mut metrics = list_usage_metrics(status);
        metrics.push(("launch/restarts".to_owned(), f64::from(status.attempt)));
        let count = u32::try_from(metrics.len()).unwrap_or(u32::MAX);
        self.next = Instant::now() + SHORTEST_RECORD_INTERVAL + INTERVAL_PER_METRIC * count;
        self.newest = Some((status.attempt, status.time));
        Some(metrics)
    }
}

/// Lists the usage of a run's hosts and GPUs and the step times of its ranks, as pairs of metric
/// name and value.
fn list_usage_metrics(status: &RunMeasurements) -> Vec<(String, f64)> {
    let mut metrics = Vec::new();
    if status.hosts.len() <= MAX_HOSTS_WITH_METRICS {
        for host in &status.hosts {
            let name = make_metric_name_part(&host.host);
            let values = list_host_values(&host.usage).into_iter().chain(list_gpu_values(&host.usage.gpus));
            metrics.extend(values.map(|(key, value)| (format!("system/{name}/{key}"), value)));
        }
    } else {
        metrics.extend(summarize_hosts(&status.hosts));
    }
    let mut workers: Vec<(f64, WorkerUsage)> = Vec::new();
    for host in &status.hosts {
        let seconds = host.usage.interval_ms.max(1) as f64 / 1000.0;
        workers.extend(host.usage.workers.iter().map(|worker| (seconds, *worker)));
    }
    workers.sort_unstable_by_key(|(_, worker)| worker.rank);
    for (seconds, worker) in workers.into_iter().take(MAX_RANKS_WITH_METRICS) {
        let prefix = format!("system/rank-{}", worker.rank);
        let cpus = worker.cpu_us as f64 / 1e6 / seconds;
        metrics.push((format!("{prefix}/cpu_utilization_percentage"), 100.0 * cpus));
        metrics.push((format!("{prefix}/memory_usage_megabytes"), worker.rss as f64 / MEGABYTE));
    }
    metrics.extend(list_rank_step_times(status));
    metrics
}

/// Lists two metrics for each rank: the duration of its newest optimizer steps, and this duration
/// without the time spent waiting for other ranks. Lists nothing if they are unknown.
fn list_rank_step_times(status: &RunMeasurements) -> Vec<(String, f64)> {
    if status.step_times.steps == 0 {
        return Vec::new();
    }
    let seconds = |us: u64| us as f64 / 1e6;
    let times = status.step_times.ranks.iter().take(MAX_RANKS_WITH_METRICS).enumerate();
    let values = times.flat_map(|(rank, times)| {
        let work = times.step_us.saturating_sub(times.waiting_us);
        [
            (format!("system/rank-{rank}/step_seconds"), seconds(times.step_us)),
            (format!("system/rank-{rank}/work_seconds"), seconds(work)),
        ]
    });
    values.collect()
}

/// Lists the usage of a host (CPU, memory, disk, network), without that of its GPUs, as pairs of
/// metric name and value.
fn list_host_values(usage: &HostUsage) -> Vec<(String, f64)> {
    let seconds = usage.interval_ms.max(1) as f64 / 1000.0;
    let rate = |bytes: u64| bytes as f64 / MEGABYTE / seconds;
    let memory_share = usage.memory_used as f64 / usage.memory_total.max(1) as f64;
    let values = [
        ("cpu_utilization_percentage", 100.0 * usage.cpu_share),
        ("system_memory_usage_megabytes", usage.memory_used as f64 / MEGABYTE),
        ("system_memory_usage_percentage", 100.0 * memory_share),
        ("disk_read_megabytes_per_second", rate(usage.disk_read)),
        ("disk_written_megabytes_per_second", rate(usage.disk_written)),
        ("network_received_megabytes_per_second", rate(usage.network_received)),
        ("network_sent_megabytes_per_second", rate(usage.network_sent)),
    ];
    values.map(|(key, value)| (key.to_owned(), value)).into()
}

/// Lists the known usage of a host's GPUs as pairs of metric name and value.
fn list_gpu_values(gpus: &[GpuUsage]) -> Vec<(String, f64)> {
    let mut values = Vec::new();
    for gpu in gpus.iter().take(MAX_GPUS_WITH_METRICS) {
        let name = |key: &str| format!("gpu_{}_{key}", gpu.gpu);
        values.extend(gpu.busy_share.map(|share| (name("utilization_percentage"), 100.0 * share)));
        values.extend(gpu.memory_used.map(|used| (name("memory_usage_megabytes"), used as f64 / MEGABYTE)));
    }
    values
}

/// Computes, for all hosts of a run, the mean and the maximum of each host metric and of the
/// utilization of the GPUs.
fn summarize_hosts(hosts: &[HostUsageSample]) -> Vec<(String, f64)> {
    let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for host in hosts {
        for (key, value) in list_host_values(&host.usage) {
            values.entry(format!("system/hosts/{key}")).or_default().push(value);
        }
        for share in host.usage.gpus.iter().filter_map(|gpu| gpu.busy_share) {
            let key = "system/gpus/utilization_percentage".to_owned();
            values.entry(key).or_default().push(100.0 * share);
        }
    }
    let summarize = |(key, values): (String, Vec<f64>)| {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let largest = values.into_iter().fold(f64::NEG_INFINITY, f64::max);
        [(format!("{key}/mean"), mean), (format!("{key}/max"), largest)]
    };
    values.into_iter().flat_map(summarize).collect()
}

/// Converts the name of a host to a valid part of a metric's name. MLflow accepts only these
/// characters.
fn make_metric_name_part(host: &str) -> String {
    let is_accepted = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    host.chars().take(MAX_HOST_BYTES).map(|c| if is_accepted(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::step_times::{RankTimes, StepTimes};

    fn status(hosts: u32) -> RunMeasurements {
        let host = |i: u32| HostUsageSample {
            host: format!("node {i}"),
            time: 1.0,
            usage: HostUsage {
                interval_ms: 2000,
                cpu_share: 0.25,
                memory_total: 4_000_000,
                memory_used: 1_000_000 * u64::from(i + 1),
                disk_read: 8_000_000,
                gpus: vec![GpuUsage { gpu: 1, busy_share: Some(0.5), ..GpuUsage::default() }; 9],
                workers: vec![WorkerUsage {
                    rank: i,
                    rss: 3_000_000,
                    cpu_us: 1_000_000,
                    ..Default::default()
                }],
                ..HostUsage::default()
            },
        };
        let times = RankTimes { step_us: 500_000, waiting_us: 200_000, ..RankTimes::default() };
        RunMeasurements {
            step_times: StepTimes { step: 7, steps: 2, ranks: vec![times; hosts as usize] },
            hosts: (0..hosts).map(host).collect(),
            ..RunMeasurements::default()
        }
    }

    fn find(metrics: &[(String, f64)], name: &str) -> Option<f64> {
        metrics.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
    }

    #[test]
    fn hosts_gpus_and_ranks_have_metrics() {
        let metrics = list_usage_metrics(&status(2));
        for (name, value) in [
            ("system/node_0/cpu_utilization_percentage", 25.0),
            ("system/node_1/system_memory_usage_megabytes", 2.0),
            ("system/node_1/system_memory_usage_percentage", 50.0),
            ("system/node_0/disk_read_megabytes_per_second", 4.0),
            ("system/node_0/gpu_1_utilization_percentage", 50.0),
            ("system/rank-1/cpu_utilization_percentage", 50.0),
            ("system/rank-1/memory_usage_megabytes", 3.0),
            ("system/rank-0/step_seconds", 0.5),
            ("system/rank-0/work_seconds", 0.3),
        ] {
            assert_eq!(find(&metrics, name), Some(value), "{name}");
        }
    }

    #[test]
    fn metrics_are_recorded_after_an_interval_or_a_restart() {
        let mut schedule = UsageMetricsSchedule::new();
        assert_eq!(schedule.list_due_metrics(&RunMeasurements::default()), None, "nothing was measured");
        let first = RunMeasurements { time: 5.0, ..status(2) };
        let metrics = schedule.list_due_metrics(&first).expect("the first record");
        assert_eq!(find(&metrics, "launch/restarts"), Some(0.0));
        assert!(!schedule.is_due());
        assert_eq!(schedule.list_due_metrics(&RunMeasurements { time: 7.0, ..status(2) }), None);
        let restarted = RunMeasurements { time: 9.0, attempt: 1, ..status(2) };
        assert!(
            schedule.list_due_metrics(&restarted).is_some_and(|m| find(&m, "launch/restarts") == Some(1.0))
        );
        schedule.next = Instant::now();
        assert_eq!(schedule.list_due_metrics(&restarted), None, "nothing new was measured");
        assert!(schedule.list_due_metrics(&RunMeasurements { time: 9.5, ..restarted }).is_some());
    }

    #[test]
    fn the_number_of_metrics_is_bounded() {
        for hosts in [1, 16, 17, 5000] {
            assert!(list_usage_metrics(&status(hosts)).len() <= 700, "{hosts}");
        }
        let metrics = list_usage_metrics(&status(20));
        assert_eq!(find(&metrics, "system/hosts/system_memory_usage_megabytes/max"), Some(20.0));
        assert_eq!(find(&metrics, "system/gpus/utilization_percentage/mean"), Some(50.0));
        assert!(find(&metrics, "system/rank-19/step_seconds").is_some());
    }
}
