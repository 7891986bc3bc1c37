//! [`ExpertLayout`]: which rank has which experts of a mixture-of-experts model. Also [`SendPlan`]
//! and [`RecvPlan`], the order of rows that ranks dispatch to experts and receive for them.
//!
//! With an expert-parallel size of N, N neighbouring ranks form a group, and rank r has index `r %
//! N` in its group. Each group has every expert of a layer once. The layout assigns some experts to
//! each index. The ranks with this index in all groups shard, gather and reduce these experts among
//! themselves, as all ranks do with other units.
use crate::{
    model::{Model, MoeModel},
    params::{OwnerRanks, ParamUnit},
};
use diagnostic::{Diagnostic, codes};
use jobspec::{ExpertPlacement, ExpertsSpec};
use std::{collections::BTreeMap, ops::Range};

/// The key of job.yaml for the section about experts of mixture-of-experts models.
const EXPERTS_KEY: &str = "train.experts";
/// The key of job.yaml for the number of ranks among which the experts of a layer are divided.
const PARALLEL_SIZE_KEY: &str = "train.experts.expert_parallel_size";
/// The key of job.yaml that selects a rule for the assignment of experts to ranks, or lists the
/// assignment explicitly.
const PLACEMENT_KEY: &str = "train.experts.placement";

/// The assignment of experts to the ranks of an expert-parallel group, for each mixture-of-experts
/// layer of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// The expert-parallel size: the number of ranks of a group.
    pub parallel: usize,
    /// For each MoE layer: the experts of each rank of a group, in ascending order.
    layers: BTreeMap<usize, Vec<Vec<usize>>>,
}

impl ExpertLayout {
    /// Assigns the experts of the model to ranks as the section `train.experts` of job.yaml
    /// demands, for training on `world` ranks. Returns `None` if the model has no experts.
    ///
    /// # Errors
    ///
    /// Fails if the job's experts do not fit the model or the number of ranks. The subject of the
    /// error is the key of the job.
    pub fn new(spec: &ExpertsSpec, model: &Model, world: usize) -> diagnostic::Result<Option<Self>> {
        let Some(sparse) = MoeModel::from_model(model) else {
            if *spec == ExpertsSpec::default() {
                return Ok(None);
            }
            let message = format!("`{EXPERTS_KEY}` is set, but the model has no experts");
            return Err(Diagnostic::error(codes::training::EXPERTS_NOT_IN_MODEL, message)
                .with_subject(EXPERTS_KEY)
                .with_help(format!("remove `{EXPERTS_KEY}`")));
        };
        let parallel = spec.expert_parallel_size as usize;
        if !world.is_multiple_of(parallel) {
            return Err(build_invalid_parallel_size_error(parallel, "workers", world));
        }
        let placed: diagnostic::Result<_> =
            sparse.list_moe_layers().map(|l| Ok((l, assign_experts_to_ranks(spec, sparse, l)?))).collect();
        if let ExpertPlacement::Layers(named) = &spec.placement
            && let Some(l) = named.keys().find(|l| !sparse.is_moe_layer(**l as usize))
        {
            let message = format!("`{PLACEMENT_KEY}` names layer {l}, which has no experts");
            return Err(Diagnostic::error(codes::training::EXPERTS_NOT_IN_MODEL, message)
                .with_subject(PLACEMENT_KEY)
                .with_field("layer", *l));
        }
        Ok(Some(ExpertLayout { parallel, layers: placed? }))
    }

    /// Creates the assignment in which every rank has every expert, so that no tokens are sent
    /// between ranks. Returns `None` if the model has no experts.
    pub fn for_replicated_experts(model: &Model) -> Option<Self> {
        let sparse = MoeModel::from_model(model)?;
        let ranks = vec![(0..sparse.expert_shape().experts).collect()];
        let layers = sparse.list_moe_layers().map(|l| (l, ranks.clone())).collect();
        Some(ExpertLayout { parallel: 1, layers })
    }

    /// Returns the numbers of the experts of one layer that a rank has, in ascending order, where
    /// `index` is the rank's position in its expert-parallel group.
    pub fn list_experts_of_group_member(&self, layer: usize, index: usize) -> &[usize] {
        self.layers.get(&layer).map_or(&[], |ranks| &ranks[index])
    }

    /// Returns all experts of one layer in the order in which a rank sends token rows to them,
    /// sorted by the rank that has the expert.
    pub fn list_experts_in_dispatch_order(&self, layer: usize) -> Vec<usize> {
        self.layers.get(&layer).map(|ranks| ranks.concat()).unwrap_or_default()
    }

    /// Returns the ranks of the expert-parallel group that contains `rank`.
    pub fn list_group_ranks(&self, rank: usize) -> Range<usize> {
        let first = rank / self.parallel * self.parallel;
        first..first + self.parallel
    }
}

/// Builds the error which reports that the expert-parallel size in job.yaml does not divide the
/// number of workers or the number of experts.
fn build_invalid_parallel_size_error(parallel: usize, things: &str, count: usize) -> Diagnostic {
    let message = format!("`{PARALLEL_SIZE_KEY}` {parallel} does not divide the number of {things}, {count}");
    Diagnostic::error(codes::training::EXPERT_PARALLEL_SIZE_INVALID, message)
        .with_subject(PARALLEL_SIZE_KEY)
        .with_field("expert_parallel_size", parallel)
        .with_field(things, count)
}

/// Determines which experts of the layer `layer` each rank of an expert-parallel group gets, as
/// `train.experts` of job.yaml demands. Fails if the job's placement is not valid.
fn assign_experts_to_ranks(
    spec: &ExpertsSpec,
    sparse: MoeModel,
    layer: usize,
) -> diagnostic::Result<Vec<Vec<usize>>> {
    let (experts, parallel) = (sparse.expert_shape().experts, spec.expert_parallel_size as usize);
    let named = match &spec.placement {
        ExpertPlacement::Balanced => None,
        ExpertPlacement::Experts(ranks) => Some(ranks),
        ExpertPlacement::Layers(layers) => layers.get(&(layer as u32)),
    };
    let Some(named) = named else {
        if !experts.is_multiple_of(parallel) {
            return Err(build_invalid_parallel_size_error(parallel, "experts", experts)
                .with_help(format!("or assign each expert to a rank with `{PLACEMENT_KEY}`")));
        }
        let per_rank = experts / parallel;
        return Ok((0..parallel).map(|r| (r * per_rank..(r + 1) * per_rank).collect()).collect());
    };
    let invalid = |expert: usize, what: String| {
        let message = format!("`{PLACEMENT_KEY}`: layer {layer}: {what}");
        Diagnostic::error(codes::training::EXPERT_PLACEMENT_INVALID, message)
            .with_subject(PLACEMENT_KEY)
            .with_field("layer", layer)
            .with_field("expert", expert)
    };
    if let Some(e) = named.keys().find(|e| **e as usize >= experts) {
        return Err(invalid(
            *e as usize,
            format!("expert {e} does not exist; experts are 0 to {}", experts - 1),
        ));
    }
    let mut ranks = vec![Vec::new(); parallel];
    for e in 0..experts {
        match named.get(&(e as u32)).map(|r| *r as usize) {
            None => return Err(invalid(e, format!("expert {e} is not assigned to a rank"))),
            Some(r) if r >= parallel => {
                let what = format!("expert {e} is assigned to rank {r}; ranks are 0 to {}", parallel - 1);
                return Err(invalid(e, what));
            }
            Some(r) => ranks[r].push(e),
        }
    }
    Ok(ranks)
}

/// Divides the model's parameters into units (parameters that ranks gather together), first those
/// without experts, then those of the experts. Each MoE layer has one unit of experts for each rank
/// of an expert-parallel group.
pub fn build_units_with_experts(model: &Model, layout: Option<&ExpertLayout>) -> Vec<ParamUnit> {
    let mut units = model.param_units();
    let (Some(sparse), Some(layout)) = (MoeModel::from_model(model), layout) else { return units };
    let experts = sparse.expert_shape().experts;
    for (&layer, ranks) in &layout.layers {
        for (first, on_rank) in ranks.iter().enumerate() {
            let params: Vec<_> = on_rank.iter().flat_map(|&e| sparse.expert_params(layer, e)).collect();
            let per_expert = params.len() / on_rank.len().max(1);
            let canonical = |&e: &usize| (0..per_expert).map(move |i| (layer * experts + e) * per_expert + i);
            let positions = on_rank.iter().flat_map(canonical).collect();
            let name = match layout.parallel {
                1 => format!("experts of layer {layer}"),
                _ => format!("experts of layer {layer} on rank {first}"),
            };
            let owners = OwnerRanks { first, stride: layout.parallel };
            units.push(ParamUnit::new_expert_unit(name, params, owners, layer, positions));
        }
    }
    units
}

/// Which token rows a rank sends to which experts in one micro-batch: one row for each expert that
/// the router chose for a token, ordered by expert.
#[derive(Default)]
pub struct SendPlan {
    /// For each dispatched row, the index of its token.
    pub row_tokens: Vec<u32>,
    /// For each pair of a token and one of its chosen experts, the index of the dispatched row. The
    /// pairs are ordered by token, and those of a token start with its best expert.
    pub choice_rows: Vec<u32>,
    /// For each expert, in the order of dispatch, the number of rows that are sent to the expert.
    pub expert_rows: Vec<usize>,
}

impl SendPlan {
    /// Plans which token rows this rank sends to which experts in a micro-batch, from the experts
    /// that the router has chosen for each token (`chosen`). `chosen` contains `per_token` experts
    /// for each token, and `order` lists all experts in the order in which their rows are
    /// dispatched.
    pub fn plan_dispatch(&mut self, chosen: &[u32], per_token: usize, order: &[usize]) {
        let mut position = vec![0; order.len()];
        order.iter().enumerate().for_each(|(i, &e)| position[e] = i);
        self.expert_rows.clear();
        self.expert_rows.resize(order.len(), 0);
        chosen.iter().for_each(|&e| self.expert_rows[position[e as usize]] += 1);
        let mut next = compute_start_offsets(&self.expert_rows);
        self.row_tokens.resize(chosen.len(), 0);
        self.choice_rows.resize(chosen.len(), 0);
        for (choice, &e) in chosen.iter().enumerate() {
            let row = &mut next[position[e as usize]];
            self.row_tokens[*row] = (choice / per_token) as u32;
            self.choice_rows[choice] = *row as u32;
            *row += 1;
        }
    }

    /// Returns, for each token row that this rank sends, the number of the pair of token and chosen
    /// expert for which the row is sent. A choice is a token with one of its experts, and choices
    /// are numbered token by token, best expert first.
    pub fn list_choices_of_rows(&self) -> Vec<u32> {
        let mut choices = vec![0; self.choice_rows.len()];
        (0..).zip(&self.choice_rows).for_each(|(choice, &row)| choices[row as usize] = choice);
        choices
    }

    /// Empties this plan, so that it describes a rank without tokens, which sends no row to any
    /// expert.
    pub fn reset_to_no_rows(&mut self, experts: usize) {
        self.row_tokens.clear();
        self.choice_rows.clear();
        self.expert_rows.clear();
        self.expert_rows.resize(experts, 0);
    }
}

/// How many token rows a rank receives in one micro-batch for each of its experts from each rank of
/// its expert-parallel group.
#[derive(Default)]
pub struct RecvPlan {
    experts: usize,
    /// The numbers of rows, ordered by sender, then by expert.
    counts: Vec<usize>,
}

impl RecvPlan {
    /// Creates a plan for receiving token rows for the `experts` experts of this rank. `counts` are
    /// the numbers of rows, ordered by sender, then by expert.
    pub fn new(experts: usize, counts: Vec<usize>) -> Self {
        RecvPlan { experts, counts }
    }

    /// Returns the number of token rows that this rank receives from all senders.
    pub fn count_rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Returns the number of ranks from which this rank receives token rows.
    fn count_senders(&self) -> usize {
        self.counts.len().checked_div(self.experts).unwrap_or(0)
    }

    /// Returns the number of token rows that this rank receives from the sender with the index
    /// `sender` in the group.
    pub fn count_rows_from(&self, sender: usize) -> usize {
        let first = sender * self.experts;
        self.counts.get(first..first + self.experts).map_or(0, |c| c.iter().sum())
    }

    /// Returns how many token rows this rank receives for each of its experts from each sender,
    /// ordered by expert, then by sender.
    fn list_sender_counts_by_expert(&self) -> Vec<usize> {
        let of_expert = |e: usize| (0..self.count_senders()).map(move |s| self.counts[s * self.experts + e]);
        (0..self.experts).flat_map(of_expert).collect()
    }

    /// Computes each expert's range of rows in the buffer of received token rows, which is sorted
    /// by expert and then by sender.
    pub fn compute_expert_ranges(&self) -> Vec<Range<usize>> {
        let counts = self.list_sender_counts_by_expert();
        let offsets = compute_start_offsets(&counts);
        let senders = self.count_senders();
        let range = |e: usize| {
            let (first, last) = (e * senders, (e + 1) * senders - 1);
            offsets[first]..offsets[last] + counts[last]
        };
        (0..self.experts).map(range).collect()
    }

    /// Computes, for each expert of this rank, which rows of the sorted buffer of received token
    /// rows came from the sender with the index `sender`.
    pub fn compute_expert_ranges_from(&self, sender: usize) -> Vec<Range<usize>> {
        let counts = self.list_sender_counts_by_expert();
        let offsets = compute_start_offsets(&counts);
        let range = |e: usize| {
            let i = e * self.count_senders() + sender;
            offsets[i]..offsets[i] + counts[i]
        };
        (0..self.experts).map(range).collect()
    }

    /// Lists the blocks of received token rows, each from one sender for one expert, with their
    /// positions before and after sorting by expert.
    ///
    /// Each item is the block's range in the order in which rows are received (by sender, then by
    /// expert), and the index of the block's first row after rows are sorted by expert, then by
    /// sender.
    pub fn list_row_blocks(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (received, sorted) = (
            compute_start_offsets(&self.counts),
            compute_start_offsets(&self.list_sender_counts_by_expert()),
        );
        let senders = self.count_senders();
        self.counts.iter().enumerate().map(move |(i, &n)| {
            let (sender, expert) = (i / self.experts, i % self.experts);
            (received[i]..received[i] + n, sorted[expert * senders + sender])
        })
    }
}

/// Returns the start offsets of consecutive ranges whose lengths are `counts` (the exclusive prefix
/// sums).
fn compute_start_offsets(counts: &[usize]) -> Vec<usize> {
    let next = |offset: &mut usize, n: &usize| {
        let start = *offset;
        *offset += n;
        Some(start)
    };
    counts.iter().scan(0, next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_choice_is_dispatched_once_in_the_order_of_tokens(
            choices in prop::collection::vec((0u32..6, 0u32..5), 0..60), turn in 0usize..6
        ) {
            // Two different experts for each token.
            let chosen: Vec<u32> = choices.iter().flat_map(|&(a, b)| [a, if b >= a { b + 1 } else { b }]).collect();
            let mut order: Vec<usize> = (0..6).collect();
            order.rotate_left(turn);
            let mut s = SendPlan::default();
            s.plan_dispatch(&chosen, 2, &order);
            prop_assert_eq!(s.expert_rows.iter().sum::<usize>(), chosen.len());
            let mut seen = vec![false; chosen.len()];
            let experts: Vec<usize> =
                order.iter().zip(&s.expert_rows).flat_map(|(&e, &n)| std::iter::repeat_n(e, n)).collect();
            for (choice, &row) in s.choice_rows.iter().enumerate() {
                prop_assert!(!std::mem::replace(&mut seen[row as usize], true));
                prop_assert_eq!(s.row_tokens[row as usize] as usize, choice / 2);
                prop_assert_eq!(experts[row as usize], chosen[choice] as usize);
            }
            for row in 1..chosen.len() {
                prop_assert!(experts[row] != experts[row - 1] || s.row_tokens[row] > s.row_tokens[row - 1]);
            }
        }

        #[test]
        fn received_rows_are_sorted_by_expert_then_sender(
            senders in 1usize..5, experts in 0usize..5, seed in prop::collection::vec(0usize..4, 25)
        ) {
            let r = RecvPlan::new(experts, seed[..senders * experts].to_vec());
            let mut sorted = vec![(9, 9); r.count_rows()];
            for (i, (received, to)) in r.list_row_blocks().enumerate() {
                sorted[to..to + received.len()].fill((i % experts, i / experts));
            }
            prop_assert!(sorted.is_sorted());
            let ranges = r.compute_expert_ranges();
            prop_assert_eq!((0..senders).map(|s| r.count_rows_from(s)).sum::<usize>(), r.count_rows());
            for sender in 0..senders {
                for (e, range) in r.compute_expert_ranges_from(sender).into_iter().enumerate() {
                    prop_assert!(range.is_empty() || (ranges[e].start <= range.start && range.end <= ranges[e].end));
                    prop_assert!(sorted[range].iter().all(|x| *x == (e, sender)));
                }
            }
        }
    }
}
