//! [`ExpertLayout`]: which rank has which expert. [`SendPlan`], [`RecvPlan`]: the order of the rows
//! that are dispatched to experts and received by them. Pure.
//!
//! With an expert-parallel size of N, N neighbouring ranks form a group; rank r has index `r % N`
//! in its group. Each group has every expert of a layer once. The ranks with the same index in all
//! groups share the experts that the layout assigns to this index: these are sharded, gathered and
//! reduced among them, as other units are among all ranks.
use crate::{
    model::{Model, moe::MoeModel},
    params::{OwnerRanks, ParamUnit},
};
use contract::job::{ExpertPlacement, ExpertsSpec};
use diagnostic::{Diagnostic, codes};
use std::{collections::BTreeMap, ops::Range};

const EXPERTS: &str = "train.experts";
const PARALLEL_SIZE: &str = "train.experts.expert_parallel_size";
const PLACEMENT: &str = "train.experts.placement";

/// Which rank of an expert-parallel group has which experts of each MoE layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLayout {
    /// Number of ranks of a group: the expert-parallel size.
    pub parallel: usize,
    /// For each MoE layer: the experts of each rank of a group, in ascending order.
    layers: BTreeMap<usize, Vec<Vec<usize>>>,
}

impl ExpertLayout {
    /// The layout that `train.experts` describes, for a model of `layers` layers on `world` ranks;
    /// `None` if the model has no experts.
    ///
    /// # Errors
    /// The job's experts do not fit the model or the number of ranks; the subject is the key.
    pub fn new(
        spec: &ExpertsSpec,
        model: &dyn Model,
        layers: usize,
        world: usize,
    ) -> diagnostic::Result<Option<Self>> {
        let Some(sparse) = model.moe() else {
            if *spec == ExpertsSpec::default() {
                return Ok(None);
            }
            let message = format!("`{EXPERTS}` is set, but the model has no experts");
            return Err(Diagnostic::error(codes::training::EXPERTS_NOT_IN_MODEL, message)
                .with_subject(EXPERTS)
                .with_help(format!("remove `{EXPERTS}`")));
        };
        let parallel = spec.expert_parallel_size as usize;
        if !world.is_multiple_of(parallel) {
            return Err(invalid_parallel_size_error(parallel, "workers", world));
        }
        let moe_layers = (0..layers).filter(|&l| sparse.is_moe_layer(l));
        let placed: diagnostic::Result<_> =
            moe_layers.map(|l| Ok((l, place_experts(spec, sparse, l)?))).collect();
        if let ExpertPlacement::Layers(named) = &spec.placement
            && let Some(l) =
                named.keys().find(|l| **l as usize >= layers || !sparse.is_moe_layer(**l as usize))
        {
            let message = format!("`{PLACEMENT}` names layer {l}, which has no experts");
            return Err(Diagnostic::error(codes::training::EXPERTS_NOT_IN_MODEL, message)
                .with_subject(PLACEMENT)
                .with_field("layer", *l));
        }
        Ok(Some(ExpertLayout { parallel, layers: placed? }))
    }

    /// The layout with every expert on every rank; `None` if the model has no experts.
    pub fn replicated(model: &dyn Model) -> Option<Self> {
        let sparse = model.moe()?;
        let ranks = vec![(0..sparse.expert_shape().experts).collect()];
        let moe_layers = (0..model.units().len() - 2).filter(|&l| sparse.is_moe_layer(l));
        Some(ExpertLayout { parallel: 1, layers: moe_layers.map(|l| (l, ranks.clone())).collect() })
    }

    /// The experts of `layer` on the rank with index `index` of each group, in ascending order.
    pub fn experts_on(&self, layer: usize, index: usize) -> &[usize] {
        self.layers.get(&layer).map_or(&[], |ranks| &ranks[index])
    }

    /// The experts of `layer` in the order in which rows are dispatched to them: rank by rank.
    pub fn dispatch_order(&self, layer: usize) -> Vec<usize> {
        self.layers.get(&layer).map(|ranks| ranks.concat()).unwrap_or_default()
    }

    /// The ranks of the group that contains `rank`.
    pub fn group_ranks(&self, rank: usize) -> Range<usize> {
        let first = rank / self.parallel * self.parallel;
        first..first + self.parallel
    }
}

/// The error of an expert-parallel size that does not divide the number of `things`.
fn invalid_parallel_size_error(parallel: usize, things: &str, count: usize) -> Diagnostic {
    let message = format!("`{PARALLEL_SIZE}` {parallel} does not divide the number of {things}, {count}");
    Diagnostic::error(codes::training::EXPERT_PARALLEL_SIZE_INVALID, message)
        .with_subject(PARALLEL_SIZE)
        .with_field("expert_parallel_size", parallel)
        .with_field(things, count)
}

/// The experts of `layer` on each rank of a group.
fn place_experts(
    spec: &ExpertsSpec,
    sparse: &dyn MoeModel,
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
            return Err(invalid_parallel_size_error(parallel, "experts", experts)
                .with_help(format!("or assign each expert to a rank with `{PLACEMENT}`")));
        }
        let per_rank = experts / parallel;
        return Ok((0..parallel).map(|r| (r * per_rank..(r + 1) * per_rank).collect()).collect());
    };
    let invalid = |expert: usize, what: String| {
        let message = format!("`{PLACEMENT}`: layer {layer}: {what}");
        Diagnostic::error(codes::training::EXPERT_PLACEMENT_INVALID, message)
            .with_subject(PLACEMENT)
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

/// Returns the dense units of the model, followed by its expert units. Each MoE layer has one
/// expert unit for each rank of an expert-parallel group.
pub fn units_with_experts(model: &dyn Model, layout: Option<&ExpertLayout>) -> Vec<ParamUnit> {
    let mut units = model.units();
    let (Some(sparse), Some(layout)) = (model.moe(), layout) else { return units };
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
            units.push(ParamUnit::with_experts(name, params, owners, layer, positions));
        }
    }
    units
}

/// The order in which the rows of one micro-batch are dispatched: sorted by expert, for each expert
/// in the order of the tokens.
#[derive(Default)]
pub struct SendPlan {
    /// For each dispatched row: its token.
    pub row_tokens: Vec<u32>,
    /// For each choice (token by token, best expert first): its dispatched row.
    pub choice_rows: Vec<u32>,
    /// For each expert, in the order of dispatch: its number of rows.
    pub expert_rows: Vec<usize>,
}

impl SendPlan {
    /// Sorts the choices: `chosen` holds `per_token` experts for each token, and `order` is the
    /// order of the experts in the dispatch.
    pub fn sort_choices(&mut self, chosen: &[u32], per_token: usize, order: &[usize]) {
        let mut position = vec![0; order.len()];
        order.iter().enumerate().for_each(|(i, &e)| position[e] = i);
        self.expert_rows.clear();
        self.expert_rows.resize(order.len(), 0);
        chosen.iter().for_each(|&e| self.expert_rows[position[e as usize]] += 1);
        let mut next = start_offsets(&self.expert_rows);
        self.row_tokens.resize(chosen.len(), 0);
        self.choice_rows.resize(chosen.len(), 0);
        for (choice, &e) in chosen.iter().enumerate() {
            let row = &mut next[position[e as usize]];
            self.row_tokens[*row] = (choice / per_token) as u32;
            self.choice_rows[choice] = *row as u32;
            *row += 1;
        }
    }

    /// For each dispatched row: its choice.
    pub fn choices(&self) -> Vec<u32> {
        let mut choices = vec![0; self.choice_rows.len()];
        (0..).zip(&self.choice_rows).for_each(|(choice, &row)| choices[row as usize] = choice);
        choices
    }

    /// Makes the plan empty: no row is dispatched to any of `experts` experts.
    pub fn clear(&mut self, experts: usize) {
        self.row_tokens.clear();
        self.choice_rows.clear();
        self.expert_rows.clear();
        self.expert_rows.resize(experts, 0);
    }
}

/// The rows that a rank receives: from each rank of its group, rows for each of its experts.
#[derive(Default)]
pub struct RecvPlan {
    experts: usize,
    /// Number of rows by sender, then expert.
    counts: Vec<usize>,
}

impl RecvPlan {
    /// A plan for `experts` experts; `counts` are numbers of rows by sender, then expert.
    pub fn new(experts: usize, counts: Vec<usize>) -> Self {
        RecvPlan { experts, counts }
    }

    /// Number of rows from all senders.
    pub fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The number of ranks that send rows.
    fn senders(&self) -> usize {
        self.counts.len().checked_div(self.experts).unwrap_or(0)
    }

    /// Number of rows from one sender.
    pub fn rows_from(&self, sender: usize) -> usize {
        let first = sender * self.experts;
        self.counts.get(first..first + self.experts).map_or(0, |c| c.iter().sum())
    }

    /// Numbers of rows by expert, then sender.
    fn counts_by_expert(&self) -> Vec<usize> {
        let of_expert = |e: usize| (0..self.senders()).map(move |s| self.counts[s * self.experts + e]);
        (0..self.experts).flat_map(of_expert).collect()
    }

    /// For each expert: the range of its rows among rows sorted by expert, then sender.
    pub fn expert_ranges(&self) -> Vec<Range<usize>> {
        let counts = self.counts_by_expert();
        let offsets = start_offsets(&counts);
        let senders = self.senders();
        let range = |e: usize| {
            let (first, last) = (e * senders, (e + 1) * senders - 1);
            offsets[first]..offsets[last] + counts[last]
        };
        (0..self.experts).map(range).collect()
    }

    /// For each expert: the range of its rows from `sender` among rows sorted by expert, then
    /// sender.
    pub fn expert_ranges_from(&self, sender: usize) -> Vec<Range<usize>> {
        let counts = self.counts_by_expert();
        let offsets = start_offsets(&counts);
        let range = |e: usize| {
            let i = e * self.senders() + sender;
            offsets[i]..offsets[i] + counts[i]
        };
        (0..self.experts).map(range).collect()
    }

    /// Each block of rows as received (by sender, then expert), with its start among rows sorted by
    /// expert, then sender.
    pub fn blocks(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (received, sorted) = (start_offsets(&self.counts), start_offsets(&self.counts_by_expert()));
        let senders = self.senders();
        self.counts.iter().enumerate().map(move |(i, &n)| {
            let (sender, expert) = (i / self.experts, i % self.experts);
            (received[i]..received[i] + n, sorted[expert * senders + sender])
        })
    }
}

/// The exclusive prefix sums of `counts`.
fn start_offsets(counts: &[usize]) -> Vec<usize> {
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
            s.sort_choices(&chosen, 2, &order);
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
            let mut sorted = vec![(9, 9); r.rows()];
            for (i, (received, to)) in r.blocks().enumerate() {
                sorted[to..to + received.len()].fill((i % experts, i / experts));
            }
            prop_assert!(sorted.is_sorted());
            let ranges = r.expert_ranges();
            prop_assert_eq!((0..senders).map(|s| r.rows_from(s)).sum::<usize>(), r.rows());
            for sender in 0..senders {
                for (e, range) in r.expert_ranges_from(sender).into_iter().enumerate() {
                    prop_assert!(range.is_empty() || (ranges[e].start <= range.start && range.end <= ranges[e].end));
                    prop_assert!(sorted[range].iter().all(|x| *x == (e, sender)));
                }
            }
        }
    }
}
