//! `launch top`: shows the state of a run on the whole terminal and updates it until the user
//! quits.
use super::{dashboard_runs::create_dashboard, ps::resolve_run};
use crate::{
    report::{TopSource, show_run},
    runs::RunFilter,
};
use clap::Args;
use dashboard::{Dashboard, RunSnapshot};
use diagnostic::{Diagnostic, codes::command};
use std::{io, sync::Arc, time::Duration};

/// The time limit for reading new events from the journal file of the run before `launch top`
/// redraws the screen.
const MAX_JOURNAL_READ_TIME: Duration = Duration::from_millis(200);

/// Arguments of `launch top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Name of a run or its first characters, name of a job, or run directory
    /// [default: the only active run, or the newest run if none is active]
    #[arg(value_name = "RUN")]
    run: Option<String>,
}

/// The ID of the run that `launch top` shows, with the data source (dashboard) from which its state
/// is read.
struct ShownRun {
    dashboard: Arc<Dashboard>,
    run: String,
}

impl TopSource for ShownRun {
    fn take_snapshot(&self) -> Option<RunSnapshot> {
        self.dashboard.take_snapshot(&self.run, MAX_JOURNAL_READ_TIME)
    }

    fn read_log_end(&self, rank: u32) -> Vec<String> {
        self.dashboard.read_log_end(&self.run, rank).unwrap_or_default()
    }
}

/// Runs `launch top`: shows the state of a run on the whole terminal until the user quits.
pub(crate) fn run(args: &TopArgs) -> diagnostic::Result<u8> {
    let run = resolve_run(args.run.as_deref(), RunFilter::Any)?;
    let name = run.record.run.clone();
    let source = ShownRun { dashboard: create_dashboard(vec![run]), run: name };
    match show_run(&source) {
        Ok(()) => Ok(protocol::exit::DONE),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            let message = "`launch top` needs a terminal, and stdin or stdout is none";
            Err(Diagnostic::error(command::TERMINAL_REQUIRED, message)
                .with_help("run the command in a terminal, over SSH with `ssh -t`, or use `launch events`"))
        }
        Err(error) => {
            let message = "the run cannot be shown";
            Err(Diagnostic::error(command::VIEW_FAILED, message).with_subject(&source.run).with_cause(&error))
        }
    }
}
