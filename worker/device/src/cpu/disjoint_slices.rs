//! [`DisjointSlices`]: a slice of which parallel tasks write disjoint ranges at the same time.
use std::{marker::PhantomData, ops::Range};

/// A slice of which parallel tasks write disjoint ranges at the same time.
pub(crate) struct DisjointSlices<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: like `&mut [T]`, because callers of `slice_mut` guarantee that ranges are disjoint.
unsafe impl<T: Send> Sync for DisjointSlices<'_, T> {}
// SAFETY: like `&mut [T]`.
unsafe impl<T: Send> Send for DisjointSlices<'_, T> {}

impl<'a, T> DisjointSlices<'a, T> {
    /// Borrows the slice `x`, of which parallel tasks can then write disjoint ranges.
    pub(crate) fn new(x: &'a mut [T]) -> Self {
        DisjointSlices { ptr: x.as_mut_ptr(), len: x.len(), life: PhantomData }
    }

    /// Returns the elements with the indices `r`, which one task may write while other tasks write
    /// other elements. Panics if `r` is out of bounds.
    ///
    /// # Safety
    ///
    /// While the returned slice is in use, no overlapping range of the elements may be in use.
    pub(crate) unsafe fn slice_mut(&self, r: Range<usize>) -> &'a mut [T] {
        assert!(r.start <= r.end && r.end <= self.len, "range {r:?} is outside 0..{}", self.len);
        // SAFETY: within the slice, and exclusive by the caller's guarantee.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r.start), r.len()) }
    }

    /// Returns the address of the slice's first element.
    pub(crate) fn as_mut_ptr(&self) -> *mut T {
        self.ptr
    }
}
