//! `launch logs`: what the ranks wrote.
use super::ps::meant;
use crate::{
    agent::times::{now_ms, offset_at},
    cli::LogsArgs,
    error::{Failure, Kind},
    report::{clean, plain},
    runs::{Run, Wanted},
    tail::{Lines, PAUSE},
};
use contract::ids::Rank;
use regex::bytes::Regex;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

const ELSEWHERE: &str = "where hosts share no run directory, logs stay on their hosts, and `run.logs.show` says whose output comes here";
/// Before the name of a log: a copy of what the rank said to the console.
const COPY: &str = "streamed-";
/// Text gathered before it is written, bytes.
const BATCH: usize = 64 << 10;

/// Shows the logs; the exit code.
pub(crate) fn run(args: &LogsArgs) -> u8 {
    let shown = meant(args.run.as_deref(), Wanted::Any).and_then(|run| Logs::new(&run, args)?.show());
    match shown {
        Ok(()) => contract::exit::DONE,
        Err(failure) => super::fail(&failure),
    }
}

struct Logs<'a> {
    run: &'a Run,
    directory: PathBuf,
    wanted: Option<BTreeSet<Rank>>,
    pattern: Option<Regex>,
    since_ms: u64,
    follow: bool,
    /// Say which rank a line is of.
    prefix: bool,
    open: BTreeMap<Rank, Lines>,
    out: String,
    /// Nobody reads any more.
    unread: bool,
}

impl<'a> Logs<'a> {
    fn new(run: &'a Run, args: &LogsArgs) -> Result<Self, Failure> {
        let pattern = args.grep.as_deref().map(Regex::new).transpose();
        let pattern = pattern.map_err(|e| Failure::new(Kind::Usage, format!("--grep: {e}")))?;
        let wanted: Option<BTreeSet<Rank>> =
            (!args.rank.is_empty()).then(|| args.rank.concat().into_iter().collect());
        let absent = wanted.iter().flatten().find(|rank| **rank >= run.entry.world);
        if let Some(rank) = absent {
            let world = run.entry.world;
            return Err(Failure::new(
                Kind::Usage,
                format!("there is no rank {rank}: the run has {world} workers"),
            ));
        }
        Ok(Logs {
            run,
            directory: run.entry.run_dir.join("logs"),
            prefix: wanted.as_ref().map_or(run.entry.world as usize, BTreeSet::len) > 1,
            wanted,
            pattern,
            since_ms: args.since.map_or(0, |ms| now_ms().saturating_sub(ms)),
            follow: args.follow,
            open: BTreeMap::new(),
            out: String::new(),
            unread: false,
        })
    }

    fn show(mut self) -> Result<(), Failure> {
        let mut ranks: Vec<Rank> = Vec::new();
        loop {
            // Looked at before reading: what was written before the end is read.
            let goes_on = self.follow && self.run.entry.by.is_alive();
            for (rank, files) in self.files() {
                if !ranks.contains(&rank) {
                    ranks.push(rank);
                    self.begin(rank, &files)?;
                }
            }
            let mut more = false;
            for rank in ranks.clone() {
                more |= self.read(rank)?;
            }
            self.write(true)?;
            match (more, goes_on) {
                _ if self.unread => return Ok(()),
                (true, _) => {}
                (false, true) => std::thread::sleep(PAUSE),
                (false, false) if ranks.is_empty() => {
                    let why =
                        format!("run {} has no logs in {}", self.run.entry.run, self.directory.display());
                    return Err(Failure::new(Kind::Failed, why)
                        .hint("it ended before a worker started, or they were removed")
                        .hint(ELSEWHERE));
                }
                (false, false) => {
                    self.tell_absent(&ranks);
                    return Ok(());
                }
            }
        }
    }

    /// Says which ranks' logs aren't here.
    fn tell_absent(&self, found: &[Rank]) {
        let wanted = (0..self.run.entry.world).filter(|r| self.wanted.as_ref().is_none_or(|w| w.contains(r)));
        let absent = wanted.filter(|rank| !found.contains(rank)).count();
        if absent > 0 {
            plain::say(&format!("the logs of {absent} ranks aren't here: {ELSEWHERE}\n"));
        }
    }

    /// Each wanted rank's log files, the oldest first: `rank-0.log.2`, `rank-0.log.1`, `rank-0.log`. Of a rank whose log
    /// lies on another host there is a copy of what it said to the console, perhaps.
    fn files(&self) -> BTreeMap<Rank, Vec<PathBuf>> {
        let mut found: BTreeMap<Rank, Vec<(u32, PathBuf)>> = BTreeMap::new();
        let mut copies: BTreeMap<Rank, PathBuf> = BTreeMap::new();
        let wanted = |rank: &Rank| self.wanted.as_ref().is_none_or(|wanted| wanted.contains(rank));
        for path in fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|e| e.path()) {
            let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
            if let Some((rank, _)) =
                name.strip_prefix(COPY).and_then(log_name).filter(|(rank, _)| wanted(rank))
            {
                copies.insert(rank, path);
            } else if let Some((rank, age)) = log_name(name).filter(|(rank, _)| wanted(rank)) {
                found.entry(rank).or_default().push((age, path));
            }
        }
        for (rank, path) in copies {
            found.entry(rank).or_insert_with(|| vec![(0, path)]);
        }
        let sorted = |mut files: Vec<(u32, PathBuf)>| {
            files.sort_by_key(|(age, _)| std::cmp::Reverse(*age));
            files.into_iter().map(|(_, path)| path).collect()
        };
        found.into_iter().map(|(rank, files)| (rank, sorted(files))).collect()
    }

    /// Shows what was rotated away, and opens what is being written.
    fn begin(&mut self, rank: Rank, files: &[PathBuf]) -> Result<(), Failure> {
        for file in files {
            let end = fs::metadata(file).map_or(0, |m| m.len());
            let from = if self.since_ms == 0 { 0 } else { offset_at(file, self.since_ms, end) };
            let lines = Lines::open(file.clone(), from).map_err(|e| failed(file, &e))?;
            self.open.insert(rank, lines);
            if Some(file) != files.last() {
                while self.read(rank)? {}
            }
        }
        Ok(())
    }

    fn read(&mut self, rank: Rank) -> Result<bool, Failure> {
        let Some(lines) = self.open.get_mut(&rank) else { return Ok(false) };
        let (out, pattern, prefix) = (&mut self.out, &self.pattern, self.prefix);
        let more = lines.read(&mut |line| {
            if pattern.as_ref().is_some_and(|p| !p.is_match(line)) {
                return;
            }
            if prefix {
                out.push_str(&format!("[rank {rank}] "));
            }
            let text = String::from_utf8_lossy(line);
            out.push_str(&if plain::to_person() { clean(&text) } else { text.into_owned() });
            out.push('\n');
        });
        let more = more.map_err(|e| failed(lines.path(), &e))?;
        self.write(false)?;
        Ok(more && !self.unread)
    }

    fn write(&mut self, all: bool) -> Result<(), Failure> {
        if !all && self.out.len() < BATCH {
            return Ok(());
        }
        match plain::stream(&std::mem::take(&mut self.out)) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.unread = true,
            Err(error) => return Err(Failure::new(Kind::Failed, "the output can't be written").cause(&error)),
            Ok(()) => {}
        }
        Ok(())
    }
}

fn failed(file: &Path, error: &io::Error) -> Failure {
    Failure::new(Kind::Failed, format!("{} can't be read", file.display())).cause(error)
}

/// `rank-3.log.2` → rank 3, two rotations ago.
fn log_name(name: &str) -> Option<(Rank, u32)> {
    let (rank, rest) = name.strip_prefix("rank-")?.split_once(".log")?;
    let age = match rest {
        "" => 0,
        _ => rest.strip_prefix('.')?.parse().ok()?,
    };
    Some((rank.parse().ok()?, age))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_known_by_their_names() {
        assert_eq!(log_name("rank-12.log"), Some((12, 0)));
        assert_eq!(log_name("rank-0.log.3"), Some((0, 3)));
        for other in ["rank-0.log.times", "rank-0.error.json", "rank-x.log", "rank-0.logs", "console.log"] {
            assert_eq!(log_name(other), None, "{other}");
        }
    }
}
