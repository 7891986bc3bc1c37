//! Control messages between controller and agents (over the stdin and stdout of the agent), and
//! between an agent and its built-in workers (over a socket).
//!
//! Module `frame` defines how a message is encoded. The first message of each side carries
//! [`PROTOCOL_VERSION`]. A side that receives another version ends the connection.
use crate::{
    event::{Event, WorkerPhase},
    failure::GpuFault,
    hardware::{CpuTopology, GpuDevice},
    probe::{ProbeAnswer, ProbeRequest},
};
use diagnostic::Diagnostic;
use jobspec::{JobSpec, ReloadValues, ids::Rank};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

/// The version of the control messages, which changes with every change of a message. All processes
/// run the same executable, so a different version means that two builds are mixed.
pub const PROTOCOL_VERSION: u32 = 5;
/// The largest body of a frame, in bytes. Neither side sends or accepts a longer one.
pub const MAX_FRAME_BYTES: u32 = 16 << 20;

/// A message from the controller to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// The first message of the controller. The agent answers with [`FromAgent::Hello`].
    Hello {
        /// The [`PROTOCOL_VERSION`] of the controller.
        version: u32,
    },
    /// Asks the agent of rank 0's host to bind the rendezvous port of an attempt. The agent answers
    /// with [`FromAgent::Bound`].
    Bind(RendezvousRequest),
    /// Starts the workers that the plan lists. The controller sends this message once per attempt.
    Start(Box<HostPlan>),
    /// Stops the workers. Built-in workers save a checkpoint at the next step boundary and exit.
    /// Programs get SIGTERM.
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
    },
    /// A request of `launch check`, which the agent answers with [`FromAgent::Probed`]. Only sent
    /// before [`ToAgent::Start`].
    Probe(ProbeRequest),
    /// The addresses of all built-in workers of the job. The agent passes the addresses to every
    /// worker on its host.
    Peers(WorkerPeers),
    /// A sign of life of the controller. An agent ends if it receives no message for longer than
    /// the lease.
    Heartbeat,
}

/// A request to an agent to bind the rendezvous port (`MASTER_PORT`) on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousRequest {
    /// The attempt that the rendezvous is for.
    pub attempt: u32,
    /// The IP address on which the port is bound.
    pub address: IpAddr,
    /// The port to bind; 0 to bind any free port.
    pub port: u16,
    /// Whether the agent serves torch's TCPStore on the port. Otherwise the agent only holds the
    /// port until the workers start.
    pub store: bool,
    /// The number of ranks that will connect to the port.
    pub clients: u32,
    /// The IP addresses that may connect to the store, in addition to those of the host itself.
    pub allowed: Vec<IpAddr>,
}

/// The workers that the agent of one host is to run in one attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostPlan {
    /// The job, which the agent passes to its built-in workers.
    pub job: JobSpec,
    /// The name of the run.
    pub run: String,
    /// The name of the host, as the job states it.
    pub host: String,
    /// The absolute path of the run directory.
    pub run_dir: PathBuf,
    /// The number of the attempt, counted from 0.
    pub attempt: u32,
    /// The number of workers of the job on all hosts.
    pub world: u32,
    /// The workers of this host, in the order of their local ranks.
    pub workers: Vec<WorkerPlan>,
    /// The time from SIGTERM to SIGKILL, in milliseconds.
    pub grace_ms: u64,
    /// The filter of the agent's debug log, in the syntax of `LAUNCH_LOG`. Empty in stored plans.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub debug_filter: String,
}

/// The command, environment and CPU binding of one worker's process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPlan {
    /// The global rank of the worker.
    pub rank: Rank,
    /// The local rank: the number of the worker among those of its host.
    pub local_rank: u32,
    /// The number of workers on the worker's host.
    pub local_world: u32,
    /// The program and its arguments; `None` for the built-in runtime (`launch worker`).
    pub command: Option<Vec<String>>,
    /// Variables that are added to the environment of the agent, in this order. A later variable
    /// replaces an earlier one of the same name.
    pub env: Vec<(String, String)>,
    /// The working directory of the process.
    pub workdir: PathBuf,
    /// The numbers of the CPUs that the process is bound to; empty if the process is not bound.
    pub cpus: Vec<u32>,
    /// The number of threads of the built-in runtime, at least 1.
    pub threads: u32,
    /// The absolute path of the worker's log file.
    pub log: PathBuf,
}

/// A message from an agent to the controller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The first message of the agent, which answers [`ToAgent::Hello`].
    Hello {
        /// The [`PROTOCOL_VERSION`] of the agent.
        version: u32,
        /// The process id of the agent.
        pid: u32,
        /// The hardware and environment of the host.
        inventory: HostInventory,
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
    /// All worker processes of an attempt on the agent's host have ended.
    WorkersEnded {
        /// The attempt whose workers have ended.
        attempt: u32,
    },
    /// A sign of life of the agent.
    Heartbeat,
}

/// The hardware and environment that an agent discovered on its host when it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInventory {
    /// The hostname, which is displayed but never resolved to an address.
    pub host: String,
    /// The numbers of the CPUs on which the agent may run, in ascending order.
    pub cpus: Vec<u32>,
    /// The CPU time limit of the agent's control group, as a number of CPUs; `None` without a
    /// limit.
    pub quota: Option<f64>,
    /// The host memory that the job may use, in bytes; 0 if unknown.
    pub memory: u64,
    /// The addresses of the network interfaces that are up, including the loopback.
    pub addresses: Vec<InterfaceAddress>,
    /// The size of /dev/shm, in bytes; 0 if /dev/shm does not exist.
    pub shm: u64,
    /// The physical cores of the CPUs in `cpus`.
    pub topology: CpuTopology,
    /// The GPUs of the host, ordered by their device number.
    pub gpus: Vec<GpuDevice>,
    /// The variables of [`jobspec::env::VISIBLE_DEVICES`] in the environment of the agent, which
    /// its workers inherit.
    pub visible_devices: Vec<(String, String)>,
}

/// An IP address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// The name of the interface, e.g. `eth0`.
    pub interface: String,
    /// The IP address.
    pub address: IpAddr,
}

/// How a process ended: its exit code, or the signal that killed the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// The process exited with this code.
    Code(u8),
    /// The process was killed by the signal with this number. The second field states whether the
    /// process dumped core.
    Signal(i32, bool),
}

/// A message from an agent to a built-in worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The first message of the agent: the identity and the job of the worker.
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
    },
    /// The addresses of all workers. The agent sends this message once, when all workers listen,
    /// and only in jobs on several hosts.
    Peers(WorkerPeers),
}

/// The addresses of the built-in workers of one attempt, and the key with which the workers
/// authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerPeers {
    /// The attempt that the addresses belong to.
    pub attempt: u32,
    /// The secret with which the workers authenticate each other.
    pub key: JobKey,
    /// The addresses of each worker, ordered by rank.
    pub members: Vec<WorkerAddresses>,
    /// The id of the NCCL communicator, which rank 0 creates; `None` if workers do not use NCCL.
    pub nccl_id: Option<Vec<u8>>,
}

/// The host and the addresses of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerAddresses {
    /// The index of the worker's host. Workers with the same index run on one host, and therefore
    /// communicate through shared memory.
    pub host_index: u32,
    /// The addresses to connect to, in the order in which they are tried.
    pub addresses: Vec<SocketAddr>,
}

/// The largest number of addresses at which a worker or a controller can be reached. A report of a
/// worker with more addresses is ignored, and an invitation of a controller with more is rejected.
pub const MAX_ADDRESSES: usize = 16;

/// The secret of one attempt. Each worker proves that it knows the secret when it connects to
/// another worker. `Debug` does not print the secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobKey(pub [u8; 32]);

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(…)")
    }
}

/// The identity and the job of a built-in worker.
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
    pub job: JobSpec,
}

/// A message from a built-in worker to its agent.
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
    /// Reports that the worker listens for connections of workers on other hosts.
    Listening {
        /// The addresses of the worker, in the order in which other workers try them.
        addresses: Vec<SocketAddr>,
    },
    /// The final report of the worker, which the worker sends before it exits.
    Fatal {
        /// The reason for the exit, which determines the exit code.
        exit: crate::exit::WorkerExit,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
    },
}
