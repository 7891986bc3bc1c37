//! [`UnitShard`]: what one rank stores of a parameter unit (tensors that are gathered and reduced
//! together).
use super::{
    ShardingPolicy,
    collective_queue::CollectiveQueue,
    micro_batch_sums::MicroBatchSums,
    owner_collectives::ExchangeBuffers,
    param_dtypes::{ParamDtypes, casts_params_on_gather},
    partition::Partition,
};
use crate::params::ParamUnit;
use comm::{Comm, Result, SharedView};
use device::{Buf, Ops};
use std::{
    ops::Range,
    sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// This rank's parameters and gradient sums of one parameter unit (tensors that are gathered
/// together), and the division of the unit's elements among ranks.
pub struct UnitShard {
    /// The names, shapes and layout of the unit's parameters.
    pub unit: ParamUnit,
    /// The division of the unit's elements among its owner ranks.
    pub partition: Partition,
    /// For each rank, the number of trained elements in its shard, which is the length of gradients
    /// and optimizer states.
    pub(super) trained_counts: Vec<usize>,
    /// The parameters that the optimizer updates, for the flat range
    /// `ZeroEngine::resident_range`.
    pub(super) params: RwLock<Buf>,
    /// The 16-bit parameters for computation: the owned shard or the whole unit, according to the
    /// policy. `None` if there are no master weights, or if parameters are cast for each use
    /// ([`casts_params_on_gather`]).
    pub(super) compute_copy: Option<RwLock<Buf>>,
    /// If the ranks share memory: the shards that all ranks have of the unit's parameters for
    /// forward and backward passes. Parameters are then read from this memory and not gathered.
    pub(super) shared_view: Option<SharedView>,
    /// Partial sums of gradients: of the owned shard or of the whole unit, according to the policy.
    pub(super) grads: Mutex<MicroBatchSums>,
    /// The sum over all ranks of the gradient of the owned shard, if `grads` contains sums of the
    /// whole unit.
    pub(super) reduced_grads: Mutex<MicroBatchSums>,
}

impl UnitShard {
    /// Allocates zeroed memory for this rank's shard of `unit`, parameter tensors that are gathered
    /// and released together. Collective: every rank must call it with the same unit.
    pub(super) fn new(
        unit: ParamUnit,
        policy: ShardingPolicy,
        weights: ParamDtypes,
        queue: &CollectiveQueue,
        ops: &dyn Ops,
    ) -> Result<Self> {
        let (rank, world, dtype) = (queue.comm().rank(), queue.comm().world_size(), weights.compute);
        let parameters = |dtype, len| ops.zeroed_with_purpose("the parameters", dtype, len);
        let part = Partition::new(&unit, world);
        let shared = match policy.shard_parameters && unit.owners.count_owners_below(world) > 1 {
            true => {
                let counts = part.shard_lengths().to_vec();
                queue.run_and_wait(move |comm| comm.shared_window(dtype, &counts))?
            }
            false => None,
        };
        let (shared, whole) = shared.map_or((None, None), |window| (Some(window.owned), Some(window.view)));
        let whole = whole.filter(|_| unit.owners.contains(rank));
        let owned = part.shard_range(rank).len();
        let owner_len = |len: usize| if unit.owners.contains(rank) { len } else { 0 };
        let sharded_len = |sharded: bool| if sharded { owned } else { owner_len(unit.len()) };
        let computed = || shared.unwrap_or_else(|| parameters(dtype, sharded_len(policy.shard_parameters)));
        let masters = || parameters(weights.updated, sharded_len(policy.shards_updated_params(true)));
        let (params, compute_copy) = match weights.has_master_weights() {
            false => (computed(), None),
            true if casts_params_on_gather(policy, weights, ops.is_host()) => (masters(), None),
            true => (masters(), Some(RwLock::new(computed()))),
        };
        let params = RwLock::new(params);
        let trained: Vec<usize> =
            (0..world).map(|r| unit.to_trained_range(part.shard_range(r)).len()).collect();
        let summed = if policy.shard_gradients { trained[rank] } else { owner_len(unit.trained_len()) };
        let grads = Mutex::new(policy.new_gradient_sum(summed));
        let reduced_grads = Mutex::new(policy.new_gradient_sum(trained[rank]));
        Ok(UnitShard {
            unit,
            partition: part,
            trained_counts: trained,
            params,
            compute_copy,
            shared_view: whole,
            grads,
            reduced_grads,
        })
    }

    /// Returns the stored parameters for forward and backward passes: the 16-bit copy if there is
    /// one, otherwise those that the optimizer updates.
    pub(super) fn select_compute_params(&self) -> &RwLock<Buf> {
        self.compute_copy.as_ref().unwrap_or(&self.params)
    }

    /// Converts the fp32 master weights to the 16-bit copy for forward and backward passes, for
    /// those elements of the unit of which this rank stores both. The resident parameters cover the
    /// flat range `resident`, and the compute copy covers `computed`. Does nothing if no compute
    /// copy is stored.
    pub(super) fn refresh_compute_copy(&self, ops: &dyn Ops, resident: Range<usize>, computed: Range<usize>) {
        let Some(compute_copy) = &self.compute_copy else { return };
        let (mut to, from) = (lock_for_writing(compute_copy), lock_for_reading(&self.params));
        let both = resident.start.max(computed.start)..resident.end.min(computed.end);
        let within = |r: &Range<usize>| both.start - r.start..both.end - r.start;
        ops.cast(to.view_mut().slice(within(&computed)), from.view().slice(within(&resident)));
    }

    /// Gathers the shards of all owner ranks of this parameter unit (tensors that are gathered
    /// together) into the buffer `values`. Before the call, `values` contains only this rank's
    /// shard, the range `owned`.
    pub(super) fn gather_shards_in_place(
        &self,
        comm: &dyn Comm,
        ops: &dyn Ops,
        buffers: &mut ExchangeBuffers,
        values: &RwLock<Buf>,
        owned: Range<usize>,
        stored: Range<usize>,
    ) -> Result<()> {
        let mut whole = lock_for_writing(values);
        // the collective must not send from the memory that it writes
        let shard = whole.view().slice(owned.start - stored.start..owned.end - stored.start);
        let copy = buffers.copy_shard_to_reusable_buffer(ops, shard);
        let (owners, lengths, mine) =
            (self.unit.owners, self.partition.shard_lengths(), copy.view().slice(0..owned.len()));
        let gathered = buffers.gather_from_owners(comm, ops, owners, lengths, whole.view_mut(), mine);
        buffers.give_back_shard_buffer(copy);
        gathered
    }
}

/// Locks parameters for writing, even if another thread panicked while it held the lock.
pub(super) fn lock_for_writing(params: &RwLock<Buf>) -> RwLockWriteGuard<'_, Buf> {
    params.write().unwrap_or_else(PoisonError::into_inner)
}

/// Locks parameters for reading, even if another thread panicked while it held the lock.
pub(super) fn lock_for_reading(params: &RwLock<Buf>) -> RwLockReadGuard<'_, Buf> {
    params.read().unwrap_or_else(PoisonError::into_inner)
}
