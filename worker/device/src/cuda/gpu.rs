//! One open GPU ([`Gpu`]), and functions that enqueue GPU calls (copies, fills, kernel launches) on
//! the calling thread's stream.
use super::bindings::{Address, driver_sys::CUstream};
use super::context::{GPU_WORK_LABEL, GpuContext};
use super::error::Result;
use super::graphs::{CallBatch, GraphState, MainStreamGraphs};
use super::launch::{KernelArg, KernelFunction, LaunchConfig};
use super::launch_log::{log_kernel, log_non_kernel_call};
use super::library_search::LibrarySearchPaths;
use super::status::DeviceStatus;
use std::{
    ffi::{CStr, c_void},
    ops::Deref,
    ptr,
    sync::{Arc, MutexGuard},
};

/// One open GPU, with its CUDA context and the GPU calls that are waiting to be issued to its main
/// stream.
///
/// A thread's calls take effect in their order, in the main stream or in the stream that
/// [`Gpu::create_thread_stream`] created for the thread.
pub(super) struct Gpu {
    context: GpuContext,
    /// The recorded calls that are not issued to the main stream yet, and the CUDA graphs of this
    /// stream.
    pub(super) graphs: MainStreamGraphs,
    /// The first failure of a call that returns no error.
    pub(super) status: DeviceStatus,
}

impl Deref for Gpu {
    type Target = GpuContext;

    fn deref(&self) -> &GpuContext {
        &self.context
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.make_current().is_ok() {
            self.graphs.lock_graph_state().discard_calls_and_graphs(self);
        }
    }
}

impl Gpu {
    /// Opens the GPU with number `index` among the GPUs that the driver shows this process. Fails
    /// if the GPU is older than Ampere.
    pub(super) fn open(paths: &LibrarySearchPaths, index: usize) -> Result<Arc<Gpu>> {
        Ok(Arc::new(Gpu {
            context: GpuContext::open(paths, index)?,
            graphs: MainStreamGraphs::default(),
            status: DeviceStatus::default(),
        }))
    }

    /// Locks the recorded GPU calls of the main stream if CUDA graphs are on and this thread issues
    /// its calls to the main stream. Returns `None` if the calls are issued immediately.
    pub(super) fn lock_if_recording(&self) -> Option<MutexGuard<'_, GraphState>> {
        (self.graphs.is_enabled() && self.current_stream() == self.main_stream)
            .then(|| self.graphs.lock_graph_state())
    }

    /// Issues all recorded GPU calls to the main stream, and then calls `f` with the CUDA stream of
    /// this thread. With graphs on, no other thread uses the main stream meanwhile.
    pub(super) fn with_flushed_stream<T>(&self, f: impl FnOnce(CUstream) -> T) -> Result<T> {
        self.make_current()?;
        let mut recording = self.lock_if_recording();
        recording.as_mut().map_or(Ok(()), |state| state.flush_batch(self))?;
        Ok(f(self.current_stream()))
    }

    /// Enqueues a GPU call on this thread's stream: records the call if CUDA graphs are on and the
    /// stream is the main stream, otherwise issues it immediately.
    pub(super) fn enqueue(
        &self,
        record: impl FnOnce(&mut CallBatch),
        issue: impl Fn(CUstream) -> Result<()>,
    ) -> Result<()> {
        self.make_current()?;
        self.graphs.count_call();
        match self.lock_if_recording() {
            Some(mut state) => {
                record(&mut state.batch);
                state.flush_batch_if_full(self)
            }
            None => self.retry_if_out_of_memory(|| issue(self.current_stream())),
        }
    }

    /// Makes a GPU call and returns its value; an error is stored as the GPU's first failure, after
    /// which all later GPU calls are skipped. Returns `None` if the call failed, or was not made
    /// because an earlier one failed.
    pub(super) fn call_and_record_failure<T>(&self, call: impl FnOnce() -> Result<T>) -> Option<T> {
        if self.status.has_failed() { None } else { self.status.ok_or_record_failure(call()) }
    }

    /// Turns CUDA graphs on or off for the main stream, after all calls that were recorded for a
    /// graph have been issued. No other thread may use the stream meanwhile.
    pub(super) fn set_graphs_enabled(&self, on: bool) -> Result<()> {
        self.make_current()?;
        self.graphs.lock_graph_state().set_enabled(self, on)
    }

    /// Enqueues the zeroing of `bytes` bytes at the GPU address `at` on this thread's stream.
    pub(super) fn enqueue_zero_fill(&self, at: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        log_non_kernel_call("fill", &[at, bytes as u64]);
        self.enqueue(
            |batch| batch.push_zero_fill(at, bytes),
            |stream| self.issue_zero_fill(at, bytes, stream),
        )
    }

    /// Enqueues a copy of the host bytes `bytes` to the GPU address `at` on this thread's stream.
    ///
    /// If `bytes` is in pinned memory, it is read when the copy runs. The caller must not write or
    /// free it before the copy is complete. Otherwise the driver reads `bytes` before this call
    /// returns.
    pub(super) fn enqueue_upload(&self, at: Address, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        log_non_kernel_call("copy from the host", &[at, bytes.len() as u64]);
        // SAFETY: the caller's range at `at` is as long as `bytes`.
        self.with_flushed_stream(|stream| unsafe {
            self.driver.cuMemcpyHtoDAsync_v2(at, bytes.as_ptr().cast(), bytes.len(), stream)
        })?
    }

    /// Copies `bytes.len()` bytes from the GPU address `at` to the host buffer `bytes`, and blocks
    /// until the copy is complete.
    pub(super) fn download_blocking(&self, bytes: &mut [u8], at: Address) -> Result<()> {
        if !bytes.is_empty() {
            log_non_kernel_call("copy to the host", &[at, bytes.len() as u64]);
            // SAFETY: the caller's range at `at` is as long as `bytes`.
            self.with_flushed_stream(|stream| unsafe {
                self.driver.cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), at, bytes.len(), stream)
            })??;
        }
        self.synchronize()
    }

    /// Enqueues a copy of `bytes` bytes within the GPU's memory on this thread's stream. The ranges
    /// must not overlap.
    pub(super) fn enqueue_copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        log_non_kernel_call("copy", &[to, from, bytes as u64]);
        self.enqueue(
            |batch| batch.push_copy(to, from, bytes),
            |stream| self.issue_copy(to, from, bytes, stream),
        )
    }

    /// Enqueues a launch of the kernel `function` on this thread's stream.
    ///
    /// # Safety
    ///
    /// `arguments` must match the kernel's parameters in number, type and order. Each address among
    /// them must point to all memory that the kernel accesses through it. That memory must stay
    /// allocated until the kernel is complete. Freeing it afterwards in the order of the same
    /// stream is allowed.
    pub(super) unsafe fn launch(
        &self,
        name: &'static CStr,
        function: KernelFunction,
        config: LaunchConfig,
        arguments: &[&dyn KernelArg],
    ) -> Result<()> {
        log_kernel(name.to_bytes(), config, arguments);
        // SAFETY: promised by the caller.
        let record = |batch: &mut CallBatch| unsafe { batch.push_kernel(name, function, config, arguments) };
        self.enqueue(record, |stream| {
            let pointer = |a: &&dyn KernelArg| ptr::from_ref::<dyn KernelArg>(*a).cast_mut().cast();
            let mut pointers: Vec<*mut c_void> = arguments.iter().map(pointer).collect();
            // SAFETY: promised by the caller.
            unsafe { function.issue(self, name, config, &mut pointers, stream) }
        })
    }

    /// Blocks until all work that was enqueued on this thread's stream is complete. Errors of that
    /// work are returned here at the latest.
    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives.
        self.with_flushed_stream(|stream| unsafe { self.driver.cuStreamSynchronize(stream) })?
            .map_err(|error| error.with_failed_function(GPU_WORK_LABEL))
    }
}
