//! Durations and ranks in messages.
use std::time::Duration;

/// Formats a duration in seconds, such as `0.05 s`.
pub(crate) fn format_seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// Formats ranks for a message, such as `ranks 1, 3 of 4`.
pub(crate) fn format_ranks(ranks: &[usize], world: usize) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {} of {world}", numbers.join(", "))
}
