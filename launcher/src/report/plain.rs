//! Output of commands other than `run`: written immediately and completely.
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
pub(crate) fn write_data_or_broken_pipe(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Whether stdout is a terminal, which must not get control sequences.
pub(crate) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Writes a message to stderr. Errors are ignored, because there is no other place to report them.
pub(crate) fn write_message(text: &str) {
    _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Whether messages may have color.
pub(crate) fn use_color() -> bool {
    let wanted = std::env::var_os(contract::env::NO_COLOR).is_none_or(|v| v.is_empty());
    wanted && stderr_is_terminal()
}

/// Whether stderr is a terminal, so that messages may be redrawn in place.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}
