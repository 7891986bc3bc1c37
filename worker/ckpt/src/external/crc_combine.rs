//! Combines the CRC-32s of pieces of a file, read in any order, to the CRC-32 of the whole span. A
//! conversion therefore reads each byte only once.
use crc32fast::Hasher;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// CRC-32s of pieces of one span. Adjacent pieces are merged.
#[derive(Default)]
pub(super) struct PartialCrcs(Mutex<BTreeMap<u64, CrcPiece>>);

#[derive(Clone, Copy)]
struct CrcPiece {
    end: u64,
    crc: u32,
}

/// The CRC-32 of the concatenation of two byte sequences.
pub(super) fn combine(first: u32, second: u32, second_bytes: u64) -> u32 {
    let mut hasher = Hasher::new_with_initial(first);
    hasher.combine(&Hasher::new_with_initial_len(second, second_bytes));
    hasher.finalize()
}

impl PartialCrcs {
    fn pieces(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, CrcPiece>> {
        // each update is a single insertion or removal, so a poisoned map is consistent
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the CRC-32 of bytes that were read. A piece that overlaps an earlier one is ignored.
    pub(super) fn add(&self, bytes: Range<u64>, crc: u32) {
        if bytes.is_empty() {
            return;
        }
        let mut pieces = self.pieces();
        let before = pieces.range(..=bytes.start).next_back().map(|(&at, &p)| (at, p));
        let after = pieces.range(bytes.start..).next().map(|(&at, &p)| (at, p));
        if before.is_some_and(|(_, p)| p.end > bytes.start) || after.is_some_and(|(at, _)| at < bytes.end) {
            return;
        }
        let (mut start, mut piece) = (bytes.start, CrcPiece { end: bytes.end, crc });
        if let Some((at, p)) = before.filter(|(_, p)| p.end == bytes.start) {
            piece.crc = combine(p.crc, crc, bytes.end - bytes.start);
            start = at;
        }
        if let Some((at, p)) = after.filter(|(at, _)| *at == bytes.end) {
            piece = CrcPiece { end: p.end, crc: combine(piece.crc, p.crc, p.end - at) };
            pieces.remove(&at);
        }
        pieces.insert(start, piece);
    }

    /// True when nothing was added.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces().is_empty()
    }

    /// The bytes of a span that no piece covers.
    pub(super) fn gaps(&self, span: Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut at) = (Vec::new(), span.start);
        for (&start, piece) in self.pieces().iter() {
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

    /// The CRC-32 of the span; `None` when pieces do not cover it.
    pub(super) fn whole(&self, span: Range<u64>) -> Option<u32> {
        if span.is_empty() {
            return Some(0);
        }
        self.pieces().get(&span.start).filter(|p| p.end == span.end).map(|p| p.crc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_in_any_order_combine_to_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            reads in proptest::collection::vec((0usize..300, 0usize..300), 0..12), from in 0u64..1000,
        ) {
            let (partial_crcs, span) = (PartialCrcs::default(), from..from + bytes.len() as u64);
            let read = |range: Range<u64>| {
                let piece = &bytes[(range.start - from) as usize..(range.end - from) as usize];
                partial_crcs.add(range, crc32fast::hash(piece));
            };
            for (a, b) in reads {
                let (a, b) = (a.min(b).min(bytes.len()), a.max(b).min(bytes.len()));
                read(from + a as u64..from + b as u64);
            }
            let gaps = partial_crcs.gaps(span.clone());
            prop_assert_eq!(gaps.is_empty(), partial_crcs.whole(span.clone()).is_some());
            gaps.into_iter().for_each(&read);
            prop_assert_eq!(partial_crcs.gaps(span.clone()), []);
            prop_assert_eq!(partial_crcs.whole(span), Some(crc32fast::hash(&bytes)));
        }
    }
}
