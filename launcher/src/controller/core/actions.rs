//! [`ControllerInput`] and [`ControllerAction`]: the inputs of the controller's state machine, and
//! the actions that it requests.
use super::{
    attach_failure::AttachFailure,
    host_state::HostIndex,
    run_memo::{RunMemo, StoredMemo, UnstoredEvent},
    setup::HostSetup,
    stop_request::StopRequest,
    taken_over_journal::TakenOverJournal,
};
use crate::{
    cluster::AgentStartStep,
    controller::{report_id::ReportId, root_cause::AgentEnd},
    worker_end::PeerWorkerEnd,
};
use diagnostic::Diagnostic;
use jobspec::{ReloadValues, ids::Rank};
use protocol::{
    control::{FromAgent, HostInventory, HostPlan, HostUsage, RendezvousRequest, ToAgent, WorkerAddresses},
    event::{Event, WorkerPhase},
    hang::HangFile,
    step_times::StepTimes,
};
use std::{path::PathBuf, time::Duration};

/// The path of one worker's log file, which the controller's state machine takes from the plan of
/// the workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedWorker {
    /// The path of the worker's log.
    pub(crate) log: PathBuf,
}

/// An input of the controller's state machine: a message, a signal, a changed file, or the passing
/// of time.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum ControllerInput {
    /// A message of the agent on a host.
    Agent(HostIndex, FromAgent),
    /// The agent on a host is gone. As far as the controller can know, every process of the job on
    /// that host is gone with the agent.
    AgentGone { host: HostIndex, end: AgentEnd },
    /// The start of the agent on a host has reached this step.
    StartStep(HostIndex, AgentStartStep),
    /// An attempt is planned. `workers` holds the workers of each host that
    /// [`ControllerAction::Prepare`] named, with ranks ascending. `bind` is the request for the
    /// agent of the first host to bind the rendezvous.
    Planned { attempt: u32, workers: Vec<Vec<PlannedWorker>>, bind: RendezvousRequest },
    /// An attempt could not be planned.
    Rejected { attempt: u32, diagnostic: Diagnostic },
    /// The journal has stored all reports up to these. Holds the newest stored report of each
    /// agent, and that of the controllers.
    Stored(Vec<ReportId>),
    /// A request to save and stop, from a signal. A second request kills the workers.
    Stop(StopRequest),
    /// A request to kill the workers without saving (SIGQUIT).
    Kill,
    /// A request to save and continue. Holds the number of the signal that programs get.
    Save(i32),
    /// The job file changed. Holds the new values of the reloadable keys.
    Reload(ReloadValues),
    /// The list of hosts changed. `added` are the new hosts. `listed` states for each known host,
    /// by [`HostIndex`], whether the new list contains the host.
    Hosts { added: Vec<HostSetup>, listed: Vec<bool> },
    /// The journal of a lost controller was taken over.
    JournalTaken(Box<TakenOverJournal>),
    /// The agent of this lost host was asked to end, and has no workers left.
    Evicted(HostIndex),
    /// The ways through the tree of agents have changed. Holds each host whose messages now come
    /// through the agent of another host, or through none (`None`).
    InnerHosts(Vec<(HostIndex, Option<HostIndex>)>),
    /// Time passed, and a deadline may be due.
    Tick,
}

/// An action that the controller's state machine requests, such as to send a message or to start an
/// agent. The driver executes it.
#[derive(Debug, PartialEq)]
pub(crate) enum ControllerAction {
    /// Send a message to the agent on a host.
    Send(HostIndex, ToAgent),
    /// Send the hello to the agent of a host, which was just started.
    SendHello(HostIndex),
    /// Ask the agent that is alive on a host to obey this controller.
    SendAttach(HostIndex),
    /// Send a memo, which holds the state of the run for a later controller, to the agents of these
    /// hosts. The orders that follow are sent after the memo.
    SendMemo { hosts: Vec<HostIndex>, memo: Box<RunMemo> },
    /// The run has an agent with this number. Later agents get greater numbers.
    RecordAgentNumber(u64),
    /// Continue with the job and the workers' environment that this plan of an adopted agent
    /// contains.
    AdoptPlan(Box<HostPlan>),
    /// Take over the journal. The driver answers with [`ControllerInput::JournalTaken`].
    TakeOverJournal(Box<StoredMemo>),
    /// Append an event of a lost controller to the journal, under the number and with the time that
    /// it already has.
    RestoreEvent(UnstoredEvent),
    /// Report that this controller has taken over the run, which had no controller for this time.
    ReportTakeover { unattended: Duration },
    /// The run was not taken over, and the agents must not be changed. No action follows.
    AbandonTakeover(AttachFailure),
    /// Ask the agent of a lost host to end, as far as the host can be reached. The driver answers
    /// with [`ControllerInput::Evicted`] if the agent has ended.
    EvictAgent(HostIndex),
    /// Keep the inventory that the agent of a host sent with its hello.
    RecordInventory(HostIndex, HostInventory),
    /// Write the evidence of an attempt that hangs to a file in the run directory.
    WriteHangFile { attempt: u32, file: HangFile },
    /// Plan this attempt. The driver answers with [`ControllerInput::Planned`] or
    /// [`ControllerInput::Rejected`].
    Prepare {
        attempt: u32,
        restarts: u32,
        hosts: Vec<HostIndex>,
        /// The newest checkpoint of this run; `None` if the run has completed no checkpoint.
        resume: Option<PathBuf>,
    },
    /// Start the workers of the attempt that was planned most recently. The rendezvous is bound to
    /// this port.
    StartWorkers { port: u16 },
    /// Start the agent of a host, for the first time or again.
    StartAgent(HostIndex),
    /// Close the control connection of an agent that is no longer needed.
    ReleaseAgent(HostIndex),
    /// Send all built-in workers the addresses of their peers, with a new key for this attempt.
    SendPeers { attempt: u32, members: Vec<WorkerAddresses> },
    /// Report an event to the user and write it to the journal.
    Event(Event),
    /// Report an event of a worker to the user and write it to the journal, as a report of an agent
    /// that was made `age` ago. `None` stands for a report that the journal does not record. The
    /// report is acknowledged in both cases.
    WorkerEvent { report: ReportId, age: Duration, event: Option<Event> },
    /// Show a line of a worker's output to the user.
    Line { rank: Rank, stderr: bool, text: String },
    /// Show the user the phase in which a worker is, such as training.
    Progress { rank: Rank, phase: WorkerPhase },
    /// Keep the times of all ranks in the newest steps.
    StepTimes(StepTimes),
    /// Keep what a host and its workers have used. `hosts` is the number of hosts of the attempt.
    Usage { host: HostIndex, hosts: usize, usage: Box<HostUsage> },
    /// Kill the agent of a host, because the agent does not answer or cannot do its work.
    KillAgent(HostIndex),
    /// The run is over. No action follows.
    End(RunOutcome),
}

/// The result of a run: the exit code of `launch`, and how the run ended, such as by a stop request
/// of the user.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RunOutcome {
    /// The exit code with which `launch` ends.
    pub(crate) exit_code: u8,
    /// Whether a stop request ended the run.
    pub(crate) stopped: bool,
    /// Whether a stop request ended the run without a chance to save.
    pub(crate) killed: bool,
    /// Whether the run ended because the time limit of the batch job was near.
    pub(crate) near_time_limit: bool,
    /// Whether the run ended because the batch system was about to end the job.
    pub(crate) ended_by_batch_system: bool,
    /// Whether a stop request ended the run, and the batch system has announced the end of the job,
    /// even if a signal of the user came first.
    pub(crate) end_announced: bool,
    /// Whether the root cause is the loss of a host.
    pub(crate) host_lost: bool,
    /// Whether the run completed an optimizer step. Always `true` for programs, whose steps are
    /// unknown.
    pub(crate) made_progress: bool,
    /// The number of the last optimizer step of the run; `None` for programs, whose steps are
    /// unknown.
    pub(crate) step: Option<u64>,
    /// Whether the run has completed a checkpoint, also under an earlier controller.
    pub(crate) has_checkpoint: bool,
    /// The end of each rank other than the failed rank; empty if the run did not fail.
    pub(crate) peers: Vec<PeerWorkerEnd>,
}
