//! [`LocalStream`]: connects the reader and writer of a control connection in this process to the
//! tree of agents, which carries the bytes.
use super::{frame::StreamId, router::TreeRouter};
use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::{Semaphore, mpsc},
};

/// The capacity, in bytes, of each in-memory pipe between a control connection in this process and
/// the tree of agents.
const PIPE_BYTES: usize = 64 << 10;
/// The largest number of bytes that one read takes from what this process has written to a control
/// connection. A controller has thousands of streams.
const READ_BYTES: usize = 4 << 10;

/// What happened at this process's end of a control connection through the tree: bytes were
/// written, the writer has ended, or received bytes were read.
#[derive(Debug)]
pub(crate) enum LocalStreamEvent {
    /// The writer has written these bytes.
    Written(StreamId, Vec<u8>),
    /// The writer will write no more.
    Closed(StreamId),
    /// The reader has taken this number of bytes.
    Consumed(StreamId, usize),
}

/// One end of a control connection through the tree of agents, in the process that reads and writes
/// the connection's messages. Dropping it ends the stream for the reader.
pub(crate) struct LocalStream {
    /// The bytes that the writer may still write.
    space: Arc<Semaphore>,
    /// The bytes for the reader. Their number is limited by the window of the stream.
    delivered: Option<mpsc::Sender<Vec<u8>>>,
}

/// The two byte streams (one for reading, one for writing) by which a process uses its end of a
/// control connection through the tree of agents.
pub(crate) struct StreamHalves {
    pub(crate) input: DuplexStream,
    pub(crate) output: DuplexStream,
}

impl StreamHalves {
    /// Creates two in-memory pipes, one per direction, between the tree of agents and the reader
    /// and writer of a control connection. Returns the ends of the tree, and the ends of the reader
    /// and writer.
    pub(crate) fn create_pair() -> (StreamHalves, StreamHalves) {
        let (written, output) = duplex(PIPE_BYTES);
        let (input, read) = duplex(PIPE_BYTES);
        (StreamHalves { input: written, output: read }, StreamHalves { input, output })
    }
}

impl LocalStream {
    /// Starts the tasks that move the bytes of a control connection between this process and the
    /// tree of agents. The tasks report to `events`.
    pub(crate) fn start(
        stream: StreamId,
        halves: StreamHalves,
        events: mpsc::Sender<LocalStreamEvent>,
    ) -> LocalStream {
        let space = Arc::new(Semaphore::new(TreeRouter::initial_writable_bytes()));
        // Each delivery has at least one byte of the window.
        let (delivered, deliveries) = mpsc::channel(TreeRouter::initial_writable_bytes());
        tokio::spawn(read_from_writer(stream, halves.input, space.clone(), events.clone()));
        tokio::spawn(write_to_reader(stream, halves.output, deliveries, events));
        LocalStream { space, delivered: Some(delivered) }
    }

    /// Passes bytes that have arrived through the tree of agents to the reader of the control
    /// connection in this process. Never blocks.
    pub(crate) fn deliver_to_reader(&self, bytes: Vec<u8>) {
        if let Some(delivered) = &self.delivered {
            // An error means that the reader has gone.
            _ = delivered.try_send(bytes);
        }
    }

    /// Signals the end of the control connection to its reader, once the reader has received all
    /// earlier bytes.
    pub(crate) fn end_reading(&mut self) {
        self.delivered = None;
    }

    /// Permits this process to write `count` more bytes to the control connection, because the
    /// other end has acknowledged earlier ones.
    pub(crate) fn permit_writing(&self, count: usize) {
        self.space.add_permits(count);
    }

    /// Makes further writes to the control connection fail, because the connection has ended.
    pub(crate) fn fail_further_writes(&self) {
        self.space.close();
    }
}

/// Reads the bytes that this process writes to a control connection and passes them on for sending,
/// while the other end has buffer space.
async fn read_from_writer(
    stream: StreamId,
    mut written: DuplexStream,
    space: Arc<Semaphore>,
    events: mpsc::Sender<LocalStreamEvent>,
) {
    let mut buffer = vec![0; READ_BYTES];
    while let Ok(count @ 1..) = written.read(&mut buffer).await {
        match space.acquire_many(count as u32).await {
            Ok(permit) => permit.forget(),
            Err(_) => return,
        }
        if events.send(LocalStreamEvent::Written(stream, buffer[..count].to_vec())).await.is_err() {
            return;
        }
    }
    // An error means that the router has ended.
    _ = events.send(LocalStreamEvent::Closed(stream)).await;
}

/// Passes bytes from the tree of agents to the reader of a control connection, and reports the
/// number of passed bytes to `events`. Bytes for a reader that has gone count as taken.
async fn write_to_reader(
    stream: StreamId,
    mut reader: DuplexStream,
    mut deliveries: mpsc::Receiver<Vec<u8>>,
    events: mpsc::Sender<LocalStreamEvent>,
) {
    while let Some(bytes) = deliveries.recv().await {
        _ = reader.write_all(&bytes).await;
        if events.send(LocalStreamEvent::Consumed(stream, bytes.len())).await.is_err() {
            return;
        }
    }
}
