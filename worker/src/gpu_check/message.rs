//! [`PartMessage`]: what a process that runs one part of `launch gpu-check` reports to the parent
//! process, as lines of JSON on its stdout.
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The prefix of each stdout line by which a part of `launch gpu-check`, in a separate process,
/// sends a message to the parent process. Other lines are output of libraries.
pub(super) const MESSAGE_PREFIX: &str = "gpu-check-message ";

/// A message that a process which runs one part of `launch gpu-check` sends to the parent process:
/// a row of the result table, further values, or the end of the part.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum PartMessage {
    /// A row of the table.
    Row(ResultRow),
    /// Values that only the JSON file contains, under this name.
    Details { name: String, value: Value },
    /// The part is complete. Without this message the process has failed, also with exit code 0.
    Done,
    /// The part has failed with this error. No further message follows.
    Failed { error: Box<Diagnostic> },
}

/// A row of the table that `launch gpu-check` prints: what was checked, the measured values, and
/// the result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ResultRow {
    /// What was checked or measured.
    pub(super) subject: String,
    /// The measured values, as text.
    pub(super) values: String,
    pub(super) result: RowResult,
    /// The error of a failed row, or the reason why a row was skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cause: Option<String>,
    /// The measured values, as data.
    #[serde(default)]
    pub(super) data: Value,
}

/// The result that a row of the table of `launch gpu-check` shows, such as passed, failed or
/// skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RowResult {
    /// The values agree with those of the CPU.
    Ok,
    /// The values were measured. There is nothing to compare them with.
    Measured,
    /// The row was not computed, because this machine lacks what it needs, or the time is over.
    Skipped,
    /// The values differ from those of the CPU, or the work failed.
    Failed,
}

impl RowResult {
    /// Returns the text by which the table of `launch gpu-check` shows this result, such as `ok`.
    pub(super) fn label(self) -> &'static str {
        match self {
            RowResult::Ok => "ok",
            RowResult::Measured => "measured",
            RowResult::Skipped => "skipped",
            RowResult::Failed => "FAILED",
        }
    }
}

impl ResultRow {
    /// Creates a row of the result table that only shows measured values, without a passed or
    /// failed check.
    pub(super) fn measured(subject: impl Into<String>, values: impl Into<String>, data: Value) -> ResultRow {
        let (subject, values) = (subject.into(), values.into());
        ResultRow { subject, values, result: RowResult::Measured, cause: None, data }
    }

    /// Creates a row of the result table that states why a check was skipped.
    pub(super) fn skipped(subject: impl Into<String>, cause: impl Into<String>) -> ResultRow {
        let (subject, cause) = (subject.into(), Some(cause.into()));
        ResultRow { subject, values: String::new(), result: RowResult::Skipped, cause, data: Value::Null }
    }

    /// Creates a row of the result table for a check that failed with the error `cause`.
    pub(super) fn failed(subject: impl Into<String>, cause: impl Into<String>) -> ResultRow {
        let (subject, cause) = (subject.into(), Some(cause.into()));
        ResultRow { subject, values: String::new(), result: RowResult::Failed, cause, data: Value::Null }
    }
}

/// Sends the messages of a process that runs one part of `launch gpu-check` to the parent process.
pub(super) struct PartOutput;

impl PartOutput {
    /// Sends a row of the result table to the parent process.
    pub(super) fn send_row(&self, row: ResultRow) {
        self.print_message(&PartMessage::Row(row));
    }

    /// Sends named values to the parent process, which stores them in the JSON report of `launch
    /// gpu-check` but does not print them.
    pub(super) fn send_details(&self, name: &str, value: Value) {
        self.print_message(&PartMessage::Details { name: name.to_owned(), value });
    }

    /// Prints a message for the parent process to stdout as one line. The line is written at once,
    /// because stdout is line-buffered. An empty line precedes it, because a library may have
    /// printed a line without its end.
    pub(super) fn print_message(&self, message: &PartMessage) {
        let text = serde_json::to_string(message).unwrap_or_default();
        println!("\n{MESSAGE_PREFIX}{text}");
    }
}
