//! [`LocalStream`]: connects a stream of a router with its reader and writer in this process.
use super::{frame::StreamId, router::TreeRouter};
use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::{Semaphore, mpsc},
};

/// The capacity, in bytes, of the pipe between a stream and its reader or writer.
const PIPE_BYTES: usize = 64 << 10;
/// The largest number of bytes that are read from a writer at once. A controller has thousands of
/// streams.
const READ_BYTES: usize = 4 << 10;

/// An event of a local stream, which is passed to the router.
#[derive(Debug)]
pub(crate) enum LocalStreamEvent {
    /// The writer has written these bytes.
    Written(StreamId, Vec<u8>),
    /// The writer will write no more.
    Closed(StreamId),
    /// The reader has taken this number of bytes.
    Consumed(StreamId, usize),
}

/// The router's end of a stream whose reader and writer are in this process. Dropping it ends the
/// stream for the reader.
pub(crate) struct LocalStream {
    /// The bytes that the writer may still write.
    space: Arc<Semaphore>,
    /// The bytes for the reader. Their number is limited by the window of the stream.
    delivered: Option<mpsc::Sender<Vec<u8>>>,
}

/// The input and output at one end of a pair of pipes.
pub(crate) struct StreamHalves {
    pub(crate) input: DuplexStream,
    pub(crate) output: DuplexStream,
}

impl StreamHalves {
    /// Creates the two ends of a pair of pipes. Returns the end of the router, and the end of the
    /// reader and writer.
    pub(crate) fn create_pair() -> (StreamHalves, StreamHalves) {
        let (written, output) = duplex(PIPE_BYTES);
        let (input, read) = duplex(PIPE_BYTES);
        (StreamHalves { input: written, output: read }, StreamHalves { input, output })
    }
}

impl LocalStream {
    /// Starts the tasks that copy bytes between the router and one end of a pair of pipes. The
    /// tasks report to `events`.
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

    /// Passes bytes to the reader. Never blocks.
    pub(crate) fn deliver(&self, bytes: Vec<u8>) {
        if let Some(delivered) = &self.delivered {
            // An error means that the reader has gone.
            _ = delivered.try_send(bytes);
        }
    }

    /// Ends the stream for the reader, after the bytes that were passed to it.
    pub(crate) fn end_reading(&mut self) {
        self.delivered = None;
    }

    /// Permits the writer to write `count` more bytes.
    pub(crate) fn add_space(&self, count: usize) {
        self.space.add_permits(count);
    }

    /// Makes further writes fail, because the stream has ended.
    pub(crate) fn end_writing(&self) {
        self.space.close();
    }
}

/// Reads the bytes of the writer, as far as the stream has space, and passes them to the router.
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

/// Writes the bytes of a stream to its reader. Bytes for a reader that has gone count as taken.
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
