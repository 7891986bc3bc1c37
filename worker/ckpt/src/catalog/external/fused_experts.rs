//! [`FusedExperts`]: translates between two ways to store the experts of a mixture-of-experts
//! layer: one tensor for all experts (fused), and one tensor per expert.
//!
//! Recent versions of transformers train fused experts, while files of weights store each expert
//! separately. `experts.gate_up_proj` has the shape [experts, 2 × width, hidden], with the gate of
//! each expert before its up projection. `experts.down_proj` has the shape [experts, hidden,
//! width].
use crate::catalog::model::BorrowedWeightShape;
use crate::tensor::count_elements;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Names of an expert's three matrices (gate, up, down) in files of the supported model families.
const EXPERT_MATRIX_NAMES: [[&str; 3]; 2] = [["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]];
/// The text before `experts` in the name of a mixture-of-experts weight: first in Mixtral's files,
/// then in the model's own names.
const MOE_MODULE_NAMES: (&str, &str) = (".block_sparse_moe.", ".mlp.");

/// A weight tensor of a single expert in a checkpoint file, with its position in the model's tensor
/// of all experts of the layer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SeparateExpertTensor {
    /// Name under which files store this part of the fused tensor.
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    /// Range of the part's elements in the fused tensor.
    pub(crate) elements: Range<u64>,
}

/// The weights of a model, where a weight with all experts of a layer is mapped to the
/// single-expert tensors that checkpoint files store.
#[derive(Debug, Default)]
pub(crate) struct FusedExperts {
    /// Name and shape of each weight of the model.
    pub(crate) weights: Vec<(String, Vec<u64>)>,
    /// Maps the model's name of each fused weight to its parts, which files store under other
    /// names.
    members: HashMap<String, Vec<SeparateExpertTensor>>,
}

/// The weight matrices of all experts in one layer: a map from the expert's number and the matrix
/// to the tensor's name and shape. The key is the number of the expert and the index of the matrix
/// (0 for gate, 1 for up, 2 for down).
type ExpertMatricesOfLayer<'a> = BTreeMap<(u64, usize), BorrowedWeightShape<'a>>;

impl FusedExperts {
    /// Derives a model's weights, each of which combines all experts of a layer, from the tensors
    /// of single experts in checkpoint files. Returns `None` if they have no separate experts, or
    /// if experts are missing or differ in shape.
    pub(crate) fn from_separate_experts(weights: &[BorrowedWeightShape<'_>]) -> Option<FusedExperts> {
        let mut fused = FusedExperts::default();
        let mut layers: BTreeMap<String, ExpertMatricesOfLayer<'_>> = BTreeMap::new();
        for &(name, shape) in weights {
            match parse_expert_matrix_name(name) {
                Some((before, expert, matrix)) => {
                    let layer =
                        format!("{before}.experts").replacen(MOE_MODULE_NAMES.0, MOE_MODULE_NAMES.1, 1);
                    let twice = layers.entry(layer).or_default().insert((expert, matrix), (name, shape));
                    if twice.is_some() {
                        return None;
                    }
                }
                None => fused.add_weight(
                    name.replacen(MOE_MODULE_NAMES.0, MOE_MODULE_NAMES.1, 1),
                    shape.to_vec(),
                    vec![(name, shape)],
                )?,
            }
        }
        if layers.is_empty() {
            return None;
        }
        for (layer, matrices_of_layer) in &layers {
            let count = matrices_of_layer.len() as u64 / 3;
            let select = |matrices: &[usize]| -> Option<Vec<BorrowedWeightShape<'_>>> {
                let each = (0..count).flat_map(|e| matrices.iter().map(move |&m| (e, m)));
                each.map(|key| matrices_of_layer.get(&key).copied()).collect()
            };
            let (gates, downs) = (select(&[0, 1])?, select(&[2])?);
            let (&[width, hidden], down) = (gates.first()?.1, downs.first()?.1) else { return None };
            let have_shape =
                |list: &[BorrowedWeightShape<'_>], shape: &[u64]| list.iter().all(|(_, s)| *s == shape);
            let is_complete = matrices_of_layer.len() as u64 == 3 * count && down == [hidden, width];
            if !is_complete || !have_shape(&gates, &[width, hidden]) || !have_shape(&downs, down) {
                return None;
            }
            let shape = vec![count, width.checked_mul(2)?, hidden];
            fused.add_weight(format!("{layer}.gate_up_proj"), shape, gates)?;
            fused.add_weight(format!("{layer}.down_proj"), vec![count, hidden, width], downs)?;
        }
        Some(fused)
    }

    /// Adds a weight of the model with `parts`, the stored tensors of which the weight consists, in
    /// the order of the weight's elements. Returns `None` if the number of elements overflows.
    fn add_weight(
        &mut self,
        name: String,
        shape: Vec<u64>,
        parts: Vec<BorrowedWeightShape<'_>>,
    ) -> Option<()> {
        if parts.len() > 1 || parts.first().is_some_and(|(part, _)| *part != name) {
            let (mut members, mut at) = (Vec::with_capacity(parts.len()), 0u64);
            for (part, shape) in parts {
                let end = at.checked_add(count_elements(shape)?)?;
                members.push(SeparateExpertTensor {
                    name: part.to_owned(),
                    shape: shape.to_vec(),
                    elements: at..end,
                });
                at = end;
            }
            self.members.insert(name.clone(), members);
        }
        self.weights.push((name, shape));
        Some(())
    }

    /// Returns the single-expert tensors that checkpoint files store for the model's weight `name`,
    /// or `None` if one tensor of this name stores the weight.
    pub(crate) fn parts_of_weight(&self, name: &str) -> Option<&[SeparateExpertTensor]> {
        self.members.get(name).map(Vec::as_slice)
    }

    /// Iterates over the names of the tensors in which files store the model's weight `name`.
    pub(crate) fn stored_names<'a>(&'a self, name: &'a str) -> impl Iterator<Item = String> + 'a {
        let members = self.parts_of_weight(name);
        let unchanged = members.is_none().then(|| name.to_owned());
        members.into_iter().flatten().map(|m| m.name.clone()).chain(unchanged)
    }
}

/// Parses the name of an expert's matrix, such as `model.layers.0.mlp.experts.3.up_proj.weight`.
/// Returns the part of the name before `.experts.`, the number of the expert, and the index of the
/// matrix: 0 for gate, 1 for up, 2 for down. Returns `None` for other names.
pub(crate) fn parse_expert_matrix_name(name: &str) -> Option<(&str, u64, usize)> {
    let (before, rest) = name.split_once(".experts.")?;
    let [number, matrix, "weight"] = rest.split('.').collect::<Vec<_>>()[..] else { return None };
    let which = EXPERT_MATRIX_NAMES.iter().find_map(|names| names.iter().position(|n| *n == matrix))?;
    Some((before, number.parse().ok()?, which))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists the names and shapes of one layer's weights in files that store each expert
    /// separately.
    fn list_weights(matrices: [&str; 3], module: &str, experts: u64) -> Vec<(String, Vec<u64>)> {
        let mut weights = vec![
            (format!("model.layers.0.{module}.gate.weight"), vec![experts, 4]),
            ("model.norm.weight".into(), vec![4]),
        ];
        for e in 0..experts {
            for (m, shape) in matrices.iter().zip([[6, 4], [6, 4], [4, 6]]) {
                weights.push((format!("model.layers.0.{module}.experts.{e}.{m}.weight"), shape.to_vec()));
            }
        }
        weights
    }

    /// Calls [`FusedExperts::detect`] with `weights`, given as owned names and shapes.
    fn fuse_experts(weights: &[(String, Vec<u64>)]) -> Option<FusedExperts> {
        FusedExperts::from_separate_experts(
            &weights.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect::<Vec<_>>(),
        )
    }

    #[test]
    fn the_experts_of_a_layer_are_fused_into_two_tensors() {
        for (matrices, module) in EXPERT_MATRIX_NAMES.iter().zip(["mlp", "block_sparse_moe"]) {
            let mut listed_weights = list_weights(*matrices, module, 12);
            listed_weights.reverse();
            let found = fuse_experts(&listed_weights).expect("a mixture");
            let mut weights = found.weights.clone();
            weights.sort_unstable();
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
            let up = &found.parts_of_weight("model.layers.0.mlp.experts.gate_up_proj").expect("parts")[21];
            let name = format!("model.layers.0.{module}.experts.10.{}.weight", matrices[1]);
            assert_eq!(*up, SeparateExpertTensor { name, shape: vec![6, 4], elements: 21 * 24..22 * 24 });
            let gate = found.parts_of_weight("model.layers.0.mlp.gate.weight");
            assert_eq!(gate.is_some(), module == "block_sparse_moe");
            assert!(found.parts_of_weight("model.norm.weight").is_none());
        }
    }

    #[test]
    fn incomplete_or_unequal_experts_are_not_fused() {
        assert!(fuse_experts(&[("model.norm.weight".into(), vec![4])]).is_none());
        let complete = list_weights(EXPERT_MATRIX_NAMES[0], "mlp", 3);
        for gap in 2..complete.len() {
            let mut listed_weights = complete.clone();
            listed_weights.remove(gap);
            assert!(fuse_experts(&listed_weights).is_none(), "without {}", complete[gap].0);
            let mut listed_weights = complete.clone();
            listed_weights[gap].1[0] += 1;
            assert!(fuse_experts(&listed_weights).is_none(), "another shape of {}", complete[gap].0);
        }
        let mut both = list_weights(EXPERT_MATRIX_NAMES[1], "block_sparse_moe", 3);
        both.extend(list_weights(EXPERT_MATRIX_NAMES[0], "mlp", 3));
        assert!(fuse_experts(&both).is_none(), "two matrices for one position");
    }
}
