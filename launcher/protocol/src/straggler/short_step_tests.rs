//! Tests of the straggler detector with short steps, on simulated CPUs with quotas and other load.
use super::{
    StragglerChange, StragglerDetector, StragglerKind,
    tests::{Noise, RULES, simulate_step_with},
};

/// The period in which the kernel enforces a CPU quota, in microseconds.
const PERIOD_US: u64 = 100_000;
/// The numbers of ranks of the simulated jobs.
const WORLDS: [usize; 3] = [2, 3, 8];

/// A process with a CPU quota. The kernel lets it run until it has used the quota of a period, and
/// stops it for the rest of the period.
struct LimitedProcess {
    quota_us: u64,
    /// The time at which the first period began.
    phase_us: u64,
    /// The current period, and the CPU time that the process may still use in it.
    period: (u64, u64),
}

impl LimitedProcess {
    fn new(quota_us: u64, phase_us: u64) -> LimitedProcess {
        LimitedProcess { quota_us, phase_us, period: (0, quota_us) }
    }

    /// Returns how long the process works on something that needs `cpu_us` of CPU time, if it
    /// begins at the time `begin_us`.
    fn work(&mut self, begin_us: u64, cpu_us: u64) -> u64 {
        let (mut now, mut rest) = (begin_us, cpu_us);
        while rest > 0 {
            let number = (now + self.phase_us) / PERIOD_US;
            if number != self.period.0 {
                self.period = (number, self.quota_us);
            }
            let end = (number + 1) * PERIOD_US - self.phase_us;
            let slice = rest.min(self.period.1).min(end - now);
            (now, rest, self.period.1) = (now + slice, rest - slice, self.period.1 - slice);
            if rest > 0 && self.period.1 == 0 {
                now = end;
            }
        }
        now - begin_us
    }
}

#[test]
fn a_limited_process_runs_for_its_quota_in_each_period() {
    let mut process = LimitedProcess::new(80_000, 0);
    assert_eq!(process.work(0, 50_000), 50_000);
    assert_eq!(process.work(50_000, 40_000), 60_000, "stopped from 80 ms to 100 ms");
    assert_eq!(process.work(110_000, 200_000), 240_000, "two stops");
    assert_eq!(LimitedProcess::new(80_000, 99_999).work(0, 80_000), 80_000, "in two periods");
}

/// A simulated job, whose ranks run collectives for a part of each step.
#[derive(Clone, Copy, Debug)]
struct LimitedJob {
    ranks: usize,
    step_ms: u64,
    collective_percent: u64,
}

/// Runs a job that is quiet for some steps, and whose last rank then gets a quota of 80 % of the
/// CPU time that it used. Returns the first report and the number of steps since the quota.
fn run_with_quota(job: LimitedJob, seed: u64) -> Option<(StragglerChange, u64)> {
    let LimitedJob { ranks, step_ms, collective_percent } = job;
    let mut noise = Noise(seed * 1000 + step_ms);
    let collective_us = step_ms * 10 * collective_percent;
    let work_us = step_ms * 1000 - collective_us;
    let quota_us = PERIOD_US * 8 / 10 * work_us / (step_ms * 1000);
    let mut process = LimitedProcess::new(quota_us, (noise.next_fraction() * PERIOD_US as f64) as u64);
    let mut detector = StragglerDetector::new(RULES, (0..ranks).collect());
    let quiet = 30 + (noise.next_fraction() * 10.0) as u64;
    let mut now_us = 0;
    (1..=quiet + 60).find_map(|step| {
        let mut work: Vec<u64> =
            (0..ranks).map(|_| (work_us as f64 * (1.0 + 0.03 * noise.next_fraction())) as u64).collect();
        if step > quiet {
            work[ranks - 1] = process.work(now_us, work[ranks - 1]);
        }
        let times = simulate_step_with(&work, collective_us);
        now_us += times[0].step_us;
        let change = detector.add_step(step, &times).into_iter().next()?;
        Some((change, step.saturating_sub(quiet)))
    })
}

#[test]
fn a_rank_with_a_quota_of_80_percent_is_named_within_20_short_steps() {
    const SEEDS: u64 = 40;
    let steps = [50, 60, 70, 100, 140, 200, 300].into_iter();
    let jobs = steps.flat_map(|step_ms| WORLDS.map(|ranks| (step_ms, ranks)));
    for (step_ms, ranks) in jobs {
        for collective_percent in [5, 15] {
            let job = LimitedJob { ranks, step_ms, collective_percent };
            let mut named_in_time = 0;
            for seed in 0..SEEDS {
                let found = run_with_quota(job, seed);
                let context = format!("{job:?}, seed {seed}: {found:?}");
                let (change, steps) = found.unwrap_or_else(|| panic!("{context}"));
                let expected = (true, ranks as u32 - 1, StragglerKind::Work);
                assert_eq!((change.is_slow, change.rank, change.kind), expected, "{context}");
                // With some phases of the quota, too few of the windows are slow at first.
                assert!((1..=30).contains(&steps), "{context}");
                named_in_time += u64::from(steps <= 20);
            }
            assert!(named_in_time * 100 >= SEEDS * 85, "{job:?}: {named_in_time} of {SEEDS}");
        }
    }
}

/// Simulates the work of a rank in one step: it varies by 15 %, 4 % of the steps have a pause that
/// triples the work, and other processes take the CPU `slices_per_s` times per second for 1 ms to
/// 8 ms.
fn simulate_busy_work(work_us: u64, slices_per_s: f64, noise: &mut Noise) -> u64 {
    let pause = if noise.next_fraction() < 0.04 { 2.0 } else { 0.0 };
    let mut total = work_us as f64 * (1.0 + 0.15 * noise.next_fraction() + pause);
    // The times between slices have an exponential distribution.
    let wait = |noise: &mut Noise| -(1.0 - noise.next_fraction()).ln() / slices_per_s * 1e6;
    let mut next = wait(noise);
    while next < work_us as f64 {
        total += 1000.0 + 7000.0 * noise.next_fraction();
        next += wait(noise);
    }
    total as u64
}

#[test]
fn no_rank_is_named_in_2000_quiet_short_steps() {
    for (step_ms, ranks) in [5, 20, 50, 140, 300].into_iter().flat_map(|s| WORLDS.map(|n| (s, n))) {
        for (seed, slices_per_s) in [0.1, 5.0, 10.0, 20.0].into_iter().enumerate() {
            let mut noise = Noise(seed as u64 * 1000 + step_ms);
            let mut detector = StragglerDetector::new(RULES, (0..ranks).collect());
            let collective_us = step_ms * 120;
            for step in 1..=2000 {
                let work_us = step_ms * 1000 - collective_us;
                let work: Vec<u64> =
                    (0..ranks).map(|_| simulate_busy_work(work_us, slices_per_s, &mut noise)).collect();
                let changes = detector.add_step(step, &simulate_step_with(&work, collective_us));
                assert_eq!(changes, [], "{ranks} ranks, steps of {step_ms} ms, {slices_per_s} slices/s");
            }
        }
    }
}

#[test]
fn the_number_of_steps_of_the_rules_is_a_number_of_steps() {
    // Windows of one step, of two steps and of five steps.
    let cases = [(100, 25, 25), (60, 25, 26), (20, 100, 100), (60, 1, 2), (300, 1, 1)];
    // The smallest numbers of windows.
    let short_cases = [(100, 10, 10), (60, 10, 16), (20, 10, 60), (20, 2, 20)];
    for (step_ms, steps, expected) in cases.into_iter().chain(short_cases) {
        let mut detector = StragglerDetector::new(super::StragglerRules { share: 0.1, steps }, vec![0; 3]);
        let work = [1, 1, 2].map(|factor| factor * step_ms * 500);
        let named =
            (1..=200).find(|step| !detector.add_step(*step, &simulate_step_with(&work, 0)).is_empty());
        assert_eq!(named, Some(expected), "{steps} steps of {step_ms} ms");
    }
}
