//! Writes the output of commands other than `run` to stdout and stderr, immediately and completely.
use std::io::{self, IsTerminal, Write};

/// Writes data to stdout. A closed pipe is not an error.
pub(crate) fn write_data(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes data to stdout. A closed pipe is an error, so that commands that follow a file end.
pub(crate) fn write_data_strict(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Returns whether stdout is a terminal, which must not get control sequences of workers.
pub(crate) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Writes a message to stderr. Errors are ignored, because there is no other place to report them.
pub(crate) fn write_message(text: &str) {
    _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Returns whether messages may have color: stderr is a terminal, and `NO_COLOR` is not set.
pub(crate) fn is_color_enabled() -> bool {
    let wanted = std::env::var_os(contract::env::NO_COLOR).is_none_or(|v| v.is_empty());
    wanted && stderr_is_terminal()
}

/// Returns whether stderr is a terminal, on which messages may be redrawn in place.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}
