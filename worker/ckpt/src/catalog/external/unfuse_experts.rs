//! Splits each tensor of an external checkpoint that contains the weights of all experts of a layer
//! into one tensor per expert.
use super::checkpoint::ExternalCheckpoint;
use super::facts::ExternalFacts;
use super::fused_experts::{FusedExperts, SeparateExpertTensor};
use super::tensor_part::{ExternalTensor, TensorPart};
use crate::catalog::model::borrow_weight_shapes;
use crate::tensor::element_ranges;
use std::collections::HashMap;

impl ExternalCheckpoint {
    /// Splits each weight or optimizer state that contains all experts of a layer into one tensor
    /// per expert, if the model's list `weights` has separate experts. Renames other weights whose
    /// names differ between a model with fused experts and `weights`. A tensor that exists in both
    /// forms stays fused, so that readers of `weights` reject it as an unexpected tensor. Does
    /// nothing if `weights` lists no separate experts, or lists experts that cannot be fused.
    pub fn unfuse_experts(&mut self, weights: &[(String, Vec<u64>)]) {
        let Some(fused) = FusedExperts::from_separate_experts(&borrow_weight_shapes(weights)) else { return };
        let shapes: HashMap<&str, &[u64]> = borrow_weight_shapes(&fused.weights).into_iter().collect();
        let has = |e: &ExternalTensor| shapes.get(e.info.name.as_str()) == Some(&e.info.shape.as_slice());
        let twice = |e: &ExternalTensor, m: &SeparateExpertTensor| {
            self.index.contains_key(&(e.info.role, m.name.clone()))
        };
        let members = |e: &ExternalTensor| {
            let members = fused.parts_of_weight(&e.info.name).filter(|_| has(e))?;
            (!members.iter().any(|m| twice(e, m))).then_some(members)
        };
        let before = std::mem::take(&mut self.entries);
        for entry in before {
            match members(&entry) {
                Some(members) => {
                    self.entries.extend(members.iter().map(|m| extract_expert_tensor(&entry, m)))
                }
                None => self.entries.push(entry),
            }
        }
        let keys = self.entries.iter().map(|e| (e.info.role, e.info.name.clone()));
        self.index = keys.zip(0..).collect();
        self.facts.rename_fused_weights(&fused);
    }
}

/// Describes the tensor of one expert, `member`, as a range of elements of `entry`, the stored
/// tensor that contains all experts of the layer.
fn extract_expert_tensor(entry: &ExternalTensor, member: &SeparateExpertTensor) -> ExternalTensor {
    let mut info = entry.info.clone();
    (info.name, info.shape) = (member.name.clone(), member.shape.clone());
    let first = member.elements.start;
    let covered =
        element_ranges::intersect_ranges(&entry.parts, TensorPart::element_range, member.elements.clone());
    let parts = covered.map(|(i, range)| {
        let start = range.start - first;
        entry.parts[i].slice_for_tensor(range, start)
    });
    ExternalTensor { info, parts: parts.collect() }
}

impl ExternalFacts {
    /// Replaces the name of each weight with all experts of a layer by the names of the single
    /// experts' weights, in parameter groups, frozen weights and update counts.
    fn rename_fused_weights(&mut self, fused: &FusedExperts) {
        let stored_names = |name: &String| fused.stored_names(name).collect::<Vec<_>>();
        let each = |names: &mut Vec<String>| *names = names.iter().flat_map(stored_names).collect();
        self.state.groups.iter_mut().for_each(|g| each(&mut g.names));
        each(&mut self.state.frozen);
        let steps = std::mem::take(&mut self.state.steps);
        self.state.steps = steps
            .iter()
            .flat_map(|(name, n)| stored_names(name).into_iter().map(|name| (name, *n)))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use crate::open::open_external_checkpoint;
    use crate::{F32ReadRequest, TensorRole, TensorSource};
    use serde_json::{Map, json};

    /// Writes weights with the given names and shapes to `model.safetensors` in a new temporary
    /// directory. The elements of each tensor count up from 0.
    fn write_weights(tensors: &[(&str, &[u64])]) -> tempfile::TempDir {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, shape) in tensors {
            let begin = data.len();
            let count = shape.iter().product::<u64>();
            data.extend((0..count).flat_map(|i| (i as f32).to_le_bytes()));
            let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert((*name).into(), entry);
        }
        let header = serde_json::to_vec(&header).expect("JSON");
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("model.safetensors"), file).expect("written");
        dir
    }

    #[test]
    fn experts_are_split_unless_they_exist_in_both_forms() {
        let expert = |m: &str, shape: &[u64]| {
            (0..2).map(|e| (format!("l.mlp.experts.{e}.{m}.weight"), shape.to_vec())).collect::<Vec<_>>()
        };
        let matrices = [("gate_proj", [3, 2]), ("up_proj", [3, 2]), ("down_proj", [2, 3])];
        let expert_weights: Vec<_> = matrices.iter().flat_map(|(m, shape)| expert(m, shape)).collect();
        let fused: [(&str, &[u64]); 2] =
            [("l.mlp.experts.gate_up_proj", &[2, 6, 2]), ("l.mlp.experts.down_proj", &[2, 2, 3])];
        let both = [fused[0], fused[1], ("l.mlp.experts.1.up_proj.weight", &[3, 2])];
        for (tensors, replaced) in [(&fused[..], true), (&both[..], false)] {
            let dir = write_weights(tensors);
            let mut source = open_external_checkpoint(dir.path()).expect("sound").expect("weights");
            source.unfuse_experts(&expert_weights);
            let names: Vec<String> = source.tensors().into_iter().map(|t| t.name).collect();
            assert_eq!(names.contains(&fused[0].0.to_owned()), !replaced, "{names:?}");
            let (mut out, name) = ([0.0; 6], "l.mlp.experts.1.up_proj.weight");
            let request = F32ReadRequest { name, role: TensorRole::Weight, start_element: 0, out: &mut out };
            source.read_verified(&mut [request]).expect("read");
            let first = if replaced { 18.0 } else { 0.0 };
            assert_eq!(out, std::array::from_fn(|i| first + i as f32));
        }
    }
}
