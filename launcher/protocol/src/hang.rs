//! The data about a hang: what agents collect about the ranks of a job that makes no progress, and
//! the controller's verdict on the cause.
use crate::gpu_fault::GpuFault;
use jobspec::ids::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What an agent has collected about one rank of a job that hangs: its collectives, its Python
/// stack, and the state of its main thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEvidence {
    /// The rank.
    pub rank: Rank,
    /// The counters of the process groups of the rank. If the rank did not answer, they are those
    /// that the rank published last.
    pub groups: Vec<GroupCounters>,
    /// The newest entries of torch's flight recorder.
    pub entries: Vec<CollectiveEntry>,
    /// Whether the rank answered the request of the agent. If so, the counters and entries are
    /// current.
    pub answered: bool,
    /// The Python stack of the main thread, innermost frame first; empty if unknown.
    pub stack: Vec<StackFrame>,
    /// Whether the innermost frame of the main thread is in a call of native code.
    pub in_native_call: bool,
    /// The transfer with another rank in which the main thread waits, according to its stack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Transfer>,
    /// The main thread, as the kernel describes it; `None` if the process has ended.
    pub thread: Option<ThreadState>,
    /// What the thread that trains does, in the built-in training; `None` for a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// The errors that the GPU driver has reported for the process of the rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_faults: Vec<GpuFault>,
    /// The errors that the GPU driver has reported without a process. Only the first rank of each
    /// host has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_gpu_faults: Vec<GpuFault>,
    /// The newest warnings of NCCL in the log of the rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nccl_warnings: Vec<String>,
    /// The collectives that torch has reported as timed out on the rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collective_timeouts: Vec<CollectiveTimeout>,
}

/// How many collectives a rank has entered and completed in one of torch's process groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCounters {
    /// The name of the group.
    pub name: String,
    /// The name of the backend, such as `nccl` or `gloo`.
    pub backend: String,
    /// The ranks of the group.
    pub ranks: Vec<Rank>,
    /// The number of the last collective that the rank has entered; negative if unknown.
    pub enqueued: i64,
    /// The number of the last collective that the rank has completed; negative if unknown.
    pub completed: i64,
}

/// A collective that a rank has entered, as recorded by torch's flight recorder, a log of recent
/// collectives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveEntry {
    /// The name of the process group.
    pub group: String,
    /// The number of the collective in its group.
    pub seq: i64,
    /// Whether the entry is a transfer between two ranks.
    pub p2p: bool,
    /// The name of the collective, such as `gloo:all_reduce`.
    pub operation: String,
    /// Whether the collective is complete.
    pub retired: bool,
    /// The sizes of the inputs, as text.
    pub inputs: String,
    /// The types of the inputs, as text.
    pub dtypes: String,
    /// The sizes of the outputs, as text; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outputs: String,
    /// The types of the outputs, as text; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub output_dtypes: String,
}

/// A call of `torch.distributed` that waits until another rank sends or receives a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The function that was called, such as `recv`.
    pub operation: TransferOperation,
    /// The other rank.
    pub peer: Rank,
}

/// The direction of a transfer of a tensor between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferOperation {
    /// The rank sends the tensor.
    Send,
    /// The rank receives the tensor.
    Recv,
}

/// A frame of a Python stack: function, file and line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackFrame {
    /// The path of the source file.
    pub file: String,
    /// The line, counted from 1.
    pub line: u32,
    /// The name of the function.
    pub function: String,
}

/// The state of a thread according to `/proc`, such as the system call in which the thread waits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadState {
    /// The letter of the state, such as `S`.
    pub state: char,
    /// The function of the kernel in which the thread waits; empty if unknown.
    pub wait_channel: String,
    /// What the system call waits for.
    pub wait: WaitKind,
    /// Whether the thread used CPU time while the agent collected the evidence.
    pub busy: bool,
    /// The path of the file for which the thread waits; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The functions of the kernel in which the thread waits, innermost first; empty if unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel_stack: Vec<String>,
}

/// What a thread waits for in its current system call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitKind {
    /// A futex, that is, a lock or a condition.
    Futex,
    /// Data of a file, pipe or socket, or the other side of a FIFO.
    Io,
    /// A time.
    Sleep,
    /// One of several descriptors.
    Poll,
    /// The end of a child process.
    Child,
    /// The thread is not in a system call, or the system call is unknown.
    #[default]
    Other,
}

/// The verdict on a job that hangs: the collective in which ranks wait, and which ranks have not
/// entered this collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangVerdict {
    /// The kind of hang.
    pub kind: HangKind,
    /// The collective in which ranks wait; `None` if unknown.
    pub collective: Option<WaitingCollective>,
    /// The ranks that have entered the collective.
    pub entered: Vec<Rank>,
    /// The ranks that have not entered the collective, and where each of them is.
    pub not_entered: Vec<RankPosition>,
    /// The ranks for which the evidence does not show whether they have entered the collective, and
    /// where each of them is.
    pub undetermined: Vec<RankPosition>,
    /// The different calls under the same number, if the calls differ.
    pub calls: Vec<CollectiveCallOfRanks>,
    /// The errors that the GPU drivers of the hosts have reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_faults: Vec<RankGpuFault>,
    /// The newest warning of NCCL of each rank that has one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nccl_warnings: Vec<RankNcclWarning>,
    /// The first collective that has timed out on each rank, according to torch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collective_timeouts: Vec<CollectiveTimeout>,
}

/// A collective that did not end in time on one rank, as torch's NCCL watchdog or an exception of
/// Gloo or another backend reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveTimeout {
    /// The rank.
    pub rank: Rank,
    /// The number of the collective in its group, which the watchdog does not name.
    pub seq: i64,
    /// The name of the collective, such as `ALLREDUCE` or `gloo:all_reduce`.
    pub operation: String,
}

/// The newest warning of NCCL in the log of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankNcclWarning {
    /// The rank.
    pub rank: Rank,
    /// The text of the warning.
    pub text: String,
}

/// An error that a GPU driver has reported while ranks hang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGpuFault {
    /// The rank whose GPU has failed, or the first rank of the host.
    pub rank: Rank,
    /// Whether the driver has not reported which process of the host is affected.
    pub is_of_host: bool,
    /// The error.
    pub fault: GpuFault,
}

/// The content of the file `hang-ATTEMPT.json` in the run directory: why the job hangs, and what
/// the agents have collected about each rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangFile {
    /// The result of the diagnosis.
    pub verdict: HangVerdict,
    /// What the agents have collected, one item per rank.
    pub evidence: Vec<RankEvidence>,
}

impl HangFile {
    /// Returns the name of the file, in the run directory, about a hang in the attempt (start of
    /// all workers) with the number `attempt`.
    pub fn file_name(attempt: u32) -> String {
        format!("hang-{attempt}.json")
    }
}

/// The way in which the ranks of a job hang, for example because some ranks have not entered a
/// collective in which the others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HangKind {
    /// Ranks wait in a collective that other ranks have not entered.
    NotEntered,
    /// Ranks have entered different collectives under the same number, or wait for each other in
    /// collectives of different groups.
    DifferentOrder,
    /// Ranks have entered the same collective with different shapes or types.
    DifferentShapes,
    /// All ranks have entered the collective, and it does not complete.
    AllEntered,
    /// The evidence does not show what the ranks wait for.
    Unknown,
}

/// A collective in which ranks of a job that hangs are waiting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingCollective {
    /// The name of the process group; empty while the group is created.
    pub group: String,
    /// The number of the collective in its group; 0 for a call that creates a group, and for a
    /// transfer between two ranks.
    pub seq: i64,
    /// The name of the collective; `None` if unknown.
    pub operation: Option<String>,
}

/// What one rank of a job that hangs does at the moment: its activity, and the source line and
/// kernel function in which it waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPosition {
    /// The rank.
    pub rank: Rank,
    /// What the main thread of the rank does.
    pub activity: RankActivity,
    /// The innermost frame of the program; `None` if unknown.
    pub frame: Option<StackFrame>,
    /// The path of the file for which the rank waits; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// What the rank does in the built-in training; `None` for a program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// The function of the kernel in which the main thread waits; `None` if it does not wait, or if
    /// the function is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_channel: Option<String>,
    /// The functions of the kernel stack of the main thread, innermost first; empty if this user
    /// cannot read the stack.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel_stack: Vec<String>,
}

/// What the main thread of a rank of a job that hangs does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RankActivity {
    /// A signal or a debugger has stopped the process (state T).
    Stopped,
    /// The thread waits in the kernel and cannot be interrupted (state D).
    Uninterruptible {
        /// The function of the kernel in which the thread waits.
        wait_channel: String,
    },
    /// The thread waits for data of a file, pipe or socket.
    WaitsForData,
    /// The thread waits for a lock or a condition.
    WaitsForLock,
    /// The thread sleeps for a time.
    Sleeps,
    /// The thread waits for one of several descriptors.
    Polls,
    /// The thread waits for the end of a child process.
    WaitsForChild,
    /// The thread executes Python code.
    RunsPython,
    /// The thread executes native code that Python has called.
    RunsNative,
    /// The process has ended.
    Ended,
    /// The evidence does not show what the thread does.
    Unknown,
}

/// A collective call that several ranks of a job that hangs made with equal arguments, while other
/// ranks made a different call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveCallOfRanks {
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// The name of the process group.
    pub group: String,
    /// The name of the collective.
    pub operation: String,
    /// The sizes of the inputs, as text.
    pub inputs: String,
    /// The types of the inputs, as text.
    pub dtypes: String,
    /// The sizes of the outputs, as text; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub outputs: String,
    /// The frame of the program in which the first of the ranks has called the collective; `None`
    /// if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frame: Option<StackFrame>,
}

impl fmt::Display for RankActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RankActivity::Stopped => "is stopped by a signal or a debugger (state T)",
            RankActivity::Uninterruptible { wait_channel } => {
                return write!(f, "is in uninterruptible I/O (state D, {wait_channel})");
            }
            RankActivity::WaitsForData => "waits for data of a file, pipe or socket",
            RankActivity::WaitsForLock => "waits for a lock",
            RankActivity::Sleeps => "sleeps",
            RankActivity::Polls => "waits for events",
            RankActivity::WaitsForChild => "waits for a child process",
            RankActivity::RunsPython => "runs Python code",
            RankActivity::RunsNative => "runs native code",
            RankActivity::Ended => "has ended",
            RankActivity::Unknown => "is in an unknown state",
        })
    }
}

impl fmt::Display for StackFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}:{})", self.function, self.file, self.line)
    }
}

impl fmt::Display for RankPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.activity)?;
        if let Some(path) = &self.file {
            write!(f, " ({path})")?;
        }
        if let Some(frame) = &self.frame {
            write!(f, " in {frame}")?;
        }
        self.task.iter().try_for_each(|task| write!(f, " while {task}"))
    }
}

impl fmt::Display for RankGpuFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_host = if self.is_of_host { "the host of " } else { "" };
        write!(f, "{of_host}rank {}: {}", self.rank, self.fault)
    }
}
