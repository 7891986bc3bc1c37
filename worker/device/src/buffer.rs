//! Buffers in host or GPU memory ([`Buf`]), and borrowed ranges of buffers that ops read ([`View`])
//! or write ([`ViewMut`]).
//!
//! A view is an address, a length, an element type and a lifetime. The same op signatures therefore
//! serve host and device memory in every precision. On the host a view of `f32` is a slice:
//! [`View::host_slice`] costs nothing.
use crate::huge_pages;
use std::{alloc, marker::PhantomData, ops::Range, ptr::NonNull, sync::Arc};

/// Alignment of every host buffer in bytes: the size of a cache line and of an AVX-512 register.
pub const BUFFER_ALIGNMENT: usize = 64;

/// Type of the elements of a buffer: `f32`, bf16 or f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16, the upper half of an `f32`: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE half precision: 5 bits of exponent, 10 of mantissa.
    F16,
}

impl Dtype {
    /// Returns the size of an element of this type in bytes.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

/// Owner of buffer memory that the Rust allocator did not allocate, such as GPU memory. It frees
/// the memory of a dropped [`Buf`].
pub(crate) trait MemoryOwner: Send + Sync {
    /// Frees `bytes` bytes of memory at `address`, because the buffer that used them was dropped.
    fn release(&self, address: u64, bytes: usize);
}

impl MemoryOwner for huge_pages::BufferMapping {
    fn release(&self, _: u64, _: usize) {}
}

/// Raw pointer to consecutive elements in host or GPU memory, with their number and type, from
/// which buffers and views are built. No lifetime protects the memory.
#[derive(Clone, Copy)]
struct ElementRange {
    ptr: *mut u8,
    len: usize,
    dtype: Dtype,
    on_host: bool,
}

impl ElementRange {
    /// Returns the part of these elements with the indices `r`. Panics if the range is out of
    /// bounds.
    fn slice(self, r: Range<usize>) -> ElementRange {
        assert!(r.start <= r.end && r.end <= self.len, "view range {r:?} is outside 0..{}", self.len);
        // SAFETY: within the allocation.
        ElementRange { ptr: unsafe { self.ptr.add(r.start * self.dtype.size()) }, len: r.len(), ..self }
    }

    /// Returns the size of these elements in bytes.
    fn byte_len(self) -> usize {
        self.len * self.dtype.size()
    }

    /// Returns the address of the elements in host memory. Panics if they are in GPU memory.
    #[track_caller]
    fn host_ptr(self) -> *mut u8 {
        assert!(self.on_host, "a buffer in GPU memory is used as host memory");
        self.ptr
    }

    /// Returns the address of the elements, which must be `f32` in host memory. Panics otherwise.
    #[track_caller]
    fn f32_ptr(self) -> *mut f32 {
        let ptr = self.host_ptr();
        assert!(self.dtype == Dtype::F32, "a buffer of {:?} is used as f32", self.dtype);
        ptr.cast()
    }

    /// Returns the host address of these elements, which must be bf16 or f16 in host memory. Panics
    /// otherwise.
    #[track_caller]
    fn half_ptr(self) -> *mut u16 {
        let ptr = self.host_ptr();
        assert!(self.dtype != Dtype::F32, "a buffer of {:?} is used as 16 bits", self.dtype);
        ptr.cast()
    }
}

/// Generates the methods `len`, `is_empty` and `dtype` for buffer and view types.
macro_rules! define_element_accessors {
    ($($type:ty),*) => {$(
        impl $type {
            /// Returns the number of elements in the buffer or view.
            pub fn len(&self) -> usize {
                self.elements.len
            }

            /// Returns true if the buffer or view has no elements.
            pub fn is_empty(&self) -> bool {
                self.elements.len == 0
            }

            /// Returns the type of the elements in the buffer or view.
            pub fn dtype(&self) -> Dtype {
                self.elements.dtype
            }
        }
    )*};
}

define_element_accessors!(Buf, View<'_>, ViewMut<'_>);

/// A buffer with its memory, either on the host (aligned to [`BUFFER_ALIGNMENT`]) or on a GPU.
pub struct Buf {
    elements: ElementRange,
    /// The owner that frees the memory; `None` if the Rust allocator allocated it.
    owner: Option<Arc<dyn MemoryOwner>>,
}

// SAFETY: a Buf owns its memory exclusively, as a Vec does.
unsafe impl Send for Buf {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buf {}

impl Buf {
    /// Creates a buffer of `len` elements at the address `ptr`, to be freed by `owner`, or by the
    /// Rust allocator if `owner` is `None`.
    fn new(
        ptr: NonNull<u8>,
        len: usize,
        dtype: Dtype,
        on_host: bool,
        owner: Option<Arc<dyn MemoryOwner>>,
    ) -> Self {
        Buf { elements: ElementRange { ptr: ptr.as_ptr(), len, dtype, on_host }, owner }
    }

    /// Allocates a buffer of `len` zeros in host memory, with elements of type `f32`. Aborts the
    /// process when the host's memory is exhausted, as `Vec` does.
    pub fn zeroed(len: usize) -> Self {
        Self::zeroed_as(Dtype::F32, len)
    }

    /// Allocates a buffer of `len` zeros in host memory, with elements of type `dtype`. Aborts the
    /// process when the host's memory is exhausted.
    pub fn zeroed_as(dtype: Dtype, len: usize) -> Self {
        if len == 0 {
            return Buf::new(NonNull::<u64>::dangling().cast(), len, dtype, true, None);
        }
        let layout = Self::allocation_layout(len, dtype);
        if layout.size() >= huge_pages::HUGE_PAGE_BYTES {
            let Some((mapping, ptr)) = huge_pages::map_zeroed(layout.size()) else {
                alloc::handle_alloc_error(layout)
            };
            return Buf::new(ptr, len, dtype, true, Some(Arc::new(mapping)));
        }
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc::alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw) else { alloc::handle_alloc_error(layout) };
        Buf::new(ptr, len, dtype, true, None)
    }

    /// Creates a buffer of `len` elements in the GPU memory at `address`, which `owner` allocated
    /// and frees when the buffer is dropped. The address is ignored if `len` is 0.
    pub(crate) fn from_device_allocation(
        owner: Arc<dyn MemoryOwner>,
        address: u64,
        dtype: Dtype,
        len: usize,
    ) -> Self {
        let ptr = NonNull::new(address as *mut u8).unwrap_or(NonNull::<u64>::dangling().cast());
        Buf::new(ptr, len, dtype, false, Some(owner))
    }

    /// Creates a buffer of `len` elements in the host memory at `ptr`, which `owner` allocated and
    /// frees when the buffer is dropped. The memory must be zero and aligned to
    /// [`BUFFER_ALIGNMENT`].
    pub(crate) fn from_host_allocation(
        owner: Arc<dyn MemoryOwner>,
        ptr: NonNull<u8>,
        dtype: Dtype,
        len: usize,
    ) -> Self {
        Buf::new(ptr, len, dtype, true, Some(owner))
    }

    /// Creates a buffer from the `len` elements in host memory at `ptr`, which stay valid as long
    /// as the object `owner` exists. The buffer drops `owner` when it is dropped.
    ///
    /// # Safety
    ///
    /// The elements must be initialized, aligned to their type, and valid as long as `owner` lives.
    /// While a view of the buffer is in use, nothing else may write the elements. While a view that
    /// writes is in use, nothing else may read them either.
    pub unsafe fn from_raw_parts(
        owner: Arc<dyn Send + Sync>,
        ptr: NonNull<u8>,
        dtype: Dtype,
        len: usize,
    ) -> Self {
        /// Keeps the object that owns a buffer's memory alive until the buffer is dropped.
        struct SharedOwner(
            #[allow(dead_code, reason = "held to be dropped with the buffer")] Arc<dyn Send + Sync>,
        );
        impl MemoryOwner for SharedOwner {
            fn release(&self, _: u64, _: usize) {}
        }
        Self::from_host_allocation(Arc::new(SharedOwner(owner)), ptr, dtype, len)
    }

    /// Copies the `f32` elements of `src` to a new buffer in host memory.
    pub fn from_slice(src: &[f32]) -> Self {
        let mut b = Self::zeroed(src.len());
        b.host_slice_mut().copy_from_slice(src);
        b
    }

    /// Copies `src`, which must be in host memory, to a new host buffer with the same element type.
    pub fn from_view(src: View) -> Self {
        let mut b = Self::zeroed_as(src.dtype(), src.len());
        b.view_mut().host_bytes_mut().copy_from_slice(src.host_bytes());
        b
    }

    /// Returns the size and the alignment of host memory for `len` elements of the type `dtype`.
    fn allocation_layout(len: usize, dtype: Dtype) -> alloc::Layout {
        let elements = match dtype {
            Dtype::F32 => alloc::Layout::array::<f32>(len),
            Dtype::Bf16 | Dtype::F16 => alloc::Layout::array::<u16>(len),
        };
        elements.and_then(|l| l.align_to(BUFFER_ALIGNMENT)).expect("buffer length fits the address space")
    }

    /// Returns a read-only view of the whole buffer.
    pub fn view(&self) -> View<'_> {
        View { elements: self.elements, life: PhantomData }
    }

    /// Returns a writable view of the whole buffer.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { elements: self.elements, life: PhantomData }
    }

    /// Returns the buffer's elements, which must be `f32` in host memory, as a slice. Panics
    /// otherwise.
    #[track_caller]
    pub fn host_slice(&self) -> &[f32] {
        self.view().host_slice()
    }

    /// Returns the buffer's elements, which must be `f32` in host memory, as a writable slice.
    /// Panics otherwise.
    #[track_caller]
    pub fn host_slice_mut(&mut self) -> &mut [f32] {
        self.view_mut().host_slice_mut()
    }
}

impl Default for Buf {
    fn default() -> Self {
        Buf::zeroed(0)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let ElementRange { ptr, len, dtype, .. } = self.elements;
        if len == 0 {
            return;
        }
        if let Some(owner) = &self.owner {
            owner.release(ptr as u64, self.elements.byte_len());
        } else {
            // SAFETY: `zeroed_as` allocated it with this layout.
            unsafe { alloc::dealloc(ptr, Self::allocation_layout(len, dtype)) }
        }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf[{} {:?}]", self.len(), self.dtype())
    }
}

/// A borrowed range of a buffer in host or GPU memory, which is read only. Several views of the
/// same elements may exist.
#[derive(Clone, Copy)]
pub struct View<'a> {
    elements: ElementRange,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a shared view only reads, like `&[u8]`.
unsafe impl Send for View<'_> {}
// SAFETY: a shared view only reads, like `&[u8]`.
unsafe impl Sync for View<'_> {}

impl<'a> View<'a> {
    /// Returns true if the elements are in host memory.
    pub fn is_on_host(&self) -> bool {
        self.elements.on_host
    }

    /// Returns the address of the first element, in host or GPU memory.
    pub fn address(&self) -> u64 {
        self.elements.ptr as u64
    }

    /// Returns the part of the view with the indices `r`. Panics if the range is out of bounds.
    pub fn slice(self, r: Range<usize>) -> View<'a> {
        View { elements: self.elements.slice(r), ..self }
    }

    /// Returns the view's elements, which must be `f32` in host memory, as a slice. Panics
    /// otherwise.
    #[track_caller]
    pub fn host_slice(self) -> &'a [f32] {
        // SAFETY: `len` elements of `f32` that outlive 'a.
        unsafe { std::slice::from_raw_parts(self.elements.f32_ptr(), self.len()) }
    }

    /// Returns the bf16 or f16 elements of the view, which must be in host memory, as a slice of
    /// their 16-bit patterns. Panics otherwise.
    #[track_caller]
    pub fn half_bits(self) -> &'a [u16] {
        // SAFETY: `len` aligned elements of 16 bits that outlive 'a.
        unsafe { std::slice::from_raw_parts(self.elements.half_ptr(), self.len()) }
    }

    /// Returns the view's elements, which must be in host memory, as a slice of bytes. Panics if
    /// they are in GPU memory.
    pub fn host_bytes(self) -> &'a [u8] {
        // SAFETY: the elements have no padding and outlive 'a.
        unsafe { std::slice::from_raw_parts(self.elements.host_ptr(), self.elements.byte_len()) }
    }
}

impl<'a> From<&'a [f32]> for View<'a> {
    fn from(s: &'a [f32]) -> Self {
        let ptr = s.as_ptr().cast_mut().cast();
        let elements = ElementRange { ptr, len: s.len(), dtype: Dtype::F32, on_host: true };
        View { elements, life: PhantomData }
    }
}

/// A borrowed range of a buffer in host or GPU memory, which is read and written. No other view of
/// the same elements exists.
pub struct ViewMut<'a> {
    elements: ElementRange,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive view, like `&mut [u8]`.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: an exclusive view, like `&mut [u8]`.
unsafe impl Sync for ViewMut<'_> {}

impl<'a> ViewMut<'a> {
    /// Returns the part of the view with the indices `r`, for reading and writing. Panics if the
    /// range is out of bounds.
    pub fn slice(self, r: Range<usize>) -> ViewMut<'a> {
        ViewMut { elements: self.elements.slice(r), ..self }
    }

    /// Divides the view in two: the elements before index `mid`, and the elements from `mid` on.
    /// Panics if `mid` is out of bounds.
    pub fn split_at(self, mid: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        let (first, second) = (self.elements.slice(0..mid), self.elements.slice(mid..self.len()));
        (ViewMut { elements: first, life: PhantomData }, ViewMut { elements: second, life: PhantomData })
    }

    /// Borrows the part of the view with the indices `r` for writing. The view can be used again
    /// when the borrow ends. Panics if the range is out of bounds.
    pub fn slice_mut(&mut self, r: Range<usize>) -> ViewMut<'_> {
        self.reborrow().slice(r)
    }

    /// Borrows the whole view for reading and writing, so that the caller can use the original view
    /// again afterwards.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { elements: self.elements, life: PhantomData }
    }

    /// Converts the view into a read-only view.
    pub fn into_view(self) -> View<'a> {
        View { elements: self.elements, life: PhantomData }
    }

    /// Borrows the whole view as a read-only view.
    pub fn as_view(&self) -> View<'_> {
        View { elements: self.elements, life: PhantomData }
    }

    /// Returns the view's elements, which must be `f32` in host memory, as a writable slice. Panics
    /// otherwise.
    #[track_caller]
    pub fn host_slice_mut(self) -> &'a mut [f32] {
        // SAFETY: `len` exclusive elements of `f32` that outlive 'a.
        unsafe { std::slice::from_raw_parts_mut(self.elements.f32_ptr(), self.len()) }
    }

    /// Returns the bf16 or f16 elements of the view, which must be in host memory, as a writable
    /// slice of their 16-bit patterns. Panics otherwise.
    #[track_caller]
    pub fn half_bits(self) -> &'a mut [u16] {
        // SAFETY: `len` exclusive aligned elements of 16 bits that outlive 'a.
        unsafe { std::slice::from_raw_parts_mut(self.elements.half_ptr(), self.len()) }
    }

    /// Returns the view's elements, which must be in host memory, as a writable slice of bytes.
    /// Every bit pattern is a valid element. Panics if they are in GPU memory.
    pub fn host_bytes_mut(self) -> &'a mut [u8] {
        // SAFETY: the elements have no padding, any bytes are valid, and the range is exclusive for
        // 'a.
        unsafe { std::slice::from_raw_parts_mut(self.elements.host_ptr(), self.elements.byte_len()) }
    }
}

impl<'a> From<&'a mut [f32]> for ViewMut<'a> {
    fn from(s: &'a mut [f32]) -> Self {
        let ptr = s.as_mut_ptr().cast();
        let elements = ElementRange { ptr, len: s.len(), dtype: Dtype::F32, on_host: true };
        ViewMut { elements, life: PhantomData }
    }
}
