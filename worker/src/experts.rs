//! Which rank keeps which expert, and in which order rows travel to them. Pure.
//!
//! With `parallel: N` neighbouring ranks form groups of N; rank r is number `r % N` of its group. Each group has all experts
//! of a layer once, and the ranks with the same number in all groups share the experts that a placement puts there: among
//! them those are divided, gathered and reduced as other units are among all ranks.
use crate::{
    model::{Model, experts::Sparse},
    params::{Owners, Unit},
};
use contract::job::{ExpertPlacement, ExpertsSpec};
use std::{collections::BTreeMap, ops::Range};

/// Where the experts of every layer lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Ranks of a group.
    pub parallel: usize,
    /// Of each layer with experts: the experts of each rank of a group, in rising order.
    layers: BTreeMap<usize, Vec<Vec<usize>>>,
}

impl Placement {
    /// What the job asks for, or why it can't be had with this model on `world` ranks: the key and a message. `None`: the
    /// model has no experts.
    pub fn new(
        spec: &ExpertsSpec,
        model: &dyn Model,
        layers: usize,
        world: usize,
    ) -> Result<Option<Self>, (&'static str, String)> {
        const PARALLEL: &str = "train.experts.parallel";
        let Some(sparse) = model.sparse() else {
            let said = "the model has no experts: remove `train.experts`";
            return match *spec == ExpertsSpec::default() {
                true => Ok(None),
                false => Err(("train.experts", said.into())),
            };
        };
        let parallel = spec.parallel as usize;
        if !world.is_multiple_of(parallel) {
            let said = format!("{world} workers can't be divided into groups of {parallel}");
            return Err((PARALLEL, said));
        }
        let with_experts = (0..layers).filter(|&l| sparse.is_sparse(l));
        let placed: Result<_, _> = with_experts.map(|l| Ok((l, place(spec, sparse, l)?))).collect();
        if let ExpertPlacement::Layers(named) = &spec.placement
            && let Some(l) = named.keys().find(|l| **l as usize >= layers || !sparse.is_sparse(**l as usize))
        {
            return Err((PLACEMENT, format!("layer {l} has no experts")));
        }
        Ok(Some(Placement { parallel, layers: placed? }))
    }

    /// All experts on every rank. `None`: the model has none.
    pub fn anywhere(model: &dyn Model) -> Option<Self> {
        let sparse = model.sparse()?;
        let all = vec![(0..sparse.shape().experts).collect()];
        let with_experts = (0..model.units().len() - 2).filter(|&l| sparse.is_sparse(l));
        Some(Placement { parallel: 1, layers: with_experts.map(|l| (l, all.clone())).collect() })
    }

    /// The experts of `layer` that number `index` of each group has.
    pub fn of(&self, layer: usize, index: usize) -> &[usize] {
        self.layers.get(&layer).map_or(&[], |ranks| &ranks[index])
    }

    /// The experts of `layer` in the order in which their rows travel: rank by rank.
    pub fn order(&self, layer: usize) -> Vec<usize> {
        self.layers.get(&layer).map(|ranks| ranks.concat()).unwrap_or_default()
    }

    /// The ranks of the group that `rank` is in.
    pub fn group(&self, rank: usize) -> Range<usize> {
        let first = rank / self.parallel * self.parallel;
        first..first + self.parallel
    }
}

const PLACEMENT: &str = "train.experts.placement";

/// The experts of each rank of a group.
fn place(
    spec: &ExpertsSpec,
    sparse: &dyn Sparse,
    layer: usize,
) -> Result<Vec<Vec<usize>>, (&'static str, String)> {
    let (experts, parallel) = (sparse.shape().experts, spec.parallel as usize);
    let named = match &spec.placement {
        ExpertPlacement::Balanced => None,
        ExpertPlacement::Experts(ranks) => Some(ranks),
        ExpertPlacement::Layers(layers) => layers.get(&(layer as u32)),
    };
    let Some(named) = named else {
        if !experts.is_multiple_of(parallel) {
            let said = format!(
                "the {experts} experts of a layer can't be spread evenly over {parallel} ranks; \
                 change it, or say with `{PLACEMENT}` who gets which"
            );
            return Err(("train.experts.parallel", said));
        }
        let each = experts / parallel;
        return Ok((0..parallel).map(|r| (r * each..(r + 1) * each).collect()).collect());
    };
    let wrong = |what: String| Err((PLACEMENT, format!("layer {layer}: {what}")));
    if let Some(e) = named.keys().find(|e| **e as usize >= experts) {
        return wrong(format!("there is no expert {e}, only 0 to {}", experts - 1));
    }
    let mut ranks = vec![Vec::new(); parallel];
    for e in 0..experts {
        match named.get(&(e as u32)).map(|r| *r as usize) {
            None => return wrong(format!("expert {e} has no rank")),
            Some(r) if r >= parallel => return wrong(format!("expert {e} is on rank {r} of {parallel}")),
            Some(r) => ranks[r].push(e),
        }
    }
    Ok(ranks)
}

/// The model's units and, behind them, those of its experts: layer by layer, one for each rank of a group.
pub fn units(model: &dyn Model, placement: Option<&Placement>) -> Vec<Unit> {
    let mut units = model.units();
    let (Some(sparse), Some(p)) = (model.sparse(), placement) else { return units };
    let experts = sparse.shape().experts;
    for (&layer, ranks) in &p.layers {
        for (first, own) in ranks.iter().enumerate() {
            let params: Vec<_> = own.iter().flat_map(|&e| sparse.expert_params(layer, e)).collect();
            let each = params.len() / own.len().max(1);
            let place = |&e: &usize| (0..each).map(move |i| (layer * experts + e) * each + i);
            let name = match p.parallel {
                1 => format!("experts of layer {layer}"),
                _ => format!("experts of layer {layer} on rank {first}"),
            };
            let owners = Owners { first, stride: p.parallel };
            units.push(Unit::of_experts(name, params, owners, layer, own.iter().flat_map(place).collect()));
        }
    }
    units
}

/// How the rows of one micro-batch travel to the experts: expert by expert, each in the order of the tokens.
#[derive(Default)]
pub struct Sending {
    /// The token of each travelling row.
    pub tokens: Vec<u32>,
    /// Of each choice (token by token, best first): its travelling row.
    pub places: Vec<u32>,
    /// Rows of each expert, in the order of travel.
    pub counts: Vec<usize>,
}

impl Sending {
    /// Sorts the choices of `per_token` experts by each token; `order` is that in which experts follow one another.
    pub fn sort(&mut self, chosen: &[u32], per_token: usize, order: &[usize]) {
        let mut position = vec![0; order.len()];
        order.iter().enumerate().for_each(|(i, &e)| position[e] = i);
        self.counts.clear();
        self.counts.resize(order.len(), 0);
        chosen.iter().for_each(|&e| self.counts[position[e as usize]] += 1);
        let mut next = starts(&self.counts);
        self.tokens.resize(chosen.len(), 0);
        self.places.resize(chosen.len(), 0);
        for (choice, &e) in chosen.iter().enumerate() {
            let row = &mut next[position[e as usize]];
            self.tokens[*row] = (choice / per_token) as u32;
            self.places[choice] = *row as u32;
            *row += 1;
        }
    }

    /// Of each travelling row: its choice.
    pub fn choices(&self) -> Vec<u32> {
        let mut choices = vec![0; self.places.len()];
        (0..).zip(&self.places).for_each(|(choice, &row)| choices[row as usize] = choice);
        choices
    }

    /// Nothing travels.
    pub fn clear(&mut self, experts: usize) {
        self.tokens.clear();
        self.places.clear();
        self.counts.clear();
        self.counts.resize(experts, 0);
    }
}

/// What arrives at a rank: from each rank of its group, rows of each of its experts.
#[derive(Default)]
pub struct Receiving {
    experts: usize,
    /// Rows by sender, then expert.
    counts: Vec<usize>,
}

impl Receiving {
    /// `counts`: by sender, then expert.
    pub fn new(experts: usize, counts: Vec<usize>) -> Self {
        Receiving { experts, counts }
    }

    /// Rows in all.
    pub fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    fn senders(&self) -> usize {
        self.counts.len().checked_div(self.experts).unwrap_or(0)
    }

    /// Rows of one sender.
    pub fn from(&self, sender: usize) -> usize {
        let first = sender * self.experts;
        self.counts.get(first..first + self.experts).map_or(0, |c| c.iter().sum())
    }

    /// Rows by expert, then sender.
    fn by_expert(&self) -> Vec<usize> {
        let of = |e: usize| (0..self.senders()).map(move |s| self.counts[s * self.experts + e]);
        (0..self.experts).flat_map(of).collect()
    }

    /// Each expert's rows, when rows are sorted by expert, then sender.
    pub fn experts(&self) -> Vec<Range<usize>> {
        let counts = self.by_expert();
        let at = starts(&counts);
        let senders = self.senders();
        let range = |e: usize| {
            let (first, last) = (e * senders, (e + 1) * senders - 1);
            at[first]..at[last] + counts[last]
        };
        (0..self.experts).map(range).collect()
    }

    /// Each expert's rows that came from `sender`, in the same order.
    pub fn experts_from(&self, sender: usize) -> Vec<Range<usize>> {
        let counts = self.by_expert();
        let at = starts(&counts);
        let range = |e: usize| {
            let i = e * self.senders() + sender;
            at[i]..at[i] + counts[i]
        };
        (0..self.experts).map(range).collect()
    }

    /// Blocks of rows as they arrive (by sender, then expert) with where they lie sorted by expert, then sender.
    pub fn blocks(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (arrived, sorted) = (starts(&self.counts), starts(&self.by_expert()));
        let senders = self.senders();
        self.counts.iter().enumerate().map(move |(i, &n)| {
            let (sender, expert) = (i / self.experts, i % self.experts);
            (arrived[i]..arrived[i] + n, sorted[expert * senders + sender])
        })
    }
}

fn starts(counts: &[usize]) -> Vec<usize> {
    let next = |at: &mut usize, n: &usize| {
        let start = *at;
        *at += n;
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
        fn every_choice_travels_once_and_comes_back(
            choices in prop::collection::vec((0u32..6, 0u32..5), 0..60), turn in 0usize..6
        ) {
            // Two different experts for each token.
            let chosen: Vec<u32> = choices.iter().flat_map(|&(a, b)| [a, if b >= a { b + 1 } else { b }]).collect();
            let mut order: Vec<usize> = (0..6).collect();
            order.rotate_left(turn);
            let mut s = Sending::default();
            s.sort(&chosen, 2, &order);
            prop_assert_eq!(s.counts.iter().sum::<usize>(), chosen.len());
            let mut seen = vec![false; chosen.len()];
            let experts: Vec<usize> =
                order.iter().zip(&s.counts).flat_map(|(&e, &n)| std::iter::repeat_n(e, n)).collect();
            for (choice, &row) in s.places.iter().enumerate() {
                prop_assert!(!std::mem::replace(&mut seen[row as usize], true));
                prop_assert_eq!(s.tokens[row as usize] as usize, choice / 2);
                prop_assert_eq!(experts[row as usize], chosen[choice] as usize);
            }
            for row in 1..chosen.len() {
                prop_assert!(experts[row] != experts[row - 1] || s.tokens[row] > s.tokens[row - 1]);
            }
        }

        #[test]
        fn what_arrives_is_sorted_by_expert_then_sender(
            senders in 1usize..5, experts in 0usize..5, seed in prop::collection::vec(0usize..4, 25)
        ) {
            let r = Receiving::new(experts, seed[..senders * experts].to_vec());
            let mut sorted = vec![(9, 9); r.rows()];
            for (i, (arrived, to)) in r.blocks().enumerate() {
                sorted[to..to + arrived.len()].fill((i % experts, i / experts));
            }
            prop_assert!(sorted.is_sorted());
            let whole = r.experts();
            prop_assert_eq!((0..senders).map(|s| r.from(s)).sum::<usize>(), r.rows());
            for sender in 0..senders {
                for (e, range) in r.experts_from(sender).into_iter().enumerate() {
                    prop_assert!(range.is_empty() || (whole[e].start <= range.start && range.end <= whole[e].end));
                    prop_assert!(sorted[range].iter().all(|x| *x == (e, sender)));
                }
            }
        }
    }
}
