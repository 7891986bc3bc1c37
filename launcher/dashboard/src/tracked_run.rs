//! [`TrackedRun`]: a run whose journal (file of events) the dashboard reads while the run extends
//! it.
use crate::{
    growing_file_reader::GrowingFileReader,
    journal_line::truncate_json_value,
    log_files::read_log_ages,
    rank_grid::GridJson,
    run_source::{RunInfo, RunSource},
    run_view::{RunView, SERIES_COUNT, SERIES_NAMES},
    series::{SeriesReadPosition, SeriesUpdate},
    status_json::RunMeasurementsJson,
    status_reader::read_run_measurements,
};
use protocol::run_measurements::RunMeasurements;
use serde::Serialize;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    io::Read,
    time::{Duration, Instant},
};

/// The largest number of bytes of a run's journal (file of events) that one refresh reads.
const REFRESH_BYTES: u64 = 4 << 20;
/// The largest size of a run's `job.json` that is read, in bytes. A longer file is not shown.
const MAX_JOB_BYTES: u64 = 4 << 20;
/// The largest number of JSON values (numbers, texts, lists and objects) of a run's `job.json` that
/// the page of the dashboard shows.
const MAX_JOB_VALUES: usize = 20_000;
/// The interval at which the dashboard reads again whether a run is active, what its newest
/// measurements are, and when its ranks last wrote to their logs.
const STATE_REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// The largest number of log files of a run for which the time of the last write is read.
const MAX_LOGS_WITH_AGE: usize = 4096;

/// A run that the dashboard shows: its state according to its journal (file of events), its job,
/// and its newest measurements.
#[derive(Debug)]
pub(crate) struct TrackedRun {
    pub(crate) info: RunInfo,
    pub(crate) view: RunView,
    /// The content of `job.json`; `Null` if the file is not readable.
    job: Value,
    journal: GrowingFileReader,
    /// The share of the journal that was read, from 0 to 1.
    pub(crate) share: f64,
    /// Whether the journal was read to its end.
    pub(crate) is_loaded: bool,
    /// A number that increases when a reader must begin again, because the journal was replaced.
    epoch: u64,
    /// A number that increases with every change.
    version: u64,
    output_ages: BTreeMap<u32, Duration>,
    /// The newest measurements; `None` if there are none.
    pub(crate) status: Option<RunMeasurements>,
    next_state: Instant,
}

/// How much of a run's data a reader, such as a browser, has received, so that the next update
/// contains only the rest.
#[derive(Debug, Default)]
pub(crate) struct RunReadPosition {
    epoch: u64,
    version: u64,
    series: [SeriesReadPosition; SERIES_COUNT],
    events: u64,
    marks: u64,
}

/// The data of a run that is sent to a reader, such as a browser, because the reader does not have
/// it yet.
#[derive(Debug, Serialize)]
pub(crate) struct RunUpdate<'a> {
    /// Whether the reader must drop what it has of the run.
    reset: bool,
    info: &'a RunInfo,
    numbers: Value,
    /// The share of the journal that was read, from 0 to 1.
    share: f64,
    ranks: GridJson<'a>,
    /// The newest measurements; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<RunMeasurementsJson<'a>>,
    series: BTreeMap<&'static str, SeriesUpdate>,
    events: Vec<Value>,
    /// All marks; absent if no mark was added.
    #[serde(skip_serializing_if = "Option::is_none")]
    marks: Option<Value>,
    /// The job; absent if the reader has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<&'a Value>,
}

impl TrackedRun {
    /// Creates the state of the run `info` from its `job.json`, before any event of its journal is
    /// read.
    pub(crate) fn new(source: &dyn RunSource, info: RunInfo) -> TrackedRun {
        let job = read_job(source, &info).unwrap_or_default();
        let view = create_empty_view(&job, &info);
        let journal = GrowingFileReader::new(info.run_dir.join("events.jsonl"));
        TrackedRun {
            info,
            view,
            job,
            journal,
            share: 0.0,
            is_loaded: false,
            epoch: 1,
            version: 1,
            output_ages: BTreeMap::new(),
            status: None,
            next_state: Instant::now(),
        }
    }

    /// Reads the next lines of the run's journal (file of events) and, every few seconds, the run's
    /// status and measurements. Returns whether the journal was read to its end.
    pub(crate) fn refresh(&mut self, source: &dyn RunSource) -> bool {
        if Instant::now() >= self.next_state {
            self.refresh_state(source);
        }
        let (mut lines, view) = (0, &mut self.view);
        let read = self.journal.read_lines(source, REFRESH_BYTES, &mut |line| {
            lines += 1;
            view.add_journal_line(line);
        });
        self.version += u64::from(lines > 0);
        match read {
            // A run without a journal has just begun, or its files were removed.
            Err(_) => (self.share, self.is_loaded) = (1.0, true),
            Ok(progress) if progress.is_replaced => {
                self.view = create_empty_view(&self.job, &self.info);
                (self.share, self.is_loaded) = (0.0, false);
                (self.epoch, self.version) = (self.epoch + 1, self.version + 1);
            }
            Ok(progress) => (self.share, self.is_loaded) = (progress.share, progress.is_at_end),
        }
        self.is_loaded
    }

    /// Updates the run's status (active or not), its newest measurements and, if it is active, the
    /// times of the last writes to its log files.
    fn refresh_state(&mut self, source: &dyn RunSource) {
        self.next_state = Instant::now() + STATE_REFRESH_INTERVAL;
        if let Some(info) = source.reload_run(&self.info).filter(|info| *info != self.info) {
            self.info = info;
            self.version += 1;
        }
        let status = read_run_measurements(source, &self.info.run_dir);
        if status != self.status {
            self.status = status;
            self.version += 1;
        }
        if self.info.is_active {
            self.output_ages = read_log_ages(&self.info.run_dir.join("logs"), MAX_LOGS_WITH_AGE);
            self.version += u64::from(!self.output_ages.is_empty());
        } else {
            self.output_ages.clear();
        }
    }

    /// Returns the data of the run that one reader, such as a browser, does not have yet, and moves
    /// `position` to the present state. Returns `None` if nothing has changed.
    pub(crate) fn take_update(&self, position: &mut RunReadPosition) -> Option<RunUpdate<'_>> {
        if (position.epoch, position.version) == (self.epoch, self.version) {
            return None;
        }
        let reset = position.epoch != self.epoch;
        if reset {
            *position = RunReadPosition::default();
        }
        let series = SERIES_NAMES.iter().zip(&self.view.series).zip(&mut position.series);
        let series = series.filter_map(|((name, s), position)| Some((*name, s.take_update(position)?)));
        let series = series.collect();
        let to_value = |event| serde_json::to_value(event).unwrap_or_default();
        let events = self.view.log.list_after(position.events).into_iter().map(to_value).collect();
        let has_marks = position.marks != self.view.mark_count || reset;
        let marks = has_marks.then(|| serde_json::to_value(&self.view.marks).unwrap_or_default());
        (position.epoch, position.version) = (self.epoch, self.version);
        (position.events, position.marks) = (self.view.log.added_count(), self.view.mark_count);
        Some(RunUpdate {
            reset,
            info: &self.info,
            numbers: serde_json::to_value(&self.view.numbers).unwrap_or_default(),
            share: self.share,
            ranks: self.view.grid.to_json(&self.output_ages),
            status: self.status.as_ref().map(RunMeasurementsJson::new),
            series,
            events,
            marks,
            job: reset.then_some(&self.job),
        })
    }
}

/// Creates the state of a run that has no events yet, from the job and the host of the run.
fn create_empty_view(job: &Value, info: &RunInfo) -> RunView {
    RunView::new(!job["job"]["train"].is_null(), &info.host)
}

/// Reads the job of a run from the `job.json` in its run directory, with limits on the size.
fn read_job(source: &dyn RunSource, info: &RunInfo) -> Option<Value> {
    let mut bytes = Vec::new();
    let file = source.open_file(&info.run_dir.join("job.json")).ok()?;
    file.take(MAX_JOB_BYTES).read_to_end(&mut bytes).ok()?;
    Some(truncate_json_value(serde_json::from_slice(&bytes).ok()?, &mut MAX_JOB_VALUES.clone()))
}
