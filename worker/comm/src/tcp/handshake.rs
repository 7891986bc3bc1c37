//! How two ranks prove to each other that they belong to the same attempt of the same run: bytes in, bytes out.
//!
//! ```text
//! connector                                             acceptor
//! HELLO: magic, version, attempt, run, from, to, kind, nonce  ->
//!                                          <-  CHALLENGE: magic, verdict, nonce
//! PROOF: MAC(key, "connector", hello, challenge)        ->
//!                                          <-  WELCOME: MAC(key, "acceptor", hello, challenge)
//! ```
//! The MAC is keyed BLAKE3 over both messages, so it answers for both nonces, the ranks, the attempt and the run. A stranger
//! learns a random number, at the cost of one small fixed buffer here.

/// First bytes of both sides.
const MAGIC: [u8; 8] = *b"launchtc";
/// Version of the protocol between ranks.
const VERSION: u32 = 1;

/// Bytes of a nonce, a MAC and the key.
pub(super) const SECRET: usize = 32;
/// Bytes of HELLO.
pub(super) const HELLO: usize = 8 + 4 + 4 + SECRET + 4 + 4 + 4 + SECRET;
/// Bytes of CHALLENGE.
pub(super) const CHALLENGE: usize = 8 + 4 + SECRET;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// The collectives' bytes.
    Data = 0,
    /// Heartbeats, aborts, farewells.
    Watch = 1,
}

impl Lane {
    pub(super) const ALL: [Lane; 2] = [Lane::Data, Lane::Watch];
}

/// What a rank knows of its group.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) key: [u8; SECRET],
    /// BLAKE3 of the run's name.
    pub(super) run: [u8; SECRET],
    pub(super) attempt: u32,
    pub(super) rank: u32,
    pub(super) world: u32,
}

/// Why an acceptor doesn't go on; said in the clear, so it is a hint and no proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    GoOn = 0,
    OtherVersion = 1,
    OtherAttempt = 2,
    /// Another run, or ranks that don't connect like this.
    NotExpected = 3,
}

impl Verdict {
    fn from_word(word: u32) -> Option<Self> {
        [Verdict::GoOn, Verdict::OtherVersion, Verdict::OtherAttempt, Verdict::NotExpected]
            .into_iter()
            .find(|v| *v as u32 == word)
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Verdict::GoOn => "it went on",
            Verdict::OtherVersion => "it speaks another version: two builds of `launch` are mixed",
            Verdict::OtherAttempt => "it belongs to another attempt of the run",
            Verdict::NotExpected => "it does not expect this rank",
        }
    }
}

/// A HELLO taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) from: u32,
    pub(super) lane: Lane,
}

pub(super) fn hello(id: &Identity, to: u32, lane: Lane, nonce: &[u8; SECRET]) -> [u8; HELLO] {
    let mut out = [0; HELLO];
    let words = [id.rank, to, lane as u32].map(u32::to_le_bytes).concat();
    let parts: [&[u8]; 6] =
        [&MAGIC, &VERSION.to_le_bytes(), &id.attempt.to_le_bytes(), &id.run, &words, nonce];
    let mut at = 0;
    for part in parts {
        out[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    out
}

/// What the acceptor `id` thinks of a HELLO. `None`: not this protocol at all, not worth an answer.
pub(super) fn judge(id: &Identity, hello: &[u8; HELLO]) -> Option<Result<Hello, Verdict>> {
    let (magic, rest) = hello.split_at(8);
    if magic != MAGIC {
        return None;
    }
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&rest[at..at + 4]);
        u32::from_le_bytes(bytes)
    };
    if word(0) != VERSION {
        return Some(Err(Verdict::OtherVersion));
    }
    if rest[8..8 + SECRET] != id.run {
        return Some(Err(Verdict::NotExpected));
    }
    if word(4) != id.attempt {
        return Some(Err(Verdict::OtherAttempt));
    }
    let (from, to, lane) = (word(8 + SECRET), word(12 + SECRET), word(16 + SECRET));
    let lane = Lane::ALL.into_iter().find(|l| *l as u32 == lane);
    Some(match lane {
        // the higher rank connects
        Some(lane) if to == id.rank && from > id.rank && from < id.world => Ok(Hello { from, lane }),
        _ => Err(Verdict::NotExpected),
    })
}

pub(super) fn challenge(verdict: Verdict, nonce: &[u8; SECRET]) -> [u8; CHALLENGE] {
    let mut out = [0; CHALLENGE];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&(verdict as u32).to_le_bytes());
    out[12..].copy_from_slice(nonce);
    out
}

/// What the connector reads in a CHALLENGE.
pub(super) fn read_challenge(challenge: &[u8; CHALLENGE]) -> Option<Verdict> {
    let mut word = [0; 4];
    word.copy_from_slice(&challenge[8..12]);
    (challenge[..8] == MAGIC).then(|| Verdict::from_word(u32::from_le_bytes(word))).flatten()
}

/// Whose MAC: each side proves itself in its own words, so that none can be sent back.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Connector,
    Acceptor,
}

/// Comparing two of these takes the same time whatever they are.
pub(super) fn mac(
    id: &Identity,
    side: Side,
    hello: &[u8; HELLO],
    challenge: &[u8; CHALLENGE],
) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(&id.key);
    hasher.update(match side {
        Side::Connector => b"launch connector",
        Side::Acceptor => b"launch acceptor ",
    });
    hasher.update(hello).update(challenge).finalize()
}

/// Bytes that nobody can guess.
pub(super) fn nonce() -> std::io::Result<[u8; SECRET]> {
    let mut out = [0u8; SECRET];
    // SAFETY: the buffer and its length are right; 32 bytes are never given in part once the pool is ready.
    let got = unsafe { libc::getrandom(out.as_mut_ptr().cast(), out.len(), 0) };
    match usize::try_from(got) {
        Ok(SECRET) => Ok(out),
        Ok(n) => Err(std::io::Error::other(format!("{n} random bytes of {SECRET}"))),
        Err(_) => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(rank: u32, attempt: u32) -> Identity {
        Identity { key: [7; SECRET], run: [9; SECRET], attempt, rank, world: 4 }
    }

    #[test]
    fn a_hello_is_judged_by_every_field() {
        let n = nonce().unwrap();
        let good = hello(&id(3, 1), 0, Lane::Watch, &n);
        assert_eq!(judge(&id(0, 1), &good), Some(Ok(Hello { from: 3, lane: Lane::Watch })));
        assert_eq!(judge(&id(0, 2), &good), Some(Err(Verdict::OtherAttempt)));
        assert_eq!(judge(&id(1, 1), &good), Some(Err(Verdict::NotExpected)), "meant for another rank");
        let lower = hello(&id(0, 1), 3, Lane::Data, &n);
        assert_eq!(judge(&id(3, 1), &lower), Some(Err(Verdict::NotExpected)), "the lower rank accepts");
        let outside = hello(&id(4, 1), 0, Lane::Data, &n);
        assert_eq!(judge(&id(0, 1), &outside), Some(Err(Verdict::NotExpected)));
        let other_run = Identity { run: [8; SECRET], ..id(3, 1) };
        let other = hello(&other_run, 0, Lane::Data, &n);
        assert_eq!(judge(&id(0, 1), &other), Some(Err(Verdict::NotExpected)));
        let mut text = good;
        text[..8].copy_from_slice(b"GET / HT");
        assert_eq!(judge(&id(0, 1), &text), None);
        let mut version = good;
        version[8] ^= 1;
        assert_eq!(judge(&id(0, 1), &version), Some(Err(Verdict::OtherVersion)));
        let mut lane = good;
        lane[HELLO - SECRET - 4] = 9;
        assert_eq!(judge(&id(0, 1), &lane), Some(Err(Verdict::NotExpected)));
    }

    #[test]
    fn a_proof_answers_for_every_byte_and_for_its_side() {
        let (id, n) = (id(3, 1), nonce().unwrap());
        let (h, c) = (hello(&id, 0, Lane::Data, &n), challenge(Verdict::GoOn, &n));
        let proof = mac(&id, Side::Connector, &h, &c);
        assert_ne!(proof, mac(&id, Side::Acceptor, &h, &c));
        for at in 0..HELLO {
            let mut other = h;
            other[at] ^= 1;
            assert_ne!(proof, mac(&id, Side::Connector, &other, &c));
        }
        for at in 0..CHALLENGE {
            let mut other = c;
            other[at] ^= 1;
            assert_ne!(proof, mac(&id, Side::Connector, &h, &other));
        }
        let stranger = Identity { key: [6; SECRET], ..id };
        assert_ne!(proof, mac(&stranger, Side::Connector, &h, &c));
    }
}
