//! The output of `launch ckpt`: results on stdout, messages and progress on stderr.
use crate::{cmd::output::output_error, report::command_output};
use ckpt::format_bytes;
use std::{
    fmt,
    time::{Duration, Instant},
};

/// Writes a message and a line end to stderr.
pub(super) fn log_line(line: fmt::Arguments<'_>) {
    command_output::write_message(&format!("{line}\n"));
}

/// Writes the result of a subcommand to stdout. Fails if the write fails.
pub(super) fn print_result(text: &str) -> diagnostic::Result<()> {
    command_output::write_data(text).map_err(|error| output_error(&error))
}

/// Formats a count with the singular or plural of a noun: `1 file`, `2 files`.
pub(super) fn format_count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// A line on stderr that shows the progress of an operation in bytes. The line is redrawn at most
/// ten times a second. Draws nothing if stderr is not a terminal.
pub(super) struct ProgressLine {
    action: &'static str,
    drawn: Option<Instant>,
    on_terminal: bool,
}

impl ProgressLine {
    /// Creates a progress line that is not drawn yet. `action` names the operation as a present
    /// participle, such as `converting`.
    pub(super) fn new(action: &'static str) -> ProgressLine {
        ProgressLine { action, drawn: None, on_terminal: command_output::stderr_is_terminal() }
    }

    /// Redraws the line with `done` of `total` bytes. Does nothing within 100 ms of the last
    /// drawing.
    pub(super) fn update(&mut self, done: u64, total: u64) {
        let due = self.drawn.is_none_or(|t| t.elapsed() >= Duration::from_millis(100));
        if self.on_terminal && due {
            self.drawn = Some(Instant::now());
            let (action, done, total) = (self.action, format_bytes(done), format_bytes(total));
            command_output::write_message(&format!("\r\x1b[K{action}: {done} of {total}"));
        }
    }

    /// Erases the progress line from the terminal if the line was drawn.
    pub(super) fn clear(&self) {
        if self.drawn.is_some() {
            command_output::write_message("\r\x1b[K");
        }
    }
}
