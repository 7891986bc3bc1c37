//! [`NeighbourLink`]: an encrypted connection with a neighbour in the tree of agents.
use crate::connection::{EncryptedReader, EncryptedWriter};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// An encrypted connection with a neighbour in the tree of agents, split into the half that reads
/// and the half that writes.
pub(super) struct NeighbourLink {
    pub(super) input: EncryptedReader<OwnedReadHalf>,
    pub(super) output: EncryptedWriter<OwnedWriteHalf>,
}
