//! [`PartialCrcs`]: computes the CRC-32 of a byte range of a file from the CRC-32s of its pieces,
//! which are read in any order.
//!
//! A conversion therefore reads each byte only once.
use crate::codec::disk::combine_crcs;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The CRC-32s of those pieces of one byte range that were already read from a file, by the file
/// offset of each piece. Adjacent pieces are merged.
#[derive(Default)]
pub(super) struct PartialCrcs(Mutex<BTreeMap<u64, CrcPiece>>);

/// A piece of a file's byte range that was read: the offset of its end, and its CRC-32.
#[derive(Clone, Copy)]
struct CrcPiece {
    /// Offset in the file at which the piece ends.
    end: u64,
    crc: u32,
}

impl PartialCrcs {
    /// Locks and returns the map of the pieces that were read, even if another thread panicked
    /// while it held the lock.
    fn lock_pieces(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, CrcPiece>> {
        // each update is a single insertion or removal, so a poisoned map is consistent
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the CRC-32 of the file's bytes in the range `bytes`, which have been read. Ignores
    /// an empty range, and a range that overlaps an earlier range.
    pub(super) fn add_crc(&self, bytes: Range<u64>, crc: u32) {
        if bytes.is_empty() {
            return;
        }
        let mut pieces = self.lock_pieces();
        let before = pieces.range(..=bytes.start).next_back().map(|(&at, &p)| (at, p));
        let after = pieces.range(bytes.start..).next().map(|(&at, &p)| (at, p));
        if before.is_some_and(|(_, p)| p.end > bytes.start) || after.is_some_and(|(at, _)| at < bytes.end) {
            return;
        }
        let (mut start, mut piece) = (bytes.start, CrcPiece { end: bytes.end, crc });
        if let Some((at, p)) = before.filter(|(_, p)| p.end == bytes.start) {
            piece.crc = combine_crcs(p.crc, crc, bytes.end - bytes.start);
            start = at;
        }
        if let Some((at, p)) = after.filter(|(at, _)| *at == bytes.end) {
            piece = CrcPiece { end: p.end, crc: combine_crcs(piece.crc, p.crc, p.end - at) };
            pieces.remove(&at);
        }
        pieces.insert(start, piece);
    }

    /// Returns true if no piece of the byte range was read yet.
    pub(super) fn is_empty(&self) -> bool {
        self.lock_pieces().is_empty()
    }

    /// Lists the parts of the file's byte range `span` that must still be read, because no CRC-32
    /// is recorded for them.
    pub(super) fn find_gaps(&self, span: Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut at) = (Vec::new(), span.start);
        for (&start, piece) in self.lock_pieces().iter() {
            if at < start {
                gaps.push(at..start);
            }
            at = piece.end;
        }
        if at < span.end {
            gaps.push(at..span.end);
        }
        gaps
    }

    /// Returns the CRC-32 of the whole byte range `span` of a file, or `None` if some bytes of the
    /// range were not read yet.
    pub(super) fn whole_crc(&self, span: Range<u64>) -> Option<u32> {
        if span.is_empty() {
            return Some(0);
        }
        self.lock_pieces().get(&span.start).filter(|p| p.end == span.end).map(|p| p.crc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn crcs_of_pieces_in_any_order_combine_to_the_crc_of_the_span(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            reads in proptest::collection::vec((0usize..300, 0usize..300), 0..12), from in 0u64..1000,
        ) {
            let (partial_crcs, span) = (PartialCrcs::default(), from..from + bytes.len() as u64);
            let read = |range: Range<u64>| {
                let piece = &bytes[(range.start - from) as usize..(range.end - from) as usize];
                partial_crcs.add_crc(range, crc32fast::hash(piece));
            };
            for (a, b) in reads {
                let (a, b) = (a.min(b).min(bytes.len()), a.max(b).min(bytes.len()));
                read(from + a as u64..from + b as u64);
            }
            let gaps = partial_crcs.find_gaps(span.clone());
            prop_assert_eq!(gaps.is_empty(), partial_crcs.whole_crc(span.clone()).is_some());
            gaps.into_iter().for_each(&read);
            prop_assert_eq!(partial_crcs.find_gaps(span.clone()), []);
            prop_assert_eq!(partial_crcs.whole_crc(span), Some(crc32fast::hash(&bytes)));
        }
    }
}
