//! Implementation of [`Storage`] on a GPU.
use super::backend::{Cuda, PinnedOwner, unwrap_or_panic};
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

/// A thread's separate stream, and the host inputs that are cached for this stream. Dropping it
/// frees both.
struct ThreadStreamGuard<'a>(&'a Cuda, streams::ThreadStream);

impl Drop for ThreadStreamGuard<'_> {
    fn drop(&mut self) {
        let inputs = self.0.lock_host_inputs().remove(&(self.1.handle().addr(), thread::current().id()));
        drop(inputs); // frees memory in the stream's order: it is still this thread's stream
    }
}

impl BackendEvent for streams::CudaEvent {
    fn make_stream_wait(&self) {
        unwrap_or_panic(streams::CudaEvent::make_stream_wait(self));
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        streams::CudaEvent::synchronize(self).map_err(|error| DeviceError(error.into()))
    }
}

impl Storage for Cuda {
    fn is_host(&self) -> bool {
        false
    }

    fn zeroed(&self, dtype: Dtype, len: usize) -> Buf {
        unwrap_or_panic(self.try_zeroed(dtype, len))
    }

    fn alloc_staging(&self, dtype: Dtype, len: usize) -> Buf {
        if len == 0 {
            return Buf::zeroed_as(dtype, 0);
        }
        let bytes = len * dtype.size();
        let at = unwrap_or_panic(self.gpu.allocate_pinned(bytes));
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { at.write_bytes(0, bytes) };
        Buf::from_host_allocation(Arc::new(PinnedOwner(self.gpu.clone())), at, dtype, len)
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
            (true, true) => to.bytes().copy_from_slice(from.bytes()),
            (true, false) => unwrap_or_panic(self.gpu.download_blocking(to.bytes(), gpu_address(from))),
            (false, true) => {
                unwrap_or_panic(self.gpu.enqueue_upload(gpu_address(to.as_view()), from.bytes()));
                // Pinned memory is read when the copy runs.
                unwrap_or_panic(self.gpu.synchronize());
            }
            (false, false) => {
                let bytes = from.len() * from.dtype().size();
                let (to, from) = (gpu_address(to.as_view()), gpu_address(from));
                self.run_profiled(|| "copy".to_owned(), || self.gpu.enqueue_copy(to, from, bytes));
            }
        }
    }

    fn clear(&self, x: ViewMut) {
        let bytes = x.len() * x.dtype().size();
        let at = gpu_address(x.as_view());
        self.run_profiled(|| "clear".to_owned(), || self.gpu.enqueue_zero_fill(at, bytes));
    }

    /// Copies through scratch memory, because the ranges of a copy within the GPU must not overlap.
    fn move_elements_down(&self, mut x: ViewMut, from: Range<usize>, to: usize) {
        if from.start == to || from.is_empty() {
            return;
        }
        let bytes = from.len() * x.dtype().size();
        let scratch = self.alloc_scratch(bytes);
        let target = x.slice_mut(to..to + from.len()).as_view().address();
        unwrap_or_panic(self.gpu.enqueue_copy(
            scratch.address(),
            gpu_address(x.as_view().slice(from)),
            bytes,
        ));
        unwrap_or_panic(self.gpu.enqueue_copy(target, scratch.address(), bytes));
    }

    fn synchronize(&self) {
        unwrap_or_panic(self.gpu.synchronize());
    }

    fn with_separate_stream(&self, work: &mut dyn FnMut()) {
        let _stream = ThreadStreamGuard(self, unwrap_or_panic(self.gpu.create_thread_stream()));
        work();
    }

    fn record_event(&self) -> Event {
        Event::new(unwrap_or_panic(self.gpu.record_event()))
    }

    fn wait_event_timed(&self, event: &Event) {
        let begin = unwrap_or_panic(self.gpu.record_timed_event());
        event.make_stream_wait();
        let wait = [begin, unwrap_or_panic(self.gpu.record_timed_event())];
        self.timed_waits.lock().unwrap_or_else(PoisonError::into_inner).push(wait);
    }

    fn take_stall_seconds(&self) -> f64 {
        let mut waits = self.timed_waits.lock().unwrap_or_else(PoisonError::into_inner);
        let mut total = 0.0;
        waits.retain(|[begin, end]| match unwrap_or_panic(end.seconds_since(begin)) {
            Some(seconds) => {
                total += seconds;
                false
            }
            None => true,
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
        let earlier = unwrap_or_panic(self.gpu.record_event());
        let is_download = to.as_view().is_on_host();
        self.gpu.run_on_stream(
            if is_download { self.gpu.download_stream } else { self.gpu.upload_stream },
            || {
                unwrap_or_panic(earlier.make_stream_wait());
                after.iter().for_each(Event::make_stream_wait);
                if is_download {
                    let target =
                        NonNull::new(to.as_view().address() as *mut u8).expect("a view has an address");
                    let bytes = from.len() * from.dtype().size();
                    // SAFETY: both ranges have `bytes` bytes, and the trait forbids the caller to
                    // use them before the event.
                    unwrap_or_panic(unsafe { self.gpu.download_async(target, gpu_address(from), bytes) });
                } else {
                    unwrap_or_panic(self.gpu.enqueue_upload(gpu_address(to.as_view()), from.bytes()));
                }
                Event::new(unwrap_or_panic(self.gpu.record_event()))
            },
        )
    }

    fn record_step_duration(&self, duration: Duration) -> Option<BackendNotice> {
        self.take_notice_after_step(duration)
    }

    fn peak_memory_bytes(&self) -> u64 {
        self.gpu.peak_bytes()
    }
}
