//! Memory of a device: owned buffers and the ranges of them that ops read and write.
//!
//! A view is an address, a length, an element type and a lifetime, so the same op signatures serve host and device memory
//! and every precision. On the CPU backend a view of `f32` *is* a slice: [`View::host`] costs nothing.
use crate::huge;
use std::{alloc, marker::PhantomData, ops::Range, ptr::NonNull, sync::Arc};

/// Alignment of every buffer, bytes: one cache line, one AVX-512 register.
pub const ALIGN: usize = 64;

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of an `f32`: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE half precision: 5 bits of exponent, 10 of mantissa.
    F16,
}

impl Dtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

/// Memory that isn't the allocator's, to which buffers on it are given back.
pub(crate) trait Memory: Send + Sync {
    /// Takes back what a buffer had: its address and bytes.
    fn take_back(&self, address: u64, bytes: usize);
}

/// An owned, zero-initialised buffer: on the host (64-byte aligned) or in the memory of a card.
pub struct Buf {
    ptr: NonNull<u8>,
    len: usize,
    dtype: Dtype,
    on_host: bool,
    /// Whose the memory is. None: this program's own allocator.
    home: Option<Arc<dyn Memory>>,
}

// SAFETY: Buf owns its memory exclusively, as Vec<f32> does.
unsafe impl Send for Buf {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buf {}

impl Buf {
    /// `len` zeros of `f32`. Aborts the process when memory is exhausted, as Vec does; sizes are judged beforehand by
    /// `launch plan`.
    pub fn zeroed(len: usize) -> Self {
        Self::zeroed_as(Dtype::F32, len)
    }

    /// `len` zeros of this type.
    pub fn zeroed_as(dtype: Dtype, len: usize) -> Self {
        if len == 0 {
            return Buf { ptr: NonNull::<u64>::dangling().cast(), len, dtype, on_host: true, home: None };
        }
        let layout = Self::layout(len, dtype);
        if layout.size() >= huge::PAGE {
            let Some((home, ptr)) = huge::zeroed(layout.size()) else { alloc::handle_alloc_error(layout) };
            return Buf { ptr, len, dtype, on_host: true, home: Some(home) };
        }
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc::alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw) else { alloc::handle_alloc_error(layout) };
        Buf { ptr, len, dtype, on_host: true, home: None }
    }

    /// A buffer over memory of a card that `home` gave for it; no elements need no memory.
    pub(crate) fn on(home: Arc<dyn Memory>, address: u64, dtype: Dtype, len: usize) -> Self {
        let ptr = NonNull::new(address as *mut u8).unwrap_or(NonNull::<u64>::dangling().cast());
        Buf { ptr, len, dtype, on_host: false, home: Some(home) }
    }

    /// The same over memory of the host that `home` gave for it: zeros, aligned as every buffer.
    pub(crate) fn on_host_of(home: Arc<dyn Memory>, ptr: NonNull<u8>, dtype: Dtype, len: usize) -> Self {
        Buf { ptr, len, dtype, on_host: true, home: Some(home) }
    }

    /// `len` elements of the host's memory at `ptr`, which `home` keeps for as long as the buffer lives.
    ///
    /// # Safety
    /// They are valid, aligned to their type, and nobody else reads or writes them while a view of the buffer is used.
    pub unsafe fn kept_by(home: Arc<dyn Send + Sync>, ptr: NonNull<u8>, dtype: Dtype, len: usize) -> Self {
        struct Kept(#[allow(dead_code)] Arc<dyn Send + Sync>); // dropped with the buffer, which is all that it is for
        impl Memory for Kept {
            fn take_back(&self, _: u64, _: usize) {}
        }
        Self::on_host_of(Arc::new(Kept(home)), ptr, dtype, len)
    }

    /// A copy of `src`.
    pub fn from_slice(src: &[f32]) -> Self {
        let mut b = Self::zeroed(src.len());
        b.host_mut().copy_from_slice(src);
        b
    }

    /// A copy of `src`, of its type.
    pub fn from_view(src: View) -> Self {
        let mut b = Self::zeroed_as(src.dtype, src.len);
        b.view_mut().bytes().copy_from_slice(src.bytes());
        b
    }

    fn layout(len: usize, dtype: Dtype) -> alloc::Layout {
        let elements = match dtype {
            Dtype::F32 => alloc::Layout::array::<f32>(len),
            Dtype::Bf16 | Dtype::F16 => alloc::Layout::array::<u16>(len),
        };
        elements.and_then(|l| l.align_to(ALIGN)).expect("buffer length fits the address space")
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No element?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// All of it, to read.
    pub fn view(&self) -> View<'_> {
        View {
            ptr: self.ptr.as_ptr(),
            len: self.len,
            dtype: self.dtype,
            on_host: self.on_host,
            life: PhantomData,
        }
    }

    /// All of it, to write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut {
            ptr: self.ptr.as_ptr(),
            len: self.len,
            dtype: self.dtype,
            on_host: self.on_host,
            life: PhantomData,
        }
    }

    /// The elements of a buffer of `f32`, host memory only.
    #[track_caller]
    pub fn host(&self) -> &[f32] {
        self.view().host()
    }

    /// The elements of a buffer of `f32`, host memory only.
    #[track_caller]
    pub fn host_mut(&mut self) -> &mut [f32] {
        self.view_mut().host()
    }
}

impl Default for Buf {
    fn default() -> Self {
        Buf::zeroed(0)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        if let Some(home) = &self.home {
            home.take_back(self.ptr.as_ptr() as u64, self.len * self.dtype.size());
        } else {
            // SAFETY: allocated in `zeroed_as` with this layout.
            unsafe { alloc::dealloc(self.ptr.as_ptr(), Self::layout(self.len, self.dtype)) }
        }
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf[{} {:?}]", self.len, self.dtype)
    }
}

/// Stops the program when memory of a card is used as the host's.
#[track_caller]
fn expect_host(on_host: bool) {
    assert!(on_host, "a buffer in a GPU's memory is used as the host's");
}

/// Stops the program when elements are asked for as a type that they are not.
#[track_caller]
fn expect_dtype(is: bool, dtype: Dtype, wanted: &str) {
    assert!(is, "a buffer of {dtype:?} is used as {wanted}");
}

/// A range of a buffer, to read.
#[derive(Clone, Copy)]
pub struct View<'a> {
    ptr: *const u8,
    len: usize,
    dtype: Dtype,
    on_host: bool,
    life: PhantomData<&'a [u8]>,
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

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Is it the host's memory?
    pub fn is_on_host(&self) -> bool {
        self.on_host
    }

    /// Where it begins, in whichever memory that is.
    pub fn address(&self) -> u64 {
        self.ptr as u64
    }

    /// A part of it. Panics when the range is outside, as slicing does.
    pub fn slice(self, r: Range<usize>) -> View<'a> {
        assert!(r.start <= r.end && r.end <= self.len, "view range {r:?} outside 0..{}", self.len);
        // SAFETY: inside the allocation.
        View { ptr: unsafe { self.ptr.add(r.start * self.dtype.size()) }, len: r.len(), ..self }
    }

    /// The elements of a view of `f32`, host memory only.
    #[track_caller]
    pub fn host(self) -> &'a [f32] {
        expect_host(self.on_host);
        expect_dtype(self.dtype == Dtype::F32, self.dtype, "f32");
        // SAFETY: made from f32s of this length that outlive 'a.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len) }
    }

    /// The elements of a 16-bit view as they are, host memory only.
    #[track_caller]
    pub fn halves(self) -> &'a [u16] {
        expect_host(self.on_host);
        expect_dtype(self.dtype != Dtype::F32, self.dtype, "16 bits");
        // SAFETY: made from a 16-bit buffer of this length that outlives 'a; buffers are aligned.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len) }
    }

    /// Its bytes, host memory only.
    pub fn bytes(self) -> &'a [u8] {
        expect_host(self.on_host);
        // SAFETY: elements have no padding and outlive 'a.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len * self.dtype.size()) }
    }
}

impl<'a> From<&'a [f32]> for View<'a> {
    fn from(s: &'a [f32]) -> Self {
        View { ptr: s.as_ptr().cast(), len: s.len(), dtype: Dtype::F32, on_host: true, life: PhantomData }
    }
}

/// A range of a buffer, to write; exclusive like `&mut [f32]`.
pub struct ViewMut<'a> {
    ptr: *mut u8,
    len: usize,
    dtype: Dtype,
    on_host: bool,
    life: PhantomData<&'a mut [u8]>,
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

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// A part of it. Panics when the range is outside, as slicing does.
    pub fn slice(self, r: Range<usize>) -> ViewMut<'a> {
        assert!(r.start <= r.end && r.end <= self.len, "view range {r:?} outside 0..{}", self.len);
        // SAFETY: inside the allocation.
        ViewMut { ptr: unsafe { self.ptr.add(r.start * self.dtype.size()) }, len: r.len(), ..self }
    }

    /// Two parts, split at `mid`.
    pub fn split_at(self, mid: usize) -> (ViewMut<'a>, ViewMut<'a>) {
        assert!(mid <= self.len, "split at {mid} outside 0..{}", self.len);
        // SAFETY: inside the allocation; the parts don't overlap.
        let behind = unsafe { self.ptr.add(mid * self.dtype.size()) };
        let rest = ViewMut {
            ptr: behind,
            len: self.len - mid,
            dtype: self.dtype,
            on_host: self.on_host,
            life: PhantomData,
        };
        (ViewMut { len: mid, ..self }, rest)
    }

    /// A part of it for a shorter time.
    pub fn part(&mut self, r: Range<usize>) -> ViewMut<'_> {
        self.reborrow().slice(r)
    }

    /// The same range for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { ptr: self.ptr, len: self.len, dtype: self.dtype, on_host: self.on_host, life: PhantomData }
    }

    /// The same range, only to read from now on.
    pub fn into_view(self) -> View<'a> {
        View { ptr: self.ptr, len: self.len, dtype: self.dtype, on_host: self.on_host, life: PhantomData }
    }

    /// The same range, to read.
    pub fn as_view(&self) -> View<'_> {
        View { ptr: self.ptr, len: self.len, dtype: self.dtype, on_host: self.on_host, life: PhantomData }
    }

    /// The elements of a view of `f32`, host memory only.
    #[track_caller]
    pub fn host(self) -> &'a mut [f32] {
        expect_host(self.on_host);
        expect_dtype(self.dtype == Dtype::F32, self.dtype, "f32");
        // SAFETY: made from exclusive f32s of this length that outlive 'a.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.len) }
    }

    /// The elements of a 16-bit view as they are, host memory only.
    #[track_caller]
    pub fn halves(self) -> &'a mut [u16] {
        expect_host(self.on_host);
        expect_dtype(self.dtype != Dtype::F32, self.dtype, "16 bits");
        // SAFETY: made from an exclusive 16-bit buffer of this length that outlives 'a; buffers are aligned.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.cast(), self.len) }
    }

    /// Its bytes, host memory only; every pattern of bits is an element.
    pub fn bytes(self) -> &'a mut [u8] {
        expect_host(self.on_host);
        // SAFETY: elements have no padding, any bytes are elements, and the range is exclusive for 'a.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len * self.dtype.size()) }
    }
}

impl<'a> From<&'a mut [f32]> for ViewMut<'a> {
    fn from(s: &'a mut [f32]) -> Self {
        ViewMut {
            ptr: s.as_mut_ptr().cast(),
            len: s.len(),
            dtype: Dtype::F32,
            on_host: true,
            life: PhantomData,
        }
    }
}
