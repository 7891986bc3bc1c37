//! CUDA graphs: what the card's stream is asked for step after step is asked for in one call.
//!
//! With graphs on, kernels, products, fills and copies inside the card aren't asked for at once but kept as descriptions, up to
//! whatever else touches the stream: an event, a copy from or to the host, memory that goes back to the driver. Such a piece is
//! issued as it is when it is new, made into a graph when it comes for the second time, and launched as that graph from then on.
//! Pieces are compared in full: a graph does what the calls would have done, in their order, so results are the same bits.
//!
//! Only the card's stream has pieces. What goes through other streams is short, and is asked for at once.
mod arena;
mod captured;
mod piece;
mod trial;

use super::binding::Handle;
use super::card::Card;
use super::dnn::Attentions;
use super::error::Result;
use super::{Cuda, must};
use crate::storage::Said;
use arena::Arena;
pub(super) use arena::Block;
use captured::Graph;
pub(super) use piece::Piece;
use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use trial::Next;
pub(super) use trial::Trial;

/// Fewer calls are asked for one by one.
const FEWEST: usize = 4;
/// At most so many wait: the card has work while the next ones are described, and one call that is never the same spoils few.
const MOST: usize = 64;
/// Graphs that are kept. Those that weren't launched for longest go first.
const KEPT: usize = 512;
/// Pieces that came once and are remembered by their hash.
const SEEN: usize = 4096;
/// Pieces that are remembered whole, to be compared with one that is like them.
const STRANGE: usize = 256;
/// So many graphs that went before they were launched twice: pieces here don't come again, and no more graphs are made.
const WASTED: usize = 64;

/// How the card's stream was asked for work since graphs are on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Are they on now?
    pub on: bool,
    /// Graphs that are kept.
    pub kept: usize,
    /// Graphs that were launched, and what they did that would have been calls.
    pub launches: u64,
    pub calls: u64,
    /// Kernels of graphs whose arguments were changed.
    pub changed: u64,
    /// Calls that were issued one by one.
    pub plain: u64,
}

/// What waits for the card's stream, and the graphs for it.
#[derive(Default)]
pub(super) struct Graphs {
    on: AtomicBool,
    /// Calls that anybody asked for, in whatever way they were issued.
    asked: AtomicU64,
    state: Mutex<State>,
}

/// A graph, ready to be launched, and the piece that it does.
struct Kept {
    piece: Piece,
    graph: Graph,
    likeness: u64,
    last: u64,
    launches: u64,
}

#[derive(Default)]
pub(super) struct State {
    on: bool,
    /// What was asked for and isn't issued.
    pub(super) piece: Piece,
    /// Graphs by their piece's hash.
    kept: HashMap<u64, Kept>,
    /// Hashes of pieces that came once.
    seen: HashSet<u64>,
    /// Pieces for which there was no graph, and hashes of kept ones, both by likeness: what came last.
    strange: HashMap<u64, Piece>,
    like: HashMap<u64, u64>,
    /// Scratch memory of the stream.
    pub(super) arena: Arena,
    /// What went wrong where no error could be returned.
    failed: Option<super::CudaError>,
    /// Why there are no graphs any more; said once.
    given_up: Option<String>,
    wasted: usize,
    counts: Replayed,
}

// SAFETY: handles are only passed to the driver, from any thread.
unsafe impl Send for State {}

impl Graphs {
    /// After a panic the piece is at worst not whole, and the worker ends.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Card {
    /// What waits for this thread's stream; none where its work is asked for at once.
    pub(super) fn recording(&self) -> Option<MutexGuard<'_, State>> {
        (self.graphs.on.load(Relaxed) && self.stream() == self.stream).then(|| self.graphs.lock())
    }

    /// Runs `f` with this thread's stream, behind everything that was asked for. Where graphs are on nobody asks the card's stream
    /// for anything meanwhile.
    pub(super) fn in_turn<T>(&self, f: impl FnOnce(Handle) -> T) -> Result<T> {
        self.enter()?;
        let mut recording = self.recording();
        recording.as_mut().map_or(Ok(()), |state| state.flush(self))?;
        Ok(f(self.stream()))
    }

    /// Adds work to the piece, or does it now.
    pub(super) fn ask(
        &self,
        add: impl FnOnce(&mut Piece),
        now: impl FnOnce(Handle) -> Result<()>,
    ) -> Result<()> {
        self.enter()?;
        self.graphs.asked.fetch_add(1, Relaxed);
        match self.recording() {
            Some(mut state) => {
                add(&mut state.piece);
                state.added(self)
            }
            None => now(self.stream()),
        }
    }

    /// From now on this card's stream is asked for its work by graphs, or call by call. Nobody else may use the stream meanwhile.
    pub(super) fn use_graphs(&self, on: bool) -> Result<()> {
        self.enter()?;
        let mut state = self.graphs.lock();
        let flushed = state.flush(self);
        state.on = on;
        self.graphs.on.store(on, Relaxed);
        if !on {
            state.forget(self);
            state.release(self);
        }
        flushed
    }

    /// Why there are no graphs any more; said once.
    fn given_up(&self) -> Option<String> {
        self.graphs.lock().given_up.take()
    }

    /// Work that was never issued is nobody's: what it was to fill is gone.
    pub(super) fn end_graphs(&self) {
        let mut state = self.graphs.lock();
        state.piece.clear();
        state.forget(self);
        state.release(self);
    }
}

impl Cuda {
    /// From now on the stream that everybody has in common is asked for its work by graphs, or call by call. Nobody else may use
    /// it meanwhile.
    pub fn use_graphs(&self, on: bool) {
        must(self.card.use_graphs(on));
    }

    /// Finds out whether graphs are faster: the next steps are taken without them, then with them.
    pub fn try_graphs(&self) {
        *self.trial() = Some(Trial::default());
    }

    /// How the card was asked for work.
    pub fn replayed(&self) -> Replayed {
        let state = self.card.graphs.lock();
        Replayed { on: state.on, kept: state.kept.len(), ..state.counts }
    }

    fn trial(&self) -> MutexGuard<'_, Option<Trial>> {
        self.trial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`crate::Storage::step_took`]
    pub(super) fn after_step(&self, took: Duration) -> Option<Said> {
        let mut trial = self.trial();
        if let Some(why) = self.card.given_up() {
            *trial = None;
            let text = format!("CUDA graphs are off, and everything goes on without them: {why}");
            return Some(Said::Failed(text));
        }
        let asked = self.card.graphs.asked.load(Relaxed);
        if let Some(found) = self.attentions.get().and_then(Attentions::found) {
            return Some(Said::Found(found));
        }
        match trial.as_mut()?.took(took, asked) {
            Next::Same => None,
            Next::Needless { each } => {
                *trial = None;
                let us = 1e6 * each;
                Some(Said::Found(format!(
                    "CUDA graphs are off: the GPU works {us:.0} µs for each of its calls"
                )))
            }
            Next::With => {
                self.use_graphs(true);
                None
            }
            Next::Known { without, with } => {
                *trial = None;
                let on = with < without;
                self.use_graphs(on);
                let [without, with] = [without, with].map(|s| 1e3 * s);
                let so = if on { "on" } else { "off" };
                Some(Said::Found(format!(
                    "CUDA graphs are {so}: a step takes {with:.2} ms with them, {without:.2} ms without"
                )))
            }
        }
    }
}

impl State {
    /// Issues everything that waits.
    pub(super) fn flush(&mut self, card: &Card) -> Result<()> {
        let done = match self.failed.take() {
            Some(error) => Err(error),
            None if self.piece.len() == 0 => Ok(()),
            None => self.issue(card),
        };
        self.piece.clear();
        if !self.on {
            self.release(card);
        }
        done
    }

    /// As [`State::flush`], where nothing can be returned: the next flush says it.
    pub(super) fn flush_later(&mut self, card: &Card) {
        if let Err(error) = self.flush(card) {
            self.failed = Some(error);
        }
    }

    /// Something was added to the piece: it is issued when it is long enough.
    pub(super) fn added(&mut self, card: &Card) -> Result<()> {
        if self.piece.len() >= MOST || !self.on { self.flush(card) } else { Ok(()) }
    }

    fn issue(&mut self, card: &Card) -> Result<()> {
        if !self.on || self.piece.len() < FEWEST {
            return self.plainly(card);
        }
        let hash = self.piece.hash();
        let there = match self.kept.get(&hash) {
            Some(kept) => kept.piece == self.piece,
            None => self.prepare(card, hash),
        };
        if there && self.replay(card, hash) { Ok(()) } else { self.plainly(card) }
    }

    /// A graph for a piece that has none with its hash: made where the piece came before, or one in which few arguments were
    /// others; and of such a one that there is a graph of, it is changed.
    fn prepare(&mut self, card: &Card, hash: u64) -> bool {
        let likeness = self.piece.likeness();
        if !self.again(hash) {
            if let Some(old) = self.like.get(&likeness).copied() {
                return self.change(card, old, hash);
            }
            let few = self.strange.get(&likeness).and_then(|other| other.changed(&self.piece));
            if !few.is_some_and(|changed| is_few(&changed, &self.piece)) {
                self.remember(likeness);
                return false;
            }
        }
        self.strange.remove(&likeness);
        self.wasted < WASTED && self.capture(card, hash, likeness)
    }

    /// Keeps a piece that may come again with other arguments.
    fn remember(&mut self, likeness: u64) {
        if self.strange.len() >= STRANGE {
            self.strange.clear(); // the next step finds them again
        }
        self.strange.insert(likeness, self.piece.clone());
    }

    /// Makes the graph of a piece that this one is like into this one's, where few calls change.
    fn change(&mut self, card: &Card, old: u64, hash: u64) -> bool {
        let Some(kept) = self.kept.get(&old) else { return false };
        let changed = kept.piece.changed(&self.piece);
        let few = changed.filter(|changed| is_few(changed, &self.piece) && kept.graph.knows(changed));
        let Some(changed) = few else { return false };
        if let Err(error) = kept.graph.change(card, &self.piece, &changed) {
            self.give_up(card, &error.to_string());
            return false;
        }
        let Some(mut kept) = self.kept.remove(&old) else { return false };
        self.like.insert(kept.likeness, hash);
        std::mem::swap(&mut kept.piece, &mut self.piece);
        self.counts.changed += changed.len() as u64;
        self.kept.insert(hash, kept);
        true
    }

    fn plainly(&mut self, card: &Card) -> Result<()> {
        self.counts.plain += self.piece.len() as u64;
        self.piece.issue(card)
    }

    /// Did a piece with this hash come before?
    fn again(&mut self, hash: u64) -> bool {
        if self.seen.remove(&hash) {
            return true;
        }
        if self.seen.len() >= SEEN {
            self.seen.clear(); // the next two steps find them again
        }
        self.seen.insert(hash);
        false
    }

    /// Launches the graph with this hash, if the driver can.
    fn replay(&mut self, card: &Card, hash: u64) -> bool {
        let Some(kept) = self.kept.get_mut(&hash) else { return false };
        if let Err(error) = kept.graph.launch(card) {
            std::mem::swap(&mut kept.piece, &mut self.piece); // equal, or moved there
            self.give_up(card, &error.to_string());
            return false;
        }
        self.counts.launches += 1;
        self.counts.calls += kept.piece.len() as u64;
        (kept.last, kept.launches) = (self.counts.launches, kept.launches + 1);
        true
    }

    /// Makes a graph of what waits, and keeps it; false, and no graphs any more, where that fails.
    fn capture(&mut self, card: &Card, hash: u64, likeness: u64) -> bool {
        match Graph::of(card, &self.piece) {
            Ok(graph) => {
                if self.kept.len() >= KEPT {
                    self.drop_oldest(card);
                }
                let (piece, last) = (std::mem::take(&mut self.piece), self.counts.launches);
                self.kept.insert(hash, Kept { piece, graph, likeness, last, launches: 0 });
                self.like.insert(likeness, hash);
                true
            }
            Err(error) => {
                self.give_up(card, &error.to_string());
                false
            }
        }
    }

    fn drop_oldest(&mut self, card: &Card) {
        let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.last).map(|(hash, _)| *hash);
        if let Some(gone) = oldest.and_then(|hash| self.kept.remove(&hash)) {
            self.wasted += usize::from(gone.launches < 2);
            self.like.retain(|_, hash| Some(*hash) != oldest);
            gone.graph.destroy(card);
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// No graphs from now on. The scratch memory stays: what waits uses it.
    fn give_up(&mut self, card: &Card, why: &str) {
        self.given_up = Some(why.to_owned());
        self.on = false;
        card.graphs.on.store(false, Relaxed);
        self.forget(card);
    }

    /// Gives back the graphs.
    fn forget(&mut self, card: &Card) {
        self.kept.drain().for_each(|(_, kept)| kept.graph.destroy(card));
        self.seen.clear();
        self.strange.clear();
        self.like.clear();
    }
}

/// To change a call costs less than to ask for it, but not nothing.
fn is_few(changed: &[usize], piece: &Piece) -> bool {
    3 * changed.len() <= piece.len()
}
