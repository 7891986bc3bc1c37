//! Runs the parts of `launch gpu-check` one after the other, each in a separate process, prints
//! their rows and writes the JSON file. This process never opens the GPU.
use super::{
    memory_file::MemoryFile,
    message::{PartMessage, ResultRow, RowResult},
    part_filter::PartFilter,
    part_process::{PartCommand, PartEnd, PartOutcome, find_sanitizer, run_part_process},
    parts::{ENVIRONMENT_PART, Part},
    report_file::{GpuCheckReport, PartRecord},
    table::ResultTable,
};
use device::cuda::read_launch_log;
use diagnostic::{Category, Diagnostic};
use jobspec::env;
use serde_json::Map;
use std::{
    io,
    path::Path,
    time::{Duration, Instant},
};

/// The longest run time of a failed part of the GPU check that is repeated immediately, instead of
/// after all other parts.
const MAX_QUICK_FAILURE_TIME: Duration = Duration::from_secs(30);
/// The time limit for repeating a failed part of the GPU check with blocking kernel launches
/// (`CUDA_LAUNCH_BLOCKING`), to find the kernel that failed.
const MAX_REPEAT_TIME: Duration = Duration::from_secs(60);
/// The time limit for repeating a failed part of the GPU check under compute-sanitizer, which
/// detects invalid memory accesses.
const MAX_SANITIZED_REPEAT_TIME: Duration = Duration::from_secs(120);
/// The time that must be left until the time limit of the whole GPU check for a failed part to be
/// repeated.
const MIN_REPEAT_TIME: Duration = Duration::from_secs(2);

/// The largest number of GPU calls that are printed for a failed part of the GPU check, namely the
/// last ones before the failure.
const MAX_REPORTED_LAUNCHES: usize = 32;

/// The options of a run of `launch gpu-check` that apply to all its parts, such as the device and
/// the time limit.
pub(super) struct CheckRunOptions<'a> {
    pub(super) device: usize,
    pub(super) filter: PartFilter,
    /// The time for all parts together.
    pub(super) seconds: u64,
    /// The JSON file to write after every part.
    pub(super) report: Option<&'a Path>,
    /// The JSON file of an earlier check, whose passed parts are not repeated.
    pub(super) resume: Option<&'a Path>,
}

/// Whether a part of the GPU check runs normally, or is repeated with blocking kernel launches or
/// under compute-sanitizer to find the cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartRunMode {
    Normal,
    /// Each launch waits for its end, so that the failing launch reports the failure.
    Blocking,
    /// Under compute-sanitizer.
    Sanitized,
}

impl PartRunMode {
    /// Returns how the result table names the part `part` of the GPU check in this mode, for
    /// example with the suffix `, compute-sanitizer`.
    fn display_name_of_part(self, part: &str) -> String {
        match self {
            PartRunMode::Normal => part.to_owned(),
            PartRunMode::Blocking => format!("{part}, blocking launches"),
            PartRunMode::Sanitized => format!("{part}, compute-sanitizer"),
        }
    }
}

/// Runs the parts of the GPU check one after the other, as long as time is left, and collects their
/// results.
struct PartRunner<'a> {
    options: CheckRunOptions<'a>,
    began: Instant,
    table: ResultTable,
    report: GpuCheckReport,
    /// The error because of which the GPU is not usable.
    unusable: Option<Diagnostic>,
}

/// Runs the parts `parts` of the GPU check, each in a separate process, and prints and stores their
/// results. Returns whether no row has failed.
///
/// # Errors
///
/// Fails with the category `Cluster` if the GPU is not usable, and if the JSON file cannot be read
/// or written.
pub(super) fn run_parts(options: CheckRunOptions, parts: &[Part]) -> diagnostic::Result<bool> {
    let tiny = options.filter.tiny;
    let earlier = options.resume.map(|path| GpuCheckReport::read(path, tiny)).transpose()?;
    let began = Instant::now();
    let (table, report) = (ResultTable::new(began), GpuCheckReport::new(tiny));
    let mut runner = PartRunner { options, began, table, report, unusable: None };
    for part in parts {
        let record = match earlier.as_ref().and_then(|report| report.find_passed_part(&part.name)) {
            Some(record) => {
                runner.table.print_row(&part.name, &ResultRow::skipped("all", "passed in the earlier check"));
                record.clone()
            }
            None => runner.run_or_skip_part(part),
        };
        runner.report.parts.push(record);
        runner.write_report()?;
    }
    runner.repeat_failures(parts)?;
    let has_failed = runner.report.parts.iter().any(|part| part.result == RowResult::Failed);
    runner.unusable.map_or(Ok(!has_failed), Err)
}

impl PartRunner<'_> {
    /// Returns the time that is left for further parts of the GPU check.
    fn remaining_check_time(&self) -> Duration {
        Duration::from_secs(self.options.seconds).saturating_sub(self.began.elapsed())
    }

    /// Runs a part of the GPU check, or records it as skipped if the GPU is not usable or too
    /// little time is left. Repeats a part that fails soon.
    fn run_or_skip_part(&mut self, part: &Part) -> PartRecord {
        let left = self.remaining_check_time().as_secs();
        let cause = if self.unusable.is_some() {
            Some("the GPU is not usable".to_owned())
        } else if left < part.expected_seconds {
            Some(format!("takes about {} s, and {left} s are left", part.expected_seconds))
        } else {
            None
        };
        if let Some(cause) = cause {
            let row = ResultRow::skipped("all", cause);
            self.table.print_row(&part.name, &row);
            return PartRecord::new_skipped(&part.name, self.began.elapsed().as_secs_f64(), row);
        }
        let limit = Duration::from_secs(part.limit_seconds);
        let mut record = self.run_part_in_process(part, PartRunMode::Normal, limit);
        let has_failed = record.result == RowResult::Failed && self.unusable.is_none();
        // A part that hangs would hang again, so its repetition comes after the other parts.
        let is_quick = record.seconds < MAX_QUICK_FAILURE_TIME.min(limit).as_secs_f64();
        if has_failed && is_quick {
            let limit = Duration::from_secs_f64(5.0 + 3.0 * record.seconds);
            record.repeats.extend(self.repeat_part(part, PartRunMode::Blocking, limit));
        }
        record
    }

    /// Repeats failed parts of the GPU check to find the causes, first with blocking kernel
    /// launches and then under compute-sanitizer. Parts that were already repeated with blocking
    /// launches are only repeated under compute-sanitizer.
    fn repeat_failures(&mut self, parts: &[Part]) -> diagnostic::Result<()> {
        let sanitizer = find_sanitizer();
        for mode in [PartRunMode::Blocking, PartRunMode::Sanitized] {
            for number in 0..self.report.parts.len() {
                let record = &self.report.parts[number];
                let has_failed = record.result == RowResult::Failed && self.unusable.is_none();
                let is_repeated = mode == PartRunMode::Blocking && !record.repeats.is_empty();
                let is_possible = mode == PartRunMode::Blocking || sanitizer.is_some();
                let Some(part) = parts.iter().find(|part| part.name == record.name) else { continue };
                if !has_failed || is_repeated || !is_possible {
                    continue;
                }
                let limit = match mode {
                    PartRunMode::Sanitized => MAX_SANITIZED_REPEAT_TIME,
                    _ => MAX_REPEAT_TIME.min(Duration::from_secs(part.limit_seconds)),
                };
                if let Some(repeat) = self.repeat_part(part, mode, limit) {
                    self.report.parts[number].repeats.push(repeat);
                    self.write_report()?;
                }
            }
        }
        self.write_report()
    }

    /// Repeats a failed part of the GPU check with blocking kernel launches or under
    /// compute-sanitizer, as `mode` selects. Returns `None` if too little time is left.
    fn repeat_part(&mut self, part: &Part, mode: PartRunMode, limit: Duration) -> Option<PartRecord> {
        (self.remaining_check_time() >= MIN_REPEAT_TIME).then(|| self.run_part_in_process(part, mode, limit))
    }

    /// Runs a part of the GPU check in a new process, and prints its rows of the result table as
    /// they arrive. Prints the last launches and the output of a part that fails.
    fn run_part_in_process(&mut self, part: &Part, mode: PartRunMode, limit: Duration) -> PartRecord {
        let name = mode.display_name_of_part(&part.name);
        let launch_log = MemoryFile::create();
        let command = self.build_part_command(part, mode, launch_log.as_ref().ok());
        let (mut rows, mut details, mut end) = (Vec::new(), Map::new(), None);
        let began_at = self.began.elapsed().as_secs_f64();
        let limit = limit.min(self.remaining_check_time());
        let outcome = run_part_process(&command, limit, |message| match message {
            PartMessage::Row(row) => {
                self.table.print_row(&name, &row);
                rows.push(row);
            }
            PartMessage::Details { name, value } => {
                details.insert(name, value);
            }
            PartMessage::Done => end = Some(Ok(())),
            PartMessage::Failed { error } => end = Some(Err(*error)),
        });
        let PartOutcome { end: process_end, seconds, output } = outcome;
        if let Some(cause) = self.find_failure_reason(part, end, &process_end, &rows) {
            let row = ResultRow::failed("all", cause);
            self.table.print_row(&name, &row);
            rows.push(row);
        }
        let mut record = PartRecord::new(&name, began_at, seconds, rows, details);
        if record.result == RowResult::Failed || mode == PartRunMode::Sanitized {
            record.output = output;
            record.launches = launch_log
                .and_then(|log| read_last_launches(&log))
                .unwrap_or_else(|error| vec![format!("the launch log is not available: {error}")]);
            self.print_failure_evidence(&record);
        }
        record
    }

    /// Returns the reason why a part of the GPU check failed, for a row of the result table, unless
    /// the part's process succeeded or already reported the failure. `rows` are the result rows of
    /// the part. `end` is the last message of the process, if it sent one.
    fn find_failure_reason(
        &mut self,
        part: &Part,
        end: Option<diagnostic::Result<()>>,
        process_end: &PartEnd,
        rows: &[ResultRow],
    ) -> Option<String> {
        match (end, process_end) {
            (Some(Ok(())), PartEnd::Exited(status)) if status.success() => None,
            (Some(Err(error)), PartEnd::Exited(_)) => {
                let cause = format!("{}: {}", error.code().name(), error.message());
                if part.name == ENVIRONMENT_PART && error.category() == Category::Cluster {
                    self.unusable = Some(error);
                }
                Some(cause)
            }
            // compute-sanitizer reports errors by the exit code, after the end of the part
            (Some(Ok(())), PartEnd::Exited(_)) if rows.iter().any(|row| row.result == RowResult::Failed) => {
                None
            }
            (Some(Ok(())), PartEnd::Exited(status)) if status.code().is_some() => {
                Some(format!("the process ended with exit code {}", status.code().unwrap_or_default()))
            }
            (_, end) => Some(end.describe()),
        }
    }

    /// Prints what helps to explain why a part of the GPU check failed: its last GPU calls and its
    /// output.
    fn print_failure_evidence(&mut self, record: &PartRecord) {
        let mut lines = Vec::new();
        for (title, evidence) in
            [("last GPU calls, the latest one last", &record.launches), ("output", &record.output)]
        {
            if !evidence.is_empty() {
                lines.push(format!("{}, {title}:", record.name));
                lines.extend(evidence.iter().map(|line| format!("    {line}")));
            }
        }
        if !lines.is_empty() {
            self.table.print_paragraph(lines);
        }
    }

    /// Builds the command line of the process that runs the part `part` of the GPU check in the
    /// mode `mode` (normal, blocking launches, or compute-sanitizer).
    fn build_part_command(
        &self,
        part: &Part,
        mode: PartRunMode,
        launch_log: Option<&MemoryFile>,
    ) -> PartCommand {
        let mut command = PartCommand::new(&part.name, self.options.device, self.options.filter);
        if let Some(log) = launch_log {
            command.arguments.extend(["--launch-log".into(), log.path().into()]);
        }
        command.variables = part.list_environment_variables();
        if mode == PartRunMode::Blocking {
            command.variables.push((env::CUDA_LAUNCH_BLOCKING, "1".into()));
        }
        let sanitizer = if mode == PartRunMode::Sanitized { find_sanitizer() } else { None };
        command.wrapper = sanitizer.unwrap_or_default();
        command
    }

    /// Writes the results so far to the JSON file of the check, if one is requested.
    fn write_report(&mut self) -> diagnostic::Result<()> {
        self.report.seconds = self.began.elapsed().as_secs_f64();
        self.options.report.map_or(Ok(()), |path| self.report.write(path))
    }
}

/// Reads the last GPU calls of a process, oldest first, from `log`, the memory file in which the
/// process records its calls.
fn read_last_launches(log: &MemoryFile) -> io::Result<Vec<String>> {
    let mut launches = read_launch_log(&log.path())?;
    launches.drain(..launches.len().saturating_sub(MAX_REPORTED_LAUNCHES));
    Ok(launches)
}
