//! [`Reporter`]: shows the events and output of a run to the user.
//!
//! A separate thread writes to the terminal, so that the job never waits for a paused terminal, a
//! pager or a closed pipe. No other code writes to the terminal during a run.
//!
//! stdout carries data: events with `--json`, otherwise the stdout of the shown ranks of a program.
//! stderr carries messages: a progress bar on a terminal, plain lines elsewhere.
pub(crate) mod command_output;
mod console;
mod deduplicator;
mod event_text;
mod line_rate_limit;
mod loss_curve;
mod report_item;
mod reporter;
mod resume_command;
mod top;
mod view;

pub(crate) use event_text::format_event;
pub(crate) use report_item::{ReportConfig, RunSummary};
pub(crate) use reporter::Reporter;
pub(crate) use top::{TopSource, show_run};
