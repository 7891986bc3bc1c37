//! Formats lists of ranks for error messages.

/// Formats a list of ranks for an error message, such as `ranks 1, 3 of 4`.
pub(crate) fn format_ranks(ranks: &[usize], world: usize) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {} of {world}", numbers.join(", "))
}
