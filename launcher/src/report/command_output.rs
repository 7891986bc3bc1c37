//! Writes the output of commands such as `launch ps` to stdout and stderr, without the queue and
//! the progress bar of `launch run`.
use diagnostic::terminal_text::{escape_unprintable_in_json, filter_colored_text, filter_line, filter_text};
use std::io::{self, IsTerminal, Write};

/// Writes text to stdout, without unprintable characters. Returns `Ok` if stdout is a closed pipe.
pub(crate) fn write_text(text: &str) -> io::Result<()> {
    ignore_closed_pipe(write_filtered_text(&filter_text(text)))
}

/// Writes JSON to stdout, with escapes for unprintable characters. Returns `Ok` if stdout is a
/// closed pipe.
pub(crate) fn write_json(json: &str) -> io::Result<()> {
    ignore_closed_pipe(write_filtered_text(&escape_unprintable_in_json(json)))
}

/// Writes the text of a file to stdout, and removes unprintable characters if stdout is a terminal.
/// Returns `Ok` if stdout is a closed pipe.
pub(crate) fn write_file_text(text: &str) -> io::Result<()> {
    match stdout_is_terminal() {
        true => write_text(text),
        false => ignore_closed_pipe(write_filtered_text(text)),
    }
}

/// Writes `text`, which must not contain unprintable characters, to stdout and flushes stdout.
/// Fails if stdout is a closed pipe, so that a command that follows a file (`--follow`) can end.
pub(crate) fn write_filtered_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Writes the output of a user's program, such as that of a worker, to this process's stdout or
/// stderr. Only a terminal gets the text without unprintable characters. Fails if the stream is a
/// closed pipe.
pub(crate) fn write_program_output(is_stderr: bool, bytes: &[u8]) -> io::Result<()> {
    let is_terminal = if is_stderr { stderr_is_terminal() } else { stdout_is_terminal() };
    let filtered = is_terminal.then(|| filter_text(&String::from_utf8_lossy(bytes)));
    let bytes = filtered.as_ref().map_or(bytes, |text| text.as_bytes());
    if is_stderr {
        return io::stderr().lock().write_all(bytes);
    }
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush())
}

/// Converts the error that the reader of stdout has closed the pipe to success, because a command
/// may ignore this error. Returns any other result unchanged.
fn ignore_closed_pipe(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Returns whether stdout is a terminal. Control sequences of workers must not be written to a
/// terminal.
pub(crate) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Writes a message to stderr without adding a line end, and without unprintable characters other
/// than colors. Ignores write errors, because there is no other place to report them.
pub(crate) fn write_message(text: &str) {
    _ = io::stderr().lock().write_all(filter_colored_text(text).as_bytes());
}

/// Replaces the terminal line that contains the cursor by `text`, through stderr, for example to
/// show progress. An empty text erases the line.
pub(crate) fn redraw_line(text: &str) {
    _ = io::stderr().lock().write_all(format!("\r\x1b[K{}", filter_line(text)).as_bytes());
}

/// Returns whether messages on stderr may have color: stderr is a terminal, and `NO_COLOR` is not
/// set.
pub(crate) fn is_color_enabled() -> bool {
    let wanted = std::env::var_os(jobspec::env::NO_COLOR).is_none_or(|v| v.is_empty());
    wanted && stderr_is_terminal()
}

/// Returns whether stdin is a terminal, from which a worker can read.
pub(crate) fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}

/// Returns whether stderr is a terminal, on which messages may be redrawn in place.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}
