//! Ranks that are threads of one process: no copy is made that the result doesn't need.
//!
//! A collective is one or two *exchanges*. In an exchange every rank posts where its data lies, waits until all have
//! posted, reads from its peers' memory, and waits until all have read. The second wait is what makes the borrowed
//! addresses sound: **no rank leaves an exchange while a peer still reads**, not even when the group was aborted. After
//! an abort nobody begins to read, and those who read already never wait for anybody, so that wait ends.
use crate::{
    Comm, CommError, Result, SharedWindow, Sink,
    call::{self, Call, Place},
    shared_window::Pages,
    sum::tree_sum,
};
use device::{Buf, Dtype, View, ViewMut};
use std::{
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long a rank waits for the others in one collective unless [`group_with`] says otherwise.
pub const WAIT: Duration = Duration::from_secs(30 * 60);

/// Longer waits are cut to this, so that deadlines can be computed.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Sums shorter than this are done by every rank for itself: one exchange instead of two.
const SMALL: usize = 1024;

/// The communicators of `world` ranks, to be given to one thread each. Panics when `world` is 0 or above
/// [`crate::MAX_WORLD`].
pub fn group(world: usize) -> Vec<LocalComm> {
    group_with(world, WAIT)
}

/// As [`group`]; a collective that a peer doesn't join within `wait` fails on every rank.
pub fn group_with(world: usize, wait: Duration) -> Vec<LocalComm> {
    assert!(
        (1..=crate::MAX_WORLD).contains(&world),
        "a group has 1 to {} ranks, not {world}",
        crate::MAX_WORLD
    );
    let state = State {
        posts: vec![None; world],
        posted: vec![0; world],
        finished: vec![0; world],
        left: vec![false; world],
        reading: 0,
        common: None,
        aborted: None,
    };
    let wait = wait.min(LONGEST);
    let shared = Arc::new(Shared { wait, state: Mutex::new(state), changed: Condvar::new() });
    let member = |rank| LocalComm {
        at: Place { rank, world },
        shared: shared.clone(),
        turn: Mutex::new(Turn { seq: 0, round: 0 }),
    };
    (0..world).map(member).collect()
}

/// One rank of a group of threads. Dropping it leaves the group: peers that need it then get [`CommError::Aborted`].
pub struct LocalComm {
    at: Place,
    shared: Arc<Shared>,
    /// Serialises the collectives of one rank.
    turn: Mutex<Turn>,
}

struct Turn {
    /// Collectives called so far.
    seq: u64,
    /// Exchanges so far.
    round: u64,
}

struct Shared {
    wait: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    posts: Vec<Option<Arc<Post>>>,
    /// Last exchange that each rank entered.
    posted: Vec<u64>,
    /// Last exchange that each rank has read to the end.
    finished: Vec<u64>,
    left: Vec<bool>,
    /// Ranks that are reading their peers' memory now.
    reading: usize,
    /// What rank 0 allocated for a [`Comm::common`] under way.
    common: Option<Arc<Region>>,
    aborted: Option<String>,
}

/// Memory that all ranks have in common.
struct Region {
    start: NonNull<u8>,
    /// Never used as a whole: ranks have buffers over parts of it.
    _memory: Buf,
}

// SAFETY: an address and the memory behind it, which the ranks use by the rule of `Comm::common`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Pages for Region {
    /// Threads of one process have nothing to let go of.
    fn let_go(&self, _: Range<usize>) {}
}

/// What a rank shows to its peers in one exchange.
struct Post {
    call: Call,
    parts: Vec<Part>,
    /// all_to_all: what this rank expects from each rank.
    expects: Vec<usize>,
}

/// Memory of a rank that peers may read during one exchange.
#[derive(Clone, Copy)]
struct Part {
    ptr: *const u8,
    bytes: usize,
    /// Bytes of an element.
    size: usize,
}

// SAFETY: a Part is only read inside an exchange, whose end all readers' ends precede (see the module's comment).
unsafe impl Send for Part {}
// SAFETY: as above; parts are never written through.
unsafe impl Sync for Part {}

impl Part {
    fn of(x: &[f32]) -> Self {
        Part { ptr: x.as_ptr().cast(), bytes: size_of_val(x), size: size_of::<f32>() }
    }

    /// Elements of `size` bytes.
    fn of_elements(x: &[u8], size: usize) -> Self {
        Part { ptr: x.as_ptr(), bytes: x.len(), size }
    }

    fn len(&self) -> usize {
        self.bytes / self.size
    }

    /// # Safety
    /// Made by [`Part::of`], and only inside the exchange in which it was posted.
    unsafe fn floats<'a>(&self) -> &'a [f32] {
        // SAFETY: the caller's promise; the owner doesn't write or free it before the exchange ends.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len()) }
    }

    /// # Safety
    /// Only inside the exchange in which it was posted.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // nothing panics while the lock is held, so a poisoned one is whole
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<'a>(&self, state: MutexGuard<'a, State>, deadline: Instant) -> MutexGuard<'a, State> {
        let limit = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    fn abort(&self, reason: &str) {
        let mut state = self.lock();
        state.aborted.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }
}

/// Held while a rank reads: its end, by return or by panic, waits until no peer reads this rank's memory any more.
struct Reading<'a> {
    comm: &'a LocalComm,
    round: u64,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let shared = &*self.comm.shared;
        let mut state = shared.lock();
        state.reading -= 1;
        state.finished[self.comm.at.rank] = self.round;
        if std::thread::panicking() {
            let reason = format!("rank {} panicked inside a collective", self.comm.at.rank);
            state.aborted.get_or_insert(reason);
        }
        let over = |s: &State| {
            s.finished.iter().all(|&f| f >= self.round) || (s.aborted.is_some() && s.reading == 0)
        };
        if over(&state) {
            shared.changed.notify_all();
        }
        let mut deadline = Instant::now() + shared.wait;
        while !over(&state) {
            if Instant::now() >= deadline {
                // A sink that never returns: give up the group, but never the memory that it reads.
                let reason =
                    format!("a peer of rank {} reads for longer than {:?}", self.comm.at.rank, shared.wait);
                state.aborted.get_or_insert(reason);
                deadline = Instant::now() + shared.wait;
                shared.changed.notify_all();
            }
            state = shared.sleep(state, deadline);
        }
    }
}

impl LocalComm {
    /// Begins a collective; fails when the group is aborted or the arguments don't fit.
    fn enter(&self, call: std::result::Result<Call, String>) -> Result<(MutexGuard<'_, Turn>, Call)> {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = self.shared.lock().aborted.clone() {
            return Err(CommError::Aborted(reason));
        }
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

    /// Posts `parts`, waits for every rank, checks that all called the same, lets `read` read the peers' posts, and
    /// returns when nobody reads any more.
    fn exchange(&self, turn: &mut Turn, post: Post, read: impl FnOnce(&[Arc<Post>])) -> Result<()> {
        turn.round += 1;
        let round = turn.round;
        let posts = self.meet(round, post)?;
        let reading = Reading { comm: self, round };
        read(&posts);
        drop(reading);
        let state = self.shared.lock();
        match &state.aborted {
            Some(reason) if state.finished.iter().any(|&f| f < round) => {
                Err(CommError::Aborted(reason.clone()))
            }
            _ => Ok(()),
        }
    }

    /// The first half of an exchange. On success this rank counts as reading.
    fn meet(&self, round: u64, post: Post) -> Result<Vec<Arc<Post>>> {
        let shared = &*self.shared;
        let call = post.call;
        let deadline = Instant::now() + shared.wait;
        let mut state = shared.lock();
        state.posts[self.at.rank] = Some(Arc::new(post));
        state.posted[self.at.rank] = round;
        let all = |s: &State| s.posted.iter().all(|&p| p >= round);
        if all(&state) {
            shared.changed.notify_all();
        }
        while !all(&state) && state.aborted.is_none() {
            let missing: Vec<usize> = (0..self.at.world).filter(|&r| state.posted[r] < round).collect();
            if let Some(gone) = missing.iter().find(|&&r| state.left[r]) {
                let reason = format!("rank {gone} left the group before {}", call.kind.name());
                state.aborted.get_or_insert(reason);
                shared.changed.notify_all();
                break;
            }
            if Instant::now() >= deadline {
                let reason = self.give_up(&call, &missing);
                state.aborted.get_or_insert_with(|| reason.clone());
                shared.changed.notify_all();
                return Err(CommError::Io(reason)); // not all have posted, so nobody reads
            }
            state = shared.sleep(state, deadline);
        }
        // Compared before the abort flag is looked at: every rank that met the others names the mismatch itself.
        if all(&state) {
            let posts: Vec<Arc<Post>> = state.posts.iter().flatten().cloned().collect();
            if let Err(what) = self.compare(&call, &posts) {
                let error = CommError::Mismatch(what);
                state.aborted.get_or_insert_with(|| error.to_string());
                shared.changed.notify_all();
                return self.await_readers(state, error);
            }
            if state.aborted.is_none() {
                state.reading += 1;
                return Ok(posts);
            }
        }
        let reason = state.aborted.clone().unwrap_or_default();
        self.await_readers(state, CommError::Aborted(reason))
    }

    /// Returns `error` once nobody reads: the group is aborted, so nobody begins to.
    fn await_readers<T>(&self, mut state: MutexGuard<'_, State>, error: CommError) -> Result<T> {
        while state.reading > 0 {
            state = self.shared.sleep(state, Instant::now() + self.shared.wait);
        }
        Err(error)
    }

    fn give_up(&self, call: &Call, missing: &[usize]) -> String {
        format!(
            "rank {} waited {:?} in {} (call {}) for {}, which did not join it",
            self.at.rank,
            self.shared.wait,
            call.kind.name(),
            call.seq,
            call::ranks(missing, self.at.world)
        )
    }

    fn compare(&self, call: &Call, posts: &[Arc<Post>]) -> std::result::Result<(), String> {
        let me = self.at.rank;
        for (peer, post) in posts.iter().enumerate() {
            call.agree(me, peer, post.call.words())?;
        }
        if call.kind == call::Kind::AllToAll {
            for (peer, post) in posts.iter().enumerate() {
                let (ours, sent) = (posts[me].expects[peer] as u64, post.parts[me].len() as u64);
                call::pair(peer, me, sent, ours)?;
                let (sent, theirs) = (posts[me].parts[peer].len() as u64, post.expects[me] as u64);
                call::pair(me, peer, sent, theirs)?;
            }
        }
        Ok(())
    }

    /// `x` becomes its sum over the ranks: each rank sums its share, then all gather the shares.
    fn all_reduce_large(&self, turn: &mut Turn, call: Call, x: &mut [f32]) -> Result<()> {
        let mine = call::share(x.len(), self.at.rank, self.at.world);
        let mut sum = vec![0.0; mine.len()];
        let post = Post { call, parts: vec![Part::of(x)], expects: Vec::new() };
        self.exchange(turn, post, |posts| {
            // SAFETY: inside the exchange; `x` isn't written before it ends.
            let parts: Vec<&[f32]> =
                posts.iter().map(|p| unsafe { &p.parts[0].floats()[mine.clone()] }).collect();
            tree_sum(&mut sum, &parts);
        })?;
        let post = Post { call, parts: vec![Part::of(&sum)], expects: Vec::new() };
        self.exchange(turn, post, |posts| {
            let len = x.len();
            for (rank, post) in posts.iter().enumerate() {
                // SAFETY: inside the exchange.
                let share = unsafe { post.parts[0].floats() };
                x[call::share(len, rank, posts.len())].copy_from_slice(share);
            }
        })
    }
}

impl Comm for LocalComm {
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
        let post = Post { call, parts: vec![Part::of_elements(send, size)], expects: Vec::new() };
        self.exchange(&mut turn, post, |posts| {
            let mut rest = recv;
            for post in posts {
                // SAFETY: inside the exchange.
                let part = unsafe { post.parts[0].bytes() };
                let (to, tail) = rest.split_at_mut(part.len());
                to.copy_from_slice(part);
                rest = tail;
            }
        })
    }

    fn reduce_scatter_fold(&self, partials: &[View], counts: &[usize], sink: &mut Sink) -> Result<()> {
        let lens = partials.iter().map(View::len);
        let (mut turn, call) = self.enter(Call::reduce_scatter_fold(self.at, lens, counts))?;
        if self.at.world == 1 {
            partials.iter().enumerate().for_each(|(i, p)| sink(0, i, *p));
            return Ok(());
        }
        let start = call::starts(counts)[self.at.rank];
        let mine = start..start + counts[self.at.rank];
        let parts = partials.iter().map(|p| Part::of(p.host())).collect();
        self.exchange(&mut turn, Post { call, parts, expects: Vec::new() }, |posts| {
            for (rank, post) in posts.iter().enumerate() {
                for (i, part) in post.parts.iter().enumerate() {
                    // SAFETY: inside the exchange.
                    let partial = unsafe { part.floats() };
                    sink(rank, i, (&partial[mine.clone()]).into());
                }
            }
        })
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        let (mut turn, call) = self.enter(Call::reduce_scatter(self.at, recv.len(), send.len(), counts))?;
        let (recv, send) = (recv.host(), send.host());
        if self.at.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let start = call::starts(counts)[self.at.rank];
        let mine = start..start + recv.len();
        let post = Post { call, parts: vec![Part::of(send)], expects: Vec::new() };
        self.exchange(&mut turn, post, |posts| {
            // SAFETY: inside the exchange.
            let parts: Vec<&[f32]> =
                posts.iter().map(|p| unsafe { &p.parts[0].floats()[mine.clone()] }).collect();
            tree_sum(recv, &parts);
        })
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        let (mut turn, call) = self.enter(Ok(Call::all_reduce(x.len())))?;
        if self.at.world == 1 {
            return Ok(());
        }
        let x = x.host();
        if x.len() > SMALL {
            return self.all_reduce_large(&mut turn, call, x);
        }
        let mut sum = vec![0.0; x.len()];
        let post = Post { call, parts: vec![Part::of(x)], expects: Vec::new() };
        self.exchange(&mut turn, post, |posts| {
            // SAFETY: inside the exchange; `x` isn't written before it ends.
            let parts: Vec<&[f32]> = posts.iter().map(|p| unsafe { p.parts[0].floats() }).collect();
            tree_sum(&mut sum, &parts);
        })?;
        x.copy_from_slice(&sum);
        Ok(())
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        let (mut turn, call) = self.enter(Call::broadcast(self.at, x.len(), root))?;
        if self.at.world == 1 {
            return Ok(());
        }
        let x = x.host();
        let parts = if self.at.rank == root { vec![Part::of(x)] } else { Vec::new() };
        self.exchange(&mut turn, Post { call, parts, expects: Vec::new() }, |posts| {
            if self.at.rank != root {
                // SAFETY: inside the exchange; the root doesn't write its `x`.
                x.copy_from_slice(unsafe { posts[root].parts[0].floats() });
            }
        })
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
        if self.at.world == 1 {
            recv.copy_from_slice(send);
            return Ok(());
        }
        let starts = call::starts(send_counts);
        let part = |(&at, &n)| Part::of_elements(&send[at * size..(at + n) * size], size);
        let parts = starts.iter().zip(send_counts).map(part).collect();
        let post = Post { call, parts, expects: recv_counts.to_vec() };
        self.exchange(&mut turn, post, |posts| {
            let mut rest = recv;
            for post in posts {
                // SAFETY: inside the exchange.
                let part = unsafe { post.parts[self.at.rank].bytes() };
                let (to, tail) = rest.split_at_mut(part.len());
                to.copy_from_slice(part);
                rest = tail;
            }
        })
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (mut turn, call) = self.enter(Call::all_gather_bytes(bytes.len()))?;
        let mut all = Vec::with_capacity(self.at.world);
        let post = Post { call, parts: vec![Part::of_elements(bytes, 1)], expects: Vec::new() };
        self.exchange(&mut turn, post, |posts| {
            // SAFETY: inside the exchange.
            all.extend(posts.iter().map(|p| unsafe { p.parts[0].bytes() }.to_vec()));
        })?;
        Ok(all)
    }

    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        let call = Call::common(self.at, counts, dtype.size());
        let (mut turn, call) = self.enter(call)?;
        if self.at.rank == 0 {
            let mut memory = Buf::zeroed_as(dtype, counts.iter().sum());
            let start = NonNull::from(memory.view_mut().bytes()).cast();
            self.shared.lock().common = Some(Arc::new(Region { start, _memory: memory }));
        }
        let mut region = None;
        let post = Post { call, parts: Vec::new(), expects: Vec::new() };
        // Rank 0 replaces it in a later call only, and nobody leaves this one before all have read it.
        self.exchange(&mut turn, post, |_| region = self.shared.lock().common.clone())?;
        let region = region.ok_or_else(|| self.disagree("rank 0 gave no common memory".into()))?;
        let start = region.start;
        // SAFETY: the region has this many elements of this type: all ranks gave the same counts.
        Ok(Some(unsafe { SharedWindow::new(region, start, dtype, counts, self.at.rank) }))
    }

    fn barrier(&self) -> Result<()> {
        let (mut turn, call) = self.enter(Ok(Call::barrier()))?;
        self.exchange(&mut turn, Post { call, parts: Vec::new(), expects: Vec::new() }, |_| ())
    }

    fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    fn aborted(&self) -> Option<String> {
        self.shared.lock().aborted.clone()
    }
}

impl Drop for LocalComm {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.left[self.at.rank] = true;
        if std::thread::panicking() {
            state.aborted.get_or_insert_with(|| format!("rank {} panicked", self.at.rank));
        }
        self.shared.changed.notify_all();
    }
}
