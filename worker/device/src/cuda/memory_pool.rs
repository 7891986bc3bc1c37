//! Allocates GPU memory from the driver's memory pool, and pinned host memory.
use super::bindings::{
    Address,
    driver_sys::{CU_MEMHOSTALLOC_PORTABLE, CUstream},
};
use super::context::{GpuContext, get_default_pool};
use super::error::{CudaError, Result};
use std::{
    ffi::c_void,
    ptr::{self, NonNull},
    sync::atomic::Ordering::Relaxed,
};

impl GpuContext {
    /// Returns the number of free bytes and the total number of bytes of the GPU's memory.
    pub(super) fn query_memory_info(&self) -> Result<(usize, usize)> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { self.driver.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free, total))
    }

    /// Allocates `bytes` bytes from the driver's memory pool, in the order of `stream`.
    pub(super) fn allocate_from_pool(&self, bytes: usize, stream: CUstream) -> Result<Address> {
        let mut at = 0;
        // SAFETY: writes one address.
        unsafe { self.driver.cuMemAllocAsync(&mut at, bytes, stream) }?;
        let used = self.allocated_bytes.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        self.peak_allocated_bytes.fetch_max(used, Relaxed);
        Ok(at)
    }

    /// Returns `bytes` bytes at the address `at` to the driver's memory pool, in the order of
    /// `stream`.
    pub(super) fn free_to_pool(&self, at: Address, bytes: usize, stream: CUstream) {
        self.allocated_bytes.fetch_sub(bytes as u64, Relaxed);
        // SAFETY: the address came from the pool and is freed once. An error here belongs to
        // earlier work, and the next call reports it.
        let _ = unsafe { (self.driver.cuMemFreeAsync)(at, stream) };
    }

    /// Returns the free memory of the driver's memory pool to the operating system.
    pub(super) fn trim_pool(&self) -> Result<()> {
        let pool = get_default_pool(&self.driver, self.device)?;
        // SAFETY: the pool belongs to the device.
        unsafe { self.driver.cuMemPoolTrimTo(pool, 0) }
    }

    /// Returns the largest number of bytes of GPU memory that this process had allocated at one
    /// time.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak_allocated_bytes.load(Relaxed)
    }

    /// Allocates `bytes` bytes of uninitialized pinned host memory, at least one byte.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.make_current()?;
        let mut at = ptr::null_mut();
        // SAFETY: writes one address.
        unsafe { self.driver.cuMemHostAlloc(&mut at, bytes.max(1), CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| error.with_function(format!("cuMemHostAlloc of {bytes} bytes")))?;
        NonNull::new(at.cast()).ok_or_else(|| CudaError::Call {
            function: "cuMemHostAlloc".to_owned(),
            status: 0,
            message: "returned no address".to_owned(),
        })
    }

    /// Frees pinned host memory that [`GpuContext::allocate_pinned`] returned. No copy may use the
    /// memory any more.
    pub(super) fn free_pinned(&self, at: Address) {
        if self.make_current().is_ok() {
            // SAFETY: freed once. Errors cannot be handled here.
            let _ = unsafe { (self.driver.cuMemFreeHost)(at as *mut c_void) };
        }
    }
}
