//! [`LoopEvent`]: an event that the controller's event loop processes.
use super::{AgentId, AttemptPlanningResult, EvictionAnswer};
use crate::{
    cluster::AgentStartStep,
    connection::FrameError,
    controller::{
        exec_socket::ExecClientEvent, file_watch::WatchedFileContent, journal::JournalSummary,
        report_id::ReportId, signals::SignalEvent,
    },
};
use protocol::control::FromAgent;

/// An event that the controller's event loop processes, such as a message of an agent, a signal or
/// a changed file.
pub(super) enum LoopEvent {
    /// A message of an agent, or the end of its stream.
    Agent(AgentId, Result<Option<FromAgent>, FrameError>),
    /// The start of an agent has reached a step.
    StartStep(AgentId, AgentStartStep),
    /// A line for the user.
    Line(String),
    Signal(SignalEvent),
    Planned(AttemptPlanningResult),
    /// The journal has stored all reports up to these.
    Stored(Vec<ReportId>),
    /// The journal of a lost controller was taken over.
    JournalTaken(Box<JournalSummary>),
    /// A lost agent has answered the request to end.
    Eviction(EvictionAnswer),
    /// The job file has changed.
    JobFile(WatchedFileContent),
    /// The hostfile has changed.
    Hostfile(WatchedFileContent),
    /// A client of `launch exec` has connected, sent a request or ended.
    ExecClient(ExecClientEvent),
    /// A deadline of the controller's state machine may be due.
    Tick,
}
