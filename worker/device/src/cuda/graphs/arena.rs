//! Divides a few large blocks of GPU memory into ranges of scratch memory ([`ScratchArena`]), so
//! that a repeated sequence of requests gets the same addresses.
//!
//! The arena only records which ranges are allocated, for one stream. A freed range is reusable
//! immediately, because the stream executes calls in order.
use super::super::bindings::Address;

/// Alignment in bytes of every range of scratch memory that this allocator returns. The driver's
/// own allocations have the same alignment.
const ALIGNMENT: usize = 256;

/// The address and the size of a block of GPU memory that came from the driver's memory pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct PoolBlock {
    pub(in super::super) at: Address,
    pub(in super::super) bytes: usize,
}

/// A block of GPU memory, and the list of its ranges that are in use as scratch memory.
struct ArenaBlock {
    block: PoolBlock,
    ranges: Vec<(usize, usize)>,
}

impl ArenaBlock {
    /// Finds the first free gap of at least `bytes` bytes in this block, and returns the gap's
    /// position in the list of ranges and its byte offset.
    fn find_gap(&self, bytes: usize) -> Option<(usize, usize)> {
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

/// Allocator of scratch memory for the main CUDA stream, which divides a few large blocks of GPU
/// memory into ranges.
#[derive(Default)]
pub(in super::super) struct ScratchArena {
    blocks: Vec<ArenaBlock>,
    /// Number of bytes in allocated ranges now.
    live_bytes: usize,
    /// Size in bytes of a single block that would have been large enough for all requests so far.
    peak_bytes: usize,
}

impl ScratchArena {
    /// Allocates a range of `bytes` bytes of scratch memory in one of the blocks and returns its
    /// GPU address. Returns `None` if no block has a large enough gap.
    pub(in super::super) fn allocate(&mut self, bytes: usize) -> Option<Address> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        if self.live_bytes == 0 && self.blocks.len() > 1 {
            return None; // nothing is allocated, so one block can replace them all
        }
        for block in &mut self.blocks {
            if let Some((i, start)) = block.find_gap(bytes) {
                block.ranges.insert(i, (start, bytes));
                self.live_bytes += bytes;
                return Some(block.block.at + start as u64);
            }
        }
        None
    }

    /// Marks the range of scratch memory that begins at the GPU address `at` as free.
    pub(in super::super) fn free_range(&mut self, at: Address) {
        for block in &mut self.blocks {
            let start = at.wrapping_sub(block.block.at) as usize;
            if let Some(i) = block.ranges.iter().position(|(s, _)| *s == start) {
                self.live_bytes -= block.ranges.remove(i).1;
                return;
            }
        }
    }

    /// Decides which unused blocks to release, and how large a new block must be, when a request
    /// for `bytes` bytes fits into no block. Removes blocks without allocated ranges from the arena
    /// and returns them, with the size in bytes of a new block. The caller must release the
    /// returned blocks to the driver, and then allocate the new block and pass it to
    /// [`ScratchArena::add_block`]. In the long run a single large block remains.
    pub(in super::super) fn plan_growth(&mut self, bytes: usize) -> (Vec<PoolBlock>, usize) {
        let (bytes, capacity) = (bytes.next_multiple_of(ALIGNMENT), self.capacity());
        // If the capacity would suffice but is fragmented, one block must be larger than the
        // capacity.
        let needed =
            if capacity >= self.live_bytes + bytes { capacity + bytes } else { self.live_bytes + bytes };
        if self.live_bytes > 0 {
            self.peak_bytes = self.peak_bytes.max(needed);
            return (Vec::new(), bytes);
        }
        self.peak_bytes = self.peak_bytes.max(bytes);
        (self.take_idle_blocks(), self.peak_bytes)
    }

    /// Adds a new block of GPU memory to the allocator, in which nothing is allocated yet.
    pub(in super::super) fn add_block(&mut self, block: PoolBlock) {
        self.blocks.push(ArenaBlock { block, ranges: Vec::new() });
    }

    /// Removes from this allocator the blocks of GPU memory that contain no allocated range, and
    /// returns these blocks.
    pub(in super::super) fn take_idle_blocks(&mut self) -> Vec<PoolBlock> {
        let (idle, used) = std::mem::take(&mut self.blocks).into_iter().partition(|b| b.ranges.is_empty());
        self.blocks = used;
        idle.into_iter().map(|block: ArenaBlock| block.block).collect()
    }

    /// Returns the total size in bytes of the blocks of GPU memory that this allocator has.
    fn capacity(&self) -> usize {
        self.blocks.iter().map(|block| block.block.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocates `bytes` bytes in `arena` as the backend does: if no block has a gap, adds a new
    /// block at an address above `top`. Returns the address and the number of calls to the driver.
    fn allocate(arena: &mut ScratchArena, top: &mut Address, bytes: usize) -> (Address, usize) {
        if let Some(at) = arena.allocate(bytes) {
            return (at, 0);
        }
        let (released, new) = arena.plan_growth(bytes);
        *top += 1 << 20;
        arena.add_block(PoolBlock { at: *top, bytes: new });
        (arena.allocate(bytes).expect("the new block is large enough"), 1 + released.len())
    }

    #[test]
    fn repeated_requests_get_the_same_ranges_of_one_block() {
        let (mut arena, mut top) = (ScratchArena::default(), 0);
        let step = |arena: &mut ScratchArena, top: &mut Address| {
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
                batch.iter().for_each(|at| arena.free_range(*at));
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
        let (mut arena, mut top) = (ScratchArena::default(), 0);
        let mut live: Vec<(Address, usize)> = Vec::new();
        let mut random = 1u64;
        for _ in 0..2000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = (random >> 40) as usize % 4000 + 1;
            if live.len() > 6 || (random >> 33).is_multiple_of(3) && !live.is_empty() {
                let (at, _) = live.swap_remove((random >> 50) as usize % live.len());
                arena.free_range(at);
                continue;
            }
            let at = allocate(&mut arena, &mut top, bytes).0;
            assert!(at.is_multiple_of(256));
            for (other, len) in &live {
                assert!(at + bytes as u64 <= *other || other + *len as u64 <= at);
            }
            live.push((at, bytes));
        }
        live.iter().for_each(|(at, _)| arena.free_range(*at));
        assert_eq!(arena.live_bytes, 0);
        let before = top;
        for _ in 0..10 {
            let at = allocate(&mut arena, &mut top, 4000).0;
            arena.free_range(at);
        }
        assert!(top <= before + (1 << 20), "the blocks are merged into one, once");
    }
}
