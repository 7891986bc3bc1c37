//! Control messages: controller ↔ agent (over the agent's stdin/stdout) and agent ↔ built-in worker (over a socket).
//!
//! A frame is a little-endian u32 length and a MessagePack body (named fields, so that a dump can be read); the length is checked against [`MAX_FRAME`] before
//! anything is allocated. The first message of each side carries [`VERSION`]; another version is refused.
use crate::{
    event::{Event, Phase},
    ids::Rank,
    job::JobSpec,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Version of these messages. One executable plays every role, so a difference means a mixed-up installation.
pub const VERSION: u32 = 1;
/// Largest frame either side accepts, bytes.
pub const MAX_FRAME: u32 = 16 << 20;

/// Controller → agent.
// Few and short-lived: the size of `Start` costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToAgent {
    /// First message; the agent answers [`FromAgent::Hello`].
    Hello { version: u32 },
    /// Start these workers. Sent once per epoch.
    Start(NodePlan),
    /// Ask workers to save at the next step boundary and stop (built-in) or send them SIGTERM (commands).
    /// With `deadline_ms`, kill what is left after it.
    Stop { deadline_ms: Option<u64> },
    /// Ask workers to save at the next step boundary and go on.
    Save,
    /// End everything now: abort collectives, SIGTERM, then SIGKILL after `grace_ms`.
    Kill { reason: String, grace_ms: u64 },
    /// The controller's heartbeat; silence longer than the lease ends the agent.
    Beat,
}

/// What one node's agent shall run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodePlan {
    /// The job, for the built-in workers.
    pub job: JobSpec,
    pub run: String,
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
        host: String,
        pid: u32,
        cpus: Vec<u32>,
    },
    Started {
        rank: Rank,
        pid: u32,
    },
    /// One exit result per process.
    Exited {
        rank: Rank,
        pid: u32,
        status: ExitStatus,
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
        rank: Rank,
        event: Event,
    },
    /// What a built-in worker is doing.
    Progress {
        rank: Rank,
        phase: Phase,
        step: u64,
    },
    /// A built-in worker's last words: why it is about to exit by itself.
    Fatal {
        rank: Rank,
        exit: crate::exit::WorkerExit,
        message: String,
    },
    /// The agent itself can't go on (spawn failed, log not writable, …).
    Failed {
        rank: Option<Rank>,
        message: String,
    },
    /// No process of this job is left on the node.
    AllGone,
    Beat,
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
    Welcome(Box<Welcome>),
    /// Save at the next step boundary and leave with `WorkerExit::Stopped`.
    Stop,
    /// Save at the next step boundary and go on.
    Save,
    /// A peer is gone: every waiting collective returns an error now.
    Abort { reason: String },
}

/// Who a built-in worker is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
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
    /// Last words before exiting by itself.
    Fatal {
        exit: crate::exit::WorkerExit,
        message: String,
    },
}
