//! [`JsonSeal`]: writes and verifies a BLAKE3 hash at the beginning of a JSON text, which detects
//! every flipped bit of the text. The hash is computed over the whole file, with zeros in place of
//! the hash. It is not a signature.
use crate::hash::Hash;
use std::ops::Range;

/// Number of hexadecimal digits of the hash at the beginning of a JSON text.
const HASH_DIGITS: usize = 64;

/// The place in a JSON text at which the BLAKE3 hash of the text is stored.
pub(crate) struct JsonSeal {
    /// The text before the hash, with which the file must begin.
    start: &'static str,
}

/// The reason for which a JSON text fails the verification of the hash that it contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SealError {
    /// The text is too short for a hash.
    Truncated,
    /// The text does not begin with a hash, or its content does not match the hash.
    Mismatch,
}

impl JsonSeal {
    /// The place of the hash in a compact JSON text, which begins with `{"blake3":"`.
    pub(crate) const COMPACT: JsonSeal = JsonSeal { start: "{\"blake3\":\"" };
    /// The place of the hash in an indented JSON text, in which `"blake3"` is the first key.
    pub(crate) const INDENTED: JsonSeal = JsonSeal { start: "{\n  \"blake3\": \"" };

    /// Returns the string of zeros that a JSON text must have in place of its hash while the hash
    /// of the text is computed.
    pub(crate) fn empty_hash() -> String {
        "0".repeat(HASH_DIGITS)
    }

    /// Returns the byte range, within a JSON text, of the hexadecimal digits of the BLAKE3 hash
    /// that the text contains about itself.
    fn digit_range(&self) -> Range<usize> {
        self.start.len()..self.start.len() + HASH_DIGITS
    }

    /// Returns true if the JSON text begins with a field for its hash, without verifying the hash.
    pub(crate) fn has_hash(&self, text: &[u8]) -> bool {
        text.starts_with(self.start.as_bytes()) && text.len() > self.digit_range().end
    }

    /// Computes the hash of the JSON text, and writes its digits into the hash field at the
    /// beginning of the text. Does nothing if the text is too short.
    pub(crate) fn seal(&self, text: &mut [u8]) {
        if text.get_mut(self.digit_range()).map(|hex| hex.fill(b'0')).is_some() {
            let hash = Hash::digest(text).to_hex();
            text[self.digit_range()].copy_from_slice(hash.as_bytes());
        }
    }

    /// Verifies the hash in the JSON text, and replaces it by zeros. Returns the hash.
    pub(crate) fn unseal(&self, text: &mut [u8]) -> Result<String, SealError> {
        let stored = text.get(self.digit_range()).ok_or(SealError::Truncated)?.to_owned();
        text[self.digit_range()].fill(b'0');
        let hash = Hash::digest(text).to_hex();
        match text.starts_with(self.start.as_bytes()) && hash.as_bytes() == stored {
            true => Ok(hash),
            false => Err(SealError::Mismatch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_of_a_sealed_text_is_detected() {
        for (seal, start, end) in [
            (JsonSeal::COMPACT, "{\"blake3\":\"", "\"}"),
            (JsonSeal::INDENTED, "{\n  \"blake3\": \"", "\"\n}\n"),
        ] {
            let mut text = format!("{start}{}{end}", JsonSeal::empty_hash()).into_bytes();
            assert!(seal.has_hash(&text));
            seal.seal(&mut text);
            for bit in 0..text.len() * 8 {
                let mut flipped = text.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(seal.unseal(&mut flipped), Err(SealError::Mismatch), "bit {bit}");
            }
            let hash = seal.unseal(&mut text.clone()).expect("sealed");
            assert_eq!(text[start.len()..start.len() + 64], *hash.as_bytes());
            assert_eq!(seal.unseal(&mut text[..20].to_vec()), Err(SealError::Truncated));
        }
    }
}
