//! The live view at the bottom of a terminal, and writing above it. Without a terminal there is only the writing.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

/// Between two drawings when nothing happens.
const TICK: Duration = Duration::from_millis(250);

/// stdout and stderr, with a bar below them on a terminal. A stream that can't be written any more is let go.
pub(super) struct Console {
    bar: Option<ProgressBar>,
    stdout: bool,
    stderr: bool,
}

impl Console {
    /// `live`: draw a bar if stderr is a terminal.
    pub(super) fn new(live: bool) -> Self {
        let bar = (live && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(Self::style("{elapsed} {msg}"));
            bar.enable_steady_tick(TICK);
            bar
        });
        Console { bar, stdout: true, stderr: true }
    }

    fn style(template: &str) -> ProgressStyle {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        style.progress_chars("━╸─")
    }

    pub(super) fn is_live(&self) -> bool {
        self.bar.is_some()
    }

    /// From now on the bar shows a share of `total` steps.
    pub(super) fn steps(&mut self, total: u64, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_style(Self::style("step {pos}/{len} {bar:20} {msg}"));
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    /// What stands beside the bar.
    pub(super) fn status(&mut self, done: Option<u64>, message: String) {
        if let Some(bar) = &self.bar {
            if let Some(done) = done {
                bar.set_position(done);
            }
            bar.set_message(message);
        }
    }

    /// Takes the bar away.
    pub(super) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// A line of data.
    pub(super) fn data(&mut self, line: &str) {
        if self.stdout {
            self.stdout = self.above(|| write_line(io::stdout().lock(), line)).is_ok();
        }
    }

    /// A line of talk.
    pub(super) fn talk(&mut self, line: &str) {
        if self.stderr {
            self.stderr = self.above(|| write_line(io::stderr().lock(), line)).is_ok();
        }
    }

    fn above(&self, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

/// One write for the whole line: lines of others to the same place don't end up in its middle.
fn write_line(mut stream: impl Write, line: &str) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line.as_bytes());
    bytes.push(b'\n');
    stream.write_all(&bytes)?;
    stream.flush()
}
