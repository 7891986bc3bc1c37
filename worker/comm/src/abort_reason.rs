//! [`AbortReason`]: why a group of ranks was aborted, and how this reason is encoded for
//! transmission to every rank.
//!
//! An abort is shared through the header of a shared memory segment and in frames between hosts.
//! Both carry the bytes of [`AbortReason::encode`]: kind (u8), rank (u32), observer (u32),
//! milliseconds (u64), all little-endian, then text in UTF-8.
use diagnostic::{Code, Diagnostic, codes::collective as codes, quantity::format_seconds};
use std::time::Duration;

/// Size in bytes of the fixed-size fields at the start of an encoded abort reason (why a group of
/// ranks was aborted), before the text.
pub(crate) const FIXED_FIELDS_BYTES: usize = 1 + 4 + 4 + 8;

/// Why a group of ranks was aborted, such as a lost peer or a failed rank. Every rank receives the
/// first reason that was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AbortReason {
    /// [`Comm::abort`](crate::Comm::abort) was called, here or by a peer.
    #[error("{reason}")]
    Requested {
        /// The text that the caller of `abort` gave.
        reason: String,
    },
    /// A rank failed with an error, in a collective or while it joined the group.
    #[error("{message}")]
    RankFailed {
        /// The rank that failed.
        rank: usize,
        /// The message of the failed rank's error.
        message: String,
    },
    /// The connection to a rank ended without a farewell message, because the process or the host
    /// of that rank ended.
    #[error("rank {rank} is gone: its connection ended without a farewell")]
    PeerLost {
        /// The rank whose process or host ended.
        rank: usize,
    },
    /// A peer received nothing from a rank for longer than the silence timeout.
    #[error("rank {rank} is silent: rank {observer} has heard nothing from it for {}", format_seconds(*silence))]
    PeerSilent {
        /// The silent rank.
        rank: usize,
        /// The rank that received nothing from the silent rank.
        observer: usize,
        /// The silence timeout that expired.
        silence: Duration,
    },
    /// A rank left the group cleanly while a peer still needed it.
    #[error("rank {rank} left the group before {collective}")]
    PeerLeft {
        /// The rank that left.
        rank: usize,
        /// The collective in which a peer needed the departed rank, such as `all_reduce (call 12)`.
        collective: String,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked")]
    RankPanicked {
        /// The rank that panicked.
        rank: usize,
    },
    /// A peer sent a frame that no version of this protocol sends.
    #[error("rank {observer} received an invalid control frame from rank {rank}")]
    InvalidFrame {
        /// The rank that sent the invalid frame.
        rank: usize,
        /// The rank that received the invalid frame.
        observer: usize,
    },
    /// The reason is unknown, because the process that aborted the group died before storing the
    /// reason or because the stored bytes are invalid.
    #[error("the process that aborted the group died before it stored a reason")]
    Lost,
}

impl AbortReason {
    /// Creates the abort reason of a group that a program aborted by calling
    /// [`Comm::abort`](crate::Comm::abort) with the text `reason`.
    pub(crate) fn from_request(reason: &str) -> Self {
        AbortReason::Requested { reason: reason.to_owned() }
    }

    /// Returns the stable error code that `launch explain` documents for this abort reason.
    pub fn code(&self) -> Code {
        match self {
            AbortReason::Requested { .. } | AbortReason::RankFailed { .. } | AbortReason::Lost => {
                codes::COLLECTIVE_ABORTED
            }
            AbortReason::PeerLost { .. } => codes::PEER_LOST,
            AbortReason::PeerSilent { .. } => codes::PEER_SILENT,
            AbortReason::PeerLeft { .. } => codes::PEER_LEFT,
            AbortReason::RankPanicked { .. } => codes::PEER_PANICKED,
            AbortReason::InvalidFrame { .. } => codes::PEER_FRAME_INVALID,
        }
    }

    /// Adds the ranks, durations and collectives in this abort reason as fields to the user error
    /// `diagnostic`, and returns the result.
    pub(crate) fn add_fields(&self, diagnostic: Diagnostic) -> Diagnostic {
        match self {
            AbortReason::Requested { .. } | AbortReason::Lost => diagnostic,
            AbortReason::RankFailed { rank, .. }
            | AbortReason::PeerLost { rank }
            | AbortReason::RankPanicked { rank } => diagnostic.with_field("peer", *rank),
            AbortReason::PeerSilent { rank, observer, silence } => diagnostic
                .with_field("peer", *rank)
                .with_field("observer", *observer)
                .with_field("silence_s", silence.as_secs_f64()),
            AbortReason::PeerLeft { rank, collective } => {
                diagnostic.with_field("peer", *rank).with_field("collective", collective.as_str())
            }
            AbortReason::InvalidFrame { rank, observer } => {
                diagnostic.with_field("peer", *rank).with_field("observer", *observer)
            }
        }
    }

    /// Encodes this abort reason in at most `limit` bytes for transmission to the peers. A text
    /// that does not fit is cut at a character boundary.
    ///
    /// `limit` must be at least [`FIXED_FIELDS_BYTES`].
    pub(crate) fn encode(&self, limit: usize) -> Vec<u8> {
        let (kind, rank, observer, silence, text): (u8, usize, usize, Duration, &str) = match self {
            AbortReason::Lost => (0, 0, 0, Duration::ZERO, ""),
            AbortReason::Requested { reason } => (1, 0, 0, Duration::ZERO, reason),
            AbortReason::RankFailed { rank, message } => (2, *rank, 0, Duration::ZERO, message),
            AbortReason::PeerLost { rank } => (3, *rank, 0, Duration::ZERO, ""),
            AbortReason::PeerSilent { rank, observer, silence } => (4, *rank, *observer, *silence, ""),
            AbortReason::PeerLeft { rank, collective } => (5, *rank, 0, Duration::ZERO, collective),
            AbortReason::RankPanicked { rank } => (6, *rank, 0, Duration::ZERO, ""),
            AbortReason::InvalidFrame { rank, observer } => (7, *rank, *observer, Duration::ZERO, ""),
        };
        let mut end = text.len().min(limit - FIXED_FIELDS_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&(rank as u32).to_le_bytes());
        bytes.extend_from_slice(&(observer as u32).to_le_bytes());
        bytes.extend_from_slice(&(silence.as_millis() as u64).to_le_bytes());
        bytes.extend_from_slice(&text.as_bytes()[..end]);
        bytes
    }

    /// Decodes an abort reason that a peer encoded with [`AbortReason::encode`]. Returns
    /// [`AbortReason::Lost`] if the bytes are not valid.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let Some((fixed, text)) = bytes.split_first_chunk::<FIXED_FIELDS_BYTES>() else {
            return AbortReason::Lost;
        };
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&fixed[at..at + 4]);
            u32::from_le_bytes(word)
        };
        let (rank, observer) = (word(1) as usize, word(5) as usize);
        let silence = Duration::from_millis(u64::from(word(9)) | u64::from(word(13)) << 32);
        let text = || String::from_utf8_lossy(text).into_owned();
        match fixed[0] {
            1 => AbortReason::Requested { reason: text() },
            2 => AbortReason::RankFailed { rank, message: text() },
            3 => AbortReason::PeerLost { rank },
            4 => AbortReason::PeerSilent { rank, observer, silence },
            5 => AbortReason::PeerLeft { rank, collective: text() },
            6 => AbortReason::RankPanicked { rank },
            7 => AbortReason::InvalidFrame { rank, observer },
            _ => AbortReason::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_encoding() {
        let text = String::from("disk full");
        for reason in [
            AbortReason::Lost,
            AbortReason::Requested { reason: text.clone() },
            AbortReason::RankFailed { rank: 7, message: text.clone() },
            AbortReason::PeerLost { rank: 1000 },
            AbortReason::PeerSilent { rank: 1, observer: 2, silence: Duration::from_millis(5500) },
            AbortReason::PeerLeft { rank: 3, collective: text },
            AbortReason::RankPanicked { rank: 0 },
            AbortReason::InvalidFrame { rank: 1, observer: 0 },
        ] {
            assert_eq!(AbortReason::decode(&reason.encode(512)), reason);
        }
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        let bytes = AbortReason::from_request(&"ä".repeat(10)).encode(FIXED_FIELDS_BYTES + 5);
        assert_eq!(AbortReason::decode(&bytes), AbortReason::from_request("ää"));
    }

    #[test]
    fn invalid_bytes_decode_to_a_lost_reason() {
        for bytes in [&[][..], &[1; FIXED_FIELDS_BYTES - 1], &[99; FIXED_FIELDS_BYTES + 3]] {
            assert_eq!(AbortReason::decode(bytes), AbortReason::Lost);
        }
    }
}
