//! The limits of a sandbox process, which apply either until it ends or to a single request.
use std::time::Duration;

/// Stack size in bytes of each thread of a sandbox process that interprets files. Deeper recursion
/// ends the process.
pub const STACK_BYTES: usize = 4 << 20;
/// Stack size in bytes of those threads of a sandbox process that read requests and check limits,
/// but do not interpret files.
pub(crate) const SERVICE_STACK_BYTES: usize = 512 << 10;
/// Total size in bytes of the stacks of all threads of a sandbox process that read requests and
/// check limits.
pub(crate) const TOTAL_SERVICE_STACK_BYTES: u64 = 4 * SERVICE_STACK_BYTES as u64;
/// Address space in bytes that each thread of a sandbox process may reserve beyond the memory
/// limit, because memory allocators reserve much more than they use.
pub(crate) const ARENA_BYTES: u64 = 128 << 20;
/// Limit on the number of requests that wait in a sandbox process while it handles another one.
pub(crate) const MAX_QUEUED_REQUESTS: usize = 2;
/// Time that the caller of a sandbox process waits for a reply in addition to a multiple of the
/// request's CPU time limit. The limit of CPU time ends a process that computes, so this limit ends
/// only a process that is blocked.
pub(crate) const BASE_REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of seconds that the caller of a sandbox process waits for a reply per second of the
/// request's CPU time limit.
pub(crate) const REPLY_TIMEOUT_PER_CPU_SECOND: u32 = 8;

/// The settings with which a sandbox process starts: the number of its threads, and the limit of
/// its memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxSettings {
    /// Number of threads that compute.
    pub threads: u32,
    /// Memory limit of the process, in bytes. It also bounds the memory that a request may allow.
    pub memory_bytes: u64,
}

/// The limits of one request to a sandbox process: CPU time, memory and size of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// CPU time that all threads together may use, rounded up to seconds.
    pub cpu: Duration,
    /// Memory that the sandbox process may use while it handles the request, in bytes.
    pub memory_bytes: u64,
    /// Largest size of the reply, in bytes.
    pub reply_bytes: u64,
}

impl RequestLimits {
    /// Returns the limit of CPU time of the request in whole seconds, rounded up, at least 1.
    pub(crate) fn cpu_seconds(&self) -> u64 {
        (self.cpu.as_secs() + u64::from(self.cpu.subsec_nanos() > 0)).max(1)
    }

    /// Returns how long the caller waits for the reply before it kills the sandbox process.
    pub(crate) fn reply_timeout(&self) -> Duration {
        BASE_REPLY_TIMEOUT + Duration::from_secs(self.cpu_seconds()) * REPLY_TIMEOUT_PER_CPU_SECOND
    }
}
