//! Writes the output of commands other than `launch run` to stdout and stderr, immediately and
//! completely.
use std::io::{self, IsTerminal, Write};

/// Writes data to stdout and flushes stdout. Returns `Ok` if stdout is a closed pipe.
pub(crate) fn write_data(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes data to stdout and flushes stdout. Fails if stdout is a closed pipe, so that a command
/// that follows a file (`--follow`) can end.
pub(crate) fn write_data_strict(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Returns whether stdout is a terminal. Control sequences of workers must not be written to a
/// terminal.
pub(crate) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Writes a message to stderr without adding a line end. Ignores write errors, because there is no
/// other place to report them.
pub(crate) fn write_message(text: &str) {
    _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Returns whether messages on stderr may have color: stderr is a terminal, and `NO_COLOR` is not
/// set.
pub(crate) fn is_color_enabled() -> bool {
    let wanted = std::env::var_os(jobspec::env::NO_COLOR).is_none_or(|v| v.is_empty());
    wanted && stderr_is_terminal()
}

/// Returns whether stderr is a terminal, on which messages may be redrawn in place.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}
