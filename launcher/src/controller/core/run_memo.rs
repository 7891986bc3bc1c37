//! [`RunMemo`]: the state of a run that only the controller knows, which agents keep for a later
//! controller. [`StoredMemo`] is the form in which they keep it.
use super::{host_state::HostIndex, stop_request::StopRequest};
use crate::controller::{
    job_file::JobFile,
    restart_policy::{AttemptEnd, NoRestartReason},
    root_cause::RootCause,
};
use protocol::{control::ControllerToken, event::Event};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};

/// The phase of the current start of the workers, such as running, stopping or ending, which agents
/// store with the run's state for a later controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MemoPhase {
    /// No worker of the attempt was started.
    BeforeStart,
    /// The workers run.
    Running,
    /// The workers save and stop because of this request.
    Stopping(StopRequest),
    /// The workers save and stop, so that the next attempt starts without some hosts. `host_lost`
    /// states whether the workers are killed because one of these hosts is lost.
    Draining { host_lost: bool },
    /// The workers are killed.
    Ending,
}

/// The state of a run that only the controller knows, such as its phase and failure counts, which
/// agents store for a later controller. Its size depends only on the hosts that have failed or are
/// lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunMemo {
    /// The token of the controller that wrote the memo.
    pub(crate) token: ControllerToken,
    /// The number of the memo among those of its controller. Token and number together determine
    /// the order of all memos of a run.
    pub(crate) number: u64,
    /// The number of the present or next attempt.
    pub(crate) attempt: u32,
    pub(crate) phase: MemoPhase,
    pub(crate) stop_request: Option<StopRequest>,
    /// Whether the workers were killed on request.
    pub(super) killed: bool,
    /// The number of restarts so far.
    pub(crate) restarts: u32,
    /// The end of the previous failed attempt; `None` if no attempt has failed.
    pub(super) last_end: Option<AttemptEnd>,
    /// The number of successive restarts that brought no progress.
    pub(super) no_progress: u32,
    /// The root cause of the failure of the attempt.
    pub(super) cause: Option<RootCause>,
    /// Whether the root cause was not reported to the user when the memo was written.
    pub(super) is_unreported: bool,
    pub(super) no_restart: Option<NoRestartReason>,
    /// The pause before the next attempt.
    pub(super) restart_pause: Option<Duration>,
    /// Whether the run has lost any host.
    pub(super) host_lost: bool,
    /// The message of the failure after which the run was last restarted.
    pub(super) last_failure: Option<String>,
    /// The hosts that have failed or are excluded. Each item has the index of the host, the number
    /// of its failures, and whether the host is excluded.
    pub(super) troubled_hosts: Vec<(HostIndex, u32, bool)>,
    /// The lost hosts. Each item has the index of the host, and the time for which the host is not
    /// used from the memo on, in milliseconds.
    #[serde(default)]
    pub(super) lost_hosts: Vec<(HostIndex, u64)>,
}

/// An event of a controller that the journal (the run's file of events) may not contain yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct UnstoredEvent {
    /// The number of the event among all events that controllers of the run have reported.
    pub(crate) number: u64,
    /// The time of the event, in seconds since 1970.
    pub(crate) time: f64,
    pub(crate) event: Event,
}

/// What an agent stores for a controller that takes over the run: the state of the run, events that
/// the journal may lack, and the job file path. The events are those that the journal may not
/// contain yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StoredMemo {
    pub(crate) memo: RunMemo,
    /// The number of the newest event of a controller when the memo was written.
    pub(crate) newest_event: u64,
    pub(crate) unstored: Vec<UnstoredEvent>,
    /// The job file that the controller watches.
    pub(crate) job_file: Option<JobFile>,
    /// The working directory of the controller, to which paths in the job file may be relative.
    pub(crate) directory: PathBuf,
}
