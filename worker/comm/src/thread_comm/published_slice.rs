//! [`PublishedSlice`]: a range of one rank's memory that the other threads of its group may read
//! during a data exchange of a collective.
/// A range of one rank's memory that the other threads of its group may read during a data exchange
/// of a collective.
#[derive(Clone, Copy)]
pub(super) struct PublishedSlice {
    address: *const u8,
    bytes: usize,
    element_bytes: usize,
}

// SAFETY: the memory is read only inside an exchange, which ends after all reads (`exchange.rs`).
unsafe impl Send for PublishedSlice {}
// SAFETY: see `Send`; the memory is never written through this address.
unsafe impl Sync for PublishedSlice {}

impl PublishedSlice {
    /// Publishes a slice of `f32` elements, which peers can then read with
    /// [`PublishedSlice::as_f32`].
    pub(super) fn from_f32(x: &[f32]) -> Self {
        let (address, bytes) = (x.as_ptr().cast(), size_of_val(x));
        PublishedSlice { address, bytes, element_bytes: size_of::<f32>() }
    }

    /// Publishes the bytes `x`, which contain elements of `element_bytes` bytes each, for peers to
    /// read with [`PublishedSlice::as_bytes`].
    pub(super) fn from_bytes(x: &[u8], element_bytes: usize) -> Self {
        PublishedSlice { address: x.as_ptr(), bytes: x.len(), element_bytes }
    }

    /// Returns the number of elements in the published slice.
    pub(super) fn len(&self) -> usize {
        self.bytes / self.element_bytes
    }

    /// Returns the published elements as `f32`.
    ///
    /// # Safety
    ///
    /// [`PublishedSlice::from_f32`] must have created this value. The caller must not use the
    /// returned elements after the end of the exchange in which the slice was published. From then
    /// on, the rank that published the slice may overwrite or free the memory.
    pub(super) unsafe fn as_f32<'a>(&self) -> &'a [f32] {
        // SAFETY: the caller's promise; the owner does not write or free the memory before the end.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len()) }
    }

    /// Returns the bytes of the published elements.
    ///
    /// # Safety
    ///
    /// The caller must not use the returned bytes after the end of the exchange in which the slice
    /// was published. From then on, the rank that published the slice may overwrite or free the
    /// memory.
    pub(super) unsafe fn as_bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}
