//! Expands Slurm's ranges of names: `n[01-03,07]`, `rack[1-2]node[1,3-4]`, also with a suffix
//! (`n[1-2].cluster`).
use super::{
    error::{HostSyntaxError, HostSyntaxProblem},
    limits::{MAX_BRACKET_PAIRS, MAX_HOSTS, MAX_NAME_BYTES, MAX_RANGE_DIGITS},
};

/// Creates the error for a mistake of the kind `problem` at byte `at` of a list of host names.
fn range_error(at: usize, problem: HostSyntaxProblem) -> HostSyntaxError {
    HostSyntaxError { at, problem }
}

/// Splits a list of host names at the commas outside of brackets, such as `n[1,3],m` into `n[1,3]`
/// and `m`. Fails if brackets are nested or not balanced.
pub(super) fn split_outside_brackets(text: &str) -> Result<Vec<&str>, HostSyntaxError> {
    let (mut parts, mut begin, mut open) = (Vec::new(), 0, None);
    for (at, c) in text.char_indices() {
        match (c, open) {
            ('[', None) => open = Some(at),
            ('[', Some(_)) => return Err(range_error(at, HostSyntaxProblem::BracketNested)),
            (']', Some(_)) => open = None,
            (']', None) => return Err(range_error(at, HostSyntaxProblem::BracketUnopened)),
            (',', None) => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    if let Some(at) = open {
        return Err(range_error(at, HostSyntaxProblem::BracketUnclosed));
    }
    parts.push(&text[begin..]);
    Ok(parts)
}

/// Expands the bracketed ranges in one or several names, which are separated by commas, and returns
/// all resulting names. The order is Slurm's: the numbers in the last brackets vary fastest. Fails
/// if there are more than [`MAX_HOSTS`] names, or if a range is malformed.
pub fn expand_ranges(text: &str) -> Result<Vec<String>, HostSyntaxError> {
    let mut names = Vec::new();
    let mut at = 0;
    for part in split_outside_brackets(text)? {
        let more = expand_name(part).map_err(|error| error.shift_by(at))?;
        if names.len() + more.len() > MAX_HOSTS {
            return Err(too_many_hosts_error(at));
        }
        names.extend(more);
        at += part.len() + 1;
    }
    Ok(names)
}

/// Creates the error for a list of host names that expands to more than [`MAX_HOSTS`] hosts. `at`
/// is the byte offset of the mistake.
fn too_many_hosts_error(at: usize) -> HostSyntaxError {
    range_error(at, HostSyntaxProblem::TooManyHosts)
}

/// Expands the bracketed ranges of one name, such as `node[1-3,7]`, into all names that it stands
/// for. Fails if there are more than [`MAX_HOSTS`], or if a range is malformed. The caller must
/// already have split the text at the commas outside of brackets.
fn expand_name(text: &str) -> Result<Vec<String>, HostSyntaxError> {
    let mut names = vec![String::new()];
    let (mut rest, mut at, mut brackets) = (text, 0, 0);
    while let Some(open) = rest.find('[') {
        let inside = &rest[open + 1..];
        let Some(close) = inside.find(']') else {
            return Err(range_error(at + open, HostSyntaxProblem::BracketUnclosed));
        };
        brackets += 1;
        if brackets > MAX_BRACKET_PAIRS {
            return Err(range_error(at + open, HostSyntaxProblem::TooManyBrackets));
        }
        let numbers = expand_number_ranges(&inside[..close], at + open + 1)?;
        if names.len().saturating_mul(numbers.len()) > MAX_HOSTS {
            return Err(too_many_hosts_error(at + open));
        }
        let prefix = &rest[..open];
        check_name_length(&names, prefix, at)?;
        let with = |name: String| numbers.iter().map(move |n| format!("{name}{prefix}{n}"));
        names = names.into_iter().flat_map(with).collect();
        at += open + close + 2;
        rest = &inside[close + 1..];
    }
    check_name_length(&names, rest, at)?;
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

/// Fails if host names that are expanded from a pattern such as `n[1-3]` would exceed
/// [`MAX_NAME_BYTES`] bytes with `piece` at their end. Only the first name is examined, because the
/// lengths of the others differ by a few digits at most. The check avoids the cost of appending a
/// long text to thousands of names. `at` becomes the position of the error.
fn check_name_length(names: &[String], piece: &str, at: usize) -> Result<(), HostSyntaxError> {
    match names.first().is_some_and(|name| name.len() + piece.len() > MAX_NAME_BYTES) {
        true => Err(range_error(at, HostSyntaxProblem::NameTooLong)),
        false => Ok(()),
    }
}

/// Expands the numbers in the brackets of a host name, such as `01-03,07`, into the list 01, 02, 03
/// and 07. The numbers of a range are padded with zeros to the width of its first number. `at` is
/// the byte offset of `text` in the whole name, and is added to the position of an error. Fails if
/// there are more than [`MAX_HOSTS`] numbers.
fn expand_number_ranges(text: &str, at: usize) -> Result<Vec<String>, HostSyntaxError> {
    let mut numbers = Vec::new();
    let mut place = at;
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |digits: &str, at: usize| {
            let is_number =
                (1..=MAX_RANGE_DIGITS).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
            let number = digits.parse::<u64>().ok().filter(|_| is_number);
            number.ok_or(range_error(at, HostSyntaxProblem::RangeNumberInvalid))
        };
        let low = number(first, place)?;
        let high = number(last, place + part.len() - last.len())?;
        if high < low {
            return Err(range_error(place, HostSyntaxProblem::RangeReversed(part.to_owned())));
        }
        if numbers.len() as u64 + (high - low) >= MAX_HOSTS as u64 {
            return Err(too_many_hosts_error(place));
        }
        let width = first.len();
        numbers.extend((low..=high).map(|n| format!("{n:0width$}")));
        place += part.len() + 1;
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::{HostSyntaxProblem::*, *};
    use proptest::prelude::*;

    /// Test cases: ranges of names, each with the names that `scontrol show hostnames` of Slurm
    /// 22.05 prints for it.
    const SLURM_EXPANSIONS: &[(&str, &str)] = &[
        ("n[01-03,07]", "n01 n02 n03 n07"),
        ("gpu-a[1-2]-n[01-02]", "gpu-a1-n01 gpu-a1-n02 gpu-a2-n01 gpu-a2-n02"),
        ("h1,h2,h3", "h1 h2 h3"),
        ("node[1-3],login1", "node1 node2 node3 login1"),
        ("a[9-11]", "a9 a10 a11"),
        ("rack[1-2]node[1,3-4]", "rack1node1 rack1node3 rack1node4 rack2node1 rack2node3 rack2node4"),
    ];

    #[test]
    fn ranges_expand_as_in_slurm() {
        for (text, expected) in SLURM_EXPANSIONS {
            assert_eq!(expand_ranges(text).expect(text).join(" "), *expected, "{text}");
        }
        assert_eq!(expand_ranges("n[001-003]x").expect("a suffix").join(" "), "n001x n002x n003x");
        assert_eq!(expand_ranges("n[098-101]").expect("padding").join(" "), "n098 n099 n100 n101");
    }

    #[test]
    fn mistakes_in_ranges_are_reported_with_their_position() {
        for (text, at, problem) in [
            ("n[1-3", 1, BracketUnclosed),
            ("n1]", 2, BracketUnopened),
            ("n[[1]]", 2, BracketNested),
            ("n[3-1]", 2, RangeReversed("3-1".to_owned())),
            ("n[]", 2, RangeNumberInvalid),
            ("n[a-b]", 2, RangeNumberInvalid),
            ("n[1-]", 4, RangeNumberInvalid),
            ("n[1,+2]", 4, RangeNumberInvalid),
            ("n[1-9999999999]", 4, RangeNumberInvalid),
            ("n[0-16384]", 2, TooManyHosts),
            ("ok,n[0-99999999]", 5, TooManyHosts),
            ("n[0-999]n[0-999]", 9, TooManyHosts),
            ("n[1]n[1]n[1]n[1]n[1]", 17, TooManyBrackets),
        ] {
            assert_eq!(expand_ranges(text), Err(range_error(at, problem)), "{text}");
        }
    }

    proptest! {
        /// Checks that a range expands to all numbers from the first to the last, with the padding
        /// of the first.
        #[test]
        fn a_range_contains_every_number_once(low in 0u64..500, span in 0u64..500, pad in 0usize..5) {
            let text = format!("n[{low:0pad$}-{}]", low + span);
            let width = format!("{low:0pad$}").len();
            let expected: Vec<String> = (low..=low + span).map(|n| {
                let digits = n.to_string();
                format!("n{}{digits}", "0".repeat(width.saturating_sub(digits.len())))
            }).collect();
            prop_assert_eq!(expand_ranges(&text).expect("a range"), expected);
        }

        #[test]
        fn any_text_expands_to_a_bounded_list(text in "[n0-9\\[\\],-]{0,60}") {
            if let Ok(names) = expand_ranges(&text) {
                prop_assert!(names.len() <= MAX_HOSTS);
            }
        }
    }
}
