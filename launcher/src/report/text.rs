//! Words and numbers as a person reads them.
use contract::{event::Phase, ids::Rank};
use std::collections::BTreeMap;

/// `12.3k`, `4.56M`: three digits and a unit.
pub(super) fn short(x: f64) -> String {
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

/// `512 B`, `1.5 MiB`.
pub(super) fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (n.max(1).ilog2() / 10) as usize;
    match step {
        0 => format!("{n} B"),
        _ => format!("{:.1} {}", n as f64 / 1024f64.powi(step as i32), units[step]),
    }
}

/// `0.4 s`, `12:34`, `1:02:03`.
pub(crate) fn took(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.1} s") } else { clock(seconds) }
}

/// `0:07`, `12:34`, `1:02:03`.
pub(crate) fn clock(seconds: f64) -> String {
    let s = if seconds.is_finite() { seconds.clamp(0.0, 3.6e9).round() as u64 } else { 0 };
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

/// `0, 2-5, 9`.
pub(crate) fn ranks(sorted: &[Rank]) -> String {
    let mut runs: Vec<(Rank, Rank)> = Vec::new();
    for &rank in sorted {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == rank => *end = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |(a, b): &(Rank, Rank)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// Hosts of a list that are named one by one.
const HOSTS_NAMED: usize = 8;

/// `h0, h1`; of a long list how many there are, and its ends: `64 hosts (h0 … h63)`.
pub(crate) fn hosts(names: &[String]) -> String {
    match names {
        [first, .., last] if names.len() > HOSTS_NAMED => format!("{} hosts ({first} … {last})", names.len()),
        _ => names.join(", "),
    }
}

/// Each different thing once, with the ranks it is true of: `[("0-2", thing), …]`, the most common first.
pub(super) fn by_rank<'a, T: PartialEq>(of: impl IntoIterator<Item = (Rank, &'a T)>) -> Vec<(String, &'a T)> {
    let mut groups: Vec<(&T, Vec<Rank>)> = Vec::new();
    for (rank, thing) in of {
        match groups.iter_mut().find(|(t, _)| *t == thing) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((thing, vec![rank])),
        }
    }
    groups.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    groups.into_iter().map(|(thing, list)| (ranks(&list), thing)).collect()
}

/// What the ranks do, in a few words.
pub(super) fn activity(phases: &BTreeMap<Rank, Phase>) -> String {
    let groups = by_rank(phases.iter().map(|(r, p)| (*r, p)));
    match groups.as_slice() {
        [] => "starting".into(),
        [(_, phase)] => name(**phase).into(),
        [(_, most), rest @ ..] => {
            let others = rest.iter().map(|(ranks, phase)| format!("rank {ranks} {}", name(**phase)));
            format!("{}; {}", name(**most), others.collect::<Vec<_>>().join("; "))
        }
    }
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "starting",
        Phase::Resuming => "reading a checkpoint",
        Phase::Training => "training",
        Phase::Evaluating => "evaluating",
        Phase::Saving => "saving a checkpoint",
        Phase::Gathering => "gathering weights",
        Phase::Ending => "ending",
    }
}

/// Without what would move the cursor or retitle the window; colours and tabs stay.
pub(crate) fn harmless(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c.is_control() && c != '\t') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let colour = rest.strip_prefix("\x1b[").and_then(|body| {
            let end = body.find(|c: char| !c.is_ascii_digit() && c != ';')?;
            body[end..].starts_with('m').then_some(2 + end + 1)
        });
        match colour {
            Some(length) => out.push_str(&rest[..length]),
            None => out.push('·'),
        }
        let skip = colour.unwrap_or_else(|| rest.chars().next().map_or(1, char::len_utf8));
        rest = &rest[skip..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_hosts_are_short() {
        let of = |n: usize| hosts(&(0..n).map(|i| format!("h{i}")).collect::<Vec<_>>());
        assert_eq!(of(0), "");
        assert_eq!(of(8), "h0, h1, h2, h3, h4, h5, h6, h7");
        assert_eq!(of(64), "64 hosts (h0 … h63)");
    }

    #[test]
    fn numbers_are_short() {
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
        for (x, want) in cases {
            assert_eq!(short(x), want, "{x}");
        }
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!((took(0.04), took(75.0)), ("0.0 s".into(), "1:15".into()));
        assert_eq!(
            (clock(7.4), clock(3723.0), clock(f64::NAN)),
            ("0:07".into(), "1:02:03".into(), "0:00".into())
        );
    }

    #[test]
    fn ranks_are_grouped() {
        assert_eq!(ranks(&[0, 2, 3, 4, 9]), "0, 2-4, 9");
        assert_eq!(ranks(&[]), "");
        let mut phases: BTreeMap<Rank, Phase> = (0..8).map(|r| (r, Phase::Training)).collect();
        assert_eq!(activity(&phases), "training");
        phases.insert(3, Phase::Saving);
        phases.insert(4, Phase::Saving);
        assert_eq!(activity(&phases), "training; rank 3-4 saving a checkpoint");
    }

    #[test]
    fn colours_stay_and_cursor_moves_go() {
        assert_eq!(harmless("a\tb"), "a\tb");
        assert_eq!(harmless("\x1b[1;31mred\x1b[0m"), "\x1b[1;31mred\x1b[0m");
        assert_eq!(harmless("\x1b[2Jx\x07"), "·[2Jx·");
        assert_eq!(harmless("\x1b]0;title\x07\x1b["), "·]0;title··[");
        assert_eq!(harmless("é\u{9b}31m"), "é·31m");
    }
}
