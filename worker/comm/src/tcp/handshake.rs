//! The handshake in which two ranks prove to each other that they belong to the same attempt of the
//! same run. This module encodes and checks messages, but does no input or output.
//!
//! ```text
//! connector                                             acceptor
//! HELLO: magic, version, attempt, run, from, to, kind, nonce  ->
//!       <-  CHALLENGE: magic, answer, nonce, MAC(key, "challenge", hello, magic, answer, nonce)
//! PROOF: MAC(key, "connector", hello, challenge)        ->
//!                                          <-  WELCOME: MAC(key, "acceptor", hello, challenge)
//! ```
//!
//! The MAC is a keyed BLAKE3 hash of HELLO and CHALLENGE. It therefore authenticates both nonces,
//! the ranks, the attempt and the run. A process without the key learns only random numbers, and
//! occupies only one small buffer. Only a peer with the key can reject a connection for good.
use crate::RejectReason;

/// The first eight bytes of the handshake messages HELLO and CHALLENGE between two ranks, which
/// identify the protocol.
const HANDSHAKE_MAGIC: [u8; 8] = *b"launchtc";
/// The version of the handshake and of the messages between ranks, which two ranks must have in
/// common. Ranks with different versions reject each other.
const PROTOCOL_VERSION: u32 = 3;
/// The value in the handshake message CHALLENGE which means that the peer accepts the connection.
const ACCEPTED_NUMBER: u32 = 0;

/// Size in bytes of the key, of a nonce, and of a message authentication code (MAC).
pub(super) const SECRET_BYTES: usize = 32;
/// Size in bytes of HELLO, the first message of a handshake between two ranks.
pub(super) const HELLO_BYTES: usize = 8 + 4 + 4 + SECRET_BYTES + 4 + 4 + 4 + SECRET_BYTES;
/// Size in bytes of the handshake message CHALLENGE without the message authentication code (MAC)
/// at its end.
const CHALLENGE_BYTES_WITHOUT_MAC: usize = 8 + 4 + SECRET_BYTES;
/// Size in bytes of CHALLENGE, the answer to a HELLO, with its message authentication code (MAC).
pub(super) const CHALLENGE_BYTES: usize = CHALLENGE_BYTES_WITHOUT_MAC + SECRET_BYTES;

/// What a connection between two ranks is used for: data of collectives, or control frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionKind {
    /// The data of collectives.
    Data = 0,
    /// Heartbeats, aborts and farewells.
    Control = 1,
}

impl ConnectionKind {
    pub(super) const ALL: [ConnectionKind; 2] = [ConnectionKind::Data, ConnectionKind::Control];
}

/// Identifies one rank in a handshake: the hash of the run's name, the attempt, the rank and the
/// world size, with the ranks' secret key.
#[derive(Clone)]
pub(super) struct RankIdentity {
    pub(super) key: [u8; SECRET_BYTES],
    /// BLAKE3 of the run's name.
    pub(super) run: [u8; SECRET_BYTES],
    pub(super) attempt: u32,
    pub(super) rank: u32,
    pub(super) world: u32,
}

/// The values in the handshake message CHALLENGE that mean a rejected connection, each with the
/// reason.
const REJECTION_NUMBERS: [(u32, RejectReason); 3] =
    [(1, RejectReason::OtherVersion), (2, RejectReason::OtherAttempt), (3, RejectReason::UnexpectedRank)];

/// Content of HELLO, the first message of a handshake: the connecting rank, and whether the
/// connection is for collectives or for control frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) from: u32,
    pub(super) kind: ConnectionKind,
}

/// Encodes HELLO, the first message of a handshake, which the rank with the identity `id` sends to
/// rank `to`.
pub(super) fn encode_hello(
    id: &RankIdentity,
    to: u32,
    kind: ConnectionKind,
    nonce: &[u8; SECRET_BYTES],
) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    let words = [id.rank, to, kind as u32].map(u32::to_le_bytes).concat();
    let parts: [&[u8]; 6] = [
        &HANDSHAKE_MAGIC,
        &PROTOCOL_VERSION.to_le_bytes(),
        &id.attempt.to_le_bytes(),
        &id.run,
        &words,
        nonce,
    ];
    let mut end = 0;
    for part in parts {
        out[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    out
}

/// Checks HELLO, the first message of a handshake, against this rank's identity `id`, and returns
/// the connecting rank and the purpose of the connection. Fails with the reject reason if the HELLO
/// does not match `id`. Returns `None` if the bytes belong to another protocol, so that the
/// acceptor must not answer.
pub(super) fn check_hello(
    id: &RankIdentity,
    hello: &[u8; HELLO_BYTES],
) -> Option<Result<Hello, RejectReason>> {
    let (magic, rest) = hello.split_at(8);
    if magic != HANDSHAKE_MAGIC {
        return None;
    }
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&rest[at..at + 4]);
        u32::from_le_bytes(bytes)
    };
    if word(0) != PROTOCOL_VERSION {
        return Some(Err(RejectReason::OtherVersion));
    }
    if rest[8..8 + SECRET_BYTES] != id.run {
        return Some(Err(RejectReason::UnexpectedRank));
    }
    if word(4) != id.attempt {
        return Some(Err(RejectReason::OtherAttempt));
    }
    let (from, to, kind) = (word(8 + SECRET_BYTES), word(12 + SECRET_BYTES), word(16 + SECRET_BYTES));
    let kind = ConnectionKind::ALL.into_iter().find(|k| *k as u32 == kind);
    Some(match kind {
        // the higher rank connects
        Some(kind) if to == id.rank && from > id.rank && from < id.world => Ok(Hello { from, kind }),
        _ => Err(RejectReason::UnexpectedRank),
    })
}

/// Encodes the handshake message CHALLENGE, which accepts or rejects a connection and contains a
/// nonce and a message authentication code (MAC).
pub(super) fn encode_challenge(
    id: &RankIdentity,
    hello: &[u8; HELLO_BYTES],
    answer: Result<(), RejectReason>,
    nonce: &[u8; SECRET_BYTES],
) -> [u8; CHALLENGE_BYTES] {
    let number = |reason| REJECTION_NUMBERS.iter().find(|(_, r)| *r == reason).map_or(u32::MAX, |(n, _)| *n);
    let answer = answer.map_or_else(number, |()| ACCEPTED_NUMBER);
    let mut out = [0; CHALLENGE_BYTES];
    out[..8].copy_from_slice(&HANDSHAKE_MAGIC);
    out[8..12].copy_from_slice(&answer.to_le_bytes());
    out[12..CHALLENGE_BYTES_WITHOUT_MAC].copy_from_slice(nonce);
    let mac = compute_challenge_mac(id, hello, &out[..CHALLENGE_BYTES_WITHOUT_MAC]);
    out[CHALLENGE_BYTES_WITHOUT_MAC..].copy_from_slice(mac.as_bytes());
    out
}

/// Meaning of the handshake message CHALLENGE for the connecting rank: accepted, rejected with a
/// reason, from an unproven sender, or of another protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChallengeAnswer {
    /// A peer that has the key of this attempt accepts the connection.
    Accepted,
    /// A peer that has the key of this attempt rejects the connection.
    Rejected(RejectReason),
    /// The sender did not prove that it has the key of this attempt. It may be a rank of another
    /// attempt, which has another key.
    Unproven,
    /// The bytes belong to another protocol.
    OtherProtocol,
}

/// Checks and decodes the handshake message CHALLENGE, which this rank (identity `id`) received in
/// answer to its message `hello`.
pub(super) fn decode_challenge(
    id: &RankIdentity,
    hello: &[u8; HELLO_BYTES],
    challenge: &[u8; CHALLENGE_BYTES],
) -> ChallengeAnswer {
    if challenge[..8] != HANDSHAKE_MAGIC {
        return ChallengeAnswer::OtherProtocol;
    }
    let mut word = [0; 4];
    word.copy_from_slice(&challenge[8..12]);
    let mut mac = [0; SECRET_BYTES];
    mac.copy_from_slice(&challenge[CHALLENGE_BYTES_WITHOUT_MAC..]);
    if compute_challenge_mac(id, hello, &challenge[..CHALLENGE_BYTES_WITHOUT_MAC]) != mac {
        return ChallengeAnswer::Unproven;
    }
    let number = u32::from_le_bytes(word);
    let reason = REJECTION_NUMBERS.iter().find(|(n, _)| *n == number);
    match (number, reason) {
        (ACCEPTED_NUMBER, _) => ChallengeAnswer::Accepted,
        (_, Some((_, reason))) => ChallengeAnswer::Rejected(*reason),
        (_, None) => ChallengeAnswer::OtherProtocol,
    }
}

/// Computes the message authentication code (MAC) at the end of the handshake message CHALLENGE,
/// which covers HELLO and the rest of CHALLENGE. Comparing two MACs takes constant time.
fn compute_challenge_mac(id: &RankIdentity, hello: &[u8; HELLO_BYTES], answer: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(&id.key);
    hasher.update(b"launch challenge").update(hello).update(answer).finalize()
}

/// Which side of a handshake, the connecting or the accepting rank, proves that it knows the key
/// with a message authentication code (MAC). The sides use different prefixes, so a MAC cannot be
/// reflected to its sender.
#[derive(Clone, Copy)]
pub(super) enum HandshakeSide {
    Connector,
    Acceptor,
}

/// Computes the message authentication code (MAC) of HELLO and CHALLENGE with which one side of a
/// handshake proves that it knows the key. The MAC covers HELLO and CHALLENGE, and comparing two
/// MACs takes constant time.
pub(super) fn compute_mac(
    id: &RankIdentity,
    side: HandshakeSide,
    hello: &[u8; HELLO_BYTES],
    challenge: &[u8; CHALLENGE_BYTES],
) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(&id.key);
    hasher.update(match side {
        HandshakeSide::Connector => b"launch connector",
        HandshakeSide::Acceptor => b"launch acceptor ",
    });
    hasher.update(hello).update(challenge).finalize()
}

/// Returns a nonce: unpredictable bytes from the operating system.
pub(super) fn generate_nonce() -> std::io::Result<[u8; SECRET_BYTES]> {
    let mut nonce = [0; SECRET_BYTES];
    getrandom::fill(&mut nonce)?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_identity(rank: u32, attempt: u32) -> RankIdentity {
        RankIdentity { key: [7; SECRET_BYTES], run: [9; SECRET_BYTES], attempt, rank, world: 4 }
    }

    #[test]
    fn every_field_of_a_hello_is_checked() {
        let n = generate_nonce().unwrap();
        let unexpected = Some(Err(RejectReason::UnexpectedRank));
        let good = encode_hello(&make_identity(3, 1), 0, ConnectionKind::Control, &n);
        let accepted = Hello { from: 3, kind: ConnectionKind::Control };
        assert_eq!(check_hello(&make_identity(0, 1), &good), Some(Ok(accepted)));
        assert_eq!(check_hello(&make_identity(0, 2), &good), Some(Err(RejectReason::OtherAttempt)));
        assert_eq!(check_hello(&make_identity(1, 1), &good), unexpected, "meant for another rank");
        let lower = encode_hello(&make_identity(0, 1), 3, ConnectionKind::Data, &n);
        assert_eq!(check_hello(&make_identity(3, 1), &lower), unexpected, "the lower rank accepts");
        let outside = encode_hello(&make_identity(4, 1), 0, ConnectionKind::Data, &n);
        assert_eq!(check_hello(&make_identity(0, 1), &outside), unexpected);
        let other_run = RankIdentity { run: [8; SECRET_BYTES], ..make_identity(3, 1) };
        let other = encode_hello(&other_run, 0, ConnectionKind::Data, &n);
        assert_eq!(check_hello(&make_identity(0, 1), &other), unexpected);
        let mut text = good;
        text[..8].copy_from_slice(b"GET / HT");
        assert_eq!(check_hello(&make_identity(0, 1), &text), None);
        let mut version = good;
        version[8] ^= 1;
        assert_eq!(check_hello(&make_identity(0, 1), &version), Some(Err(RejectReason::OtherVersion)));
        let mut kind = good;
        kind[HELLO_BYTES - SECRET_BYTES - 4] = 9;
        assert_eq!(check_hello(&make_identity(0, 1), &kind), unexpected);
    }

    #[test]
    fn a_challenge_carries_the_answer_of_a_peer_with_the_key() {
        let (id, nonce) = (make_identity(3, 1), [1; SECRET_BYTES]);
        let hello = encode_hello(&id, 0, ConnectionKind::Data, &nonce);
        for (answer, expected) in [
            (Ok(()), ChallengeAnswer::Accepted),
            (Err(RejectReason::OtherAttempt), ChallengeAnswer::Rejected(RejectReason::OtherAttempt)),
            (Err(RejectReason::UnexpectedRank), ChallengeAnswer::Rejected(RejectReason::UnexpectedRank)),
        ] {
            let challenge = encode_challenge(&id, &hello, answer, &nonce);
            assert_eq!(decode_challenge(&id, &hello, &challenge), expected);
            // Neither another key nor a changed byte is accepted.
            let other = RankIdentity { key: [8; SECRET_BYTES], ..id.clone() };
            let forged = encode_challenge(&other, &hello, answer, &nonce);
            assert_eq!(decode_challenge(&id, &hello, &forged), ChallengeAnswer::Unproven);
            for at in 0..CHALLENGE_BYTES {
                let mut changed = challenge;
                changed[at] ^= 1;
                let expected =
                    if at < 8 { ChallengeAnswer::OtherProtocol } else { ChallengeAnswer::Unproven };
                assert_eq!(decode_challenge(&id, &hello, &changed), expected, "byte {at}");
            }
            let mut other_hello = hello;
            other_hello[HELLO_BYTES - 1] ^= 1;
            assert_eq!(decode_challenge(&id, &other_hello, &challenge), ChallengeAnswer::Unproven);
        }
    }

    #[test]
    fn a_proof_depends_on_every_byte_and_on_the_side() {
        let (id, n) = (make_identity(3, 1), generate_nonce().unwrap());
        let h = encode_hello(&id, 0, ConnectionKind::Data, &n);
        let c = encode_challenge(&id, &h, Ok(()), &n);
        let proof = compute_mac(&id, HandshakeSide::Connector, &h, &c);
        assert_ne!(proof, compute_mac(&id, HandshakeSide::Acceptor, &h, &c));
        for i in 0..HELLO_BYTES {
            let mut other = h;
            other[i] ^= 1;
            assert_ne!(proof, compute_mac(&id, HandshakeSide::Connector, &other, &c));
        }
        for i in 0..CHALLENGE_BYTES {
            let mut other = c;
            other[i] ^= 1;
            assert_ne!(proof, compute_mac(&id, HandshakeSide::Connector, &h, &other));
        }
        let without_key = RankIdentity { key: [6; SECRET_BYTES], ..id };
        assert_ne!(proof, compute_mac(&without_key, HandshakeSide::Connector, &h, &c));
    }
}
