//! [`MemoryCopyTime`]: the estimated time for copying the training state to the memory of hosts, as
//! `checkpoint.memory` requests.
use crate::plan::MemoryCopyCost;
use std::time::{Duration, Instant};

/// The size, in bytes, of the buffer that is copied to measure how fast this machine copies memory.
/// It is larger than most caches.
const MEASURED_BYTES: usize = 16 << 20;
/// How many times the memory copy rate of this machine is measured, of which the fastest
/// measurement is used.
const MEASUREMENTS: usize = 3;
/// The assumed network bandwidth of a host in bytes per second (100 Gb/s), from which the time for
/// sending memory copies is estimated.
const NETWORK_BYTES_PER_SECOND: f64 = 100e9 / 8.0;

/// The estimated times for copying the training state to the memory of each rank's host
/// (`checkpoint.memory`), and for sending the copies to other hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MemoryCopyTime {
    /// The time in which the slowest rank copies its state to the memory of its host and hashes it.
    pub(super) copy: Duration,
    /// The time in which the slowest host sends its copies to other hosts at 100 Gb/s.
    pub(super) send_at_100_gbps: Duration,
}

impl MemoryCopyTime {
    /// Estimates the time for copying the training state to host memory, from each rank's state
    /// size and number of threads. `bytes_per_second` is the rate at which one thread copies and
    /// hashes.
    pub(super) fn estimate(
        cost: &MemoryCopyCost,
        states: impl Iterator<Item = (u64, u32)>,
        bytes_per_second: f64,
    ) -> MemoryCopyTime {
        let seconds =
            states.map(|(bytes, threads)| bytes as f64 / bytes_per_second / f64::from(threads.max(1)));
        let sent = cost.sent_by_host.iter().copied().max().unwrap_or(0);
        MemoryCopyTime {
            copy: Duration::from_secs_f64(seconds.fold(0.0, f64::max)),
            send_at_100_gbps: Duration::from_secs_f64(sent as f64 / NETWORK_BYTES_PER_SECOND),
        }
    }

    /// Formats the time as a line of text.
    pub(super) fn format(&self) -> String {
        let milliseconds = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1000.0);
        let mut text =
            format!("time of each copy: {} at the speed of this machine's memory", milliseconds(self.copy));
        if !self.send_at_100_gbps.is_zero() {
            text.push_str(&format!(", and {} for sending at 100 Gb/s", milliseconds(self.send_at_100_gbps)));
        }
        text
    }
}

/// Measures how many bytes per second a thread of this machine copies to other memory and hashes
/// (BLAKE3), as workers do for `checkpoint.memory`.
pub(super) fn measure_copy_rate() -> f64 {
    let source = vec![1_u8; MEASURED_BYTES];
    let mut copy = vec![0_u8; MEASURED_BYTES];
    let measure = || {
        let began = Instant::now();
        copy.copy_from_slice(&source);
        std::hint::black_box(blake3::hash(std::hint::black_box(&copy)));
        began.elapsed()
    };
    let fastest = std::iter::repeat_with(measure).take(MEASUREMENTS).min().unwrap_or(Duration::MAX);
    MEASURED_BYTES as f64 / fastest.as_secs_f64().max(f64::EPSILON)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_and_host_determine_the_time() {
        let cost = MemoryCopyCost {
            memory_by_host: vec![0, 0],
            sent_by_host: vec![0, 12_500_000],
            sent_by_rank: vec![0, 12_500_000],
            every: 1,
        };
        let time = MemoryCopyTime::estimate(&cost, [(8_000, 4), (3_000, 1), (100, 0)].into_iter(), 1e6);
        let expected =
            MemoryCopyTime { copy: Duration::from_millis(3), send_at_100_gbps: Duration::from_millis(1) };
        assert_eq!(time, expected);
        assert_eq!(
            time.format(),
            "time of each copy: 3.0 ms at the speed of this machine's memory, and 1.0 ms for sending at 100 Gb/s"
        );
    }

    #[test]
    fn a_thread_copies_more_than_a_megabyte_per_second() {
        let rate = measure_copy_rate();
        assert!((1e6..1e12).contains(&rate), "{rate}");
    }
}
