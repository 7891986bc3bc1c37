//! The CUDA context and streams of one open GPU ([`GpuContext`]), and calls that are issued to the
//! GPU immediately, not recorded for a CUDA graph.
use super::bindings::{
    Address, CaptureInfoFn, DriverApi, DriverGraphsApi,
    driver_sys::{
        CUcontext, CUdevice, CUdevice_attribute, CUmemPool_attribute, CUmemoryPool, CUstream, CUstream_flags,
    },
};
use super::block_cache::BlockCache;
use super::error::Result;
use super::library_search::LibrarySearchPaths;
use super::properties::{GpuProperties, get_device, open_driver, query_attribute, query_properties};
use std::{
    cell::Cell,
    ffi::{c_int, c_uint},
    ptr,
    sync::{Mutex, atomic::AtomicU64},
};

/// The lowest compute capability of a supported GPU: 8.0 (Ampere). Older GPUs have no bf16.
const MIN_CAPABILITY: (u32, u32) = (8, 0);
/// Text that an error shows in place of a function's name if work on the GPU failed after the host
/// had enqueued it.
pub(super) const GPU_WORK_LABEL: &str = "work on the GPU";

/// The CUDA context and the streams of one open GPU.
pub(super) struct GpuContext {
    pub(super) driver: DriverApi,
    /// The driver's functions for CUDA graphs, or the error that names the missing function.
    driver_graphs: Result<DriverGraphsApi>,
    /// The driver's function that reports nodes of a capture. Without it, graphs are not updated.
    pub(super) capture_info: Option<CaptureInfoFn>,
    /// The memory of a GPU without memory pools. `None` if the GPU has memory pools.
    pub(super) block_cache: Option<Mutex<BlockCache>>,
    pub(super) device: CUdevice,
    context: CUcontext,
    /// The main stream, used by all threads that have no separate stream.
    pub(super) main_stream: CUstream,
    /// The stream of asynchronous copies to the host.
    pub(super) download_stream: CUstream,
    /// The stream of asynchronous copies from the host.
    pub(super) upload_stream: CUstream,
    pub(super) properties: GpuProperties,
    /// Number of bytes of GPU memory that this process currently has allocated.
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
    static CURRENT_CONTEXT: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
}

impl GpuContext {
    /// Opens the context of the GPU with number `index` among those that the driver shows this
    /// process, and creates its streams. Fails if the GPU is older than Ampere.
    pub(super) fn open(paths: &LibrarySearchPaths, index: usize) -> Result<GpuContext> {
        let (driver, version, driver_path) = open_driver(paths)?;
        let device = get_device(&driver, index)?;
        let properties = query_properties(&driver, device, index, version, driver_path)?;
        if properties.capability < MIN_CAPABILITY {
            return Err(properties.unsupported_error("training", "sm_80 (Ampere) or newer"));
        }
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle, of the context that is then made current.
        unsafe {
            driver.cuDevicePrimaryCtxRetain(&mut context, device)?;
            driver.cuCtxSetCurrent(context)?;
        }
        CURRENT_CONTEXT.set(context);
        let pools = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let has_pools = query_attribute(&driver, device, pools)? != 0;
        if has_pools {
            configure_memory_pool(&driver, device)?;
        }
        Ok(GpuContext {
            main_stream: create_stream(&driver, 0)?,
            download_stream: create_stream(&driver, 0)?,
            upload_stream: create_stream(&driver, 0)?,
            driver_graphs: DriverGraphsApi::open(paths).map(|(api, _)| api),
            capture_info: CaptureInfoFn::look_up(paths),
            block_cache: (!has_pools).then(Mutex::default),
            driver,
            device,
            context,
            properties,
            allocated_bytes: AtomicU64::new(0),
            peak_allocated_bytes: AtomicU64::new(0),
        })
    }

    /// Makes the GPU's context current in the calling thread, which the driver's functions require.
    pub(super) fn make_current(&self) -> Result<()> {
        if CURRENT_CONTEXT.get() != self.context {
            // SAFETY: the context lives as long as self.
            unsafe { self.driver.cuCtxSetCurrent(self.context) }?;
            CURRENT_CONTEXT.set(self.context);
        }
        Ok(())
    }

    /// Returns the driver's functions for CUDA graphs. Fails if the driver lacks one of them.
    pub(super) fn driver_graphs(&self) -> Result<&DriverGraphsApi> {
        self.driver_graphs.as_ref().map_err(Clone::clone)
    }

    /// Blocks until all work on all streams of the GPU is complete.
    pub(super) fn synchronize_all_streams(&self) -> Result<()> {
        self.make_current()?;
        // SAFETY: no preconditions.
        unsafe { self.driver.cuCtxSynchronize() }.map_err(|error| error.with_failed_function(GPU_WORK_LABEL))
    }

    /// Enqueues a fill of `bytes` bytes with zeros at the GPU address `at` on `stream` immediately,
    /// without recording the call for a CUDA graph.
    pub(super) fn issue_zero_fill(&self, at: Address, bytes: usize, stream: CUstream) -> Result<()> {
        // SAFETY: the caller owns the range.
        unsafe { self.driver.cuMemsetD8Async(at, 0, bytes, stream) }
    }

    /// Enqueues a copy of `bytes` bytes within the GPU's memory on `stream` immediately, without
    /// recording the call for a CUDA graph.
    pub(super) fn issue_copy(
        &self,
        to: Address,
        from: Address,
        bytes: usize,
        stream: CUstream,
    ) -> Result<()> {
        // SAFETY: the caller owns both ranges.
        unsafe { self.driver.cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
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
                self.free_cached_blocks();
                let _ = (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
            }
            CURRENT_CONTEXT.set(ptr::null_mut());
        }
    }
}

/// Creates a CUDA stream with the given priority that does not synchronize implicitly with other
/// streams, including the default stream.
pub(super) fn create_stream(driver: &DriverApi, priority: c_int) -> Result<CUstream> {
    let mut stream = ptr::null_mut();
    let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
    // SAFETY: writes one handle.
    unsafe { driver.cuStreamCreateWithPriority(&mut stream, flags, priority) }?;
    Ok(stream)
}

/// Returns the driver's default memory pool of the device.
pub(super) fn get_default_pool(driver: &DriverApi, device: CUdevice) -> Result<CUmemoryPool> {
    let mut pool = ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { driver.cuDeviceGetDefaultMemPool(&mut pool, device) }?;
    Ok(pool)
}

/// Configures the GPU's memory pool to keep freed memory for reuse, so that after the first steps
/// no allocation reaches the operating system. The pool must not make streams wait for each other
/// to reuse memory.
fn configure_memory_pool(driver: &DriverApi, device: CUdevice) -> Result<()> {
    let pool = get_default_pool(driver, device)?;
    let (mut unlimited, mut no): (u64, c_int) = (u64::MAX, 0);
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let dependencies = CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    // SAFETY: the value of the first attribute is a 64-bit integer, and that of the second an int.
    unsafe {
        driver.cuMemPoolSetAttribute(pool, threshold, (&raw mut unlimited).cast())?;
        driver.cuMemPoolSetAttribute(pool, dependencies, (&raw mut no).cast())
    }
}
