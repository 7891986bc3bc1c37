//! [`StagedComm`]: collectives of buffers in GPU memory, which are copied to pinned host memory for
//! the transfer.
//!
//! Data is copied to the host, transferred by a transport between host memories, and copied back.
//! Ranks that share a GPU, or whose GPUs cannot reach each other, thus train with the same bits as
//! on every other transport. Buffers in host memory are passed to the transport directly.
use crate::{AbortReason, Comm, LinkDelays, PartialSink, Result};
use device::{Buf, Dtype, Storage, View, ViewMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Communicator that also accepts buffers in GPU memory, by copying the data to host memory before
/// each collective and the result back afterwards.
pub struct StagedComm {
    inner: Arc<dyn Comm>,
    storage: Arc<dyn Storage>,
    buffers: Mutex<StagingBuffers>,
}

/// The buffers in host memory through which collectives on GPU memory transfer their data, reused
/// by all calls. Each grows to the size of the largest collective so far.
#[derive(Default)]
struct StagingBuffers {
    send: PinnedBuffers,
    recv: PinnedBuffers,
    /// GPU memory for one piece, from which the caller's sink reads it.
    device_piece: Buf,
}

/// Pinned host memory through which data in GPU memory is transferred, with one buffer for each
/// element size.
#[derive(Default)]
struct PinnedBuffers {
    halves: Buf,
    floats: Buf,
}

impl PinnedBuffers {
    /// Returns pinned host memory for `len` elements, with arbitrary content. Replaces the buffer
    /// by a larger one if necessary.
    fn get_buffer(&mut self, storage: &dyn Storage, dtype: Dtype, len: usize) -> ViewMut<'_> {
        let buf = if dtype == Dtype::F32 { &mut self.floats } else { &mut self.halves };
        if buf.len() < len || buf.dtype() != dtype {
            *buf = Buf::default(); // free the old buffer before allocating the new one
            *buf = storage.alloc_staging(dtype, len);
        }
        buf.view_mut().slice(0..len)
    }

    /// Returns `x` itself if it is in host memory, otherwise a copy of `x` in pinned host memory.
    /// Fails if the device has failed, so that no invalid data is sent.
    fn copy_to_host<'a>(&'a mut self, storage: &dyn Storage, x: View<'a>) -> Result<View<'a>> {
        if x.is_on_host() {
            return Ok(x);
        }
        let mut host = self.get_buffer(storage, x.dtype(), x.len());
        storage.copy(host.reborrow(), x);
        storage.check_status()?;
        Ok(host.into_view())
    }
}

impl StagedComm {
    /// Creates a communicator that copies data between GPU memory (`storage`) and host memory, and
    /// calls the collectives of the host-memory communicator `inner`.
    pub fn new(inner: Arc<dyn Comm>, storage: Arc<dyn Storage>) -> Self {
        StagedComm { inner, storage, buffers: Mutex::default() }
    }

    /// Returns the wrapped communicator for host memory, through which all data is transferred.
    pub fn inner(&self) -> &Arc<dyn Comm> {
        &self.inner
    }

    /// Locks the staging buffers in host memory for the duration of one collective.
    fn lock_buffers(&self) -> MutexGuard<'_, StagingBuffers> {
        // no code reads the contents that a panic may have left in the buffers
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the collective `f` with a receive buffer in pinned host memory, and then copies the
    /// received data to `recv` in GPU memory. If `recv` is in host memory, runs `f` with `recv`
    /// itself.
    fn run_with_host_recv(
        &self,
        staging: &mut PinnedBuffers,
        recv: ViewMut,
        f: impl FnOnce(ViewMut) -> Result<()>,
    ) -> Result<()> {
        if recv.as_view().is_on_host() {
            return f(recv);
        }
        let mut host = staging.get_buffer(self.storage.as_ref(), recv.dtype(), recv.len());
        f(host.reborrow())?;
        self.storage.copy(recv, host.as_view());
        Ok(())
    }

    /// Runs the collective `f` on a copy of `x` in host memory, and copies the result back to `x`.
    /// If `x` is in host memory, runs `f` on `x` itself.
    fn run_with_host_copy(&self, mut x: ViewMut, f: impl FnOnce(ViewMut) -> Result<()>) -> Result<()> {
        if x.as_view().is_on_host() {
            return f(x);
        }
        let mut buffers = self.lock_buffers();
        let mut host = buffers.recv.get_buffer(self.storage.as_ref(), x.dtype(), x.len());
        self.storage.copy(host.reborrow(), x.as_view());
        self.storage.check_status()?;
        f(host.reborrow())?;
        self.storage.copy(x.reborrow(), host.as_view());
        Ok(())
    }
}

impl Comm for StagedComm {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn list_rank_hosts(&self) -> Vec<usize> {
        self.inner.list_rank_hosts()
    }

    fn take_link_delays(&self) -> Option<LinkDelays> {
        self.inner.take_link_delays()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let StagingBuffers { send: send_staging, recv: recv_staging, .. } = &mut *self.lock_buffers();
        let send = send_staging.copy_to_host(self.storage.as_ref(), send)?;
        self.run_with_host_recv(recv_staging, recv, |recv| self.inner.all_gather(recv, send, counts))
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        if partials.iter().all(View::is_on_host) && !partials.is_empty() {
            return self.inner.reduce_scatter_ordered(partials, partial_counts, counts, sink);
        }
        let storage = self.storage.as_ref();
        let StagingBuffers { send, device_piece, .. } = &mut *self.lock_buffers();
        let mut host = send.get_buffer(storage, Dtype::F32, partials.iter().map(View::len).sum());
        let mut end = 0;
        for partial in partials {
            end += partial.len();
            storage.copy(host.slice_mut(end - partial.len()..end), *partial);
        }
        storage.check_status()?;
        let (mut rest, mut host_partials) = (host.as_view(), Vec::with_capacity(partials.len()));
        for partial in partials {
            host_partials.push(rest.slice(0..partial.len()));
            rest = rest.slice(partial.len()..rest.len());
        }
        self.inner.reduce_scatter_ordered(
            &host_partials,
            partial_counts,
            counts,
            &mut |from, index, piece| {
                sink(from, index, storage.to_device(piece, device_piece));
            },
        )
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let StagingBuffers { send: send_staging, recv: recv_staging, .. } = &mut *self.lock_buffers();
        let send = send_staging.copy_to_host(self.storage.as_ref(), send)?;
        self.run_with_host_recv(recv_staging, recv, |recv| self.inner.reduce_scatter(recv, send, counts))
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        self.run_with_host_copy(x, |x| self.inner.all_reduce(x))
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        self.run_with_host_copy(x, |x| self.inner.broadcast(x, root))
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let StagingBuffers { send: send_staging, recv: recv_staging, .. } = &mut *self.lock_buffers();
        let send = send_staging.copy_to_host(self.storage.as_ref(), send)?;
        self.run_with_host_recv(recv_staging, recv, |recv| {
            self.inner.all_to_all(recv, recv_counts, send, send_counts)
        })
    }

    fn all_to_all_bytes(
        &self,
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()> {
        self.inner.all_to_all_bytes(recv, recv_counts, send, send_counts)
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

    fn abort_reason(&self) -> Option<AbortReason> {
        self.inner.abort_reason()
    }
}
