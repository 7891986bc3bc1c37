//! The memory that a backend computes in, and the way between it and the host's.
use crate::mem::{Buf, Dtype, View, ViewMut};
use std::{any::Any, cell::Cell, ops::Range, sync::Arc, time::Duration};

/// Memory of a backend. Everything happens in the order of the calls, those of the ops included, whichever thread they come
/// from; but what a thread asks for in a stream of its own ([`Storage::in_own_stream`]) is in order with itself alone, and with what
/// [`Mark`]s say. On the CPU it is the host's memory and nothing is copied twice.
pub trait Storage: Send + Sync {
    /// Does the backend compute in the host's memory?
    fn is_host(&self) -> bool;
    /// `len` zeros where ops compute. When memory is full the worker stops with one message, which says what it was
    /// [`needed_for`].
    fn zeroed(&self, dtype: Dtype, len: usize) -> Buf;
    /// Zeros on the host that copies from and to the backend's memory are fastest with.
    fn staging(&self, dtype: Dtype, len: usize) -> Buf;
    /// `to = from`, of the same type and length; either may lie on the host. A copy from or to the host is done on return.
    fn copy(&self, to: ViewMut, from: View);
    /// Zeros.
    fn clear(&self, x: ViewMut);
    /// Elements `from` of `x` come to lie at `to`, which is not behind them.
    fn move_down(&self, x: ViewMut, from: Range<usize>, to: usize);
    /// Waits until everything that was asked for in this thread's stream is done.
    fn wait(&self);
    /// Runs `work` with a stream of its own for what this thread asks for meanwhile, and waits for that. Memory that is used in
    /// two streams, or given back in another than where it was used, is in order by marks.
    fn in_own_stream(&self, work: &mut dyn FnMut()) {
        work(); // what was asked for is done on return
    }
    /// The end of what was asked for so far in this thread's stream.
    fn mark(&self) -> Event {
        Event::default()
    }
    /// As [`Mark::follow`], for a mark that may be some: [`Storage::stood_still`] counts the wait.
    fn follow_timed(&self, mark: &Event) {
        mark.follow();
    }
    /// Seconds that streams stood still in [`Storage::follow_timed`], of the waits that ended since this was asked last.
    fn stood_still(&self) -> f64 {
        0.0
    }
    /// Begins to copy between the host's memory and the backend's, beside what this thread asks for from now on, behind what it
    /// asked for before and behind `behind`. Until the returned mark `from` must not be written nor `to` touched, and neither
    /// given back. With memory of the host that [`Storage::staging`] didn't give this may return no earlier than that.
    fn copy_beside(&self, to: ViewMut, from: View, _behind: &[Event]) -> Event {
        self.copy(to, from);
        Event::default()
    }
    /// Begins to copy `from` to the host, into memory of the same types and lengths; as [`Storage::copy_beside`].
    fn download(&self, from: &[View], mut to: Vec<Buf>) -> Download {
        assert!(from.len() == to.len(), "download: {} to {}", from.len(), to.len());
        let copies = from.iter().zip(&mut to).map(|(from, to)| self.copy_beside(to.view_mut(), *from, &[]));
        let done = copies.filter(|mark| mark.0.is_some()).last().unwrap_or_default(); // in order
        Download { bufs: to, done }
    }
    /// A step took so long. A backend that can go about its work in several ways goes on in the faster one; what there is to say
    /// about it, once.
    fn step_took(&self, _took: Duration) -> Option<Said> {
        None
    }
    /// The most bytes of the backend's own memory that were in use at once, by this process; 0 where it is the host's.
    fn peak_memory(&self) -> u64;

    /// A copy where ops compute.
    fn copied(&self, from: View) -> Buf {
        let mut buf = self.zeroed(from.dtype(), from.len());
        self.copy(buf.view_mut(), from);
        buf
    }

    /// A copy on the host.
    fn downloaded(&self, from: View) -> Buf {
        let mut buf = Buf::zeroed_as(from.dtype(), from.len());
        self.copy(buf.view_mut(), from);
        buf
    }

    /// `x` on the host: itself when it lies there, else a copy in `room`, which grows to it.
    fn shown<'a>(&self, x: View<'a>, room: &'a mut Buf) -> View<'a> {
        if x.is_on_host() {
            return x;
        }
        if room.len() < x.len() || room.dtype() != x.dtype() {
            *room = self.staging(x.dtype(), x.len());
        }
        self.copy(room.view_mut().slice(0..x.len()), x);
        room.view().slice(0..x.len())
    }

    /// `x` where ops compute: itself when it lies there, else a copy in `room`, which grows to it.
    fn at_hand<'a>(&self, x: View<'a>, room: &'a mut Buf) -> View<'a> {
        if x.is_on_host() == self.is_host() {
            return x;
        }
        if room.len() < x.len() || room.dtype() != x.dtype() {
            *room = self.zeroed(x.dtype(), x.len());
        }
        self.copy(room.view_mut().slice(0..x.len()), x);
        room.view().slice(0..x.len())
    }
}

/// What a backend found out about itself; the job goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Which way is the faster one. The others of the job will have found the same.
    Found(String),
    /// What doesn't work here.
    Failed(String),
}

/// A place in a stream's work that other streams can go on from; the default is one that lies behind them all.
#[derive(Clone, Default)]
pub struct Event(Option<Arc<dyn Point>>);

/// What a backend's mark is.
pub(crate) trait Point: Send + Sync {
    /// As [`Mark::follow`].
    fn follow(&self);
    /// Waits here until it is reached, or says what failed before.
    fn wait(&self) -> Result<(), Stopped>;
}

impl Event {
    pub(crate) fn of(point: impl Point + 'static) -> Self {
        Event(Some(Arc::new(point)))
    }

    /// Is it the default, which nobody waits for?
    pub fn is_behind_all(&self) -> bool {
        self.0.is_none()
    }

    /// What this thread asks for from now on happens after the mark. Nothing waits here.
    pub fn follow(&self) {
        if let Some(point) = &self.0 {
            point.follow();
        }
    }

    /// Waits here until the mark is reached.
    pub fn wait(&self) {
        self.reached().unwrap_or_else(|failed| std::panic::panic_any(failed));
    }

    /// Waits here until the mark is reached, or for what failed before it.
    pub fn reached(&self) -> Result<(), Stopped> {
        self.0.as_ref().map_or(Ok(()), |point| point.wait())
    }
}

/// Copies on their way to the host.
pub struct Download {
    bufs: Vec<Buf>,
    done: Event,
}

impl Download {
    /// The end of them.
    pub fn mark(&self) -> Event {
        self.done.clone()
    }

    /// Waits for them.
    pub fn wait(mut self) -> Vec<Buf> {
        let bufs = std::mem::take(&mut self.bufs);
        match self.done.reached() {
            Ok(()) => bufs,
            Err(failed) => {
                std::mem::forget(bufs); // as in drop
                std::panic::panic_any(failed)
            }
        }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        if !self.bufs.is_empty() && self.done.reached().is_err() {
            // who knows whether the copies still go on
            std::mem::forget(std::mem::take(&mut self.bufs));
        }
    }
}

thread_local! {
    static PURPOSE: Cell<&'static str> = const { Cell::new("") };
}

/// Says what memory is needed for that `f` asks for, should there be none.
pub fn needed_for<T>(what: &'static str, f: impl FnOnce() -> T) -> T {
    struct Before(&'static str);
    impl Drop for Before {
        fn drop(&mut self) {
            PURPOSE.set(self.0);
        }
    }
    let _before = Before(PURPOSE.replace(what));
    f()
}

/// What this thread's next memory is for; empty: not said.
pub(crate) fn purpose() -> &'static str {
    PURPOSE.get()
}

/// What stopped a backend, as the panic's payload that its ops end with: they can't return errors.
#[derive(Clone, Debug)]
pub struct Stopped(pub String);

/// What a panic said.
pub fn said(panic: &(dyn Any + Send)) -> String {
    let stopped = panic.downcast_ref::<Stopped>().map(|Stopped(why)| why.as_str());
    let text = stopped.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text").to_owned()
}
