//! Collectives of buffers in a card's memory over a transport that sees the host's alone: what is sent passes through pinned
//! buffers of the host, and so does what comes. So ranks that share a card, or whose cards can't reach each other, train all
//! the same, with the same bits as everywhere. Buffers on the host go straight to the transport.
use crate::{Comm, Result, Sink};
use device::{Buf, Dtype, Storage, View, ViewMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A transport between hosts' memory, and the memory that it can't see.
pub struct Staged {
    inner: Arc<dyn Comm>,
    storage: Arc<dyn Storage>,
    rooms: Mutex<Rooms>,
}

/// As large as the largest collective was.
#[derive(Default)]
struct Rooms {
    send: Room,
    recv: Room,
    /// On the card: a piece for the caller's sink.
    piece: Buf,
}

/// A pinned buffer for each size of elements.
#[derive(Default)]
struct Room {
    halves: Buf,
    floats: Buf,
}

impl Room {
    fn of(&mut self, storage: &dyn Storage, dtype: Dtype, len: usize) -> ViewMut<'_> {
        let buf = if dtype == Dtype::F32 { &mut self.floats } else { &mut self.halves };
        if buf.len() < len || buf.dtype() != dtype {
            *buf = Buf::default(); // not both at once
            *buf = storage.staging(dtype, len);
        }
        buf.view_mut().slice(0..len)
    }

    /// `x` on the host.
    fn down<'a>(&'a mut self, storage: &dyn Storage, x: View<'a>) -> View<'a> {
        if x.is_on_host() {
            return x;
        }
        let mut room = self.of(storage, x.dtype(), x.len());
        storage.copy(room.reborrow(), x);
        room.into_view()
    }
}

impl Staged {
    /// `storage`: whose memory buffers lie in.
    pub fn new(inner: Arc<dyn Comm>, storage: Arc<dyn Storage>) -> Self {
        Staged { inner, storage, rooms: Mutex::default() }
    }

    /// The transport below.
    pub fn inner(&self) -> &Arc<dyn Comm> {
        &self.inner
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        // after a panic the rooms hold what no one reads
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on memory of the host that becomes `recv`.
    fn received(&self, room: &mut Room, recv: ViewMut, f: impl FnOnce(ViewMut) -> Result<()>) -> Result<()> {
        if recv.as_view().is_on_host() {
            return f(recv);
        }
        let mut there = room.of(self.storage.as_ref(), recv.dtype(), recv.len());
        f(there.reborrow())?;
        self.storage.copy(recv, there.as_view());
        Ok(())
    }

    /// Runs `f` on memory of the host that holds `x` and becomes `x`.
    fn through(&self, mut x: ViewMut, f: impl FnOnce(ViewMut) -> Result<()>) -> Result<()> {
        if x.as_view().is_on_host() {
            return f(x);
        }
        let mut rooms = self.lock();
        let mut there = rooms.recv.of(self.storage.as_ref(), x.dtype(), x.len());
        self.storage.copy(there.reborrow(), x.as_view());
        f(there.reborrow())?;
        self.storage.copy(x.reborrow(), there.as_view());
        Ok(())
    }
}

impl Comm for Staged {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world(&self) -> usize {
        self.inner.world()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let Rooms { send: out, recv: room, .. } = &mut *self.lock();
        let send = out.down(self.storage.as_ref(), send);
        self.received(room, recv, |recv| self.inner.all_gather(recv, send, counts))
    }

    fn reduce_scatter_fold(&self, partials: &[View], counts: &[usize], sink: &mut Sink) -> Result<()> {
        if partials.iter().all(View::is_on_host) && !partials.is_empty() {
            return self.inner.reduce_scatter_fold(partials, counts, sink);
        }
        let (storage, Rooms { send, piece, .. }) = (self.storage.as_ref(), &mut *self.lock());
        let mut out = send.of(storage, Dtype::F32, partials.iter().map(View::len).sum());
        let mut end = 0;
        for partial in partials {
            end += partial.len();
            storage.copy(out.slice_mut(end - partial.len()..end), *partial);
        }
        let (mut rest, mut sent) = (out.as_view(), Vec::with_capacity(partials.len()));
        for partial in partials {
            sent.push(rest.slice(0..partial.len()));
            rest = rest.slice(partial.len()..rest.len());
        }
        self.inner.reduce_scatter_fold(&sent, counts, &mut |from, index, part| {
            sink(from, index, storage.to_device(part, piece));
        })
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let Rooms { send: out, recv: room, .. } = &mut *self.lock();
        let send = out.down(self.storage.as_ref(), send);
        self.received(room, recv, |recv| self.inner.reduce_scatter(recv, send, counts))
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        self.through(x, |x| self.inner.all_reduce(x))
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        self.through(x, |x| self.inner.broadcast(x, root))
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let Rooms { send: out, recv: room, .. } = &mut *self.lock();
        let send = out.down(self.storage.as_ref(), send);
        self.received(room, recv, |recv| self.inner.all_to_all(recv, recv_counts, send, send_counts))
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.inner.all_gather_bytes(bytes)
    }

    fn barrier(&self) -> Result<()> {
        self.inner.barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn aborted(&self) -> Option<String> {
        self.inner.aborted()
    }
}
