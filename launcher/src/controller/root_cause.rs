//! Defines [`RootCause`], the first failure in one start of all workers, which has caused the later
//! failures.
use super::core::host_state::HostIndex;
use crate::worker_end::{PANIC_EXIT_CODE, WorkerEnd, describe_process_end, format_signal_name};
use diagnostic::{Diagnostic, codes};
use jobspec::ids::Rank;
use protocol::{
    control::ExitStatus,
    exit::{self, WorkerExit},
    failure::{FailureReason, GpuFault, LostConnection},
    hang::HangKind,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The first known failure of a worker or agent in a run, with its host and reason, from which
/// later failures follow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RootCause {
    pub(crate) host: HostIndex,
    /// The failed rank; `None` if the failure is not that of a worker.
    pub(crate) rank: Option<Rank>,
    pub(crate) reason: FailureReason,
    /// The failure as one line for the user, without the rank and the host.
    pub(crate) message: String,
    /// The errors that explain the failure reason.
    pub(crate) diagnostics: Vec<Diagnostic>,
    /// The exit code of `launch` if this failure ends the run.
    pub(crate) exit_code: u8,
}

impl RootCause {
    /// Creates a root cause from the host, the reason and the message of a failure, with exit code
    /// 1 and no rank.
    pub(crate) fn new(host: HostIndex, reason: FailureReason, message: impl Into<String>) -> Self {
        RootCause {
            host,
            rank: None,
            reason,
            message: message.into(),
            diagnostics: Vec::new(),
            exit_code: exit::FAILED,
        }
    }

    /// Sets the rank that has failed; `None` means that no worker has failed.
    pub(crate) fn with_rank(mut self, rank: Option<Rank>) -> Self {
        self.rank = rank;
        self
    }

    /// Sets the exit code of `launch` for the case that this failure ends the run.
    pub(crate) fn with_exit_code(mut self, exit_code: u8) -> Self {
        self.exit_code = exit_code;
        self
    }

    /// Changes the failure reason to a collective timeout if only the end of the process is known,
    /// because torch ended the process after this timeout. A lack of memory or an error of a GPU
    /// remains the reason.
    pub(crate) fn into_collective_timeout(mut self) -> Self {
        if self.is_process_end() {
            self.reason = FailureReason::CollectiveTimeout { verdict: None };
            self.message =
                format!("torch ended the process after the timeout of a collective: {}", self.message);
        }
        self
    }

    /// Returns whether only the exit code or the signal of a process is known as the reason of the
    /// failure. A lack of memory and an error of a GPU are more exact reasons.
    pub(crate) fn is_process_end(&self) -> bool {
        matches!(self.reason, FailureReason::Exit { .. } | FailureReason::Signal { .. })
    }

    /// Replaces the reason of this failure by the failure of another rank that launch has not
    /// observed, because torch lost its connection to that rank.
    pub(crate) fn into_connection_loss(mut self, connection: LostConnection) -> Self {
        self.reason = FailureReason::AbortedByPeer;
        self.message = format!(
            "{connection} lost the connection to a peer, but no failure of a peer was observed: {}",
            self.message
        );
        self
    }

    /// Adds an error message with a code and advice, which explains why the failure happened, to
    /// this root cause.
    pub(crate) fn with_diagnostic(mut self, diagnostic: Diagnostic) -> Self {
        self.diagnostics.push(diagnostic);
        self
    }

    /// Returns advice for the user: the help texts of the diagnostics, then the advice for the
    /// failure reason.
    pub(crate) fn collect_help(&self) -> Vec<String> {
        let help = self.diagnostics.iter().flat_map(collect_diagnostic_help);
        help.chain(find_failure_advice(&self.reason).map(str::to_owned)).collect()
    }
}

/// Returns the help texts of a diagnostic and of its details, recursively.
fn collect_diagnostic_help(diagnostic: &Diagnostic) -> Vec<String> {
    let details = diagnostic.detail_diagnostics().iter().flat_map(collect_diagnostic_help);
    diagnostic.help().iter().cloned().chain(details).collect()
}

/// Returns the exit code of `launch` for a run whose built-in training failed, from the way in
/// which its worker exited.
pub(crate) fn to_launch_exit_code(exit: WorkerExit) -> u8 {
    match exit {
        WorkerExit::BadJob => exit::USAGE,
        WorkerExit::Cluster => exit::CLUSTER,
        WorkerExit::Checkpoint => exit::CHECKPOINT,
        WorkerExit::Done | WorkerExit::Stopped | WorkerExit::Failed | WorkerExit::Aborted => exit::FAILED,
    }
}

/// Builds the root cause of a failure from the error that a worker reported before the worker
/// exited.
pub(crate) fn build_worker_error_cause(
    (host, rank): (HostIndex, Rank),
    exit: WorkerExit,
    diagnostic: Diagnostic,
    gpu: Option<GpuFault>,
) -> RootCause {
    let mut message = diagnostic.to_string();
    let reason = match gpu {
        Some(fault) => {
            message.push_str(&format!("; {fault}"));
            FailureReason::Gpu(fault)
        }
        None => FailureReason::WorkerError { code: diagnostic.code() },
    };
    RootCause::new(host, reason, message)
        .with_rank(Some(rank))
        .with_exit_code(to_launch_exit_code(exit))
        .with_diagnostic(diagnostic)
}

/// Builds the root cause for a worker that ended because another worker failed, although no failure
/// of another worker was reported.
pub(crate) fn build_aborted_cause(
    (host, rank): (HostIndex, Rank),
    final_report: Option<(WorkerExit, Diagnostic)>,
) -> RootCause {
    let message = "aborted because a peer failed, but no failure of a peer was observed";
    let cause = RootCause::new(host, FailureReason::AbortedByPeer, message).with_rank(Some(rank));
    match final_report {
        Some((_, diagnostic)) => {
            let message = format!("{message}: {diagnostic}");
            RootCause { message, ..cause }.with_diagnostic(diagnostic)
        }
        None => cause,
    }
}

/// How the process of a worker ended, as its agent reports it.
#[derive(Clone, Debug)]
pub(crate) struct WorkerProcessEnd {
    pub(crate) status: ExitStatus,
    /// Whether the worker ran the built-in runtime.
    pub(crate) builtin: bool,
    /// `Some` if the kernel killed the process because the host ran out of memory. The inner value
    /// is the number of bytes of host memory that the job may use, or `None` if unknown.
    pub(crate) oom: Option<Option<u64>>,
    /// The error that the program recorded about its failure; `None` if it recorded no error.
    pub(crate) error: Option<String>,
    /// The GPU fault that the agent attributes to this process; `None` if it found no fault.
    pub(crate) gpu: Option<GpuFault>,
}

impl WorkerProcessEnd {
    /// Converts the end of a worker's process to the root cause of the failure, with the worker's
    /// rank and host. The exit code of the root cause is 1.
    pub(crate) fn into_root_cause(self, (host, rank): (HostIndex, Rank)) -> RootCause {
        let mut message = match self.oom {
            Some(_) => WorkerEnd::OutOfMemory(self.status).to_string(),
            None => describe_process_end(self.status, self.builtin),
        };
        for detail in self.error.iter().cloned().chain(self.gpu.as_ref().map(ToString::to_string)) {
            message.push_str(&format!(": {detail}"));
        }
        let reason = match (self.oom, self.gpu, self.status) {
            (Some(limit_bytes), ..) => FailureReason::Oom { limit_bytes },
            (_, Some(fault), _) => FailureReason::Gpu(fault),
            (.., ExitStatus::Signal(number, core_dumped)) => {
                FailureReason::Signal { name: format_signal_name(number), number, core_dumped }
            }
            (.., ExitStatus::Code(code)) => match WorkerExit::from_exit_code(code).filter(|_| self.builtin) {
                Some(WorkerExit::Stopped) => FailureReason::StoppedUnexpectedly,
                None if self.builtin && code == PANIC_EXIT_CODE => FailureReason::Panic,
                _ => FailureReason::Exit { code, error: self.error },
            },
        };
        RootCause::new(host, reason, message).with_rank(Some(rank))
    }
}

/// The way in which a host's agent ended or was lost. Every process of the job on that host is gone
/// with the agent.
#[derive(Clone, Debug)]
pub(crate) enum AgentEnd {
    /// The agent could not be started.
    NotStarted(Diagnostic),
    /// The agent's process ended. Known only for agents that are children of the controller.
    Exited(ExitStatus),
    /// The agent's process ended before the controller saw it run.
    NeverRan,
    /// A control message could not be read or sent.
    StreamBroken(Diagnostic),
    /// The transport lost the connection. Holds the error of the transport.
    ConnectionLost(Diagnostic),
    /// The connection ended. Holds the exit status of the agent, if the transport knows it.
    ConnectionEnded(Option<ExitStatus>),
    /// The agent sent no hello within this number of seconds after its start.
    NoHello { seconds: u64 },
    /// The agent sent nothing for the length of its lease.
    Silent { seconds: u64 },
    /// The agent was killed because it did not report the end of its workers within this number of
    /// seconds after SIGKILL was due.
    KilledLate { seconds: u64 },
    /// The agent reported an error because of which it cannot do its work.
    Failed(Diagnostic),
    /// The agent has ended while the run had no controller.
    EndedUnattended,
}

/// The host and process ID of an agent, for messages about the agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentLabel<'a> {
    /// The host's name in the job or, for the controller's machine, its host name.
    pub(crate) host: &'a str,
    pub(crate) remote: bool,
    /// The process id of the agent; 0 if unknown.
    pub(crate) pid: u32,
}

/// Formats the label, for example as `the agent on host node-3` or `the agent on h1 (pid 9)`.
impl fmt::Display for AgentLabel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AgentLabel { remote: true, host, .. } => write!(f, "the agent on host {host}"),
            AgentLabel { pid: 0, host, .. } => write!(f, "the agent on {host}"),
            AgentLabel { pid, host, .. } => write!(f, "the agent on {host} (pid {pid})"),
        }
    }
}

impl AgentEnd {
    /// Formats the way in which an agent ended as one line for the user.
    pub(crate) fn format_message(&self, agent: AgentLabel<'_>) -> String {
        let AgentLabel { host, remote, .. } = agent;
        match self {
            AgentEnd::NotStarted(error) => format!("cannot start {agent}: {error}"),
            AgentEnd::Exited(ExitStatus::Code(code)) => format!("{agent} exited with code {code}"),
            AgentEnd::Exited(status) => format!("{agent} was {}", describe_process_end(*status, false)),
            AgentEnd::NeverRan => format!("{agent} never ran"),
            AgentEnd::StreamBroken(error) => format!("lost the control connection to {agent}: {error}"),
            // The message of the transport names the host.
            AgentEnd::ConnectionLost(error) => error.to_string(),
            AgentEnd::ConnectionEnded(None) => format!("lost host {host}: its control connection ended"),
            AgentEnd::ConnectionEnded(Some(status)) => {
                let ended = describe_process_end(*status, false);
                format!("lost host {host}: its control connection ended (the agent: {ended})")
            }
            AgentEnd::NoHello { seconds } => format!("{agent} sent no hello within {seconds} s"),
            AgentEnd::Silent { seconds } if remote => {
                format!("lost host {host}: no heartbeat of its agent for {seconds} s")
            }
            AgentEnd::Silent { seconds } => format!("{agent} did not answer for {seconds} s"),
            AgentEnd::KilledLate { seconds } => {
                format!("{agent} did not end its workers within {seconds} s and was killed")
            }
            AgentEnd::EndedUnattended => format!("{agent} ended while the run had no controller"),
            AgentEnd::Failed(error) if error.code() == codes::run::CONTROLLER_SILENT => {
                format!("{agent} ended its workers: {error}")
            }
            AgentEnd::Failed(error) => format!("{agent} failed: {error}"),
        }
    }

    /// Returns the failure reason that the run reports because an agent ended or was lost, such as
    /// that its remote host was lost.
    pub(crate) fn to_failure_reason(&self, agent: AgentLabel<'_>) -> FailureReason {
        let silent_s = match self {
            AgentEnd::NoHello { seconds }
            | AgentEnd::Silent { seconds }
            | AgentEnd::KilledLate { seconds } => Some(*seconds),
            _ => None,
        };
        match (self, silent_s) {
            (AgentEnd::Failed(error), _) if error.code() == codes::run::CONTROLLER_SILENT => {
                let seconds = error.field("seconds").and_then(|seconds| seconds.as_u64());
                FailureReason::ControllerSilent { seconds: seconds.unwrap_or_default() }
            }
            (AgentEnd::Failed(error), _) => FailureReason::AgentFailed { code: error.code() },
            _ if agent.remote => FailureReason::HostLost { host: agent.host.to_owned(), silent_s },
            (_, Some(seconds)) => FailureReason::AgentSilent { seconds },
            _ => FailureReason::AgentLost,
        }
    }

    /// Returns whether only the connection to the agent has ended, so that the agent itself may
    /// still be alive.
    pub(crate) fn is_connection_end(&self) -> bool {
        matches!(
            self,
            AgentEnd::StreamBroken(_) | AgentEnd::ConnectionLost(_) | AgentEnd::ConnectionEnded(None)
        )
    }

    /// Returns whether this end of an agent proves that its workers have ended, too.
    pub(crate) fn proves_workers_ended(&self) -> bool {
        match self {
            AgentEnd::NotStarted(_)
            | AgentEnd::Exited(_)
            | AgentEnd::NeverRan
            | AgentEnd::ConnectionEnded(Some(_))
            | AgentEnd::Failed(_)
            | AgentEnd::EndedUnattended => true,
            AgentEnd::StreamBroken(_)
            | AgentEnd::ConnectionLost(_)
            | AgentEnd::ConnectionEnded(None)
            | AgentEnd::NoHello { .. }
            | AgentEnd::Silent { .. }
            | AgentEnd::KilledLate { .. } => false,
        }
    }

    /// Returns the error that made the agent end, or `None` if there is none.
    pub(crate) fn into_diagnostic(self) -> Option<Diagnostic> {
        match self {
            AgentEnd::NotStarted(error)
            | AgentEnd::StreamBroken(error)
            | AgentEnd::ConnectionLost(error)
            | AgentEnd::Failed(error) => Some(error),
            AgentEnd::Exited(_)
            | AgentEnd::NeverRan
            | AgentEnd::ConnectionEnded(_)
            | AgentEnd::NoHello { .. }
            | AgentEnd::Silent { .. }
            | AgentEnd::KilledLate { .. }
            | AgentEnd::EndedUnattended => None,
        }
    }
}

/// Returns advice for the user about a failure, or `None` if there is no advice for its reason.
pub(crate) fn find_failure_advice(reason: &FailureReason) -> Option<&'static str> {
    Some(match reason {
        FailureReason::Oom { .. } => {
            "use a smaller batch or more hosts, or raise the memory limit of the control group; \
             `dmesg | grep -i oom` shows the processes that the kernel killed"
        }
        FailureReason::Gpu(_) => {
            "look the Xid up in NVIDIA's list (`dmesg | grep Xid` shows all of them); \
             `cluster.exclude` leaves the host out"
        }
        FailureReason::Hang { verdict: Some(verdict), .. }
        | FailureReason::CollectiveTimeout { verdict: Some(verdict) }
            if verdict.kind != HangKind::Unknown =>
        {
            "the file with the evidence contains the collectives and the state of every rank, and the end \
             of each rank's log its stack"
        }
        FailureReason::Hang { .. } => {
            "compare the stacks at the end of each rank's log: most often one rank waits in a \
             collective that another rank never entered"
        }
        FailureReason::CollectiveTimeout { .. } => {
            "compare the logs of all ranks: most often one rank waits in a collective that another rank never \
             entered"
        }
        FailureReason::Suspended { .. } => {
            "the process received SIGSTOP or is in a debugger: `kill -CONT PID` continues it"
        }
        FailureReason::ControllerSilent { .. } => {
            "a longer `run.controller_lease` tolerates a longer suspension of the controller; \
             `run.on_controller_loss: continue` lets the workers continue without a controller"
        }
        FailureReason::HostLost { silent_s: Some(_), .. } => {
            "check that the host is up and reachable (`ping`); if it is, read the system log of the host"
        }
        FailureReason::WorkerSilent { .. } | FailureReason::AgentSilent { .. } => {
            "check whether the process is stopped (`ps -o stat`), the machine is swapping, or a file \
             system is blocked"
        }
        FailureReason::Signal { name, .. } => find_signal_advice(name)?,
        FailureReason::AbortedByPeer => "read the logs of all ranks: one of them names the peer that failed",
        FailureReason::Panic => "report the message in the rank's log, the version and the job file",
        FailureReason::Exit { .. }
        | FailureReason::WorkerError { .. }
        | FailureReason::StoppedUnexpectedly
        | FailureReason::WorkerLost
        | FailureReason::StartFailed { .. }
        | FailureReason::AgentLost
        | FailureReason::AgentFailed { .. }
        | FailureReason::HostLost { silent_s: None, .. }
        | FailureReason::TooFewHosts { .. }
        | FailureReason::Rejected { .. }
        | FailureReason::ControllerFailed { .. }
        | FailureReason::Unknown => return None,
    })
}

/// Returns advice for the user about a process that was killed by the signal `signal`, or `None` if
/// there is none.
fn find_signal_advice(name: &str) -> Option<&'static str> {
    Some(match name {
        "SIGKILL" => {
            "SIGKILL comes from a person, a batch system, or the kernel when memory runs out: \
             search `dmesg | grep -i -e oom -e killed`"
        }
        "SIGSEGV" => {
            "native code crashed: run the rank in a debugger, or enable core dumps (`ulimit -c unlimited`)"
        }
        "SIGBUS" => {
            "SIGBUS most often means that /dev/shm or a file system is full, or that a mapped file was \
             truncated: check `df -h`"
        }
        "SIGILL" => "the program uses instructions that this CPU does not have: use a build for this machine",
        "SIGABRT" => "an internal check of the program failed; the last lines of its output name the check",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use diagnostic::codes;

    /// Builds the root cause for a worker of rank 1 that ended with this exit status. `builtin`
    /// states whether it ran the built-in runtime.
    fn build_cause(status: ExitStatus, builtin: bool) -> RootCause {
        WorkerProcessEnd { status, builtin, oom: None, error: None, gpu: None }.into_root_cause((0, 1))
    }

    #[test]
    fn a_process_end_becomes_a_reason_and_a_message() {
        let signal = |name: &str, number, core_dumped| FailureReason::Signal {
            name: name.into(),
            number,
            core_dumped,
        };
        let exit = |code| FailureReason::Exit { code, error: None };
        let cases = [
            (ExitStatus::Code(3), false, exit(3), "exited with code 3"),
            (ExitStatus::Code(76), false, exit(76), "exited with code 76"),
            (ExitStatus::Code(101), false, exit(101), "exited with code 101"),
            (
                ExitStatus::Code(101),
                true,
                FailureReason::Panic,
                "panicked (exit code 101), which is a bug of launch",
            ),
            (
                ExitStatus::Code(75),
                true,
                FailureReason::StoppedUnexpectedly,
                "saved and stopped although no stop was requested",
            ),
            (ExitStatus::Signal(9, false), true, signal("SIGKILL", 9, false), "killed by SIGKILL"),
            (
                ExitStatus::Signal(11, true),
                false,
                signal("SIGSEGV", 11, true),
                "killed by SIGSEGV (core dumped)",
            ),
            (ExitStatus::Signal(35, false), false, signal("signal 35", 35, false), "killed by signal 35"),
        ];
        for (status, builtin, reason, message) in cases {
            let cause = build_cause(status, builtin);
            assert_eq!((cause.reason, cause.message.as_str()), (reason, message));
        }
    }

    #[test]
    fn memory_and_gpu_errors_take_precedence_over_the_signal() {
        let fault = GpuFault { xid: 79, pci_address: "0000:17:00".into(), description: None };
        let status = ExitStatus::Signal(9, false);
        let end =
            WorkerProcessEnd { status, builtin: false, oom: None, error: None, gpu: Some(fault.clone()) };
        assert_eq!(end.clone().into_root_cause((0, 0)).reason, FailureReason::Gpu(fault));
        let end = WorkerProcessEnd { oom: Some(Some(1 << 30)), ..end };
        assert_eq!(end.into_root_cause((0, 0)).reason, FailureReason::Oom { limit_bytes: Some(1 << 30) });
    }

    #[test]
    fn exit_codes_carry_the_category_of_the_failure() {
        assert_eq!(to_launch_exit_code(WorkerExit::BadJob), 2);
        assert_eq!(to_launch_exit_code(WorkerExit::Cluster), 3);
        assert_eq!(to_launch_exit_code(WorkerExit::Checkpoint), 4);
        assert_eq!(to_launch_exit_code(WorkerExit::Failed), 1);
    }

    #[test]
    fn help_combines_the_diagnostic_and_advice_for_the_reason() {
        assert_eq!(build_cause(ExitStatus::Signal(9, false), false).collect_help().len(), 1);
        assert!(build_cause(ExitStatus::Code(1), false).collect_help().is_empty());
        let error = Diagnostic::error(codes::run::INTERNAL, "no").with_help("try again");
        let cause = build_worker_error_cause((0, 0), WorkerExit::Failed, error, None);
        assert_eq!(cause.collect_help(), ["try again"]);
    }

    #[test]
    fn each_end_of_an_agent_has_a_message() {
        let error = || Diagnostic::error(codes::run::INTERNAL, "connection reset");
        let ends = [
            AgentEnd::NotStarted(error()),
            AgentEnd::Exited(ExitStatus::Signal(9, false)),
            AgentEnd::Exited(ExitStatus::Code(3)),
            AgentEnd::NeverRan,
            AgentEnd::StreamBroken(error()),
            AgentEnd::ConnectionLost(error()),
            AgentEnd::ConnectionEnded(None),
            AgentEnd::ConnectionEnded(Some(ExitStatus::Code(1))),
            AgentEnd::NoHello { seconds: 60 },
            AgentEnd::Silent { seconds: 5 },
            AgentEnd::KilledLate { seconds: 40 },
            AgentEnd::Failed(error()),
        ];
        let labels = [
            AgentLabel { host: "node-3", remote: true, pid: 9 },
            AgentLabel { host: "h1", remote: false, pid: 9 },
        ];
        let lines = labels.iter().flat_map(|label| ends.iter().map(|end| end.format_message(*label)));
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
    }
}
