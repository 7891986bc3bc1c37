//! Control messages between controller and agents (over the stdin and stdout of the agent), and
//! between an agent and its built-in workers (over a socket).
//!
//! Module `frame` defines how a message is encoded. The first message of each side carries
//! [`PROTOCOL_VERSION`]. A side that receives another version ends the connection.
use crate::{
    event::{Event, WorkerPhase},
    failure::GpuFault,
    hardware::{CpuTopology, GpuDevice},
    ids::Rank,
    job::{JobSpec, ReloadValues},
    probe::{ProbeAnswer, ProbeRequest},
};
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

/// The version of these messages. All processes run the same executable, so a different version
/// means that two builds are mixed.
pub const PROTOCOL_VERSION: u32 = 5;
/// The largest body of a frame that either side accepts, bytes.
pub const MAX_FRAME_BYTES: u32 = 16 << 20;

/// A message from the controller to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// The first message; the agent answers with [`FromAgent::Hello`].
    Hello {
        /// The [`PROTOCOL_VERSION`] of the controller.
        version: u32,
    },
    /// Bind the rendezvous of an attempt whose rank 0 is on this host; answered by
    /// [`FromAgent::Bound`].
    Bind(RendezvousRequest),
    /// Start the workers of the plan. Sent once per attempt.
    Start(Box<HostPlan>),
    /// Stop the workers: built-in workers save at the next step boundary and exit; programs get
    /// SIGTERM.
    Stop {
        /// The attempt that the message is for.
        attempt: u32,
        /// The time in milliseconds after which workers that still run are killed; `None` for no
        /// limit.
        deadline_ms: Option<u64>,
    },
    /// Save a checkpoint and continue. Built-in workers save at the next step boundary. Programs
    /// get the signal if they handle it; other programs are not signalled.
    Save {
        /// The attempt that the message is for.
        attempt: u32,
        /// The number of the signal for programs.
        signal: i32,
    },
    /// Use the values of the changed job file from the next step boundary.
    Reload {
        /// The attempt that the message is for.
        attempt: u32,
        /// The values of all reloadable keys.
        values: ReloadValues,
    },
    /// End all workers now: abort collectives and send SIGTERM, then send SIGKILL after the grace
    /// period.
    Kill {
        /// The attempt that the message is for.
        attempt: u32,
        /// The reason, which is written to the logs of the workers.
        reason: String,
        /// The time from SIGTERM to SIGKILL, milliseconds.
        grace_ms: u64,
        /// Whether to write the stacks of all workers to their logs first.
        stacks: bool,
    },
    /// A request of `launch check`, which the agent answers with [`FromAgent::Probed`]. Only sent
    /// before [`ToAgent::Start`].
    Probe(ProbeRequest),
    /// The addresses of all built-in workers of the job, which the agent passes to every worker on
    /// its host.
    Peers(WorkerPeers),
    /// A sign of life of the controller. An agent ends if it receives nothing for longer than the
    /// lease.
    Heartbeat,
}

/// A request to an agent to bind the rendezvous port (`MASTER_PORT`) on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousRequest {
    /// The attempt that the rendezvous is for.
    pub attempt: u32,
    /// The address to bind.
    pub address: IpAddr,
    /// The port to bind; 0 for any free one.
    pub port: u16,
    /// Whether the agent serves torch's TCPStore on the port. Otherwise the agent only holds the
    /// port until the workers start.
    pub store: bool,
    /// The number of ranks that will connect.
    pub clients: u32,
    /// Addresses that may connect to the store, in addition to those of the host itself.
    pub allowed: Vec<IpAddr>,
}

/// The workers that the agent of one host is to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostPlan {
    /// The job, for the built-in workers.
    pub job: JobSpec,
    /// The name of the run.
    pub run: String,
    /// The name of the host, as the job states it.
    pub host: String,
    /// The run directory, absolute.
    pub run_dir: PathBuf,
    /// The number of the attempt, counted from 0.
    pub attempt: u32,
    /// The number of workers of the job.
    pub world: u32,
    /// The workers of this host, in the order of their local ranks.
    pub workers: Vec<WorkerPlan>,
    /// The time from SIGTERM to SIGKILL, milliseconds.
    pub grace_ms: u64,
}

/// The command, environment and CPU binding of one worker's process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPlan {
    /// The global rank.
    pub rank: Rank,
    /// The local rank: the number of the worker among those of its host.
    pub local_rank: u32,
    /// The number of workers on its host.
    pub local_world: u32,
    /// The program and its arguments; `None` for the built-in runtime (`launch worker`).
    pub command: Option<Vec<String>>,
    /// Variables that are added to the environment of the agent, in order.
    pub env: Vec<(String, String)>,
    /// The working directory.
    pub workdir: PathBuf,
    /// The numbers of the CPUs that the process is bound to; empty if the process is not bound.
    pub cpus: Vec<u32>,
    /// The number of threads of the built-in runtime, at least 1.
    pub threads: u32,
    /// The log file, absolute.
    pub log: PathBuf,
}

/// A message from an agent to the controller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromAgent {
    /// The first message.
    Hello {
        /// The [`PROTOCOL_VERSION`] of the agent.
        version: u32,
        /// Process id of the agent.
        pid: u32,
        /// The hardware and environment of the host.
        inventory: HostInventory,
    },
    /// The answer to [`ToAgent::Bind`].
    Bound {
        /// The attempt of the rendezvous.
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
        /// The process id.
        pid: u32,
    },
    /// The process of a worker ended. Sent once per process.
    Exited {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The process id.
        pid: u32,
        /// The exit code or signal of the process.
        status: ExitStatus,
        /// Whether the kernel killed the process because memory was exhausted.
        oom: bool,
        /// The last lines of the worker's log.
        tail: Vec<String>,
        /// The failure that the program recorded in `TORCHELASTIC_ERROR_FILE`, on one line.
        error: Option<String>,
        /// The error of the worker's GPU that the GPU driver reported; `None` if there is none.
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
    /// An event of a built-in worker.
    Event {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The event.
        event: Event,
    },
    /// The progress of a built-in worker.
    Progress {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// What the worker is doing.
        phase: WorkerPhase,
        /// The number of steps that are done.
        step: u64,
    },
    /// A worker made no progress for `run.hang_timeout`.
    Stalled {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// Time without progress, milliseconds.
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
        /// The addresses of the worker, best first.
        addresses: Vec<SocketAddr>,
    },
    /// The final report of a built-in worker before it exits.
    Fatal {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The reason for the exit, which determines the exit code.
        exit: crate::exit::WorkerExit,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
        /// The error of the worker's GPU that the GPU driver reported; `None` if there is none.
        gpu: Option<GpuFault>,
    },
    /// The agent failed, or could not start or supervise a worker.
    Failed {
        /// The attempt that failed.
        attempt: u32,
        /// The worker that could not be started or supervised; `None` if the agent itself failed.
        rank: Option<Rank>,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
    },
    /// The answer to [`ToAgent::Probe`].
    Probed(ProbeAnswer),
    /// All processes of this attempt on the host have ended.
    WorkersEnded {
        /// The attempt.
        attempt: u32,
    },
    /// A sign of life of the agent.
    Heartbeat,
}

/// The hardware and environment that an agent discovered on its host when it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInventory {
    /// The hostname, which is displayed but never resolved.
    pub host: String,
    /// The numbers of the CPUs on which the agent may run, ascending.
    pub cpus: Vec<u32>,
    /// The limit on CPU time of the control group, in CPUs; `None` without a limit.
    pub quota: Option<f64>,
    /// The memory that the job may use, bytes; 0 if unknown.
    pub memory: u64,
    /// The addresses of the network interfaces that are up, including the loopback.
    pub addresses: Vec<InterfaceAddress>,
    /// The size of /dev/shm, bytes; 0 if it does not exist.
    pub shm: u64,
    /// The physical cores of the CPUs in `cpus`.
    pub topology: CpuTopology,
    /// The GPUs, in the order of their numbers.
    pub gpus: Vec<GpuDevice>,
    /// The variables of [`crate::env::VISIBLE_DEVICES`] in the environment of the agent, which its
    /// workers inherit.
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

/// The exit code of a process, or the signal that killed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// The process exited with this code.
    Code(u8),
    /// The number of the signal that killed the process, and whether the process dumped core.
    Signal(i32, bool),
}

/// A message from an agent to a built-in worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The first message: the identity and the job of the worker.
    Init(Box<WorkerInit>),
    /// Save at the next step boundary and exit with `WorkerExit::Stopped`.
    Stop,
    /// Save at the next step boundary and continue.
    Save,
    /// Use these values from the next step boundary. Rank 0 decides when.
    Reload(ReloadValues),
    /// A peer failed: every pending collective returns an error now.
    Abort {
        /// Which peer failed and why.
        reason: String,
    },
    /// The addresses of all workers. Sent once, when all of them listen, and only in jobs on
    /// several hosts.
    Peers(WorkerPeers),
}

/// The addresses of the built-in workers of one attempt, and the key with which the workers
/// authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerPeers {
    /// The attempt that the addresses belong to.
    pub attempt: u32,
    /// The key with which the workers authenticate each other.
    pub key: JobKey,
    /// The addresses of each worker, in the order of the ranks.
    pub members: Vec<WorkerAddresses>,
    /// The id of the NCCL communicator, which rank 0 creates; `None` for the CPU backend.
    pub nccl_id: Option<Vec<u8>>,
}

/// The host and the addresses of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerAddresses {
    /// The index of the worker's host. Workers with the same index share memory.
    pub host_index: u32,
    /// The addresses to connect to, in this order.
    pub addresses: Vec<SocketAddr>,
}

/// The most addresses of one worker.
pub const MAX_ADDRESSES: usize = 16;

/// The secret of an attempt. Workers prove to each other that they know it. `Debug` does not print
/// the secret.
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
    /// The global rank.
    pub rank: Rank,
    /// The local rank: the number of the worker among those of its host.
    pub local_rank: u32,
    /// The number of workers of the job.
    pub world: u32,
    /// The number of workers on its host.
    pub local_world: u32,
    /// The number of threads to compute with, at least 1.
    pub threads: u32,
    /// The number of the attempt, counted from 0.
    pub attempt: u32,
    /// The name of the run.
    pub run: String,
    /// The run directory, absolute.
    pub run_dir: PathBuf,
    /// The directory that relative paths of the job start at, absolute.
    pub workdir: PathBuf,
    /// The job.
    pub job: JobSpec,
}

/// A message from a built-in worker to its agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// The first message.
    Hello {
        /// The [`PROTOCOL_VERSION`] of the worker.
        version: u32,
        /// The process id.
        pid: u32,
    },
    /// A sign of life with the current phase and step. A dedicated thread sends this message at
    /// least once a second.
    Progress {
        /// What the worker is doing.
        phase: WorkerPhase,
        /// The number of steps that are done.
        step: u64,
    },
    /// An event, which the agent passes to the controller.
    Event(Event),
    /// The worker listens for the workers on other hosts.
    Listening {
        /// The addresses of the worker, best first.
        addresses: Vec<SocketAddr>,
    },
    /// The final report before the worker exits.
    Fatal {
        /// The reason for the exit, which determines the exit code.
        exit: crate::exit::WorkerExit,
        /// The error that is reported to the user.
        diagnostic: Diagnostic,
    },
}
