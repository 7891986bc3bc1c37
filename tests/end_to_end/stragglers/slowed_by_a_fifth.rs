//! Tests how soon a rank is named that a CPU quota slows down by a fifth.
use super::{KilledAtEnd, SETTINGS, cpu_quota_group::CpuQuotaGroup};
use crate::support::{
    JobDirectory,
    live_run::{LiveEvents, find_worker},
    report_skip,
};
use serde_json::Value;
use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// The number of slow steps within which the rank must be named.
const MAX_STEPS: u64 = 20;
/// The number of further steps until the report. The quota begins during a step, which is not slow
/// as a whole. The times of a step are sent to rank 0 together with the losses of the next step.
const MORE_STEPS: u64 = 2;
/// The number of steps after which an attempt is given up.
const LAST_STEP: u64 = 3 * MAX_STEPS;
/// The share of its CPU time that the rank may use with the quota.
const QUOTA_SHARE: f64 = 0.8;
/// The time after which no further attempt begins. An attempt takes 15 s on an idle machine.
const LAST_BEGIN: Duration = Duration::from_secs(180);
/// The time for which the CPU time of the ranks is measured before the quota.
const MEASURED_TIME: Duration = Duration::from_secs(3);
/// The smallest share of its quota that the rank uses if nothing else slows it down. A rank that
/// waits for other ranks or for CPUs uses less.
const MIN_USED_SHARE: f64 = 0.93;
/// The largest share of the time for which an undisturbed rank waits for CPUs.
const MAX_DELAYED_SHARE: f64 = 0.05;

/// The CPU time of a process, and the time for which its threads waited for CPUs, in seconds.
struct CpuTimes {
    read_at: Instant,
    used: f64,
    delayed: f64,
}

/// The CPU times of a process per second.
#[derive(Debug)]
struct CpuRates {
    used: f64,
    delayed: f64,
}

impl CpuTimes {
    fn read(pid: u32) -> CpuTimes {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        // the fields 14 and 15, in ticks of 10 ms
        let ticks = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        // the second field of each thread, in nanoseconds
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs").flatten();
        let read_delay = |task: fs::DirEntry| {
            let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split(' ').nth(1)?.parse::<f64>().ok()
        };
        let delayed = tasks.filter_map(read_delay).sum::<f64>() / 1e9;
        CpuTimes { read_at: Instant::now(), used: ticks as f64 / 100.0, delayed }
    }

    /// Reads the times of the process again, and returns the mean rates since then.
    fn read_rates(&self, pid: u32) -> CpuRates {
        let now = CpuTimes::read(pid);
        let seconds = (now.read_at - self.read_at).as_secs_f64();
        CpuRates { used: (now.used - self.used) / seconds, delayed: (now.delayed - self.delayed) / seconds }
    }
}

/// The result of a run in which rank 1 got a quota.
#[derive(Debug)]
struct Attempt {
    /// The number of steps from the quota to the report; `None` if rank 1 was not named.
    steps: Option<u64>,
    report: Option<Value>,
    /// The rates of both ranks before the quota, and with the quota.
    before: [CpuRates; 2],
    limited: [CpuRates; 2],
}

impl Attempt {
    /// Trains with two ranks, and limits the CPU time of rank 1 until it is named. Returns `None`
    /// if this is not possible.
    fn run() -> Option<Attempt> {
        // The groups are dropped last, because they can be removed only after their processes have
        // ended.
        let groups = [CpuQuotaGroup::create()?, CpuQuotaGroup::create()?];
        // Other processes of this machine, such as those of tests that have just ended, must not
        // slow down a rank.
        groups.iter().for_each(CpuQuotaGroup::set_largest_weight);
        let job = JobDirectory::new();
        // A step takes 100 to 200 ms on an idle machine.
        let settings = ["cluster.workers_per_host=2", "train.batch.global=20"];
        let settings: Vec<&str> =
            SETTINGS.iter().copied().filter(|s| !s.contains("workers_per")).chain(settings).collect();
        let mut run = KilledAtEnd(job.start(&settings));
        let mut events = LiveEvents::read(&mut run.0);
        events.wait_until_step(4, |_| false);
        let workers = [0, 1].map(|rank| find_worker(&job, rank));
        for (group, worker) in groups.iter().zip(workers) {
            group.add(worker);
        }
        let times = workers.map(CpuTimes::read);
        thread::sleep(MEASURED_TIME);
        let before = [0, 1].map(|rank| times[rank].read_rates(workers[rank]));
        let times = workers.map(CpuTimes::read);
        let step = events.newest_step();
        groups[1].set_quota((before[1].used * QUOTA_SHARE * 100_000.0) as u64);
        let report = events.wait_until_step(step + LAST_STEP, |event| {
            event["event"] == "straggler" && event["rank"] == 1 && event["state"] == "slow"
        });
        let limited = [0, 1].map(|rank| times[rank].read_rates(workers[rank]));
        let named_at = report.as_ref().map(|report| report["step"].as_u64().expect("a number"));
        Some(Attempt { steps: named_at.and_then(|at| at.checked_sub(step)), report, before, limited })
    }

    /// Returns whether the rank was named in time, and with the quota as the reason.
    fn is_named_in_time(&self) -> bool {
        let is_quota = |report: &Value| report["kind"] == "work" && report["reason"]["kind"] == "cpu_quota";
        self.steps.is_some_and(|steps| steps <= MAX_STEPS + MORE_STEPS)
            && self.report.as_ref().is_some_and(is_quota)
    }

    /// Returns whether other load slowed down a rank, so that the quota did not slow down rank 1 by
    /// a fifth compared with rank 0, or is not the only reason.
    fn is_disturbed(&self) -> bool {
        let quota = self.before[1].used * QUOTA_SHARE;
        // The kernel may count the time for which a quota stops a thread as waiting for CPUs.
        let unlimited = [&self.before[0], &self.before[1], &self.limited[0]];
        unlimited.iter().any(|rates| rates.delayed > MAX_DELAYED_SHARE)
            || self.limited[1].used < quota * MIN_USED_SHARE
    }
}

#[test]
fn a_rank_slowed_by_a_fifth_is_named_within_20_steps() {
    let (began, mut disturbed) = (Instant::now(), Vec::new());
    while began.elapsed() < LAST_BEGIN {
        let Some(attempt) = Attempt::run() else {
            return report_skip("stragglers", "cgroups with CPU quotas cannot be created");
        };
        eprintln!("{attempt:?}");
        if attempt.is_named_in_time() {
            return;
        }
        assert!(attempt.is_disturbed(), "not named in time: {attempt:?}");
        disturbed.push(attempt);
    }
    report_skip("stragglers", &format!("other load disturbed all attempts: {disturbed:?}"));
}
