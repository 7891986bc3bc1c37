//! Crate `debuglog`: a log file for developers, to which a process of launch (controller, agent or
//! worker) writes its `tracing` events.
//!
//! Modules record events and spans with the macros of crate `tracing`. [`start`] selects which of
//! them are logged, and [`open_log_file`] opens the file of the process. Logging never blocks the
//! process: a full queue drops lines, and the file then contains the number of dropped lines.
//!
//! An event has a target, such as `controller::transport`, whose first part is the role of the
//! process. Events contain no environment variables, keys or tokens.
mod filter;
mod line_sink;
mod variant_name;

pub use filter::{DEFAULT_FILTER, Filter, InvalidFilter};
pub use line_sink::{MAX_FILE_BYTES, PrintLineFn};
pub use variant_name::variant_name;

use line_sink::{LineSink, TerminalWriter};
use std::{io, path::Path, sync::OnceLock};
use tracing_subscriber::{Layer, fmt, layer::SubscriberExt};

/// The debug log of this process: its filter, and the sink that takes its lines, or nothing before
/// [`start`] is called.
static LOG: OnceLock<(Filter, LineSink)> = OnceLock::new();

/// Starts the debug log of this process, which contains the `tracing` events that `filter` selects.
/// Lines are collected in memory until [`open_log_file`] is called. With `print`, each line is also
/// printed. Does nothing if the log was started before.
pub fn start(filter: &Filter, print: Option<PrintLineFn>) {
    let sink = LineSink::new();
    if LOG.set((filter.clone(), sink.clone())).is_err() {
        return;
    }
    let file = fmt::layer().with_ansi(false).with_writer(sink);
    let terminal = print.map(|print| fmt::layer().with_ansi(false).with_writer(TerminalWriter(print)));
    let subscriber =
        tracing_subscriber::registry().with(file.and_then(terminal).with_filter(filter.to_env_filter()));
    // Fails only if another subscriber is installed.
    _ = tracing::subscriber::set_global_default(subscriber);
}

/// Opens `path` as the debug log file of this process, for appending, and writes the lines that
/// were collected in memory so far. Starts the thread that writes the file. Does nothing without
/// [`start`], or if a file is open.
///
/// # Errors
/// Fails if the directory or the file cannot be created, or if the thread cannot be started.
pub fn open_log_file(path: &Path) -> io::Result<()> {
    match LOG.get() {
        Some((filter, sink)) if !filter.is_off() => sink.open_file(path),
        _ => Ok(()),
    }
}

/// Returns the directives of this process's log filter, such as `agent=debug,info`. This process
/// passes them to the processes that it starts. Returns [`DEFAULT_FILTER`] if [`start`] was not
/// called.
pub fn active_filter_directives() -> String {
    LOG.get().map_or_else(|| DEFAULT_FILTER.to_owned(), |(filter, _)| filter.directives().to_owned())
}

/// A guard that, when dropped at the end of a process, waits until the queued lines of the debug
/// log are written to its file.
#[derive(Debug)]
pub struct FlushOnDrop;

impl Drop for FlushOnDrop {
    fn drop(&mut self) {
        if let Some((_, sink)) = LOG.get() {
            sink.flush();
        }
    }
}

#[cfg(test)]
mod tests;
