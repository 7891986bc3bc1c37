//! [`ControllerConnection`]: the connection to the controller that the agent obeys.
use crate::connection::Outbox;
use protocol::control::FromAgent;
use std::time::Duration;
use tokio::{task::JoinHandle, time::timeout};

/// The number of one of the agent's successive connections to controllers, counted from 1.
pub(super) type ConnectionNumber = u64;

/// How long the agent waits until its queued messages are written, before it closes its connection
/// to a controller. Then they are dropped.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The agent's connection to its controller, with the queue of messages and the tasks that read and
/// write the connection.
pub(super) struct ControllerConnection {
    pub(super) number: ConnectionNumber,
    pub(super) outbox: Outbox<FromAgent>,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

impl ControllerConnection {
    /// Creates the record of a connection to a controller from its number, its queue of messages,
    /// and the tasks that read and write it.
    pub(super) fn new(
        number: ConnectionNumber,
        outbox: Outbox<FromAgent>,
        reader: JoinHandle<()>,
        writer: JoinHandle<()>,
    ) -> ControllerConnection {
        ControllerConnection { number, outbox, reader, writer }
    }

    /// Closes the connection to the controller after the queued messages were written or a time
    /// limit has passed. Does not wait longer than [`FLUSH_TIMEOUT`] for a controller that does not
    /// read.
    pub(super) async fn close(self) {
        self.reader.abort();
        drop(self.outbox);
        let mut writer = self.writer;
        if timeout(FLUSH_TIMEOUT, &mut writer).await.is_err() {
            writer.abort();
        }
    }
}
