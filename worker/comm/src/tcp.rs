//! Ranks on several hosts: TCP between the hosts, shared memory inside each.
//!
//! Two kinds of steps make all collectives (docs/design/comm.md): *spread* (what every rank needs crosses the network once
//! per pair of hosts, to the rank's counterpart there, and is shared inside the host) and *trade* (what one rank needs of
//! another goes directly). Sums are made by the same fixed tree as everywhere, at the receiver. With one rank per host this is
//! plain TCP.
//!
//! Memory: nothing is allocated for data after the largest call has been seen once, and a rank's private buffer stays within
//! 8 × staging or two of the largest pieces, whichever is more.
use crate::{
    Comm, CommError, Result, Sink,
    call::{self, Call, Place},
    shm::{self, Names, Outgoing, ShmComm, windows},
    sum::tree_sum,
};
use device::{Buf, View, ViewMut};
use handshake::{Identity, Lane, SECRET};
use mesh::{Conn, Job, Source, Step};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    ops::Range,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
    thread::JoinHandle,
    time::Duration,
};
use topology::Topology;
use watch::{Shared, Watch};

mod handshake;
mod join;
mod mesh;
mod topology;
mod watch;

/// Up to this many bytes every rank sums all of an all_reduce for itself.
const SMALL: usize = 16 << 10;
/// The private buffer may take this many times `staging`.
const WINDOW: usize = 8;
/// The most partials of one rank in a reduce_scatter_fold.
const MAX_PARTIALS: u64 = 1 << 16;
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// Bytes of the job's key.
pub const KEY: usize = SECRET;

/// What bounds a group's waits and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Joining, waiting in a collective, and staging memory, inside a host and between hosts.
    pub shm: shm::Limits,
    /// A peer of which no byte came for this long is dead. Peers send a heartbeat five times as often.
    pub silence: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { shm: shm::Limits::default(), silence: Duration::from_secs(5) }
    }
}

/// One rank as the others reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its host: any number, equal for the ranks of one host.
    pub host: usize,
    /// Where it listens; tried in this order.
    pub addresses: Vec<SocketAddr>,
}

/// The group to join: the same on every rank but for `rank`.
#[derive(Clone)]
pub struct Group {
    /// This rank.
    pub rank: usize,
    /// All ranks, by rank.
    pub members: Vec<Member>,
    /// The run's name.
    pub run: String,
    /// Connections of another attempt of the run are refused.
    pub attempt: u32,
    /// What the ranks of this attempt know and nobody else.
    pub key: [u8; KEY],
}

/// A listener, bound before anybody is told where. Collectives begin with [`Endpoint::join`].
pub struct Endpoint {
    listener: TcpListener,
}

/// Makes a group that is being joined, or has been, end; from any thread.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// For [`Endpoint::join`] as rank `rank` of `world`.
    pub fn new(rank: usize, world: usize) -> Result<Self> {
        let shared = Shared::new(rank, world).map_err(|e| CommError::Io(format!("an event: {e}")))?;
        Ok(Stopper(Arc::new(shared)))
    }

    /// As [`Comm::abort`].
    pub fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

impl Endpoint {
    /// Listens at a port of the system's choice.
    pub fn bind(address: IpAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        // std's backlog is made for less than a thousand peers that come at once
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(BACKLOG)?)?;
        Ok(Endpoint { listener })
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Joins the group. `memory` is one memfd that the ranks of this host share (see [`ShmComm::join`]), needed where a host
    /// has several. Returns when all peers have proved who they are; fails when they don't within `limits.shm.join`.
    pub fn join(
        self,
        group: &Group,
        memory: Option<OwnedFd>,
        limits: Limits,
        stopper: &Stopper,
    ) -> Result<TcpComm> {
        let hosts: Vec<usize> = group.members.iter().map(|m| m.host).collect();
        let topology = Topology::new(group.rank, &hosts).map_err(CommError::Io)?;
        let shared = stopper.0.clone();
        let joined = self.join_all(group, memory, limits, topology, &shared);
        if let Err(e) = &joined {
            // Whoever has joined already learns why this rank does not come.
            shared.abort(&format!("rank {} can't join: {e}", group.rank));
        }
        joined
    }

    fn join_all(
        self,
        group: &Group,
        memory: Option<OwnedFd>,
        limits: Limits,
        topology: Topology,
        shared: &Arc<Shared>,
    ) -> Result<TcpComm> {
        let shm = join_host(&topology, memory, limits)?;
        if let Some(shm) = &shm {
            shared.with_shm(shm.clone());
        }
        let id = Identity {
            key: group.key,
            run: *blake3::hash(group.run.as_bytes()).as_bytes(),
            attempt: group.attempt,
            rank: group.rank as u32,
            world: topology.world() as u32,
        };
        let addresses: Vec<Vec<SocketAddr>> = group.members.iter().map(|m| m.addresses.clone()).collect();
        let meeting = join::Meeting {
            id: &id,
            topology: &topology,
            addresses: &addresses,
            shared,
            limit: limits.shm.join,
            silence: limits.silence,
        };
        let streams = meeting.meet(&self.listener)?;
        drop(self.listener); // from here on strangers meet a closed port
        let failed = |e: std::io::Error| CommError::Io(format!("the watch connections: {e}"));
        let (data, watch): (Vec<_>, Vec<_>) =
            streams.into_iter().partition(|(_, lane, _)| *lane == Lane::Data);
        let mut conns: Vec<Option<Conn>> = (0..topology.world()).map(|_| None).collect();
        for (rank, _, stream) in data {
            conns[rank as usize] = Some(Conn::new(stream));
        }
        let watch = watch.into_iter().map(|(rank, _, stream)| (rank as usize, stream)).collect();
        let watch = Watch::new(shared.clone(), watch, limits.silence, limits.shm.join).map_err(failed)?;
        let thread =
            std::thread::Builder::new().name("comm-watch".into()).spawn(|| watch.run()).map_err(failed)?;
        let turn = Mutex::new(Turn { seq: 0, conns, scratch: Buf::zeroed(0) });
        Ok(TcpComm { topology, shared: shared.clone(), shm, limits, turn, watch: Some(thread) })
    }
}

/// The shared memory of this host's ranks.
fn join_host(topology: &Topology, memory: Option<OwnedFd>, limits: Limits) -> Result<Option<Arc<ShmComm>>> {
    if topology.here().len() == 1 {
        return Ok(None);
    }
    let memory = memory.ok_or_else(|| {
        let here = call::ranks(topology.here(), topology.world());
        CommError::Io(format!(
            "{here} are on one host, but no shared memory was given to rank {}",
            topology.rank
        ))
    })?;
    let names = Names { ranks: topology.here().to_vec(), world: topology.world() };
    Ok(Some(Arc::new(ShmComm::join_part(memory, topology.my_place(), limits.shm, names)?)))
}

/// One rank of a group on several hosts. Dropping it leaves the group: peers that need it then get [`CommError::Aborted`].
pub struct TcpComm {
    topology: Topology,
    shared: Arc<Shared>,
    /// The ranks of this host, where there are several.
    shm: Option<Arc<ShmComm>>,
    limits: Limits,
    /// Serialises the collectives of one rank.
    turn: Mutex<Turn>,
    watch: Option<JoinHandle<()>>,
}

struct Turn {
    /// Collectives called so far.
    seq: u64,
    /// Data connections by rank.
    conns: Vec<Option<Conn>>,
    /// Where pieces are put together before they are summed or shown; kept for the next time.
    scratch: Buf,
}

/// `need` elements of `scratch`.
fn room_in(scratch: &mut Buf, need: usize) -> &mut [f32] {
    if scratch.len() < need {
        *scratch = Buf::zeroed(0); // the old memory goes first
        *scratch = Buf::zeroed(need);
    }
    &mut scratch.host_mut()[..need]
}

/// Aborts the group when a sink panics, so that peers don't wait for this rank.
struct OnPanic<'a>(&'a TcpComm);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort(&format!("rank {} panicked inside a collective", self.0.rank()));
        }
    }
}

impl TcpComm {
    fn place(&self) -> Place {
        Place { rank: self.topology.rank, world: self.topology.world() }
    }

    /// Begins a collective; fails when the group is aborted or the arguments don't fit.
    fn enter(&self, call: std::result::Result<Call, String>) -> Result<(MutexGuard<'_, Turn>, Call)> {
        let rank = self.rank();
        let mut turn = self.turn.lock().map_err(|_| {
            let reason = format!("rank {rank} panicked inside a collective");
            self.abort(&reason);
            CommError::Aborted(reason)
        })?;
        if let Some(reason) = self.shared.reason() {
            return Err(CommError::Aborted(reason));
        }
        let call = call.map_err(|e| self.disagree(format!("rank {rank}: {e}")))?.numbered(turn.seq);
        turn.seq += 1;
        Ok((turn, call))
    }

    /// A mismatch ends the group: later calls would pair with the wrong ones.
    fn disagree(&self, what: String) -> CommError {
        let error = CommError::Mismatch(what);
        self.abort(&error.to_string());
        error
    }

    /// Moves what has to cross the network.
    fn cross(&self, conns: &mut [Option<Conn>], call: &Call, buf: &mut [u8], jobs: &mut [Job]) -> Result<()> {
        let step = Step { topology: &self.topology, shared: &self.shared, call, wait: self.limits.shm.wait };
        self.told(step.run(conns, buf, jobs))
    }

    /// Tells everybody why this rank can't go on.
    fn told(&self, result: Result<()>) -> Result<()> {
        result.map_err(|error| match error {
            CommError::Aborted(reason) => {
                self.abort(&reason);
                // Another one may have been first.
                CommError::Aborted(self.shared.reason().unwrap_or(reason))
            }
            CommError::Io(reason) => {
                self.abort(&reason);
                CommError::Io(reason)
            }
            CommError::Mismatch(what) => self.disagree(what),
        })
    }

    /// Every rank's `parts[r]` of `buf` gets to all; each holds its own already.
    fn spread(
        &self,
        conns: &mut [Option<Conn>],
        call: &Call,
        buf: &mut [u8],
        parts: &[Range<usize>],
    ) -> Result<()> {
        let (t, me) = (&self.topology, self.topology.rank);
        let mut jobs: Vec<Job> = t
            .remote()
            .map(|r| {
                let out = t.sends_to(me, r).then(|| Source::Buffer(parts[me].clone()));
                Job::new(r, out, t.sends_to(r, me).then(|| parts[r].clone()))
            })
            .filter(|j| j.out.is_some() || j.room.is_some())
            .collect();
        self.cross(conns, call, buf, &mut jobs)?;
        let Some(shm) = &self.shm else { return Ok(()) };
        let mut held: Vec<Vec<Range<usize>>> = vec![Vec::new(); t.here().len()];
        for (rank, part) in parts.iter().enumerate() {
            held[t.first_here(rank)].push(part.clone());
        }
        self.told(shm.share(&mut shm.part(), call, buf, &held))
    }

    /// `out[r]` goes to rank r, and what rank r sends arrives in `buf[room[r]]`; one's own is the caller's business.
    fn trade(
        &self,
        conns: &mut [Option<Conn>],
        call: &Call,
        out: &[Outgoing],
        buf: &mut [u8],
        room: &[Range<usize>],
    ) -> Result<()> {
        let mut jobs: Vec<Job> = self
            .topology
            .remote()
            .map(|r| Job::new(r, Some(Source::Parts(out[r].clone())), Some(room[r].clone())))
            .collect();
        self.cross(conns, call, buf, &mut jobs)?;
        let Some(shm) = &self.shm else { return Ok(()) };
        let here = self.topology.here();
        let out: Vec<Outgoing> = here.iter().map(|&r| out[r].clone()).collect();
        let room: Vec<Range<usize>> = here.iter().map(|&r| room[r].clone()).collect();
        self.told(shm.trade(&mut shm.part(), call, &out, buf, &room))
    }

    /// Every rank's number.
    fn spread_number(&self, conns: &mut [Option<Conn>], call: &Call, number: u64) -> Result<Vec<u64>> {
        let mut numbers = vec![0u64; self.world()];
        numbers[self.rank()] = number;
        let parts = ranges(&vec![size_of::<u64>(); self.world()]);
        self.spread(conns, call, bytemuck::cast_slice_mut(&mut numbers), &parts)?;
        Ok(numbers)
    }

    /// Elements of the private buffer, where the largest piece has `largest`.
    fn buffer(&self, largest: usize) -> usize {
        (WINDOW * self.limits.shm.staging / size_of::<f32>()).max(largest.saturating_mul(2))
    }

    /// One window of a fold: pieces into the private buffer, then to the sink.
    fn fold_window(
        &self,
        turn: &mut Turn,
        call: &Call,
        partials: &[&[u8]],
        window: &[Range<usize>],
        counts: &[usize],
        sink: &mut Sink,
    ) -> Result<()> {
        let me = self.rank();
        let lens: Vec<usize> = counts.iter().map(|n| n * size_of::<f32>()).collect();
        let dests = ranges(&lens);
        let ours = &partials[window[me].clone()];
        let out: Vec<Outgoing> = dests.iter().map(|d| Outgoing { parts: ours, range: d.clone() }).collect();
        let incoming: Vec<usize> =
            window.iter().enumerate().map(|(r, w)| if r == me { 0 } else { w.len() * lens[me] }).collect();
        let room = ranges(&incoming);
        let Turn { conns, scratch, .. } = turn;
        let buf = room_in(scratch, incoming.iter().sum::<usize>() / size_of::<f32>());
        self.trade(conns, call, &out, bytemuck::cast_slice_mut(buf), &room)?;
        for (rank, indices) in window.iter().enumerate() {
            for (k, i) in indices.clone().enumerate() {
                let piece: &[f32] = match rank == me {
                    true => bytemuck::cast_slice(&partials[i][dests[me].clone()]),
                    false => &buf[room[rank].start / size_of::<f32>() + k * counts[me]..][..counts[me]],
                };
                sink(rank, i, piece.into());
            }
        }
        Ok(())
    }

    /// `out` becomes the sum of `send[starts[me]..]` over ranks; `send` of the others is cut at `starts`. One step.
    fn sum_piece(
        &self,
        turn: &mut Turn,
        call: &Call,
        send: &[f32],
        pieces: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        let (me, n) = (self.rank(), out.len());
        let bytes = [bytemuck::cast_slice(send)];
        let outgoing: Vec<Outgoing> =
            pieces.iter().map(|p| Outgoing { parts: &bytes, range: p.start * 4..p.end * 4 }).collect();
        let incoming: Vec<usize> = (0..self.world()).map(|r| if r == me { 0 } else { n * 4 }).collect();
        let room = ranges(&incoming);
        let Turn { conns, scratch, .. } = turn;
        let buf = room_in(scratch, n * (self.world() - 1));
        self.trade(conns, call, &outgoing, bytemuck::cast_slice_mut(buf), &room)?;
        let part = |r: usize| match r == me {
            true => &send[pieces[me].clone()],
            false => &buf[room[r].start / 4..][..n],
        };
        tree_sum(out, &(0..self.world()).map(part).collect::<Vec<_>>());
        Ok(())
    }

    fn all_reduce_small(&self, turn: &mut Turn, call: &Call, x: &mut [f32]) -> Result<()> {
        let (world, me, n) = (self.world(), self.rank(), x.len());
        let Turn { conns, scratch, .. } = turn;
        let buf = room_in(scratch, world * n);
        buf[me * n..][..n].copy_from_slice(x);
        self.spread(conns, call, bytemuck::cast_slice_mut(buf), &ranges(&vec![n * 4; world]))?;
        let parts: Vec<&[f32]> = (0..world).map(|r| &buf[r * n..][..n]).collect();
        tree_sum(x, &parts);
        Ok(())
    }

    /// Block by block: each rank sums its share, then all get all shares.
    fn all_reduce_large(&self, turn: &mut Turn, call: &Call, x: &mut [f32]) -> Result<()> {
        let (world, me) = (self.world(), self.rank());
        let block = self.buffer(0).max(world);
        for x in x.chunks_mut(block) {
            let shares: Vec<Range<usize>> = (0..world).map(|r| call::share(x.len(), r, world)).collect();
            let mut sum = vec![0.0; shares[me].len()];
            self.sum_piece(turn, call, x, &shares, &mut sum)?;
            x[shares[me].clone()].copy_from_slice(&sum);
            let parts: Vec<Range<usize>> = shares.iter().map(|s| s.start * 4..s.end * 4).collect();
            self.spread(&mut turn.conns, call, bytemuck::cast_slice_mut(x), &parts)?;
        }
        Ok(())
    }
}

/// Lengths one after the other.
fn ranges(lens: &[usize]) -> Vec<Range<usize>> {
    call::starts(lens).into_iter().zip(lens).map(|(at, n)| at..at + n).collect()
}

impl Comm for TcpComm {
    fn rank(&self) -> usize {
        self.topology.rank
    }

    fn world(&self) -> usize {
        self.topology.world()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let size = send.dtype().size();
        let call =
            Call::all_gather_of(self.place(), (recv.len(), recv.dtype().size()), (send.len(), size), counts);
        let (mut turn, call) = self.enter(call)?;
        let parts = ranges(&counts.iter().map(|n| n * size).collect::<Vec<_>>());
        let recv = recv.bytes();
        recv[parts[self.rank()].clone()].copy_from_slice(send.bytes());
        self.spread(&mut turn.conns, &call, recv, &parts)
    }

    fn reduce_scatter_fold(&self, partials: &[View], counts: &[usize], sink: &mut Sink) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let (mut turn, call) = self.enter(Call::reduce_scatter_fold(self.place(), lens, counts))?;
        let _guard = OnPanic(self);
        let partials: Vec<&[u8]> = partials.iter().map(|p| bytemuck::cast_slice(p.host())).collect();
        let numbers = self.spread_number(&mut turn.conns, &call, partials.len() as u64)?;
        if let Some(rank) = numbers.iter().position(|&n| n > MAX_PARTIALS) {
            return Err(self.disagree(format!(
                "rank {rank} gives {} partials to reduce_scatter_fold; at most {MAX_PARTIALS} are allowed",
                numbers[rank]
            )));
        }
        let numbers: Vec<usize> = numbers.into_iter().map(|n| n as usize).collect();
        let most = self.buffer(counts.iter().copied().max().unwrap_or(0));
        for window in windows(&numbers, counts, most) {
            self.fold_window(&mut turn, &call, &partials, &window, counts, sink)?;
        }
        Ok(())
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let call = Call::reduce_scatter(self.place(), recv.len(), send.len(), counts);
        let (mut turn, call) = self.enter(call)?;
        let (recv, send) = (recv.host(), send.host());
        let starts = call::starts(counts);
        let longest = counts.iter().copied().max().unwrap_or(0);
        let each = (self.buffer(0) / self.world()).max(1);
        let mut at = 0;
        loop {
            let piece = |r: usize| counts[r].min(at)..counts[r].min(at + each);
            let pieces: Vec<Range<usize>> =
                (0..self.world()).map(|r| starts[r] + piece(r).start..starts[r] + piece(r).end).collect();
            self.sum_piece(&mut turn, &call, send, &pieces, &mut recv[piece(self.rank())])?;
            at += each;
            if at >= longest {
                return Ok(());
            }
        }
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut turn, call) = self.enter(Ok(Call::all_reduce(x.len())))?;
        let x = x.host();
        match size_of_val(x) <= SMALL {
            true => self.all_reduce_small(&mut turn, &call, x),
            false => self.all_reduce_large(&mut turn, &call, x),
        }
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let (mut turn, call) = self.enter(Call::broadcast(self.place(), x.len(), root))?;
        let x: &mut [u8] = bytemuck::cast_slice_mut(x.host());
        let part = |r: usize| if r == root { 0..x.len() } else { 0..0 };
        let parts: Vec<Range<usize>> = (0..self.world()).map(part).collect();
        self.spread(&mut turn.conns, &call, x, &parts)
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
        let call = Call::all_to_all_of(self.place(), lens.0, recv_counts, lens.1, send_counts);
        let (mut turn, call) = self.enter(call)?;
        let bytes = |counts: &[usize]| ranges(&counts.iter().map(|n| n * size).collect::<Vec<_>>());
        let (room, from) = (bytes(recv_counts), bytes(send_counts));
        let parts = [send.bytes()];
        let recv = recv.bytes();
        recv[room[self.rank()].clone()].copy_from_slice(&parts[0][from[self.rank()].clone()]);
        let out: Vec<Outgoing> = from.iter().map(|r| Outgoing { parts: &parts, range: r.clone() }).collect();
        self.trade(&mut turn.conns, &call, &out, recv, &room)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut turn, call) = self.enter(Call::all_gather_bytes(bytes.len()))?;
        let lens = self.spread_number(&mut turn.conns, &call, bytes.len() as u64)?;
        let cap = crate::MAX_GATHER_BYTES as u64;
        if let Some(rank) = lens.iter().position(|&n| n > cap) {
            return Err(self.disagree(format!(
                "rank {rank} gives {} bytes to all_gather_bytes; at most {cap} are allowed",
                lens[rank]
            )));
        }
        let parts = ranges(&lens.iter().map(|&n| n as usize).collect::<Vec<_>>());
        let mut all = vec![0; parts.last().map_or(0, |p| p.end)];
        all[parts[self.rank()].clone()].copy_from_slice(bytes);
        self.spread(&mut turn.conns, &call, &mut all, &parts)?;
        Ok(parts.into_iter().map(|p| all[p].to_vec()).collect())
    }

    fn barrier(&self) -> Result<()> {
        let (mut turn, call) = self.enter(Ok(Call::barrier()))?;
        self.spread(&mut turn.conns, &call, &mut [], &vec![0..0; self.world()])
    }

    fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    fn aborted(&self) -> Option<String> {
        self.shared.reason().or_else(|| self.shm.as_ref()?.aborted())
    }
}

impl Drop for TcpComm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.rank()));
        }
        self.shared.leave();
        if let Some(shm) = &self.shm {
            shm.leave();
        }
        // After the farewell: a peer that needs this rank finds the end of its data and knows why.
        if let Ok(turn) = self.turn.get_mut() {
            turn.conns.clear();
        }
        if let Some(watch) = self.watch.take() {
            // Ends within a named limit (`watch.rs`); a panic of it has nothing to tell any more.
            _ = watch.join();
        }
    }
}
