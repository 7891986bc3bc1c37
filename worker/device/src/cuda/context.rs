//! [`GpuContext`]: one open GPU with its context and streams, and copies and fills of its memory.
use super::bindings::{Address, DriverApi, Handle, NON_BLOCKING};
use super::error::Result;
use super::graphs::Graphs;
use super::library_search::LibrarySearchPaths;
use super::properties::{GpuProperties, open_driver};
use std::{
    cell::Cell,
    ffi::c_int,
    ptr,
    sync::{Arc, atomic::AtomicU64},
};

/// Lowest supported compute capability: Ampere. Older GPUs have no bf16.
const MIN_CAPABILITY: (u32, u32) = (8, 0);

/// One open GPU, with its context and streams.
///
/// A thread's calls take effect in their order, in the main stream or in the stream that
/// [`GpuContext::create_thread_stream`] created for the thread.
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
    /// Calls that wait to be issued to the main stream, and CUDA graphs for it.
    pub(super) graphs: Graphs,
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
    pub(super) fn open(paths: &LibrarySearchPaths, index: usize) -> Result<Arc<GpuContext>> {
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
        Ok(Arc::new(GpuContext {
            driver,
            device,
            context,
            main_stream: stream,
            download_stream: downloads,
            upload_stream: uploads,
            properties,
            graphs: Graphs::default(),
            allocated_bytes: AtomicU64::new(0),
            peak_allocated_bytes: AtomicU64::new(0),
        }))
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

    /// Enqueues a fill of `bytes` bytes at the GPU address `at` with zeros on this thread's stream.
    pub(super) fn enqueue_zero_fill(&self, at: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enqueue(|batch| batch.push_fill(at, bytes), |stream| self.issue_fill(at, bytes, stream))
    }

    /// Issues a fill of `bytes` bytes at the GPU address `at` with zeros to `stream` immediately.
    pub(super) fn issue_fill(&self, at: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller owns the range.
        let status = unsafe { (self.driver.cuMemsetD8Async)(at, 0, bytes, stream) };
        self.driver.check_status("cuMemsetD8Async", status)
    }

    /// Enqueues a copy of `bytes` from the host to the GPU address `at` on this thread's stream.
    ///
    /// If `bytes` is in pinned memory, it is read when the copy runs. The caller must not write or
    /// free it before the copy is complete. Otherwise the driver reads `bytes` before this call
    /// returns.
    pub(super) fn enqueue_upload(&self, at: Address, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's range at `at` is as long as `bytes`.
        let status = self.with_stream(|stream| unsafe {
            (self.driver.cuMemcpyHtoDAsync_v2)(at, bytes.as_ptr().cast(), bytes.len(), stream)
        })?;
        self.driver.check_status("cuMemcpyHtoDAsync", status)
    }

    /// Copies from the GPU address `at` to `bytes` on the host, and blocks until the copy is
    /// complete.
    pub(super) fn download_blocking(&self, bytes: &mut [u8], at: Address) -> Result<()> {
        if !bytes.is_empty() {
            // SAFETY: the caller's range at `at` is as long as `bytes`.
            let status = self.with_stream(|stream| unsafe {
                (self.driver.cuMemcpyDtoHAsync_v2)(bytes.as_mut_ptr().cast(), at, bytes.len(), stream)
            })?;
            self.driver.check_status("cuMemcpyDtoHAsync", status)?;
        }
        self.synchronize()
    }

    /// Enqueues a copy of `bytes` bytes within the GPU's memory on this thread's stream. The ranges
    /// must not overlap.
    pub(super) fn enqueue_copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enqueue(
            |batch| batch.push_copy(to, from, bytes),
            |stream| self.issue_copy(to, from, bytes, stream),
        )
    }

    /// Issues a copy of `bytes` bytes within the GPU's memory to `stream` immediately.
    pub(super) fn issue_copy(&self, to: Address, from: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: the caller owns both ranges.
        let status = unsafe { (self.driver.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) };
        self.driver.check_status("cuMemcpyDtoDAsync", status)
    }

    /// Blocks until all work of this thread's stream is complete. Errors of that work are returned
    /// here at the latest.
    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives.
        let status = self.with_stream(|stream| unsafe { (self.driver.cuStreamSynchronize)(stream) })?;
        self.driver.check_status("work on the GPU", status)
    }
}

impl Drop for GpuContext {
    fn drop(&mut self) {
        if self.make_current().is_ok() {
            self.discard_graphs();
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
