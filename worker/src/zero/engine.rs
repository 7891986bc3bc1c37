//! Flat parameters and gradients of every unit, whole or in parts, and the collectives that move them.
//!
//! Fetch before use, release after; reduce what a backward wrote; finish (gradients.rs); the optimizer then updates the owned part.
mod gradients;

use super::{
    Policy, Slots,
    fold::FoldStack,
    groups::{Messages, gather},
    live::{self, Fetch},
    partition::Partition,
    pool::{Pool, grow},
    queue::{Queue, Ticket},
};
use crate::params::Unit;
use comm::{Comm, Result, Whole};
use device::{Buf, Dtype, Ops, View, ViewMut, needed_for, storage::Event};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// Reductions in flight at once: one travels while the next block's gradient is written.
pub const REDUCTIONS_IN_FLIGHT: usize = 1;

/// One unit on this rank.
pub struct Shard {
    /// What it holds.
    pub unit: Unit,
    /// Who owns what.
    pub part: Partition,
    /// Elements per rank of vectors of the trained tensors alone: gradients, optimizer states.
    trained: Vec<usize>,
    /// [`Engine::resident`]: the parameters that the optimizer updates.
    params: RwLock<Buf>,
    /// Where those are masters of 16-bit ones: what ops compute with, the owned part or everything (policy), rounded from `params`.
    /// Not where they are rounded for each use ([`rounds_on_fetch`]).
    rounded: Option<RwLock<Buf>>,
    /// Everybody's part of what ops compute with, where ranks have memory in common: nothing is gathered then.
    whole: Option<Whole>,
    /// Partial sums of gradients: of the owned part, or of everything (policy).
    grads: Mutex<FoldStack>,
}

/// The parameters' element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Of those that ops compute with.
    pub dtype: Dtype,
    /// Of those that the optimizer updates: `F32` or the same.
    pub updated: Dtype,
}

impl Weights {
    /// Are there two of each parameter?
    pub fn has_masters(&self) -> bool {
        self.dtype != self.updated
    }
}

/// Are the 16-bit parameters that ops compute with rounded from their masters for each use, not kept beside them? On a card, where
/// they are gathered anyway: two bytes less for each parameter, and the rounding is little work beside the gather.
pub fn rounds_on_fetch(policy: Policy, weights: Weights, on_host: bool) -> bool {
    policy.shard_parameters && weights.has_masters() && !on_host
}

/// The parameters of a unit, whole, for as long as they are held.
pub enum Held {
    /// They lie here anyway.
    Resident(usize),
    /// Gathered for this use, and for the next where they stay.
    Gathered(Fetch, Buf),
    /// Read where their owners keep them.
    Common(Fetch),
}

/// ZeRO's state of one rank.
pub struct Engine {
    /// All units, in the model's order.
    pub shards: Arc<Vec<Shard>>,
    /// Sharding policy.
    pub policy: Policy,
    /// Who computes which slot.
    pub slots: Slots,
    rank: usize,
    world: usize,
    weights: Weights,
    ops: Arc<dyn Ops>,
    queue: Arc<Queue>,
    prefetch: usize,
    /// Most gathered elements that stay between two uses.
    max_live: u64,
    gathered: Arc<Mutex<Pool>>,
    /// The own part of a unit that is being gathered, where it is rounded for that.
    rounded_part: Arc<Mutex<Buf>>,
    whole_grads: Arc<Mutex<Pool>>,
    /// Emptied stacks of [`Engine::runs`], each with the mark behind which it is.
    run_grads: Arc<Mutex<Vec<(FoldStack, Event)>>>,
    messages: Arc<Mutex<Messages>>,
    /// Fetches still to come in this pass, in order.
    coming: VecDeque<Fetch>,
    /// Those of them for which no gather has begun, and is wanted.
    ahead: VecDeque<usize>,
    /// Gathered parameters that stay until their next use, by unit.
    live: Mutex<HashMap<usize, Buf>>,
    /// Ranks have parameters in common: a pass may begin when all ranks have entered it, having written theirs.
    entered: Option<Ticket<()>>,
    /// Gathers under way, oldest first.
    gathering: VecDeque<(usize, Ticket<Buf>)>,
    reducing: VecDeque<Ticket<()>>,
    /// Updated parts on their way to all ranks.
    publishing: Vec<Ticket<()>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock means a panic on the communication thread, which has ended the job already.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Allocates this rank's part of every unit, zeroed. `prefetch` and `max_live` as `zero` in the job has them.
    pub fn new(
        units: Vec<Unit>,
        policy: Policy,
        slots: usize,
        (prefetch, max_live): (usize, u64),
        weights: Weights,
        queue: Queue,
        ops: Arc<dyn Ops>,
    ) -> Result<Self> {
        let (rank, world) = (queue.comm().rank(), queue.comm().world());
        let dtype = weights.dtype;
        let parameters = |dtype, len| needed_for("the parameters", || ops.zeroed(dtype, len));
        let shards = units.into_iter().map(|unit| {
            let part = Partition::new(&unit, world);
            let common = match policy.shard_parameters && unit.owners.below(world) > 1 {
                true => {
                    let counts = part.counts().to_vec();
                    queue.run(move |comm| comm.common(dtype, &counts))?
                }
                false => None,
            };
            let (shared, whole) = common.map_or((None, None), |c| (Some(c.own), Some(c.whole)));
            let whole = whole.filter(|_| unit.owners.has(rank));
            let own = part.range(rank).len();
            let of_owners = |len: usize| if unit.owners.has(rank) { len } else { 0 };
            let part_of = |sharded: bool| if sharded { own } else { of_owners(unit.len()) };
            let computed = || shared.unwrap_or_else(|| parameters(dtype, part_of(policy.shard_parameters)));
            let masters = || parameters(weights.updated, part_of(policy.keeps_own(true)));
            let (params, rounded) = match weights.has_masters() {
                false => (computed(), None),
                true if rounds_on_fetch(policy, weights, ops.is_host()) => (masters(), None),
                true => (masters(), Some(RwLock::new(computed()))),
            };
            let params = RwLock::new(params);
            let trained: Vec<usize> = (0..world).map(|r| unit.trained_range(part.range(r)).len()).collect();
            let summed = if policy.shard_gradients { trained[rank] } else { of_owners(unit.trained_len()) };
            let grads = Mutex::new(policy.sums(summed));
            Ok(Shard { unit, part, trained, params, rounded, whole, grads })
        });
        let shards = Arc::new(shards.collect::<Result<Vec<_>>>()?);
        let rounded_part = Arc::new(Mutex::new(ops.zeroed(dtype, 0)));
        Ok(Engine {
            shards,
            policy,
            slots: Slots { slots, world, interleaved: policy.shard_gradients },
            rank,
            world,
            weights,
            ops,
            queue: Arc::new(queue),
            prefetch,
            max_live,
            gathered: Arc::new(Mutex::new(Pool::of(dtype))),
            rounded_part,
            whole_grads: Arc::new(Mutex::new(Pool::of(Dtype::F32))),
            run_grads: Arc::default(),
            messages: Arc::default(),
            coming: VecDeque::new(),
            ahead: VecDeque::new(),
            live: Mutex::default(),
            entered: None,
            gathering: VecDeque::new(),
            reducing: VecDeque::new(),
            publishing: Vec::new(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The collectives, in order with the engine's own.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Flat range of unit `u` that this rank owns.
    pub fn own(&self, u: usize) -> Range<usize> {
        self.shards[u].part.range(self.rank)
    }

    /// Elements of gradients and optimizer states of unit `u` that this rank owns.
    pub fn own_trained(&self, u: usize) -> usize {
        self.shards[u].trained[self.rank]
    }

    /// Element types of the parameters.
    pub fn weights(&self) -> Weights {
        self.weights
    }

    /// Flat range of unit `u` whose parameters lie here all the time as the optimizer updates them. Of masters these are the
    /// ones that this rank updates.
    pub fn resident(&self, u: usize) -> Range<usize> {
        self.own_or_whole(u, self.policy.keeps_own(self.weights.has_masters()))
    }

    /// Flat range of unit `u` whose parameters lie here all the time as ops compute with them.
    pub fn computed(&self, u: usize) -> Range<usize> {
        self.own_or_whole(u, self.policy.shard_parameters)
    }

    /// Flat range of unit `u` that this rank updates.
    pub fn updated(&self, u: usize) -> Range<usize> {
        self.own_or_whole(u, self.policy.shard_optimizer)
    }

    fn own_or_whole(&self, u: usize, sharded: bool) -> Range<usize> {
        let unit = &self.shards[u].unit;
        if sharded || !unit.owners.has(self.rank) { self.own(u) } else { 0..unit.len() }
    }

    /// Where masters are kept: rounds `values` into what ops compute with, from element `at` of [`Engine::computed`] on.
    pub fn round_from(&self, u: usize, at: usize, values: View) {
        if let Some(rounded) = &self.shards[u].rounded {
            put(self.ops.as_ref(), write(rounded).view_mut().slice(at..at + values.len()), values);
        }
    }

    /// `values` become resident parameters of unit `u`, from element `at` of [`Engine::resident`] on: rounded to the nearest where
    /// those are 16 bits.
    pub fn fill_resident(&self, u: usize, at: usize, values: View) {
        put(self.ops.as_ref(), self.params_mut(u).view_mut().slice(at..at + values.len()), values);
    }

    /// After the resident parameters of unit `u` changed in the same way on every rank that keeps them whole: rounds what
    /// lies here of them. Nothing without masters.
    pub fn refresh(&self, u: usize) {
        self.shards[u].round(self.ops.as_ref(), self.resident(u), self.computed(u));
    }

    /// Changes the resident parameters of unit `u` in place.
    pub fn with_resident<T>(&self, u: usize, f: impl FnOnce(&mut Buf) -> T) -> T {
        f(&mut self.params_mut(u))
    }

    /// Reads the resident parameters of unit `u`.
    pub fn params(&self, u: usize) -> RwLockReadGuard<'_, Buf> {
        read(&self.shards[u].params)
    }

    /// Writes the resident parameters of unit `u`.
    pub fn params_mut(&self, u: usize) -> RwLockWriteGuard<'_, Buf> {
        write(&self.shards[u].params)
    }

    // --- parameters ----------------------------------------------------------------------------------------------

    /// Announces the fetches of a pass, in order, so that they can be started ahead of their use.
    pub fn announce(&mut self, order: impl IntoIterator<Item = usize>) {
        assert!(self.coming.is_empty() && self.gathering.is_empty(), "the last pass was not finished");
        let gathered = order.into_iter().filter(|&u| self.needs_gather(u));
        self.coming = live::plan(gathered, |u| self.shards[u].unit.len(), self.max_live).into();
        let gathered = |f: &&Fetch| !f.here && self.shards[f.unit].whole.is_none();
        self.ahead = self.coming.iter().filter(gathered).map(|f| f.unit).collect();
        let common = self.policy.shard_parameters && self.shards.iter().any(|s| s.whole.is_some());
        self.entered = common.then(|| self.queue.submit(|comm: &dyn Comm| comm.barrier()));
    }

    fn needs_gather(&self, u: usize) -> bool {
        let is_shared = self.policy.shard_parameters && self.shards[u].unit.owners.below(self.world) > 1;
        is_shared || self.rounds_on_fetch()
    }

    fn rounds_on_fetch(&self) -> bool {
        rounds_on_fetch(self.policy, self.weights, self.ops.is_host())
    }

    /// The whole parameters of unit `u`: waits for their gather, unless they stayed, and starts the next ones.
    pub fn fetch(&mut self, u: usize) -> Result<Held> {
        if !self.needs_gather(u) {
            return Ok(Held::Resident(u));
        }
        while self.gathering.len() <= self.prefetch {
            let Some(next) = self.ahead.pop_front() else { break };
            let ticket = self.gather(next);
            self.gathering.push_back((next, ticket));
        }
        let fetch = self.coming.pop_front().expect("every fetch was announced");
        assert_eq!(fetch.unit, u, "fetches come in the announced order");
        if self.shards[u].whole.is_some() {
            self.entered.take().map_or(Ok(()), Ticket::wait)?;
            return Ok(Held::Common(fetch));
        }
        if fetch.here {
            let stayed = lock(&self.live).remove(&u).expect("it was released before it is fetched again");
            return Ok(Held::Gathered(fetch, stayed));
        }
        let (unit, ticket) = self.gathering.pop_front().expect("its gather has begun");
        assert_eq!(unit, u, "gathers come in the order of their fetches");
        Ok(Held::Gathered(fetch, ticket.wait()?))
    }

    fn gather(&self, u: usize) -> Ticket<Buf> {
        let (shards, len) = (self.shards.clone(), self.shards[u].unit.len());
        let take = || lock(&self.gathered).take(self.ops.as_ref(), len);
        let mut whole = needed_for("gathered parameters", take);
        let (ops, messages, rounded) = (self.ops.clone(), self.messages.clone(), self.rounded_part.clone());
        let (rounds, alone) = (self.rounds_on_fetch(), shards[u].unit.owners.below(self.world) == 1);
        self.queue.submit(move |comm: &dyn Comm| {
            let s = &shards[u];
            let own = read(s.values());
            let (to, messages) = (whole.view_mut().slice(0..len), &mut lock(&messages));
            let mut exchange =
                |to, own| gather(comm, ops.as_ref(), messages, s.unit.owners, s.part.counts(), to, own);
            if !rounds {
                exchange(to, own.view())?;
            } else if alone {
                ops.cast(to, own.view());
            } else {
                let mut mine = lock(&rounded);
                let mut mine = needed_for("gathered parameters", || grow(ops.as_ref(), &mut mine, own.len()));
                ops.cast(mine.reborrow(), own.view());
                exchange(to, mine.as_view())?;
            }
            Ok(whole)
        })
    }

    /// Runs `f` on held parameters.
    pub fn with_params<T>(&self, held: &Held, f: impl FnOnce(View) -> T) -> T {
        match held {
            Held::Resident(u) => f(read(self.shards[*u].values()).view()),
            Held::Gathered(of, buf) => f(buf.view().slice(0..self.shards[of.unit].unit.len())),
            Held::Common(of) => f(self.shards[of.unit].whole.as_ref().expect("it is common").view()),
        }
    }

    /// Lets go of gathered parameters, or keeps them for their next use.
    pub fn release(&self, held: Held) {
        match held {
            Held::Resident(_) => {}
            Held::Gathered(of, buf) if of.stays => drop(lock(&self.live).insert(of.unit, buf)),
            Held::Gathered(_, buf) => lock(&self.gathered).give(buf),
            Held::Common(of) if of.stays => {}
            Held::Common(of) => self.shards[of.unit].whole.iter().for_each(Whole::let_go),
        }
    }

    /// After the owners changed their parts of unit `u`: starts to bring the resident parameters up to date everywhere.
    /// [`Engine::settle`] waits for it.
    pub fn publish(&mut self, u: usize) {
        if self.policy.shard_parameters || self.world == 1 {
            return self.refresh(u);
        }
        let (shards, ops, own) = (self.shards.clone(), self.ops.clone(), self.own(u));
        let (resident, computed) = (self.resident(u), self.computed(u));
        let (keeps_own, messages) =
            (self.policy.keeps_own(self.weights.has_masters()), self.messages.clone());
        self.publishing.push(self.queue.submit(move |comm: &dyn Comm| {
            let (s, messages) = (&shards[u], &mut lock(&messages));
            if keeps_own {
                s.round(ops.as_ref(), resident, computed.clone());
                return s.gather_in_place(comm, ops.as_ref(), messages, s.values(), own, computed);
            }
            s.gather_in_place(comm, ops.as_ref(), messages, &s.params, own, resident.clone())?;
            s.round(ops.as_ref(), resident, computed);
            Ok(())
        }));
    }

    /// Waits until everything published is everywhere.
    pub fn settle(&mut self) -> Result<()> {
        self.publishing.drain(..).try_for_each(Ticket::wait)
    }
}

impl Shard {
    /// The parameters that ops compute with.
    fn values(&self) -> &RwLock<Buf> {
        self.rounded.as_ref().unwrap_or(&self.params)
    }

    /// Rounds the resident parameters to where they lie among the computed ones. Nothing without masters.
    fn round(&self, ops: &dyn Ops, resident: Range<usize>, computed: Range<usize>) {
        let Some(rounded) = &self.rounded else { return };
        let (mut to, from) = (write(rounded), read(&self.params));
        let both = resident.start.max(computed.start)..resident.end.min(computed.end);
        let within = |r: &Range<usize>| both.start - r.start..both.end - r.start;
        ops.cast(to.view_mut().slice(within(&computed)), from.view().slice(within(&resident)));
    }

    /// The owners' parts of a vector that each owner keeps whole: `here` is the range that lies in `values`, `own` this rank's.
    fn gather_in_place(
        &self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        messages: &mut Messages,
        values: &RwLock<Buf>,
        own: Range<usize>,
        here: Range<usize>,
    ) -> Result<()> {
        let mut whole = write(values);
        // What is sent lies apart from what is written.
        let copy = messages.take_copy(ops, whole.view().slice(own.start - here.start..own.end - here.start));
        let (whole, mine) = (whole.view_mut(), copy.view().slice(0..own.len()));
        let gathered = gather(comm, ops, messages, self.unit.owners, self.part.counts(), whole, mine);
        messages.put_back(copy);
        gathered
    }
}

/// `to` becomes `values`, which may lie elsewhere: rounded to the nearest where it is narrower.
pub(crate) fn put(ops: &dyn Ops, to: ViewMut, values: View) {
    if to.dtype() == values.dtype() {
        return ops.copy(to, values);
    }
    let mut room = Buf::default();
    ops.cast(to, ops.at_hand(values, &mut room));
}

fn write(params: &RwLock<Buf>) -> RwLockWriteGuard<'_, Buf> {
    params.write().unwrap_or_else(PoisonError::into_inner)
}

fn read(params: &RwLock<Buf>) -> RwLockReadGuard<'_, Buf> {
    params.read().unwrap_or_else(PoisonError::into_inner)
}
