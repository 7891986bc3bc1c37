//! Frames of the control connections between ranks: heartbeats, aborts and farewells.
//!
//! A frame is a kind (u8), a length (u16, little-endian, at most [`MAX_REASON_BYTES`]) and that
//! many bytes.
use crate::AbortReason;

/// The largest size of an encoded abort reason in a control frame, in bytes. A longer text is cut.
const MAX_REASON_BYTES: usize = 1024;
/// Size in bytes of the fields at the start of a control frame: its kind and the length of its
/// body.
const HEADER_BYTES: usize = 3;
/// The size of the longest control frame in bytes.
pub(super) const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_REASON_BYTES;
/// The kind number of a heartbeat, a frame without a body that shows that the sending rank is
/// alive.
const HEARTBEAT_KIND: u8 = 1;
/// The kind number of an abort, a frame whose body is an encoded abort reason.
const ABORT_KIND: u8 = 2;
/// The kind number of a farewell, a frame that a rank sends before it leaves its group cleanly.
const FAREWELL_KIND: u8 = 3;

/// A message on the control connection between two ranks: a heartbeat, an abort, or the farewell of
/// a rank that leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlFrame {
    /// The sending rank is alive.
    Heartbeat,
    /// The sending rank has aborted the group.
    Abort(AbortReason),
    /// The sending rank leaves its group cleanly.
    Farewell,
    /// A frame of this kind, which only later versions send. It is ignored.
    Unknown(u8),
}

/// Result of parsing bytes from a peer as a control frame: a complete frame, too few bytes, or an
/// invalid frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FrameParse {
    /// A frame, and the number of its bytes.
    Complete(ControlFrame, usize),
    /// Further bytes of the frame must arrive.
    Incomplete,
    /// The frame is longer than any valid frame.
    Invalid,
}

impl ControlFrame {
    /// Encodes this control frame (heartbeat, abort or farewell) as the bytes that are sent to a
    /// peer.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, body) = match self {
            ControlFrame::Heartbeat => (HEARTBEAT_KIND, Vec::new()),
            ControlFrame::Unknown(kind) => (*kind, Vec::new()),
            ControlFrame::Abort(reason) => (ABORT_KIND, reason.encode(MAX_REASON_BYTES)),
            ControlFrame::Farewell => (FAREWELL_KIND, Vec::new()),
        };
        let mut frame = vec![kind];
        frame.extend_from_slice(&(body.len() as u16).to_le_bytes());
        frame.extend_from_slice(&body);
        frame
    }

    /// Parses the control frame at the start of `bytes`, which a peer has sent.
    pub(super) fn parse(bytes: &[u8]) -> FrameParse {
        let Some(([kind, low, high], rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return FrameParse::Incomplete;
        };
        let length = usize::from(u16::from_le_bytes([*low, *high]));
        if length > MAX_REASON_BYTES {
            return FrameParse::Invalid;
        }
        let Some(body) = rest.get(..length) else { return FrameParse::Incomplete };
        let frame = match *kind {
            HEARTBEAT_KIND => ControlFrame::Heartbeat,
            ABORT_KIND => ControlFrame::Abort(AbortReason::decode(body)),
            FAREWELL_KIND => ControlFrame::Farewell,
            kind => ControlFrame::Unknown(kind),
        };
        FrameParse::Complete(frame, HEADER_BYTES + length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_incomplete_ones_need_more_bytes() {
        let abort = ControlFrame::Abort(AbortReason::from_request("disk full"));
        for frame in [ControlFrame::Heartbeat, abort, ControlFrame::Farewell] {
            let mut bytes = frame.encode();
            let length = bytes.len();
            assert!(length <= MAX_FRAME_BYTES);
            for cut in 0..length {
                assert_eq!(ControlFrame::parse(&bytes[..cut]), FrameParse::Incomplete, "{cut} of {length}");
            }
            bytes.push(9);
            assert_eq!(ControlFrame::parse(&bytes), FrameParse::Complete(frame, length));
        }
    }

    #[test]
    fn long_frames_are_invalid_and_unknown_kinds_are_skipped() {
        assert_eq!(ControlFrame::parse(&[ABORT_KIND, 1, 4]), FrameParse::Invalid);
        assert_eq!(ControlFrame::parse(&[ABORT_KIND, 0xff, 0xff]), FrameParse::Invalid);
        let unknown = [200, 2, 0, 1, 1, 7];
        assert_eq!(ControlFrame::parse(&unknown), FrameParse::Complete(ControlFrame::Unknown(200), 5));
    }
}
