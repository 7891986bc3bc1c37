//! [`JournalFiles`]: the files of a run directory to which a journal appends.
use super::durable_file::DurableFile;
use crate::controller::{report_id::ReportId, tensorboard};
use protocol::event::{Event, EventSchema};
use std::{collections::BTreeMap, io, path::Path};

/// The name of the file with all events of a run, in the run directory.
pub(super) const EVENTS_FILE: &str = "events.jsonl";
/// The name of the file with the metrics of steps and evaluations, in the run directory.
pub(super) const METRICS_FILE: &str = "metrics.jsonl";

/// The open files of a run's journal: events, metrics and TensorBoard's event file. Only the thread
/// of the journal uses them.
pub(super) struct JournalFiles {
    pub(super) events: DurableFile,
    metrics: DurableFile,
    pub(super) tensorboard: DurableFile,
    /// The newest report of each agent, and of the controllers, that was written to the files but
    /// is not known to be on the disk. The keys are the numbers of the sequences of reports.
    pub(super) unsynced: BTreeMap<u64, u64>,
}

impl std::fmt::Debug for JournalFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalFiles").field("unsynced", &self.unsynced).finish_non_exhaustive()
    }
}

impl JournalFiles {
    /// Opens the files of events and metrics in a run directory for appending. Creates them if they
    /// do not exist. Creates a file for TensorBoard with this name.
    pub(super) fn open(run_dir: &Path, tensorboard: &str) -> io::Result<JournalFiles> {
        let open = |name: &str| DurableFile::open(&run_dir.join(name));
        let tensorboard = open(tensorboard)?;
        let (events, metrics) = (open(EVENTS_FILE)?, open(METRICS_FILE)?);
        Ok(JournalFiles { events, metrics, tensorboard, unsynced: BTreeMap::new() })
    }

    /// Appends an event of the run to `events.jsonl` and, for an event with metrics such as the
    /// loss, also to `metrics.jsonl` and TensorBoard's event file. `time` is in seconds since 1970.
    /// Blocks until the file system accepts the event.
    pub(super) fn append_event(
        &mut self,
        event: &Event,
        time: f64,
        report: Option<ReportId>,
        on_error: &mut dyn FnMut(&io::Error),
    ) {
        self.events.append(format_journal_line(event, time, report).as_bytes(), on_error);
        if let Some(line) = format_metrics_line(event, time) {
            self.metrics.append(line.as_bytes(), on_error);
        }
        if let Some(record) = tensorboard::encode_event_record(event, time) {
            self.tensorboard.append(&record, on_error);
        }
        self.unsynced.extend(report);
    }

    /// Blocks until everything that was appended to the files of the journal is on the disk.
    /// Returns the newest report of each stream that has reached the disk by this call.
    pub(super) fn sync(&mut self, on_error: &mut dyn FnMut(&io::Error)) -> Vec<ReportId> {
        self.events.sync(on_error);
        self.metrics.sync(on_error);
        self.tensorboard.sync(on_error);
        std::mem::take(&mut self.unsynced).into_iter().collect()
    }
}

/// Formats an event as a line of the journal's file `events.jsonl`.
fn format_journal_line(event: &Event, time: f64, report: Option<ReportId>) -> String {
    // An event has no value that JSON cannot represent.
    let mut line = event.to_json_with_time(EventSchema::V2, time).unwrap_or_default();
    if let (Some((stream, seq)), Some('}')) = (report, line.pop()) {
        line.push_str(&format!(r#","report":[{stream},{seq}]}}"#));
    } else {
        line.push('}');
    }
    line.push('\n');
    line
}

/// Formats the metrics of an event, such as the loss of a step, as a line of `metrics.jsonl`.
/// Returns `None` for an event without metrics.
pub(super) fn format_metrics_line(event: &Event, time: f64) -> Option<String> {
    let has_metrics = matches!(
        event,
        Event::Step { .. } | Event::Eval { .. } | Event::Sample { .. } | Event::Overflow { .. }
    );
    // Metrics have no schema number.
    let line = has_metrics.then(|| event.to_json_with_time(EventSchema::V1, time))?;
    line.ok().map(|line| line + "\n")
}
