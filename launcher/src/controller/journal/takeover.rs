//! [`take_over_files`]: lets a new controller continue the files of a run directory after the loss
//! of the previous controller. [`JournalSummary`] holds what the journal contains about the run.
//!
//! The files are copied, and the copies replace them. A suspended controller that continues writes
//! to the replaced files, which have no name any more.
use super::journal_files::{EVENTS_FILE, JournalFiles, METRICS_FILE, format_metrics_line};
use crate::{
    controller::report_id::{CONTROLLER_REPORT_STREAM, ReportId},
    private_files::{create_or_truncate_private_file, open_own_file},
};
use protocol::event::{Event, TimedEvent};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

/// The length, in bytes, up to which a line of a run's journal (its file of events) is read. A
/// longer line is not an event, and is not copied.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// A summary of a run's journal (its file of events) for a controller that takes over the run, with
/// the last step and checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct JournalSummary {
    /// Maps the number of each sequence of reports to the number of the newest of these reports in
    /// the journal.
    newest: BTreeMap<u64, u64>,
    /// The time of the first event, in seconds since 1970; `None` in an empty journal.
    pub(crate) began_at: Option<f64>,
    /// Whether the journal records the end of the run.
    pub(crate) is_ended: bool,
    /// The last optimizer step of the run.
    pub(crate) step: Option<u64>,
    /// Whether the run has completed an optimizer step.
    pub(crate) has_stepped: bool,
    /// The number of the last optimizer step of the most recent attempt; `None` if unknown.
    pub(crate) attempt_step: Option<u64>,
    /// Whether the last attempt has completed a checkpoint.
    pub(crate) attempt_saved: bool,
    /// The directory of the newest checkpoint of the run.
    pub(crate) checkpoint: Option<PathBuf>,
    /// The number and the hosts of the most recent attempt; `None` if the journal does not record
    /// them.
    pub(crate) placement: Option<(u32, Vec<String>)>,
    /// The most recent `ready` event, which states the size of the model and of the training.
    pub(crate) ready: Option<Event>,
    /// The number of the newest event of a controller that reports a failure; 0 without one.
    pub(crate) last_failure: u64,
}

/// The part of a line of `events.jsonl` that identifies the message (report) from which the line
/// was written: the number of its sender, and its sequence number.
#[derive(Deserialize)]
struct LineOrigin {
    report: Option<ReportId>,
}

impl JournalSummary {
    /// Reads the journal (the file of events) in a run directory, and summarizes it. Blocks.
    pub(crate) fn read(run_dir: &Path) -> io::Result<JournalSummary> {
        let mut summary = JournalSummary::default();
        for_each_line(&run_dir.join(EVENTS_FILE), |line| {
            summary.add_line(line);
            Ok(())
        })?;
        Ok(summary)
    }

    /// Returns whether the journal contains the report with the given sender number and sequence
    /// number, or a later one of this sender.
    pub(crate) fn contains_report(&self, (stream, seq): ReportId) -> bool {
        self.newest.get(&stream).is_some_and(|newest| seq <= *newest)
    }

    /// Returns the sequence number of the newest event in the journal that a controller of the run
    /// has reported; 0 if there is no such event.
    pub(crate) fn newest_controller_event_number(&self) -> u64 {
        self.newest.get(&CONTROLLER_REPORT_STREAM).copied().unwrap_or(0)
    }

    /// Adds an event that a controller has written to the journal, with the sequence number
    /// `number`, to this summary of the journal.
    pub(crate) fn add_controller_event(&mut self, event: &Event, number: u64) {
        self.add_event(event, Some((CONTROLLER_REPORT_STREAM, number)));
    }

    /// Adds a line of the journal (the file of a run's events) to the summary. Returns the event of
    /// the line, or `None` for a line that is not an event.
    fn add_line(&mut self, line: &str) -> Option<TimedEvent> {
        let timed = TimedEvent::from_json(line).ok()?;
        let report = serde_json::from_str::<LineOrigin>(line).ok().and_then(|origin| origin.report);
        self.began_at.get_or_insert(timed.time);
        self.add_event(&timed.event, report);
        Some(timed)
    }

    /// Updates the summary of the journal with its next event, `event`. The event must follow the
    /// events that were added before.
    pub(crate) fn add_event(&mut self, event: &Event, report: Option<ReportId>) {
        self.newest.extend(report);
        match event {
            Event::Step { step, .. } => {
                (self.step, self.attempt_step, self.has_stepped) = (Some(*step), Some(*step), true);
            }
            Event::Resume { step, .. } => (self.step, self.attempt_step) = (Some(*step), Some(*step)),
            Event::Checkpoint { path, .. } => {
                (self.checkpoint, self.attempt_saved) = (Some(path.clone()), true);
            }
            Event::Placement { attempt, hosts, .. } => {
                self.placement = Some((*attempt, hosts.clone()));
                (self.attempt_step, self.attempt_saved) = (None, false);
            }
            Event::Failure(_) | Event::Restart { .. } => {
                self.last_failure = report.map_or(self.last_failure, |(_, number)| number);
            }
            Event::Ready { .. } => self.ready = Some(event.clone()),
            Event::Done { .. } => self.is_ended = true,
            _ => {}
        }
    }
}

/// Returns whether `event` announces a restart that did not happen, because the announcing
/// controller had already lost control of the agents. The agents know of `restarts` restarts. A
/// controller informs the agents of each restart before it writes the event.
pub(crate) fn is_restart_that_never_began(event: &Event, restarts: u32) -> bool {
    matches!(event, Event::Restart { attempt, .. } if *attempt > restarts)
}

/// Replaces the event and metrics files of a run by copies and opens the copies, so that a lost
/// controller cannot append to them. Opens a file for TensorBoard with this name. Omits a line that
/// a crash has interrupted, and the events for which [`is_restart_that_never_began`] returns
/// `true`. Blocks.
pub(super) fn take_over_files(
    run_dir: &Path,
    tensorboard: &str,
    restarts: u32,
) -> io::Result<(JournalFiles, JournalSummary)> {
    let mut summary = JournalSummary::default();
    let mut events = ReplacementFile::create(run_dir, EVENTS_FILE)?;
    // Metrics follow from the events, so a line that only one of the files has is not lost.
    let mut metrics = ReplacementFile::create(run_dir, METRICS_FILE)?;
    for_each_line(&run_dir.join(EVENTS_FILE), |line| {
        if TimedEvent::from_json(line).is_ok_and(|timed| is_restart_that_never_began(&timed.event, restarts))
        {
            return Ok(());
        }
        if let Some(timed) = summary.add_line(line) {
            events.file.write_all(line.as_bytes())?;
            if let Some(line) = format_metrics_line(&timed.event, timed.time) {
                metrics.file.write_all(line.as_bytes())?;
            }
        }
        Ok(())
    })?;
    metrics.replace_target()?;
    events.replace_target()?;
    Ok((JournalFiles::open(run_dir, tensorboard)?, summary))
}

/// Calls the function `handle` with each complete line of the file at `path`, a run's journal of
/// events, including the line break. A missing file has no lines.
fn for_each_line(path: &Path, mut handle: impl FnMut(&str) -> io::Result<()>) -> io::Result<()> {
    let file = match open_own_file(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    while io::Read::take(&mut reader, MAX_LINE_BYTES).read_until(b'\n', &mut line)? > 0 {
        if line.ends_with(b"\n")
            && let Ok(text) = str::from_utf8(&line)
        {
            handle(text)?;
        }
        line.clear();
    }
    Ok(())
}

/// A new file that is written completely before it replaces a file of the run directory.
struct ReplacementFile {
    file: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
}

impl ReplacementFile {
    /// Creates an empty file that is to replace the file `name` in `directory`.
    fn create(directory: &Path, name: &str) -> io::Result<ReplacementFile> {
        let temporary = directory.join(format!(".{name}.takeover"));
        // A controller that was lost during its takeover may have left a file.
        let file = BufWriter::new(create_or_truncate_private_file(&temporary)?);
        Ok(ReplacementFile { file, temporary, path: directory.join(name) })
    }

    /// Syncs this new file to the disk and renames it over the file of the run directory that it
    /// replaces.
    fn replace_target(self) -> io::Result<()> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs::rename(&self.temporary, &self.path)?;
        match self.path.parent() {
            Some(directory) => File::open(directory)?.sync_all(),
            None => Ok(()),
        }
    }
}
