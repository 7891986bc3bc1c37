//! [`ZeroEngine`]: one rank's shards of parameters and gradients (ZeRO), and the collectives that
//! gather parameters and reduce gradients.
//!
//! A forward or backward pass fetches the parameters of a unit before their use and releases them
//! afterwards. The backward pass reduces gradients, `finish_gradient` completes their sums, and the
//! optimizer updates the shard that this rank owns.
mod gradients;

use super::{
    MicroBatchSchedule, ShardingPolicy,
    buffer_pool::{BufferPool, resize_buffer},
    collective_queue::{CollectiveQueue, PendingCollective},
    gather_retention::{self, PlannedFetch},
    micro_batch_sums::MicroBatchSums,
    owner_collectives::ExchangeBuffers,
    param_dtypes::{ParamDtypes, casts_params_on_gather},
    reduced_gradient::ReducedGradient,
    two_level_reduction::HostGroups,
    unit_shard::{UnitShard, lock_for_reading, lock_for_writing},
};
use crate::params::ParamUnit;
use comm::{Comm, Result, SharedView};
use device::{Buf, Dtype, Ops, View, ViewMut, storage::Event};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard},
};

/// The purpose that out-of-memory errors state for the memory of gathered parameters.
const GATHERED_PARAMETERS_LABEL: &str = "gathered parameters";
/// The largest number of gradient reductions among ranks that run while this rank computes further
/// gradients. One reduction runs while the gradient of the next block is computed.
pub const REDUCTIONS_IN_FLIGHT: usize = 1;

/// A handle to all parameters of one unit (tensors that are gathered together), valid until
/// [`ZeroEngine::release_params`] is called.
pub enum ParamsGuard {
    /// The unit with this index, whose whole parameters are always stored on this rank.
    Resident(usize),
    /// Parameters in a buffer, gathered for this use and possibly retained for the next use.
    Gathered(PlannedFetch, Buf),
    /// Parameters in memory that the ranks share, which are read where their owners store them.
    Shared(PlannedFetch),
}

/// Stores one rank's shards of parameters and gradients (ZeRO), gathers parameters before their
/// use, and reduces gradients afterwards.
pub struct ZeroEngine {
    /// The parameters and gradients that this rank stores of each unit, in the order of the units.
    pub shards: Arc<Vec<UnitShard>>,
    /// The ZeRO stage, and which state is divided among ranks.
    pub policy: ShardingPolicy,
    /// The schedule, which assigns micro-batches to ranks and rounds.
    pub schedule: MicroBatchSchedule,
    rank: usize,
    world: usize,
    weights: ParamDtypes,
    ops: Arc<dyn Ops>,
    queue: Arc<CollectiveQueue>,
    prefetch: usize,
    /// The largest number of gathered elements that are retained between two uses.
    max_retained: u64,
    param_pool: Arc<Mutex<BufferPool>>,
    /// A 16-bit copy of the owned shard of the unit that is being gathered, cast from master
    /// weights.
    cast_buffer: Arc<Mutex<Buf>>,
    gradient_pool: Arc<Mutex<BufferPool>>,
    /// Reusable sums for [`ZeroEngine::begin_partial_sums`], each with the event after which it may
    /// be written.
    micro_batch_sums_pool: Arc<Mutex<Vec<(MicroBatchSums, Event)>>>,
    exchange: Arc<Mutex<ExchangeBuffers>>,
    /// The distribution of ranks over hosts, if gradients are reduced in two levels.
    host_groups: Option<HostGroups>,
    /// The fetches of this pass that have not happened yet, in order.
    upcoming: VecDeque<PlannedFetch>,
    /// The units of upcoming fetches whose gather has not started.
    gather_queue: VecDeque<usize>,
    /// The retained parameters, by the index of their unit.
    retained: Mutex<HashMap<usize, Buf>>,
    /// A barrier at the start of a pass, if ranks share memory: before the pass reads parameters,
    /// every rank must have written its shards.
    pass_barrier: Option<PendingCollective<()>>,
    /// Running gathers with their units, oldest first.
    pending_gathers: VecDeque<(usize, PendingCollective<Buf>)>,
    pending_reductions: VecDeque<PendingCollective<()>>,
    /// Running reductions of whole gradients after the last micro-batch of a step, by the index of
    /// their unit.
    whole_gradient_reductions: HashMap<usize, PendingCollective<ReducedGradient>>,
    /// Running gathers of updated parameters.
    pending_param_gathers: Vec<PendingCollective<()>>,
}

/// Locks a mutex even if it is poisoned, which means that another thread panicked while it held the
/// lock.
fn lock_ignoring_poison<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock means that the communication thread panicked and aborted the job.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ZeroEngine {
    /// Allocates zeroed memory for this rank's shards of every parameter unit (tensors that are
    /// gathered together). Collective: every rank must call it with the same units.
    ///
    /// `prefetch` and `max_live` are the values of `train.zero` in the job. `micro_batches` is the
    /// number of micro-batches of a global batch.
    pub fn new(
        units: Vec<ParamUnit>,
        policy: ShardingPolicy,
        micro_batches: usize,
        (prefetch, max_live): (usize, u64),
        weights: ParamDtypes,
        queue: CollectiveQueue,
        ops: Arc<dyn Ops>,
    ) -> Result<Self> {
        let (rank, world) = (queue.comm().rank(), queue.comm().world_size());
        let dtype = weights.compute;
        let shards = units.into_iter().map(|unit| UnitShard::new(unit, policy, weights, &queue, &*ops));
        let shards = Arc::new(shards.collect::<Result<Vec<_>>>()?);
        let cast_buffer = Arc::new(Mutex::new(ops.zeroed(dtype, 0)));
        // Transports between host memories exchange pieces inside a host without copies. In the
        // order of arrival, sums of hosts are not nodes of the tree.
        let is_in_two_levels = queue.comm().has_native_reduce_scatter() && !policy.sums_in_arrival_order;
        let host_groups =
            is_in_two_levels.then(|| HostGroups::find(&queue.comm().list_rank_hosts())).flatten();
        Ok(ZeroEngine {
            shards,
            policy,
            schedule: MicroBatchSchedule { micro_batches, world, interleaved: policy.shard_gradients },
            rank,
            world,
            weights,
            ops,
            queue: Arc::new(queue),
            prefetch,
            max_retained: max_live,
            param_pool: Arc::new(Mutex::new(BufferPool::new(dtype, GATHERED_PARAMETERS_LABEL))),
            cast_buffer,
            gradient_pool: Arc::new(Mutex::new(BufferPool::new(Dtype::F32, "gradients"))),
            micro_batch_sums_pool: Arc::default(),
            exchange: Arc::default(),
            host_groups,
            upcoming: VecDeque::new(),
            gather_queue: VecDeque::new(),
            retained: Mutex::default(),
            pass_barrier: None,
            pending_gathers: VecDeque::new(),
            pending_reductions: VecDeque::new(),
            whole_gradient_reductions: HashMap::new(),
            pending_param_gathers: Vec::new(),
        })
    }

    /// Returns the number of this process among all ranks of the job.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks among which parameters, gradients and optimizer states are
    /// divided.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Returns the queue in which all collectives of this rank run.
    pub fn queue(&self) -> &Arc<CollectiveQueue> {
        &self.queue
    }

    /// Returns which range of parameter unit `u` (concatenated tensors that are gathered together)
    /// is this rank's shard.
    pub fn owned_range(&self, u: usize) -> Range<usize> {
        self.shards[u].partition.shard_range(self.rank)
    }

    /// Returns the number of trained elements in this rank's shard of parameter unit `u` (tensors
    /// that are gathered together). This is the length of the shard's gradient and optimizer
    /// states.
    pub fn owned_trained_len(&self, u: usize) -> usize {
        self.shards[u].trained_counts[self.rank]
    }

    /// Returns the names, shapes and trained flags of all parameter units (groups of tensors that
    /// are gathered together), in the order of the units' indices.
    pub fn clone_units(&self) -> Vec<ParamUnit> {
        self.shards.iter().map(|shard| shard.unit.clone()).collect()
    }

    /// Returns two element types of the job's parameters: the one with which forward and backward
    /// passes compute, and the one that the optimizer updates.
    pub fn param_dtypes(&self) -> ParamDtypes {
        self.weights
    }

    /// Returns the range of parameter unit `u` (concatenated tensors) that this rank always stores
    /// in the precision of the optimizer, such as fp32 master weights. With master weights, this
    /// rank updates exactly this range.
    pub fn resident_range(&self, u: usize) -> Range<usize> {
        self.select_stored_range(u, self.policy.shards_updated_params(self.weights.has_master_weights()))
    }

    /// Returns the range of parameter unit `u` (concatenated tensors) that this rank always stores
    /// in the precision of forward and backward passes.
    pub fn range_of_compute_copy(&self, u: usize) -> Range<usize> {
        self.select_stored_range(u, self.policy.shard_parameters)
    }

    /// Returns the range of parameter unit `u` (concatenated tensors that are gathered together)
    /// that this rank's optimizer updates: its shard, or the whole unit without ZeRO.
    pub fn optimizer_range(&self, u: usize) -> Range<usize> {
        self.select_stored_range(u, self.policy.shard_optimizer)
    }

    /// Returns the range of a parameter unit (concatenated tensors) that this rank stores: its
    /// shard if `sharded` is set, otherwise the whole unit if the rank owns a part. The range is
    /// empty on ranks that own no part.
    fn select_stored_range(&self, u: usize, sharded: bool) -> Range<usize> {
        let unit = &self.shards[u].unit;
        if sharded || !unit.owners.contains(self.rank) { self.owned_range(u) } else { 0..unit.len() }
    }

    /// Overwrites a part of this rank's 16-bit copy of parameter unit `u` (tensors that are
    /// gathered together) with `values`, from element number `at` of the copy on. Does nothing if
    /// no such copy is stored.
    pub fn update_compute_copy(&self, u: usize, at: usize, values: View) {
        if let Some(compute_copy) = &self.shards[u].compute_copy {
            copy_or_cast(
                self.ops.as_ref(),
                lock_for_writing(compute_copy).view_mut().slice(at..at + values.len()),
                values,
            );
        }
    }

    /// Overwrites a part of the parameters of unit `u` (tensors that are gathered together) that
    /// this rank stores for the optimizer, from element number `at` on. Rounds to the nearest value
    /// if the parameters have 16 bits.
    pub fn write_resident_params(&self, u: usize, at: usize, values: View) {
        copy_or_cast(
            self.ops.as_ref(),
            self.lock_resident_params_mut(u).view_mut().slice(at..at + values.len()),
            values,
        );
    }

    /// Converts this rank's fp32 master weights of parameter unit `u` (tensors that are gathered
    /// together) again to the 16-bit copy for forward and backward passes. Does nothing if no such
    /// copy is stored.
    ///
    /// If several ranks store the whole unit, all of them must have changed the unit equally.
    pub fn refresh_compute_copy(&self, u: usize) {
        self.shards[u].refresh_compute_copy(
            self.ops.as_ref(),
            self.resident_range(u),
            self.range_of_compute_copy(u),
        );
    }

    /// Calls the function `f` with the parameters of unit `u` (tensors that are gathered together)
    /// that this rank stores for the optimizer, which `f` may change.
    pub fn with_resident_params<T>(&self, u: usize, f: impl FnOnce(&mut Buf) -> T) -> T {
        f(&mut self.lock_resident_params_mut(u))
    }

    /// Calls the function `update` with the parameters of unit `u` in the flat range `range`, which
    /// the optimizer updates. If `can_round` is true and this rank stores a 16-bit copy of exactly
    /// these parameters, also passes that part of the copy, which `update` must then overwrite.
    /// Returns whether it was passed.
    pub fn update_params(
        &self,
        u: usize,
        range: Range<usize>,
        can_round: bool,
        update: impl FnOnce((ViewMut, Option<ViewMut>)),
    ) -> bool {
        let (shard, resident, computed) =
            (&self.shards[u], self.resident_range(u), self.range_of_compute_copy(u));
        let copied = resident.start.max(computed.start)..resident.end.min(computed.end);
        let within = |stored: &Range<usize>| range.start - stored.start..range.end - stored.start;
        let mut params = lock_for_writing(&shard.params);
        let copy = shard.compute_copy.as_ref().filter(|_| can_round && copied == range);
        let mut copy = copy.map(lock_for_writing);
        let rounded = copy.as_mut().map(|copy| copy.view_mut().slice(within(&computed)));
        let is_rounded = rounded.is_some();
        update((params.view_mut().slice(within(&resident)), rounded));
        is_rounded
    }

    /// Returns a read lock on the parameters of unit `u` (tensors that are gathered together) that
    /// this rank stores for the optimizer.
    pub fn lock_resident_params(&self, u: usize) -> RwLockReadGuard<'_, Buf> {
        lock_for_reading(&self.shards[u].params)
    }

    /// Returns a write lock on the parameters of unit `u` (tensors that are gathered together) that
    /// this rank stores for the optimizer.
    pub fn lock_resident_params_mut(&self, u: usize) -> RwLockWriteGuard<'_, Buf> {
        lock_for_writing(&self.shards[u].params)
    }

    // --- parameters ---------------------------------------------------------------------------

    /// Begins a forward or backward pass, and plans the gathers of the parameter units (tensors
    /// that are gathered together) that the pass uses in the given order. Panics if the previous
    /// pass was not finished.
    pub fn begin_pass(&mut self, order: impl IntoIterator<Item = usize>) {
        assert!(
            self.upcoming.is_empty() && self.pending_gathers.is_empty(),
            "the last pass was not finished"
        );
        let gathered = order.into_iter().filter(|&u| self.needs_gather(u));
        self.upcoming =
            gather_retention::plan_fetches(gathered, |u| self.shards[u].unit.len(), self.max_retained).into();
        let gathered = |f: &&PlannedFetch| !f.is_retained && self.shards[f.unit].shared_view.is_none();
        self.gather_queue = self.upcoming.iter().filter(gathered).map(|f| f.unit).collect();
        let is_shared = self.policy.shard_parameters && self.shards.iter().any(|s| s.shared_view.is_some());
        self.pass_barrier = is_shared.then(|| self.queue.submit(|comm: &dyn Comm| comm.barrier()));
    }

    /// Returns whether the parameters of unit `u` (tensors that are gathered together) must be
    /// gathered from other ranks, or converted to 16 bits, before each use.
    fn needs_gather(&self, u: usize) -> bool {
        let is_shared =
            self.policy.shard_parameters && self.shards[u].unit.owners.count_owners_below(self.world) > 1;
        is_shared || self.casts_params_on_gather()
    }

    /// Returns whether 16-bit parameters are computed from the fp32 master weights each time they
    /// are gathered, instead of being stored.
    fn casts_params_on_gather(&self) -> bool {
        casts_params_on_gather(self.policy, self.weights, self.ops.is_host())
    }

    /// Returns a handle to all parameters of unit `u` (tensors that are gathered together), and
    /// waits until they are gathered from the other ranks if necessary. Waits for the gather of `u`
    /// if its parameters were not retained. Also starts the next gathers.
    pub fn fetch_params(&mut self, u: usize) -> Result<ParamsGuard> {
        if !self.needs_gather(u) {
            return Ok(ParamsGuard::Resident(u));
        }
        while self.pending_gathers.len() <= self.prefetch {
            let Some(next) = self.gather_queue.pop_front() else { break };
            let gather = self.start_gather_for_use(next);
            self.pending_gathers.push_back((next, gather));
        }
        let fetch = self.upcoming.pop_front().expect("begin_pass lists every fetch");
        assert_eq!(fetch.unit, u, "fetches have the order of begin_pass");
        if self.shards[u].shared_view.is_some() {
            self.pass_barrier.take().map_or(Ok(()), PendingCollective::wait)?;
            return Ok(ParamsGuard::Shared(fetch));
        }
        if fetch.is_retained {
            let buf =
                lock_ignoring_poison(&self.retained).remove(&u).expect("released before it is fetched again");
            return Ok(ParamsGuard::Gathered(fetch, buf));
        }
        let (unit, gather) = self.pending_gathers.pop_front().expect("the gather was started");
        assert_eq!(unit, u, "gathers have the order of their fetches");
        Ok(ParamsGuard::Gathered(fetch, gather.wait()?))
    }

    /// Starts to gather all parameters of unit `u` (tensors that are gathered together) into a
    /// buffer on this rank, for use in a forward or backward pass.
    fn start_gather_for_use(&self, u: usize) -> PendingCollective<Buf> {
        let (shards, len) = (self.shards.clone(), self.shards[u].unit.len());
        let mut whole = lock_ignoring_poison(&self.param_pool).take(self.ops.as_ref(), len);
        let (ops, buffers, cast_buffer) = (self.ops.clone(), self.exchange.clone(), self.cast_buffer.clone());
        let (casts, has_one_owner) =
            (self.casts_params_on_gather(), shards[u].unit.owners.count_owners_below(self.world) == 1);
        self.queue.submit(move |comm: &dyn Comm| {
            let s = &shards[u];
            let owned = lock_for_reading(s.select_compute_params());
            let (ops, to, lengths) =
                (ops.as_ref(), whole.view_mut().slice(0..len), s.partition.shard_lengths());
            let mut buffers = lock_ignoring_poison(&buffers);
            if !casts {
                buffers.gather_from_owners(comm, ops, s.unit.owners, lengths, to, owned.view())?;
            } else if has_one_owner {
                ops.cast(to, owned.view());
            } else {
                let mut mine = lock_ignoring_poison(&cast_buffer);
                let mut mine = resize_buffer(ops, GATHERED_PARAMETERS_LABEL, &mut mine, owned.len());
                ops.cast(mine.reborrow(), owned.view());
                buffers.gather_from_owners(comm, ops, s.unit.owners, lengths, to, mine.as_view())?;
            }
            Ok(whole)
        })
    }

    /// Calls the function `f` with all parameters of one unit (tensors that are gathered together),
    /// which the handle `guard` makes readable.
    pub fn with_params<T>(&self, guard: &ParamsGuard, f: impl FnOnce(View) -> T) -> T {
        match guard {
            ParamsGuard::Resident(u) => f(lock_for_reading(self.shards[*u].select_compute_params()).view()),
            ParamsGuard::Gathered(fetch, buf) => f(buf.view().slice(0..self.shards[fetch.unit].unit.len())),
            ParamsGuard::Shared(fetch) => {
                let shared = self.shards[fetch.unit].shared_view.as_ref().expect("shared memory");
                // SAFETY: the pass began with a barrier. Until it ends, every rank only reads.
                f(unsafe { shared.view() })
            }
        }
    }

    /// Calls the function `f` with all parameters of one or two units (tensors that are gathered
    /// together), to which the handles `first` and `second` refer.
    pub fn with_params_of_units<T>(
        &self,
        (first, second): (&ParamsGuard, Option<&ParamsGuard>),
        f: impl FnOnce(View, Option<View>) -> T,
    ) -> T {
        self.with_params(first, |first| match second {
            Some(second) => self.with_params(second, |second| f(first, Some(second))),
            None => f(first, None),
        })
    }

    /// Gives back the handle to a unit's gathered parameters, and frees their buffer unless the
    /// parameters are kept for the next use of the unit.
    pub fn release_params(&self, guard: ParamsGuard) {
        match guard {
            ParamsGuard::Resident(_) => {}
            ParamsGuard::Gathered(fetch, buf) if fetch.is_kept => {
                drop(lock_ignoring_poison(&self.retained).insert(fetch.unit, buf))
            }
            ParamsGuard::Gathered(_, buf) => lock_ignoring_poison(&self.param_pool).give_back(buf),
            ParamsGuard::Shared(fetch) if fetch.is_kept => {}
            ParamsGuard::Shared(fetch) => {
                self.shards[fetch.unit].shared_view.iter().for_each(SharedView::release_peer_pages)
            }
        }
    }

    /// Ends a forward or backward pass early, before all parameter units (tensors that are gathered
    /// together) of the pass were used. Waits for the gathers that have started. Every fetched unit
    /// must have been released. Collective: every rank must call it at the same point of the pass.
    pub fn cancel_pass(&mut self) -> Result<()> {
        self.gather_queue.clear();
        self.pass_barrier.take().map_or(Ok(()), PendingCollective::wait)?;
        let retained = std::mem::take(&mut *lock_ignoring_poison(&self.retained)).into_values();
        let mut unused: Vec<Buf> = retained.collect();
        for (_, gather) in self.pending_gathers.drain(..) {
            unused.push(gather.wait()?);
        }
        unused.into_iter().for_each(|buf| lock_ignoring_poison(&self.param_pool).give_back(buf));
        let fetched: HashSet<usize> = self.upcoming.drain(..).map(|fetch| fetch.unit).collect();
        let views = fetched.into_iter().filter_map(|u| self.shards[u].shared_view.as_ref());
        views.for_each(SharedView::release_peer_pages);
        Ok(())
    }

    /// Starts to distribute the updated shards of parameter unit `u` (tensors that are gathered
    /// together) among the ranks that store the whole unit.
    /// [`ZeroEngine::wait_for_updated_param_gathers`] waits for the result. `is_rounded` states
    /// whether this rank's 16-bit copy of its shard contains the updated values already.
    ///
    /// Collective: every rank must call it.
    pub fn start_updated_param_gather(&mut self, u: usize, is_rounded: bool) {
        if self.policy.shard_parameters || self.world == 1 {
            if !is_rounded {
                self.refresh_compute_copy(u);
            }
            return;
        }
        let (shards, ops, owned) = (self.shards.clone(), self.ops.clone(), self.owned_range(u));
        let (resident, computed) = (self.resident_range(u), self.range_of_compute_copy(u));
        let (stores_shard_only, buffers) =
            (self.policy.shards_updated_params(self.weights.has_master_weights()), self.exchange.clone());
        self.pending_param_gathers.push(self.queue.submit(move |comm: &dyn Comm| {
            let (s, buffers) = (&shards[u], &mut lock_ignoring_poison(&buffers));
            if stores_shard_only {
                if !is_rounded {
                    s.refresh_compute_copy(ops.as_ref(), resident, computed.clone());
                }
                return s.gather_shards_in_place(
                    comm,
                    ops.as_ref(),
                    buffers,
                    s.select_compute_params(),
                    owned,
                    computed,
                );
            }
            s.gather_shards_in_place(comm, ops.as_ref(), buffers, &s.params, owned, resident.clone())?;
            s.refresh_compute_copy(ops.as_ref(), resident, computed);
            Ok(())
        }));
    }

    /// Waits until the parameters that the optimizer has updated are distributed to all ranks that
    /// store them.
    pub fn wait_for_updated_param_gathers(&mut self) -> Result<()> {
        self.pending_param_gathers.drain(..).try_for_each(PendingCollective::wait)
    }
}

/// Copies `values` to `to`, which may be in other memory (host or device) and may have another
/// element type. Rounds to the nearest value if `to` has a narrower type.
pub(crate) fn copy_or_cast(ops: &dyn Ops, to: ViewMut, values: View) {
    if to.dtype() == values.dtype() {
        return ops.copy(to, values);
    }
    let mut device_values = Buf::default();
    ops.cast(to, ops.to_device(values, &mut device_values));
}
