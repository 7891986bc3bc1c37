//! Experts that newer programs train as one tensor of a layer, where files of weights list them one by one.
//!
//! `experts.gate_up_proj` is [experts, 2 × width, hidden]: of each expert first the gate, then up; `experts.down_proj` is
//! [experts, hidden, width].
use super::numbered::Weight;
use crate::catalog::elements;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Names of an expert's matrices by family: gate, up, down.
const MATRICES: [[&str; 3]; 2] = [["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];
/// How a layer of experts was called in files, and is called in the model.
const MODULE: (&str, &str) = (".block_sparse_moe.", ".mlp.");

/// A part of a fused tensor that has a name of its own in files.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    /// Its elements in the fused tensor.
    pub(crate) elements: Range<u64>,
}

/// Weights as the model has them.
#[derive(Debug, Default)]
pub(crate) struct Fused {
    /// Names and shapes.
    pub(crate) weights: Vec<(String, Vec<u64>)>,
    /// What those that files call otherwise are made of, by the model's name.
    members: HashMap<String, Vec<Member>>,
}

/// The matrices of a layer's experts: (expert, which of [`MATRICES`]) → name and shape.
type Layer<'a> = BTreeMap<(u64, usize), Weight<'a>>;

impl Fused {
    /// The same weights with the experts of each layer as two tensors. `None`: none are listed one by one, or not all of
    /// them, or not all alike.
    pub(crate) fn of(weights: &[Weight<'_>]) -> Option<Fused> {
        let mut fused = Fused::default();
        let mut layers: BTreeMap<String, Layer<'_>> = BTreeMap::new();
        for &(name, shape) in weights {
            match of_expert(name) {
                Some((layer, expert, matrix)) => {
                    let twice = layers.entry(layer).or_default().insert((expert, matrix), (name, shape));
                    if twice.is_some() {
                        return None;
                    }
                }
                None => {
                    fused.add(name.replacen(MODULE.0, MODULE.1, 1), shape.to_vec(), vec![(name, shape)])?
                }
            }
        }
        if layers.is_empty() {
            return None;
        }
        for (layer, all) in &layers {
            let count = all.len() as u64 / 3;
            let of = |matrices: &[usize]| -> Option<Vec<Weight<'_>>> {
                let each = (0..count).flat_map(|e| matrices.iter().map(move |&m| (e, m)));
                each.map(|key| all.get(&key).copied()).collect()
            };
            let (gates, downs) = (of(&[0, 1])?, of(&[2])?);
            let (&[width, hidden], down) = (gates.first()?.1, downs.first()?.1) else { return None };
            let alike = |list: &[Weight<'_>], shape: &[u64]| list.iter().all(|(_, s)| *s == shape);
            let whole = all.len() as u64 == 3 * count && down == [hidden, width];
            if !whole || !alike(&gates, &[width, hidden]) || !alike(&downs, down) {
                return None;
            }
            let shape = vec![count, width.checked_mul(2)?, hidden];
            fused.add(format!("{layer}.gate_up_proj"), shape, gates)?;
            fused.add(format!("{layer}.down_proj"), vec![count, hidden, width], downs)?;
        }
        Some(fused)
    }

    /// `None` where there are more elements than can be.
    fn add(&mut self, name: String, shape: Vec<u64>, parts: Vec<Weight<'_>>) -> Option<()> {
        if parts.len() > 1 || parts.first().is_some_and(|(own, _)| *own != name) {
            let (mut members, mut at) = (Vec::with_capacity(parts.len()), 0u64);
            for (own, shape) in parts {
                let end = at.checked_add(elements(shape)?)?;
                members.push(Member { name: own.to_owned(), shape: shape.to_vec(), elements: at..end });
                at = end;
            }
            self.members.insert(name.clone(), members);
        }
        self.weights.push((name, shape));
        Some(())
    }

    /// What a tensor of the model is in files; `None`: the same.
    pub(crate) fn members(&self, name: &str) -> Option<&[Member]> {
        self.members.get(name).map(Vec::as_slice)
    }

    /// What files call a tensor of the model.
    pub(crate) fn own_names<'a>(&'a self, name: &'a str) -> impl Iterator<Item = String> + 'a {
        let members = self.members(name);
        let alone = members.is_none().then(|| name.to_owned());
        members.into_iter().flatten().map(|m| m.name.clone()).chain(alone)
    }
}

/// Of a matrix of an expert: its layer's experts as the model calls them, the expert's number, which matrix.
fn of_expert(name: &str) -> Option<(String, u64, usize)> {
    let (before, rest) = name.split_once(".experts.")?;
    let [number, matrix, "weight"] = rest.split('.').collect::<Vec<_>>()[..] else { return None };
    let which = MATRICES.iter().find_map(|names| names.iter().position(|n| *n == matrix))?;
    let layer = format!("{before}.experts").replacen(MODULE.0, MODULE.1, 1);
    Some((layer, number.parse().ok()?, which))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(matrices: [&str; 3], module: &str, experts: u64) -> Vec<(String, Vec<u64>)> {
        let mut all = vec![
            (format!("model.layers.0.{module}.gate.weight"), vec![experts, 4]),
            ("model.norm.weight".into(), vec![4]),
        ];
        for e in 0..experts {
            for (m, shape) in matrices.iter().zip([[6, 4], [6, 4], [4, 6]]) {
                all.push((format!("model.layers.0.{module}.experts.{e}.{m}.weight"), shape.to_vec()));
            }
        }
        all
    }

    fn fused(all: &[(String, Vec<u64>)]) -> Option<Fused> {
        Fused::of(&all.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect::<Vec<_>>())
    }

    #[test]
    fn a_layer_s_experts_are_two_tensors() {
        for (matrices, module) in MATRICES.iter().zip(["mlp", "block_sparse_moe"]) {
            let mut all = listed(*matrices, module, 12);
            all.reverse();
            let found = fused(&all).expect("a mixture");
            let mut weights = found.weights.clone();
            weights.sort();
            let shape = |name: &str, shape: &[u64]| (name.to_owned(), shape.to_vec());
            assert_eq!(
                weights,
                [
                    shape("model.layers.0.mlp.experts.down_proj", &[12, 4, 6]),
                    shape("model.layers.0.mlp.experts.gate_up_proj", &[12, 12, 4]),
                    shape("model.layers.0.mlp.gate.weight", &[12, 4]),
                    shape("model.norm.weight", &[4]),
                ]
            );
            let up = &found.members("model.layers.0.mlp.experts.gate_up_proj").expect("parts")[21];
            let name = format!("model.layers.0.{module}.experts.10.{}.weight", matrices[1]);
            assert_eq!(*up, Member { name, shape: vec![6, 4], elements: 21 * 24..22 * 24 });
            let gate = found.members("model.layers.0.mlp.gate.weight");
            assert_eq!(gate.is_some(), module == "block_sparse_moe");
            assert!(found.members("model.norm.weight").is_none());
        }
    }

    #[test]
    fn what_is_not_whole_or_not_alike_is_not_fused() {
        assert!(fused(&[("model.norm.weight".into(), vec![4])]).is_none());
        let whole = listed(MATRICES[0], "mlp", 3);
        for gap in 2..whole.len() {
            let mut all = whole.clone();
            all.remove(gap);
            assert!(fused(&all).is_none(), "without {}", whole[gap].0);
            let mut all = whole.clone();
            all[gap].1[0] += 1;
            assert!(fused(&all).is_none(), "another shape of {}", whole[gap].0);
        }
        let mut both = listed(MATRICES[1], "block_sparse_moe", 3);
        both.extend(listed(MATRICES[0], "mlp", 3));
        assert!(fused(&both).is_none(), "two matrices of one place");
    }
}
