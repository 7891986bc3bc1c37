//! Parameters of other ranks that are here at their peak: gathered, or mapped where those keep them.
use super::memory::Memory;
use crate::{
    stages::weights_of,
    trained::first_backward,
    zero::{
        Policy,
        engine::rounds_on_fetch,
        live::{self, Fetch},
        pool::PoolPlan,
    },
};
use contract::job::{Count, Hosts};
use std::collections::{HashMap, VecDeque};

impl Memory<'_> {
    /// The head, and of each layer its unit and that of its experts that this rank has a part of.
    pub(super) fn layers(&self, rank: usize) -> (usize, Vec<Vec<usize>>) {
        let head = self.units.iter().filter(|u| !u.holds_experts()).count() - 1;
        let sparse = |l: usize| self.model.sparse().is_some_and(|s| s.is_sparse(l));
        let mut experts =
            (head + 1..self.units.len()).filter(|&u| self.units[u].owners.has(rank)).collect::<Vec<_>>();
        experts.reverse();
        let of = |u: usize, experts: Option<usize>| std::iter::once(u).chain(experts).collect();
        (head, (1..head).map(|u| of(u, experts.pop_if(|_| sparse(u - 1)))).collect())
    }

    /// Units in the order of a step's fetches.
    fn fetches(&self, rank: usize) -> Vec<usize> {
        let (head, layers) = self.layers(rank);
        let forward = layers.iter().flatten().copied();
        let backward = layers[first_backward(self.units)..].iter().rev().flatten().copied();
        let tied = self.model.tied().then_some(0);
        std::iter::once(0).chain(forward).chain([head]).chain(tied).chain(backward).collect()
    }

    /// Elements of gathered parameters, by the decisions that the engine takes.
    pub(super) fn gathered(&self, policy: Policy, rank: usize) -> u64 {
        let rounds = self.rounds_on_fetch(policy);
        if !policy.shard_parameters || (self.world == 1 && !rounds) {
            return 0;
        }
        let own = self.own_lengths(rank);
        let len = |u: usize| self.units[u].len();
        // What stays after one slot is there for the next.
        let once = self.fetches(rank);
        let order = if self.train.batch.global > self.train.batch.micro { once.repeat(2) } else { once };
        let order = order.into_iter().filter(|&u| rounds || self.units[u].owners.below(self.world) > 1);
        let fetches = live::plan(order, len, self.train.zero.max_live_parameters);
        if self.reads_in_common() {
            return self.peers_parts(&fetches, |u| len(u) - own[u]);
        }
        let mut ahead: VecDeque<usize> = fetches.iter().filter(|f| !f.here).map(|f| f.unit).collect();
        let mut pool = PoolPlan::default();
        let (mut gathering, mut staying, mut used) = (VecDeque::new(), HashMap::new(), Vec::new());
        for (fetch, together) in self.held_together(&fetches) {
            while gathering.len() <= self.train.zero.prefetch as usize {
                let Some(next) = ahead.pop_front() else { break };
                gathering.push_back(pool.take(len(next)));
            }
            let buf = if fetch.here { staying.remove(&fetch.unit) } else { gathering.pop_front() };
            used.push((fetch, buf.unwrap_or(0)));
            if together {
                continue;
            }
            for (fetch, buf) in used.drain(..) {
                match fetch.stays {
                    true => drop(staying.insert(fetch.unit, buf)),
                    false => pool.give(buf),
                }
            }
        }
        // The own part, where it is rounded before it travels.
        let part = if rounds && self.world > 1 { own.into_iter().max().unwrap_or(0) } else { 0 };
        (pool.allocated + part) as u64
    }

    /// Each fetch, and whether its unit is still held when the next one comes: the head's for the tied embedding, and in a
    /// backward a layer's for its experts.
    fn held_together(&self, fetches: &[Fetch]) -> Vec<(Fetch, bool)> {
        let head = self.units.iter().filter(|u| !u.holds_experts()).count() - 1;
        let mut backward = false;
        let next = fetches.iter().skip(1).map(|f| f.unit).chain([0]);
        let held = fetches.iter().zip(next).map(|(fetch, next)| {
            backward = (backward || fetch.unit == head) && next != 1;
            let tied = self.model.tied() && fetch.unit == head && next == 0;
            (*fetch, tied || (backward && next > head))
        });
        held.collect()
    }

    pub(super) fn rounds_on_fetch(&self, policy: Policy) -> bool {
        rounds_on_fetch(policy, weights_of(self.train), !self.job.cluster.trains_on_gpus())
    }

    /// Do the ranks read each other's parameters where those lie? On one host they have memory in common.
    pub(super) fn reads_in_common(&self) -> bool {
        let cluster = &self.job.cluster;
        let one_host = match cluster.workers_per_host {
            Count::Exactly(n) => self.world <= n as usize,
            Count::Auto => matches!(cluster.hosts, Hosts::Auto | Hosts::Local),
        };
        one_host && !cluster.trains_on_gpus()
    }

    /// The most elements of other ranks' parts that are mapped at once, `theirs` of each unit.
    fn peers_parts(&self, fetches: &[Fetch], theirs: impl Fn(usize) -> usize) -> u64 {
        let (mut mapped, mut most, mut used) = (0, 0, Vec::new());
        for (fetch, together) in self.held_together(fetches) {
            mapped += if fetch.here { 0 } else { theirs(fetch.unit) };
            most = most.max(mapped);
            used.push(fetch);
            if !together {
                mapped -= used.drain(..).filter(|f| !f.stays).map(|f| theirs(f.unit)).sum::<usize>();
            }
        }
        most as u64
    }
}
