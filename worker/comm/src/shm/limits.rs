//! [`ShmLimits`]: the timeouts and the amount of shared memory of a group of processes on one host.
use std::time::Duration;

/// The timeouts and the amount of shared memory of a group of processes on one host. Every rank
/// must give the same `staging_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmLimits {
    /// How long a rank waits for the others to join the group.
    pub join_timeout: Duration,
    /// How long a rank waits in a collective for peers that have not entered the collective.
    pub collective_timeout: Duration,
    /// Size in bytes of each of a rank's two staging slots; rounded up to whole pages.
    pub staging_bytes: usize,
}

impl Default for ShmLimits {
    fn default() -> Self {
        ShmLimits {
            join_timeout: Duration::from_secs(60),
            collective_timeout: Duration::from_secs(30 * 60),
            staging_bytes: 8 << 20,
        }
    }
}
