//! [`ResumableStream`]: one end of a stream that survives the end of the links that carry it.
//!
//! Each end keeps the bytes that the other end has not acknowledged, at most [`WINDOW_BYTES`].
//! After a change of the way through the tree, both ends exchange how much they have received, and
//! send the rest again. Bytes that arrive twice are dropped, and so are bytes after a gap, which
//! are sent again. The end of a direction counts as one byte after the last one.
use super::frame::{StreamBytes, StreamId, StreamProgress, TreeFrame};
use std::collections::VecDeque;

/// The largest number of unacknowledged bytes in one direction of a stream.
pub(super) const WINDOW_BYTES: usize = 128 << 10;
/// The largest number of bytes of a stream in one frame.
pub(super) const MAX_DATA_BYTES: usize = 32 << 10;
/// The number of consumed bytes after which an acknowledgement is sent.
const BYTES_PER_ACK: u64 = WINDOW_BYTES as u64 / 4;

/// One end of a stream whose connection can be replaced without losing bytes.
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

/// The bytes or the end that a received frame adds to a stream.
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
    /// Returns the number of bytes that may be written before the other end acknowledges some.
    pub(super) fn count_writable_bytes(&self) -> usize {
        WINDOW_BYTES.saturating_sub(self.unacknowledged.len())
    }

    /// Appends bytes to the data that are sent to the other end. The caller observes the space.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.count_writable_bytes(), "the writer observes the space");
        self.unacknowledged.extend(bytes);
    }

    /// Ends the data that are sent to the other end.
    pub(super) fn finish_writing(&mut self) {
        self.is_finished = true;
    }

    /// Returns the offset behind the last byte that was written for the other end.
    fn written_end_offset(&self) -> u64 {
        self.base + self.unacknowledged.len() as u64
    }

    /// Returns whether the other end has acknowledged all data and their end.
    pub(super) fn is_delivered(&self) -> bool {
        self.is_end_acknowledged
    }

    /// Returns the next frame to send, or `None` if everything is sent or the stream has no
    /// connection to the other end.
    pub(super) fn take_frame(&mut self, stream: StreamId) -> Option<TreeFrame> {
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

    /// Frees the bytes that the other end has acknowledged, and returns their number. The other end
    /// needs nothing before `acknowledged` again. Ignores acknowledgements of bytes that do not
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

    /// Resumes sending over a new connection, after the bytes that the other end has received.
    /// Returns the number of bytes for which the stream has space again.
    pub(super) fn resume_sending(&mut self, progress: StreamProgress) -> usize {
        let freed = self.handle_acknowledgement(progress.acknowledged);
        let last = self.written_end_offset() + u64::from(self.is_finished);
        self.next = progress.received.min(last).max(self.base);
        self.is_synchronized = true;
        freed
    }

    /// Returns the number of bytes that this end has received, from which the other end resumes
    /// sending.
    pub(super) fn report_progress(&mut self) -> StreamProgress {
        self.reported = self.acknowledgeable_offset();
        StreamProgress { received: self.received, acknowledged: self.reported }
    }

    /// Returns the offset up to which this end may acknowledge received bytes. These are the bytes
    /// that the reader has taken, and the end of the direction if it has arrived.
    fn acknowledgeable_offset(&self) -> u64 {
        if self.has_received_end { self.received } else { self.consumed }
    }

    /// Processes received bytes that begin at `offset`.
    pub(super) fn receive_bytes(&mut self, offset: u64, bytes: Vec<u8>) -> ReceivedData {
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

    /// Processes the end of the received direction, which has `offset` bytes.
    pub(super) fn receive_end(&mut self, offset: u64) -> ReceivedData {
        if self.has_received_end || offset != self.received {
            return ReceivedData::Nothing;
        }
        self.has_received_end = true;
        self.received += 1;
        ReceivedData::End
    }

    /// Records that the reader has taken this number of bytes. Returns whether an acknowledgement
    /// is due.
    pub(super) fn record_consumed_bytes(&mut self, count: u64) -> bool {
        self.consumed += count;
        self.consumed.saturating_sub(self.reported) >= BYTES_PER_ACK
    }

    /// Builds the acknowledgement of all bytes that the reader has taken.
    pub(super) fn build_acknowledgement(&mut self, stream: StreamId) -> TreeFrame {
        self.reported = self.acknowledgeable_offset();
        TreeFrame::Ack { stream, acknowledged: self.reported }
    }
}
