//! Formats sizes, durations and counts for messages.
use std::{fmt::Display, time::Duration};

/// Formats a size in bytes with a binary unit: `512 B`, `1.5 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (bytes.max(1).ilog2() / 10) as usize;
    match step {
        0 => format!("{bytes} B"),
        _ => format!("{:.1} {}", bytes as f64 / 1024f64.powi(step as i32), units[step]),
    }
}

/// Formats a measured duration for messages, in seconds (`0.4 s`) or in clock notation (`12:34`).
/// Clock notation begins at 10 s.
pub fn format_duration(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.1} s") } else { format_clock(seconds) }
}

/// Formats a duration, given in seconds, in clock notation: `0:07`, `12:34`, `1:02:03`. A value
/// that is not finite counts as 0.
pub fn format_clock(seconds: f64) -> String {
    let s = if seconds.is_finite() { seconds.clamp(0.0, 3.6e9).round() as u64 } else { 0 };
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

/// Formats a time limit in seconds without rounding: `0.05 s`, `30 s`.
pub fn format_seconds(limit: Duration) -> String {
    format!("{} s", limit.as_secs_f64())
}

/// Formats a number with its noun, which gets an `s` in the plural: `1 shard`, `2 shards`.
pub fn format_count<N: Display + PartialEq + From<u8>>(n: N, noun: &str) -> String {
    let plural = if n == N::from(1) { "" } else { "s" };
    format!("{n} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_a_unit_or_a_noun() {
        let bytes = [0, 1023, 1536, u64::MAX].map(format_bytes);
        assert_eq!(bytes, ["0 B", "1023 B", "1.5 KiB", "16.0 EiB"]);
        assert_eq!([0.04, 75.0].map(format_duration), ["0.0 s", "1:15"]);
        assert_eq!([7.4, 3723.0, f64::NAN].map(format_clock), ["0:07", "1:02:03", "0:00"]);
        assert_eq!([50, 30_000].map(|ms| format_seconds(Duration::from_millis(ms))), ["0.05 s", "30 s"]);
        assert_eq!([0u32, 1, 2].map(|n| format_count(n, "rank")), ["0 ranks", "1 rank", "2 ranks"]);
    }
}
