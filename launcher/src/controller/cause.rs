//! Why a job failed, in words, and with which exit code.
use super::core::HostIndex;
use contract::{
    control::ExitStatus,
    exit::{self, WorkerExit},
    ids::Rank,
};
use nix::sys::signal::Signal;

/// A root cause, or a candidate for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cause {
    pub(crate) node: HostIndex,
    /// `None`: not a worker's failure.
    pub(crate) rank: Option<Rank>,
    pub(crate) text: String,
    pub(crate) exit_code: u8,
}

/// The exit code of `launch` when a built-in worker's failure is the root cause.
pub(crate) fn of_worker_exit(exit: WorkerExit) -> u8 {
    match exit {
        WorkerExit::BadJob => exit::USAGE,
        WorkerExit::Cluster => exit::CLUSTER,
        WorkerExit::Checkpoint => exit::CHECKPOINT,
        WorkerExit::Done | WorkerExit::Stopped | WorkerExit::Failed | WorkerExit::Aborted => exit::FAILED,
    }
}

/// A rank that gave up because of another, when that other one's failure was never seen.
pub(crate) fn secondary(mut cause: Cause, last_words: Option<(WorkerExit, String)>) -> Cause {
    let said = last_words.map_or_else(String::new, |(_, text)| format!(": {text}"));
    cause.text = format!("gave up on its peers, but no failure of a peer was seen{said}");
    cause
}

/// How a process ended.
pub(crate) fn describe(status: ExitStatus, builtin: bool) -> String {
    match status {
        ExitStatus::Code(0) => "done".into(),
        ExitStatus::Code(code) => match WorkerExit::from_code(code).filter(|_| builtin) {
            Some(WorkerExit::Aborted) => "gave up after the failure".into(),
            Some(WorkerExit::Stopped) => "saved and stopped without being asked".into(),
            None if builtin && code == 101 => {
                "exit code 101 (it panicked: a bug of launch; its log says where)".into()
            }
            _ => format!("exit code {code}"),
        },
        ExitStatus::Signal(number, core) => {
            let name =
                Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |s| s.to_string());
            format!("killed by {name}{}", if core { " (core dumped)" } else { "" })
        }
    }
}

/// How a process ended that the kernel killed for want of memory.
pub(crate) fn out_of_memory(status: ExitStatus) -> String {
    let how = describe(status, false);
    format!("{how}: the kernel killed it because memory ran out (OOM)")
}

/// What a person can do about this cause, if there is something to say that the cause does not say.
pub(crate) fn advice(cause: &str) -> Option<&'static str> {
    let table = [
        (
            "memory ran out",
            "it needs less memory (smaller batch, more hosts) or a higher limit: see the memory limit of its control group, and `dmesg | grep -i oom`",
        ),
        (
            "driver reports Xid",
            "NVIDIA's list of Xid errors says what the number means and whether the GPU is to be reset: see `dmesg | grep Xid`; `cluster.exclude` leaves the host out",
        ),
        (
            "no rank made progress",
            "a rank that waits for one that never comes, most often: compare the stacks at the end of each rank's log",
        ),
        (
            "nothing was heard of its agent",
            "is the host down, frozen or cut off? `ping` it; its own log says why if it lives",
        ),
        (
            "SIGKILL",
            "SIGKILL comes from a person, a batch system or the kernel when memory runs out: see `dmesg | grep -i -e oom -e killed`",
        ),
        (
            "SIGSEGV",
            "a crash in native code: run that rank under a debugger, or enable core dumps (`ulimit -c unlimited`)",
        ),
        (
            "SIGBUS",
            "SIGBUS most often means a full /dev/shm or file system, or a file that was cut while mapped: see `df -h`",
        ),
        ("SIGILL", "the program uses instructions this CPU does not have: use a build for this machine"),
        ("SIGABRT", "the program ended itself on an internal check; the lines above and its log say which"),
        (
            "stopped responding",
            "look where it hangs: is it stopped (`ps -o stat`), is the machine swapping, is a file system stuck?",
        ),
    ];
    table.iter().find(|(word, _)| cause.contains(word)).map(|(_, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_described_by_name() {
        let cases = [
            (ExitStatus::Code(3), false, "exit code 3"),
            (ExitStatus::Code(76), false, "exit code 76"),
            (ExitStatus::Code(76), true, "gave up after the failure"),
            (ExitStatus::Signal(9, false), true, "killed by SIGKILL"),
            (ExitStatus::Signal(11, true), false, "killed by SIGSEGV (core dumped)"),
            (ExitStatus::Signal(35, false), false, "killed by signal 35"),
        ];
        for (status, builtin, want) in cases {
            assert_eq!(describe(status, builtin), want);
        }
    }

    #[test]
    fn exit_codes_carry_the_kind_of_failure() {
        assert_eq!(of_worker_exit(WorkerExit::BadJob), 2);
        assert_eq!(of_worker_exit(WorkerExit::Cluster), 3);
        assert_eq!(of_worker_exit(WorkerExit::Checkpoint), 4);
        assert_eq!(of_worker_exit(WorkerExit::Failed), 1);
    }

    #[test]
    fn advice_fits_the_signal() {
        assert!(advice("killed by SIGKILL").is_some_and(|a| a.contains("oom")));
        assert!(advice("exit code 1").is_none());
    }
}
