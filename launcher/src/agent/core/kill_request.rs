//! [`KillRequest`]: how the controller wants the workers of an attempt to end.

/// A request of the controller to end all workers of an attempt (start of all workers), with the
/// reason and the time between the request and SIGKILL.
pub(super) struct KillRequest {
    /// The reason, which is written to the logs of the workers.
    pub(super) reason: String,
    /// The time until SIGKILL in milliseconds.
    pub(super) grace_ms: u64,
    /// The time in milliseconds in which workers may leave the attempt instead; `None` if all
    /// workers have to end.
    pub(super) leave_ms: Option<u64>,
}
