//! Control messages: controller ↔ agent (over the agent's stdin/stdout) and agent ↔ built-in worker (over a socket).
//!
//! A frame is a little-endian u32 length and a MessagePack body (named fields, so that a dump can be read); the length is checked against [`MAX_FRAME`] before
//! anything is allocated. The first message of each side carries [`VERSION`]; another version is refused.
use crate::{
    event::{Event, Phase},
    ids::Rank,
    job::{JobSpec, Reload},
    machine::{Gpu, Topology},
    probe::{Probe, Probed},
};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

/// Version of these messages. One executable plays every role, so a difference means a mixed-up installation.
pub const VERSION: u32 = 4;
/// Largest frame either side accepts, bytes.
pub const MAX_FRAME: u32 = 16 << 20;

/// Controller → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// First message; the agent answers [`FromAgent::Hello`].
    Hello { version: u32 },
    /// Bind the rendezvous of an epoch, which begins on this node; answered by [`FromAgent::Bound`].
    Bind(Bind),
    /// Start these workers. Sent once per epoch.
    Start(Box<HostPlan>),
    /// Ask workers to save at the next step boundary and stop (built-in) or send them SIGTERM (commands).
    /// With `deadline_ms`, kill what is left after it.
    Stop { epoch: u32, deadline_ms: Option<u64> },
    /// Ask workers to save and go on: built-in ones at the next step boundary; programs that have a handler for this
    /// signal get it, others get nothing.
    Save { epoch: u32, signal: i32 },
    /// The job file changed: go on with these values from the next step boundary.
    Reload { epoch: u32, values: Reload },
    /// End everything now: abort collectives, SIGTERM, then SIGKILL after `grace_ms`. With `stacks`, write down first
    /// where every worker is.
    Kill { epoch: u32, reason: String, grace_ms: u64, stacks: bool },
    /// Find this out about the node; the agent answers [`FromAgent::Probed`]. Only before a `Start`.
    Probe(Probe),
    /// Where every built-in worker of the job listens; for all workers of the node.
    Peers(Peers),
    /// The controller's heartbeat; silence longer than the lease ends the agent.
    Heartbeat,
}

/// The rendezvous (`MASTER_PORT`) that an agent shall bind on its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    pub epoch: u32,
    pub address: IpAddr,
    /// 0: any free one.
    pub port: u16,
    /// Serve torch's TCPStore there; else hold the port until the workers start.
    pub store: bool,
    /// Ranks that will connect to it.
    pub clients: u32,
    /// Who may connect to the store, beside the node itself.
    pub allowed: Vec<IpAddr>,
}

/// What one node's agent shall run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostPlan {
    /// The job, for the built-in workers.
    pub job: JobSpec,
    pub run: String,
    /// The node's host as the job names it.
    pub host: String,
    /// Absolute.
    pub run_dir: PathBuf,
    /// 0 at the first start, one more at each restart.
    pub epoch: u32,
    pub world: u32,
    pub workers: Vec<WorkerPlan>,
    /// Between SIGTERM and SIGKILL.
    pub grace_ms: u64,
}

/// One worker: everything its process gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerPlan {
    pub rank: Rank,
    pub local_rank: u32,
    pub local_world: u32,
    /// `None`: the built-in runtime (`launch worker`). `Some`: this program.
    pub command: Option<Vec<String>>,
    /// The whole environment added to the agent's own, in order.
    pub env: Vec<(String, String)>,
    pub workdir: PathBuf,
    /// CPUs it is bound to; empty: not bound.
    pub cpus: Vec<u32>,
    /// Threads the built-in runtime uses (≥ 1).
    pub threads: u32,
    /// Its log file, absolute.
    pub log: PathBuf,
}

/// Agent → controller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromAgent {
    /// First message: what was found on the node.
    Hello {
        version: u32,
        pid: u32,
        found: HostInventory,
    },
    /// The answer to [`ToAgent::Bind`]: the port, or why it can't be had.
    Bound {
        epoch: u32,
        port: Result<u16, String>,
    },
    Started {
        epoch: u32,
        rank: Rank,
        pid: u32,
    },
    /// One exit result per process.
    Exited {
        epoch: u32,
        rank: Rank,
        pid: u32,
        status: ExitStatus,
        /// The kernel killed it because memory ran out.
        oom: bool,
        tail: Vec<String>,
        /// A failed program's own account of why, on one line (`TORCHELASTIC_ERROR_FILE`).
        error: Option<String>,
    },
    /// A line of a worker's output that the console may show.
    Line {
        rank: Rank,
        stderr: bool,
        text: String,
    },
    /// An event of a built-in worker.
    Event {
        epoch: u32,
        rank: Rank,
        event: Event,
    },
    /// What a built-in worker is doing.
    Progress {
        epoch: u32,
        rank: Rank,
        phase: Phase,
        step: u64,
    },
    /// A worker has made no progress for `run.hang_timeout`.
    Stalled {
        epoch: u32,
        rank: Rank,
        /// Without progress, milliseconds.
        for_ms: u64,
        /// Its process is stopped (state T).
        stopped: bool,
    },
    /// A worker that was [`FromAgent::Still`] makes progress again.
    Recovered {
        epoch: u32,
        rank: Rank,
    },
    /// Where a built-in worker of a job on several nodes listens.
    Listening {
        rank: Rank,
        epoch: u32,
        addresses: Vec<SocketAddr>,
    },
    /// A built-in worker's last words: why it is about to exit by itself.
    Fatal {
        epoch: u32,
        rank: Rank,
        exit: crate::exit::WorkerExit,
        message: String,
    },
    /// The agent itself can't go on (spawn failed, log not writable, …).
    Failed {
        epoch: u32,
        rank: Option<Rank>,
        message: String,
    },
    /// What a [`ToAgent::Probe`] asked for.
    Probed(Probed),
    /// No process of this epoch is left on the node.
    WorkersEnded {
        epoch: u32,
    },
    Heartbeat,
}

/// What an agent finds on its host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostInventory {
    /// The host's own name; for people, never for finding it.
    pub host: String,
    /// The CPUs the agent may run on, ascending.
    pub cpus: Vec<u32>,
    /// CPUs' worth of time that the control group grants, when it limits it.
    pub quota: Option<f64>,
    /// Memory that may be used, bytes; 0: unknown.
    pub memory: u64,
    /// Addresses of the interfaces that are up, loopback too.
    pub addresses: Vec<Address>,
    /// Size of /dev/shm, bytes; 0: there is none.
    pub shm: u64,
    /// The cores that the CPUs make.
    pub topology: Topology,
    /// By number.
    pub gpus: Vec<Gpu>,
    /// What the agent's own environment has of [`crate::env::VISIBLE_DEVICES`]: its workers get it too.
    pub visible: Vec<(String, String)>,
}

/// A numeric address of an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub interface: String,
    pub address: IpAddr,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    Code(u8),
    /// Signal number, core dumped.
    Signal(i32, bool),
}

/// Agent → built-in worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// First message: who you are.
    Welcome(Box<WorkerInit>),
    /// Save at the next step boundary and leave with `WorkerExit::Stopped`.
    Stop,
    /// Save at the next step boundary and go on.
    Save,
    /// Go on with these values from the next step boundary. Rank 0's count.
    Reload(Reload),
    /// A peer is gone: every waiting collective returns an error now.
    Abort { reason: String },
    /// Where the others listen; sent once, after all have said it, and only in jobs on several nodes.
    Peers(Peers),
}

/// How the built-in workers of one epoch find and trust each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    /// The epoch it is about; for another one it means nothing.
    pub epoch: u32,
    pub key: JobKey,
    /// By rank.
    pub members: Vec<PeerAddress>,
    /// For a NCCL communicator, from rank 0; the CPU backend needs none.
    pub nccl_id: Option<Vec<u8>>,
}

/// Where one worker is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAddress {
    /// Its node: workers of one node share memory.
    pub node: u32,
    /// To be tried in this order.
    pub addresses: Vec<SocketAddr>,
}

/// The most addresses of one worker.
pub const MAX_ADDRESSES: usize = 16;

/// What the workers of an epoch know and nobody else: they prove it to each other. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobKey(pub [u8; 32]);

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(…)")
    }
}

/// Who a built-in worker is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerInit {
    pub version: u32,
    pub rank: Rank,
    pub local_rank: u32,
    pub world: u32,
    pub local_world: u32,
    pub threads: u32,
    pub epoch: u32,
    pub run: String,
    pub run_dir: PathBuf,
    /// Relative paths of the job are relative to this directory (absolute).
    pub workdir: PathBuf,
    pub job: JobSpec,
}

/// Built-in worker → agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// First message.
    Hello {
        version: u32,
        pid: u32,
    },
    /// Heartbeat with what it is doing; sent at least once a second by a thread of its own.
    Progress {
        phase: Phase,
        step: u64,
    },
    Event(Event),
    /// Where this worker listens for its peers on other nodes.
    Listening {
        addresses: Vec<SocketAddr>,
    },
    /// Last words before exiting by itself.
    Fatal {
        exit: crate::exit::WorkerExit,
        message: String,
    },
}
