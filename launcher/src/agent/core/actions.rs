//! The types [`AgentInput`] and [`AgentAction`]: events that the agent's state machine receives,
//! and actions that the state machine requests.
use crate::agent::progress::CollectiveActivity;
use diagnostic::Diagnostic;
use jobspec::{StopSignal, ids::Rank};
use protocol::{
    control::{
        AttachPurpose, AttachRejection, ControllerToken, ExitStatus, FromAgent, FromWorker, HostPlan,
        HostUsage, RendezvousRequest, ToAgent, ToWorker,
    },
    exit::WorkerExit,
    failure::GpuFault,
    hang::RankEvidence,
};
use std::rc::Rc;

/// An event that the driver, which does the I/O of an agent, reports to the agent's state machine.
#[derive(Debug)]
pub(crate) enum AgentInput {
    /// A message of the controller.
    Controller(ToAgent),
    /// The connection to the controller ended or failed.
    ControllerLost,
    /// Another controller, or a later agent of this host, has proved on a separate connection that
    /// it has the key of the run. The answer is [`AgentAction::AcceptController`],
    /// [`AgentAction::AcceptEviction`] or [`AgentAction::RejectRequest`].
    AttachRequested { token: ControllerToken, purpose: AttachPurpose },
    /// Another agent of the run is alive on the host, and obeys a later controller with this token.
    ControllerReplaced(ControllerToken),
    /// The agent cannot do its work, because another agent of the run is alive on the host.
    CannotStart(Diagnostic),
    /// The workers of this attempt can be started; an answer to [`AgentAction::PrepareWorkers`].
    Prepared { attempt: u32 },
    /// A worker's process was started; an answer to [`AgentAction::Spawn`].
    Spawned { rank: Rank, pid: u32 },
    /// The process of a worker of an earlier attempt takes part in this one; an answer to
    /// [`AgentAction::Rejoin`].
    Rejoined { rank: Rank, pid: u32 },
    /// A worker's process could not be started, or not be reached; an answer to
    /// [`AgentAction::Spawn`] and [`AgentAction::Rejoin`].
    SpawnFailed { rank: Rank, diagnostic: Diagnostic },
    /// A message of a built-in worker.
    Worker { rank: Rank, message: FromWorker },
    /// The final report of a built-in worker. `gpu` is the error that the GPU driver reported for
    /// the worker, if any.
    WorkerFatal { rank: Rank, exit: WorkerExit, diagnostic: Diagnostic, gpu: Option<GpuFault> },
    /// The control connection of a built-in worker ended. `error` is the reason if the connection
    /// failed.
    WorkerConnectionEnded { rank: Rank, error: Option<Diagnostic> },
    /// A worker's process ended and was reaped, and its process group was killed.
    WorkerExited {
        rank: Rank,
        status: ExitStatus,
        /// Whether the kernel killed the worker because memory ran out.
        oom: bool,
        /// The error that the GPU driver reported for the worker, if any.
        gpu: Option<GpuFault>,
    },
    /// A measurement of one worker, in answer to [`AgentAction::MeasureActivity`]: the CPU time
    /// that its processes have used so far, in clock ticks, and whether a signal has stopped its
    /// first process. `collectives` is `None` if the worker publishes no counters of collectives.
    Activity { rank: Rank, ticks: u64, stopped: bool, collectives: Option<CollectiveActivity> },
    /// What the host and the workers of an attempt have used since the previous measurement.
    Usage { attempt: u32, usage: HostUsage },
    /// A line of a worker's output contains `run.progress_pattern`.
    ProgressMarker { rank: Rank },
    /// The port on which the rendezvous of an attempt listens, or the error of opening the port.
    /// The answer to [`AgentAction::Bind`].
    Bound { attempt: u32, port: diagnostic::Result<u16> },
    /// The stacks of the workers were written to the logs, and this evidence was collected. The
    /// answer to [`AgentAction::WriteStacks`].
    StacksWritten { evidence: Vec<RankEvidence> },
    /// The output that an ended worker left in its pipes was written to the worker's log. The
    /// answer to [`AgentAction::DrainOutput`].
    Drained {
        rank: Rank,
        /// The last lines of the worker's output.
        tail: Vec<String>,
        /// The error that the program recorded in `TORCHELASTIC_ERROR_FILE`, if any.
        error: Option<String>,
        /// What the worker leaves about its collectives, if torch has detected a hang.
        timeout: Option<Box<RankEvidence>>,
    },
    /// The agent has killed the descendant processes that its workers left. `left` are the pids of
    /// processes that did not end after SIGKILL. The answer to [`AgentAction::Sweep`].
    Swept { left: Vec<i32> },
    /// No process of a program handles the signal of [`AgentAction::RequestStop`], so the signal
    /// was not sent.
    StopSignalUnhandled { rank: Rank },
    /// A warning about a worker for the user. The worker continues.
    Warning { rank: Rank, message: String },
    /// A batch system has sent SIGTERM to the agent, because it is about to end the job.
    Terminated,
    /// Time has passed. The state machine checks its deadlines.
    Tick,
}

/// An action that the agent's state machine requests from the driver, which does the I/O.
#[derive(Debug)]
pub(crate) enum AgentAction {
    /// Send a message to the controller.
    Send(FromAgent),
    /// Close the connection to the controller, after the messages so far.
    Disconnect,
    /// Use the connection on which the request of [`AgentInput::AttachRequested`] arrived as the
    /// connection to the controller.
    AcceptController,
    /// Keep the connection on which the request of [`AgentInput::AttachRequested`] arrived open
    /// until the agent exits.
    AcceptEviction,
    /// Answer the request of [`AgentInput::AttachRequested`] with this rejection.
    RejectRequest(AttachRejection),
    /// Open the logs and set up the resources that the workers of this plan share. The answer is
    /// [`AgentInput::Prepared`] or [`AgentInput::SpawnFailed`]. The processes of the ranks `kept`
    /// take part in the attempt, and have their logs.
    PrepareWorkers { plan: Rc<HostPlan>, kept: Vec<Rank> },
    /// Start the worker at this index of the plan. The answer is [`AgentInput::Spawned`] or
    /// [`AgentInput::SpawnFailed`].
    Spawn(usize),
    /// Pass the resources of the attempt to the process of the worker at this index of the plan,
    /// which has left an earlier attempt. The answer is [`AgentInput::Rejoined`] or
    /// [`AgentInput::SpawnFailed`].
    Rejoin(usize),
    /// Send a message to a built-in worker.
    SendToWorker(Rank, ToWorker),
    /// From now on, forward the output lines of these ranks, and of no others, to the controller.
    ShowOutput(Vec<Rank>),
    /// Send a signal to a worker's process group.
    Signal(Rank, ProcessGroupSignal),
    /// Ask a program to save and stop, by sending this signal to those of its processes that handle
    /// the signal. If none does, the answer is [`AgentInput::StopSignalUnhandled`].
    RequestStop(Rank, StopSignal),
    /// Request a save from a program by sending this signal number. Warn instead if the program has
    /// no handler for the signal.
    RequestSave(Rank, i32),
    /// Open the port of a rendezvous. The answer is [`AgentInput::Bound`].
    Bind(RendezvousRequest),
    /// Measure the CPU time of all workers. The answer is one [`AgentInput::Activity`] per worker.
    MeasureActivity,
    /// Collect evidence about these workers, and write their stacks to their logs. The answer is
    /// [`AgentInput::StacksWritten`].
    WriteStacks(Vec<Rank>),
    /// Read the output that an ended worker left in its pipes. The answer is
    /// [`AgentInput::Drained`].
    DrainOutput(Rank),
    /// Kill every descendant process of the agent, except for the workers `kept` and their
    /// descendants. The answer is [`AgentInput::Swept`].
    Sweep { kept: Vec<Rank> },
    /// End the agent with this exit code.
    Exit(u8),
}

/// The signal, SIGTERM or SIGKILL, by which the agent ends the process group of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessGroupSignal {
    /// SIGTERM, followed by SIGCONT so that stopped processes handle SIGTERM.
    Terminate,
    /// SIGKILL, which ends all processes of the group immediately.
    Kill,
}
