//! [`StatusKeeper`]: keeps the newest measurements of a run (step times, usage of hosts), and finds
//! the reasons why ranks are slow.
mod held_reports;
mod straggler_text;

use super::core::HostIndex;
use held_reports::HeldReports;
use jobspec::{StragglerSpec, ids::Rank};
use protocol::{
    control::{HostUsage, WorkerUsage},
    event::{Event, StragglerReason, StragglerReport, StragglerState},
    run_measurements::{HostUsageSample, RunMeasurements, STATUS_VERSION},
    step_times::{MAX_TIMED_RANKS, RankTimes, StepTimes},
    straggler::{StragglerDetector, StragglerKind, StragglerRules},
};
use std::collections::{BTreeMap, VecDeque};
use straggler_text::describe_straggler;

/// The number of measurements of each host's usage (CPU, memory, GPUs) that are kept. The reason of
/// a slow rank is searched in all of them.
const KEPT_USAGES_PER_HOST: usize = 4;
/// The largest number of slow ranks that are kept for the status file.
const MAX_STRAGGLERS: usize = 16;
/// The largest number of workers and of GPUs of a host whose usage is kept.
const MAX_WORKERS_OR_GPUS_PER_HOST: usize = 1024;
/// The smallest share of a measuring interval, from 0 to 1, for which a CPU quota must stop a slow
/// rank to explain its slowness.
const MIN_THROTTLED_SHARE: f64 = 0.03;
/// The smallest share of a measuring interval, from 0 to 1, for which a slow rank must wait for a
/// free CPU to explain its slowness.
const MIN_RUN_DELAY_SHARE: f64 = 0.05;
/// The rate of pages read from disk, in pages per second, from which on these reads count as the
/// reason why a rank is slow.
const MIN_MAJOR_FAULTS: f64 = 50.0;

/// The newest measurements of a run: step times, usage of the hosts, and slow ranks. Holds a
/// bounded number of them for each host.
pub(super) struct StatusKeeper {
    attempt: u32,
    step_times: StepTimes,
    /// The newest usages of each host, oldest first, with the time of the newest one.
    hosts: BTreeMap<HostIndex, HostUsageHistory>,
    stragglers: Vec<StragglerReport>,
    held_reports: HeldReports,
    /// Finds slow ranks of programs, whose steps are unknown, by their waiting for CPUs.
    program_detector: Option<StragglerDetector>,
    /// The hosts that have sent a usage since the ranks of the program were compared.
    compared: BTreeMap<HostIndex, Vec<WorkerUsage>>,
}

/// Where one rank runs: the name of its host, and the number of its GPU on this host.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RankPlacement {
    /// The name of the host.
    pub(super) host: String,
    /// The number on its host of the GPU that the rank uses; `None` if unknown.
    pub(super) gpu: Option<u32>,
}

/// The last measurements of the usage (CPU, memory, GPUs) of a host and its workers.
#[derive(Default)]
struct HostUsageHistory {
    host: String,
    time: f64,
    usages: VecDeque<HostUsage>,
}

impl StatusKeeper {
    /// Creates an empty collection of measurements for a new run, which flags slow ranks by the
    /// settings in `spec`. `spec` is `run.straggler` of the job, and `is_program` whether the
    /// workers run a program.
    pub(super) fn new(spec: &StragglerSpec, is_program: bool) -> StatusKeeper {
        let rules = spec.share.map(|share| StragglerRules { share, steps: spec.steps });
        // The network of a program is not measured, so its hosts are not compared.
        let create_detector = |rules| StragglerDetector::new(rules, Vec::new());
        StatusKeeper {
            attempt: 0,
            step_times: StepTimes::default(),
            hosts: BTreeMap::new(),
            stragglers: Vec::new(),
            held_reports: HeldReports::default(),
            program_detector: rules.filter(|_| is_program).map(create_detector),
            compared: BTreeMap::new(),
        }
    }

    /// Removes the measurements of the previous attempt (start of all workers) at the beginning of
    /// the attempt with the number `attempt`.
    pub(super) fn begin_attempt(&mut self, attempt: u32) {
        if attempt != self.attempt {
            (self.attempt, self.step_times) = (attempt, StepTimes::default());
            self.hosts.clear();
            self.stragglers.clear();
            self.held_reports = HeldReports::default();
            self.compared.clear();
        }
    }

    /// Stores how long the newest optimizer steps of the ranks took, in place of the earlier times.
    pub(super) fn set_step_times(&mut self, mut times: StepTimes) {
        times.ranks.truncate(MAX_TIMED_RANKS);
        self.step_times = times;
    }

    /// Stores the newest usage of a host and its workers (CPU, memory, GPUs). `hosts` is the number
    /// of hosts of the attempt. Returns the events about slow ranks of a program, and those that
    /// were held back until this usage.
    pub(super) fn add_host_usage(
        &mut self,
        (host, name): (HostIndex, &str),
        hosts: usize,
        mut usage: HostUsage,
        time: f64,
    ) -> Vec<Event> {
        usage.workers.truncate(MAX_WORKERS_OR_GPUS_PER_HOST);
        usage.gpus.truncate(MAX_WORKERS_OR_GPUS_PER_HOST);
        let workers = usage.workers.clone();
        let interval_us = usage.interval_ms.saturating_mul(1000);
        let kept = self.hosts.entry(host).or_default();
        (kept.host, kept.time) = (name.to_owned(), time);
        kept.usages.push_back(usage);
        if kept.usages.len() > KEPT_USAGES_PER_HOST {
            kept.usages.pop_front();
        }
        let mut events = self.held_reports.take_due(name, time);
        if self.program_detector.is_none() {
            return events;
        }
        self.compared.insert(host, workers);
        if self.compared.len() >= hosts {
            events.extend(self.find_slow_program_ranks(interval_us));
        }
        events
    }

    /// Holds back an event about a newly slow rank if the reason is unknown, until the next
    /// measurement of the rank's host. The rank may have become slow after the newest measurement
    /// of its host, and the next one shows the reason. Returns whether the event is held back.
    /// [`StatusKeeper::add_host_usage`] returns it then.
    pub(super) fn hold_straggler_event(&mut self, event: &Event, time: f64) -> bool {
        let Event::Straggler(report) = event else { return false };
        let waits = report.state == StragglerState::Slow && report.reason.is_none();
        let is_held = waits && self.held_reports.hold(report, time);
        if is_held {
            self.stragglers.retain(|reported| reported.rank != report.rank || reported.kind != report.kind);
        }
        is_held
    }

    /// Removes and returns the events about one slow rank that were held back, so that they are
    /// reported before the newer event `event` about this rank.
    pub(super) fn take_held_events_before(&mut self, event: &Event) -> Vec<Event> {
        match event {
            Event::Straggler(report) => self.held_reports.take_rank(report.rank, report.kind),
            _ => Vec::new(),
        }
    }

    /// Removes and returns all delayed reports about slow ranks, because the attempt (one start of
    /// all workers) has ended.
    pub(super) fn take_held_events(&mut self) -> Vec<Event> {
        self.held_reports.take_all()
    }

    /// Finds the ranks of a program that waited longer for CPUs, or were stopped longer by a CPU
    /// quota, than the other ranks.
    fn find_slow_program_ranks(&mut self, interval_us: u64) -> Vec<Event> {
        let mut workers: Vec<WorkerUsage> =
            std::mem::take(&mut self.compared).into_values().flatten().collect();
        workers.sort_unstable_by_key(|worker| worker.rank);
        let times = |worker: &WorkerUsage| {
            let lost = worker.throttled_us.max(worker.run_delay_us).min(interval_us);
            RankTimes { step_us: interval_us, waiting_us: interval_us - lost, ..RankTimes::default() }
        };
        let times: Vec<RankTimes> = workers.iter().map(times).collect();
        let changes = self.program_detector.as_mut().map(|detector| detector.add_step(0, &times));
        let to_event = |change: protocol::straggler::StragglerChange| {
            let rank = workers.get(change.rank as usize)?.rank;
            let report = StragglerReport { rank, step: None, step_s: None, ..StragglerReport::new(&change) };
            Some(Event::Straggler(Box::new(report)))
        };
        changes.unwrap_or_default().into_iter().filter_map(to_event).collect()
    }

    /// Returns one event for each rank that counts as slow, which reports the end of the slowness
    /// because all workers have ended.
    pub(super) fn list_straggler_end_events(&self) -> Vec<Event> {
        let end = |report: &StragglerReport| {
            Event::Straggler(Box::new(StragglerReport { state: StragglerState::Recovered, ..report.clone() }))
        };
        self.stragglers.iter().map(end).collect()
    }

    /// Adds to the report about a slow rank its host, the likely reason and the message for the
    /// user. `find_placement` returns the host and the GPU of a rank. Changes no other event.
    pub(super) fn complete_straggler_event(
        &mut self,
        event: &mut Event,
        find_placement: impl Fn(Rank) -> Option<RankPlacement>,
    ) {
        let Event::Straggler(report) = event else { return };
        let placement = find_placement(report.rank);
        let gpu = placement.as_ref().and_then(|placement| placement.gpu);
        report.host = placement.map_or_else(String::new, |placement| placement.host);
        let previous = self.stragglers.iter().position(|r| (r.rank, r.kind) == (report.rank, report.kind));
        let previous = previous.map(|at| self.stragglers.remove(at));
        report.reason = match report.state {
            StragglerState::Slow => self.find_slowness_reason(report, gpu),
            StragglerState::Recovered => previous.and_then(|report| report.reason),
        };
        report.message = describe_straggler(report);
        if report.state == StragglerState::Slow && self.stragglers.len() < MAX_STRAGGLERS {
            self.stragglers.push((**report).clone());
        }
    }

    /// Finds the likely reason why a rank is slow (such as a CPU quota or disk reads) in the
    /// measured usages of its host. `gpu` is the GPU of the rank. If it is unknown, each GPU of the
    /// host may be the reason.
    fn find_slowness_reason(&self, report: &StragglerReport, gpu: Option<u32>) -> Option<StragglerReason> {
        if report.kind == StragglerKind::Network {
            return Some(StragglerReason::SlowLink);
        }
        let kept = self.hosts.values().find(|kept| kept.find_newest_worker_usage(report.rank).is_some())?;
        let measured: Vec<(f64, WorkerUsage)> = kept.list_usages_of_worker(report.rank).collect();
        let largest = |amount: fn(&WorkerUsage) -> u64| {
            measured.iter().map(|(seconds, worker)| amount(worker) as f64 / seconds).fold(0.0, f64::max)
        };
        let throttled = (largest(|worker| worker.throttled_us) / 1e6).min(1.0);
        if throttled >= MIN_THROTTLED_SHARE {
            return Some(StragglerReason::CpuQuota { share: throttled });
        }
        if measured.iter().any(|(_, worker)| worker.is_stopped) {
            return Some(StragglerReason::Stopped);
        }
        let newest = kept.usages.back()?;
        let gpus = || newest.gpus.iter().filter(|other| gpu.is_none_or(|gpu| other.gpu == gpu));
        if let Some((gpu, reason)) = gpus().find_map(|g| Some((g.gpu, g.clock_reasons.first()?))) {
            return Some(StragglerReason::GpuClocks { gpu, reason: reason.clone() });
        }
        let faults = largest(|worker| worker.major_faults);
        if faults >= MIN_MAJOR_FAULTS {
            return Some(StragglerReason::PageFaults { per_second: faults });
        }
        let delayed = largest(|worker| worker.run_delay_us) / 1e6;
        if delayed >= MIN_RUN_DELAY_SHARE {
            return Some(StragglerReason::CpuContention { share: delayed });
        }
        let faulty = gpus().find_map(|g| Some((g.gpu, g.memory_errors.filter(|n| *n > 0)?)));
        faulty.map(|(gpu, errors)| StragglerReason::GpuMemoryErrors { gpu, errors })
    }

    /// Builds the content of the run's status file from the newest measurements: step times, usage
    /// of the hosts, and slow ranks.
    pub(super) fn to_status(&self, time: f64) -> RunMeasurements {
        let host = |kept: &HostUsageHistory| {
            let usage = kept.usages.back()?.clone();
            Some(HostUsageSample { host: kept.host.clone(), time: kept.time, usage })
        };
        RunMeasurements {
            version: STATUS_VERSION,
            time,
            attempt: self.attempt,
            step_times: self.step_times.clone(),
            hosts: self.hosts.values().filter_map(host).collect(),
            stragglers: self.stragglers.clone(),
        }
    }
}

impl HostUsageHistory {
    /// Returns the newest usage of the worker with rank `rank` on this host.
    fn find_newest_worker_usage(&self, rank: Rank) -> Option<&WorkerUsage> {
        self.usages.back()?.workers.iter().find(|worker| worker.rank == rank)
    }

    /// Lists the last measured usages of a worker, each with the duration of its interval in
    /// seconds.
    fn list_usages_of_worker(&self, rank: Rank) -> impl Iterator<Item = (f64, WorkerUsage)> {
        self.usages.iter().filter_map(move |usage| {
            let worker = usage.workers.iter().find(|worker| worker.rank == rank)?;
            Some((usage.interval_ms.max(1) as f64 / 1000.0, *worker))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{control::GpuUsage, straggler::StragglerChange};

    fn keeper(is_program: bool) -> StatusKeeper {
        StatusKeeper::new(&StragglerSpec::default(), is_program)
    }

    fn usage(workers: &[WorkerUsage]) -> HostUsage {
        HostUsage { interval_ms: 2000, workers: workers.to_vec(), ..HostUsage::default() }
    }

    fn worker(rank: Rank) -> WorkerUsage {
        WorkerUsage { rank, rss: 1, cpu_us: 1_900_000, ..WorkerUsage::default() }
    }

    fn straggler(rank: Rank, is_slow: bool, kind: StragglerKind) -> Event {
        let change = StragglerChange { is_slow, rank, kind, step: 40, share: 0.234, step_s: 0.5 };
        Event::Straggler(Box::new(StragglerReport::new(&change)))
    }

    /// The GPU of a rank in these tests.
    fn rank_gpu(event: &Event) -> u32 {
        if let Event::Straggler(report) = event { report.rank % 2 + 1 } else { 0 }
    }

    fn complete(keeper: &mut StatusKeeper, mut event: Event) -> StragglerReport {
        let gpu = Some(rank_gpu(&event));
        keeper.complete_straggler_event(&mut event, |rank| {
            Some(RankPlacement { host: format!("node-{rank}"), gpu })
        });
        match event {
            Event::Straggler(report) => *report,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_reason_of_a_slow_rank_is_found_in_the_usage_of_its_host() {
        let base = worker(2);
        let gpu = GpuUsage { gpu: 1, clock_reasons: vec!["too hot".into()], ..GpuUsage::default() };
        let broken = GpuUsage { gpu: 1, memory_errors: Some(2), ..GpuUsage::default() };
        // The GPU of another rank is no reason.
        let other = GpuUsage { gpu: 3, memory_errors: Some(9), ..GpuUsage::default() };
        let slow_cases = [
            (WorkerUsage { throttled_us: 500_000, run_delay_us: 600_000, ..base }, vec![]),
            (WorkerUsage { run_delay_us: 800_000, ..base }, vec![]),
            (WorkerUsage { major_faults: 400, ..base }, vec![]),
            (WorkerUsage { is_stopped: true, ..base }, vec![]),
            (base, vec![gpu]),
            (base, vec![other.clone(), broken]),
            (base, vec![other]),
            (base, vec![]),
        ];
        let mut messages = Vec::new();
        for (slow, gpus) in slow_cases {
            let mut keeper = keeper(false);
            keeper.add_host_usage((0, "node-0"), 2, usage(&[worker(0)]), 1.0);
            keeper.add_host_usage((1, "node-2"), 2, HostUsage { gpus, ..usage(&[slow]) }, 1.0);
            let report = complete(&mut keeper, straggler(2, true, StragglerKind::Work));
            assert_eq!((report.host.as_str(), keeper.to_status(2.0).stragglers.len()), ("node-2", 1));
            messages.push(report.message);
        }
        let mut keeper = keeper(false);
        messages.push(complete(&mut keeper, straggler(1, true, StragglerKind::Network)).message);
        let recovered = complete(&mut keeper, straggler(1, false, StragglerKind::Network));
        assert_eq!(recovered.reason, Some(StragglerReason::SlowLink));
        assert_eq!(keeper.to_status(2.0).stragglers, []);
        messages.push(recovered.message);
        insta::assert_snapshot!(messages.join("\n"));
    }

    #[test]
    fn a_report_without_a_reason_waits_for_the_next_measurement_of_its_host() {
        let mut keeper = keeper(false);
        let place = |rank| Some(RankPlacement { host: format!("node-{rank}"), gpu: None });
        let complete_and_hold = |keeper: &mut StatusKeeper, mut event: Event, time| {
            keeper.complete_straggler_event(&mut event, place);
            keeper.hold_straggler_event(&event, time)
        };
        keeper.add_host_usage((1, "node-1"), 3, usage(&[worker(1)]), 1.0);
        assert!(!complete_and_hold(&mut keeper, straggler(1, true, StragglerKind::Network), 2.0));
        assert!(complete_and_hold(&mut keeper, straggler(1, true, StragglerKind::Work), 2.0));
        assert!(keeper.to_status(2.0).stragglers.iter().all(|s| s.kind == StragglerKind::Network));
        assert_eq!(keeper.add_host_usage((0, "node-0"), 3, usage(&[worker(0)]), 2.5), []);
        let slow = WorkerUsage { throttled_us: 500_000, ..worker(1) };
        let events = keeper.add_host_usage((1, "node-1"), 3, usage(&[slow]), 3.0);
        assert_eq!(events.len(), 1);
        assert!(!complete_and_hold(&mut keeper, events[0].clone(), 3.0), "the reason is known");
        assert_eq!(
            keeper.to_status(3.0).stragglers[1].reason,
            Some(StragglerReason::CpuQuota { share: 0.25 })
        );
        // A host that is not measured does not hold back its report forever.
        assert!(complete_and_hold(&mut keeper, straggler(2, true, StragglerKind::Work), 4.0));
        assert_eq!(keeper.add_host_usage((1, "node-1"), 3, usage(&[slow]), 8.0), []);
        assert_eq!(keeper.add_host_usage((1, "node-1"), 3, usage(&[slow]), 10.0).len(), 1);
        // The end of a report follows the report.
        assert!(complete_and_hold(&mut keeper, straggler(2, true, StragglerKind::Work), 11.0));
        let end = straggler(2, false, StragglerKind::Work);
        assert_eq!(keeper.take_held_events_before(&end).len(), 1);
        assert!(!complete_and_hold(&mut keeper, end, 12.0));
        assert_eq!(keeper.take_held_events(), []);
    }

    #[test]
    fn the_end_of_an_attempt_ends_its_reports() {
        let mut keeper = keeper(false);
        complete(&mut keeper, straggler(1, true, StragglerKind::Work));
        let ends = keeper.list_straggler_end_events();
        assert_eq!(ends.len(), 1);
        let report = complete(&mut keeper, ends.into_iter().next().expect("an event"));
        assert_eq!((report.rank, report.state), (1, StragglerState::Recovered));
        assert_eq!(keeper.list_straggler_end_events(), []);
    }

    #[test]
    fn measurements_are_bounded_and_belong_to_an_attempt() {
        let mut keeper = keeper(false);
        for step in 0..50 {
            keeper.add_host_usage((0, "a"), 1, usage(&vec![worker(0); 5000]), f64::from(step));
            complete(&mut keeper, straggler(step as Rank, true, StragglerKind::Work));
        }
        keeper.set_step_times(StepTimes { step: 1, steps: 1, ranks: vec![RankTimes::default(); 99_999] });
        let status = keeper.to_status(60.0);
        assert_eq!((status.hosts.len(), status.hosts[0].time), (1, 49.0));
        assert_eq!(status.hosts[0].usage.workers.len(), MAX_WORKERS_OR_GPUS_PER_HOST);
        assert_eq!(
            (status.stragglers.len(), status.step_times.ranks.len()),
            (MAX_STRAGGLERS, MAX_TIMED_RANKS)
        );
        assert_eq!(keeper.hosts[&0].usages.len(), KEPT_USAGES_PER_HOST);
        keeper.begin_attempt(1);
        let expected =
            RunMeasurements { version: STATUS_VERSION, time: 61.0, attempt: 1, ..RunMeasurements::default() };
        assert_eq!(keeper.to_status(61.0), expected);
    }

    #[test]
    fn a_rank_of_a_program_that_waits_for_cpus_is_reported() {
        let mut keeper = keeper(true);
        let mut events = Vec::new();
        for _ in 0..20 {
            let slow = WorkerUsage { run_delay_us: 700_000, ..worker(1) };
            events.extend(keeper.add_host_usage((0, "a"), 2, usage(&[worker(0), slow]), 1.0));
            events.extend(keeper.add_host_usage((1, "b"), 2, usage(&[worker(2)]), 1.0));
        }
        assert_eq!(events.len(), 1);
        let report = complete(&mut keeper, events.remove(0));
        assert_eq!((report.rank, report.step, report.step_s), (1, None, None));
        assert_eq!(report.reason, Some(StragglerReason::CpuContention { share: 0.35 }));
    }
}
