//! Formats lists of names and ranks for messages, and shortens texts from untrusted files.

/// Limit on the number of ranks that a message lists.
pub(crate) const RANKS_LISTED_MAX: usize = 16;

/// Limit on the number of characters that a message quotes from one text of an untrusted file.
const TEXT_CHARS_MAX: usize = 600;

/// Shortens a text from an untrusted file to [`TEXT_CHARS_MAX`] characters, for a message. The end
/// of a shortened text is `…`.
pub(crate) fn shorten_text(mut text: String) -> String {
    if let Some((at, _)) = text.char_indices().nth(TEXT_CHARS_MAX) {
        text.truncate(at);
        text.push('…');
    }
    text
}

/// Formats a list of names, of which at most two are shown: `a`, `a and b`, `a, b and 3 more`.
pub(crate) fn format_names(names: &[String]) -> String {
    match names {
        [a, b, more @ ..] if !more.is_empty() => format!("{a}, {b} and {} more", more.len()),
        few => few.join(" and "),
    }
}

/// Formats a list of ranks, of which at most [`RANKS_LISTED_MAX`] are shown.
pub(crate) fn format_ranks(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().take(RANKS_LISTED_MAX).map(u32::to_string).collect();
    match list.split_last() {
        _ if ranks.len() > RANKS_LISTED_MAX => format!("{} and more", list.join(", ")),
        Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => list.join(""),
    }
}
