//! GPU memory of the driver's pool, and pinned host memory.
use super::bindings::{Address, DriverApi, Handle, MEMORY_POOLS, PORTABLE, RELEASE_THRESHOLD};
use super::context::GpuContext;
use super::error::{CudaError, Result};
use super::properties::GpuProperties;
use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
    sync::atomic::Ordering::Relaxed,
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

    /// Allocates memory from the driver's pool, in the order of `stream`. Fails with the driver's
    /// status code.
    pub(super) fn allocate_from_pool(
        &self,
        bytes: usize,
        stream: Handle,
    ) -> std::result::Result<Address, c_int> {
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
    pub(super) fn trim_pool(&self, device: c_int) -> Result<()> {
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
