//! Hostfiles: DeepSpeed's (`host slots=N`) and Open MPI's (`host slots=N max-slots=M`, a bare host once for each slot).
use super::{Host, MAX_HOSTS, parse_hosts};
use std::collections::HashMap;

/// Largest hostfile, bytes.
pub const MAX_HOSTFILE: usize = 4 << 20;
/// Most slots of a host.
const MAX_SLOTS: u32 = 1024;
/// Most mistakes that are told at once.
const MAX_FAULTS: usize = 20;

/// A host of a hostfile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileHost {
    pub host: Host,
    /// `None`: as many as the job says or the host has.
    pub slots: Option<u32>,
    /// The line it was first named on, from 1.
    pub line: u32,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineFault {
    /// From 1; characters count, not bytes.
    pub line: u32,
    pub column: u32,
    pub message: String,
}

/// The hosts of a hostfile, in its order; or its mistakes.
pub fn parse_hostfile(text: &str) -> Result<Vec<FileHost>, Vec<LineFault>> {
    let mut read = Reading::default();
    for (index, line) in text.lines().enumerate() {
        let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
        if let Err((at, message)) = read.line(number, line) {
            let column = line.get(..at).map_or(1, |before| before.chars().count() + 1) as u32;
            read.faults.push(LineFault { line: number, column, message });
        }
        if read.faults.len() >= MAX_FAULTS {
            break;
        }
    }
    match () {
        () if !read.faults.is_empty() => Err(read.faults),
        () if read.hosts.is_empty() => {
            Err(vec![LineFault { line: 1, column: 1, message: "the hostfile names no host".to_owned() }])
        }
        () => Ok(read.hosts),
    }
}

#[derive(Default)]
struct Reading {
    hosts: Vec<FileHost>,
    /// Name → its place in `hosts`, and whether its slots were written.
    seen: HashMap<String, (usize, bool)>,
    faults: Vec<LineFault>,
}

/// What is wrong, and at which byte of the line.
type Wrong = (usize, String);

impl Reading {
    fn line(&mut self, number: u32, line: &str) -> Result<(), Wrong> {
        let content = line.split('#').next().unwrap_or("");
        let trimmed = content.trim_start();
        let begin = content.len() - trimmed.len();
        if trimmed.trim_end().is_empty() {
            return Ok(());
        }
        let end = trimmed.find(char::is_whitespace).unwrap_or(trimmed.len());
        let (name, rest) = trimmed.split_at(end);
        let mut hosts = parse_hosts(name).map_err(|f| (begin + f.at, format!("the host {}", f.message)))?;
        let options = Options::read(rest, begin + end)?;
        if let Some((user, at)) = options.user {
            if hosts.iter().any(|h| h.user.is_some()) {
                return Err((at, "the user is given twice".to_owned()));
            }
            hosts.iter_mut().for_each(|h| h.user = Some(user.clone()));
        }
        for host in hosts {
            self.add(host, options.slots, number, begin)?;
        }
        Ok(())
    }

    fn add(&mut self, host: Host, slots: Option<u32>, line: u32, at: usize) -> Result<(), Wrong> {
        let name = host.name();
        let Some(&(index, written)) = self.seen.get(&name) else {
            if self.hosts.len() >= MAX_HOSTS {
                return Err((at, format!("the hostfile names more than {MAX_HOSTS} hosts")));
            }
            self.seen.insert(name, (self.hosts.len(), slots.is_some()));
            self.hosts.push(FileHost { host, slots, line });
            return Ok(());
        };
        let known = &mut self.hosts[index];
        if written || slots.is_some() {
            return Err((
                at,
                format!("{name} is there already, on line {}: give its slots once", known.line),
            ));
        }
        if known.host.user != host.user {
            return Err((at, format!("{name} has another user on line {}", known.line)));
        }
        // Open MPI: a host without `slots=` has one slot for each time it is named.
        let more = known.slots.unwrap_or(1) + 1;
        if more > MAX_SLOTS {
            return Err((at, format!("{name} has more than {MAX_SLOTS} slots")));
        }
        known.slots = Some(more);
        Ok(())
    }
}

#[derive(Default)]
struct Options {
    slots: Option<u32>,
    /// With its place.
    user: Option<(String, usize)>,
}

impl Options {
    /// ` slots=4 max-slots=8 user=me`; `at`: where the text begins in its line.
    fn read(text: &str, at: usize) -> Result<Options, Wrong> {
        let (mut options, mut max, mut slots) = (Options::default(), None, None);
        let mut place = 0;
        while let Some(word_at) = text[place..].find(|c: char| !c.is_whitespace()).map(|i| i + place) {
            let end = text[word_at..].find(char::is_whitespace).map_or(text.len(), |i| i + word_at);
            let word = &text[word_at..end];
            let here = at + word_at;
            place = end;
            let Some((key, value)) = word.split_once('=') else {
                return Err((here, format!("`{}` is not KEY=VALUE, as in `slots=8`", shown(word))));
            };
            match key {
                "slots" => once(&mut slots, number(value, here + 6)?, here, key)?,
                "max-slots" | "max_slots" => once(&mut max, number(value, here + 10)?, here, key)?,
                "user" | "username" => {
                    super::check_user(value).map_err(|m| (here, format!("the host {m}")))?;
                    let mut user = options.user.take();
                    once(&mut user, (value.to_owned(), here), here, key)?;
                    options.user = user;
                }
                _ => {
                    let known = "the keys of a host are slots, max-slots and user";
                    return Err((here, format!("`{}` is not known: {known}", shown(key))));
                }
            }
        }
        if let (Some(slots), Some(max)) = (slots, max)
            && slots > max
        {
            return Err((at, format!("slots ({slots}) is more than max-slots ({max})")));
        }
        // Never more ranks than slots are started, so a larger maximum has nothing to allow.
        Ok(Options { slots: slots.or(max), ..options })
    }
}

fn once<T>(place: &mut Option<T>, value: T, at: usize, key: &str) -> Result<(), Wrong> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err((at, format!("`{key}` is given twice"))),
    }
}

fn number(text: &str, at: usize) -> Result<u32, Wrong> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse::<u32>().ok().filter(|n| digits && (1..=MAX_SLOTS).contains(n));
    number.ok_or_else(|| (at, format!("slots are a number from 1 to {MAX_SLOTS}, not `{}`", shown(text))))
}

fn shown(text: &str) -> String {
    text.chars().take(40).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> String {
        let hosts = parse_hostfile(text).expect(text);
        let one = |h: FileHost| format!("{}*{}", h.host, h.slots.map_or("?".to_owned(), |s| s.to_string()));
        hosts.into_iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn hostfiles_of_deepspeed_and_open_mpi() {
        for (text, expected) in [
            ("worker-0 slots=4\nworker-1 slots=2\n", "worker-0*4 worker-1*2"),
            ("# all\n\n  a   slots=4  # the first\r\nb slots=1", "a*4 b*1"),
            ("a slots=2 max-slots=4\nb max_slots=3\nc", "a*2 b*3 c*?"),
            ("a\nb\na\na", "a*3 b*?"),
            ("me@n[1-2]:2222 slots=8", "me@n1:2222*8 me@n2:2222*8"),
            ("a user=me slots=1\nb username=you", "me@a*1 you@b*?"),
            ("a:22 slots=1\na:23 slots=1", "a:22*1 a:23*1"),
        ] {
            assert_eq!(read(text), expected, "{text:?}");
        }
    }

    #[test]
    fn mistakes_have_places() {
        for (text, line, column, part) in [
            ("", 1, 1, "names no host"),
            ("# nothing\n\n", 1, 1, "names no host"),
            ("a slots=2\na slots=2", 2, 1, "on line 1"),
            ("a\n  a slots=2", 2, 3, "on line 1"),
            ("a slots=0", 1, 9, "from 1 to 1024"),
            ("a slots=x", 1, 9, "from 1 to 1024"),
            ("a slots= 4", 1, 9, "from 1 to 1024"),
            ("a slot=4", 1, 3, "`slot` is not known"),
            ("a 4", 1, 3, "KEY=VALUE"),
            ("a slots=1 slots=2", 1, 11, "twice"),
            ("a slots=8 max-slots=4", 1, 2, "more than max-slots"),
            ("é a\nok slots=1\nn[2-1]", 1, 3, "KEY=VALUE"),
            ("u@a user=v", 1, 5, "twice"),
            ("n[1-", 1, 2, "never closed"),
        ] {
            let faults = parse_hostfile(text).expect_err(text);
            let fault = &faults[0];
            assert!(fault.message.contains(part), "{text:?}: {fault:?}");
            assert_eq!((fault.line, fault.column), (line, column), "{text:?}: {fault:?}");
        }
        assert_eq!(parse_hostfile("é a\nok slots=1\nn[2-1]").expect_err("two").len(), 2);
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_read_or_refused(text in "[ab#\\n =slotmax0-9\\[\\]@:,-]{0,80}") {
            match parse_hostfile(&text) {
                Ok(hosts) => prop_assert!(hosts.iter().all(|h| h.slots.is_none_or(|s| (1..=MAX_SLOTS).contains(&s)))),
                Err(faults) => prop_assert!(!faults.is_empty() && faults.len() <= MAX_FAULTS),
            }
        }

        #[test]
        fn any_text_does_no_harm(text in "\\PC{0,200}") {
            _ = parse_hostfile(&text);
        }
    }
}
