//! The limits of a sandbox process: those that hold for its life, and those of one request.
use std::time::Duration;

/// Stack of each thread of a sandbox process that interprets files, in bytes. Deeper recursion ends
/// the process.
pub const STACK_BYTES: usize = 4 << 20;
/// Stack of each thread of a sandbox process that interprets nothing, in bytes.
pub(crate) const SERVICE_STACK_BYTES: usize = 512 << 10;
/// Stacks of all threads that interpret nothing, in bytes.
pub(crate) const SERVICE_STACKS_BYTES: u64 = 4 * SERVICE_STACK_BYTES as u64;
/// Address space that an allocator reserves for each thread without using it, in bytes.
pub(crate) const ARENA_BYTES: u64 = 128 << 20;
/// Number of requests that wait in the sandbox process while it handles one.
pub(crate) const REQUESTS_QUEUED: usize = 2;
/// The constant part of the longest wait for a reply, to which [`WAIT_PER_CPU_TIME`] adds. The
/// limit of CPU time ends a process that computes, so this limit ends only a process that is
/// blocked.
pub(crate) const WAIT_BASE: Duration = Duration::from_secs(60);
/// Number of seconds of the longest wait for a reply, for each second of CPU time that the request
/// may use.
pub(crate) const WAIT_PER_CPU_TIME: u32 = 8;

/// The settings of a sandbox process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxSettings {
    /// Number of threads that compute.
    pub threads: u32,
    /// Largest memory that any request may allow, in bytes.
    pub memory_bytes: u64,
}

/// The limits of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// CPU time of all threads together, rounded up to seconds.
    pub cpu: Duration,
    /// Memory of the sandbox process while it handles the request, in bytes.
    pub memory_bytes: u64,
    /// Size of the reply, in bytes.
    pub reply_bytes: u64,
}

impl RequestLimits {
    /// Returns the CPU time in whole seconds, at least 1.
    pub(crate) fn cpu_seconds(&self) -> u64 {
        (self.cpu.as_secs() + u64::from(self.cpu.subsec_nanos() > 0)).max(1)
    }

    /// Returns the longest wait for the reply.
    pub(crate) fn wait(&self) -> Duration {
        WAIT_BASE + Duration::from_secs(self.cpu_seconds()) * WAIT_PER_CPU_TIME
    }
}
