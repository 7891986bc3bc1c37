//! Formats numbers, durations, lists of ranks and hosts, and what workers do (their phases) as
//! text.
use diagnostic::{Diagnostic, Severity};
use jobspec::ids::Rank;
use protocol::event::WorkerPhase;
use std::collections::BTreeMap;

/// Formats a number with three digits and the suffix `k`, `M` or `G`: `12.3k`, `4.56M`.
pub(crate) fn format_number(x: f64) -> String {
    let (scaled, unit) = match x.abs() {
        a if a >= 999.5e6 => (x / 1e9, "G"),
        a if a >= 999.5e3 => (x / 1e6, "M"),
        a if a >= 999.5 => (x / 1e3, "k"),
        _ => (x, ""),
    };
    match scaled.abs() {
        a if a >= 99.95 => format!("{scaled:.0}{unit}"),
        a if a >= 9.995 => format!("{scaled:.1}{unit}"),
        _ => format!("{scaled:.2}{unit}"),
    }
}

/// Formats the first of several errors and the number of the others: `line 3: … (and 2 more)`.
pub(crate) fn format_first_error(errors: &[Diagnostic]) -> String {
    let first = errors.first().map_or_else(String::new, ToString::to_string);
    match errors.len() {
        0 | 1 => first,
        n => format!("{first} (and {} more)", n - 1),
    }
}

/// Formats a diagnostic as one line with its severity, its code and its text, such as
/// `warning[CODE]: SUBJECT: TEXT`.
pub(crate) fn format_notice(notice: &Diagnostic) -> String {
    let severity = match notice.severity() {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Note => "note",
    };
    let code = notice.code().name();
    match (notice.location(), notice.subject()) {
        (None, Some(subject)) => format!("{severity}[{code}]: {subject}: {notice}"),
        _ => format!("{severity}[{code}]: {notice}"),
    }
}

/// Formats a list of ranks as ranges: `0, 2-5, 9`. The ranks must be in ascending order.
pub(crate) fn format_ranks(sorted: &[Rank]) -> String {
    format_ranges(sorted, ", ")
}

/// Formats a list of numbers as ranges with a separator between them. The numbers must be in
/// ascending order.
pub(crate) fn format_ranges(sorted: &[u32], separator: &str) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &number in sorted {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    ranges.iter().map(range).collect::<Vec<_>>().join(separator)
}

/// Formats rows as a table with aligned columns, which are two spaces apart.
pub(crate) fn format_table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    // The width of a format string is limited to 65,535.
    let pad = |cell: &str, width: usize| " ".repeat(width.saturating_sub(cell.chars().count()));
    let padded = |(cell, width): (&String, &usize)| format!("{cell}{}", pad(cell, *width));
    let line = |row: &Vec<String>| row.iter().zip(&widths).map(padded).collect::<Vec<_>>().join("  ");
    rows.iter().map(|row| line(row).trim_end().to_owned() + "\n").collect()
}

/// The largest number of hosts for which [`format_hosts`] lists all names.
const MAX_HOSTS_LISTED: usize = 8;

/// Formats the names of hosts as a list, `h0, h1`. Shortens more than 8 names to
/// `64 hosts (h0 … h63)`.
pub(crate) fn format_hosts(names: &[String]) -> String {
    match names {
        [first, .., last] if names.len() > MAX_HOSTS_LISTED => {
            format!("{} hosts ({first} … {last})", names.len())
        }
        _ => names.join(", "),
    }
}

/// Groups ranks that have equal values, such as equal phases of their work, and sorts the groups so
/// that the largest one comes first. Returns each distinct value with the ranks that have the
/// value, formatted by [`format_ranks`]. The most common value comes first: `[("0-2", value), …]`.
/// The ranks in `values` must be in ascending order.
pub(crate) fn group_ranks_by_value<'a, T: PartialEq>(
    values: impl IntoIterator<Item = (Rank, &'a T)>,
) -> Vec<(String, &'a T)> {
    let mut groups: Vec<(&T, Vec<Rank>)> = Vec::new();
    for (rank, value) in values {
        match groups.iter_mut().find(|(v, _)| *v == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((value, vec![rank])),
        }
    }
    groups.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    groups.into_iter().map(|(value, list)| (format_ranks(&list), value)).collect()
}

/// Puts `rank` or `ranks` before formatted ranks: `rank 3`, `ranks 0, 2-5`.
pub(crate) fn format_rank_label(ranks: &str) -> String {
    let noun = if ranks.contains([',', '-']) { "ranks" } else { "rank" };
    format!("{noun} {ranks}")
}

/// Formats the current phases of all ranks (such as `training`): first the most common phase, then
/// each other phase with its ranks.
pub(crate) fn format_phases(phases: &BTreeMap<Rank, WorkerPhase>) -> String {
    let groups = group_ranks_by_value(phases.iter().map(|(r, p)| (*r, p)));
    match groups.as_slice() {
        [] => "starting".into(),
        [(_, phase)] => format_phase(**phase).into(),
        [(_, most), rest @ ..] => {
            let others = rest
                .iter()
                .map(|(ranks, phase)| format!("{} {}", format_rank_label(ranks), format_phase(**phase)));
            format!("{}; {}", format_phase(**most), others.collect::<Vec<_>>().join("; "))
        }
    }
}

/// Returns the text for what a worker does (its phase), such as `training`, for the progress bar.
fn format_phase(phase: WorkerPhase) -> &'static str {
    match phase {
        WorkerPhase::Starting => "starting",
        WorkerPhase::Resuming => "reading a checkpoint",
        WorkerPhase::Training => "training",
        WorkerPhase::Evaluating => "evaluating",
        WorkerPhase::Saving => "saving a checkpoint",
        WorkerPhase::Gathering => "saving full weights",
        WorkerPhase::Ending => "ending",
    }
}

/// Joins the words of a command with spaces, and quotes words with special characters for a POSIX
/// shell.
pub(crate) fn quote_shell_words(words: &[String]) -> String {
    let simple =
        |w: &str| !w.is_empty() && w.chars().all(|c| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c));
    let quoted = |w: &String| match simple(w) {
        true => w.clone(),
        false => format!("'{}'", w.replace('\'', "'\\''").replace(char::is_control, "\u{fffd}")),
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_quoted_for_a_shell() {
        let words = ["launch", "my job.yaml", "--set", "a=it's", ""].map(String::from);
        assert_eq!(quote_shell_words(&words), r"launch 'my job.yaml' --set 'a=it'\''s' ''");
    }

    #[test]
    fn long_lists_of_hosts_are_shortened() {
        let list = |n: usize| format_hosts(&(0..n).map(|i| format!("h{i}")).collect::<Vec<_>>());
        assert_eq!(list(0), "");
        assert_eq!(list(8), "h0, h1, h2, h3, h4, h5, h6, h7");
        assert_eq!(list(64), "64 hosts (h0 … h63)");
    }

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let cases = [
            (0.0, "0.00"),
            (9.99, "9.99"),
            (9.999, "10.0"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (12_345.0, "12.3k"),
            (4.56e6, "4.56M"),
            (2e12, "2000G"),
        ];
        for (x, expected) in cases {
            assert_eq!(format_number(x), expected, "{x}");
        }
    }

    #[test]
    fn ranks_are_grouped_into_ranges() {
        assert_eq!(format_ranks(&[0, 2, 3, 4, 9]), "0, 2-4, 9");
        assert_eq!(format_ranks(&[]), "");
        let mut phases: BTreeMap<Rank, WorkerPhase> = (0..8).map(|r| (r, WorkerPhase::Training)).collect();
        assert_eq!(format_phases(&phases), "training");
        phases.insert(3, WorkerPhase::Saving);
        phases.insert(4, WorkerPhase::Saving);
        assert_eq!(format_phases(&phases), "training; ranks 3-4 saving a checkpoint");
    }
}
