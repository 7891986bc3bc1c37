//! [`StragglerDetector`]: finds a rank that makes all others wait, from the step times of all
//! ranks.
//!
//! All ranks of a synchronous training wait for each other, so every rank has the same step time.
//! The rank that slows the others down is the one that waits least: its own work takes longest.
//! Likewise, data of a rank with a slow network is on its way longest.
//!
//! The detector is pure: it knows no clock, and gets the times of each step.
mod host_links;
mod statistics;

use crate::step_times::RankTimes;
use host_links::compute_network_delay_shares;
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};
use statistics::compute_excesses;

/// The shortest duration, in microseconds, of a window (group of consecutive steps) over which the
/// ranks are compared to find a slow one. Shorter steps are summed.
///
/// The kernel enforces CPU quotas in periods of 100 ms. A rank with a quota is slow only in some of
/// its shorter steps, but is stopped at least once in almost every time of this length.
const MIN_WINDOW_US: u64 = 100_000;
/// The smallest number of windows (groups of consecutive steps) over which a rank must be slow
/// before it is reported, if a window has one or two steps. Windows of two steps reach this number
/// after 16 steps. A smaller number would report the random delays of threads on a busy host.
const MIN_WINDOWS: u32 = 8;
/// The smallest number of windows (groups of consecutive steps) over which a rank must be slow
/// before it is reported, if a window has three or more steps. Such a window contains more of the
/// pauses that affect single steps, so more of the windows of a quiet rank are slow.
const MIN_WINDOWS_OF_SHORT_STEPS: u32 = 12;
/// The largest delay that counts against a rank in one window (group of steps), as a multiple of
/// the limit `run.straggler.share`.
///
/// The detector compares the mean of two consecutive windows with the threshold. A quota stops a
/// rank more often in some windows than in others: one of 80 % may cost 6 % and 30 % of consecutive
/// windows of 150 ms, of which the rank waits for collectives for 30 %. With this limit, the mean
/// of such windows is still above the threshold, but that of a long pause and a quiet window is
/// not.
const MAX_COUNTED_FACTOR: f64 = 1.5;
/// The number by which a rank's count of slow windows (groups of steps) falls after a window in
/// which the rank clearly was not slow. A rank that is slow in most windows is found even if there
/// is noise. With a smaller number, pauses of 4 % of the steps and delays by other processes would
/// add up to a report.
const FAST_WINDOW_PENALTY: u32 = 2;
/// The delay below which a window (group of steps) lowers a rank's count of slow windows, as a
/// fraction of the limit `run.straggler.share`. The mean of a window in which a quota has not
/// stopped the rank and another one is above this fraction.
const FAST_WINDOW_FACTOR: f64 = 0.7;
/// The delay below which a rank that was reported as slow counts as recovered, as a fraction of the
/// limit `run.straggler.share`.
const RECOVERY_FACTOR: f64 = 0.5;
/// The smallest extra network delay per optimizer step, in microseconds, that is reported as a slow
/// network. A thread that waits for a busy CPU receives data later by several time slices of the
/// scheduler.
const MIN_NETWORK_DELAY_US: u64 = 20_000;

/// The settings `run.straggler`: the share of the step time that a rank must cost, and for how many
/// steps, to be reported as slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StragglerRules {
    /// The share of the step time that a rank must cost, from 0 to 1.
    pub share: f64,
    /// The number of steps for which it must do so.
    pub steps: u32,
}

/// The cause of a rank's slowness: its own computation between collectives, or the network of its
/// host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StragglerKind {
    /// The work of the rank between collectives.
    Work,
    /// The network between the rank's host and other hosts.
    Network,
}

/// A result of the straggler detector: a rank began to slow down the other ranks, or ceased to do
/// so.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StragglerChange {
    /// Whether the rank is slow from now on. Otherwise it is no longer slow.
    pub is_slow: bool,
    /// The slow rank. For a slow network, the first rank of the host.
    pub rank: Rank,
    /// What is slow.
    pub kind: StragglerKind,
    /// The number of optimizer steps that are done.
    pub step: u64,
    /// The share of the step time that the rank costs, as the mean over the compared steps.
    pub share: f64,
    /// The mean duration of a step, in seconds.
    pub step_s: f64,
}

/// Detects, from the step times of all ranks, a rank whose work or network slows down the others.
#[derive(Clone, Debug)]
pub struct StragglerDetector {
    rules: StragglerRules,
    /// For each rank: the number of its host.
    hosts: Vec<usize>,
    /// The sums over the steps since the last comparison.
    window: Vec<RankTimes>,
    /// The number of steps in the window.
    window_steps: u64,
    work: SlownessCounts,
    network: SlownessCounts,
}

/// The search for a rank that is slow for one cause, computation or network: how many windows
/// (groups of steps) each rank was slow in.
#[derive(Clone, Debug, Default)]
struct SlownessCounts {
    ranks: Vec<SlowWindows>,
    /// The rank that was reported, and the number of windows in turn in which it was not slow.
    reported: Option<(Rank, u32)>,
}

/// How slow one rank was recently: its count of slow windows (groups of steps), and the share of
/// time that it cost the other ranks.
#[derive(Clone, Copy, Debug, Default)]
struct SlowWindows {
    /// The share that the rank has cost in the newest window, as far as it counts.
    newest: f64,
    /// The mean share of the newest two windows, as far as it counts.
    mean: f64,
    /// The number of windows in which the rank was slow, less those in which it was not. A
    /// rank is slow in a window if the mean of this window and the one before is.
    count: u32,
    /// The sum of the shares that the rank has cost since `count` was 0.
    share_sum: f64,
    /// The number of windows since `count` was 0.
    windows: u32,
}

impl StragglerDetector {
    /// Creates a detector of slow ranks with the limits `rules`, before the first step. `hosts` has
    /// a number for each rank, which is the same for the ranks of a host. With another number of
    /// ranks, networks are not compared.
    pub fn new(rules: StragglerRules, hosts: Vec<usize>) -> StragglerDetector {
        let (work, network) = (SlownessCounts::default(), SlownessCounts::default());
        StragglerDetector { rules, hosts, window: Vec::new(), window_steps: 0, work, network }
    }

    /// Adds the durations of one optimizer step of all ranks, and compares the ranks whenever the
    /// collected steps are long enough. Returns the ranks that began or ceased to slow down the
    /// others.
    ///
    /// If the network of a host is slow, the changed rank is the first rank of the host.
    pub fn add_step(&mut self, step: u64, ranks: &[RankTimes]) -> Vec<StragglerChange> {
        if self.window.len() != ranks.len() {
            *self = StragglerDetector::new(self.rules, std::mem::take(&mut self.hosts));
            self.window = vec![RankTimes::default(); ranks.len()];
        }
        self.window.iter_mut().zip(ranks).for_each(|(sum, times)| sum.add(times));
        self.window_steps += 1;
        let duration = self.window.iter().map(|times| times.step_us).max().unwrap_or(0);
        if duration < MIN_WINDOW_US || ranks.len() < 2 {
            return Vec::new();
        }
        let step_s = duration as f64 / 1e6 / self.window_steps as f64;
        let work = compute_work_delay_shares(&self.window, duration);
        let min_delay = MIN_NETWORK_DELAY_US.saturating_mul(self.window_steps);
        let network = compute_network_delay_shares(&self.window, &self.hosts, duration, min_delay);
        let limits = WindowLimits::new(&self.rules, self.window_steps);
        let compared = [
            (StragglerKind::Work, &mut self.work, work),
            (StragglerKind::Network, &mut self.network, network),
        ];
        let mut changes = Vec::new();
        for (kind, track, shares) in compared {
            let change = track.add_window(limits, &shares);
            changes.extend(change.map(|(is_slow, rank, share)| StragglerChange {
                is_slow,
                rank,
                kind,
                step,
                share,
                step_s,
            }));
        }
        self.window.fill(RankTimes::default());
        self.window_steps = 0;
        changes
    }
}

/// The limits above which a rank is reported as slow: the share of time that it costs the others,
/// and its number of slow windows (groups of steps).
#[derive(Clone, Copy, Debug)]
struct WindowLimits {
    /// The share of the time that a slow rank costs.
    share: f64,
    /// The number of windows in which a rank must be slow.
    windows: u32,
}

impl WindowLimits {
    /// Computes from `rules`, the user's settings `run.straggler`, the limits for windows (groups
    /// of consecutive steps) of `steps` optimizer steps each.
    fn new(rules: &StragglerRules, steps: u64) -> WindowLimits {
        let steps = u32::try_from(steps).unwrap_or(u32::MAX).max(1);
        // The user may ask for reports after fewer steps.
        let min_windows = match steps {
            1 | 2 => MIN_WINDOWS.min(rules.steps),
            _ => MIN_WINDOWS_OF_SHORT_STEPS.min(rules.steps.saturating_mul(2)),
        };
        WindowLimits { share: rules.share, windows: rules.steps.div_ceil(steps).max(min_windows) }
    }

    /// Returns how many pairs of consecutive windows (groups of steps) must be slow before a rank
    /// is reported: the number of windows less one, at least 1.
    fn count_pairs(&self) -> u32 {
        self.windows.saturating_sub(1).max(1)
    }
}

impl SlownessCounts {
    /// Counts a new window (group of steps) for all ranks, where `shares` contains the share of the
    /// window that each rank cost the others. Returns whether a rank became slow, the rank, and the
    /// mean share that it costs; `None` if nothing has changed.
    fn add_window(&mut self, limits: WindowLimits, shares: &[f64]) -> Option<(bool, Rank, f64)> {
        self.ranks.resize(shares.len(), SlowWindows::default());
        self.ranks.iter_mut().zip(shares).for_each(|(rank, share)| rank.add_window(limits, *share));
        if let Some((rank, fast_windows)) = self.reported {
            let share = shares.get(rank as usize).copied().unwrap_or(0.0);
            let mean = self.ranks.get(rank as usize).map_or(0.0, |rank| rank.mean);
            let is_fast = mean < limits.share * RECOVERY_FACTOR;
            let fast_windows = if is_fast { fast_windows + 1 } else { 0 };
            self.reported = Some((rank, fast_windows)).filter(|_| fast_windows < limits.count_pairs());
            return self.reported.is_none().then_some((false, rank, share));
        }
        let slow = (0..).zip(&self.ranks).filter(|(_, slow)| slow.count >= limits.count_pairs());
        let (rank, slow) = slow.max_by(|(_, a), (_, b)| a.mean_share().total_cmp(&b.mean_share()))?;
        self.reported = Some((rank, 0));
        Some((true, rank, slow.mean_share()))
    }
}

impl SlowWindows {
    /// Counts a new window (group of steps) for one rank, in which the other ranks lost the share
    /// `share` of the time to this rank.
    fn add_window(&mut self, limits: WindowLimits, share: f64) {
        let counted = share.min(limits.share * MAX_COUNTED_FACTOR);
        // The user may ask for a report after one window.
        self.mean = if limits.windows == 1 { counted } else { (self.newest + counted) / 2.0 };
        self.newest = counted;
        if self.mean >= limits.share {
            self.count = (self.count + 1).min(limits.count_pairs());
        } else if self.mean < limits.share * FAST_WINDOW_FACTOR {
            self.count = self.count.saturating_sub(FAST_WINDOW_PENALTY);
        }
        (self.share_sum, self.windows) = match self.count {
            0 => (0.0, 0),
            _ => (self.share_sum + share, self.windows + 1),
        };
    }

    /// Returns the mean share of time that the rank has cost the others over the windows (groups of
    /// steps) since its count of slow windows was 0.
    fn mean_share(&self) -> f64 {
        self.share_sum / f64::from(self.windows.max(1))
    }
}

/// Computes how much time the slow computation of each rank costs the job, as a share of a window
/// (group of steps) of `window_us` microseconds. A rank with more micro-batches than others may
/// take longer in proportion.
fn compute_work_delay_shares(ranks: &[RankTimes], window_us: u64) -> Vec<f64> {
    let work: Vec<u64> = ranks.iter().map(RankTimes::work_us).collect();
    let batches = |rank: usize| ranks[rank].micro_batches.max(1);
    let per_batch: Vec<u64> = (0..ranks.len()).map(|rank| work[rank] / batches(rank)).collect();
    let excesses = compute_excesses(&work).into_iter().zip(compute_excesses(&per_batch)).enumerate();
    let excesses = excesses.map(|(rank, (whole, batch))| whole.min(batch.saturating_mul(batches(rank))));
    excesses.map(|excess| excess as f64 / window_us as f64).collect()
}

#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod short_step_tests;
#[cfg(test)]
#[path = "straggler_tests.rs"]
mod tests;
