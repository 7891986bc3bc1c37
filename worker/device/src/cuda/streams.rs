//! Separate CUDA streams of threads, and the CUDA events with which streams wait for each other.
use super::bindings::{
    Address,
    driver_sys::{CUevent, CUevent_flags, CUresult, CUstream},
};
use super::context::{GPU_WORK_LABEL, create_stream};
use super::current_stream::{ThreadStreamSetting, restore_thread_stream};
use super::error::Result;
use super::gpu::Gpu;
use std::{
    ffi::c_uint,
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::Arc,
};

impl Gpu {
    /// Creates a CUDA stream of the highest priority, and makes it this thread's stream until the
    /// returned value is dropped. The stream is meant for short work for which other streams wait.
    pub(super) fn create_thread_stream(self: &Arc<Self>) -> Result<ThreadStream> {
        self.make_current()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { self.driver.cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }?;
        let stream = create_stream(&self.driver, greatest)?;
        let previous = self.set_thread_stream(stream);
        Ok(ThreadStream { gpu: self.clone(), stream, previous, not_send: PhantomData })
    }

    /// Records a CUDA event on this thread's stream, after the work that the thread has enqueued so
    /// far.
    pub(super) fn record_event(self: &Arc<Self>) -> Result<CudaEvent> {
        self.record_event_with_flags(CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Records a CUDA event on this thread's stream together with the time at which the GPU reaches
    /// the event.
    pub(super) fn record_timed_event(self: &Arc<Self>) -> Result<CudaEvent> {
        self.record_event_with_flags(CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// Records a CUDA event, created with the CUDA flags `flags`, on this thread's stream.
    fn record_event_with_flags(self: &Arc<Self>, flags: CUevent_flags) -> Result<CudaEvent> {
        self.make_current()?;
        let mut event = CudaEvent { gpu: self.clone(), handle: ptr::null_mut() };
        // SAFETY: writes one handle.
        unsafe { self.driver.cuEventCreate(&mut event.handle, flags as c_uint) }?;
        // SAFETY: event and stream live.
        self.with_flushed_stream(|stream| unsafe { self.driver.cuEventRecord(event.handle, stream) })??;
        Ok(event)
    }

    /// Enqueues a copy of `bytes` bytes from the GPU to the host on this thread's stream, and
    /// returns before the copy is complete.
    ///
    /// # Safety
    ///
    /// The caller must ensure that both ranges are `bytes` long. Until an event that is recorded
    /// after this call is reached, the host's range must not be read, written or freed.
    pub(super) unsafe fn download_async(&self, to: NonNull<u8>, from: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: promised by the caller.
        self.with_flushed_stream(|stream| unsafe {
            self.driver.cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from, bytes, stream)
        })?
    }
}

/// A separate CUDA stream of a thread, which is destroyed when dropped. Dropping it first waits for
/// the stream's work, and restores the thread's previous stream.
pub(super) struct ThreadStream {
    gpu: Arc<Gpu>,
    stream: CUstream,
    previous: ThreadStreamSetting,
    /// Makes this type unusable in other threads, because the thread that created the value must
    /// drop it.
    not_send: PhantomData<*const ()>,
}

impl ThreadStream {
    /// Returns CUDA's handle of the stream.
    pub(super) fn handle(&self) -> CUstream {
        self.stream
    }
}

impl Drop for ThreadStream {
    fn drop(&mut self) {
        restore_thread_stream(self.previous);
        if self.gpu.make_current().is_ok() {
            // SAFETY: released once. Errors cannot be handled here.
            unsafe {
                let _ = (self.gpu.driver.cuStreamSynchronize)(self.stream);
                let _ = (self.gpu.driver.cuStreamDestroy_v2)(self.stream);
            }
        }
    }
}

/// A CUDA event that was recorded on a stream. Dropping it destroys the event.
pub(super) struct CudaEvent {
    gpu: Arc<Gpu>,
    handle: CUevent,
}

// SAFETY: the handle is only passed to the driver, which accepts it from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as for Send.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Returns the GPU on which the event was recorded.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Makes this thread's stream wait for the event, without blocking the host.
    pub(super) fn make_stream_wait(&self) -> Result<()> {
        let gpu = &self.gpu;
        // SAFETY: event and stream live.
        gpu.with_flushed_stream(|stream| unsafe { gpu.driver.cuStreamWaitEvent(stream, self.handle, 0) })?
    }

    /// Blocks until the GPU has reached the event. Errors of the work before the event are returned
    /// here at the latest.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.gpu.make_current()?;
        // SAFETY: the event lives.
        unsafe { self.gpu.driver.cuEventSynchronize(self.handle) }
            .map_err(|error| error.with_failed_function(GPU_WORK_LABEL))
    }

    /// Returns whether the GPU has reached the event. Fails if work before the event failed.
    pub(super) fn is_reached(&self) -> Result<bool> {
        self.gpu.make_current()?;
        // SAFETY: the event lives.
        match unsafe { self.gpu.driver.cuEventQuery(self.handle) } {
            Err(error) if error.has_driver_status(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            reached => reached.map(|()| true).map_err(|error| error.with_failed_function(GPU_WORK_LABEL)),
        }
    }

    /// Returns how many seconds the GPU needed from the event `start` to this event. Both must be
    /// timed. Returns `None` if this event is not reached yet.
    pub(super) fn seconds_since(&self, start: &CudaEvent) -> Result<Option<f64>> {
        if !self.is_reached()? {
            return Ok(None);
        }
        let mut ms = 0.0;
        // SAFETY: both events live and are timed; writes one float.
        unsafe { self.gpu.driver.cuEventElapsedTime(&mut ms, start.handle, self.handle) }?;
        Ok(Some(f64::from(ms) / 1e3))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if !self.handle.is_null() && self.gpu.make_current().is_ok() {
            // SAFETY: released once; streams that wait for it are not affected. Errors cannot be
            // handled here.
            let _ = unsafe { (self.gpu.driver.cuEventDestroy_v2)(self.handle) };
        }
    }
}
