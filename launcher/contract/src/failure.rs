//! [`FailureReason`]: why a worker, an agent or a host failed, as data that programs can match.
use crate::ids::Rank;
use diagnostic::{Code, codes::run};
use serde::{Deserialize, Serialize};

/// Why an attempt, or the whole run, failed.
///
/// In JSON an object tagged by `kind`, such as `{"kind": "exit", "code": 3}`; docs/events.md lists
/// every kind with its fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FailureReason {
    /// A worker's process ended with an exit code other than 0.
    Exit {
        /// The exit code.
        code: u8,
        /// What the program recorded about its failure (`TORCHELASTIC_ERROR_FILE`), on one line.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A signal killed a worker's process.
    Signal {
        /// The signal, such as `SIGSEGV`; `signal 35` where it has no name.
        name: String,
        /// The number of the signal on Linux.
        number: i32,
        /// Whether the kernel wrote a core file.
        core_dumped: bool,
    },
    /// The kernel killed a worker's process because memory ran out.
    Oom {
        /// The memory that the job may use on the host, in bytes; `None` where it is unknown.
        limit_bytes: Option<u64>,
    },
    /// A worker failed, and the GPU driver reported an error of its GPU.
    Gpu(GpuFault),
    /// A worker of the built-in runtime panicked, which is a bug of `launch`.
    Panic,
    /// A worker of the built-in runtime reported an error.
    WorkerError {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// A worker of the built-in runtime saved and stopped although no stop was requested.
    StoppedUnexpectedly,
    /// A worker ended because a peer failed, but no failure of a peer was observed.
    AbortedByPeer,
    /// No worker made progress for `run.hang_timeout`.
    Hang {
        /// How long there was no progress, in seconds.
        seconds: u64,
        /// The ranks that were running.
        ranks: Vec<Rank>,
    },
    /// A worker's process was suspended by a signal (state T) for `run.hang_timeout`.
    Suspended {
        /// How long there was no progress, in seconds.
        seconds: u64,
    },
    /// A worker of the built-in runtime sent no heartbeat to its agent.
    WorkerSilent {
        /// How long the agent received nothing, in seconds.
        seconds: u64,
    },
    /// An agent reported that all its workers had ended, but not how this one ended.
    WorkerLost,
    /// A worker's process could not be started.
    StartFailed {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// An agent on the controller's machine ended or could not be started.
    AgentLost,
    /// An agent on the controller's machine did not answer.
    AgentSilent {
        /// How long the controller received nothing, in seconds.
        seconds: u64,
    },
    /// An agent reported that it cannot do its work.
    AgentFailed {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// The connection to a host was lost, or its agent could not be started.
    HostLost {
        /// The host as the job names it.
        host: String,
        /// How long the controller received nothing, in seconds; `None` where the loss was seen at
        /// once.
        silent_s: Option<u64>,
    },
    /// Fewer hosts are available than an attempt needs.
    TooFewHosts {
        /// Hosts that can take part.
        available: u64,
        /// Hosts that `run.min_hosts` requires.
        required: u64,
    },
    /// The attempt could not be planned, or its rendezvous could not be bound.
    Rejected {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// The controller could not begin the run.
    ControllerFailed {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// A journal of another version records a reason that this version does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

impl FailureReason {
    /// The diagnostic code that `launch explain` explains.
    pub fn code(&self) -> Code {
        match self {
            FailureReason::Exit { .. } => run::WORKER_EXITED,
            FailureReason::Signal { .. } => run::WORKER_KILLED_BY_SIGNAL,
            FailureReason::Oom { .. } => run::OUT_OF_MEMORY,
            FailureReason::Gpu(_) => run::GPU_ERROR,
            FailureReason::Panic => run::WORKER_PANICKED,
            FailureReason::StoppedUnexpectedly => run::WORKER_STOPPED_UNEXPECTEDLY,
            FailureReason::AbortedByPeer => run::ROOT_CAUSE_UNKNOWN,
            FailureReason::Hang { .. } => run::HANG_DETECTED,
            FailureReason::Suspended { .. } => run::WORKER_SUSPENDED,
            FailureReason::WorkerSilent { .. } => run::WORKER_SILENT,
            FailureReason::WorkerLost => run::WORKER_LOST,
            FailureReason::AgentLost => run::AGENT_LOST,
            FailureReason::AgentSilent { .. } => run::AGENT_SILENT,
            FailureReason::HostLost { .. } => run::HOST_LOST,
            FailureReason::TooFewHosts { .. } => run::TOO_FEW_HOSTS,
            FailureReason::WorkerError { code }
            | FailureReason::StartFailed { code }
            | FailureReason::AgentFailed { code }
            | FailureReason::Rejected { code }
            | FailureReason::ControllerFailed { code } => *code,
            FailureReason::Unknown => run::FAILURE_UNKNOWN,
        }
    }
}

/// An error of a GPU that NVIDIA's driver reported in the kernel log (an Xid).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error(
    "NVIDIA's driver reported Xid {xid}{} on the GPU at {pci_address}",
    .description.as_ref().map_or_else(String::new, |text| format!(" ({text})"))
)]
pub struct GpuFault {
    /// The number of the error in NVIDIA's list of Xid errors.
    pub xid: u32,
    /// The GPU's address on the PCI bus, such as `0000:17:00`.
    pub pci_address: String,
    /// What the number means, for the common ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}
