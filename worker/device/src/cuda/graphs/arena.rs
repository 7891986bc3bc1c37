//! Scratch memory in which the same steps get the same addresses: ranges of a few large blocks, the first that fits.
//!
//! Bookkeeping alone, for one stream. A range that is given back may be had again at once: the stream's order keeps apart what
//! was asked for before and after.
use super::super::binding::Address;

/// Where ranges begin, as the driver's own memory does.
const ALIGNED: usize = 256;

/// Memory of the driver's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Block {
    pub(in super::super) at: Address,
    pub(in super::super) bytes: usize,
}

/// A block, and what of it is had: offsets and lengths, in order.
struct Used {
    block: Block,
    taken: Vec<(usize, usize)>,
}

impl Used {
    /// The first gap of this length.
    fn gap(&self, bytes: usize) -> Option<(usize, usize)> {
        let mut end = 0;
        for (i, (start, len)) in self.taken.iter().enumerate() {
            if start - end >= bytes {
                return Some((i, end));
            }
            end = start + len;
        }
        (self.block.bytes - end >= bytes).then_some((self.taken.len(), end))
    }
}

/// The blocks of a stream.
#[derive(Default)]
pub(in super::super) struct Arena {
    blocks: Vec<Used>,
    /// Bytes that are had now, and what one block would have to hold for all that was had at once.
    live: usize,
    most: usize,
}

impl Arena {
    /// A range of a block, where one has room.
    pub(in super::super) fn take(&mut self, bytes: usize) -> Option<Address> {
        let bytes = bytes.next_multiple_of(ALIGNED);
        if self.live == 0 && self.blocks.len() > 1 {
            return None; // one block is to be made of them
        }
        for used in &mut self.blocks {
            if let Some((i, start)) = used.gap(bytes) {
                used.taken.insert(i, (start, bytes));
                self.live += bytes;
                return Some(used.block.at + start as u64);
            }
        }
        None
    }

    /// Takes a range back.
    pub(in super::super) fn give(&mut self, at: Address) {
        for used in &mut self.blocks {
            let start = at.wrapping_sub(used.block.at) as usize;
            if let Some(i) = used.taken.iter().position(|(s, _)| *s == start) {
                self.live -= used.taken.remove(i).1;
                return;
            }
        }
    }

    /// What a range needs that no block has room for: bytes of a new block. Blocks that nobody uses go first, so that one large block
    /// is what remains.
    pub(in super::super) fn growth(&mut self, bytes: usize) -> (Vec<Block>, usize) {
        let (bytes, whole) = (bytes.next_multiple_of(ALIGNED), self.bytes());
        // Where the room was there, but in pieces, one block has to be larger than all that was had.
        let room = if whole >= self.live + bytes { whole + bytes } else { self.live + bytes };
        if self.live > 0 {
            self.most = self.most.max(room);
            return (Vec::new(), bytes);
        }
        self.most = self.most.max(bytes);
        (self.idle(), self.most)
    }

    /// Adds a block.
    pub(in super::super) fn add(&mut self, block: Block) {
        self.blocks.push(Used { block, taken: Vec::new() });
    }

    /// Gives up the blocks that nobody uses.
    pub(in super::super) fn idle(&mut self) -> Vec<Block> {
        let (idle, used) = std::mem::take(&mut self.blocks).into_iter().partition(|b| b.taken.is_empty());
        self.blocks = used;
        idle.into_iter().map(|used: Used| used.block).collect()
    }

    fn bytes(&self) -> usize {
        self.blocks.iter().map(|used| used.block.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A range, by a new block where none has room; the driver's memory goes up.
    fn have(arena: &mut Arena, top: &mut Address, bytes: usize) -> (Address, usize) {
        if let Some(at) = arena.take(bytes) {
            return (at, 0);
        }
        let (gone, new) = arena.growth(bytes);
        *top += 1 << 20;
        arena.add(Block { at: *top, bytes: new });
        (arena.take(bytes).expect("the new block has room"), 1 + gone.len())
    }

    #[test]
    fn the_same_requests_get_the_same_ranges_of_one_block() {
        let (mut arena, mut top) = (Arena::default(), 0);
        let step = |arena: &mut Arena, top: &mut Address| {
            let mut seen = Vec::new();
            let mut calls = 0;
            for sizes in [&[100][..], &[5000, 300], &[300, 5000, 1], &[7000]] {
                let all: Vec<Address> = sizes
                    .iter()
                    .map(|bytes| {
                        let (at, made) = have(arena, top, *bytes);
                        calls += made;
                        at
                    })
                    .collect();
                all.iter().for_each(|at| arena.give(*at));
                seen.extend(all);
            }
            (seen, calls)
        };
        step(&mut arena, &mut top);
        step(&mut arena, &mut top);
        let (second, calls) = step(&mut arena, &mut top);
        assert_eq!(calls, 0, "nothing is asked of the driver");
        assert_eq!(step(&mut arena, &mut top), (second, 0));
        assert_eq!((arena.blocks.len(), arena.bytes()), (1, 7168));
    }

    #[test]
    fn ranges_that_are_had_never_meet() {
        let (mut arena, mut top) = (Arena::default(), 0);
        let mut had: Vec<(Address, usize)> = Vec::new();
        let mut random = 1u64;
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = (random >> 40) as usize % 4000 + 1;
            if had.len() > 6 || (random >> 33).is_multiple_of(3) && !had.is_empty() {
                let (at, _) = had.swap_remove((random >> 50) as usize % had.len());
                arena.give(at);
                continue;
            }
            let at = have(&mut arena, &mut top, bytes).0;
            assert!(at.is_multiple_of(256));
            for (other, len) in &had {
                assert!(at + bytes as u64 <= *other || other + *len as u64 <= at);
            }
            had.push((at, bytes));
        }
        had.iter().for_each(|(at, _)| arena.give(*at));
        assert_eq!(arena.live, 0);
        let before = top;
        for _ in 0..10 {
            let at = have(&mut arena, &mut top, 4000).0;
            arena.give(at);
        }
        assert!(top <= before + (1 << 20), "pieces become one block, once");
    }
}
