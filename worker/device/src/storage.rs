//! The memory that a backend computes in, and the way between it and the host's.
use crate::mem::{Buf, Dtype, View, ViewMut};
use std::{any::Any, cell::Cell, ops::Range};

/// Memory of a backend. Everything happens in the order of the calls, those of the ops included. On the CPU it is the
/// host's memory and nothing is copied twice.
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
    /// Waits until everything that was asked for is done.
    fn wait(&self);
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
