//! [`StragglerDetector`]: finds a rank that makes all others wait, from the step times of all
//! ranks.
//!
//! All ranks of a synchronous training wait for each other, so every rank has the same step time.
//! The rank that slows the others down is the one that waits least: its own work takes longest.
//! Likewise, data of a rank with a slow network is on its way longest.
//!
//! The detector is pure: it knows no clock, and gets the times of each step.
use crate::step_times::{LinkTimes, RankTimes};
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};

/// The shortest time over which the ranks are compared to find a slow one, in microseconds. Shorter
/// steps are summed. The kernel enforces CPU quotas in periods of 100 ms, so a rank with a quota is
/// slow only in some of its short steps.
pub const MIN_WINDOW_US: u64 = 250_000;
/// The number by which a rank's count of slow windows (comparisons in which it was slow) decreases
/// after a window in which it was not slow. A rank that is slow in most windows is found even if
/// there is noise.
const FAST_WINDOW_PENALTY: u32 = 2;
/// A slow rank counts as recovered if it costs less than this fraction of the step time that makes
/// a rank count as slow.
const RECOVERY_FACTOR: f64 = 0.5;
/// The factor by which the network times of a rank must exceed those of the others for the rank's
/// network to count as slow.
const MIN_NETWORK_FACTOR: u64 = 2;
/// The smallest delay per step by which the network of a rank must slow down the others to count as
/// slow, in microseconds. A thread that waits for a busy CPU receives data later by several time
/// slices of the scheduler.
const MIN_NETWORK_DELAY_US: u64 = 20_000;

/// The thresholds above which a slow rank is reported (`run.straggler`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StragglerRules {
    /// The share of the step time that a rank must cost, from 0 to 1.
    pub share: f64,
    /// The number of steps for which it must do so.
    pub steps: u32,
}

/// What makes a rank slow: its work, or its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StragglerKind {
    /// The work of the rank between collectives.
    Work,
    /// The network between the rank's host and other hosts.
    Network,
}

/// The finding that a rank began or ceased to slow down the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StragglerChange {
    /// Whether the rank is slow from now on. Otherwise it is no longer slow.
    pub is_slow: bool,
    /// The rank.
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
    /// The sums over the steps since the last comparison.
    window: Vec<RankTimes>,
    /// The number of steps in the window.
    window_steps: u64,
    work: SlownessCounts,
    network: SlownessCounts,
}

/// How often each rank was slow in the recent windows (groups of steps that are compared), either
/// by its work or by its network.
#[derive(Clone, Debug, Default)]
struct SlownessCounts {
    ranks: Vec<SlowWindows>,
    /// The rank that was reported, and the number of windows in turn in which it was not slow.
    reported: Option<(Rank, u32)>,
}

/// How often, and by how much, one rank was slow in the recent windows (groups of steps that are
/// compared).
#[derive(Clone, Copy, Debug, Default)]
struct SlowWindows {
    /// The number of windows in which the rank was slow, less those in which it was not.
    count: u32,
    /// The sum of the shares that the rank has cost since `count` was 0.
    share_sum: f64,
    /// The number of windows since `count` was 0.
    windows: u32,
}

impl StragglerDetector {
    /// Creates a detector that reports ranks above the thresholds in `rules`.
    pub fn new(rules: StragglerRules) -> StragglerDetector {
        let (work, network) = (SlownessCounts::default(), SlownessCounts::default());
        StragglerDetector { rules, window: Vec::new(), window_steps: 0, work, network }
    }

    /// Adds the times of all ranks in one optimizer step, after which `step` steps are done.
    /// Returns the ranks that began or ceased to slow down the others.
    pub fn add_step(&mut self, step: u64, ranks: &[RankTimes]) -> Vec<StragglerChange> {
        if self.window.len() != ranks.len() {
            *self = StragglerDetector::new(self.rules);
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
        let network = compute_network_delay_shares(&self.window, duration, min_delay);
        let compared = [
            (StragglerKind::Work, &mut self.work, work),
            (StragglerKind::Network, &mut self.network, network),
        ];
        let mut changes = Vec::new();
        for (kind, track, shares) in compared {
            let change = track.add_window(&self.rules, &shares);
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

impl SlownessCounts {
    /// Adds the result of one window (group of steps): `shares` contains, for each rank, the share
    /// of the time for which the others waited for it. Returns whether a rank became slow, the
    /// rank, and the mean share that it costs; `None` if nothing has changed.
    fn add_window(&mut self, rules: &StragglerRules, shares: &[f64]) -> Option<(bool, Rank, f64)> {
        self.ranks.resize(shares.len(), SlowWindows::default());
        self.ranks.iter_mut().zip(shares).for_each(|(rank, share)| rank.add_window(rules, *share));
        if let Some((rank, fast_windows)) = self.reported {
            let share = shares.get(rank as usize).copied().unwrap_or(0.0);
            let is_fast = share < rules.share * RECOVERY_FACTOR;
            let fast_windows = if is_fast { fast_windows + 1 } else { 0 };
            self.reported = Some((rank, fast_windows)).filter(|_| fast_windows < rules.steps);
            return self.reported.is_none().then_some((false, rank, share));
        }
        let slow = (0..).zip(&self.ranks).filter(|(_, slow)| slow.count >= rules.steps);
        let (rank, slow) = slow.max_by(|(_, a), (_, b)| a.mean_share().total_cmp(&b.mean_share()))?;
        self.reported = Some((rank, 0));
        Some((true, rank, slow.mean_share()))
    }
}

impl SlowWindows {
    /// Adds the result of one window (group of steps), in which the others waited for the rank for
    /// the share `share` of the time.
    fn add_window(&mut self, rules: &StragglerRules, share: f64) {
        self.count = match share >= rules.share {
            true => (self.count + 1).min(rules.steps),
            false => self.count.saturating_sub(FAST_WINDOW_PENALTY),
        };
        *self = match self.count {
            0 => SlowWindows::default(),
            count => SlowWindows { count, share_sum: self.share_sum + share, windows: self.windows + 1 },
        };
    }

    /// Returns the mean share of the time for which the others waited for the rank while it was
    /// slow.
    fn mean_share(&self) -> f64 {
        self.share_sum / f64::from(self.windows.max(1))
    }
}

/// Computes, for each rank, by which share a window (group of steps) would be shorter if the rank
/// worked as fast as the median of the others. A rank with more micro-batches than others may take
/// longer in proportion.
fn compute_work_delay_shares(ranks: &[RankTimes], window_us: u64) -> Vec<f64> {
    let work: Vec<u64> = ranks.iter().map(RankTimes::work_us).collect();
    let batches = |rank: usize| ranks[rank].micro_batches.max(1);
    let per_batch: Vec<u64> = (0..ranks.len()).map(|rank| work[rank] / batches(rank)).collect();
    let excesses = compute_excesses(&work).into_iter().zip(compute_excesses(&per_batch)).enumerate();
    let excesses = excesses.map(|(rank, (whole, batch))| whole.min(batch.saturating_mul(batches(rank))));
    excesses.map(|excess| excess as f64 / window_us as f64).collect()
}

/// Computes, for each rank, the share of the time of a window (group of steps) for which its slow
/// network makes others wait. The network of a rank is slow if data is long on its way to all other
/// hosts, or if data from most other ranks is long on its way to the rank, but not to others.
///
/// With two hosts, it cannot be found out which of them is slow. The shares are then 0. Delays in
/// the window below `min_delay_us` are ignored.
fn compute_network_delay_shares(ranks: &[RankTimes], window_us: u64, min_delay_us: u64) -> Vec<f64> {
    let mut shares = vec![0.0; ranks.len()];
    let links: Vec<_> = ranks.iter().enumerate().filter_map(|(rank, t)| Some((rank, t.links?))).collect();
    let has_choice = links.iter().any(|(_, l)| l.slowest_us != l.fastest_us);
    if links.len() < 3 || !has_choice {
        return shares;
    }
    // To all others: even the fastest connection of the rank is slow.
    let fastest: Vec<u64> = links.iter().map(|(_, l)| l.fastest_us).collect();
    for ((rank, links), excess) in links.iter().zip(compute_excesses(&fastest)) {
        let is_slow = links.fastest_us >= MIN_NETWORK_FACTOR.saturating_mul(links.fastest_us - excess)
            && excess >= min_delay_us;
        shares[*rank] = if is_slow { excess as f64 / window_us as f64 } else { 0.0 };
    }
    // From most others: their slowest connections lead to the rank.
    for (rank, share) in shares.iter_mut().enumerate() {
        let is_incoming = |l: &LinkTimes| {
            l.slowest_peer as usize == rank && l.slowest_us >= MIN_NETWORK_FACTOR.saturating_mul(l.fastest_us)
        };
        let senders = links.iter().filter(|(sender, _)| *sender != rank);
        let excesses: Vec<u64> =
            senders.map(|(_, l)| if is_incoming(l) { l.slowest_us - l.fastest_us } else { 0 }).collect();
        let delay = find_lower_median(excesses);
        if delay >= min_delay_us {
            *share = share.max(delay as f64 / window_us as f64);
        }
    }
    shares
}

/// Computes by how much each value exceeds the (upper) median of the other values.
fn compute_excesses(values: &[u64]) -> Vec<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let excess = |value: &u64| {
        // Without the value, the later ones move to the front by one.
        let position = sorted.partition_point(|v| v < value);
        let middle = (values.len() - 1) / 2;
        let middle = if position <= middle { middle + 1 } else { middle };
        value.saturating_sub(sorted.get(middle).copied().unwrap_or(*value))
    };
    values.iter().map(excess).collect()
}

/// Returns the lower median of the values; 0 if there are no values.
fn find_lower_median(mut values: Vec<u64>) -> u64 {
    if values.is_empty() {
        return 0;
    }
    let middle = (values.len() - 1) / 2;
    *values.select_nth_unstable(middle).1
}

#[cfg(test)]
#[path = "straggler_tests.rs"]
mod tests;
