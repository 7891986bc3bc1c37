//! GPU memory ([`DeviceMemory`]) whose allocation and release take effect in the order of a
//! stream's work, without blocking the host.
use super::bindings::{Address, driver_sys::CUresult};
use super::error::{CudaError, Result};
use super::gpu::Gpu;
use std::sync::{Arc, atomic::Ordering::Relaxed};

impl Gpu {
    /// Allocates uninitialized GPU memory for work that is enqueued on this thread's stream after
    /// this call. A request for no bytes allocates nothing. Fails with [`CudaError::OutOfMemory`]
    /// if the memory is full, also after free memory of the pool was returned to the system.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<DeviceMemory> {
        if bytes == 0 {
            return Ok(DeviceMemory::empty(self));
        }
        self.make_current()?;
        let allocate = || {
            // Held so that no other thread issues to the stream. The recorded calls need not be
            // flushed, because they do not use this memory.
            let _recording = self.lock_if_recording();
            self.allocate_from_pool(bytes, self.current_stream())
        };
        let is_full = |result: &Result<Address>| {
            result.as_ref().is_err_and(|e| e.has_driver_status(CUresult::CUDA_ERROR_OUT_OF_MEMORY))
        };
        let mut result = allocate();
        if is_full(&result) {
            // The pool may hold enough free memory, but in ranges that are too small.
            self.release_unused_memory()?;
            result = allocate();
        }
        if is_full(&result) {
            let (free, total) = self.query_memory_info()?;
            let used = self.allocated_bytes.load(Relaxed);
            return Err(CudaError::OutOfMemory { requested: bytes, free, total, used, purpose: "this step" });
        }
        Ok(DeviceMemory { gpu: self.clone(), at: result?, bytes, is_scratch: false })
    }

    /// Allocates uninitialized GPU memory for temporary results of one operation; on the main
    /// stream, it comes from blocks that are reserved for this purpose. The memory must be dropped
    /// in the stream in which it is used. With CUDA graphs on, the same sequence of requests in the
    /// main stream gets the same addresses.
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

    /// Frees GPU memory that [`Gpu::allocate`] returned, once all work that is now enqueued on this
    /// thread's stream is complete.
    pub(super) fn free(&self, at: Address, bytes: usize) {
        if self.make_current().is_ok() {
            let mut recording = self.lock_if_recording();
            if let Some(state) = &mut recording {
                state.flush_deferring_error(self);
            }
            self.free_in_stream_order(at, bytes, self.current_stream());
        }
    }

    /// Returns all unused GPU memory to the operating system: unused scratch memory of the main
    /// stream, and the free memory of the driver's pool. Waits for all streams, because memory that
    /// was freed in a stream is free only when the stream has reached the free.
    pub(super) fn release_unused_memory(&self) -> Result<()> {
        self.graphs.lock_graph_state().release_idle_blocks(self);
        self.synchronize()?;
        let _no_capture = self.graphs.lock_graph_state(); // no stream may be waited for while one captures
        self.synchronize_all_streams()?;
        self.trim_pool()
    }

    /// Makes a GPU call and, if the GPU's memory is full, releases all unused memory and repeats
    /// the call once. Libraries allocate outside the pool, for example when they load a kernel.
    pub(super) fn retry_if_out_of_memory<T>(&self, call: impl Fn() -> Result<T>) -> Result<T> {
        match call() {
            Err(error) if error.is_out_of_memory() => {
                self.release_unused_memory()?;
                call()
            }
            result => result,
        }
    }
}

/// A range of GPU memory, which is freed when dropped.
pub(super) struct DeviceMemory {
    gpu: Arc<Gpu>,
    at: Address,
    bytes: usize,
    /// True if the memory is a range of the main stream's scratch memory.
    is_scratch: bool,
}

impl DeviceMemory {
    /// Returns the GPU address of this range of memory. It is 0 if there are no bytes.
    pub(super) fn address(&self) -> Address {
        self.at
    }

    /// Returns the number of bytes of this range of memory.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Creates an empty range of GPU memory (length 0), which operations get after a GPU call has
    /// failed. Their GPU calls are skipped, so they need no memory.
    pub(super) fn empty(gpu: &Arc<Gpu>) -> DeviceMemory {
        DeviceMemory { gpu: gpu.clone(), at: 0, bytes: 0, is_scratch: false }
    }

    /// Returns the GPU address of the range without freeing its memory, which the caller must free
    /// with [`Gpu::free`]. Must not be called for scratch memory.
    pub(super) fn into_address(mut self) -> Address {
        self.bytes = 0;
        self.at
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.is_scratch {
            self.gpu.graphs.lock_graph_state().free_scratch_range(&self.gpu, self.at);
        } else if self.bytes > 0 {
            self.gpu.free(self.at, self.bytes);
        }
    }
}
