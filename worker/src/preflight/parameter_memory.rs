//! Estimates how much memory a rank needs at most for parameters of other ranks, which are gathered
//! into buffers or read in shared memory.
use super::memory_estimator::MemoryEstimator;
use crate::{
    model::MoeModel,
    param_groups::find_first_backward_layer,
    zero::{
        ShardingPolicy,
        buffer_pool::BufferPoolEstimate,
        gather_retention::{self, PlannedFetch},
        param_dtypes::{ParamDtypes, casts_params_on_gather},
    },
};
use jobspec::{HostSelection, WorkersPerHost};
use std::collections::{HashMap, VecDeque};

impl MemoryEstimator<'_> {
    /// Finds which parameter units (tensors that are gathered together) contain the output layer
    /// and, for each layer, the dense tensors and the experts of `rank`.
    pub(super) fn find_head_and_layer_units(&self, rank: usize) -> (usize, Vec<Vec<usize>>) {
        let head = self.model.sizes().layers + 1;
        let is_moe = |l: usize| MoeModel::from_model(self.model).is_some_and(|s| s.is_moe_layer(l));
        let mut experts =
            (head + 1..self.units.len()).filter(|&u| self.units[u].owners.contains(rank)).collect::<Vec<_>>();
        experts.reverse();
        let units = |u: usize, experts: Option<usize>| std::iter::once(u).chain(experts).collect();
        (head, (1..head).map(|u| units(u, experts.pop_if(|_| is_moe(u - 1)))).collect())
    }

    /// Returns the indices of the parameter units (tensors that are gathered together) in the order
    /// in which a training step gathers them.
    fn list_units_in_gather_order(&self, rank: usize) -> Vec<usize> {
        let (head, layers) = self.find_head_and_layer_units(rank);
        let forward = layers.iter().flatten().copied();
        let backward = layers[find_first_backward_layer(self.units)..].iter().rev().flatten().copied();
        let tied = self.model.has_tied_embeddings().then_some(0);
        std::iter::once(0).chain(forward).chain([head]).chain(tied).chain(backward).collect()
    }

    /// Computes the largest number of elements of gathered parameters that a rank has in memory at
    /// one time. Simulates the gathers of a step with the prefetch and the gather retention of the
    /// engine.
    pub(super) fn estimate_peak_gathered_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        let casts = self.casts_params_on_gather(policy);
        if !policy.shard_parameters || (self.world == 1 && !casts) {
            return 0;
        }
        let shards = self.list_shard_lengths(rank);
        let len = |u: usize| self.units[u].len();
        // Units that are retained after one micro-batch are available to the next.
        let one_micro_batch = self.list_units_in_gather_order(rank);
        let order = if self.train.batch.global > self.train.batch.micro {
            one_micro_batch.repeat(2)
        } else {
            one_micro_batch
        };
        let order =
            order.into_iter().filter(|&u| casts || self.units[u].owners.count_owners_below(self.world) > 1);
        let fetches = gather_retention::plan_fetches(order, len, self.train.zero.max_live_parameters);
        if self.shares_params_in_memory() {
            return self.count_mapped_peer_elements(&fetches, |u| len(u) - shards[u]);
        }
        let mut ahead: VecDeque<usize> = fetches.iter().filter(|f| !f.is_retained).map(|f| f.unit).collect();
        let mut pool = BufferPoolEstimate::default();
        let (mut gathering, mut retained, mut used) = (VecDeque::new(), HashMap::new(), Vec::new());
        for (fetch, overlaps) in self.mark_overlapping_fetches(&fetches) {
            while gathering.len() <= self.train.zero.prefetch as usize {
                let Some(next) = ahead.pop_front() else { break };
                gathering.push_back(pool.take(len(next)));
            }
            let buf = if fetch.is_retained { retained.remove(&fetch.unit) } else { gathering.pop_front() };
            used.push((fetch, buf.unwrap_or(0)));
            if overlaps {
                continue;
            }
            for (fetch, buf) in used.drain(..) {
                match fetch.is_kept {
                    true => drop(retained.insert(fetch.unit, buf)),
                    false => pool.give_back(buf),
                }
            }
        }
        // A copy of this rank's shard in 16 bits, if it is cast before it is sent.
        let cast_shard = if casts && self.world > 1 { shards.into_iter().max().unwrap_or(0) } else { 0 };
        (pool.allocated + cast_shard) as u64
    }

    /// Determines for each use of a parameter unit (tensors that are gathered together) in a step
    /// whether the unit stays in use while the next unit is used.
    ///
    /// The unit is still in use if it is the head's unit with a tied embedding or, in a backward
    /// pass, a layer's unit with its experts.
    fn mark_overlapping_fetches(&self, fetches: &[PlannedFetch]) -> Vec<(PlannedFetch, bool)> {
        let head = self.model.sizes().layers + 1;
        let mut is_backward = false;
        let next = fetches.iter().skip(1).map(|f| f.unit).chain([0]);
        let overlaps = fetches.iter().zip(next).map(|(fetch, next)| {
            is_backward = (is_backward || fetch.unit == head) && next != 1;
            let tied = self.model.has_tied_embeddings() && fetch.unit == head && next == 0;
            (*fetch, tied || (is_backward && next > head))
        });
        overlaps.collect()
    }

    /// Returns whether ranks convert fp32 master weights to 16-bit parameters whenever they gather
    /// them, instead of storing a 16-bit copy.
    pub(super) fn casts_params_on_gather(&self, policy: ShardingPolicy) -> bool {
        casts_params_on_gather(policy, ParamDtypes::for_job(self.train), !self.job.cluster.trains_on_gpus())
    }

    /// Returns whether ranks read each other's parameters directly in shared memory, which they do
    /// if all ranks train on the CPUs of one host.
    pub(super) fn shares_params_in_memory(&self) -> bool {
        let cluster = &self.job.cluster;
        let one_host = match cluster.workers_per_host {
            WorkersPerHost::Exactly(n) => self.world <= n as usize,
            WorkersPerHost::Auto => matches!(cluster.hosts, HostSelection::Auto | HostSelection::Local),
        };
        one_host && !cluster.trains_on_gpus()
    }

    /// Computes the peak number of elements in other ranks' shards that are mapped into this rank's
    /// memory while a step uses the parameter units in `fetches`. `peer_elements` returns, for the
    /// index of a unit, the number of the unit's elements that other ranks own.
    fn count_mapped_peer_elements(
        &self,
        fetches: &[PlannedFetch],
        peer_elements: impl Fn(usize) -> usize,
    ) -> u64 {
        let (mut mapped, mut peak, mut used) = (0, 0, Vec::new());
        for (fetch, overlaps) in self.mark_overlapping_fetches(fetches) {
            mapped += if fetch.is_retained { 0 } else { peer_elements(fetch.unit) };
            peak = peak.max(mapped);
            used.push(fetch);
            if !overlaps {
                mapped -= used.drain(..).filter(|f| !f.is_kept).map(|f| peer_elements(f.unit)).sum::<usize>();
            }
        }
        peak as u64
    }
}
