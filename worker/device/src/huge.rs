//! Memory of large buffers on the host, in huge pages where the kernel gives them.
//!
//! Products whose operands lie in small pages were measured to be some per cent slower (docs/design/crates.md). Only what huge pages
//! fill whole is asked for in them, so a buffer takes no more memory than its bytes.
use crate::mem::Memory;
use memmap2::{Advice, MmapMut};
use std::{ptr::NonNull, sync::Arc};

/// Bytes of a huge page, and the least that is worth a mapping of its own.
pub(crate) const PAGE: usize = 2 << 20;

/// A mapping that nobody else knows; it ends with its buffer.
struct Mapping(#[allow(dead_code)] MmapMut); // dropped with the buffer, which is all that it is for

impl Memory for Mapping {
    fn take_back(&self, _: u64, _: usize) {}
}

/// `bytes` zeros that begin where a huge page may. `None`: the system gives no more memory.
pub(crate) fn zeroed(bytes: usize) -> Option<(Arc<dyn Memory>, NonNull<u8>)> {
    let mut map = MmapMut::map_anon(bytes.checked_add(PAGE)?).ok()?;
    let skip = map.as_ptr().align_offset(PAGE);
    // A kernel without huge pages refuses, and nothing is lost.
    let _ = map.advise_range(Advice::HugePage, skip, bytes / PAGE * PAGE);
    let ptr = NonNull::new(map.get_mut(skip..skip + bytes)?.as_mut_ptr())?;
    Some((Arc::new(Mapping(map)), ptr))
}

#[cfg(test)]
mod tests {
    use crate::{Buf, Dtype};

    #[test]
    fn large_buffers_are_zeros_where_huge_pages_begin() {
        for len in [super::PAGE / 4, super::PAGE / 4 + 1, 3 * super::PAGE / 4 + 17] {
            let mut buf = Buf::zeroed(len);
            assert_eq!(buf.host().as_ptr().align_offset(super::PAGE), 0);
            assert_eq!(buf.host().len(), len);
            assert!(buf.host().iter().all(|x| x.to_bits() == 0));
            buf.host_mut().fill(1.0);
            assert_eq!(buf.host()[len - 1], 1.0);
        }
        assert_eq!(Buf::zeroed_as(Dtype::Bf16, super::PAGE).len(), super::PAGE);
    }
}
