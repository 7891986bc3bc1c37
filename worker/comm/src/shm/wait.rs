//! Waiting for peers without burning a core, and being woken by an abort.
//!
//! # Why no wake-up is lost
//! The bell is an event count. A sleeper (1) adds itself to `sleepers`, (2) reads the bell, (3) looks at its peers once more,
//! (4) sleeps on the bell if it still has the value read. A poster (a) stores its round, (b) looks whether now *all* ranks
//! have posted it, and if so (c) reads `sleepers`, and if there are any, (d) adds to the bell and wakes all. Steps 1–3 and
//! a–c are sequentially consistent, so they have one order that all ranks agree about:
//! * of two ranks that post at the same time, the one whose store comes later sees the other's in (b): some rank rings;
//! * if the one that sees all reads `sleepers` as 0 in (c), then every sleeper's (1) comes after it, hence its (3) comes
//!   after all the stores (a): it doesn't sleep;
//! * otherwise the bell changes after the sleeper's (1): if before (2), then (3) sees all; if after, (4) returns at once.
//!
//! Every sleep ends after [`NAP`] at the latest, so a peer that breaks these rules can delay but not hang a rank.
//!
//! # Why data may be read
//! A rank fills its slot and table and only then stores `posted` (SeqCst, hence release); a peer reads them only after it
//! has loaded that value (SeqCst, hence acquire). The other way round: a rank stores `posted = n + 1` after its last read
//! of what its peers showed in round n, and a peer overwrites that slot only for round n + 2, which it prepares after it
//! has seen `posted ≥ n + 1` of all. Two slots are thus enough, with one wait a round.
use super::segment::{Header, REASON, Segment};
use std::{
    sync::atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
    time::{Duration, Instant},
};

/// The longest sleep before the abort flag and the limit are looked at again.
const NAP: Duration = Duration::from_millis(100);

/// The longest spin before sleeping, where every rank can have a processor of its own: about what a sleep and a wake-up
/// cost. Longer waits always sleep.
const SPIN: Duration = Duration::from_micros(20);

/// Why a wait ended without what it waited for.
#[derive(Debug)]
pub(super) enum Stopped {
    Aborted(String),
    /// The ranks that are still missing.
    Late(Vec<usize>),
    /// This rank left the group, so it never comes.
    Left(usize),
}

impl Header {
    /// Wakes every sleeper.
    pub(super) fn ring(&self) {
        self.bell.fetch_add(1, SeqCst);
        futex_wake(&self.bell);
    }

    /// Aborts the group; the first reason stays.
    pub(super) fn abort(&self, reason: &str) {
        if self.poison.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
            let mut end = reason.len().min(REASON);
            while !reason.is_char_boundary(end) {
                end -= 1;
            }
            for (to, from) in self.reason.iter().zip(&reason.as_bytes()[..end]) {
                to.store(*from, Relaxed);
            }
            self.reason_len.store(end as u32, Relaxed);
            self.poison.store(2, SeqCst);
            futex_wake(&self.poison);
        }
        self.ring();
    }

    /// The reason, when the group is aborted.
    pub(super) fn aborted(&self) -> Option<String> {
        match self.poison.load(Acquire) {
            0 => None,
            1 => {
                // Its writer is a few stores away from 2, or dead.
                futex_wait(&self.poison, 1, NAP);
                (self.poison.load(Acquire) == 2)
                    .then(|| self.reason())
                    .or_else(|| Some("the process that aborted died before it gave a reason".into()))
            }
            _ => Some(self.reason()),
        }
    }

    fn reason(&self) -> String {
        let len = (self.reason_len.load(Relaxed) as usize).min(REASON);
        let bytes: Vec<u8> = self.reason[..len].iter().map(|b| b.load(Relaxed)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Segment {
    /// Enters round `round` as `rank`: what this rank wrote for it is now the peers' to read.
    pub(super) fn post(&self, rank: usize, round: u64, call: [u64; 3]) {
        let line = self.line(rank);
        for (word, value) in line.call[(round % 2) as usize].iter().zip(call) {
            word.store(value, Relaxed);
        }
        line.cpu.store(cpu(), Relaxed);
        line.posted.store(round, SeqCst);
        let all = (0..self.layout.world).all(|r| self.line(r).posted.load(SeqCst) >= round);
        if all && self.header().sleepers.load(SeqCst) != 0 {
            self.header().ring();
        }
    }

    /// Waits until every rank has entered `round`.
    pub(super) fn await_round(&self, round: u64, spin: bool, limit: Duration) -> Result<(), Stopped> {
        let here = |r: usize| self.line(r).posted.load(SeqCst) >= round;
        // Spinning would keep a peer on the same processor from coming.
        let crowded = |own| (0..self.layout.world).any(|r| !here(r) && self.line(r).cpu.load(Relaxed) == own);
        if (0..self.layout.world).all(here) {
            return Ok(());
        }
        self.await_ranks(here, spin && !crowded(cpu()), limit, true)
    }

    /// Waits until every rank has joined.
    pub(super) fn await_join(&self, limit: Duration) -> Result<(), Stopped> {
        self.await_ranks(|r| self.line(r).joined.load(SeqCst) != 0, false, limit, false)
    }

    fn await_ranks(
        &self,
        here: impl Fn(usize) -> bool,
        spin: bool,
        limit: Duration,
        leaving_counts: bool,
    ) -> Result<(), Stopped> {
        let world = self.layout.world;
        let mut first = 0; // the ranks before it are here
        let mut all = || {
            while first < world && here(first) {
                first += 1;
            }
            first == world
        };
        if all() || (spin && spin_until(&mut all)) {
            return Ok(());
        }
        let head = self.header();
        let start = Instant::now();
        loop {
            head.sleepers.fetch_add(1, SeqCst);
            let bell = head.bell.load(SeqCst);
            let left = limit.saturating_sub(start.elapsed());
            if !all() && head.poison.load(SeqCst) == 0 {
                futex_wait(&head.bell, bell, NAP.min(left));
            }
            head.sleepers.fetch_sub(1, SeqCst);
            // looked at before `all`: a rank that came and then left was here
            let gone =
                (0..world).find(|&r| leaving_counts && self.line(r).left.load(SeqCst) != 0 && !here(r));
            if all() {
                return Ok(());
            }
            if let Some(reason) = head.aborted() {
                return Err(Stopped::Aborted(reason));
            }
            if let Some(rank) = gone {
                return Err(Stopped::Left(rank));
            }
            if start.elapsed() >= limit {
                return Err(Stopped::Late((0..world).filter(|&r| !here(r)).collect()));
            }
        }
    }
}

/// The processor that this thread runs on.
fn cpu() -> u32 {
    // SAFETY: asks for a number; -1 where the kernel doesn't tell.
    unsafe { libc::sched_getcpu() as u32 }
}

fn spin_until(ready: &mut impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
    }
    false
}

/// Sleeps while `word` is `value`, at most `limit`. May return early for no reason.
fn futex_wait(word: &AtomicU32, value: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: limit.subsec_nanos() as libc::c_long,
    };
    // SAFETY: `word` and `limit` outlive the call; without the private flag the kernel finds the word by its page, so that
    // processes with different mappings meet.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &limit) };
}

/// Wakes everybody who sleeps on `word`.
fn futex_wake(word: &AtomicU32) {
    // SAFETY: the kernel only uses the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Publishes numbers for the next round.
pub(super) fn publish(table: &[std::sync::atomic::AtomicU64], values: impl IntoIterator<Item = u64>) {
    for (word, value) in table.iter().zip(values) {
        word.store(value, Release);
    }
}
