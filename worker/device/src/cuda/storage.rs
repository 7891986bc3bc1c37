//! [`Storage`] on a GPU.
use super::{Cuda, PinnedOwner, address, streams, unwrap_or_panic};
use crate::buffer::{Buf, Dtype, View, ViewMut};
use crate::storage::{BackendEvent, BackendNotice, DeviceError, Event, Storage};
use std::{
    ops::Range,
    ptr::NonNull,
    sync::{Arc, PoisonError},
    thread,
    time::Duration,
};

/// A thread's separate stream, and the host inputs that are cached for it.
struct ThreadStreamGuard<'a>(&'a Cuda, streams::ThreadStream);

impl Drop for ThreadStreamGuard<'_> {
    fn drop(&mut self) {
        let inputs = self.0.lock_host_inputs().remove(&(self.1.handle().addr(), thread::current().id()));
        drop(inputs); // frees memory in the stream's order: it is still this thread's stream
    }
}

impl BackendEvent for streams::CudaEvent {
    fn stream_wait(&self) {
        unwrap_or_panic(streams::CudaEvent::stream_wait(self));
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

    fn staging(&self, dtype: Dtype, len: usize) -> Buf {
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
            (true, false) => unwrap_or_panic(self.gpu.download(to.bytes(), address(from))),
            (false, true) => {
                unwrap_or_panic(self.gpu.upload(address(to.as_view()), from.bytes()));
                // Pinned memory is read when the copy runs.
                unwrap_or_panic(self.gpu.synchronize());
            }
            (false, false) => {
                let bytes = from.len() * from.dtype().size();
                let (to, from) = (address(to.as_view()), address(from));
                self.profiled(|| "copy".to_owned(), || self.gpu.copy(to, from, bytes));
            }
        }
    }

    fn clear(&self, x: ViewMut) {
        let bytes = x.len() * x.dtype().size();
        let at = address(x.as_view());
        self.profiled(|| "clear".to_owned(), || self.gpu.fill_zero(at, bytes));
    }

    /// Copies through scratch memory, because the ranges of a copy within the GPU must not overlap.
    fn move_down(&self, mut x: ViewMut, from: Range<usize>, to: usize) {
        if from.start == to || from.is_empty() {
            return;
        }
        let bytes = from.len() * x.dtype().size();
        let scratch = self.scratch(bytes);
        let target = x.slice_mut(to..to + from.len()).as_view().address();
        unwrap_or_panic(self.gpu.copy(scratch.at(), address(x.as_view().slice(from)), bytes));
        unwrap_or_panic(self.gpu.copy(target, scratch.at(), bytes));
    }

    fn synchronize(&self) {
        unwrap_or_panic(self.gpu.synchronize());
    }

    fn with_separate_stream(&self, work: &mut dyn FnMut()) {
        let _stream = ThreadStreamGuard(self, unwrap_or_panic(self.gpu.create_thread_stream()));
        work();
    }

    fn record_event(&self) -> Event {
        Event::new(unwrap_or_panic(self.gpu.record()))
    }

    fn wait_event_timed(&self, event: &Event) {
        let begin = unwrap_or_panic(self.gpu.record_timed());
        event.stream_wait();
        let wait = [begin, unwrap_or_panic(self.gpu.record_timed())];
        self.timed_waits.lock().unwrap_or_else(PoisonError::into_inner).push(wait);
    }

    fn stall_seconds(&self) -> f64 {
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
        let earlier = unwrap_or_panic(self.gpu.record());
        let is_download = to.as_view().is_on_host();
        self.gpu.with_current_stream(if is_download { self.gpu.downloads } else { self.gpu.uploads }, || {
            unwrap_or_panic(earlier.stream_wait());
            after.iter().for_each(Event::stream_wait);
            if is_download {
                let target = NonNull::new(to.as_view().address() as *mut u8).expect("a view has an address");
                let bytes = from.len() * from.dtype().size();
                // SAFETY: both ranges have `bytes` bytes, and the trait forbids the caller to use
                // them before the event.
                unwrap_or_panic(unsafe { self.gpu.download_async(target, address(from), bytes) });
            } else {
                unwrap_or_panic(self.gpu.upload(address(to.as_view()), from.bytes()));
            }
            Event::new(unwrap_or_panic(self.gpu.record()))
        })
    }

    fn after_step(&self, duration: Duration) -> Option<BackendNotice> {
        self.tune_after_step(duration)
    }

    fn peak_memory(&self) -> u64 {
        self.gpu.peak()
    }
}
