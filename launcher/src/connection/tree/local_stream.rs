//! [`LocalStream`]: moves the bytes of a control connection between the code of this process that
//! uses the connection and the router that forwards them.
use super::{frame::StreamId, router::TreeRouter};
use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::{Semaphore, mpsc},
};

/// The capacity, in bytes, of each in-memory pipe through which this process writes to or reads
/// from a control connection.
const PIPE_BYTES: usize = 64 << 10;
/// The largest number of bytes of a control connection that are taken at once from the in-memory
/// pipe into which this process writes. A controller has thousands of streams.
const READ_BYTES: usize = 4 << 10;

/// A notification from this process's end of a control connection: bytes to send, the end of the
/// bytes to send, or a number of bytes that were read.
#[derive(Debug)]
pub(crate) enum LocalStreamEvent {
    /// The writer has written these bytes.
    Written(StreamId, Vec<u8>),
    /// The writer will write no more.
    Closed(StreamId),
    /// The reader has taken this number of bytes.
    Consumed(StreamId, usize),
}

/// The end of an agent's control connection in this process, which is linked by in-memory pipes to
/// the router of the tree of agents. Dropping it ends the stream for the reader.
pub(crate) struct LocalStream {
    /// The bytes that the writer may still write.
    space: Arc<Semaphore>,
    /// The bytes for the reader. Their number is limited by the window of the stream.
    delivered: Option<mpsc::Sender<Vec<u8>>>,
}

/// The reading half and the writing half that a process uses for its end of a control connection
/// through the tree of agents.
pub(crate) struct StreamHalves {
    pub(crate) input: DuplexStream,
    pub(crate) output: DuplexStream,
}

impl StreamHalves {
    /// Creates two in-memory pipes, one per direction, between the user of a control connection and
    /// the tasks that send and receive its bytes. Returns the ends of the tree, and the ends of the
    /// reader and writer.
    pub(crate) fn create_pair() -> (StreamHalves, StreamHalves) {
        let (written, output) = duplex(PIPE_BYTES);
        let (input, read) = duplex(PIPE_BYTES);
        (StreamHalves { input: written, output: read }, StreamHalves { input, output })
    }
}

impl LocalStream {
    /// Starts the two tasks that move the bytes of a control connection between this process's
    /// pipes and the router of the tree of agents. The tasks report to `events`.
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

    /// Passes bytes that have arrived for a control connection to the task that writes them into
    /// this process's reading pipe. Never blocks.
    pub(crate) fn deliver_to_reader(&self, bytes: Vec<u8>) {
        if let Some(delivered) = &self.delivered {
            // An error means that the reader has gone.
            _ = delivered.try_send(bytes);
        }
    }

    /// Ends the reading pipe of a control connection, so that its reader gets the end of the stream
    /// after all earlier bytes.
    pub(crate) fn end_reading(&mut self) {
        self.delivered = None;
    }

    /// Permits this process to write `count` more bytes to the control connection, because the
    /// other end has read as many earlier bytes.
    pub(crate) fn permit_writing(&self, count: usize) {
        self.space.add_permits(count);
    }

    /// Makes all further writes of this process to the control connection fail, because the
    /// connection has ended.
    pub(crate) fn fail_further_writes(&self) {
        self.space.close();
    }
}

/// Takes the bytes that this process writes to a control connection, and passes them to the router
/// as fast as the other end accepts them.
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

/// Writes bytes that have arrived for a control connection into the pipe from which this process
/// reads, and reports the number of written bytes. Bytes for a reader that has gone count as taken.
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
