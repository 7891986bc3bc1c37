//! [`GpuContext`]: the context and streams of one open GPU, and calls that are issued to a stream
//! immediately.
use super::bindings::{Address, DriverApi, Handle, NON_BLOCKING};
use super::error::Result;
use super::library_search::LibrarySearchPaths;
use super::properties::{GpuProperties, open_driver};
use std::{cell::Cell, ffi::c_int, ptr, sync::atomic::AtomicU64};

/// Lowest supported compute capability: Ampere. Older GPUs have no bf16.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// Context and streams of one open GPU.
pub(super) struct GpuContext {
    pub(super) driver: DriverApi,
    pub(super) device: c_int,
    context: Handle,
    /// The main stream, used by all threads that have no separate stream.
    pub(super) main_stream: Handle,
    /// The stream of asynchronous copies to the host.
    pub(super) download_stream: Handle,
    /// The stream of asynchronous copies from the host.
    pub(super) upload_stream: Handle,
    pub(super) properties: GpuProperties,
    /// Bytes of GPU memory that this process has allocated now.
    pub(super) allocated_bytes: AtomicU64,
    /// The largest value of `allocated_bytes` so far.
    pub(super) peak_allocated_bytes: AtomicU64,
}

// SAFETY: the driver accepts calls from any thread; handles are only passed to it.
unsafe impl Send for GpuContext {}
// SAFETY: as for Send.
unsafe impl Sync for GpuContext {}

thread_local! {
    /// The CUDA context that is current in this thread; null if none was made current.
    static CURRENT_CONTEXT: Cell<Handle> = const { Cell::new(ptr::null_mut()) };
}

impl GpuContext {
    /// Opens the GPU with this index among those that the driver shows this process. Fails if the
    /// GPU is older than Ampere.
    pub(super) fn open(paths: &LibrarySearchPaths, index: usize) -> Result<GpuContext> {
        let (driver, version, driver_path) = open_driver(paths)?;
        let device = driver.get_device(index)?;
        let properties = driver.query_properties(device, index, version, driver_path)?;
        if properties.capability < MIN_CAPABILITY {
            return Err(properties.unsupported_error("training", "sm_80 (Ampere) or newer"));
        }
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: writes one handle.
        driver.check_status("cuDevicePrimaryCtxRetain", unsafe {
            (driver.cuDevicePrimaryCtxRetain)(&mut context, device)
        })?;
        // SAFETY: the context was just retained.
        driver.check_status("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(context) })?;
        CURRENT_CONTEXT.set(context);
        driver.set_pool_to_retain_memory(device, &properties)?;
        // SAFETY: writes one handle.
        let status = unsafe { (driver.cuStreamCreate)(&mut stream, NON_BLOCKING) };
        driver.check_status("cuStreamCreate", status)?;
        let (downloads, uploads) = (driver.create_stream(0)?, driver.create_stream(0)?);
        Ok(GpuContext {
            driver,
            device,
            context,
            main_stream: stream,
            download_stream: downloads,
            upload_stream: uploads,
            properties,
            allocated_bytes: AtomicU64::new(0),
            peak_allocated_bytes: AtomicU64::new(0),
        })
    }

    /// Makes the GPU's context current in the calling thread, which the driver's functions require.
    pub(super) fn make_current(&self) -> Result<()> {
        if CURRENT_CONTEXT.get() != self.context {
            // SAFETY: the context lives as long as self.
            let status = unsafe { (self.driver.cuCtxSetCurrent)(self.context) };
            self.driver.check_status("cuCtxSetCurrent", status)?;
            CURRENT_CONTEXT.set(self.context);
        }
        Ok(())
    }

    /// Issues a fill of `bytes` bytes at the GPU address `at` with zeros to `stream` immediately.
    pub(super) fn issue_fill(&self, at: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller owns the range.
        let status = unsafe { (self.driver.cuMemsetD8Async)(at, 0, bytes, stream) };
        self.driver.check_status("cuMemsetD8Async", status)
    }

    /// Issues a copy of `bytes` bytes within the GPU's memory to `stream` immediately.
    pub(super) fn issue_copy(&self, to: Address, from: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller owns both ranges.
        let status = unsafe { (self.driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) };
        self.driver.check_status("cuMemcpyDtoDAsync", status)
    }
}

impl Drop for GpuContext {
    fn drop(&mut self) {
        if self.make_current().is_ok() {
            // SAFETY: each handle is released once. Errors cannot be handled here.
            unsafe {
                for stream in [self.download_stream, self.upload_stream, self.main_stream] {
                    let _ = (self.driver.cuStreamSynchronize)(stream);
                    let _ = (self.driver.cuStreamDestroy_v2)(stream);
                }
                let _ = (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
            }
            CURRENT_CONTEXT.set(ptr::null_mut());
        }
    }
}
