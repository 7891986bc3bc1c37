//! Control messages between controller and agents (over the stdin and stdout of the agent), and
//! between an agent and its built-in workers (over a socket).
//!
//! Module `frame` defines how a message is encoded. The first message of each side carries
//! [`PROTOCOL_VERSION`]. A side that receives another version ends the connection.
mod batch_job;
mod exec;
mod exit_status;
mod host_network;
mod host_plan;
mod host_usage;
mod inventory;
mod node_join;
mod peers;
mod supervision;

pub use batch_job::BatchJobRecord;
pub use exec::{EXEC_CHUNK_BYTES, EXEC_WINDOW_BYTES, ExecId, ExecReply, ExecRequest};
pub use exit_status::ExitStatus;
pub use host_network::{is_routable, select_host_address};
pub use host_plan::{HangDetection, HostPlan, WorkerPlan};
pub use host_usage::{GpuUsage, HostUsage, WorkerUsage};
pub use inventory::{HostInventory, InterfaceAddress};
pub use node_join::{JobSettingHash, JoinAnswer, JoinRequest};
pub use peers::{JobSecretKey, MAX_ADDRESSES, WorkerAddresses, WorkerPeers};
pub use supervision::{
    AdoptedAgent, AttachPurpose, AttachRejection, AttachRequest, ControllerToken, SupervisionTerms,
};

use crate::{
    event::{Event, WorkerPhase},
    failure::{GpuFault, LostConnection},
    hang::RankEvidence,
    probe::{ProbeAnswer, ProbeRequest},
    step_times::StepTimes,
};
use diagnostic::Diagnostic;
use jobspec::{JobSpec, PortSelection, ReloadValues, ids::Rank};
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

/// The version of the control messages between controller, agents and workers, which changes with
/// every change of a message. All processes run the same executable, so a different version means
/// that two builds are mixed.
pub const PROTOCOL_VERSION: u32 = 19;
/// The largest size in bytes of one MessagePack message between a controller and an agent, without
/// the header. Neither side sends or accepts a longer one.
pub const MAX_FRAME_BYTES: u32 = 16 << 20;

/// A message from the controller (the process that controls a run) to an agent (launch's process on
/// each host).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// The first message of the controller. The agent answers with [`FromAgent::Hello`].
    Hello {
        /// The [`PROTOCOL_VERSION`] of the controller.
        version: u32,
        /// The terms on which the agent obeys the controller; `None` if the agent only answers
        /// probes.
        terms: Option<Box<SupervisionTerms>>,
    },
    /// The first message of a controller that takes over a run, instead of
    /// [`ToAgent::Hello`]. The agent answers with [`FromAgent::Adopted`] or
    /// [`FromAgent::NotAdopted`].
    Attach(Box<AttachRequest>),
    /// The state of the run that only the controller knows. The agent keeps the newest memo for a
    /// later controller.
    Memo(String),
    /// The controller has stored all events of the agent up to this report. The agent forgets them.
    Acknowledge {
        /// The sequence number of the report.
        seq: u64,
    },
    /// The agent is no longer needed, so it must not wait for another controller. The controller
    /// closes the connection.
    End {
        /// The exit code of the run; `None` if the run continues without the agent.
        exit_code: Option<u8>,
    },
    /// Asks the agent of rank 0's host to bind the rendezvous port of an attempt. The agent answers
    /// with [`FromAgent::Bound`].
    Bind(RendezvousRequest),
    /// Starts the workers that the plan lists. The controller sends this message once per attempt.
    Start(Box<HostPlan>),
    /// Stops the workers. Built-in workers save a checkpoint at the next step boundary and exit.
    /// Programs get the signal `run.stop_signal` of the plan's job, and SIGTERM after
    /// `run.stop_timeout`.
    Stop {
        /// The attempt that the message is for.
        attempt: u32,
        /// The time in milliseconds after which workers that still run are killed; `None` for no
        /// limit.
        deadline_ms: Option<u64>,
    },
    /// Asks the workers to save a checkpoint and continue. Built-in workers save at the next step
    /// boundary. A program gets `signal` only if the program has a handler for this signal.
    Save {
        /// The attempt that the message is for.
        attempt: u32,
        /// The number of the signal that programs get.
        signal: i32,
    },
    /// Sends the new values of the changed job file. From now on, the agent forwards the output of
    /// the ranks that the new `run.logs.show` lists. The agent also passes the values to rank 0 if
    /// rank 0 is a built-in worker on its host. Rank 0 decides from which step on they apply.
    Reload {
        /// The attempt that the message is for.
        attempt: u32,
        /// The values of all reloadable keys.
        values: ReloadValues,
    },
    /// Ends all workers now. The agent aborts their collectives and sends SIGTERM, and sends
    /// SIGKILL after the grace period.
    Kill {
        /// The attempt that the message is for.
        attempt: u32,
        /// The reason, which is written to the logs of the workers.
        reason: String,
        /// The time from SIGTERM to SIGKILL, in milliseconds.
        grace_ms: u64,
        /// Whether the stacks of all workers are written to their logs before the workers are
        /// ended.
        stacks: bool,
        /// The time in which built-in workers on CPUs may leave the attempt instead of ending, in
        /// milliseconds. They then wait for the next attempt. `None` if all workers have to end.
        leave_ms: Option<u64>,
    },
    /// A request of `launch check`, which the agent answers with [`FromAgent::Probed`]. Only sent
    /// before [`ToAgent::Start`].
    Probe(ProbeRequest),
    /// A request about a command of `launch exec`, which the agent answers with
    /// [`FromAgent::Exec`].
    Exec {
        /// The number of the command.
        id: ExecId,
        /// The request.
        request: ExecRequest,
    },
    /// The addresses of all built-in workers of the job. The agent passes the addresses to every
    /// worker on its host.
    Peers(WorkerPeers),
    /// A sign of life of the controller. An agent ends if it receives no message for longer than
    /// the lease.
    Heartbeat,
}

/// A request to the agent of a host to bind the rendezvous port (`MASTER_PORT`) of the job's
/// workers on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousRequest {
    /// The attempt that the rendezvous is for.
    pub attempt: u32,
    /// The IP address on which the port is bound.
    pub address: IpAddr,
    /// The port to bind; 0 to bind a free port.
    pub port: u16,
    /// Whether the agent serves torch's TCPStore on the port. Otherwise the agent only holds the
    /// port until the workers start.
    pub store: bool,
    /// The number of ranks that will connect to the port.
    pub clients: u32,
    /// The IP addresses that may connect to the store, in addition to those of the host itself.
    pub allowed: Vec<IpAddr>,
    /// Whether the agent also holds the port of JAX's coordinator until the workers start, if the
    /// port is free.
    #[serde(default)]
    pub coordinator: bool,
    /// The ports of which one is bound if `port` is 0.
    #[serde(default)]
    pub ports: PortSelection,
}

impl RendezvousRequest {
    /// Returns the port at which process 0 of a JAX program listens for the others: the rendezvous
    /// port `port` plus 1, or minus 1 for port 65535. Rank 0 binds it if the program uses JAX.
    pub fn compute_jax_coordinator_port(port: u16) -> u16 {
        port.checked_add(1).unwrap_or(port - 1)
    }
}

/// A message from an agent (launch's process on each host) to the controller (the process that
/// controls a run).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The first message of the agent, which answers [`ToAgent::Hello`].
    Hello {
        /// The [`PROTOCOL_VERSION`] of the agent.
        version: u32,
        /// The process id of the agent.
        pid: u32,
        /// A random number that identifies the sequence of reports of this agent. No other agent of
        /// the run has it.
        stream: u64,
        /// The hardware and environment of the host.
        inventory: HostInventory,
    },
    /// A message that the agent repeats to a new controller.
    Report {
        /// The sequence number of the report: greater than that of each earlier report of the
        /// agent.
        seq: u64,
        /// The time since the agent made the report, in milliseconds.
        age_ms: u64,
        /// The reported message.
        message: Box<FromAgent>,
    },
    /// The agent obeys the controller that has sent [`ToAgent::Attach`], from now on.
    Adopted(Box<AdoptedAgent>),
    /// The agent does not obey the controller that has sent [`ToAgent::Attach`].
    NotAdopted(AttachRejection),
    /// The agent received SIGTERM, which a batch system sends to the processes of a job that it is
    /// about to end.
    Terminating,
    /// The agent no longer obeys the controller. The last message on a connection.
    Released {
        /// The token of the controller that has replaced this one; `None` if this controller was
        /// silent for too long.
        token: Option<ControllerToken>,
        /// The time since the last message of the controller, in milliseconds. `None` if the agent
        /// has just started, and found that a later controller already controls its host.
        silent_ms: Option<u64>,
    },
    /// The answer to [`ToAgent::Bind`]: the port at which ranks can connect, or the error.
    Bound {
        /// The attempt that the rendezvous is for.
        attempt: u32,
        /// The bound port, or why binding failed.
        port: diagnostic::Result<u16>,
    },
    /// The process of a worker was started.
    Started {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The process id of the worker.
        pid: u32,
    },
    /// The process of a worker ended. The agent sends this message once per process.
    Exited {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The process id that the worker had.
        pid: u32,
        /// The exit code or signal of the process.
        status: ExitStatus,
        /// Whether the kernel killed the process because memory was exhausted.
        oom: bool,
        /// The last lines of the worker's log, oldest first.
        tail: Vec<String>,
        /// The failure that the program recorded in `TORCHELASTIC_ERROR_FILE`, on one line.
        error: Option<String>,
        /// The error that the GPU driver reported for the worker's GPU; `None` if the driver
        /// reported none.
        gpu: Option<GpuFault>,
        /// What the worker leaves about its collectives, if torch has ended it because a collective
        /// timed out; `None` otherwise.
        timeout: Option<Box<RankEvidence>>,
        /// The part of torch whose lost connection to another rank has ended the worker; `None` if
        /// the worker ended for another reason.
        lost_connection: Option<LostConnection>,
    },
    /// A built-in worker has left the attempt. Its process waits for the next attempt.
    Left {
        /// The attempt that the worker has left.
        attempt: u32,
        /// The rank of the worker in this attempt.
        rank: Rank,
        /// The process id of the worker.
        pid: u32,
    },
    /// A line of a worker's output that the console may show.
    Line {
        /// The rank of the worker.
        rank: Rank,
        /// Whether the line is from standard error.
        stderr: bool,
        /// The line without its line break.
        text: String,
    },
    /// An event that a built-in worker reported.
    Event {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The event that the worker reported.
        event: Event,
        /// Whether the message repeats the event of a step of an earlier attempt
        /// ([`FromWorker::RestoredStep`]).
        is_restored: bool,
    },
    /// The activity and the step of a built-in worker.
    Progress {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The current activity of the worker.
        phase: WorkerPhase,
        /// The number of optimizer steps that are done.
        step: u64,
    },
    /// The times of all ranks in the newest steps of the built-in training, which rank 0 has
    /// collected.
    StepTimes {
        /// The attempt of the workers.
        attempt: u32,
        /// The times.
        times: StepTimes,
    },
    /// What the host and the workers on it have used since the previous message of this kind.
    Usage {
        /// The attempt of the workers.
        attempt: u32,
        /// The measured usage.
        usage: Box<HostUsage>,
    },
    /// A worker made no progress for `run.hang_timeout`.
    Stalled {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The time without progress, in milliseconds.
        stalled_ms: u64,
        /// Whether the process is suspended (state T).
        suspended: bool,
        /// Whether the job hangs if all workers stall. At least one worker must report this
        /// ([`HangDetection::only_in_collectives`]).
        shows_hang: bool,
    },
    /// What the agent has collected about a worker of an attempt that hangs, in answer to
    /// [`ToAgent::Kill`] with `stacks`.
    HangEvidence {
        /// The attempt of the worker.
        attempt: u32,
        /// The evidence, which contains the rank of the worker.
        evidence: Box<RankEvidence>,
    },
    /// A worker makes progress again after [`FromAgent::Stalled`].
    Recovered {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
    },
    /// The addresses at which a built-in worker listens for workers on other hosts.
    Listening {
        /// The rank of the worker.
        rank: Rank,
        /// The attempt of the worker.
        attempt: u32,
        /// The addresses of the worker, in the order in which other workers try them.
        addresses: Vec<SocketAddr>,
    },
    /// The final report of a built-in worker, which the worker sends before it exits.
    Fatal {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The reason for the exit, which determines the exit code.
        exit: crate::exit::WorkerExit,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
        /// The error that the GPU driver reported for the worker's GPU; `None` if the driver
        /// reported none.
        gpu: Option<GpuFault>,
    },
    /// The agent itself failed, or the agent could not start or supervise a worker.
    Failed {
        /// The attempt in which the failure occurred.
        attempt: u32,
        /// The worker that could not be started or supervised; `None` if the agent itself failed.
        rank: Option<Rank>,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
    },
    /// The answer to [`ToAgent::Probe`], a request of `launch check`.
    Probed(ProbeAnswer),
    /// The output or the end of a command of `launch exec`.
    Exec {
        /// The number of the command.
        id: ExecId,
        /// The answer.
        reply: ExecReply,
    },
    /// All worker processes of an attempt on the agent's host have ended.
    WorkersEnded {
        /// The attempt whose workers have ended.
        attempt: u32,
    },
    /// A sign of life of the agent.
    Heartbeat,
}

impl FromAgent {
    /// Returns whether the message may be lost without harm, because an agent sends messages of
    /// this kind, such as heartbeats, again and again.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            FromAgent::Heartbeat
                | FromAgent::Progress { .. }
                | FromAgent::StepTimes { .. }
                | FromAgent::Usage { .. }
        )
    }
}

/// A message from an agent (launch's process on each host) to a worker of the built-in training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The identity and the job of the worker. The first message of the agent, and the first
    /// message of each later attempt to a worker that has left the previous one.
    Init(Box<WorkerInit>),
    /// Asks the worker to save a checkpoint at the next step boundary, and then to exit with
    /// `WorkerExit::Stopped`.
    Stop,
    /// Asks the worker to save a checkpoint at the next step boundary, and then to continue.
    Save,
    /// The new values of the reloadable keys. Only rank 0 gets this message. Rank 0 decides at
    /// which step boundary all ranks begin to use the values.
    Reload(ReloadValues),
    /// Another worker failed. The worker that gets this message must make all of its pending
    /// collectives return an error immediately.
    Abort {
        /// The worker that failed, and why it failed.
        reason: String,
        /// Whether the worker is to leave the attempt and wait for the next one, instead of
        /// ending. The worker answers with [`FromWorker::Left`].
        keep: bool,
    },
    /// The addresses of all workers. The agent sends this message once, when all workers listen,
    /// and only in jobs on several hosts.
    Peers(WorkerPeers),
}

/// The first message from an agent to a worker of the built-in training: the worker's rank, the
/// number of workers, and the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerInit {
    /// The [`PROTOCOL_VERSION`] of the agent.
    pub version: u32,
    /// The global rank of the worker.
    pub rank: Rank,
    /// The local rank: the number of the worker among those of its host.
    pub local_rank: u32,
    /// The number of workers of the job on all hosts.
    pub world: u32,
    /// The number of workers on the worker's host.
    pub local_world: u32,
    /// The number of threads that the worker computes with, at least 1.
    pub threads: u32,
    /// The number of the attempt, counted from 0.
    pub attempt: u32,
    /// The name of the run.
    pub run: String,
    /// The absolute path of the run directory.
    pub run_dir: PathBuf,
    /// The absolute path of the directory at which relative paths of the job start.
    pub workdir: PathBuf,
    /// The job, with all defaults.
    #[serde(with = "crate::json_text")]
    pub job: JobSpec,
    /// The batch job that started the run; `None` if no scheduler did.
    pub batch_job: Option<BatchJobRecord>,
    /// See [`HostPlan::continues_batch_job`].
    pub continues_batch_job: bool,
}

impl WorkerInit {
    /// Returns the batch job, such as a requeued Slurm job, if the workers are to resume from the
    /// newest checkpoint of its earlier runs. Returns `None` if `resume.from` applies.
    pub fn continued_batch_job(&self) -> Option<&BatchJobRecord> {
        self.batch_job.as_ref().filter(|_| self.continues_batch_job)
    }
}

/// A message from a worker of the built-in training to its agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// The first message of the worker.
    Hello {
        /// The [`PROTOCOL_VERSION`] of the worker.
        version: u32,
        /// The process id of the worker.
        pid: u32,
    },
    /// A sign of life, with the current phase and step. A dedicated thread of the worker sends this
    /// message at least once a second.
    Progress {
        /// The current activity of the worker.
        phase: WorkerPhase,
        /// The number of optimizer steps that are done.
        step: u64,
    },
    /// An event of the run, which the agent passes to the controller.
    Event(Event),
    /// The event of a step that an earlier attempt completed and may not have reported. The worker
    /// found the event in a memory copy of the training state. The controller drops the event if
    /// the journal has the step.
    RestoredStep(Event),
    /// The times of all ranks in the newest steps. Only rank 0 sends this message.
    StepTimes(StepTimes),
    /// Reports that the worker listens for connections of workers on other hosts.
    Listening {
        /// The addresses of the worker, in the order in which other workers try them.
        addresses: Vec<SocketAddr>,
    },
    /// The final report of the worker, which the worker sends before it exits. A worker whose exit
    /// would be `WorkerExit::Aborted` may wait for [`ToWorker::Abort`] first.
    Fatal {
        /// The reason for the exit, which determines the exit code.
        exit: crate::exit::WorkerExit,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
    },
    /// The worker has left the attempt after [`ToWorker::Abort`]. It holds no connection, thread or
    /// file of the attempt any more, and waits for [`ToWorker::Init`].
    Left {
        /// The attempt that the worker has left.
        attempt: u32,
    },
}
