//! [`RankTimes`]: how long the optimizer steps of a rank took, and for how long the rank waited in
//! them.
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};

/// The largest number of ranks whose step times are reported. The times of further ranks are left
/// out.
pub const MAX_TIMED_RANKS: usize = 16 << 10;

/// How long one rank computed and waited in one optimizer step, or in several steps together. A
/// time is in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTimes {
    /// The duration of the step. All ranks wait for each other, so the durations are about equal.
    pub step_us: u64,
    /// The time for which the computation of the rank waited for collectives.
    pub waiting_us: u64,
    /// The time for which collectives of the rank ran, also while the rank computed.
    pub collective_us: u64,
    /// The number of micro-batches that the rank processed.
    pub micro_batches: u64,
    /// The times of the rank's network connections; `None` if the rank sent nothing to other hosts.
    pub links: Option<LinkTimes>,
}

/// How long the data of one rank was on its way to other hosts, over the slowest and over the
/// fastest connection. A time is in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkTimes {
    /// The rank to which data was on its way for the longest time. After several steps: the rank
    /// that was the slowest peer for more than half of the time, if there is one.
    pub slowest_peer: Rank,
    /// The time by which `slowest_peer` leads the slowest peers of other steps; `slowest_us` after
    /// one step.
    pub lead_us: u64,
    /// The sum of the times of the slowest connection in each step.
    pub slowest_us: u64,
    /// The time of the connection on which data was on its way for the shortest time.
    pub fastest_us: u64,
}

/// The sums of the durations that every rank has measured over some consecutive optimizer steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// The number of optimizer steps that were done after the last of the summed steps.
    pub step: u64,
    /// The number of summed steps.
    pub steps: u64,
    /// The sums of each rank, for at most [`MAX_TIMED_RANKS`] ranks.
    pub ranks: Vec<RankTimes>,
}

impl RankTimes {
    /// Returns the time in which the rank itself computed instead of waiting for others, in
    /// microseconds.
    pub fn work_us(&self) -> u64 {
        self.step_us.saturating_sub(self.waiting_us)
    }

    /// Adds the durations of a later optimizer step of one rank to the sums of the earlier steps of
    /// this rank.
    pub fn add(&mut self, later: &RankTimes) {
        self.step_us = self.step_us.saturating_add(later.step_us);
        self.waiting_us = self.waiting_us.saturating_add(later.waiting_us);
        self.collective_us = self.collective_us.saturating_add(later.collective_us);
        self.micro_batches = self.micro_batches.saturating_add(later.micro_batches);
        self.links = match (self.links, later.links) {
            (Some(sum), Some(links)) => Some(sum.sum_with(&links)),
            (sum, links) => sum.or(links),
        };
    }
}

impl LinkTimes {
    /// Creates the network times of one step.
    pub fn new(slowest_peer: Rank, slowest_us: u64, fastest_us: u64) -> LinkTimes {
        LinkTimes { slowest_peer, lead_us: slowest_us, slowest_us, fastest_us }
    }

    /// Returns the sum of these network times and those of the same rank in later steps. The peer
    /// is found by a majority vote (Boyer and Moore), in which each step votes with its time.
    fn sum_with(&self, later: &LinkTimes) -> LinkTimes {
        let (slowest_peer, lead_us) = if later.slowest_peer == self.slowest_peer {
            (self.slowest_peer, self.lead_us.saturating_add(later.lead_us))
        } else if later.lead_us > self.lead_us {
            (later.slowest_peer, later.lead_us - self.lead_us)
        } else {
            (self.slowest_peer, self.lead_us - later.lead_us)
        };
        LinkTimes {
            slowest_peer,
            lead_us,
            slowest_us: self.slowest_us.saturating_add(later.slowest_us),
            fastest_us: self.fastest_us.saturating_add(later.fastest_us),
        }
    }
}

impl StepTimes {
    /// Adds the durations of one optimizer step, given for each rank in `ranks`, to the sums of the
    /// earlier steps. Begins again if the number of ranks has changed.
    pub fn add_step(&mut self, step: u64, ranks: &[RankTimes]) {
        let ranks = &ranks[..ranks.len().min(MAX_TIMED_RANKS)];
        if self.ranks.len() != ranks.len() {
            (self.steps, self.ranks) = (0, vec![RankTimes::default(); ranks.len()]);
        }
        self.ranks.iter_mut().zip(ranks).for_each(|(sum, times)| sum.add(times));
        self.step = step;
        self.steps += 1;
    }

    /// Returns the mean duration of an optimizer step in microseconds; 0 if no step was added.
    pub fn mean_step_us(&self) -> u64 {
        let longest = self.ranks.iter().map(|times| times.step_us).max().unwrap_or(0);
        longest / self.steps.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::LinkTimes;

    /// A peer that is slow in most steps is named, also if another one was slower in the first
    /// step.
    #[test]
    fn the_peer_that_is_slowest_for_most_of_the_time_is_named() {
        let sum = |steps: &[(u32, u64)]| {
            let steps = steps.iter().map(|(peer, time)| LinkTimes::new(*peer, *time, 1));
            steps.reduce(|sum, step| sum.sum_with(&step)).unwrap()
        };
        let total = sum(&[(3, 50), (7, 40), (7, 40), (7, 40), (5, 30)]);
        assert_eq!((total.slowest_peer, total.slowest_us, total.fastest_us), (7, 200, 5));
        assert_eq!(sum(&[(3, 500), (7, 40), (7, 40)]).slowest_peer, 3);
    }
}
