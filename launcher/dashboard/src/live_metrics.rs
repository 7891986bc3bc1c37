//! The Prometheus metrics of each rank, host and GPU, whose values are the newest measurements of
//! an active run.
use protocol::{
    control::{GpuUsage, HostUsage, WorkerUsage},
    run_measurements::RunMeasurements,
    step_times::RankTimes,
};

/// A Prometheus metric (a gauge) that each rank, host or GPU of an active run has, such as
/// `launch_rank_rss_bytes`.
pub(crate) struct LiveMetric {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    value: LiveMetricSource,
}

/// The function that reads the value of a metric from the measurements of a rank, a host or a GPU.
enum LiveMetricSource {
    /// A time of a rank in microseconds, summed over several steps. The metric is the mean per step
    /// in seconds.
    Time(fn(&RankTimes) -> u64),
    /// A value of a rank. The second argument is the measured interval in seconds.
    Worker(fn(&WorkerUsage, f64) -> f64),
    /// A value of a host. The second argument is the measured interval in seconds.
    Host(fn(&HostUsage, f64) -> Option<f64>),
    /// A value of a GPU.
    Gpu(fn(&GpuUsage) -> Option<f64>),
}

/// One value of a Prometheus metric together with its labels, such as `rank`, as pairs of label
/// name and label value.
pub(crate) type LabeledValue = (Vec<(&'static str, String)>, f64);

/// Creates a Prometheus metric from its name, its help text, and the function that reads its values
/// from a run's measurements.
const fn new_live_metric(name: &'static str, help: &'static str, value: LiveMetricSource) -> LiveMetric {
    LiveMetric { name, help, value }
}

/// All Prometheus metrics of ranks, hosts and GPUs.
pub(crate) const LIVE_METRICS: [LiveMetric; 22] = [
    new_live_metric(
        "launch_rank_step_seconds",
        "Mean duration of the newest steps.",
        LiveMetricSource::Time(|times| times.step_us),
    ),
    new_live_metric(
        "launch_rank_work_seconds",
        "Mean time per step in which the rank itself worked.",
        LiveMetricSource::Time(RankTimes::work_us),
    ),
    new_live_metric(
        "launch_rank_waiting_seconds",
        "Mean time per step for which the computation waited for collectives.",
        LiveMetricSource::Time(|times| times.waiting_us),
    ),
    new_live_metric(
        "launch_rank_collective_seconds",
        "Mean time per step for which collectives ran.",
        LiveMetricSource::Time(|times| times.collective_us),
    ),
    new_live_metric(
        "launch_rank_rss_bytes",
        "Resident memory.",
        LiveMetricSource::Worker(|w, _| w.rss as f64),
    ),
    new_live_metric(
        "launch_rank_cpus",
        "Number of CPUs that the threads used on average.",
        LiveMetricSource::Worker(|w, seconds| w.cpu_us as f64 / 1e6 / seconds),
    ),
    new_live_metric(
        "launch_rank_run_delay_cpus",
        "Number of threads that waited for a CPU on average.",
        LiveMetricSource::Worker(|w, seconds| w.run_delay_us as f64 / 1e6 / seconds),
    ),
    new_live_metric(
        "launch_rank_throttled_ratio",
        "Share of the time for which a CPU quota stopped the rank.",
        LiveMetricSource::Worker(|w, seconds| w.throttled_us as f64 / 1e6 / seconds),
    ),
    new_live_metric(
        "launch_rank_major_faults_per_second",
        "Pages per second that were read from disks.",
        LiveMetricSource::Worker(|w, seconds| w.major_faults as f64 / seconds),
    ),
    new_live_metric(
        "launch_host_cpus",
        "CPUs of the host.",
        LiveMetricSource::Host(|h, _| Some(f64::from(h.cpus))),
    ),
    new_live_metric(
        "launch_host_cpu_busy_ratio",
        "Share of the time for which the CPUs were busy.",
        LiveMetricSource::Host(|h, _| Some(h.cpu_share)),
    ),
    new_live_metric(
        "launch_host_memory_bytes",
        "Memory of the host.",
        LiveMetricSource::Host(|h, _| Some(h.memory_total as f64)),
    ),
    new_live_metric(
        "launch_host_memory_used_bytes",
        "Memory in use.",
        LiveMetricSource::Host(|h, _| Some(h.memory_used as f64)),
    ),
    new_live_metric(
        "launch_host_cgroup_memory_limit_bytes",
        "Limit of the control group of the job.",
        LiveMetricSource::Host(|h, _| h.cgroup_memory_limit.map(|n| n as f64)),
    ),
    new_live_metric(
        "launch_host_cgroup_memory_used_bytes",
        "Memory that the control group uses.",
        LiveMetricSource::Host(|h, _| h.cgroup_memory_used.map(|n| n as f64)),
    ),
    new_live_metric(
        "launch_host_disk_read_bytes_per_second",
        "Bytes per second read from disks.",
        LiveMetricSource::Host(|h, seconds| Some(h.disk_read as f64 / seconds)),
    ),
    new_live_metric(
        "launch_host_disk_written_bytes_per_second",
        "Bytes per second written to disks.",
        LiveMetricSource::Host(|h, seconds| Some(h.disk_written as f64 / seconds)),
    ),
    new_live_metric(
        "launch_host_network_received_bytes_per_second",
        "Bytes per second received over the network.",
        LiveMetricSource::Host(|h, seconds| Some(h.network_received as f64 / seconds)),
    ),
    new_live_metric(
        "launch_host_network_sent_bytes_per_second",
        "Bytes per second sent over the network.",
        LiveMetricSource::Host(|h, seconds| Some(h.network_sent as f64 / seconds)),
    ),
    new_live_metric(
        "launch_gpu_busy_ratio",
        "Share of the time for which the GPU was busy.",
        LiveMetricSource::Gpu(|gpu| gpu.busy_share),
    ),
    new_live_metric(
        "launch_gpu_memory_used_bytes",
        "Memory of the GPU in use.",
        LiveMetricSource::Gpu(|gpu| gpu.memory_used.map(|n| n as f64)),
    ),
    new_live_metric(
        "launch_gpu_clocks_reduced",
        "Whether a fault reduces the clocks of the GPU.",
        LiveMetricSource::Gpu(|gpu| Some(f64::from(u8::from(!gpu.clock_reasons.is_empty())))),
    ),
];

impl LiveMetric {
    /// Lists the values of the metric for all ranks, hosts or GPUs of a run, with labels such as
    /// the rank.
    pub(crate) fn list_samples(&self, status: &RunMeasurements) -> Vec<LabeledValue> {
        let rank_label = |rank: u32| vec![("rank", rank.to_string())];
        let hosts = status
            .hosts
            .iter()
            .map(|host| (&host.host, &host.usage, host.usage.interval_ms.max(1) as f64 / 1000.0));
        match &self.value {
            LiveMetricSource::Time(time) => {
                let steps = status.step_times.steps.max(1) as f64;
                let ranks = (0..).zip(&status.step_times.ranks);
                ranks.map(|(rank, times)| (rank_label(rank), time(times) as f64 / 1e6 / steps)).collect()
            }
            LiveMetricSource::Worker(value) => {
                let of_host = |(_, usage, seconds): (_, &HostUsage, f64)| {
                    let sample = |w: &WorkerUsage| (rank_label(w.rank), value(w, seconds));
                    usage.workers.iter().map(sample).collect::<Vec<_>>()
                };
                hosts.flat_map(of_host).collect()
            }
            LiveMetricSource::Host(value) => hosts
                .filter_map(|(host, usage, seconds)| {
                    Some((vec![("host", host.clone())], value(usage, seconds)?))
                })
                .collect(),
            LiveMetricSource::Gpu(value) => {
                let of_host = |(host, usage, _): (&String, &HostUsage, f64)| {
                    let labels = |gpu: &GpuUsage| vec![("host", host.clone()), ("gpu", gpu.gpu.to_string())];
                    let sample = |gpu: &GpuUsage| Some((labels(gpu), value(gpu)?));
                    usage.gpus.iter().filter_map(sample).collect::<Vec<_>>()
                };
                hosts.flat_map(of_host).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{run_measurements::HostUsageSample, step_times::StepTimes};

    #[test]
    fn ranks_hosts_and_gpus_have_samples() {
        let times = |waiting_us| RankTimes { step_us: 1_000_000, waiting_us, ..RankTimes::default() };
        let usage = HostUsage {
            interval_ms: 2000,
            network_sent: 4000,
            gpus: vec![GpuUsage { gpu: 1, busy_share: Some(0.75), ..GpuUsage::default() }],
            workers: vec![WorkerUsage { rank: 1, throttled_us: 500_000, ..WorkerUsage::default() }],
            ..HostUsage::default()
        };
        let status = RunMeasurements {
            step_times: StepTimes { step: 9, steps: 2, ranks: vec![times(600_000), times(200_000)] },
            hosts: vec![HostUsageSample { host: "a".into(), time: 1.0, usage }],
            ..RunMeasurements::default()
        };
        let list = |name: &str| {
            let metric = LIVE_METRICS.iter().find(|metric| metric.name == name).expect("a metric");
            metric.list_samples(&status)
        };
        let label = |name, value: &str| (name, value.to_owned());
        let work = [(vec![label("rank", "0")], 0.2), (vec![label("rank", "1")], 0.4)];
        assert_eq!(list("launch_rank_work_seconds"), work);
        assert_eq!(list("launch_rank_throttled_ratio"), [(vec![label("rank", "1")], 0.25)]);
        assert_eq!(list("launch_host_network_sent_bytes_per_second"), [(vec![label("host", "a")], 2000.0)]);
        assert_eq!(list("launch_host_cgroup_memory_limit_bytes"), []);
        assert_eq!(list("launch_gpu_busy_ratio"), [(vec![label("host", "a"), label("gpu", "1")], 0.75)]);
    }
}
