//! [`Console`]: stdout and stderr, with a progress bar at the bottom of a terminal.
use diagnostic::terminal_text::filter_colored_text;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    borrow::Cow,
    io::{self, IsTerminal, Write},
    time::Duration,
};

/// The interval at which the progress bar is drawn again, so that the elapsed time stays current
/// while no step ends.
const REDRAW_INTERVAL: Duration = Duration::from_millis(250);

/// Writes to stdout and stderr, and draws a progress bar below the output on a terminal. After a
/// write error, no more output is written to the stream on which the error occurred.
pub(super) struct Console {
    bar: Option<ProgressBar>,
    stdout_works: bool,
    stderr_works: bool,
}

impl Console {
    /// Creates a [`Console`] for the stdout and stderr of this process. Draws a progress bar if
    /// `with_bar` is set and stderr is a terminal.
    pub(super) fn new(with_bar: bool) -> Self {
        let bar = (with_bar && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(Self::make_bar_style("{elapsed} {msg}"));
            bar.enable_steady_tick(REDRAW_INTERVAL);
            bar
        });
        Console { bar, stdout_works: true, stderr_works: true }
    }

    /// Returns the style of the progress bar for the `indicatif` template `template`, or the
    /// default style if the template is invalid.
    fn make_bar_style(template: &str) -> ProgressStyle {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        style.progress_chars("━╸─")
    }

    /// Returns whether a progress bar is shown.
    pub(super) fn has_bar(&self) -> bool {
        self.bar.is_some()
    }

    /// Sets the numbers of finished and of all training steps in the progress bar, to `done` and
    /// `total`.
    pub(super) fn set_total_steps(&mut self, total: u64, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_style(Self::make_bar_style("step {pos}/{len} {bar:20} {msg}"));
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    /// Sets the text of the progress bar and, if `done` is not `None`, the number of finished
    /// training steps.
    pub(super) fn set_bar_text(&mut self, done: Option<u64>, message: String) {
        if let Some(bar) = &self.bar {
            if let Some(done) = done {
                bar.set_position(done);
            }
            bar.set_message(message);
        }
    }

    /// Erases the progress bar from the terminal permanently.
    pub(super) fn remove_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Writes a line to stdout, above the progress bar. Does nothing after a write error of stdout.
    pub(super) fn write_stdout_line(&mut self, line: &str) {
        if self.stdout_works {
            self.stdout_works = self.write_above_bar(|| write_line(io::stdout().lock(), line)).is_ok();
        }
    }

    /// Writes a line to stderr, above the progress bar, without unprintable characters other than
    /// colors. Does nothing after a write error of stderr.
    pub(super) fn write_stderr_line(&mut self, line: &str) {
        self.write_to_stderr(&filter_colored_text(line));
    }

    /// Writes an output line of a worker, above the progress bar, to stderr if `is_message` is
    /// true, and otherwise to stdout. A terminal gets no unprintable characters other than colors.
    /// Pipes and files get the bytes of the worker.
    pub(super) fn write_worker_line(&mut self, line: &str, is_message: bool) {
        let to_terminal = if is_message { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let line = if to_terminal { Cow::Owned(filter_colored_text(line)) } else { Cow::Borrowed(line) };
        match is_message {
            true => self.write_to_stderr(&line),
            false => self.write_stdout_line(&line),
        }
    }

    /// Writes a line to stderr, above the progress bar.
    fn write_to_stderr(&mut self, line: &str) {
        if self.stderr_works {
            self.stderr_works = self.write_above_bar(|| write_line(io::stderr().lock(), line)).is_ok();
        }
    }

    /// Writes output above the progress bar: erases the bar, calls the function `write` to write
    /// the output, and draws the bar again. Returns the result of `write`.
    fn write_above_bar(&self, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

/// Writes a line and a line end to `stream` with one call, so that the output of other processes
/// does not split the line. Flushes `stream`.
fn write_line(mut stream: impl Write, line: &str) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line.as_bytes());
    bytes.push(b'\n');
    stream.write_all(&bytes)?;
    stream.flush()
}
