//! The two tasks of a connection: what arrives goes into a bounded channel, what is to be sent comes out of one.
use super::frame::{self, LinkError};
use serde::{Serialize, de::DeserializeOwned};
use std::collections::VecDeque;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
};

/// Messages waiting to be sent on one connection.
const OUTBOX: usize = 4096;
/// Slots kept free of [`Priority::Chatter`].
const FOR_NEWS: usize = 3072;
/// Slots kept free of [`Priority::News`].
const FOR_MUST: usize = 512;
/// Messages that must not be lost, held aside while the other side does not read.
const OVERFLOW: usize = 4096;
/// Bytes gathered into one write.
const BATCH: usize = 64 << 10;

/// Where a connection's messages arrive, with who sent them; `Err` and `Ok(None)` are the last.
pub(crate) type Inbox<K, T> = mpsc::Sender<(K, Result<Option<T>, LinkError>)>;

/// Reads frames into `inbox` until the stream ends or breaks; waits while the inbox is full.
pub(crate) async fn read_into<K, R, T>(who: K, mut stream: R, inbox: Inbox<K, T>)
where
    K: Clone,
    R: AsyncRead + Unpin,
    T: DeserializeOwned,
{
    loop {
        let message = frame::read(&mut stream).await;
        let last = !matches!(message, Ok(Some(_)));
        if inbox.send((who.clone(), message)).await.is_err() || last {
            return;
        }
    }
}

/// Writes what comes out of `outbox`, many small messages as one write; ends when the outbox is closed and empty, or
/// the stream breaks (whoever reads the other direction learns that).
pub(crate) async fn write_from<W, T>(mut stream: W, mut outbox: mpsc::Receiver<T>)
where
    W: AsyncWrite + Unpin,
    T: Serialize,
{
    while let Some(first) = outbox.recv().await {
        let mut bytes = Vec::new();
        let mut next = Some(first);
        while let Some(message) = next {
            // Only an enormous message fails to encode; what it would have said is lost, the connection is not.
            bytes.extend(frame::encode(&message).unwrap_or_default());
            next = if bytes.len() < BATCH { outbox.try_recv().ok() } else { None };
        }
        if stream.write_all(&bytes).await.is_err() || stream.flush().await.is_err() {
            return;
        }
    }
}

/// What may be lost when the other side does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Lines, beats, progress: dropped first.
    Chatter,
    /// Events: dropped when the other side has not read for long.
    News,
    /// Exits, failures, orders: never dropped while memory for [`OVERFLOW`] of them holds.
    Must,
}

/// The sending end of a connection. Never waits.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    queue: mpsc::Sender<T>,
    overflow: VecDeque<T>,
}

impl<T> Clone for Outbox<T> {
    /// Another sender to the same connection, with an overflow of its own.
    fn clone(&self) -> Self {
        Outbox { queue: self.queue.clone(), overflow: VecDeque::new() }
    }
}

impl<T> Outbox<T> {
    /// An outbox, and what [`write_from`] takes.
    pub(crate) fn new() -> (Self, mpsc::Receiver<T>) {
        let (queue, receiver) = mpsc::channel(OUTBOX);
        (Outbox { queue, overflow: VecDeque::new() }, receiver)
    }

    /// Queues a message; `false`: it was dropped, for want of room or because the connection is gone.
    pub(crate) fn send(&mut self, priority: Priority, message: T) -> bool {
        self.flush();
        let reserve = match priority {
            Priority::Chatter => FOR_NEWS,
            Priority::News => FOR_MUST,
            Priority::Must => 0,
        };
        if self.overflow.is_empty() && self.queue.capacity() > reserve {
            return self.queue.try_send(message).is_ok();
        }
        let keep = priority == Priority::Must && self.overflow.len() < OVERFLOW;
        if keep {
            self.overflow.push_back(message);
        }
        keep
    }

    /// Are messages held back?
    pub(crate) fn is_behind(&self) -> bool {
        !self.overflow.is_empty()
    }

    /// Moves held messages into the queue as far as there is room.
    pub(crate) fn flush(&mut self) {
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
    use contract::control::FromAgent;

    fn line() -> FromAgent {
        FromAgent::Line { rank: 0, stderr: false, text: "x".into() }
    }

    #[test]
    fn a_reader_that_stopped_costs_chatter_first_and_musts_never() {
        let (mut outbox, mut receiver) = Outbox::new();
        let chatter = (0..2 * OUTBOX).filter(|_| outbox.send(Priority::Chatter, line())).count();
        assert_eq!(chatter, OUTBOX - FOR_NEWS);
        let news = (0..2 * OUTBOX).filter(|_| outbox.send(Priority::News, FromAgent::Heartbeat)).count();
        assert_eq!(news, FOR_NEWS - FOR_MUST);
        for pid in 0..(FOR_MUST + 100) as u32 {
            assert!(outbox.send(Priority::Must, FromAgent::Started { epoch: 0, rank: 0, pid }));
        }
        assert!(!outbox.send(Priority::Chatter, line()), "nothing overtakes what must arrive");
        let mut pids = Vec::new();
        while let Ok(message) = receiver.try_recv() {
            outbox.flush();
            if let FromAgent::Started { pid, .. } = message {
                pids.push(pid);
            }
        }
        assert_eq!(pids, (0..(FOR_MUST + 100) as u32).collect::<Vec<_>>());
    }

    #[test]
    fn a_connection_carries_messages_in_order_and_ends() {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let (near, far) = tokio::io::duplex(37);
            let (mut outbox, receiver) = Outbox::new();
            let (inbox, mut arrived) = mpsc::channel(1);
            for pid in 0..500 {
                outbox.send(Priority::Must, FromAgent::Started { epoch: 0, rank: 1, pid });
            }
            drop(outbox);
            let writer = tokio::spawn(write_from(near, receiver));
            let reader = tokio::spawn(read_into("node", far, inbox));
            for pid in 0..500 {
                let (who, message) = arrived.recv().await.unwrap();
                assert_eq!(who, "node");
                assert_eq!(message.unwrap(), Some(FromAgent::Started { epoch: 0, rank: 1, pid }));
            }
            assert!(matches!(arrived.recv().await, Some((_, Ok(None)))));
            assert!(arrived.recv().await.is_none());
            writer.await.unwrap();
            reader.await.unwrap();
        });
    }
}
