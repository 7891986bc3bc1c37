//! Where a card's time goes: each piece of work between two timed events, added up by what it is.
use super::error::Result;
use super::streams::Event;
use super::{Cuda, must};
use std::{
    collections::HashMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// Work of one kind: kernels of a name, products of a shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Spent {
    /// Its name.
    pub what: String,
    /// How often it was asked for.
    pub calls: u32,
    /// On the card, the way to it and back between two pieces included.
    pub seconds: f64,
}

/// Pieces of work since somebody wants to know.
#[derive(Default)]
pub(super) struct Profile {
    wanted: AtomicBool,
    pieces: Mutex<Vec<(String, [Event; 2])>>,
}

impl Cuda {
    /// Measures every piece of work from now on.
    pub fn begin_profile(&self) {
        self.profile.wanted.store(true, Relaxed);
    }

    /// What was done since [`Cuda::begin_profile`], the longest first; waits for it.
    pub fn end_profile(&self) -> Result<Vec<Spent>> {
        self.profile.wanted.store(false, Relaxed);
        let pieces = std::mem::take(&mut *self.profile.pieces.lock().unwrap_or_else(PoisonError::into_inner));
        let mut all: HashMap<String, Spent> = HashMap::new();
        for (what, [begin, end]) in pieces {
            end.wait()?;
            let seconds = end.since(&begin)?.unwrap_or_default();
            let spent = all.entry(what.clone()).or_insert(Spent { what, calls: 0, seconds: 0.0 });
            spent.calls += 1;
            spent.seconds += seconds;
        }
        let mut all: Vec<Spent> = all.into_values().collect();
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.what.cmp(&b.what)));
        Ok(all)
    }

    /// Asks the card for a piece of work.
    #[track_caller]
    pub(super) fn piece(&self, what: impl FnOnce() -> String, work: impl FnOnce() -> Result<()>) {
        if !self.profile.wanted.load(Relaxed) {
            return must(work());
        }
        let begin = must(self.card.record_timed());
        must(work());
        let end = must(self.card.record_timed());
        self.profile.pieces.lock().unwrap_or_else(PoisonError::into_inner).push((what(), [begin, end]));
    }
}
