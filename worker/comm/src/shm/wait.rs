//! Functions with which a rank waits for other ranks of its host, through shared memory. A waiting
//! rank sleeps instead of burning a core, and an abort ends the wait.
//!
//! # Why no wake-up is lost
//!
//! Sleepers wait on an event count. A sleeper (1) adds itself to `sleepers`, (2) reads the event
//! count, (3) checks its peers once more, and (4) sleeps if the event count still has the value
//! that it read. A rank that enters a round (a) stores the round and (b) checks whether now *all*
//! ranks have entered it. If so, it (c) reads `sleepers`, and if there are any, it (d) increments
//! the event count and wakes all. Steps 1 to 3 and a to c are sequentially consistent, so all ranks
//! observe them in one order:
//!
//! - If two ranks enter at the same time, the one whose store comes later observes the other's
//!   store in (b). So some rank wakes the sleepers.
//! - If the rank that observes all reads `sleepers` as 0 in (c), then every sleeper's (1) comes
//!   after it. Hence its (3) comes after all the stores (a), and it does not sleep.
//! - Otherwise the event count changes after the sleeper's (1). If it changes before (2), then (3)
//!   observes all ranks. If it changes later, (4) returns immediately.
//!
//! Every sleep ends after [`MAX_SLEEP`], so a peer that breaks these rules can delay a rank but not
//! hang it.
//!
//! # Why the peers' data may be read
//!
//! A rank fills its slot and table and only then stores `entered_round` (SeqCst, hence release). A
//! peer reads them only after it has loaded that value (SeqCst, hence acquire). In the other
//! direction, a rank stores `entered_round = n + 1` after its last read of what its peers published
//! in round n. A peer overwrites that slot only for round n + 2, which it prepares after it has
//! observed `entered_round ≥ n + 1` of all ranks. So two slots are enough, with one wait per round.
use super::segment::{MAX_REASON_BYTES, Segment, SegmentHeader};
use crate::AbortReason;
use std::{
    sync::atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
    time::{Duration, Instant},
};

/// The longest time for which a waiting rank sleeps before it checks again for an abort and for its
/// timeout.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// The longest time for which a waiting rank busy-waits before it sleeps, if the machine has a
/// processor for every rank. A sleep and a wake-up take about as long.
const MAX_SPIN: Duration = Duration::from_micros(20);

/// Why a rank stopped waiting for other ranks of its host. Ranks are numbered within the host.
#[derive(Debug)]
pub(super) enum WaitError {
    /// The group was aborted.
    Aborted(AbortReason),
    /// Ranks had not arrived when the timeout expired. The value lists them, ascending.
    TimedOut(Vec<usize>),
    /// A rank left the group before it arrived. The value is the number of that rank.
    PeerLeft(usize),
}

impl SegmentHeader {
    /// Wakes every rank that sleeps while it waits for its peers. Also changes the event count, so
    /// that a rank that is about to sleep does not miss the event.
    pub(super) fn wake_sleepers(&self) {
        self.event_count.fetch_add(1, SeqCst);
        futex_wake(&self.event_count);
    }

    /// Stores `reason` in the shared memory as the reason of the group's abort, and wakes every
    /// rank that sleeps. Keeps the first reason if the group is already aborted.
    pub(super) fn abort(&self, reason: &AbortReason) {
        if self.abort_state.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
            let bytes = reason.encode(MAX_REASON_BYTES);
            for (to, from) in self.reason.iter().zip(&bytes) {
                to.store(*from, Relaxed);
            }
            self.reason_len.store(bytes.len() as u32, Relaxed);
            self.abort_state.store(2, SeqCst);
            futex_wake(&self.abort_state);
        }
        self.wake_sleepers();
    }

    /// Returns the reason of the abort, or `None` if the group is not aborted. If a process is
    /// writing the reason, waits for it up to [`MAX_SLEEP`], and returns [`AbortReason::Lost`] if
    /// the reason is still incomplete then.
    pub(super) fn abort_reason(&self) -> Option<AbortReason> {
        match self.abort_state.load(Acquire) {
            0 => None,
            1 => {
                // The writer is a few stores away from state 2, or dead.
                futex_wait(&self.abort_state, 1, MAX_SLEEP);
                let is_complete = self.abort_state.load(Acquire) == 2;
                Some(if is_complete { self.read_stored_reason() } else { AbortReason::Lost })
            }
            _ => Some(self.read_stored_reason()),
        }
    }

    /// Decodes the abort reason that is stored in the first page (header) of the shared memory.
    fn read_stored_reason(&self) -> AbortReason {
        let len = (self.reason_len.load(Relaxed) as usize).min(MAX_REASON_BYTES);
        let bytes: Vec<u8> = self.reason[..len].iter().map(|b| b.load(Relaxed)).collect();
        AbortReason::decode(&bytes)
    }
}

impl Segment {
    /// Publishes that `rank` has written its data for data exchange number `round`, so that peers
    /// may read the data. Wakes the sleeping ranks if this rank is the last one to enter.
    pub(super) fn enter_round(&self, rank: usize, round: u64, call: [u64; 3]) {
        let line = self.rank_status(rank);
        for (word, value) in line.call[(round % 2) as usize].iter().zip(call) {
            word.store(value, Relaxed);
        }
        line.cpu.store(read_current_cpu(), Relaxed);
        line.entered_round.store(round, SeqCst);
        let is_complete =
            (0..self.layout.world).all(|r| self.rank_status(r).entered_round.load(SeqCst) >= round);
        if is_complete && self.header().sleepers.load(SeqCst) != 0 {
            self.header().wake_sleepers();
        }
    }

    /// Blocks until every rank has written its data for data exchange number `round` to shared
    /// memory. Fails if the group is aborted, a rank left before entering, or `timeout` expires.
    ///
    /// Spins before the first sleep only if `can_spin` is set and no rank that has yet to enter the
    /// round entered its previous round on this processor.
    pub(super) fn wait_for_round(
        &self,
        round: u64,
        can_spin: bool,
        timeout: Duration,
    ) -> Result<(), WaitError> {
        let has_entered = |r: usize| self.rank_status(r).entered_round.load(SeqCst) >= round;
        // Spinning would keep a peer on the same processor from entering the round.
        let shares_cpu = |cpu| {
            (0..self.layout.world).any(|r| !has_entered(r) && self.rank_status(r).cpu.load(Relaxed) == cpu)
        };
        if (0..self.layout.world).all(has_entered) {
            return Ok(());
        }
        self.wait_for_ranks(has_entered, can_spin && !shares_cpu(read_current_cpu()), timeout, true)
    }

    /// Blocks until every rank has joined the group. Fails if the group is aborted or `timeout`
    /// expires.
    pub(super) fn wait_for_join(&self, timeout: Duration) -> Result<(), WaitError> {
        let has_joined = |r: usize| self.rank_status(r).joined_pid.load(SeqCst) != 0;
        self.wait_for_ranks(has_joined, false, timeout, false)
    }

    /// Blocks until `has_arrived(rank)`, such as a check that the rank has joined, returns true for
    /// every rank of the host. Fails if the group is aborted or `timeout` expires. If `can_spin` is
    /// set, busy-waits briefly before it sleeps.
    ///
    /// If `fail_on_leave` is set, a rank that left without having arrived is an error.
    fn wait_for_ranks(
        &self,
        has_arrived: impl Fn(usize) -> bool,
        can_spin: bool,
        timeout: Duration,
        fail_on_leave: bool,
    ) -> Result<(), WaitError> {
        let world = self.layout.world;
        let mut arrived = 0; // all ranks before this one have arrived
        let mut is_complete = || {
            while arrived < world && has_arrived(arrived) {
                arrived += 1;
            }
            arrived == world
        };
        if is_complete() || (can_spin && spin_until(&mut is_complete)) {
            return Ok(());
        }
        let header = self.header();
        let start = Instant::now();
        loop {
            header.sleepers.fetch_add(1, SeqCst);
            let events = header.event_count.load(SeqCst);
            let remaining = timeout.saturating_sub(start.elapsed());
            if !is_complete() && header.abort_state.load(SeqCst) == 0 {
                futex_wait(&header.event_count, events, MAX_SLEEP.min(remaining));
            }
            header.sleepers.fetch_sub(1, SeqCst);
            // checked before `is_complete`: a rank may arrive and then leave
            let has_left = |r: usize| self.rank_status(r).has_left.load(SeqCst) != 0;
            let departed = (0..world).find(|&r| fail_on_leave && has_left(r) && !has_arrived(r));
            if is_complete() {
                return Ok(());
            }
            if let Some(reason) = header.abort_reason() {
                return Err(WaitError::Aborted(reason));
            }
            if let Some(rank) = departed {
                return Err(WaitError::PeerLeft(rank));
            }
            if start.elapsed() >= timeout {
                return Err(WaitError::TimedOut((0..world).filter(|&r| !has_arrived(r)).collect()));
            }
        }
    }
}

/// Returns the number of the processor on which this thread runs.
fn read_current_cpu() -> u32 {
    // SAFETY: reads a number; -1 if the kernel does not know it.
    unsafe { libc::sched_getcpu() as u32 }
}

/// Busy-waits until `is_ready` returns true, for at most [`MAX_SPIN`]. Returns whether `is_ready`
/// returned true.
fn spin_until(is_ready: &mut impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < MAX_SPIN {
        for _ in 0..16 {
            if is_ready() {
                return true;
            }
            std::hint::spin_loop();
        }
    }
    false
}

/// Sleeps while the futex `word` has the value `value`, until another thread wakes this thread or
/// `timeout` has passed. May also wake up without a reason.
fn futex_wait(word: &AtomicU32, value: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    };
    // SAFETY: `word` and `timeout` outlive the call. Without the private flag the kernel identifies
    // the word by its page, so processes with different mappings use the same futex.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &timeout) };
}

/// Wakes every thread of any process that sleeps because of the futex `word`.
fn futex_wake(word: &AtomicU32) {
    // SAFETY: the kernel uses the address only.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Stores the numbers `values` in `table`, this rank's table of numbers in shared memory, which
/// peers read in the next data exchange.
pub(super) fn store_words(table: &[std::sync::atomic::AtomicU64], values: impl IntoIterator<Item = u64>) {
    for (word, value) in table.iter().zip(values) {
        word.store(value, Release);
    }
}
