//! Control messages between controller and agents (over the stdin and stdout of the agent), and
//! between an agent and its built-in workers (over a socket).
//!
//! Module `frame` defines how a message is encoded. The first message of each side carries
//! [`VERSION`]; a side that finds another version ends the connection.
use crate::{
    event::{Event, Phase},
    failure::GpuFault,
    ids::Rank,
    job::{JobSpec, ReloadValues},
    machine::{Gpu, Topology},
    probe::{Probe, ProbeAnswer},
};
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

/// Version of these messages. All processes run the same executable, so a different version means
/// that two builds are mixed.
pub const VERSION: u32 = 5;
/// Largest body of a frame that either side accepts, bytes.
pub const MAX_FRAME: u32 = 16 << 20;

/// A message from the controller to an agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// The first message; the agent answers with [`FromAgent::Hello`].
    Hello {
        /// [`VERSION`] of the controller.
        version: u32,
    },
    /// Bind the rendezvous of an attempt whose rank 0 is on this host; answered by
    /// [`FromAgent::Bound`].
    Bind(BindRendezvous),
    /// Start the workers of the plan. Sent once per attempt.
    Start(Box<HostPlan>),
    /// Stop the workers: built-in ones save at the next step boundary and exit, programs get
    /// SIGTERM.
    Stop {
        /// The attempt that the message is for.
        attempt: u32,
        /// Workers that still run after this time are killed, milliseconds; `None` for no limit.
        deadline_ms: Option<u64>,
    },
    /// Save a checkpoint and continue: built-in workers save at the next step boundary, and
    /// programs that handle the signal get it. Other programs are not signalled.
    Save {
        /// The attempt that the message is for.
        attempt: u32,
        /// The signal for programs.
        signal: i32,
    },
    /// The job file has changed: use these values from the next step boundary.
    Reload {
        /// The attempt that the message is for.
        attempt: u32,
        /// The values of all reloadable keys.
        values: ReloadValues,
    },
    /// End all workers now: abort collectives and send SIGTERM, then SIGKILL after the grace
    /// period.
    Kill {
        /// The attempt that the message is for.
        attempt: u32,
        /// Why, for the logs of the workers.
        reason: String,
        /// Time from SIGTERM to SIGKILL, milliseconds.
        grace_ms: u64,
        /// Whether to write the stacks of all workers to their logs first.
        stacks: bool,
    },
    /// Inspect the host; the agent answers with [`FromAgent::Probed`]. Only sent before a `Start`.
    Probe(Probe),
    /// The addresses of all built-in workers of the job, for every worker on the host.
    Peers(Peers),
    /// A sign of life of the controller. Silence for longer than the lease ends the agent.
    Heartbeat,
}

/// The rendezvous (`MASTER_PORT`) that an agent is to bind on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindRendezvous {
    /// The attempt that the rendezvous is for.
    pub attempt: u32,
    /// The address to bind.
    pub address: IpAddr,
    /// The port to bind; 0 for any free one.
    pub port: u16,
    /// Whether to serve torch's TCPStore on the port. Otherwise the port is held until the workers
    /// start.
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
    /// 0 for the first start; each restart adds 1.
    pub attempt: u32,
    /// The number of workers of the job.
    pub world: u32,
    /// The workers of this host by local rank.
    pub workers: Vec<WorkerPlan>,
    /// Time from SIGTERM to SIGKILL, milliseconds.
    pub grace_ms: u64,
}

/// What the process of one worker is started with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPlan {
    /// The global rank.
    pub rank: Rank,
    /// The rank on its host.
    pub local_rank: u32,
    /// The number of workers on its host.
    pub local_world: u32,
    /// The program and its arguments; `None` for the built-in runtime (`launch worker`).
    pub command: Option<Vec<String>>,
    /// Variables that are added to the environment of the agent, in order.
    pub env: Vec<(String, String)>,
    /// The working directory.
    pub workdir: PathBuf,
    /// The CPUs that the process is bound to; empty when it is not bound.
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
        /// [`VERSION`] of the agent.
        version: u32,
        /// Process id of the agent.
        pid: u32,
        /// What the agent discovered about its host.
        inventory: HostInventory,
    },
    /// The answer to [`ToAgent::Bind`].
    Bound {
        /// The attempt of the rendezvous.
        attempt: u32,
        /// The port, or why it was not bound.
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
        /// How it ended.
        status: ExitStatus,
        /// Whether the kernel killed the process because memory was exhausted.
        oom: bool,
        /// The last lines of its log.
        tail: Vec<String>,
        /// What a failed program recorded about its failure, on one line
        /// (`TORCHELASTIC_ERROR_FILE`).
        error: Option<String>,
        /// The error that the GPU driver reported for this process.
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
        phase: Phase,
        /// The number of steps that are done.
        step: u64,
    },
    /// A worker has made no progress for `run.hang_timeout`.
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
    /// A worker that was [`FromAgent::Stalled`] makes progress again.
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
        /// Its addresses, best first.
        addresses: Vec<SocketAddr>,
    },
    /// The final report of a built-in worker: why it is about to exit.
    Fatal {
        /// The attempt of the worker.
        attempt: u32,
        /// The rank of the worker.
        rank: Rank,
        /// The kind of exit.
        exit: crate::exit::WorkerExit,
        /// The reason.
        diagnostic: Diagnostic,
        /// The error that the GPU driver reported for this process.
        gpu: Option<GpuFault>,
    },
    /// The agent failed, or could not start or supervise the worker of this rank.
    Failed {
        /// The attempt that failed.
        attempt: u32,
        /// The worker that is affected; `None` for the agent itself.
        rank: Option<Rank>,
        /// The reason.
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

/// What an agent discovered about its host when it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInventory {
    /// The hostname, which is displayed but never resolved.
    pub host: String,
    /// The CPUs on which the agent may run, ascending.
    pub cpus: Vec<u32>,
    /// The CPU time that the control group allows, in CPUs; `None` without a limit.
    pub quota: Option<f64>,
    /// The memory that may be used, bytes; 0 when unknown.
    pub memory: u64,
    /// The addresses of the interfaces that are up, the loopback included.
    pub addresses: Vec<InterfaceAddress>,
    /// The size of /dev/shm, bytes; 0 when there is none.
    pub shm: u64,
    /// The physical cores that the CPUs belong to.
    pub topology: Topology,
    /// The GPUs by number.
    pub gpus: Vec<Gpu>,
    /// The variables of [`crate::env::VISIBLE_DEVICES`] in the environment of the agent, which its
    /// workers inherit.
    pub visible_devices: Vec<(String, String)>,
}

/// A numeric address of an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// The name of the interface, e.g. `eth0`.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// The exit code.
    Code(u8),
    /// The number of the signal that ended it, and whether it dumped core.
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
    /// A peer has failed: every pending collective returns an error now.
    Abort {
        /// Which peer failed and why.
        reason: String,
    },
    /// The addresses of all workers. Sent once, when all of them listen, and only in jobs on
    /// several hosts.
    Peers(Peers),
}

/// How the built-in workers of one attempt find and authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    /// The attempt that the addresses belong to.
    pub attempt: u32,
    /// The key that the workers authenticate with.
    pub key: JobKey,
    /// The workers by rank.
    pub members: Vec<PeerAddress>,
    /// The id of an NCCL communicator, created by rank 0; `None` for the CPU backend.
    pub nccl_id: Option<Vec<u8>>,
}

/// The host and the addresses of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAddress {
    /// The index of its host. Workers of one host share memory.
    pub host_index: u32,
    /// Its addresses, to be tried in this order.
    pub addresses: Vec<SocketAddr>,
}

/// Most addresses of one worker.
pub const MAX_ADDRESSES: usize = 16;

/// The secret that the workers of an attempt prove to each other to hold. It is never printed.
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
    /// [`VERSION`] of the agent.
    pub version: u32,
    /// The global rank.
    pub rank: Rank,
    /// The rank on its host.
    pub local_rank: u32,
    /// The number of workers of the job.
    pub world: u32,
    /// The number of workers on its host.
    pub local_world: u32,
    /// The number of threads to compute with, at least 1.
    pub threads: u32,
    /// 0 for the first start; each restart adds 1.
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
        /// [`VERSION`] of the worker.
        version: u32,
        /// The process id.
        pid: u32,
    },
    /// A sign of life with the present activity. A dedicated thread sends it at least once a
    /// second.
    Progress {
        /// What the worker is doing.
        phase: Phase,
        /// The number of steps that are done.
        step: u64,
    },
    /// An event for the controller.
    Event(Event),
    /// The worker listens for its peers on other hosts.
    Listening {
        /// Its addresses, best first.
        addresses: Vec<SocketAddr>,
    },
    /// The final report before the worker exits.
    Fatal {
        /// The kind of exit.
        exit: crate::exit::WorkerExit,
        /// The reason.
        diagnostic: Diagnostic,
    },
}
