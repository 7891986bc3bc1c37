//! Ranks that are processes of one node and meet in one shared memory segment.
//!
//! A collective is a series of *rounds*. In a round every rank fills its slot of the staging memory, enters the round, waits
//! until all have entered it, and reads what it needs from the peers' slots. Slots alternate, so one wait a round is enough
//! (why is written down in `wait.rs`). Rounds of streaming collectives move [`CHUNK`] bytes: small enough to stay in the
//! processors' caches between the writer and the reader.
//!
//! Memory: a rank touches 2 × min([`CHUNK`], staging) of the segment in streaming collectives and up to 2 × staging in
//! [`reduce_scatter_fold`](Comm::reduce_scatter_fold). Where partials don't fit into staging, that one also keeps a private
//! buffer of at most 8 × staging or two of the largest pieces, whichever is more: see `fold.rs`. Pages of the segment are
//! taken when they are first touched; a machine that has none left then ends the rank with SIGBUS.
use crate::{
    Comm, CommError, Result, SharedWindow, Sink,
    call::{self, Call, Place},
};
use device::{Buf, Dtype, View, ViewMut};
use segment::{CommonMap, HeaderMap, Segment};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, atomic::Ordering},
    time::Duration,
};
use wait::{Stopped, publish};

mod fold;
mod part;
mod reduce;
mod segment;
mod stream;
#[cfg(test)]
mod tests;
mod wait;

pub use fold::assembled;
pub(crate) use fold::windows;
pub(crate) use part::{Outgoing, fits};

/// Bytes that a rank shows in one round of a streaming collective, unless staging is smaller.
const CHUNK: usize = 512 << 10;

/// Elements of a cache line.
const LINE: usize = 16;

/// What bounds a group's waits and memory. Every rank must give the same `staging`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a rank waits for the others to join the group.
    pub join: Duration,
    /// How long a rank waits in a collective that a peer doesn't join.
    pub wait: Duration,
    /// Bytes of one of the two staging slots of a rank; rounded up to whole pages.
    pub staging: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { join: Duration::from_secs(60), wait: Duration::from_secs(30 * 60), staging: 8 << 20 }
    }
}

/// One rank of a group of processes. Dropping it leaves the group: peers that need it then get [`CommError::Aborted`].
pub struct ShmComm {
    at: Place,
    /// What the ranks of this segment are called in errors: their ranks in the job, of which this may be one host's part.
    names: Names,
    limits: Limits,
    /// May a wait begin with a short spin? Only when every rank can have a processor of its own.
    spin: bool,
    seg: Segment,
    /// The segment's file: common memory lies behind the segment.
    fd: OwnedFd,
    /// Serialises the collectives of one rank.
    turn: Mutex<Turn>,
}

/// The job's ranks that meet in a segment, by their place in it, and the job's number of ranks.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) ranks: Vec<usize>,
    pub(crate) world: usize,
}

pub(crate) struct Turn {
    /// Collectives called so far.
    seq: u64,
    /// Rounds entered so far.
    round: u64,
    /// Where pieces are put together that don't fit into staging; kept for the next time.
    scratch: Buf,
    /// Bytes of common memory behind the segment.
    common: usize,
}

impl Turn {
    /// The slot of the round to come.
    fn next_slot(&self) -> usize {
        ((self.round + 1) % 2) as usize
    }
}

/// Aborts the group of the segment `fd` without being a rank of it, for instance while ranks still join.
pub fn abort(fd: BorrowedFd<'_>, reason: &str) -> Result<()> {
    HeaderMap::open(fd)?.header().abort(reason);
    Ok(())
}

impl ShmComm {
    /// Joins a group as `rank` of `world`. `fd` is one memfd that every rank inherited, of size 0 at first. Returns when
    /// all ranks have joined; fails when they don't within `limits.join`, and when ranks disagree about world or staging.
    pub fn join(fd: OwnedFd, rank: usize, world: usize, limits: Limits) -> Result<ShmComm> {
        ShmComm::join_part(fd, rank, limits, Names { ranks: (0..world).collect(), world })
    }

    /// As [`ShmComm::join`] for one host's part of a job: `place` is this rank's place among `names.ranks`.
    pub(crate) fn join_part(fd: OwnedFd, place: usize, limits: Limits, names: Names) -> Result<ShmComm> {
        let (rank, world) = (place, names.ranks.len());
        let seg = Segment::open(fd.as_fd(), world, &limits)?;
        if rank >= world {
            return Err(CommError::Io(format!("rank {rank} in a group of {world} ranks")));
        }
        // The processor count of the machine, not of this process: ranks that are pinned have one each.
        // SAFETY: asks for a number.
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        let turn = Mutex::new(Turn { seq: 0, round: 0, scratch: Buf::zeroed(0), common: 0 });
        let spin = usize::try_from(cpus).is_ok_and(|cpus| cpus >= world);
        let pid = std::process::id();
        let joined = &seg.line(rank).joined;
        if let Err(other) = joined.compare_exchange(0, pid, Ordering::SeqCst, Ordering::SeqCst) {
            let what = format!("rank {rank} has joined already, as process {other}; this is process {pid}");
            seg.header().abort(&what);
            return Err(CommError::Io(what));
        }
        let comm = ShmComm { at: Place { rank, world }, names, limits, spin, seg, fd, turn };
        comm.seg.header().ring();
        match comm.seg.await_join(limits.join) {
            Ok(()) => comm.healthy().map(|()| comm),
            Err(stopped) => Err(comm.stopped(stopped, "join", limits.join)),
        }
    }

    /// Fails when the group is aborted.
    fn healthy(&self) -> Result<()> {
        self.seg.header().aborted().map_or(Ok(()), |reason| Err(CommError::Aborted(reason)))
    }

    /// Peers that need this rank fail from now on.
    pub(crate) fn leave(&self) {
        self.seg.line(self.at.rank).left.store(1, Ordering::SeqCst);
        self.seg.header().ring();
    }

    /// Begins a collective; fails when the group is aborted or the arguments don't fit.
    fn enter(&self, call: std::result::Result<Call, String>) -> Result<(MutexGuard<'_, Turn>, Call)> {
        let mut turn = self.turn.lock().map_err(|_| {
            let reason = format!("rank {} panicked inside a collective", self.names.ranks[self.at.rank]);
            self.abort(&reason);
            CommError::Aborted(reason)
        })?;
        self.healthy()?;
        let call = call.map_err(|e| self.disagree(format!("rank {}: {e}", self.at.rank)))?.numbered(turn.seq);
        turn.seq += 1;
        Ok((turn, call))
    }

    /// A mismatch ends the group: later calls would pair with the wrong ones.
    fn disagree(&self, what: String) -> CommError {
        let error = CommError::Mismatch(what);
        self.abort(&error.to_string());
        error
    }

    /// The error for a wait that ended early; a rank that gives up ends the group.
    fn stopped(&self, why: Stopped, what: &str, limit: Duration) -> CommError {
        let me = self.names.ranks[self.at.rank];
        match why {
            Stopped::Aborted(reason) => CommError::Aborted(reason),
            Stopped::Left(rank) => {
                let rank = self.names.ranks[rank];
                let reason = format!("rank {rank} left the group before {what}");
                self.abort(&reason);
                CommError::Aborted(reason)
            }
            Stopped::Late(missing) => {
                let missing: Vec<usize> = missing.into_iter().map(|r| self.names.ranks[r]).collect();
                let missing = call::ranks(&missing, self.names.world);
                let reason =
                    format!("rank {me} waited {limit:?} in {what} for {missing}, which did not come");
                self.abort(&reason);
                CommError::Io(reason)
            }
        }
    }

    /// Enters the next round with what was written to its slot; other ranks may read it from now on.
    fn post(&self, turn: &mut Turn, call: &Call) {
        turn.round += 1;
        self.seg.post(self.at.rank, turn.round, call.words());
    }

    /// Waits until all ranks have entered the round and checks that they did so for the same call.
    fn meet(&self, turn: &Turn, call: &Call) -> Result<()> {
        if let Err(stopped) = self.seg.await_round(turn.round, self.spin, self.limits.wait) {
            let what = format!("{} (call {})", call.kind.name(), call.seq);
            return Err(self.stopped(stopped, &what, self.limits.wait));
        }
        let slot = (turn.round % 2) as usize;
        for peer in self.peers() {
            let words = self.seg.line(peer).call[slot].each_ref().map(|w| w.load(Ordering::Relaxed));
            let (me, peer) = (self.names.ranks[self.at.rank], self.names.ranks[peer]);
            call.agree(me, peer, words).map_err(|what| self.disagree(what))?;
        }
        Ok(())
    }

    /// The other ranks, beginning with the next one: not all read from the same rank at a time.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let Place { rank, world } = self.at;
        (1..world).map(move |i| (rank + i) % world)
    }

    /// Elements that fit into a round of a streaming collective.
    fn chunk(&self) -> usize {
        CHUNK.min(self.seg.layout.staging) / size_of::<f32>()
    }

    /// As [`ShmComm::chunk`] for each peer, when every peer gets something else; whole cache lines.
    fn chunk_each(&self) -> usize {
        (self.chunk() / (self.at.world - 1)) & !(LINE - 1)
    }

    /// Where in `owner`'s slot the chunk for `dest` begins, when every peer gets `each` elements.
    fn dest_at(&self, owner: usize, dest: usize, each: usize) -> usize {
        (dest - usize::from(dest > owner)) * each
    }

    /// Sends `send[i..]`'s chunks to everybody and hands every peer's chunk to `take(peer, chunk)`; `lens[r]` bytes come from
    /// rank r. What the lengths are must be agreed.
    fn gather(
        &self,
        turn: &mut Turn,
        call: &Call,
        send: &[u8],
        lens: &[usize],
        mut take: impl FnMut(usize, usize, &[u8]),
    ) -> Result<()> {
        let chunk = self.chunk() * size_of::<f32>();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let mut at = 0;
        loop {
            let slot = turn.next_slot();
            let mine = piece(send.len(), at, chunk);
            // SAFETY: this rank's slot of the next round.
            unsafe { self.seg.slot_mut(self.at.rank, slot, 0, mine.len()) }
                .copy_from_slice(&send[mine.clone()]);
            self.post(turn, call);
            take(self.at.rank, at, &send[mine]);
            self.meet(turn, call)?;
            for peer in self.peers() {
                let len = piece(lens[peer], at, chunk).len();
                // SAFETY: read within the round.
                take(peer, at, unsafe { self.seg.slot(peer, slot, 0, len) });
            }
            at += chunk;
            if at >= longest {
                return Ok(());
            }
        }
    }

    /// Every rank's number, from one round.
    fn gather_number(&self, turn: &mut Turn, call: &Call, number: u64) -> Result<Vec<u64>> {
        let slot = turn.next_slot();
        publish(self.seg.table(self.at.rank, slot), [number]);
        self.post(turn, call);
        self.meet(turn, call)?;
        Ok((0..self.at.world).map(|r| self.seg.table(r, slot)[0].load(Ordering::Relaxed)).collect())
    }

    /// Publishes what this rank sends and expects, and checks the peers' tables: the longest message between any two.
    fn agree_all_to_all(
        &self,
        turn: &mut Turn,
        call: &Call,
        recv_counts: &[usize],
        send_counts: &[usize],
    ) -> Result<usize> {
        let Place { rank, world } = self.at;
        let slot = turn.next_slot();
        let words = send_counts.iter().chain(recv_counts).map(|&n| n as u64);
        publish(self.seg.table(rank, slot), words);
        self.post(turn, call);
        self.meet(turn, call)?;
        let mut longest = 0;
        for peer in 0..world {
            let table: Vec<u64> =
                self.seg.table(peer, slot).iter().map(|w| w.load(Ordering::Relaxed)).collect();
            call::pair(peer, rank, table[rank], recv_counts[peer] as u64)
                .and_then(|()| call::pair(rank, peer, send_counts[peer] as u64, table[world + rank]))
                .map_err(|what| self.disagree(what))?;
            let sent = (0..world).filter(|&to| to != peer).map(|to| table[to]).max();
            longest = longest.max(sent.unwrap_or(0));
        }
        // A peer that publishes nonsense makes rounds, not memory.
        Ok(usize::try_from(longest).unwrap_or(usize::MAX))
    }
}

/// The part of `0..len` from `at`, at most `chunk` long; empty beyond the end.
fn piece(len: usize, at: usize, chunk: usize) -> std::ops::Range<usize> {
    at.min(len)..at.saturating_add(chunk).min(len)
}

impl Comm for ShmComm {
    fn rank(&self) -> usize {
        self.at.rank
    }

    fn world(&self) -> usize {
        self.at.world
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let size = send.dtype().size();
        let call =
            Call::all_gather_of(self.at, (recv.len(), recv.dtype().size()), (send.len(), size), counts);
        let (mut turn, call) = self.enter(call)?;
        let (recv, send) = (recv.bytes(), send.bytes());
        if self.at.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let lens: Vec<usize> = counts.iter().map(|n| n * size).collect();
        let starts = call::starts(&lens);
        let large = recv.len() >= stream::LARGE;
        self.gather(&mut turn, &call, send, &lens, |from, at, chunk| {
            let at = starts[from] + at.min(lens[from]);
            stream::copy(&mut recv[at..at + chunk.len()], chunk, large);
        })
    }

    fn reduce_scatter_fold(&self, partials: &[View], counts: &[usize], sink: &mut Sink) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let (mut turn, call) = self.enter(Call::reduce_scatter_fold(self.at, lens, counts))?;
        if self.at.world == 1 {
            partials.iter().enumerate().for_each(|(i, p)| sink(0, i, *p));
            return Ok(());
        }
        let partials: Vec<&[f32]> = partials.iter().map(|p| p.host()).collect();
        self.fold(&mut turn, &call, &partials, counts, sink)
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let (mut turn, call) = self.enter(Call::reduce_scatter(self.at, recv.len(), send.len(), counts))?;
        let (recv, send) = (recv.host(), send.host());
        if self.at.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        self.reduce_scatter_chunks(&mut turn, &call, recv, send, counts)
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut turn, call) = self.enter(Ok(Call::all_reduce(x.len())))?;
        if self.at.world == 1 {
            return Ok(());
        }
        let x = x.host();
        self.all_reduce_any(&mut turn, &call, x)
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let (mut turn, call) = self.enter(Call::broadcast(self.at, x.len(), root))?;
        if self.at.world == 1 {
            return Ok(());
        }
        let x = x.host();
        let (len, chunk) = (x.len(), self.chunk());
        let mut at = 0;
        loop {
            let slot = turn.next_slot();
            let part = piece(len, at, chunk);
            if self.at.rank == root {
                // SAFETY: this rank's slot of the next round.
                unsafe { self.seg.slot_f32_mut(root, slot, 0, part.len()) }.copy_from_slice(&x[part.clone()]);
            }
            self.post(&mut turn, &call);
            self.meet(&turn, &call)?;
            if self.at.rank != root {
                // SAFETY: read within the round.
                x[part.clone()].copy_from_slice(unsafe { self.seg.slot_f32(root, slot, 0, part.len()) });
            }
            at += chunk;
            if at >= len {
                return Ok(());
            }
        }
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let size = send.dtype().size();
        let lens = ((recv.len(), recv.dtype().size()), (send.len(), size));
        let call = Call::all_to_all_of(self.at, lens.0, recv_counts, lens.1, send_counts);
        let (mut turn, call) = self.enter(call)?;
        let (recv, send) = (recv.bytes(), send.bytes());
        let Place { rank, world } = self.at;
        if world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let longest = self.agree_all_to_all(&mut turn, &call, recv_counts, send_counts)?.saturating_mul(size);
        let bytes = |counts: &[usize]| counts.iter().map(|n| n * size).collect::<Vec<_>>();
        let (sent, received) = (bytes(send_counts), bytes(recv_counts));
        let (to, from) = (call::starts(&sent), call::starts(&received));
        let each = self.chunk_each() * size_of::<f32>();
        recv[from[rank]..][..received[rank]].copy_from_slice(&send[to[rank]..][..sent[rank]]);
        let mut at = 0;
        while at < longest {
            let slot = turn.next_slot();
            for peer in self.peers() {
                let part = piece(sent[peer], at, each);
                let start = self.dest_at(rank, peer, each);
                // SAFETY: this rank's slot of the next round.
                unsafe { self.seg.slot_mut(rank, slot, start, part.len()) }
                    .copy_from_slice(&send[to[peer]..][part]);
            }
            self.post(&mut turn, &call);
            self.meet(&turn, &call)?;
            for peer in self.peers() {
                let part = piece(received[peer], at, each);
                let start = self.dest_at(peer, rank, each);
                // SAFETY: read within the round.
                let chunk = unsafe { self.seg.slot(peer, slot, start, part.len()) };
                recv[from[peer]..][part].copy_from_slice(chunk);
            }
            at = at.saturating_add(each);
        }
        Ok(())
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut turn, call) = self.enter(Call::all_gather_bytes(bytes.len()))?;
        if self.at.world == 1 {
            return Ok(vec![bytes.to_vec()]);
        }
        let lens = self.gather_number(&mut turn, &call, bytes.len() as u64)?;
        let cap = crate::MAX_GATHER_BYTES as u64;
        if let Some(rank) = lens.iter().position(|&n| n > cap) {
            return Err(self.disagree(format!(
                "rank {rank} gives {} bytes to all_gather_bytes; at most {cap} are allowed",
                lens[rank]
            )));
        }
        let lens: Vec<usize> = lens.into_iter().map(|n| n as usize).collect();
        let mut all: Vec<Vec<u8>> = lens.iter().map(|&n| Vec::with_capacity(n)).collect();
        self.gather(&mut turn, &call, bytes, &lens, |from, _, chunk| all[from].extend_from_slice(chunk))?;
        Ok(all)
    }

    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let (mut turn, call) = self.enter(Call::common(self.at, counts, dtype.size()))?;
        let bytes = counts.iter().sum::<usize>() * dtype.size();
        let (at, end) = self.seg.behind(turn.common, bytes)?;
        // A rank that hasn't the memory's address space ends the group before anybody believes in it.
        let map = CommonMap::open(self.fd.as_fd(), at, bytes).inspect_err(|e| self.abort(&e.to_string()))?;
        turn.common = end;
        self.post(&mut turn, &call);
        self.meet(&turn, &call)?;
        let start = map.start();
        // SAFETY: mapped with this length; page-aligned; all ranks gave the same counts and element.
        Ok(Some(unsafe { SharedWindow::new(Arc::new(map), start, dtype, counts, self.at.rank) }))
    }

    fn barrier(&self) -> Result<()> {
        let (mut turn, call) = self.enter(Ok(Call::barrier()))?;
        self.post(&mut turn, &call);
        self.meet(&turn, &call)
    }

    fn abort(&self, reason: &str) {
        self.seg.header().abort(reason);
    }

    fn aborted(&self) -> Option<String> {
        self.seg.header().aborted()
    }
}

impl Drop for ShmComm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.names.ranks[self.at.rank]));
        }
        self.leave();
    }
}
