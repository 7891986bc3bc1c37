//! Parses hostfiles of DeepSpeed (`host slots=N`) and of Open MPI (`host slots=N max-slots=M`, or
//! one line with the host name per slot).
use super::{
    address::{HostAddress, check_user_name, parse_hosts},
    error::{HostfileError, HostfileProblem},
    limits::{MAX_HOSTS, MAX_SLOTS_PER_HOST},
};
use std::collections::HashMap;

/// The largest size of a hostfile, in bytes.
pub const MAX_HOSTFILE_BYTES: usize = 4 << 20;
/// The largest number of mistakes that are reported for one hostfile. After that, parsing stops.
const MAX_ERRORS: usize = 20;

/// A host that a hostfile names, with its number of slots (places of workers).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostfileEntry {
    /// The name of the host, with the login name and port that the file gives.
    pub host: HostAddress,
    /// The number of slots; `None` if the file does not state the number.
    pub slots: Option<u32>,
    /// The number of the first line that names the host, counted from 1.
    pub line: u32,
}

/// Parses a hostfile into its hosts, in the order of the file. The error contains at least one
/// mistake. Parsing stops after [`MAX_ERRORS`] mistakes.
pub fn parse_hostfile(text: &str) -> Result<Vec<HostfileEntry>, Vec<HostfileError>> {
    let mut parser = HostfileParser::default();
    let mut errors = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
        if let Err((at, problem)) = parser.parse_line(number, line) {
            let column = line.get(..at).map_or(1, |before| before.chars().count() + 1) as u32;
            errors.push(HostfileError { line: number, column, problem });
        }
        if errors.len() >= MAX_ERRORS {
            break;
        }
    }
    match () {
        () if !errors.is_empty() => Err(errors),
        () if parser.hosts.is_empty() => {
            Err(vec![HostfileError { line: 1, column: 1, problem: HostfileProblem::NoHost }])
        }
        () => Ok(parser.hosts),
    }
}

/// A parser of one hostfile, with the hosts of the lines that it has parsed so far.
#[derive(Default)]
struct HostfileParser {
    hosts: Vec<HostfileEntry>,
    /// For each host name: the index in `hosts`, and whether a line states the number of slots.
    by_name: HashMap<String, (usize, bool)>,
}

/// A mistake in a line of a hostfile: the byte offset of the mistake in the line, and its kind.
type LocatedProblem = (usize, HostfileProblem);

impl HostfileParser {
    /// Parses the line `line` of a hostfile, whose line number is `number`, and adds the hosts on
    /// the line to the parsed hosts. Empty lines and comments add no host.
    fn parse_line(&mut self, number: u32, line: &str) -> Result<(), LocatedProblem> {
        let content = line.split('#').next().unwrap_or("");
        let trimmed = content.trim_start();
        let start = content.len() - trimmed.len();
        if trimmed.trim_end().is_empty() {
            return Ok(());
        }
        let end = trimmed.find(char::is_whitespace).unwrap_or(trimmed.len());
        let (name, rest) = trimmed.split_at(end);
        let mut hosts = parse_hosts(name)
            .map_err(|error| (start + error.at, HostfileProblem::HostInvalid(error.problem)))?;
        let options = HostfileLineOptions::parse(rest, start + end)?;
        if let Some((user, at)) = options.user {
            if hosts.iter().any(|h| h.user.is_some()) {
                return Err((at, HostfileProblem::UserTwice));
            }
            hosts.iter_mut().for_each(|h| h.user = Some(user.clone()));
        }
        for host in hosts {
            self.add_host(host, options.slots, number, start)?;
        }
        Ok(())
    }

    /// Adds the host of one line of a hostfile, with its number of slots (places of workers), to
    /// the hosts of earlier lines. If an earlier line named the host, and neither line states the
    /// slots, the host gets one more slot, as in Open MPI. `at` is the byte offset of the host in
    /// the line, and becomes the position of an error.
    fn add_host(
        &mut self,
        host: HostAddress,
        slots: Option<u32>,
        line: u32,
        at: usize,
    ) -> Result<(), LocatedProblem> {
        let name = host.name_with_port();
        let Some(&(index, has_slots)) = self.by_name.get(&name) else {
            if self.hosts.len() >= MAX_HOSTS {
                return Err((at, HostfileProblem::TooManyHosts));
            }
            self.by_name.insert(name, (self.hosts.len(), slots.is_some()));
            self.hosts.push(HostfileEntry { host, slots, line });
            return Ok(());
        };
        let known = &mut self.hosts[index];
        if has_slots || slots.is_some() {
            return Err((at, HostfileProblem::SlotsTwice { host: name, line: known.line }));
        }
        if known.host.user != host.user {
            return Err((at, HostfileProblem::UserDiffers { host: name, line: known.line }));
        }
        // In Open MPI a host without `slots=` has as many slots as lines that name it.
        let more = known.slots.unwrap_or(1) + 1;
        if more > MAX_SLOTS_PER_HOST {
            return Err((at, HostfileProblem::TooManySlots(name)));
        }
        known.slots = Some(more);
        Ok(())
    }
}

/// The options that follow the host on a line of a hostfile, such as `slots=4`.
#[derive(Default)]
struct HostfileLineOptions {
    slots: Option<u32>,
    /// The login name, and the byte offset in the line of the option that gives it.
    user: Option<(String, usize)>,
}

impl HostfileLineOptions {
    /// Parses the options that follow a host, such as ` slots=4 max-slots=8 user=me`. `text` begins
    /// at byte `at` of the line.
    fn parse(text: &str, at: usize) -> Result<HostfileLineOptions, LocatedProblem> {
        let (mut options, mut max, mut slots) = (HostfileLineOptions::default(), None, None);
        let mut next = 0;
        while let Some(word_at) = text[next..].find(|c: char| !c.is_whitespace()).map(|i| i + next) {
            let end = text[word_at..].find(char::is_whitespace).map_or(text.len(), |i| i + word_at);
            let word = &text[word_at..end];
            let offset = at + word_at;
            next = end;
            let Some((key, value)) = word.split_once('=') else {
                return Err((offset, HostfileProblem::OptionInvalid(make_excerpt(word))));
            };
            match key {
                "slots" => set_option_once(&mut slots, parse_slot_count(value, offset + 6)?, offset, key)?,
                "max-slots" | "max_slots" => {
                    set_option_once(&mut max, parse_slot_count(value, offset + 10)?, offset, key)?
                }
                "user" | "username" => {
                    check_user_name(value)
                        .map_err(|problem| (offset, HostfileProblem::HostInvalid(problem)))?;
                    let mut user = options.user.take();
                    set_option_once(&mut user, (value.to_owned(), offset), offset, key)?;
                    options.user = user;
                }
                _ => return Err((offset, HostfileProblem::OptionUnknown(make_excerpt(key)))),
            }
        }
        if let (Some(slots), Some(max)) = (slots, max)
            && slots > max
        {
            return Err((at, HostfileProblem::SlotsOverMaximum { slots, max }));
        }
        // launch never starts more workers than slots, so a larger maximum has no effect.
        Ok(HostfileLineOptions { slots: slots.or(max), ..options })
    }
}

/// Sets an option of a hostfile line to `value`, and fails if the line has set the option before.
/// The error contains `key`, the name of the option, and `at`, its byte offset in the line.
fn set_option_once<T>(option: &mut Option<T>, value: T, at: usize, key: &str) -> Result<(), LocatedProblem> {
    match option.replace(value) {
        None => Ok(()),
        Some(_) => Err((at, HostfileProblem::OptionTwice(key.to_owned()))),
    }
}

/// Parses a host's number of slots (places of workers), which must be from 1 to
/// [`MAX_SLOTS_PER_HOST`]. `at` is the byte offset of `text` in the line, and becomes the position
/// of the error.
fn parse_slot_count(text: &str, at: usize) -> Result<u32, LocatedProblem> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse::<u32>().ok().filter(|n| digits && (1..=MAX_SLOTS_PER_HOST).contains(n));
    number.ok_or_else(|| (at, HostfileProblem::SlotsInvalid(make_excerpt(text))))
}

/// Returns the first 40 characters of `text` for a message, with all characters except printable
/// ASCII escaped.
fn make_excerpt(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::error::HostSyntaxProblem, HostfileProblem::*, *};
    use proptest::prelude::*;

    /// Parses a hostfile, and formats its hosts as `HOST*SLOTS`, separated by spaces. Panics if the
    /// hostfile has a mistake.
    fn format_parsed_hosts(text: &str) -> String {
        let hosts = parse_hostfile(text).expect(text);
        let one =
            |h: HostfileEntry| format!("{}*{}", h.host, h.slots.map_or("?".to_owned(), |s| s.to_string()));
        hosts.into_iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn hostfiles_of_deepspeed_and_open_mpi_are_parsed() {
        for (text, expected) in [
            ("worker-0 slots=4\nworker-1 slots=2\n", "worker-0*4 worker-1*2"),
            ("# all\n\n  a   slots=4  # the first\r\nb slots=1", "a*4 b*1"),
            ("a slots=2 max-slots=4\nb max_slots=3\nc", "a*2 b*3 c*?"),
            ("a\nb\na\na", "a*3 b*?"),
            ("me@n[1-2]:2222 slots=8", "me@n1:2222*8 me@n2:2222*8"),
            ("a user=me slots=1\nb username=you", "me@a*1 you@b*?"),
            ("a:22 slots=1\na:23 slots=1", "a:22*1 a:23*1"),
        ] {
            assert_eq!(format_parsed_hosts(text), expected, "{text:?}");
        }
    }

    #[test]
    fn mistakes_in_hostfiles_are_reported_with_their_position() {
        let slots_twice = |line| SlotsTwice { host: "a".to_owned(), line };
        let text = str::to_owned;
        for (file, line, column, problem) in [
            ("", 1, 1, NoHost),
            ("# nothing\n\n", 1, 1, NoHost),
            ("a slots=2\na slots=2", 2, 1, slots_twice(1)),
            ("a\n  a slots=2", 2, 3, slots_twice(1)),
            ("a slots=0", 1, 9, SlotsInvalid(text("0"))),
            ("a slots=x", 1, 9, SlotsInvalid(text("x"))),
            ("a slots= 4", 1, 9, SlotsInvalid(text(""))),
            ("a slot=4", 1, 3, OptionUnknown(text("slot"))),
            ("a 4", 1, 3, OptionInvalid(text("4"))),
            ("a slots=1 slots=2", 1, 11, OptionTwice(text("slots"))),
            ("a slots=8 max-slots=4", 1, 2, SlotsOverMaximum { slots: 8, max: 4 }),
            ("é a\nok slots=1\nn[2-1]", 1, 3, OptionInvalid(text("a"))),
            ("u@a user=v", 1, 5, UserTwice),
            ("n[1-", 1, 2, HostInvalid(HostSyntaxProblem::BracketUnclosed)),
        ] {
            let errors = parse_hostfile(file).expect_err(file);
            assert_eq!(errors[0], HostfileError { line, column, problem }, "{file:?}");
        }
        assert_eq!(parse_hostfile("é a\nok slots=1\nn[2-1]").expect_err("two").len(), 2);
    }

    proptest! {
        #[test]
        fn any_hostfile_is_parsed_within_bounds_or_rejected(text in "[ab#\\n =slotmax0-9\\[\\]@:,-]{0,80}") {
            match parse_hostfile(&text) {
                Ok(hosts) => prop_assert!(hosts.iter().all(|h| h.slots.is_none_or(|s| (1..=MAX_SLOTS_PER_HOST).contains(&s)))),
                Err(errors) => prop_assert!(!errors.is_empty() && errors.len() <= MAX_ERRORS),
            }
        }

        #[test]
        fn any_text_is_parsed_or_rejected(text in "\\PC{0,200}") {
            _ = parse_hostfile(&text);
        }
    }
}
