//! The two asynchronous tasks of a control connection: one moves received messages into a channel,
//! and the other sends the messages of a queue. One reads frames into a bounded channel. The other
//! writes the messages of another bounded channel.
use super::frame::{self, FrameError};
use serde::{Serialize, de::DeserializeOwned};
use std::collections::VecDeque;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader},
    sync::mpsc,
};

/// The largest number of messages that may wait to be sent in the send queue of a control
/// connection. A message that does not fit is dropped or, if it is critical, kept in the overflow
/// buffer of the [`Outbox`].
const QUEUE_CAPACITY: usize = 4096;
/// The number of entries in the send queue of a control connection that must stay free when a
/// message of low priority is queued. Messages of low priority are dropped if no further place is
/// free.
const PLACES_RESERVED_ABOVE_LOW: usize = 3072;
/// The number of entries in the send queue of a control connection that are reserved for messages
/// of critical priority. Messages of [`MessagePriority::Normal`] are dropped if no further place is
/// free.
const PLACES_RESERVED_FOR_CRITICAL: usize = 512;
/// The largest number of critical messages that a sender keeps in its overflow buffer while the
/// send queue of the control connection is full. If queue and buffer are full, critical messages
/// are dropped, too.
const OVERFLOW_CAPACITY: usize = 4096;
/// The number of bytes of encoded messages that a control connection collects before it writes them
/// to the stream with one call. A full batch is written before waiting messages are encoded.
pub(super) const BATCH_BYTES: usize = 64 << 10;

/// The sending end of a channel that collects the received messages of several connections, in
/// which each message has the ID of its connection.
///
/// The last message of a connection is `Ok(None)` if the stream ended, or an error.
pub(crate) type InboxSender<K, T> = mpsc::Sender<(K, Result<Option<T>, FrameError>)>;

/// Receives the messages of one control connection and puts each into the channel `inbox`, together
/// with the connection's id `sender`. Waits while the inbox is full.
pub(crate) async fn read_frames<K, R, T>(sender: K, stream: R, inbox: InboxSender<K, T>)
where
    K: Clone,
    R: AsyncRead + Unpin,
    T: DeserializeOwned,
{
    // Many small frames take one system call.
    let mut stream = BufReader::new(stream);
    loop {
        let message = frame::read_frame(&mut stream).await;
        let is_last = !matches!(message, Ok(Some(_)));
        if inbox.send((sender.clone(), message)).await.is_err() || is_last {
            return;
        }
    }
}

/// Writes the messages in the queue of a control connection to the stream of the connection, until
/// the queue is closed or the stream fails. Collects small messages and writes them with one system
/// call. Drops messages that are too long for a frame.
///
/// Ends when the queue is closed and empty, or when the stream fails. The failure is not returned,
/// because the task that reads from the connection reports it.
pub(crate) async fn write_frames<W, T>(mut stream: W, mut queue: mpsc::Receiver<T>)
where
    W: AsyncWrite + Unpin,
    T: Serialize,
{
    while let Some(first) = queue.recv().await {
        let mut bytes = Vec::new();
        let mut next = Some(first);
        while let Some(message) = next {
            // Only a message over the size limit fails to encode. It is dropped, and the
            // connection stays usable.
            bytes.extend(frame::encode_frame(&message).unwrap_or_default());
            next = if bytes.len() < BATCH_BYTES { queue.try_recv().ok() } else { None };
        }
        if stream.write_all(&bytes).await.is_err() || stream.flush().await.is_err() {
            return;
        }
    }
}

/// The priority of a message to send, which decides how full the send queue of the connection may
/// be before the message is dropped. Messages of low priority are dropped first when the other side
/// does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessagePriority {
    /// Output lines, heartbeats and progress, which are dropped first.
    Low,
    /// Events, which are dropped when so many messages wait that the rest of the queue is reserved
    /// for critical messages.
    Normal,
    /// Exits, failures and orders, which are kept until [`OVERFLOW_CAPACITY`] of them wait.
    Critical,
}

/// The sending side of a control connection, which queues messages or drops them but never blocks
/// the sender. It consists of a queue of messages, which [`write_frames`] empties, and an overflow
/// buffer for critical messages that do not fit into the queue.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    queue: mpsc::Sender<T>,
    overflow: VecDeque<T>,
}

impl<T> Clone for Outbox<T> {
    /// Returns another sender for the send queue of this control connection, with a separate
    /// overflow buffer that is empty.
    fn clone(&self) -> Self {
        Outbox { queue: self.queue.clone(), overflow: VecDeque::new() }
    }
}

impl<T> Outbox<T> {
    /// Creates the send queue of a control connection, and returns both ends: one for senders and
    /// one for [`write_frames`].
    pub(crate) fn channel() -> (Self, mpsc::Receiver<T>) {
        let (queue, receiver) = mpsc::channel(QUEUE_CAPACITY);
        (Outbox { queue, overflow: VecDeque::new() }, receiver)
    }

    /// Queues a message for sending on the control connection, or drops the message if the queue is
    /// too full for its priority. Keeps a critical message in the overflow buffer while the queue
    /// is full. Returns `false` if the message was dropped, because the queue (and for a critical
    /// message the overflow buffer) is too full for its priority, or because the connection has
    /// ended. Never blocks.
    pub(crate) fn send_message(&mut self, priority: MessagePriority, message: T) -> bool {
        self.flush_overflow();
        let reserved = match priority {
            MessagePriority::Low => PLACES_RESERVED_ABOVE_LOW,
            MessagePriority::Normal => PLACES_RESERVED_FOR_CRITICAL,
            MessagePriority::Critical => 0,
        };
        if self.overflow.is_empty() && self.queue.capacity() > reserved {
            return self.queue.try_send(message).is_ok();
        }
        let fits = priority == MessagePriority::Critical && self.overflow.len() < OVERFLOW_CAPACITY;
        if fits {
            self.overflow.push_back(message);
        }
        fits
    }

    /// Returns whether a report of the agent fits into the send queue without taking the entries
    /// that are reserved for critical messages.
    pub(crate) fn has_space_for_report(&self) -> bool {
        self.overflow.is_empty() && self.queue.capacity() > PLACES_RESERVED_FOR_CRITICAL
    }

    /// Waits until the send queue of the connection has space for a report, beyond the entries
    /// reserved for critical messages, or the connection ends. Cancel-safe.
    pub(crate) async fn wait_for_space_for_report(&self) {
        // The permits are returned at once; only the wait matters.
        _ = self.queue.reserve_many(PLACES_RESERVED_FOR_CRITICAL + 1).await;
    }

    /// Returns whether critical messages wait in the overflow buffer because the queue of the
    /// connection is full.
    pub(crate) fn has_overflow(&self) -> bool {
        !self.overflow.is_empty()
    }

    /// Moves critical messages from the overflow buffer into the queue of the connection until the
    /// queue is full. Never blocks.
    pub(crate) fn flush_overflow(&mut self) {
        while !self.overflow.is_empty() {
            let Ok(slot) = self.queue.try_reserve() else { return };
            if let Some(message) = self.overflow.pop_front() {
                slot.send(message);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::control::FromAgent;

    /// Builds a message with the output line `x` of rank 0.
    fn build_line() -> FromAgent {
        FromAgent::Line { rank: 0, stderr: false, text: "x".into() }
    }

    #[test]
    fn when_the_other_side_stops_reading_low_priority_is_dropped_first_and_critical_never() {
        let (mut outbox, mut receiver) = Outbox::channel();
        let low = (0..2 * QUEUE_CAPACITY)
            .filter(|_| outbox.send_message(MessagePriority::Low, build_line()))
            .count();
        assert_eq!(low, QUEUE_CAPACITY - PLACES_RESERVED_ABOVE_LOW);
        let normal = (0..2 * QUEUE_CAPACITY)
            .filter(|_| outbox.send_message(MessagePriority::Normal, FromAgent::Heartbeat))
            .count();
        assert_eq!(normal, PLACES_RESERVED_ABOVE_LOW - PLACES_RESERVED_FOR_CRITICAL);
        for pid in 0..(PLACES_RESERVED_FOR_CRITICAL + 100) as u32 {
            assert!(
                outbox
                    .send_message(MessagePriority::Critical, FromAgent::Started { attempt: 0, rank: 0, pid })
            );
        }
        assert!(
            !outbox.send_message(MessagePriority::Low, build_line()),
            "no message overtakes a critical one"
        );
        let mut pids = Vec::new();
        while let Ok(message) = receiver.try_recv() {
            outbox.flush_overflow();
            if let FromAgent::Started { pid, .. } = message {
                pids.push(pid);
            }
        }
        assert_eq!(pids, (0..(PLACES_RESERVED_FOR_CRITICAL + 100) as u32).collect::<Vec<_>>());
    }

    #[test]
    fn messages_arrive_in_order_and_the_end_of_the_stream_is_reported() {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let (near, far) = tokio::io::duplex(37);
            let (mut outbox, receiver) = Outbox::channel();
            let (inbox, mut arrived) = mpsc::channel(1);
            for pid in 0..500 {
                outbox
                    .send_message(MessagePriority::Critical, FromAgent::Started { attempt: 0, rank: 1, pid });
            }
            drop(outbox);
            let writer = tokio::spawn(write_frames(near, receiver));
            let reader = tokio::spawn(read_frames("host", far, inbox));
            for pid in 0..500 {
                let (sender, message) = arrived.recv().await.unwrap();
                assert_eq!(sender, "host");
                assert_eq!(message.unwrap(), Some(FromAgent::Started { attempt: 0, rank: 1, pid }));
            }
            assert!(matches!(arrived.recv().await, Some((_, Ok(None)))));
            assert!(arrived.recv().await.is_none());
            writer.await.unwrap();
            reader.await.unwrap();
        });
    }
}
