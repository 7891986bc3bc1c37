//! Formats lists, counts and sizes for messages.

/// The most ranks that a message lists by number.
pub(crate) const RANKS_LISTED_MAX: usize = 16;

/// Formats a number with its noun: `1 shard`, `2 shards`.
pub(crate) fn format_count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Formats a list of names, of which at most two are shown: `a`, `a and b`, `a, b and 3 more`.
pub(crate) fn format_names(names: &[String]) -> String {
    match names {
        [a, b, more @ ..] if !more.is_empty() => format!("{a}, {b} and {} more", more.len()),
        few => few.join(" and "),
    }
}

/// Formats ranks as a list, of which at most [`RANKS_LISTED_MAX`] are shown.
pub(crate) fn format_ranks(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().take(RANKS_LISTED_MAX).map(u32::to_string).collect();
    match list.split_last() {
        _ if ranks.len() > RANKS_LISTED_MAX => format!("{} and more", list.join(", ")),
        Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => list.join(""),
    }
}

/// Formats a size of `n` bytes with a decimal unit: 1234567 as `1.23 MB`.
pub fn format_bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if n < 1000 {
        return format!("{n} B");
    }
    let (mut value, mut unit) = (n as f64 / 1e3, 0);
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}
