//! [`Console`]: stdout and stderr, with a progress bar at the bottom of a terminal.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

/// Between two redraws of the bar without news.
const REDRAW_INTERVAL: Duration = Duration::from_millis(250);

/// stdout and stderr, with a progress bar below them on a terminal. After a write error nothing
/// more is written to that stream.
pub(super) struct Console {
    bar: Option<ProgressBar>,
    stdout_works: bool,
    stderr_works: bool,
}

impl Console {
    /// `with_bar`: draws a bar if stderr is a terminal.
    pub(super) fn new(with_bar: bool) -> Self {
        let bar = (with_bar && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(Self::style("{elapsed} {msg}"));
            bar.enable_steady_tick(REDRAW_INTERVAL);
            bar
        });
        Console { bar, stdout_works: true, stderr_works: true }
    }

    fn style(template: &str) -> ProgressStyle {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        style.progress_chars("━╸─")
    }

    pub(super) fn has_bar(&self) -> bool {
        self.bar.is_some()
    }

    /// Makes the bar show progress towards `total` steps.
    pub(super) fn set_total_steps(&mut self, total: u64, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_style(Self::style("step {pos}/{len} {bar:20} {msg}"));
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    /// Sets the text next to the bar.
    pub(super) fn set_status(&mut self, done: Option<u64>, message: String) {
        if let Some(bar) = &self.bar {
            if let Some(done) = done {
                bar.set_position(done);
            }
            bar.set_message(message);
        }
    }

    /// Removes the bar.
    pub(super) fn remove_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Writes a line to stdout.
    pub(super) fn write_data(&mut self, line: &str) {
        if self.stdout_works {
            self.stdout_works = self.write_above_bar(|| write_line(io::stdout().lock(), line)).is_ok();
        }
    }

    /// Writes a line to stderr.
    pub(super) fn write_message(&mut self, line: &str) {
        if self.stderr_works {
            self.stderr_works = self.write_above_bar(|| write_line(io::stderr().lock(), line)).is_ok();
        }
    }

    fn write_above_bar(&self, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

/// Writes a line with one call, so that lines of other processes do not end up within it.
fn write_line(mut stream: impl Write, line: &str) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line.as_bytes());
    bytes.push(b'\n');
    stream.write_all(&bytes)?;
    stream.flush()
}
