//! NCCL as a [`Comm`]: buffers in the memory of this rank's card travel by NCCL, everything else by a transport between hosts
//! (sizes, reports, barriers), which also tells the others of an abort.
//!
//! What is sent and received is put on the card's own stream: a call returns before it is done, in order with the ops around
//! it. Only pieces travel; they are summed by the caller's fold, in the same fixed tree as on every other transport. NCCL's own
//! sums would add in an order that depends on the number of ranks.
use super::{DataType, Group, Nccl, NcclError, Stream};
use crate::{Comm, CommError, Result, Sink, call::starts, local::WAIT, staged::Staged};
use device::{Buf, Cuda, Dtype, Storage, View, ViewMut};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// One rank.
pub struct NcclComm {
    group: Group,
    /// Of the host's memory, and of sums that the engine doesn't ask for.
    hosts: Staged,
    cuda: Arc<Cuda>,
    /// Pieces that were received.
    room: Mutex<Buf>,
}

impl NcclComm {
    /// The ranks of `hosts` meet, each with a card of its own, within `limit`. Later NCCL takes work at once, or waits until the peer
    /// has come to it: it connects ranks when they first have to do with each other. That is waited for as on other transports.
    pub fn meet(
        nccl: &Nccl,
        cuda: Arc<Cuda>,
        hosts: Arc<dyn Comm>,
        limit: Duration,
    ) -> super::Result<NcclComm> {
        cuda.make_current().map_err(|e| NcclError::Meeting(e.to_string()))?;
        let mut group = Group::meet(nccl, hosts.as_ref(), limit)?;
        group.set_limit(WAIT);
        let hosts = Staged::new(hosts, cuda.clone());
        Ok(NcclComm { group, hosts, cuda, room: Mutex::default() })
    }

    fn stream(&self) -> Stream {
        Stream(self.cuda.stream())
    }

    /// The calling thread's work is the card's from now on.
    fn enter(&self) -> Result<()> {
        self.cuda.make_current().map_err(|e| CommError::Io(e.to_string()))
    }

    /// Sends and receives of elements of one type, which happen together.
    fn exchange(
        &self,
        sends: &[(usize, u64, usize)],
        receives: &[(usize, u64, usize)],
        dtype: Dtype,
    ) -> Result<()> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the callers' addresses are those of views on this card, which are read and written in the stream's order,
        // as is whatever becomes of their memory afterwards.
        unsafe { self.group.exchange(sends, receives, of(dtype), self.stream()) }.map_err(error)
    }
}

/// As NCCL names the type.
fn of(dtype: Dtype) -> DataType {
    match dtype {
        Dtype::F32 => DataType::F32,
        Dtype::Bf16 => DataType::Bf16,
        Dtype::F16 => DataType::F16,
    }
}

fn error(e: NcclError) -> CommError {
    match e {
        NcclError::Aborted(reason) => CommError::Aborted(reason),
        other => CommError::Io(other.to_string()),
    }
}

/// Where each rank's part begins in a view, in bytes, with its elements; parts without elements are left out.
fn parts(x: View, counts: &[usize]) -> Vec<(usize, u64, usize)> {
    let size = x.dtype().size();
    let all = starts(counts).into_iter().zip(counts).enumerate();
    all.filter(|(_, (_, n))| **n > 0)
        .map(|(rank, (start, n))| (rank, x.address() + (start * size) as u64, *n))
        .collect()
}

/// Stops a call whose views don't have the lengths that its counts say.
fn expect(what: &str, have: usize, counts: &[usize]) -> Result<()> {
    let want: usize = counts.iter().sum();
    if have == want {
        return Ok(());
    }
    Err(CommError::Mismatch(format!("{what} has {have} elements, the counts say {want}")))
}

impl Comm for NcclComm {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world(&self) -> usize {
        self.group.world()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let recv_at = recv.as_view();
        if recv_at.is_on_host() && send.is_on_host() {
            return self.hosts.all_gather(recv, send, counts);
        }
        expect("all_gather: recv", recv.len(), counts)?;
        expect("all_gather: send", send.len(), &counts[self.rank()..=self.rank()])?;
        let receives = parts(recv_at, counts);
        if counts.iter().all(|n| *n == send.len()) && !send.is_empty() {
            self.enter()?;
            let (to, from, n) = (recv_at.address(), send.address(), send.len());
            // SAFETY: as in `exchange`.
            let done = unsafe { self.group.all_gather(to, from, n, of(send.dtype()), self.stream()) };
            return done.map_err(error);
        }
        let own = |rank: usize| (rank, send.address(), send.len());
        let sends: Vec<_> = (0..self.world()).filter(|_| !send.is_empty()).map(own).collect();
        self.exchange(&sends, &receives, send.dtype())
    }

    fn reduce_scatter_fold(&self, partials: &[View], counts: &[usize], sink: &mut Sink) -> Result<()> {
        for partial in partials {
            expect("reduce_scatter_fold: a partial", partial.len(), counts)?;
        }
        // Ranks may have different numbers of partials, which only they know.
        let said = self.hosts.all_gather_bytes(&(partials.len() as u32).to_le_bytes())?;
        let number = |bytes: &Vec<u8>| <[u8; 4]>::try_from(&bytes[..]).map(u32::from_le_bytes);
        let theirs: Vec<usize> = said.iter().map_while(|b| number(b).ok()).map(|n| n as usize).collect();
        if theirs.len() != self.world() {
            return Err(CommError::Mismatch("reduce_scatter_fold: a rank said no number".into()));
        }
        let own = counts[self.rank()];
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let len = own * theirs.iter().sum::<usize>();
        if room.len() < len {
            *room = self.cuda.zeroed(Dtype::F32, len);
        }
        let sends: Vec<_> = partials.iter().flat_map(|partial| parts(*partial, counts)).collect();
        let from = theirs.iter().enumerate().flat_map(|(rank, n)| std::iter::repeat_n(rank, *n));
        let at = |i: usize| room.view().address() + (i * own * size_of::<f32>()) as u64;
        let receives: Vec<_> =
            from.enumerate().filter(|_| own > 0).map(|(i, rank)| (rank, at(i), own)).collect();
        self.exchange(&sends, &receives, Dtype::F32)?;
        let mut i = 0;
        for (rank, n) in theirs.into_iter().enumerate() {
            for index in 0..n {
                sink(rank, index, room.view().slice(i * own..(i + 1) * own));
                i += 1;
            }
        }
        Ok(())
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        self.hosts.reduce_scatter(recv, send, counts)
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        self.hosts.all_reduce(x)
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        self.hosts.broadcast(x, root)
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let recv_at = recv.as_view();
        if recv_at.is_on_host() && send.is_on_host() {
            return self.hosts.all_to_all(recv, recv_counts, send, send_counts);
        }
        expect("all_to_all: recv", recv.len(), recv_counts)?;
        expect("all_to_all: send", send.len(), send_counts)?;
        self.exchange(&parts(send, send_counts), &parts(recv_at, recv_counts), send.dtype())
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.hosts.all_gather_bytes(bytes)
    }

    fn barrier(&self) -> Result<()> {
        self.hosts.barrier()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
        self.hosts.abort(reason);
    }

    fn aborted(&self) -> Option<String> {
        self.hosts.aborted()
    }
}
