//! CRCs of pieces of a file that were read in any order, put together to the CRC of the whole: what flows through a
//! conversion is read once, not a first time to check it.
use crc32fast::Hasher;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Pieces of one stretch of a file, neighbours put together.
#[derive(Default)]
pub(super) struct Sums(Mutex<BTreeMap<u64, Piece>>);

#[derive(Clone, Copy)]
struct Piece {
    end: u64,
    crc: u32,
}

/// The CRC of two neighbours.
pub(super) fn joined(first: u32, second: u32, second_bytes: u64) -> u32 {
    let mut all = Hasher::new_with_initial(first);
    all.combine(&Hasher::new_with_initial_len(second, second_bytes));
    all.finalize()
}

impl Sums {
    fn pieces(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Piece>> {
        // a piece is in the map whole or not at all
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the CRC of bytes that were read. Bytes that are there already are left out with all of the piece.
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
        let (mut start, mut piece) = (bytes.start, Piece { end: bytes.end, crc });
        if let Some((at, p)) = before.filter(|(_, p)| p.end == bytes.start) {
            piece.crc = joined(p.crc, crc, bytes.end - bytes.start);
            start = at;
        }
        if let Some((at, p)) = after.filter(|(at, _)| *at == bytes.end) {
            piece = Piece { end: p.end, crc: joined(piece.crc, p.crc, p.end - at) };
            pieces.remove(&at);
        }
        pieces.insert(start, piece);
    }

    /// True when nothing was added.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces().is_empty()
    }

    /// The bytes of a stretch that no piece has.
    pub(super) fn gaps(&self, of: Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut at) = (Vec::new(), of.start);
        for (&start, piece) in self.pieces().iter() {
            if at < start {
                gaps.push(at..start);
            }
            at = piece.end;
        }
        if at < of.end {
            gaps.push(at..of.end);
        }
        gaps
    }

    /// The CRC of the stretch when pieces cover it.
    pub(super) fn whole(&self, of: Range<u64>) -> Option<u32> {
        if of.is_empty() {
            return Some(0);
        }
        self.pieces().get(&of.start).filter(|p| p.end == of.end).map(|p| p.crc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_in_any_order_make_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            reads in proptest::collection::vec((0usize..300, 0usize..300), 0..12), from in 0u64..1000,
        ) {
            let (sums, of) = (Sums::default(), from..from + bytes.len() as u64);
            let read = |range: Range<u64>| {
                let own = &bytes[(range.start - from) as usize..(range.end - from) as usize];
                sums.add(range, crc32fast::hash(own));
            };
            for (a, b) in reads {
                let (a, b) = (a.min(b).min(bytes.len()), a.max(b).min(bytes.len()));
                read(from + a as u64..from + b as u64);
            }
            let gaps = sums.gaps(of.clone());
            prop_assert_eq!(gaps.is_empty(), sums.whole(of.clone()).is_some());
            gaps.into_iter().for_each(&read);
            prop_assert_eq!(sums.gaps(of.clone()), []);
            prop_assert_eq!(sums.whole(of), Some(crc32fast::hash(&bytes)));
        }
    }
}
