//! Keeps freed GPU memory for reuse on a GPU without memory pools ([`BlockCache`]), because the
//! driver's plain allocations wait for all work on the GPU.
use super::bindings::{Address, driver_sys::CUstream};
use std::collections::{BTreeMap, HashMap};

/// Minimum size in bytes of a large block of GPU memory, whose size is rounded up to a multiple of
/// [`LARGE_GRANULARITY`].
const MIN_LARGE_BLOCK_BYTES: usize = 1 << 20;
/// The size in bytes of each small block of GPU memory (less than 1 MiB) is a multiple of this
/// number.
const SMALL_GRANULARITY: usize = 512;
/// The size in bytes of each large block of GPU memory (1 MiB and more) is a multiple of this
/// number. It is also the unit in which the driver allocates memory.
const LARGE_GRANULARITY: usize = 2 << 20;
/// A free block of GPU memory is reused only if the part that stays unused is at most the requested
/// size divided by this number.
const MAX_WASTE_DIVISOR: usize = 4;

/// The blocks of GPU memory that this process has allocated on a GPU without memory pools, in use
/// or kept for reuse. A free block belongs to the stream in which it was freed, and is reused only
/// there, so that the order of the stream protects it.
#[derive(Default)]
pub(super) struct BlockCache {
    /// Size in bytes of each block, free or in use.
    sizes: HashMap<Address, usize>,
    /// The free blocks of each stream, by size. The key is the address of the stream's handle.
    free: HashMap<usize, BTreeMap<usize, Vec<Address>>>,
}

/// Rounds a requested size of `bytes` bytes up to the size in bytes of the block of GPU memory that
/// is allocated for it.
pub(super) fn round_block_size(bytes: usize) -> usize {
    bytes.next_multiple_of(if bytes < MIN_LARGE_BLOCK_BYTES { SMALL_GRANULARITY } else { LARGE_GRANULARITY })
}

impl BlockCache {
    /// Removes and returns the smallest free block of `stream` that fits a request of `bytes` bytes
    /// and is at most a quarter larger. Returns `None` if there is no such block.
    pub(super) fn take_fitting_block(&mut self, bytes: usize, stream: CUstream) -> Option<Address> {
        let needed = round_block_size(bytes);
        let blocks = self.free.get_mut(&stream.addr())?;
        let size = *blocks.range(needed..=needed + needed / MAX_WASTE_DIVISOR).next()?.0;
        let same_size = blocks.get_mut(&size)?;
        let at = same_size.pop();
        if same_size.is_empty() {
            blocks.remove(&size);
        }
        at
    }

    /// Adds a block of `bytes` bytes of GPU memory at the address `at`, which has just been
    /// allocated and is in use.
    pub(super) fn add_used_block(&mut self, at: Address, bytes: usize) {
        self.sizes.insert(at, bytes);
    }

    /// Marks the block at the GPU address `at` as free, so that later work on `stream` can reuse
    /// it.
    pub(super) fn mark_free(&mut self, at: Address, stream: CUstream) {
        if let Some(bytes) = self.sizes.get(&at) {
            self.free.entry(stream.addr()).or_default().entry(*bytes).or_default().push(at);
        }
    }

    /// Removes all free blocks of GPU memory from the cache and returns their addresses, so that
    /// they can be given back to the driver.
    pub(super) fn take_free_blocks(&mut self) -> Vec<Address> {
        let free: Vec<Address> =
            std::mem::take(&mut self.free).into_values().flat_map(BTreeMap::into_values).flatten().collect();
        free.iter().for_each(|at| {
            self.sizes.remove(at);
        });
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    #[test]
    fn blocks_are_reused_in_their_stream_for_similar_sizes() {
        let [one, other] = [1, 2].map(ptr::without_provenance_mut);
        let mut cache = BlockCache::default();
        for (at, bytes) in [(10, 1000), (20, 3 << 20)] {
            assert_eq!(cache.take_fitting_block(bytes, one), None);
            cache.add_used_block(at, round_block_size(bytes));
            cache.mark_free(at, one);
        }
        assert_eq!(
            cache.take_fitting_block(1000, other),
            None,
            "the other stream is not ordered after the free"
        );
        assert_eq!(
            (cache.take_fitting_block(300, one), cache.take_fitting_block(1 << 20, one)),
            (None, None),
            "too large"
        );
        assert_eq!(
            (cache.take_fitting_block(1024, one), cache.take_fitting_block(1024, one)),
            (Some(10), None)
        );
        assert_eq!(cache.take_fitting_block((2 << 20) + 1, one), Some(20));
        cache.mark_free(20, other);
        assert_eq!(cache.take_free_blocks(), [20]);
        cache.mark_free(10, one);
        assert_eq!((cache.take_fitting_block(3 << 20, other), cache.take_free_blocks()), (None, vec![10]));
        assert!(cache.sizes.is_empty());
    }
}
