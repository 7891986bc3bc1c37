//! `launch logs`: prints the output of the ranks of a run from the log files.
use super::{
    context::CommandContext,
    option_value::OptionValueError,
    output::{output_error, path_error},
    ps::resolve_run,
};
use crate::{
    agent::log_times::find_offset_at,
    clock::read_unix_time_ms,
    line_follower::{LineFollower, POLL_INTERVAL},
    open_file_limit::raise_open_file_limit,
    report::command_output,
    runs::{Run, RunFilter},
};
use clap::Args;
use diagnostic::{Diagnostic, codes::command, quantity::format_count, terminal_text::filter_colored_text};
use jobspec::ids::Rank;
use regex::bytes::Regex;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

/// The help text for a rank whose log is not on this host.
const LOG_ON_OTHER_HOST_HELP: &str = "without a shared run directory each host keeps its logs; \
                                   `run.logs.show` selects the ranks whose output is copied here";
/// The beginning of the names of the files in which the controller stores the console output of
/// ranks on other hosts. The controller keeps these copies for ranks whose logs are on other hosts.
const CONSOLE_COPY_PREFIX: &str = "streamed-";
/// The number of bytes of log text that are collected before they are written to stdout.
const WRITE_BATCH_BYTES: usize = 64 << 10;

/// Arguments of `launch logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run, or the newest run if none is active]
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Only these ranks, such as 3 or 0-3,7 [default: all]
    #[arg(long, value_name = "RANKS", value_delimiter = ',', value_parser = parse_ranks)]
    rank: Vec<Vec<u32>>,
    /// Also show new lines, until the run ends
    #[arg(long, short)]
    follow: bool,
    /// Only lines that match this regular expression
    #[arg(long, value_name = "RE")]
    grep: Option<String>,
    /// Only lines of the last DURATION, such as 30s, 10m or 2h; accurate to about a second
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_ms)]
    since: Option<u64>,
    /// Print control characters unchanged, although they can change the terminal and its content
    #[arg(long)]
    raw: bool,
}

/// The number above all ranks that `--rank` of `launch logs` accepts, which limits the size of a
/// range of ranks.
const MAX_RANK_COUNT: u32 = 1 << 20;

/// Parses one rank, such as `3`, or a range of ranks, such as `0-3`. Returns the ranks in ascending
/// order.
fn parse_ranks(text: &str) -> Result<Vec<u32>, OptionValueError> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse(), last.trim().parse()) {
        (Ok(first), Ok(last)) if first <= last && last < MAX_RANK_COUNT => Ok((first..=last).collect()),
        _ => Err(OptionValueError::Ranks),
    }
}

/// Parses a duration with a unit, such as `30s`. Returns the duration in milliseconds.
fn parse_duration_ms(text: &str) -> Result<u64, OptionValueError> {
    jobspec::parse_duration(text).ok_or(OptionValueError::Duration)
}

/// Runs `launch logs`: prints the logs of a run and returns the exit code.
pub(crate) fn run(args: LogsArgs, _context: &CommandContext) -> diagnostic::Result<u8> {
    let run = resolve_run(args.run.as_deref(), RunFilter::Any)?;
    LogViewer::new(&run, &args)?.show_logs()?;
    Ok(protocol::exit::DONE)
}

/// The state of `launch logs`: the selected ranks, the filters of the command line, and the log
/// files that are open.
struct LogViewer<'a> {
    run: &'a Run,
    directory: PathBuf,
    /// The selected ranks; `None` selects all ranks.
    ranks: Option<BTreeSet<Rank>>,
    pattern: Option<Regex>,
    since_ms: u64,
    follow: bool,
    /// Whether each printed line begins with the rank that wrote the line.
    prefix: bool,
    /// Whether control characters of the lines are printed.
    raw: bool,
    followers: BTreeMap<Rank, LineFollower>,
    out: String,
    /// Whether the process that reads the stdout of `launch logs` has closed the pipe.
    reader_gone: bool,
}

impl<'a> LogViewer<'a> {
    /// Creates the state of `launch logs` for the log files of a run, with the ranks and the search
    /// pattern from the command line. Fails if the pattern of `--grep` is invalid, or if the run
    /// does not have a rank of `--rank`.
    fn new(run: &'a Run, args: &LogsArgs) -> diagnostic::Result<Self> {
        let pattern = args.grep.as_deref().map(Regex::new).transpose();
        let pattern = pattern.map_err(|e| {
            Diagnostic::error(command::PATTERN_INVALID, "`--grep` is not a valid regular expression")
                .with_subject("--grep")
                .with_cause(&e)
        })?;
        let world = run.record.world;
        let ranks: Option<BTreeSet<Rank>> =
            (!args.rank.is_empty()).then(|| args.rank.concat().into_iter().collect());
        if let Some(rank) = ranks.iter().flatten().find(|rank| **rank >= world) {
            let workers = format_count(world, "worker");
            let message = format!("there is no rank {rank}: the run has {workers}");
            return Err(Diagnostic::error(command::RANK_OUT_OF_RANGE, message)
                .with_subject("--rank")
                .with_field("rank", *rank)
                .with_field("world_size", world));
        }
        Ok(LogViewer {
            run,
            directory: run.record.run_dir.join("logs"),
            prefix: ranks.as_ref().map_or(world as usize, BTreeSet::len) > 1,
            ranks,
            pattern,
            since_ms: args.since.map_or(0, |ms| read_unix_time_ms().saturating_sub(ms)),
            follow: args.follow,
            raw: args.raw,
            followers: BTreeMap::new(),
            out: String::new(),
            reader_gone: false,
        })
    }

    /// Prints the logs of the selected ranks. With `--follow`, also prints new lines until the
    /// controller has ended. Returns early if the reader of stdout closes the pipe.
    fn show_logs(mut self) -> diagnostic::Result<()> {
        let mut opened: BTreeSet<Rank> = BTreeSet::new();
        if self.follow {
            // The log of each rank stays open. If the limit stays low, opening a log may fail.
            _ = raise_open_file_limit();
        }
        loop {
            // Checked before reading, so that everything written before the controller's end is
            // read.
            let may_grow = self.follow && self.run.record.controller.is_alive();
            for (rank, files) in self.list_log_files() {
                if opened.insert(rank) {
                    self.print_or_open_logs(rank, &files)?;
                }
            }
            let mut more = false;
            for rank in self.followers.keys().copied().collect::<Vec<_>>() {
                more |= self.collect_lines(rank)?;
            }
            self.write_collected_lines(true)?;
            match (more, may_grow) {
                _ if self.reader_gone => return Ok(()),
                (true, _) => {}
                (false, true) => std::thread::sleep(POLL_INTERVAL),
                (false, false) if opened.is_empty() => return Err(self.missing_logs_error()),
                (false, false) => {
                    self.report_missing_logs(&opened);
                    return Ok(());
                }
            }
        }
    }

    /// Creates the error that the log directory of the run on this host has no log of a selected
    /// rank.
    fn missing_logs_error(&self) -> Diagnostic {
        let (run, directory) = (&self.run.record.run, self.directory.display().to_string());
        Diagnostic::error(command::RUN_LOGS_MISSING, format!("run {run} has no logs in {directory}"))
            .with_subject(run)
            .with_field("directory", directory)
            .with_help("the run ended before a worker started, or the logs were removed")
            .with_help(LOG_ON_OTHER_HOST_HELP)
    }

    /// Prints a note to stderr with the number of selected ranks whose logs are missing on this
    /// host. Prints nothing if all of them are in `opened`.
    fn report_missing_logs(&self, opened: &BTreeSet<Rank>) {
        let selected = (0..self.run.record.world).filter(|rank| self.is_rank_selected(*rank));
        let missing = selected.filter(|rank| !opened.contains(rank)).count();
        if missing > 0 {
            let ranks = format_count(missing, "rank");
            command_output::write_message(&format!("note: the logs of {ranks} are not on this host\n"));
            command_output::write_message(&format!("  help: {LOG_ON_OTHER_HOST_HELP}\n"));
        }
    }

    /// Returns whether the user has selected this rank with `--rank`; without `--rank`, all ranks
    /// are selected.
    fn is_rank_selected(&self, rank: Rank) -> bool {
        self.ranks.as_ref().is_none_or(|ranks| ranks.contains(&rank))
    }

    /// Lists the log files of each selected rank, the oldest first: `rank-0.log.2`, `rank-0.log.1`,
    /// `rank-0.log`. If the log of a rank is on another host, lists the copy of the rank's console
    /// output instead.
    fn list_log_files(&self) -> BTreeMap<Rank, Vec<PathBuf>> {
        let mut logs: BTreeMap<Rank, Vec<(u32, PathBuf)>> = BTreeMap::new();
        let mut copies: BTreeMap<Rank, PathBuf> = BTreeMap::new();
        for path in fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|e| e.path()) {
            let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
            let parse = |name: &str| parse_log_name(name).filter(|(rank, _)| self.is_rank_selected(*rank));
            if let Some((rank, _)) = name.strip_prefix(CONSOLE_COPY_PREFIX).and_then(parse) {
                copies.insert(rank, path);
            } else if let Some((rank, rotations)) = parse(name) {
                logs.entry(rank).or_default().push((rotations, path));
            }
        }
        for (rank, path) in copies {
            logs.entry(rank).or_insert_with(|| vec![(0, path)]);
        }
        let sorted = |mut files: Vec<(u32, PathBuf)>| {
            files.sort_by_key(|(rotations, _)| std::cmp::Reverse(*rotations));
            files.into_iter().map(|(_, path)| path).collect()
        };
        logs.into_iter().map(|(rank, files)| (rank, sorted(files))).collect()
    }

    /// Prints the older (rotated) log files of a rank, and opens the newest one, whose lines are
    /// printed later. Without `--follow`, prints and closes the newest one, too, so that a run may
    /// have more ranks than this process may open files. `files` are sorted from the oldest to the
    /// newest.
    fn print_or_open_logs(&mut self, rank: Rank, files: &[PathBuf]) -> diagnostic::Result<()> {
        for file in files {
            let end = fs::metadata(file).map_or(0, |m| m.len());
            let from = if self.since_ms == 0 { 0 } else { find_offset_at(file, self.since_ms, end) };
            let follower =
                LineFollower::open(file.clone(), from).map_err(|e| unreadable_log_error(file, &e))?;
            self.followers.insert(rank, follower);
            if !self.follow || Some(file) != files.last() {
                while self.collect_lines(rank)? {}
                self.followers.remove(&rank);
            }
        }
        Ok(())
    }

    /// Reads the next lines of a rank's open log, and collects the lines that match `--grep` for
    /// stdout. Returns whether there may be more lines.
    fn collect_lines(&mut self, rank: Rank) -> diagnostic::Result<bool> {
        let Some(follower) = self.followers.get_mut(&rank) else { return Ok(false) };
        let (out, pattern, prefix, raw) = (&mut self.out, &self.pattern, self.prefix, self.raw);
        let more = follower.read_lines(&mut |line| {
            if pattern.as_ref().is_some_and(|p| !p.is_match(line)) {
                return;
            }
            if prefix {
                out.push_str(&format!("[rank {rank}] "));
            }
            let text = String::from_utf8_lossy(line);
            out.push_str(&if raw { text.into_owned() } else { filter_colored_text(&text) });
            out.push('\n');
        });
        let more = more.map_err(|e| unreadable_log_error(follower.path(), &e))?;
        self.write_collected_lines(false)?;
        Ok(more && !self.reader_gone)
    }

    /// Writes the collected text to stdout if it has at least [`WRITE_BATCH_BYTES`] or if `flush`
    /// is set. Records a closed pipe in `reader_gone`.
    fn write_collected_lines(&mut self, flush: bool) -> diagnostic::Result<()> {
        if !flush && self.out.len() < WRITE_BATCH_BYTES {
            return Ok(());
        }
        match command_output::write_filtered_text(&std::mem::take(&mut self.out)) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.reader_gone = true,
            Err(error) => return Err(output_error(&error)),
            Ok(()) => {}
        }
        Ok(())
    }
}

/// Creates the error that the log file `file` cannot be read.
fn unreadable_log_error(file: &Path, error: &io::Error) -> Diagnostic {
    path_error(command::RUN_FILE_UNREADABLE, "cannot read", file, error)
}

/// Parses the name of a log file, such as `rank-3.log.2` for the log of rank 3 after two rotations.
/// Returns the rank and the number of rotations, or `None` if the file is not a log.
fn parse_log_name(name: &str) -> Option<(Rank, u32)> {
    let (rank, rest) = name.strip_prefix("rank-")?.split_once(".log")?;
    let rotations = match rest {
        "" => 0,
        _ => rest.strip_prefix('.')?.parse().ok()?,
    };
    Some((rank.parse().ok()?, rotations))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_files_are_recognized_by_their_names() {
        assert_eq!(parse_log_name("rank-12.log"), Some((12, 0)));
        assert_eq!(parse_log_name("rank-0.log.3"), Some((0, 3)));
        for other in ["rank-0.log.times", "rank-0.error.json", "rank-x.log", "rank-0.logs", "console.log"] {
            assert_eq!(parse_log_name(other), None, "{other}");
        }
    }
}
