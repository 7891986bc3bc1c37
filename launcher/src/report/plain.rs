//! Output of the commands that run nothing: written at once, in full.
use std::io::{self, IsTerminal, Write};

/// Data, to stdout. A reader that has enough (a closed pipe) is no error.
pub(crate) fn data(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Data, to stdout; the error of a closed pipe too, for those that would go on for long.
pub(crate) fn stream(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Is data read by a person, whose terminal wants protection?
pub(crate) fn to_person() -> bool {
    io::stdout().is_terminal()
}

/// Talk, to stderr. Nobody is left to be told when that fails.
pub(crate) fn say(text: &str) {
    _ = io::stderr().lock().write_all(text.as_bytes());
}

/// May talk have colour?
pub(crate) fn color() -> bool {
    let wanted = std::env::var_os(contract::env::NO_COLOR).is_none_or(|v| v.is_empty());
    wanted && live()
}

/// May talk be drawn again in place?
pub(crate) fn live() -> bool {
    io::stderr().is_terminal()
}
