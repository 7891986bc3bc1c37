//! Runs the parts of `launch gpu-check` one after the other, each in a separate process, prints
//! their rows and writes the JSON file. This process never opens the GPU.
use super::{
    message::{PartMessage, Row, RowResult},
    part_process::{PartCommand, PartEnd, PartOutcome, run_part_process},
    parts::{ENVIRONMENT, Part, PartFilter},
    report_file::{PartRecord, Report},
    table::Table,
};
use diagnostic::{Category, Diagnostic};
use serde_json::Map;
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The options of running parts.
pub(super) struct RunOptions<'a> {
    pub(super) device: usize,
    pub(super) filter: PartFilter,
    /// The time for all parts together.
    pub(super) seconds: u64,
    /// The JSON file to write after every part.
    pub(super) json: Option<&'a Path>,
    /// The JSON file of an earlier check, whose passed parts are not repeated.
    pub(super) resume: Option<&'a Path>,
}

/// The state of a check of several parts.
struct PartRunner<'a> {
    options: RunOptions<'a>,
    began: Instant,
    table: Table,
    report: Report,
    /// The error because of which the GPU is not usable.
    unusable: Option<Diagnostic>,
}

/// Runs `parts`, and prints and stores their results. Returns whether no row has failed.
///
/// # Errors
///
/// Fails with the category `Cluster` if the GPU is not usable, and if the JSON file cannot be read
/// or written.
pub(super) fn run_parts(options: RunOptions, parts: &[Part]) -> diagnostic::Result<bool> {
    let tiny = options.filter.tiny;
    let earlier = options.resume.map(|path| Report::read(path, tiny)).transpose()?;
    let began = Instant::now();
    let (table, report) = (Table::new(began), Report::new(tiny));
    let mut runner = PartRunner { options, began, table, report, unusable: None };
    for part in parts {
        let record = match earlier.as_ref().and_then(|report| report.find_passed_part(&part.name)) {
            Some(record) => {
                let row = Row::skipped("all", "passed in the earlier check");
                runner.table.print_row(&part.name, &row);
                record.clone()
            }
            None => runner.run_or_skip(part),
        };
        runner.report.parts.push(record);
        runner.write_report()?;
    }
    runner.write_report()?;
    let has_failed = runner.report.parts.iter().any(|part| part.result == RowResult::Failed);
    runner.unusable.map_or(Ok(!has_failed), Err)
}

impl PartRunner<'_> {
    /// Returns the time that is left for parts.
    fn time_left(&self) -> Duration {
        Duration::from_secs(self.options.seconds).saturating_sub(self.began.elapsed())
    }

    /// Runs a part, or skips it if the GPU is not usable or too little time is left.
    fn run_or_skip(&mut self, part: &Part) -> PartRecord {
        let left = self.time_left().as_secs();
        let cause = if self.unusable.is_some() {
            Some("the GPU is not usable".to_owned())
        } else if left < part.expected_seconds {
            Some(format!("takes about {} s, and {left} s are left", part.expected_seconds))
        } else {
            None
        };
        let Some(cause) = cause else { return self.run(part) };
        let row = Row::skipped("all", cause);
        self.table.print_row(&part.name, &row);
        PartRecord {
            name: part.name.clone(),
            result: RowResult::Skipped,
            began_at: self.began.elapsed().as_secs_f64(),
            seconds: 0.0,
            rows: vec![row],
            details: Map::new(),
            output: Vec::new(),
            repeats: Vec::new(),
        }
    }

    /// Runs a part in a process, and prints its rows as they arrive.
    fn run(&mut self, part: &Part) -> PartRecord {
        let command = self.build_command(part);
        let limit = Duration::from_secs(part.limit_seconds).min(self.time_left());
        let (mut rows, mut details, mut end) = (Vec::new(), Map::new(), None);
        let began_at = self.began.elapsed().as_secs_f64();
        let outcome = run_part_process(&command, limit, |message| match message {
            PartMessage::Row(row) => {
                self.table.print_row(&part.name, &row);
                rows.push(row);
            }
            PartMessage::Details { name, value } => {
                details.insert(name, value);
            }
            PartMessage::Done => end = Some(Ok(())),
            PartMessage::Failed { error } => end = Some(Err(*error)),
        });
        let PartOutcome { end: process_end, seconds, output } = outcome;
        if let Some(cause) = self.find_failure(part, end, &process_end) {
            let row = Row::failed("all", cause);
            self.table.print_row(&part.name, &row);
            rows.push(row);
        }
        let result = summarize(&rows);
        let output = if result == RowResult::Failed { output } else { Vec::new() };
        if !output.is_empty() {
            let title = format!("The output of {} ends with:", part.name);
            let lines = output.iter().map(|line| format!("    {line}"));
            self.table.print_paragraph(std::iter::once(title).chain(lines));
        }
        PartRecord {
            name: part.name.clone(),
            result,
            began_at,
            seconds,
            rows,
            details,
            output,
            repeats: Vec::new(),
        }
    }

    /// Returns why a part failed, or `None` if its process ended as it should. `end` is the last
    /// message of the process, if it sent one.
    fn find_failure(
        &mut self,
        part: &Part,
        end: Option<diagnostic::Result<()>>,
        process_end: &PartEnd,
    ) -> Option<String> {
        match (end, process_end) {
            (Some(Ok(())), PartEnd::Exited(status)) if status.success() => None,
            (Some(Err(error)), PartEnd::Exited(_)) => {
                let cause = format!("{}: {}", error.code().name(), error.message());
                if part.name == ENVIRONMENT && error.category() == Category::Cluster {
                    self.unusable = Some(error);
                }
                Some(cause)
            }
            (_, end) => Some(end.describe()),
        }
    }

    /// Builds the command line of the process of a part.
    fn build_command(&self, part: &Part) -> PartCommand {
        let PartFilter { quick, tiny, ops_only: _ } = self.options.filter;
        let device = self.options.device.to_string();
        let mut arguments: Vec<OsString> =
            ["gpu-check", "--run-part", &part.name, "--device", &device].map(OsString::from).into();
        arguments.extend(quick.then(|| "--quick".into()));
        arguments.extend(tiny.then(|| "--tiny".into()));
        PartCommand { wrapper: Vec::new(), arguments, variables: Vec::new() }
    }

    /// Writes the JSON file, if one is requested.
    fn write_report(&mut self) -> diagnostic::Result<()> {
        self.report.seconds = self.began.elapsed().as_secs_f64();
        self.options.json.map(Path::to_owned).map_or(Ok(()), |path: PathBuf| self.report.write(&path))
    }
}

/// Returns the result of a part with these rows: failed if one row failed, and skipped if every row
/// was skipped.
fn summarize(rows: &[Row]) -> RowResult {
    let has = |result| rows.iter().any(|row| row.result == result);
    match () {
        () if has(RowResult::Failed) => RowResult::Failed,
        () if has(RowResult::Ok) => RowResult::Ok,
        () if has(RowResult::Measured) || rows.is_empty() => RowResult::Measured,
        () => RowResult::Skipped,
    }
}
