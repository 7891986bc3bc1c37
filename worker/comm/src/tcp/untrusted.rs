//! Passes bytes to the parsers of messages from peers without opening a connection, for fuzz
//! targets and tests with untrusted input.
use super::{
    control_frame::{ControlFrame, FrameParse},
    handshake::{
        self, CHALLENGE_BYTES, ChallengeAnswer, ConnectionKind, HELLO_BYTES, RankIdentity, SECRET_BYTES,
    },
};
use crate::{AbortReason, RejectReason};

/// Number of the rank that acts as the receiver of the bytes in fuzz targets and tests.
const RECEIVER_RANK: u32 = 0;
/// Number of the rank that acts as the sender of the bytes in fuzz targets and tests.
const SENDER_RANK: u32 = 1;

/// Creates the identity of example rank `rank` in a group of four, for handshakes in fuzz targets
/// and tests: key, run, attempt and rank.
fn create_identity(rank: u32) -> RankIdentity {
    RankIdentity { key: [7; SECRET_BYTES], run: [9; SECRET_BYTES], attempt: 1, rank, world: 4 }
}

/// Creates two named byte strings from which fuzzing starts: a valid first message of a handshake
/// (HELLO), and three valid control frames.
pub(crate) fn create_fuzz_seeds() -> [(&'static str, Vec<u8>); 2] {
    let nonce = [1; SECRET_BYTES];
    let hello = handshake::encode_hello(
        &create_identity(SENDER_RANK),
        RECEIVER_RANK,
        ConnectionKind::Control,
        &nonce,
    );
    let abort = ControlFrame::Abort(AbortReason::RankFailed { rank: 2, message: "disk full".to_owned() });
    let frames = [ControlFrame::Heartbeat, abort, ControlFrame::Farewell];
    let frames = frames.iter().flat_map(ControlFrame::encode).collect();
    [("one.handshake", hello.to_vec()), ("three.frames", frames)]
}

/// Parses `bytes`, all bytes of one control connection between two ranks, as control frames.
/// Returns the number of frames. Returns `None` if a frame is invalid or the last frame is
/// incomplete.
pub(crate) fn parse_control_frames(mut bytes: &[u8]) -> Option<usize> {
    let mut frames = 0;
    while !bytes.is_empty() {
        let FrameParse::Complete(frame, length) = ControlFrame::parse(bytes) else { return None };
        if let ControlFrame::Abort(reason) = &frame {
            drop(reason.to_string());
            let again = ControlFrame::parse(&frame.encode());
            assert!(matches!(again, FrameParse::Complete(ControlFrame::Abort(_), _)), "{frame:?}: {again:?}");
        }
        bytes = &bytes[length..];
        frames += 1;
    }
    Some(frames)
}

/// Parses `bytes` twice: as the HELLO message that opens a handshake, and as the CHALLENGE message
/// that answers it. Returns whether the HELLO is accepted. Panics if the CHALLENGE is accepted,
/// because its sender has no key.
pub(crate) fn parse_handshake(bytes: &[u8]) -> Result<bool, RejectReason> {
    let identity = create_identity(RECEIVER_RANK);
    if let Some(challenge) = bytes.first_chunk::<CHALLENGE_BYTES>() {
        let nonce = [2; SECRET_BYTES];
        let hello = handshake::encode_hello(&identity, SENDER_RANK, ConnectionKind::Data, &nonce);
        let answer = handshake::decode_challenge(&identity, &hello, challenge);
        let is_proof = matches!(answer, ChallengeAnswer::Accepted | ChallengeAnswer::Rejected(_));
        assert!(!is_proof, "a challenge without the key is believed");
    }
    match bytes.first_chunk::<HELLO_BYTES>().and_then(|hello| handshake::check_hello(&identity, hello)) {
        None => Ok(false),
        Some(checked) => checked.map(|_| true),
    }
}
