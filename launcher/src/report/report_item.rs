//! Defines [`ReportItem`], an event, output line or message that the controller passes to the
//! thread that shows the run to the user. Also defines the options and the summary of a run that
//! the thread shows.
use crate::worker_end::PeerWorkerEnd;
use jobspec::{ResumeFrom, ids::Rank};
use protocol::event::{Event, EventSchema, WorkerPhase};
use std::path::PathBuf;

/// How a run is shown to the user, for example as JSON, with the properties of the run that the
/// output needs, such as its number of workers.
#[derive(Clone, Debug)]
pub(crate) struct ReportConfig {
    /// The schema in which events are printed to stdout as JSON lines; `None` without `--json`.
    pub(crate) json: Option<EventSchema>,
    /// Whether `[rank N]` is printed before each line of a worker, and equal lines of several ranks
    /// are printed once.
    pub(crate) prefix: bool,
    /// Whether stdout and stderr are a file because the run is detached from the terminal.
    pub(crate) detached: bool,
    /// The number of ranks whose output is shown.
    pub(crate) shown_ranks: usize,
    /// The directory with the log of each rank.
    pub(crate) logs: PathBuf,
    /// Whether the workers run the built-in runtime instead of a program.
    pub(crate) builtin: bool,
    /// The number of workers of the run.
    pub(crate) world: u32,
    /// The number of hosts of the run.
    pub(crate) hosts: usize,
}

/// The result of a run (exit code, ends of ranks, files), which the final messages to the user
/// show.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunSummary {
    pub(crate) exit_code: u8,
    /// Whether a stop request ended the run.
    pub(crate) stopped: bool,
    /// Whether a stop request ended the run immediately, without saving a checkpoint.
    pub(crate) killed: bool,
    /// How those ranks ended that were not the root cause of a failure.
    pub(crate) peers: Vec<PeerWorkerEnd>,
    pub(crate) run_dir: PathBuf,
    /// The words of the run's command line.
    pub(crate) command: Vec<String>,
    /// `resume.from` of the job: the checkpoint from which the same command line resumes.
    pub(crate) resume_from: ResumeFrom,
    /// Whether the run has saved a checkpoint, also under an earlier controller.
    pub(crate) has_checkpoint: bool,
    pub(crate) seconds: f64,
}

/// An event, output line or message that waits for the thread that shows the run to the user.
#[derive(Debug)]
pub(super) enum ReportItem {
    Event(Event),
    /// An event that is shown to the user, but is not printed with `--json`.
    Context(Event),
    Line {
        rank: Rank,
        stderr: bool,
        text: String,
    },
    Progress {
        rank: Rank,
        phase: WorkerPhase,
    },
    Message(String),
    Finish(RunSummary),
}
