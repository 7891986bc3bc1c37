//! Implements the trait [`Storage`] for one GPU: allocation of buffers, copies between host and
//! GPU, and streams.
use super::backend::{Cuda, UnallocatedBufferOwner};
use super::streams;
use super::tensor_arg::gpu_address;
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::storage::{BackendEvent, BackendNotice, DeviceError, Event, Storage};
use std::{
    ops::Range,
    ptr::NonNull,
    sync::{Arc, PoisonError},
    thread,
    time::Duration,
};

/// Guard that, when dropped, ends the use of a thread's separate CUDA stream and frees the kernel
/// inputs that are cached for the stream.
struct ThreadStreamGuard<'a>(&'a Cuda, streams::ThreadStream);

impl Drop for ThreadStreamGuard<'_> {
    fn drop(&mut self) {
        let inputs = self.0.lock_host_inputs().remove(&(self.1.handle().addr(), thread::current().id()));
        drop(inputs); // frees memory in the stream's order: it is still this thread's stream
    }
}

impl BackendEvent for streams::CudaEvent {
    fn make_stream_wait(&self) {
        self.gpu().call_and_record_failure(|| streams::CudaEvent::make_stream_wait(self));
    }

    fn is_reached(&self) -> bool {
        streams::CudaEvent::is_reached(self).unwrap_or(true) // a failure is reported by later work
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let reached = streams::CudaEvent::synchronize(self).map_err(DeviceError::from);
        reached.inspect_err(|error| self.gpu().status.record_failure(error.clone()))
    }
}

impl Storage for Cuda {
    fn is_host(&self) -> bool {
        false
    }

    fn check_status(&self) -> Result<(), DeviceError> {
        self.gpu.status.check_no_failure()
    }

    fn zeroed_with_purpose(&self, purpose: &'static str, dtype: Dtype, len: usize) -> Buf {
        let buf = self.gpu.call_and_record_failure(|| self.try_zeroed(purpose, dtype, len));
        buf.unwrap_or_else(|| Buf::from_device_allocation(Arc::new(UnallocatedBufferOwner), 0, dtype, len))
    }

    fn alloc_staging(&self, dtype: Dtype, len: usize) -> Buf {
        self.try_alloc_staging(dtype, len).unwrap_or_else(|failure| {
            self.gpu.status.record_failure(failure);
            Buf::zeroed_as(dtype, len)
        })
    }

    fn try_alloc_staging(&self, dtype: Dtype, len: usize) -> Result<Buf, DeviceError> {
        Ok(self.gpu.allocate_pinned_buffer(dtype, len)?)
    }

    fn copy(&self, to: ViewMut, from: View) {
        assert!(
            to.dtype() == from.dtype() && to.len() == from.len(),
            "copy: {} elements of {:?} to {} of {:?}",
            from.len(),
            from.dtype(),
            to.len(),
            to.dtype()
        );
        match (to.as_view().is_on_host(), from.is_on_host()) {
            (true, true) => to.host_bytes_mut().copy_from_slice(from.host_bytes()),
            (true, false) => {
                self.gpu.call_and_record_failure(|| {
                    self.gpu.download_blocking(to.host_bytes_mut(), gpu_address(from))
                });
            }
            (false, true) => {
                self.gpu.call_and_record_failure(|| {
                    self.gpu.enqueue_upload(gpu_address(to.as_view()), from.host_bytes())?;
                    self.gpu.synchronize() // pinned memory is read when the copy runs
                });
            }
            (false, false) => {
                let bytes = from.len() * from.dtype().size();
                let (to, from) = (gpu_address(to.as_view()), gpu_address(from));
                self.run_profiled(|| "copy".to_owned(), || self.gpu.enqueue_copy(to, from, bytes));
            }
        }
    }

    fn fill_with_zeros(&self, x: ViewMut) {
        let bytes = x.len() * x.dtype().size();
        let at = gpu_address(x.as_view());
        self.run_profiled(|| "clear".to_owned(), || self.gpu.enqueue_zero_fill(at, bytes));
    }

    /// Moves elements to a lower index within a buffer through temporary GPU memory, because source
    /// and target of a GPU copy must not overlap.
    fn move_elements_to_lower_index(&self, mut x: ViewMut, from: Range<usize>, to: usize) {
        if from.start == to || from.is_empty() {
            return;
        }
        let bytes = from.len() * x.dtype().size();
        let scratch = self.alloc_scratch(bytes);
        let target = x.slice_mut(to..to + from.len()).as_view().address();
        let from = gpu_address(x.as_view().slice(from));
        self.gpu.call_and_record_failure(|| {
            self.gpu.enqueue_copy(scratch.address(), from, bytes)?;
            self.gpu.enqueue_copy(target, scratch.address(), bytes)
        });
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.gpu.call_and_record_failure(|| self.gpu.synchronize());
        self.check_status()
    }

    fn with_separate_stream(&self, work: &mut dyn FnMut()) {
        let stream = self.gpu.call_and_record_failure(|| self.gpu.create_thread_stream());
        let _stream = stream.map(|stream| ThreadStreamGuard(self, stream));
        work();
    }

    fn record_event(&self) -> Event {
        self.gpu.call_and_record_failure(|| self.gpu.record_event()).map(Event::new).unwrap_or_default()
    }

    fn make_stream_wait_timed(&self, event: &Event) {
        let begin = self.gpu.call_and_record_failure(|| self.gpu.record_timed_event());
        event.make_stream_wait();
        let end = self.gpu.call_and_record_failure(|| self.gpu.record_timed_event());
        if let (Some(begin), Some(end)) = (begin, end) {
            self.timed_waits.lock().unwrap_or_else(PoisonError::into_inner).push([begin, end]);
        }
    }

    fn take_stall_seconds(&self) -> f64 {
        let mut waits = self.timed_waits.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = 0.0;
        waits.retain(|[begin, end]| match self.gpu.call_and_record_failure(|| end.seconds_since(begin)) {
            Some(Some(seconds)) => {
                total += seconds;
                false
            }
            Some(None) => true,
            None => false,
        });
        total
    }

    fn copy_async(&self, to: ViewMut, from: View, after: &[Event]) -> Event {
        assert!(
            to.dtype() == from.dtype()
                && to.len() == from.len()
                && to.as_view().is_on_host() != from.is_on_host(),
            "copy_async: {} elements of {:?} to {} of {:?}",
            from.len(),
            from.dtype(),
            to.len(),
            to.dtype()
        );
        if from.is_empty() {
            return Event::default();
        }
        let Some(earlier) = self.gpu.call_and_record_failure(|| self.gpu.record_event()) else {
            return Event::default();
        };
        let is_download = to.as_view().is_on_host();
        let stream = if is_download { self.gpu.download_stream } else { self.gpu.upload_stream };
        let copy = || {
            earlier.make_stream_wait()?;
            after.iter().for_each(Event::make_stream_wait);
            if is_download {
                let target = NonNull::new(to.as_view().address() as *mut u8).expect("a view has an address");
                let bytes = from.len() * from.dtype().size();
                // SAFETY: both ranges have `bytes` bytes, and the trait forbids the caller to use
                // them before the event.
                unsafe { self.gpu.download_async(target, gpu_address(from), bytes) }?;
            } else {
                self.gpu.enqueue_upload(gpu_address(to.as_view()), from.host_bytes())?;
            }
            self.gpu.record_event()
        };
        self.gpu
            .run_on_stream(stream, || self.gpu.call_and_record_failure(copy))
            .map(Event::new)
            .unwrap_or_default()
    }

    fn record_step_duration(&self, duration: Duration) -> Option<BackendNotice> {
        self.record_step_and_take_notice(duration)
    }

    fn peak_memory_bytes(&self) -> u64 {
        self.gpu.peak_allocated_bytes()
    }
}
