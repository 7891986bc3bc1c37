//! [`FailureReason`]: an enum of the reasons why a worker, an agent or a host fails.
pub use crate::gpu_fault::GpuFault;

use crate::hang::HangVerdict;
use diagnostic::{Code, codes::run};
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The reason why a run, or an attempt (one start of all workers), failed.
///
/// The JSON form is an object tagged by `kind`, such as `{"kind": "exit", "code": 3}`.
/// docs/events.md lists every kind with its fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FailureReason {
    /// A worker's process ended with an exit code other than 0.
    Exit {
        /// The exit code of the process.
        code: u8,
        /// What the program recorded about its failure (`TORCHELASTIC_ERROR_FILE`), on one line.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A signal killed a worker's process.
    Signal {
        /// The name of the signal, such as `SIGSEGV`; `signal 35` if the signal has no name.
        name: String,
        /// The number of the signal on Linux.
        number: i32,
        /// Whether the kernel wrote a core file.
        core_dumped: bool,
    },
    /// The kernel killed a worker's process because memory ran out.
    Oom {
        /// The host memory that the job may use on the worker's host, in bytes; `None` if unknown.
        limit_bytes: Option<u64>,
    },
    /// A worker failed, and the GPU driver reported an error of the worker's GPU.
    Gpu(GpuFault),
    /// A worker of the built-in runtime panicked, which is a bug in `launch`.
    Panic,
    /// A worker of the built-in runtime reported an error.
    WorkerError {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// A worker of the built-in runtime saved a checkpoint and exited although no stop was
    /// requested.
    StoppedUnexpectedly,
    /// A worker ended because another rank failed, but no failure of another rank was observed.
    AbortedByPeer,
    /// No worker made progress for `run.hang_timeout`.
    Hang {
        /// The time without progress, in seconds.
        seconds: u64,
        /// The ranks whose processes were still running.
        ranks: Vec<Rank>,
        /// What the evidence of the ranks shows; `None` if no agent has sent evidence.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        verdict: Option<Box<HangVerdict>>,
    },
    /// A worker's process was suspended by a signal (state T) for `run.hang_timeout`.
    Suspended {
        /// The time without progress, in seconds.
        seconds: u64,
        /// What the evidence of the ranks shows; `None` if no agent has sent evidence.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        verdict: Option<Box<HangVerdict>>,
    },
    /// A worker's process ended because a collective of torch took longer than the timeout of its
    /// process group.
    CollectiveTimeout {
        /// What the evidence of the ranks shows; `None` if no agent has sent evidence.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        verdict: Option<Box<HangVerdict>>,
    },
    /// A worker of the built-in runtime sent no heartbeat to its agent for too long.
    WorkerSilent {
        /// The time for which the agent received nothing, in seconds.
        seconds: u64,
    },
    /// An agent reported that all its workers had ended, but did not report how this worker ended.
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
        /// The time for which the controller received nothing, in seconds.
        seconds: u64,
    },
    /// An agent reported an error because of which it cannot supervise workers.
    AgentFailed {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// An agent received no message from the controller for `run.controller_lease`, and ended its
    /// workers.
    ControllerSilent {
        /// The time for which the agent received nothing, in seconds.
        seconds: u64,
    },
    /// The connection to a host was lost, or its agent could not be started.
    HostLost {
        /// The name of the host, as the job states it.
        host: String,
        /// The time for which the controller received nothing, in seconds; `None` if the loss was
        /// detected immediately, without waiting for a timeout.
        silent_s: Option<u64>,
    },
    /// Fewer hosts are available than `run.min_hosts` requires for an attempt.
    TooFewHosts {
        /// The number of hosts that are available.
        available: u64,
        /// The number of hosts that `run.min_hosts` requires.
        required: u64,
    },
    /// The attempt could not be planned, or its rendezvous port could not be bound.
    Rejected {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// The controller could not begin the run.
    ControllerFailed {
        /// The diagnostic code of the error.
        code: Code,
    },
    /// A reason that this version of launch does not know, because another version recorded it in
    /// the journal.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The part of torch (Gloo, NCCL or the `TCPStore`) that reported in a failed program that the
/// connection to another rank was lost. Most often the other rank has failed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LostConnection {
    /// A process group of Gloo.
    Gloo,
    /// A process group of NCCL.
    Nccl,
    /// A client of a TCPStore.
    TcpStore,
}

impl fmt::Display for LostConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LostConnection::Gloo => "Gloo",
            LostConnection::Nccl => "NCCL",
            LostConnection::TcpStore => "TCPStore",
        })
    }
}

impl FailureReason {
    /// Returns the diagnostic code of this reason, which `launch explain` explains.
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
            FailureReason::CollectiveTimeout { .. } => run::TORCH_COLLECTIVE_TIMEOUT,
            FailureReason::WorkerSilent { .. } => run::WORKER_SILENT,
            FailureReason::WorkerLost => run::WORKER_LOST,
            FailureReason::AgentLost => run::AGENT_LOST,
            FailureReason::AgentSilent { .. } => run::AGENT_SILENT,
            FailureReason::ControllerSilent { .. } => run::CONTROLLER_SILENT,
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
