//! GPU memory from the driver's pool, and pinned host memory.
use super::bindings::{Address, DriverApi, Handle, MEMORY_POOLS, OUT_OF_MEMORY, PORTABLE, RELEASE_THRESHOLD};
use super::context::GpuContext;
use super::error::{CudaError, Result};
use super::graphs::{GraphState, PoolBlock};
use super::properties::GpuProperties;
use crate::storage::current_alloc_label;
use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
    sync::{Arc, atomic::Ordering::Relaxed},
};

impl GpuContext {
    /// Returns the number of free bytes and the total number of bytes of the GPU's memory.
    pub(super) fn query_memory_info(&self) -> Result<(usize, usize)> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        let status = unsafe { (self.driver.cuMemGetInfo_v2)(&mut free, &mut total) };
        self.driver.check_status("cuMemGetInfo", status)?;
        Ok((free, total))
    }

    /// Allocates uninitialized memory, in the order of this thread's stream. A request for no bytes
    /// allocates nothing. Fails with [`CudaError::OutOfMemory`] if the memory is full, also after
    /// free memory of the pool was returned to the system.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<DeviceMemory> {
        let memory = |at| DeviceMemory { gpu: self.clone(), at, bytes, is_scratch: false };
        if bytes == 0 {
            return Ok(memory(0));
        }
        self.make_current()?;
        let allocate = || {
            // Held so that no other thread issues to the stream. The recorded calls need not be
            // flushed, because they do not use this memory.
            let _recording = self.lock_if_recording();
            self.allocate_from_pool(bytes, self.stream())
        };
        let mut result = allocate();
        if result == Err(OUT_OF_MEMORY) {
            // The pool may hold enough free memory, but in ranges that are too small.
            self.release_idle_scratch();
            self.synchronize()?;
            self.driver.trim_pool(self.device)?;
            result = allocate();
        }
        if result == Err(OUT_OF_MEMORY) {
            let (free, total) = self.query_memory_info()?;
            let (used, label) = (self.allocated_bytes.load(Relaxed), current_alloc_label());
            return Err(CudaError::OutOfMemory { requested: bytes, free, total, used, label });
        }
        result
            .map(memory)
            .or_else(|status| self.driver.check_status("cuMemAllocAsync", status).map(|()| memory(0)))
    }

    /// Allocates uninitialized memory for the duration of one op. The memory must be dropped in the
    /// stream in which it is used. With CUDA graphs on, the same sequence of requests in the main
    /// stream gets the same addresses.
    pub(super) fn allocate_scratch(self: &Arc<Self>, bytes: usize) -> Result<DeviceMemory> {
        if bytes > 0
            && let Some(mut state) = self.lock_if_recording()
        {
            self.make_current()?;
            if let Some(at) = state.allocate_scratch(self, bytes)? {
                return Ok(DeviceMemory { gpu: self.clone(), at, bytes, is_scratch: true });
            }
        }
        self.allocate(bytes)
    }

    /// Allocates memory from the driver's pool, in the order of `stream`. Fails with the driver's
    /// status code.
    fn allocate_from_pool(&self, bytes: usize, stream: Handle) -> std::result::Result<Address, c_int> {
        let mut at = 0;
        // SAFETY: writes one address.
        let status = unsafe { (self.driver.cuMemAllocAsync)(&mut at, bytes, stream) };
        if status != 0 {
            return Err(status);
        }
        let used = self.allocated_bytes.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        self.peak_allocated_bytes.fetch_max(used, Relaxed);
        Ok(at)
    }

    /// Frees memory from [`GpuContext::allocate`] after the work that this thread has enqueued on
    /// its stream so far.
    pub(super) fn free(&self, at: Address, bytes: usize) {
        if self.make_current().is_ok() {
            let mut recording = self.lock_if_recording();
            if let Some(state) = &mut recording {
                state.flush_deferring_error(self);
            }
            self.free_to_pool(at, bytes, self.stream());
        }
    }

    /// Returns `bytes` bytes at `at` to the driver's pool, in the order of `stream`.
    pub(super) fn free_to_pool(&self, at: Address, bytes: usize, stream: Handle) {
        self.allocated_bytes.fetch_sub(bytes as u64, Relaxed);
        // SAFETY: the address came from the pool and is freed once. An error here belongs to
        // earlier work, and the next call reports it.
        let _ = unsafe { (self.driver.cuMemFreeAsync)(at, stream) };
    }

    /// Returns the largest number of bytes that this process had allocated at one time.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak_allocated_bytes.load(Relaxed)
    }

    /// Allocates uninitialized pinned memory on the host, at least one byte.
    pub(super) fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.make_current()?;
        let mut at = ptr::null_mut();
        // SAFETY: writes one address.
        let status = unsafe { (self.driver.cuMemHostAlloc)(&mut at, bytes.max(1), PORTABLE) };
        self.driver.check_status(&format!("cuMemHostAlloc of {bytes} bytes"), status)?;
        NonNull::new(at.cast()).ok_or_else(|| CudaError::Call {
            function: "cuMemHostAlloc".to_owned(),
            status: 0,
            message: "returned no address".to_owned(),
        })
    }

    /// Frees pinned host memory from [`GpuContext::allocate_pinned`]. No copy may use the memory
    /// any more.
    pub(super) fn free_pinned(&self, at: Address) {
        if self.make_current().is_ok() {
            // SAFETY: freed once. Errors cannot be handled here.
            let _ = unsafe { (self.driver.cuMemFreeHost)(at as *mut c_void) };
        }
    }

    /// Returns unused scratch memory of the main stream to the driver's pool.
    fn release_idle_scratch(&self) {
        self.graphs.lock().release_idle_blocks(self);
    }
}

impl GraphState {
    /// Allocates a range of scratch memory, and a new block if no block has enough space. Returns
    /// `None` if the GPU has no memory left for another block.
    fn allocate_scratch(&mut self, gpu: &GpuContext, bytes: usize) -> Result<Option<Address>> {
        if let Some(at) = self.arena.allocate(bytes) {
            return Ok(Some(at));
        }
        let (replaced, block_bytes) = self.arena.plan_growth(bytes);
        if !replaced.is_empty() {
            self.flush_batch(gpu)?; // recorded calls use the replaced blocks
        }
        for block in replaced {
            gpu.free_to_pool(block.at, block.bytes, gpu.main_stream);
        }
        match gpu.allocate_from_pool(block_bytes, gpu.main_stream) {
            Ok(at) => self.arena.add_block(PoolBlock { at, bytes: block_bytes }),
            Err(OUT_OF_MEMORY) => return Ok(None),
            Err(status) => return gpu.driver.check_status("cuMemAllocAsync", status).map(|()| None),
        }
        Ok(self.arena.allocate(bytes))
    }

    /// Frees a range of scratch memory. With graphs off, also returns unused blocks to the driver's
    /// pool.
    fn free_scratch_range(&mut self, gpu: &GpuContext, at: Address) {
        self.arena.free_range(at);
        if !self.is_on() {
            self.release_idle_blocks(gpu);
        }
    }

    /// Returns the blocks of scratch memory that are not in use to the driver's pool.
    pub(super) fn release_idle_blocks(&mut self, gpu: &GpuContext) {
        let idle = self.arena.take_idle_blocks();
        if !idle.is_empty() {
            self.flush_deferring_error(gpu);
        }
        for block in idle {
            gpu.free_to_pool(block.at, block.bytes, gpu.main_stream);
        }
    }
}

impl DriverApi {
    /// Configures the driver's memory pool to keep freed memory. After the first steps, no
    /// allocation then reaches the operating system. Fails if the GPU has no memory pools.
    pub(super) fn set_pool_to_retain_memory(&self, device: c_int, properties: &GpuProperties) -> Result<()> {
        if self.query_attribute(device, MEMORY_POOLS)? == 0 {
            return Err(
                properties.unsupported_error("memory pools (cuMemAllocAsync)", "a GPU that is not virtual")
            );
        }
        let (pool, mut unlimited) = (self.get_default_pool(device)?, u64::MAX);
        // SAFETY: the value of this attribute is a 64-bit integer.
        let status =
            unsafe { (self.cuMemPoolSetAttribute)(pool, RELEASE_THRESHOLD, (&raw mut unlimited).cast()) };
        self.check_status("cuMemPoolSetAttribute", status)
    }

    /// Returns the free memory of the driver's pool to the operating system.
    fn trim_pool(&self, device: c_int) -> Result<()> {
        let pool = self.get_default_pool(device)?;
        // SAFETY: the pool belongs to the device.
        self.check_status("cuMemPoolTrimTo", unsafe { (self.cuMemPoolTrimTo)(pool, 0) })
    }

    /// Returns the driver's default memory pool of the device.
    fn get_default_pool(&self, device: c_int) -> Result<Handle> {
        let mut pool = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.cuDeviceGetDefaultMemPool)(&mut pool, device) };
        self.check_status("cuDeviceGetDefaultMemPool", status).map(|()| pool)
    }
}

/// A range of GPU memory. Dropping it frees the memory.
pub(super) struct DeviceMemory {
    gpu: Arc<GpuContext>,
    at: Address,
    bytes: usize,
    /// True if the memory is a range of the main stream's scratch memory.
    is_scratch: bool,
}

impl DeviceMemory {
    /// Returns the GPU address of the range. It is 0 if there are no bytes.
    pub(super) fn address(&self) -> Address {
        self.at
    }

    /// Gives up ownership and returns the GPU address. The caller must free the memory with
    /// [`GpuContext::free`]. Must not be called for scratch memory.
    pub(super) fn into_address(mut self) -> Address {
        self.bytes = 0;
        self.at
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.is_scratch {
            self.gpu.graphs.lock().free_scratch_range(&self.gpu, self.at);
        } else if self.bytes > 0 {
            self.gpu.free(self.at, self.bytes);
        }
    }
}
