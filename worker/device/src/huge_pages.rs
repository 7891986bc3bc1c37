//! Allocates host memory for large buffers, in huge pages if the kernel provides them.
//!
//! Matmuls of weight gradients are 5 to 8 % slower with small pages (docs/benchmarks/cpu.md).
//! Huge pages are only requested for the part of a buffer that fills them completely, so a buffer
//! takes no more memory than its bytes.
use memmap2::{Advice, MmapMut};
use std::ptr::NonNull;

/// Size of a huge page in bytes. Buffers of at least this size get a separate mapping.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The anonymous memory mapping of one large buffer in host memory, which is unmapped when dropped.
pub(crate) struct BufferMapping(#[allow(dead_code, reason = "held to be unmapped with the buffer")] MmapMut);

/// Allocates `bytes` bytes of host memory, filled with zeros, at an address that is a multiple of
/// the size of a huge page. Returns the mapping and the address of the memory, or `None` if the
/// system is out of memory.
pub(crate) fn map_zeroed(bytes: usize) -> Option<(BufferMapping, NonNull<u8>)> {
    let mut map = MmapMut::map_anon(bytes.checked_add(HUGE_PAGE_BYTES)?).ok()?;
    let skip = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
    // A kernel without huge pages rejects the advice, which is harmless.
    let _ = map.advise_range(Advice::HugePage, skip, bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES);
    let ptr = NonNull::new(map.get_mut(skip..skip + bytes)?.as_mut_ptr())?;
    Some((BufferMapping(map), ptr))
}

#[cfg(test)]
mod tests {
    use crate::{Buf, Dtype};

    #[test]
    fn large_buffers_are_zero_and_aligned_to_huge_pages() {
        for len in
            [super::HUGE_PAGE_BYTES / 4, super::HUGE_PAGE_BYTES / 4 + 1, 3 * super::HUGE_PAGE_BYTES / 4 + 17]
        {
            let mut buf = Buf::zeroed(len);
            assert_eq!(buf.host_slice().as_ptr().align_offset(super::HUGE_PAGE_BYTES), 0);
            assert_eq!(buf.host_slice().len(), len);
            assert!(buf.host_slice().iter().all(|x| x.to_bits() == 0));
            buf.host_slice_mut().fill(1.0);
            assert_eq!(buf.host_slice()[len - 1], 1.0);
        }
        assert_eq!(Buf::zeroed_as(Dtype::Bf16, super::HUGE_PAGE_BYTES).len(), super::HUGE_PAGE_BYTES);
    }
}
