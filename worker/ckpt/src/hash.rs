//! [`struct@Hash`]: a BLAKE3 hash, and its text form, which is that of `b3sum`. Text formats
//! serialize the hash as hex digits, and binary formats as 32 bytes.
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// A BLAKE3 hash of 32 bytes, with which the content of checkpoint files is verified.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// Computes the hash of the bytes `data`.
    pub fn digest(data: &[u8]) -> Hash {
        Hash(*blake3::hash(data).as_bytes())
    }

    /// Formats the hash as 64 lower-case hex digits.
    pub(crate) fn to_hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }
}

/// Computes the BLAKE3 hash of a sequence of bytes that arrives in parts.
#[derive(Default)]
pub(crate) struct FileHasher(blake3::Hasher);

impl FileHasher {
    /// Adds the next bytes of the sequence. Parts of at least 16 KiB are hashed faster than smaller
    /// ones.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the hash of all bytes that were added.
    pub(crate) fn finish(&self) -> Hash {
        Hash(*self.0.finalize().as_bytes())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match s.is_human_readable() {
            true => s.serialize_str(&self.to_hex()),
            false => s.serialize_bytes(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Hash, D::Error> {
        match d.is_human_readable() {
            true => d.deserialize_str(HashVisitor),
            false => d.deserialize_bytes(HashVisitor),
        }
    }
}

/// A serde visitor that deserializes a hash from hex digits, or from its 32 bytes.
struct HashVisitor;

impl de::Visitor<'_> for HashVisitor {
    type Value = Hash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a BLAKE3 hash: 64 hex digits or 32 bytes")
    }

    fn visit_str<E: de::Error>(self, s: &str) -> Result<Hash, E> {
        blake3::Hash::from_hex(s)
            .map(|h| Hash(*h.as_bytes()))
            .map_err(|_| E::invalid_value(de::Unexpected::Str(s), &self))
    }

    fn visit_bytes<E: de::Error>(self, b: &[u8]) -> Result<Hash, E> {
        b.try_into().map(Hash).map_err(|_| E::invalid_length(b.len(), &self))
    }
}
