//! Memory of a device: owned buffers and the ranges of them that ops read and write.
//!
//! A view is an address, a length and a lifetime, so the same op signatures serve host and device memory. On the CPU
//! backend a view *is* a slice: [`View::host`] costs nothing.
use std::{alloc, marker::PhantomData, ops::Range, ptr::NonNull};

/// Alignment of every buffer, bytes: one cache line, one AVX-512 register.
pub const ALIGN: usize = 64;

/// An owned, 64-byte aligned, zero-initialised buffer of `f32` on the host.
pub struct Buf {
    ptr: NonNull<f32>,
    len: usize,
}

// SAFETY: Buf owns its memory exclusively, as Vec<f32> does.
unsafe impl Send for Buf {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buf {}

impl Buf {
    /// `len` zeros. Aborts the process when memory is exhausted, as Vec does; sizes are judged beforehand by `launch plan`.
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Buf { ptr: NonNull::dangling(), len };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc::alloc_zeroed(layout) }.cast::<f32>();
        let Some(ptr) = NonNull::new(raw) else { alloc::handle_alloc_error(layout) };
        Buf { ptr, len }
    }

    /// A copy of `src`.
    pub fn from_slice(src: &[f32]) -> Self {
        let mut b = Self::zeroed(src.len());
        b.host_mut().copy_from_slice(src);
        b
    }

    fn layout(len: usize) -> alloc::Layout {
        alloc::Layout::array::<f32>(len)
            .and_then(|l| l.align_to(ALIGN))
            .expect("buffer length fits the address space")
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it, to read.
    pub fn view(&self) -> View<'_> {
        View { ptr: self.ptr.as_ptr(), len: self.len, life: PhantomData }
    }

    /// All of it, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { ptr: self.ptr.as_ptr(), len: self.len, life: PhantomData }
    }

    /// The elements, host memory only.
    pub fn host(&self) -> &[f32] {
        self.view().host()
    }

    /// The elements, host memory only.
    pub fn host_mut(&mut self) -> &mut [f32] {
        // SAFETY: Buf owns `len` initialised elements at `ptr`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Default for Buf {
    fn default() -> Self {
        Buf::zeroed(0)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { alloc::dealloc(self.ptr.as_ptr().cast(), Self::layout(self.len)) }
        }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf[{}]", self.len)
    }
}

/// A range of a buffer, to read.
#[derive(Clone, Copy)]
pub struct View<'a> {
    ptr: *const f32,
    len: usize,
    life: PhantomData<&'a [f32]>,
}

// SAFETY: as &[f32].
unsafe impl Send for View<'_> {}
// SAFETY: as &[f32].
unsafe impl Sync for View<'_> {}

impl<'a> View<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it. Panics when the range is outside, as slicing does.
    pub fn slice(self, r: Range<usize>) -> View<'a> {
        assert!(r.start <= r.end && r.end <= self.len, "view range {r:?} outside 0..{}", self.len);
        // SAFETY: inside the allocation.
        View { ptr: unsafe { self.ptr.add(r.start) }, len: r.len(), life: PhantomData }
    }

    /// The elements, host memory only.
    pub fn host(self) -> &'a [f32] {
        // SAFETY: made from a slice or buffer of this length that outlives 'a.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<'a> From<&'a [f32]> for View<'a> {
    fn from(s: &'a [f32]) -> Self {
        View { ptr: s.as_ptr(), len: s.len(), life: PhantomData }
    }
}

/// A range of a buffer, to write; exclusive like `&mut [f32]`.
pub struct ViewMut<'a> {
    ptr: *mut f32,
    len: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: as &mut [f32].
unsafe impl Send for ViewMut<'_> {}
// SAFETY: as &mut [f32].
unsafe impl Sync for ViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it. Panics when the range is outside, as slicing does.
    pub fn slice(self, r: Range<usize>) -> ViewMut<'a> {
        assert!(r.start <= r.end && r.end <= self.len, "view range {r:?} outside 0..{}", self.len);
        // SAFETY: inside the allocation.
        ViewMut { ptr: unsafe { self.ptr.add(r.start) }, len: r.len(), life: PhantomData }
    }

    /// Two parts, split at `mid`.
    pub fn split_at(self, mid: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        let (a, b) = self.host().split_at_mut(mid);
        (a.into(), b.into())
    }

    /// The same range for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { ptr: self.ptr, len: self.len, life: PhantomData }
    }

    /// The same range, to read.
    pub fn as_view(&self) -> View<'_> {
        View { ptr: self.ptr, len: self.len, life: PhantomData }
    }

    /// The elements, host memory only.
    pub fn host(self) -> &'a mut [f32] {
        // SAFETY: made from an exclusive slice or buffer of this length that outlives 'a.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<'a> From<&'a mut [f32]> for ViewMut<'a> {
    fn from(s: &'a mut [f32]) -> Self {
        ViewMut { ptr: s.as_mut_ptr(), len: s.len(), life: PhantomData }
    }
}
