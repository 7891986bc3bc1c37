//! [`ResumableStream`]: one end of a byte stream between agent and controller, which resends
//! unacknowledged bytes after a connection on its path has broken.
//!
//! Each end keeps the bytes that the other end has not acknowledged, at most [`WINDOW_BYTES`].
//! After a change of the way through the tree, both ends exchange how much they have received, and
//! send the rest again. Bytes that arrive twice are dropped, and so are bytes after a gap, which
//! are sent again. The end of a direction counts as one byte after the last one.
use super::frame::{StreamBytes, StreamId, StreamProgress, TreeFrame};
use std::collections::VecDeque;

/// The largest number of unacknowledged bytes that one end of an agent's control connection may
/// have sent or buffered.
pub(super) const WINDOW_BYTES: usize = 128 << 10;
/// The largest number of bytes of an agent's control connection that one message in the tree of
/// agents carries.
pub(super) const MAX_DATA_BYTES: usize = 32 << 10;
/// The number of bytes that this process reads from a stream between two acknowledgements to the
/// other end of the stream.
const BYTES_PER_ACK: u64 = WINDOW_BYTES as u64 / 4;

/// One end of an agent's control connection, which keeps unacknowledged bytes and can resend them
/// over another path in the tree of agents.
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

/// The result of processing a received message of a control connection: new bytes, the end of the
/// data, nothing new, or a protocol violation.
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
    /// Returns how many bytes may be written to this end before the limit on unacknowledged bytes
    /// is reached.
    pub(super) fn count_writable_bytes(&self) -> usize {
        WINDOW_BYTES.saturating_sub(self.unacknowledged.len())
    }

    /// Appends bytes to the buffer of data that this end still has to send to the other end of the
    /// control connection. The caller observes the space.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.count_writable_bytes(), "the writer observes the space");
        self.unacknowledged.extend(bytes);
    }

    /// Records that this end sends no data after the bytes that were written so far.
    pub(super) fn finish_writing(&mut self) {
        self.is_finished = true;
    }

    /// Returns the total number of bytes that were written to this end so far, including bytes that
    /// are not sent yet.
    fn written_end_offset(&self) -> u64 {
        self.base + self.unacknowledged.len() as u64
    }

    /// Returns whether the other end of the control connection has acknowledged all bytes and the
    /// end of the data.
    pub(super) fn is_delivered(&self) -> bool {
        self.is_end_acknowledged
    }

    /// Returns the next message to send to the other end, or `None` if nothing is left to send or
    /// the other end is unreachable.
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

    /// Removes the bytes that the other end has acknowledged, up to the offset `acknowledged`, from
    /// the send buffer, and returns their number. Ignores acknowledgements of bytes that do not
    /// exist.
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

    /// Resumes sending over a new path through the tree of agents, from the position up to which
    /// the other end has received the stream. Returns the number of bytes for which the stream has
    /// space again.
    pub(super) fn resume_sending(&mut self, progress: StreamProgress) -> usize {
        let freed = self.handle_acknowledgement(progress.acknowledged);
        let last = self.written_end_offset() + u64::from(self.is_finished);
        self.next = progress.received.min(last).max(self.base);
        self.is_synchronized = true;
        freed
    }

    /// Returns up to which offsets this end has received and read the stream, from which the other
    /// end resumes sending on a new path.
    pub(super) fn build_progress_report(&mut self) -> StreamProgress {
        self.reported = self.acknowledgeable_offset();
        StreamProgress { received: self.received, acknowledged: self.reported }
    }

    /// Returns the number of received bytes of the stream that this end may acknowledge because
    /// this process has read them. These are the bytes that the reader has taken, and the end of
    /// the direction if it has arrived.
    fn acknowledgeable_offset(&self) -> u64 {
        if self.has_received_end { self.received } else { self.consumed }
    }

    /// Returns the part of received bytes, which begin at `offset` of the stream, that has not
    /// arrived before.
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

    /// Records that the other end sends no bytes after the first `offset` bytes, unless bytes
    /// before this end are still missing.
    pub(super) fn accept_received_end(&mut self, offset: u64) -> ReceivedData {
        if self.has_received_end || offset != self.received {
            return ReceivedData::Nothing;
        }
        self.has_received_end = true;
        self.received += 1;
        ReceivedData::End
    }

    /// Records that this process has read `count` more of the bytes that have arrived on the
    /// stream. Returns whether an acknowledgement is due.
    pub(super) fn record_consumed_bytes(&mut self, count: u64) -> bool {
        self.consumed += count;
        self.consumed.saturating_sub(self.reported) >= BYTES_PER_ACK
    }

    /// Builds the message that informs the other end of the stream how many of its bytes this
    /// process has read.
    pub(super) fn build_acknowledgement(&mut self, stream: StreamId) -> TreeFrame {
        self.reported = self.acknowledgeable_offset();
        TreeFrame::Ack { stream, acknowledged: self.reported }
    }
}
