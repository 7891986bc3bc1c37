//! [`Storage`] on a card.
use super::{Cuda, Pinned, address, must, streams};
use crate::mem::{Buf, Dtype, View, ViewMut};
use crate::storage::{Event, Point, Said, Stopped, Storage};
use std::{
    ops::Range,
    ptr::NonNull,
    sync::{Arc, PoisonError},
    thread,
    time::Duration,
};

/// A thread's stream, and what is kept for it.
struct OwnStream<'a>(&'a Cuda, streams::OwnStream);

impl Drop for OwnStream<'_> {
    fn drop(&mut self) {
        let lists = self.0.lists().remove(&(self.1.handle().addr(), thread::current().id()));
        drop(lists); // in the stream's turn, which is still this thread's
    }
}

impl Point for streams::Event {
    fn follow(&self) {
        must(streams::Event::follow(self));
    }

    fn wait(&self) -> Result<(), Stopped> {
        streams::Event::wait(self).map_err(|e| Stopped(e.to_string()))
    }
}

impl Storage for Cuda {
    fn is_host(&self) -> bool {
        false
    }

    fn zeroed(&self, dtype: Dtype, len: usize) -> Buf {
        must(self.try_zeroed(dtype, len))
    }

    fn staging(&self, dtype: Dtype, len: usize) -> Buf {
        if len == 0 {
            return Buf::zeroed_as(dtype, 0);
        }
        let bytes = len * dtype.size();
        let at = must(self.card.allocate_pinned(bytes));
        // SAFETY: as long as was asked for.
        unsafe { at.write_bytes(0, bytes) };
        Buf::on_host_of(Arc::new(Pinned(self.card.clone())), at, dtype, len)
    }

    fn copy(&self, to: ViewMut, from: View) {
        assert!(
            to.dtype() == from.dtype() && to.len() == from.len(),
            "copy: {} of {:?} to {} of {:?}",
            from.len(),
            from.dtype(),
            to.len(),
            to.dtype()
        );
        match (to.as_view().is_on_host(), from.is_on_host()) {
            (true, true) => to.bytes().copy_from_slice(from.bytes()),
            (true, false) => must(self.card.download(to.bytes(), address(from))),
            (false, true) => {
                must(self.card.upload(address(to.as_view()), from.bytes()));
                // Pinned memory is read when the copy's turn comes.
                must(self.card.wait());
            }
            (false, false) => {
                let bytes = from.len() * from.dtype().size();
                let (to, from) = (address(to.as_view()), address(from));
                self.piece(|| "copy".to_owned(), || self.card.copy(to, from, bytes));
            }
        }
    }

    fn clear(&self, x: ViewMut) {
        let bytes = x.len() * x.dtype().size();
        let at = address(x.as_view());
        self.piece(|| "clear".to_owned(), || self.card.fill_zero(at, bytes));
    }

    /// By way of scratch: copies inside a card must not overlap.
    fn move_down(&self, mut x: ViewMut, from: Range<usize>, to: usize) {
        if from.start == to || from.is_empty() {
            return;
        }
        let bytes = from.len() * x.dtype().size();
        let scratch = self.scratch(bytes);
        let target = x.part(to..to + from.len()).as_view().address();
        must(self.card.copy(scratch.at(), address(x.as_view().slice(from)), bytes));
        must(self.card.copy(target, scratch.at(), bytes));
    }

    fn wait(&self) {
        must(self.card.wait());
    }

    fn in_own_stream(&self, work: &mut dyn FnMut()) {
        let _own = OwnStream(self, must(self.card.own_stream()));
        work();
    }

    fn mark(&self) -> Event {
        Event::of(must(self.card.record()))
    }

    fn follow_timed(&self, mark: &Event) {
        let begin = must(self.card.record_timed());
        mark.follow();
        let wait = [begin, must(self.card.record_timed())];
        self.waits.lock().unwrap_or_else(PoisonError::into_inner).push(wait);
    }

    fn stood_still(&self) -> f64 {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seconds = 0.0;
        waits.retain(|[begin, end]| match must(end.since(begin)) {
            Some(took) => {
                seconds += took;
                false
            }
            None => true,
        });
        seconds
    }

    fn copy_beside(&self, to: ViewMut, from: View, behind: &[Event]) -> Event {
        assert!(
            to.dtype() == from.dtype()
                && to.len() == from.len()
                && to.as_view().is_on_host() != from.is_on_host(),
            "copy_beside: {} of {:?} to {} of {:?}",
            from.len(),
            from.dtype(),
            to.len(),
            to.dtype()
        );
        if from.is_empty() {
            return Event::default();
        }
        let before = must(self.card.record());
        let down = to.as_view().is_on_host();
        self.card.beside(if down { self.card.downloads } else { self.card.uploads }, || {
            must(before.follow());
            behind.iter().for_each(Event::follow);
            if down {
                let there = NonNull::new(to.as_view().address() as *mut u8).expect("a view has an address");
                let bytes = from.len() * from.dtype().size();
                // SAFETY: the ranges are as long, and are let alone until the mark, as the trait asks.
                must(unsafe { self.card.download_later(there, address(from), bytes) });
            } else {
                must(self.card.upload(address(to.as_view()), from.bytes()));
            }
            Event::of(must(self.card.record()))
        })
    }

    fn step_took(&self, took: Duration) -> Option<Said> {
        self.after_step(took)
    }

    fn peak_memory(&self) -> u64 {
        self.card.peak()
    }
}
