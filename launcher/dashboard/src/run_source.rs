//! [`RunSource`]: the trait by which the dashboard lists the user's runs and opens their files.
use serde::Serialize;
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

/// What is known about a run without reading its journal: its ID, job name, state, start and run
/// directory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunInfo {
    /// The ID of the run.
    pub run: String,
    /// The name of the job.
    pub name: String,
    /// The word for the state of the run, such as `running`.
    pub state: &'static str,
    /// Whether the run may still change.
    pub is_active: bool,
    /// Whether the user has named the run on the command line.
    pub is_named: bool,
    /// The number of workers in the first attempt.
    pub world: u32,
    /// The start of the run, in milliseconds since 1970.
    pub began_ms: u64,
    /// The host name of the machine on which the controller was started.
    pub host: String,
    /// The last optimizer step that the journal records; `None` before the first step.
    pub step: Option<u64>,
    /// The path of the run directory.
    pub run_dir: PathBuf,
}

/// Lists the runs that the dashboard may show, and opens the files of their run directories. The
/// implementation decides which runs and files this user may read.
pub trait RunSource: Send + Sync {
    /// Lists the runs that this user may see, from the newest to the oldest.
    fn list_runs(&self) -> Vec<RunInfo>;

    /// Loads the current state of a run that was listed before, such as whether it is still active.
    /// Returns `None` if the run no longer exists.
    fn reload_run(&self, run: &RunInfo) -> Option<RunInfo>;

    /// Opens a file in the directory of a run, such as the journal or a log, for reading. Fails,
    /// without blocking, if the file is not a regular file of this user.
    fn open_file(&self, path: &Path) -> io::Result<File>;
}
