//! Allocates GPU memory from the driver's memory pool or, on a GPU without pools, in blocks that
//! are kept for reuse. Also allocates pinned host memory.
use super::bindings::{
    Address,
    driver_sys::{CU_MEMHOSTALLOC_PORTABLE, CUstream},
};
use super::block_cache::round_block_size;
use super::context::{GpuContext, get_default_pool};
use super::error::{CudaError, Result};
use std::{
    ffi::c_void,
    ptr::{self, NonNull},
    sync::{PoisonError, atomic::Ordering::Relaxed},
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

    /// Allocates `bytes` bytes of GPU memory from the driver's memory pool, for work that is
    /// enqueued on `stream` from now on.
    pub(super) fn allocate_from_pool(&self, bytes: usize, stream: CUstream) -> Result<Address> {
        let at = self.allocate_in_stream_order(bytes, stream)?;
        let used = self.allocated_bytes.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        self.peak_allocated_bytes.fetch_max(used, Relaxed);
        Ok(at)
    }

    /// Allocates `bytes` bytes of GPU memory for later work on `stream`, from the driver's memory
    /// pool if the GPU has one, otherwise from cached blocks.
    fn allocate_in_stream_order(&self, bytes: usize, stream: CUstream) -> Result<Address> {
        let mut at = 0;
        let Some(cache) = &self.block_cache else {
            // SAFETY: writes one address.
            unsafe { self.driver.cuMemAllocAsync(&mut at, bytes, stream) }?;
            return Ok(at);
        };
        let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = cache.take_fitting_block(bytes, stream) {
            return Ok(at);
        }
        let block_bytes = round_block_size(bytes);
        // SAFETY: writes one address.
        unsafe { self.driver.cuMemAlloc_v2(&mut at, block_bytes) }?;
        cache.add_used_block(at, block_bytes);
        Ok(at)
    }

    /// Gives all free blocks that were kept for reuse on a GPU without memory pools back to the
    /// driver. All work that uses them must be complete.
    pub(super) fn free_cached_blocks(&self) {
        let Some(cache) = &self.block_cache else { return };
        for at in cache.lock().unwrap_or_else(PoisonError::into_inner).take_free_blocks() {
            // SAFETY: the driver allocated the block, which is freed once. An error here belongs to
            // earlier work, and the next call reports it.
            let _ = unsafe { (self.driver.cuMemFree_v2)(at) };
        }
    }

    /// Frees `bytes` bytes at the GPU address `at` once the work that is enqueued on `stream` so
    /// far is complete. The driver's memory pool or, on a GPU without pools, the block cache keeps
    /// them for reuse.
    pub(super) fn free_in_stream_order(&self, at: Address, bytes: usize, stream: CUstream) {
        self.allocated_bytes.fetch_sub(bytes as u64, Relaxed);
        if let Some(cache) = &self.block_cache {
            cache.lock().unwrap_or_else(PoisonError::into_inner).mark_free(at, stream);
            return;
        }
        // SAFETY: the address came from the pool and is freed once. An error here belongs to
        // earlier work, and the next call reports it.
        let _ = unsafe { (self.driver.cuMemFreeAsync)(at, stream) };
    }

    /// Returns free GPU memory to the operating system, from the driver's memory pool or, on a GPU
    /// without pools, from the blocks kept for reuse. All work that uses that memory must be
    /// complete.
    pub(super) fn trim_pool(&self) -> Result<()> {
        if self.block_cache.is_some() {
            self.free_cached_blocks();
            return Ok(());
        }
        let pool = get_default_pool(&self.driver, self.device)?;
        // SAFETY: the pool belongs to the device.
        unsafe { self.driver.cuMemPoolTrimTo(pool, 0) }
    }

    /// Returns the largest number of bytes of GPU memory that this process had allocated at one
    /// time.
    pub(super) fn peak_allocated_bytes(&self) -> u64 {
        self.peak_allocated_bytes.load(Relaxed)
    }

    /// Makes a GPU call, and repeats it once after returning freed memory to the operating system
    /// if the GPU has no free memory. Waits for all streams before the memory is returned. No
    /// stream may be capturing.
    pub(super) fn retry_after_trim<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        match call() {
            Err(error) if error.is_out_of_memory() => {
                self.synchronize_all_streams()?;
                self.trim_pool()?;
                call()
            }
            result => result,
        }
    }

    /// Allocates `bytes` bytes of uninitialized pinned host memory; a request for zero bytes gets
    /// one byte.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.make_current()?;
        let mut at = ptr::null_mut();
        // SAFETY: writes one address.
        unsafe { self.driver.cuMemHostAlloc(&mut at, bytes.max(1), CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(|error| error.with_failed_function(format!("cuMemHostAlloc of {bytes} bytes")))?;
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
