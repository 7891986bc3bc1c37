//! The results of an optimizer step: [`StepOutcome`], with the flags, memory and times that all
//! ranks have reported.
use comm::LinkDelays;
use protocol::step_times::{LinkTimes, RankTimes};
use std::time::Duration;

/// The number of 64-bit words in which a rank sends its flags, memory and times to the other ranks
/// once per step.
pub(super) const REPORT_WORDS: usize = 6;

/// The values (flags, memory and times) that each rank sends to the other ranks once per step, in
/// addition to its losses. In a [`StepOutcome`], the combined reports of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankStepReport {
    /// Flags of [`super::boundary_flags`]. Combined: the union over all ranks.
    pub flags: u64,
    /// The largest resident set of the rank so far, in bytes. Combined: the maximum over all ranks.
    pub peak_rss: u64,
    /// Seconds since the previous report in which computation waited for collectives. Combined: the
    /// maximum over all ranks.
    pub exposed_comm: f64,
    /// The times of the previous step; 0 if there was none. Combined: those of rank 0.
    pub times: RankTimes,
}

/// The outcome of one optimizer step, which is equal on every rank: loss, gradient norm, and the
/// values that all ranks have reported.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// The mean loss per target token, in nats.
    pub loss: f64,
    /// The global L2 norm of the mean gradient before clipping.
    pub grad_norm: f64,
    /// The number of tokens with a loss.
    pub targets: u64,
    /// The combined reports of all ranks.
    pub report: RankStepReport,
    /// The times of all ranks in the previous step.
    pub rank_times: Vec<RankTimes>,
    /// Whether the step was skipped because a gradient overflowed in fp16.
    pub skipped: bool,
}

impl RankStepReport {
    /// Encodes this rank's flags, memory use, times and network delays as a fixed number of 64-bit
    /// words, which the rank sends to all ranks once per step.
    pub(super) fn encode(&self, links: Option<LinkDelays>) -> [u64; REPORT_WORDS] {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        // 0 stands for a rank that has sent nothing to other hosts.
        let (peer, slowest_us, fastest_us) = links.map_or((0, 0, 0), |links| {
            (links.slowest_peer as u64 + 1, micros(links.slowest), micros(links.fastest))
        });
        [
            self.flags,
            self.peak_rss,
            self.exposed_comm.to_bits(),
            pack_two_u32(self.times.step_us, self.times.waiting_us),
            pack_two_u32(self.times.collective_us, peer),
            pack_two_u32(slowest_us, fastest_us),
        ]
    }

    /// Decodes the flags, memory and times that a rank has sent for a step. `micro_batches` is the
    /// number of micro-batches that the rank processed.
    pub(super) fn decode(words: &[u64; REPORT_WORDS], micro_batches: usize) -> RankStepReport {
        let [flags, peak_rss, exposed_comm, times, collective, links] = *words;
        let (step_us, waiting_us) = unpack_two_u32(times);
        let ((collective_us, peer), (slowest_us, fastest_us)) =
            (unpack_two_u32(collective), unpack_two_u32(links));
        let links = peer.checked_sub(1).map(|peer| LinkTimes::new(peer as u32, slowest_us, fastest_us));
        RankStepReport {
            flags,
            peak_rss,
            exposed_comm: f64::from_bits(exposed_comm),
            times: RankTimes {
                step_us,
                waiting_us,
                collective_us,
                micro_batches: micro_batches as u64,
                links,
            },
        }
    }

    /// Combines the step reports of two ranks: sets the flags that either rank has set, and keeps
    /// the larger memory use and the larger waiting time. `self` combines the reports of ranks
    /// below that of `later`.
    pub(super) fn combine(&self, later: &RankStepReport) -> RankStepReport {
        RankStepReport {
            flags: self.flags | later.flags,
            peak_rss: self.peak_rss.max(later.peak_rss),
            exposed_comm: self.exposed_comm.max(later.exposed_comm),
            times: self.times,
        }
    }
}

/// Packs two numbers, each limited to 32 bits, into one 64-bit word of the message that ranks
/// exchange per step. A number above the largest `u32` is limited to the largest `u32`, which is 72
/// minutes in microseconds.
fn pack_two_u32(high: u64, low: u64) -> u64 {
    let limit = u64::from(u32::MAX);
    (high.min(limit) << 32) | low.min(limit)
}

/// Unpacks the two 32-bit numbers that [`pack_two_u32`] packed into one word.
fn unpack_two_u32(word: u64) -> (u64, u64) {
    (word >> 32, word & u64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_encoding_and_long_times_are_limited() {
        let times =
            RankTimes { step_us: 500_000, waiting_us: 7, collective_us: 9, micro_batches: 3, links: None };
        let report = RankStepReport { flags: 5, peak_rss: 1 << 40, exposed_comm: 0.25, times };
        assert_eq!(RankStepReport::decode(&report.encode(None), 3), report);
        let delays = LinkDelays {
            slowest_peer: 0,
            slowest: Duration::from_secs(9999),
            fastest: Duration::from_millis(2),
        };
        let links = RankStepReport::decode(&report.encode(Some(delays)), 3).times.links;
        let expected = LinkTimes::new(0, u64::from(u32::MAX), 2000);
        assert_eq!(links, Some(expected));
    }
}
