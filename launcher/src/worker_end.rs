//! [`WorkerEnd`]: how a worker ended, and its description for the user.
use jobspec::ids::Rank;
use nix::sys::signal::Signal;
use protocol::{control::ExitStatus, exit::WorkerExit};
use std::fmt;

/// The exit code of a Rust process that panicked.
pub(crate) const PANIC_EXIT_CODE: u8 = 101;

/// How a worker ended, such as with an exit code, by a signal, or with its agent, for messages to
/// the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WorkerEnd {
    /// The process ended. `builtin` states whether it ran the built-in runtime.
    Exited { status: ExitStatus, builtin: bool },
    /// The kernel killed the process because the host ran out of memory.
    OutOfMemory(ExitStatus),
    /// The worker was running when its agent was lost.
    LostWithAgent,
    /// The process of the worker was never started.
    NeverStarted,
}

impl fmt::Display for WorkerEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WorkerEnd::Exited { status, builtin } => f.write_str(&describe_process_end(*status, *builtin)),
            WorkerEnd::OutOfMemory(status) => {
                write!(f, "{} because memory ran out (OOM killer)", describe_process_end(*status, false))
            }
            WorkerEnd::LostWithAgent => f.write_str("lost with its agent"),
            WorkerEnd::NeverStarted => f.write_str("never started"),
        }
    }
}

/// The rank, the host and the end of a worker that did not cause the failure of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerWorkerEnd {
    pub(crate) rank: Rank,
    /// The host's name in the job.
    pub(crate) host: String,
    pub(crate) end: WorkerEnd,
}

/// Describes how a process ended, such as `exited with code 3` or `killed by SIGSEGV (core
/// dumped)`. The exit codes of the built-in runtime are explained if `builtin` is set.
pub(crate) fn describe_process_end(status: ExitStatus, builtin: bool) -> String {
    match status {
        ExitStatus::Code(0) => "finished".into(),
        ExitStatus::Code(code) => match WorkerExit::from_exit_code(code).filter(|_| builtin) {
            Some(WorkerExit::Aborted) => "aborted after the failure".into(),
            Some(WorkerExit::Stopped) => "saved and stopped although no stop was requested".into(),
            None if builtin && code == PANIC_EXIT_CODE => {
                "panicked (exit code 101), which is a bug of launch".into()
            }
            _ => format!("exited with code {code}"),
        },
        ExitStatus::Signal(number, core_dumped) => {
            let core = if core_dumped { " (core dumped)" } else { "" };
            format!("killed by {}{core}", format_signal_name(number))
        }
    }
}

/// Returns the name of a signal, such as `SIGKILL`, or `signal N` if the number has no name.
pub(crate) fn format_signal_name(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |signal| signal.to_string())
}
