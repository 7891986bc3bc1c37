//! [`WorkerPeers`]: how the workers of the built-in training reach and authenticate each other in
//! one attempt (one start of all workers).
use serde::{Deserialize, Serialize};
use std::{fmt, net::SocketAddr};

/// The addresses of all workers of the built-in training in one attempt (one start of all workers),
/// and the key with which they authenticate each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerPeers {
    /// The attempt that the addresses belong to.
    pub attempt: u32,
    /// The secret with which the workers authenticate each other.
    pub key: JobSecretKey,
    /// The addresses of each worker, ordered by rank.
    pub members: Vec<WorkerAddresses>,
    /// The id of the NCCL communicator, which rank 0 creates; `None` if workers do not use NCCL.
    pub nccl_id: Option<Vec<u8>>,
}

/// The host of one worker of the built-in training, and the addresses at which the worker can be
/// reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerAddresses {
    /// The index of the worker's host. Workers with the same index run on one host, and therefore
    /// communicate through shared memory.
    pub host_index: u32,
    /// The addresses to connect to, in the order in which they are tried.
    pub addresses: Vec<SocketAddr>,
}

/// The largest number of addresses at which a worker or a controller can be reached. A report of a
/// worker with more addresses is ignored, and an invitation of a controller with more is rejected.
pub const MAX_ADDRESSES: usize = 16;

/// A secret key of 32 bytes with which the processes of a run prove to each other that they belong
/// to the run. `Debug` does not print the secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSecretKey(pub [u8; 32]);

impl fmt::Debug for JobSecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(…)")
    }
}
