//! [`NeighbourLink`]: a connection with another agent of the tree.
use crate::connection::{EncryptedReader, EncryptedWriter};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// The two directions of an encrypted connection with another agent.
pub(super) struct NeighbourLink {
    pub(super) input: EncryptedReader<OwnedReadHalf>,
    pub(super) output: EncryptedWriter<OwnedWriteHalf>,
}
