//! [`SampledWorker`]: a worker whose resource usage is measured.
use jobspec::ids::Rank;

/// A worker whose resource usage is measured: its rank, the pid of its first process, and whether
/// it may have child processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct SampledWorker {
    pub(in crate::agent) rank: Rank,
    /// The pid of the worker's first process.
    pub(in crate::agent) pid: u32,
    /// Whether the worker is a program, which may have child processes.
    pub(in crate::agent) is_program: bool,
}
