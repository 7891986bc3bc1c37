//! Functions that each pass untrusted bytes to one parser of messages from other ranks, for fuzz
//! targets and tests.
//!
//! Each function fails if the bytes are invalid. A function must not panic or loop forever.
use crate::{AbortReason, tcp};

/// Error: the bytes that a fuzz target or test passed to a parser are not a valid message of a
/// peer.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes of a peer are not valid")]
pub struct InvalidPeerBytes;

/// Creates valid inputs for the parsers of peers' messages, from which fuzzing starts, and a name
/// such as `one.handshake` for each input. The name's extension identifies the parser. The inputs
/// are not files, because they change with the protocol.
pub fn create_fuzz_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let reason = AbortReason::from_request("disk full").encode(256);
    tcp::create_fuzz_seeds().into_iter().chain([("requested.reason", reason)]).collect()
}

/// Parses the bytes of a control connection between two ranks as frames.
pub fn parse_control_frames(bytes: &[u8]) -> Result<(), InvalidPeerBytes> {
    tcp::parse_control_frames(bytes).map(drop).ok_or(InvalidPeerBytes)
}

/// Parses bytes as the first messages of a handshake between two ranks (HELLO and CHALLENGE).
/// Panics if the bytes are accepted as proof of the secret key.
pub fn parse_handshake(bytes: &[u8]) -> Result<(), InvalidPeerBytes> {
    match tcp::parse_handshake(bytes) {
        Ok(true) => Ok(()),
        Ok(false) | Err(_) => Err(InvalidPeerBytes),
    }
}

/// Parses bytes as the abort reason that ranks of a host store in their shared memory.
pub fn parse_abort_reason(bytes: &[u8]) -> Result<(), InvalidPeerBytes> {
    match AbortReason::decode(bytes) {
        AbortReason::Lost => Err(InvalidPeerBytes),
        reason => {
            drop((reason.to_string(), reason.code()));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Parser = fn(&[u8]) -> Result<(), InvalidPeerBytes>;

    /// The parsers to fuzz, each with the extension of the names of its inputs in
    /// [`create_fuzz_seeds`].
    const PARSERS: [(&str, Parser); 3] =
        [("frames", parse_control_frames), ("handshake", parse_handshake), ("reason", parse_abort_reason)];

    #[test]
    fn seeds_are_accepted_by_their_parsers() {
        for (name, bytes) in create_fuzz_seeds() {
            let parser = PARSERS.iter().find(|(extension, _)| name.ends_with(extension));
            assert_eq!(parser.expect("a parser").1(&bytes), Ok(()), "{name}");
        }
    }

    proptest! {
        /// Checks that no parser panics on bytes that were changed at random. A parser also panics
        /// if it accepts a peer that does not know the key.
        #[test]
        fn changed_bytes_of_peers_never_panic(
            seed in 0usize..3,
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            added in proptest::collection::vec(any::<u8>(), 0..40),
            length in 0usize..400,
        ) {
            let mut bytes = create_fuzz_seeds()[seed].1.clone();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.extend(added);
            bytes.truncate(length);
            for (_, parse) in PARSERS {
                _ = parse(&bytes);
            }
        }
    }
}
