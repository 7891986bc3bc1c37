//! [`ResumableStream`]: one end of an agent's control connection through the tree of agents, which
//! loses no bytes when a connection between two neighbours of the tree breaks.
//!
//! Each end keeps the bytes that the other end has not acknowledged, at most [`WINDOW_BYTES`].
//! After a change of the way through the tree, both ends exchange how much they have received, and
//! send the rest again. Bytes that arrive twice are dropped, and so are bytes after a gap, which
//! are sent again. The end of a direction counts as one byte after the last one.
use super::frame::{StreamBytes, StreamId, StreamProgress, TreeFrame};
use std::collections::VecDeque;

/// The largest number of bytes that one end of a stream through the tree may send before the other
/// end acknowledges some of them.
pub(super) const WINDOW_BYTES: usize = 128 << 10;
/// The largest number of bytes of a stream that one frame (message between neighbours of the tree)
/// carries.
pub(super) const MAX_DATA_BYTES: usize = 32 << 10;
/// The number of bytes that the local reader consumes before the stream sends an acknowledgement to
/// the other end.
const BYTES_PER_ACK: u64 = WINDOW_BYTES as u64 / 4;

/// One end of a byte stream between controller and agent, which can resend unacknowledged bytes on
/// another path through the tree.
#[derive(Debug, Default)]
pub(super) struct ResumableStream {
    /// The bytes that the other end has not acknowledged.
    unacknowledged: VecDeque<u8>,
    /// The offset of the first byte in `unacknowledged`.
    base: u64,
    /// The offset of the next byte to send on the present way.
    next: u64,
    /// Whether no byte follows those in `unacknowledged`.
    is_finished: bool,
    /// Whether the other end has acknowledged the end of the direction.
    is_end_acknowledged: bool,
    /// The number of bytes that were received, and the end of the direction.
    received: u64,
    /// Whether the end of the received direction has arrived.
    has_received_end: bool,
    /// The number of received bytes that the reader has taken.
    consumed: u64,
    /// What the last acknowledgement contained.
    reported: u64,
    /// Whether frames may be sent on the present way.
    pub(super) is_synchronized: bool,
}

/// The effect of a received message on a stream: new bytes, the end of the data, nothing, or a
/// protocol violation.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReceivedData {
    /// These bytes follow the earlier ones.
    Bytes(Vec<u8>),
    /// No byte follows.
    End,
    /// Nothing: the frame repeats bytes, or frames before it are missing.
    Nothing,
    /// The other end has sent more than it may.
    Violation,
}

impl ResumableStream {
    /// Returns the number of bytes that may be written to the stream before the other end
    /// acknowledges some.
    pub(super) fn count_writable_bytes(&self) -> usize {
        WINDOW_BYTES.saturating_sub(self.unacknowledged.len())
    }

    /// Appends bytes to the data that are to be sent to the other end of the stream. The caller
    /// observes the space.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.count_writable_bytes(), "the writer observes the space");
        self.unacknowledged.extend(bytes);
    }

    /// Marks the end of the data that are to be sent to the other end of the stream.
    pub(super) fn finish_writing(&mut self) {
        self.is_finished = true;
    }

    /// Returns the number of bytes that were written to the stream so far, whether or not they were
    /// already sent.
    fn written_end_offset(&self) -> u64 {
        self.base + self.unacknowledged.len() as u64
    }

    /// Returns whether the other end of the stream has acknowledged all data and their end.
    pub(super) fn is_delivered(&self) -> bool {
        self.is_end_acknowledged
    }

    /// Returns the next message (frame) to send to the other end of the stream, or `None` if
    /// everything is sent or the other end cannot be reached at the moment.
    pub(super) fn take_next_frame(&mut self, stream: StreamId) -> Option<TreeFrame> {
        if !self.is_synchronized {
            return None;
        }
        let (offset, end) = (self.next, self.written_end_offset());
        if offset < end {
            let start = (offset - self.base) as usize;
            let count = (self.unacknowledged.len() - start).min(MAX_DATA_BYTES);
            let bytes = StreamBytes(self.unacknowledged.range(start..start + count).copied().collect());
            self.next += count as u64;
            return Some(TreeFrame::Data { stream, offset, bytes });
        }
        (self.is_finished && offset == end).then(|| {
            self.next += 1;
            TreeFrame::Fin { stream, offset }
        })
    }

    /// Frees the sent bytes up to the offset `acknowledged`, which the other end has acknowledged,
    /// and returns the number of freed bytes. Ignores acknowledgements of bytes that do not exist.
    pub(super) fn handle_acknowledgement(&mut self, acknowledged: u64) -> usize {
        let end = self.written_end_offset();
        if acknowledged < self.base || acknowledged > end + u64::from(self.is_finished) {
            return 0;
        }
        self.is_end_acknowledged |= acknowledged > end;
        let count = (acknowledged.min(end) - self.base) as usize;
        self.unacknowledged.drain(..count);
        self.base += count as u64;
        self.next = self.next.max(self.base);
        count
    }

    /// Continues sending over a new path through the tree, from the first byte that the other end
    /// has not received (`progress`). Returns the number of bytes for which the stream has space
    /// again.
    pub(super) fn resume_sending(&mut self, progress: StreamProgress) -> usize {
        let freed = self.handle_acknowledgement(progress.acknowledged);
        let last = self.written_end_offset() + u64::from(self.is_finished);
        self.next = progress.received.min(last).max(self.base);
        self.is_synchronized = true;
        freed
    }

    /// Returns how many bytes of the stream this end has received and its reader has consumed, so
    /// that the other end can resume sending.
    pub(super) fn build_progress_report(&mut self) -> StreamProgress {
        self.reported = self.acknowledgeable_offset();
        StreamProgress { received: self.received, acknowledged: self.reported }
    }

    /// Returns the offset in the received data up to which this end may send an acknowledgement.
    /// These are the bytes that the reader has taken, and the end of the direction if it has
    /// arrived.
    fn acknowledgeable_offset(&self) -> u64 {
        if self.has_received_end { self.received } else { self.consumed }
    }

    /// Checks received bytes, which begin at `offset` of the stream, and returns those that were
    /// not received before.
    pub(super) fn accept_received_bytes(&mut self, offset: u64, bytes: Vec<u8>) -> ReceivedData {
        if bytes.len() > MAX_DATA_BYTES {
            return ReceivedData::Violation;
        }
        let end = offset.saturating_add(bytes.len() as u64);
        if self.has_received_end || offset > self.received || end <= self.received {
            return ReceivedData::Nothing;
        }
        if end - self.consumed > WINDOW_BYTES as u64 {
            return ReceivedData::Violation;
        }
        let known = (self.received - offset) as usize;
        self.received = end;
        ReceivedData::Bytes(if known == 0 { bytes } else { bytes[known..].to_vec() })
    }

    /// Handles the end marker of the other end's data, which states that the data consist of the
    /// first `offset` bytes.
    pub(super) fn accept_received_end(&mut self, offset: u64) -> ReceivedData {
        if self.has_received_end || offset != self.received {
            return ReceivedData::Nothing;
        }
        self.has_received_end = true;
        self.received += 1;
        ReceivedData::End
    }

    /// Records that the reader of the stream has taken `count` received bytes. Returns whether an
    /// acknowledgement is due.
    pub(super) fn record_consumed_bytes(&mut self, count: u64) -> bool {
        self.consumed += count;
        self.consumed.saturating_sub(self.reported) >= BYTES_PER_ACK
    }

    /// Builds the message that acknowledges all bytes that the reader of the stream has taken.
    pub(super) fn build_acknowledgement(&mut self, stream: StreamId) -> TreeFrame {
        self.reported = self.acknowledgeable_offset();
        TreeFrame::Ack { stream, acknowledged: self.reported }
    }
}
