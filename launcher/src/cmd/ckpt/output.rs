//! Writes the output of `launch ckpt`: JSON, messages and progress.
use crate::report::command_output;
use diagnostic::quantity::format_bytes;
use diagnostic::terminal_text::filter_line;
use serde::Serialize;
use serde_json::Value;
use std::{
    fmt,
    time::{Duration, Instant},
};

/// The shortest time between two updates of the progress line on the terminal.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Writes a message and a line end to stderr, with control characters in the message replaced.
pub(super) fn write_stderr_line(line: fmt::Arguments<'_>) {
    command_output::write_message(&format!("{}\n", filter_line(&line.to_string())));
}

/// Serializes the result of an operation on a checkpoint, such as the report of a verification, as
/// JSON.
pub(super) fn report_to_json(report: &impl Serialize) -> Value {
    serde_json::to_value(report).unwrap_or(Value::Null)
}

/// Runs an operation on a checkpoint, and shows its progress in bytes as a line on stderr. `action`
/// names the operation as a present participle, such as `converting`. The operation reports the
/// done and the total number of bytes to the function that it gets. Draws nothing if stderr is not
/// a terminal.
pub(super) fn run_with_progress<T>(
    action: &str,
    operation: impl FnOnce(&mut (dyn FnMut(u64, u64) + Send)) -> T,
) -> T {
    let on_terminal = command_output::stderr_is_terminal();
    let mut drawn: Option<Instant> = None;
    let result = operation(&mut |done, total| {
        if on_terminal && drawn.is_none_or(|at| at.elapsed() >= REDRAW_INTERVAL) {
            drawn = Some(Instant::now());
            let (done, total) = (format_bytes(done), format_bytes(total));
            command_output::redraw_line(&format!("{action}: {done} of {total}"));
        }
    });
    if drawn.is_some() {
        command_output::redraw_line("");
    }
    result
}
