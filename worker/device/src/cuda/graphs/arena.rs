//! [`Arena`]: scratch memory in which the same sequence of requests gets the same addresses, by
//! first fit in a few large blocks.
//!
//! The arena only does the bookkeeping, for one stream. A freed range is reusable immediately,
//! because the stream executes the calls before and after in order.
use super::super::bindings::Address;

/// Alignment of ranges in bytes, which is that of the driver's own allocations.
const ALIGNMENT: usize = 256;

/// An allocation of the driver's memory pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Block {
    pub(in super::super) at: Address,
    pub(in super::super) bytes: usize,
}

/// A block and its allocated ranges: offsets and lengths, in order.
struct ArenaBlock {
    block: Block,
    ranges: Vec<(usize, usize)>,
}

impl ArenaBlock {
    /// The first gap of at least `bytes`: its index among the ranges and its offset.
    fn gap(&self, bytes: usize) -> Option<(usize, usize)> {
        let mut end = 0;
        for (i, (start, len)) in self.ranges.iter().enumerate() {
            if start - end >= bytes {
                return Some((i, end));
            }
            end = start + len;
        }
        (self.block.bytes - end >= bytes).then_some((self.ranges.len(), end))
    }
}

/// The scratch memory of a stream.
#[derive(Default)]
pub(in super::super) struct Arena {
    blocks: Vec<ArenaBlock>,
    /// Bytes that are allocated now.
    live: usize,
    /// Bytes that a single block would need for all simultaneous allocations so far.
    peak: usize,
}

impl Arena {
    /// A range of a block; `None` if no block has a large enough gap.
    pub(in super::super) fn allocate(&mut self, bytes: usize) -> Option<Address> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        if self.live == 0 && self.blocks.len() > 1 {
            return None; // nothing is allocated, so one block can replace them all
        }
        for block in &mut self.blocks {
            if let Some((i, start)) = block.gap(bytes) {
                block.ranges.insert(i, (start, bytes));
                self.live += bytes;
                return Some(block.block.at + start as u64);
            }
        }
        None
    }

    /// Frees a range.
    pub(in super::super) fn free(&mut self, at: Address) {
        for block in &mut self.blocks {
            let start = at.wrapping_sub(block.block.at) as usize;
            if let Some(i) = block.ranges.iter().position(|(s, _)| *s == start) {
                self.live -= block.ranges.remove(i).1;
                return;
            }
        }
    }

    /// How to allocate a range that fits no block: unused blocks to release first, and the
    /// bytes of a new block. In the long run a single large block remains.
    pub(in super::super) fn plan_growth(&mut self, bytes: usize) -> (Vec<Block>, usize) {
        let (bytes, capacity) = (bytes.next_multiple_of(ALIGNMENT), self.capacity());
        // If the capacity would suffice but is fragmented, one block must be larger than the
        // capacity.
        let needed = if capacity >= self.live + bytes { capacity + bytes } else { self.live + bytes };
        if self.live > 0 {
            self.peak = self.peak.max(needed);
            return (Vec::new(), bytes);
        }
        self.peak = self.peak.max(bytes);
        (self.take_idle_blocks(), self.peak)
    }

    pub(in super::super) fn add(&mut self, block: Block) {
        self.blocks.push(ArenaBlock { block, ranges: Vec::new() });
    }

    /// Removes and returns the blocks without allocated ranges.
    pub(in super::super) fn take_idle_blocks(&mut self) -> Vec<Block> {
        let (idle, used) = std::mem::take(&mut self.blocks).into_iter().partition(|b| b.ranges.is_empty());
        self.blocks = used;
        idle.into_iter().map(|block: ArenaBlock| block.block).collect()
    }

    /// Bytes of all blocks.
    fn capacity(&self) -> usize {
        self.blocks.iter().map(|block| block.block.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocates a range, with a new block at increasing addresses if no block has a gap. Returns
    /// the address and the number of calls to the driver.
    fn allocate(arena: &mut Arena, top: &mut Address, bytes: usize) -> (Address, usize) {
        if let Some(at) = arena.allocate(bytes) {
            return (at, 0);
        }
        let (released, new) = arena.plan_growth(bytes);
        *top += 1 << 20;
        arena.add(Block { at: *top, bytes: new });
        (arena.allocate(bytes).expect("the new block is large enough"), 1 + released.len())
    }

    #[test]
    fn repeated_requests_get_the_same_ranges_of_one_block() {
        let (mut arena, mut top) = (Arena::default(), 0);
        let step = |arena: &mut Arena, top: &mut Address| {
            let mut addresses = Vec::new();
            let mut driver_calls = 0;
            for sizes in [&[100][..], &[5000, 300], &[300, 5000, 1], &[7000]] {
                let batch: Vec<Address> = sizes
                    .iter()
                    .map(|bytes| {
                        let (at, calls) = allocate(arena, top, *bytes);
                        driver_calls += calls;
                        at
                    })
                    .collect();
                batch.iter().for_each(|at| arena.free(*at));
                addresses.extend(batch);
            }
            (addresses, driver_calls)
        };
        step(&mut arena, &mut top);
        step(&mut arena, &mut top);
        let (third, driver_calls) = step(&mut arena, &mut top);
        assert_eq!(driver_calls, 0, "no call reaches the driver");
        assert_eq!(step(&mut arena, &mut top), (third, 0));
        assert_eq!((arena.blocks.len(), arena.capacity()), (1, 7168));
    }

    #[test]
    fn allocated_ranges_never_overlap() {
        let (mut arena, mut top) = (Arena::default(), 0);
        let mut live: Vec<(Address, usize)> = Vec::new();
        let mut random = 1u64;
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = (random >> 40) as usize % 4000 + 1;
            if live.len() > 6 || (random >> 33).is_multiple_of(3) && !live.is_empty() {
                let (at, _) = live.swap_remove((random >> 50) as usize % live.len());
                arena.free(at);
                continue;
            }
            let at = allocate(&mut arena, &mut top, bytes).0;
            assert!(at.is_multiple_of(256));
            for (other, len) in &live {
                assert!(at + bytes as u64 <= *other || other + *len as u64 <= at);
            }
            live.push((at, bytes));
        }
        live.iter().for_each(|(at, _)| arena.free(*at));
        assert_eq!(arena.live, 0);
        let before = top;
        for _ in 0..10 {
            let at = allocate(&mut arena, &mut top, 4000).0;
            arena.free(at);
        }
        assert!(top <= before + (1 << 20), "the blocks are merged into one, once");
    }
}
