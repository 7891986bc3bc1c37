//! Slurm's ranges: `n[01-03,07]`, `rack[1-2]node[1,3-4]`, also with something after the bracket (`n[1-2].cluster`).
use super::{HostFault, MAX_HOSTS, MAX_NAME};

/// Most digits of a number in a range.
const MAX_DIGITS: usize = 9;
/// Most brackets of one name.
const MAX_BRACKETS: usize = 4;

/// The texts between commas that stand outside brackets.
pub(super) fn split(text: &str) -> Result<Vec<&str>, HostFault> {
    let (mut parts, mut begin, mut open) = (Vec::new(), 0, None);
    for (at, c) in text.char_indices() {
        match (c, open) {
            ('[', None) => open = Some(at),
            ('[', Some(_)) => return Err(HostFault::at(at, "has a `[` inside brackets")),
            (']', Some(_)) => open = None,
            (']', None) => return Err(HostFault::at(at, "has a `]` without a `[`")),
            (',', None) => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    if let Some(at) = open {
        return Err(HostFault::at(at, "has a `[` that is never closed"));
    }
    parts.push(&text[begin..]);
    Ok(parts)
}

/// The names that a text stands for, in its order; the last brackets count fastest. At most [`MAX_HOSTS`].
pub fn expand(text: &str) -> Result<Vec<String>, HostFault> {
    let mut names = Vec::new();
    let mut at = 0;
    for part in split(text)? {
        let more = expand_one(part).map_err(|f| HostFault { at: f.at + at, ..f })?;
        if names.len() + more.len() > MAX_HOSTS {
            return Err(too_many(at));
        }
        names.extend(more);
        at += part.len() + 1;
    }
    Ok(names)
}

fn too_many(at: usize) -> HostFault {
    HostFault::at(at, format!("names more than {MAX_HOSTS} hosts"))
}

/// One text without commas outside brackets.
fn expand_one(text: &str) -> Result<Vec<String>, HostFault> {
    let mut names = vec![String::new()];
    let (mut rest, mut at, mut brackets) = (text, 0, 0);
    while let Some(open) = rest.find('[') {
        let inside = &rest[open + 1..];
        let Some(close) = inside.find(']') else {
            return Err(HostFault::at(at + open, "has a `[` that is never closed"));
        };
        brackets += 1;
        if brackets > MAX_BRACKETS {
            return Err(HostFault::at(at + open, format!("has more than {MAX_BRACKETS} pairs of brackets")));
        }
        let numbers = numbers(&inside[..close], at + open + 1)?;
        if names.len().saturating_mul(numbers.len()) > MAX_HOSTS {
            return Err(too_many(at + open));
        }
        let prefix = &rest[..open];
        fits(&names, prefix, at)?;
        let with = |name: String| numbers.iter().map(move |n| format!("{name}{prefix}{n}"));
        names = names.into_iter().flat_map(with).collect();
        at += open + close + 2;
        rest = &inside[close + 1..];
    }
    fits(&names, rest, at)?;
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

/// A long piece is refused before thousands of names get it.
fn fits(names: &[String], piece: &str, at: usize) -> Result<(), HostFault> {
    match names.first().is_some_and(|name| name.len() + piece.len() > MAX_NAME) {
        true => Err(HostFault::at(at, format!("is a name of more than {MAX_NAME} characters"))),
        false => Ok(()),
    }
}

/// `01-03,07` → 01 02 03 07: as many digits as the first number of a range has.
fn numbers(text: &str, at: usize) -> Result<Vec<String>, HostFault> {
    let mut numbers = Vec::new();
    let mut place = at;
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |digits: &str, at: usize| {
            let fits = (1..=MAX_DIGITS).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
            let number = digits.parse::<u64>().ok().filter(|_| fits);
            let message =
                format!("needs numbers of at most {MAX_DIGITS} digits between brackets, as in [01-16,20]");
            number.ok_or_else(|| HostFault::at(at, message))
        };
        let low = number(first, place)?;
        let high = number(last, place + part.len() - last.len())?;
        if high < low {
            return Err(HostFault::at(place, format!("has a range that ends before it begins: {part}")));
        }
        if numbers.len() as u64 + (high - low) >= MAX_HOSTS as u64 {
            return Err(too_many(place));
        }
        let width = first.len();
        numbers.extend((low..=high).map(|n| format!("{n:0width$}")));
        place += part.len() + 1;
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What Slurm 22.05 prints with `scontrol show hostnames`.
    const SLURM: &[(&str, &str)] = &[
        ("n[01-03,07]", "n01 n02 n03 n07"),
        ("gpu-a[1-2]-n[01-02]", "gpu-a1-n01 gpu-a1-n02 gpu-a2-n01 gpu-a2-n02"),
        ("h1,h2,h3", "h1 h2 h3"),
        ("node[1-3],login1", "node1 node2 node3 login1"),
        ("a[9-11]", "a9 a10 a11"),
        ("rack[1-2]node[1,3-4]", "rack1node1 rack1node3 rack1node4 rack2node1 rack2node3 rack2node4"),
    ];

    #[test]
    fn ranges_are_slurms() {
        for (text, expected) in SLURM {
            assert_eq!(expand(text).expect(text).join(" "), *expected, "{text}");
        }
        assert_eq!(expand("n[001-003]x").expect("a suffix").join(" "), "n001x n002x n003x");
        assert_eq!(expand("n[098-101]").expect("padding").join(" "), "n098 n099 n100 n101");
    }

    #[test]
    fn mistakes_have_places() {
        for (text, at, part) in [
            ("n[1-3", 1, "never closed"),
            ("n1]", 2, "without"),
            ("n[[1]]", 2, "inside brackets"),
            ("n[3-1]", 2, "ends before"),
            ("n[]", 2, "needs numbers"),
            ("n[a-b]", 2, "needs numbers"),
            ("n[1-]", 4, "needs numbers"),
            ("n[1,+2]", 4, "needs numbers"),
            ("n[1-9999999999]", 4, "needs numbers"),
            ("n[0-16384]", 2, "more than"),
            ("ok,n[0-99999999]", 5, "more than"),
            ("n[0-999]n[0-999]", 9, "more than"),
            ("n[1]n[1]n[1]n[1]n[1]", 17, "pairs"),
        ] {
            let fault = expand(text).expect_err(text);
            assert!(fault.message.contains(part) && fault.at == at, "{text}: {fault:?}");
        }
    }

    proptest! {
        /// Against a count written the long way.
        #[test]
        fn a_range_has_every_number_once(low in 0u64..500, span in 0u64..500, pad in 0usize..5) {
            let text = format!("n[{low:0pad$}-{}]", low + span);
            let width = format!("{low:0pad$}").len();
            let expected: Vec<String> = (low..=low + span).map(|n| {
                let digits = n.to_string();
                format!("n{}{digits}", "0".repeat(width.saturating_sub(digits.len())))
            }).collect();
            prop_assert_eq!(expand(&text).expect("a range"), expected);
        }

        #[test]
        fn whatever_is_written_is_bounded(text in "[n0-9\\[\\],-]{0,60}") {
            if let Ok(names) = expand(&text) {
                prop_assert!(names.len() <= MAX_HOSTS);
            }
        }
    }
}
