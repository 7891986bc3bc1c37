//! Tests HF Trainer's checkpoints of mixtures of experts. Their `optimizer.pt` stores the experts
//! of a layer as one fused tensor, while the weights file stores each expert.
use super::external::{open_external, read_tensor};
use super::make_memory_dir;
use crate::catalog::{
    ALLOWED_GLOBALS, ExternalCheckpoint, ExternalCheckpointBuilder, ExternalTensor, TensorSource,
};
use crate::convert::{ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::layout::hf::optimizer_state::{OptimizerStateDict, ParamId};
use crate::open::open_checkpoint;
use crate::tensor::TensorRole;
use std::path::{Path, PathBuf};

/// The golden checkpoints of mixtures of experts. The fields are the directory, the names of the
/// matrices gate, up and down, and the module with the experts of a layer. The last field has the
/// numbers of layers, experts, and rows of gate.
const MIXTURES: [(&str, [&str; 3], &str, [usize; 3]); 2] = [
    ("trainer_mixtral", ["w1", "w3", "w2"], "block_sparse_moe", [2, 3, 20]),
    ("trainer_qwen3_moe", ["gate_proj", "up_proj", "down_proj"], "mlp", [1, 4, 12]),
];
const HIDDEN_SIZE: usize = 16;

fn golden_checkpoint_path(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/resume");
    golden.join(name).join("checkpoint-3")
}

/// Reads `optimizer.pt` without assigning the optimizer states to weights. Returns a source whose
/// tensor names are the numbers of the parameters, and the shape of each parameter by its number.
fn read_raw_states(path: &Path) -> (ExternalCheckpoint, Vec<(u64, Vec<u64>)>) {
    let mut builder = ExternalCheckpointBuilder::new(path).expect("a directory");
    let (file, torch) = builder.add_torch_file("optimizer.pt", ALLOWED_GLOBALS).expect("a torch file");
    let optimizer = OptimizerStateDict::read(&torch, torch.value()).expect("an optimizer");
    let mut shapes = Vec::new();
    for (id, state) in &optimizer.states {
        let ParamId::Number(n) = id else { panic!("it has names") };
        for (role, view) in &state.tensors {
            builder.entries.push(ExternalTensor::from_whole_view(&n.to_string(), *role, file, view));
        }
        shapes.push((*n, state.tensors[0].1.shape.clone()));
    }
    shapes.sort();
    (builder.finish().expect("whole"), shapes)
}

/// Checks that the optimizer states of each expert are the right slices of the fused states of all
/// experts. In the fused tensor `gate_up`, the rows of gate precede the rows of up, since
/// transformers computes both as `linear(x, gate_up[e]).chunk(2)`.
#[test]
fn fused_optimizer_states_are_split_by_expert() {
    for (name, [gate, up, down], module, [layers, experts, width]) in MIXTURES {
        let found = open_external(&golden_checkpoint_path(name)).expect("whole");
        let (raw, shapes) = read_raw_states(&golden_checkpoint_path(name));
        let with_shape = |shape: [usize; 3]| {
            let is = |s: &[u64]| s.iter().map(|&n| n as usize).eq(shape);
            shapes.iter().filter(|(_, s)| is(s)).map(|(n, _)| n.to_string()).collect::<Vec<_>>()
        };
        let gate_ups = with_shape([experts, 2 * width, HIDDEN_SIZE]);
        let downs = with_shape([experts, HIDDEN_SIZE, width]);
        assert_eq!((gate_ups.len(), downs.len()), (layers, layers), "{name}");
        for role in [TensorRole::ExpAvg, TensorRole::ExpAvgSq] {
            for layer in 0..layers {
                let both = read_tensor(&raw, &gate_ups[layer], role).expect("sound");
                let last = read_tensor(&raw, &downs[layer], role).expect("sound");
                let state = |expert: usize, matrix: &str| {
                    let name = format!("model.layers.{layer}.{module}.experts.{expert}.{matrix}.weight");
                    read_tensor(&found, &name, role).expect("sound")
                };
                let size = width * HIDDEN_SIZE;
                for e in 0..experts {
                    let (a, b) = (2 * e * size, (2 * e + 1) * size);
                    assert_eq!(state(e, gate), both[a..b], "{name} {role} {layer} {e}");
                    assert_eq!(state(e, up), both[b..b + size], "{name} {role} {layer} {e}");
                    assert_eq!(state(e, down), last[e * size..(e + 1) * size], "{name} {role} {layer} {e}");
                }
            }
        }
    }
}

#[test]
fn every_expert_weight_has_states_steps_and_a_group() {
    for (name, [gate, ..], module, _) in MIXTURES {
        let found = open_external(&golden_checkpoint_path(name)).expect("whole");
        let facts = found.facts();
        assert_eq!(facts.ignored_optimizer_reason(), None, "{name}");
        let count = |role: TensorRole| found.tensors().iter().filter(|t| t.role == role).count();
        let weights = count(TensorRole::Weight);
        assert_eq!(
            (count(TensorRole::ExpAvg), count(TensorRole::ExpAvgSq), facts.state.steps.len()),
            (weights, weights, weights),
            "{name}"
        );
        assert!(facts.state.steps.values().all(|&s| s == 3), "{name}: {:?}", facts.state.steps);
        let grouped: usize = facts.state.groups.iter().map(|g| g.names.len()).sum();
        assert_eq!((facts.state.groups.len(), grouped), (2, weights), "{name}");
        for decayed in ["gate.weight".to_owned(), format!("experts.1.{gate}.weight")] {
            let weight = format!("model.layers.0.{module}.{decayed}");
            assert!(facts.state.groups[0].names.contains(&weight), "{name}: {weight}");
        }
        assert!(facts.state.groups[1].names.iter().all(|n| n.contains("norm")), "{name}");
        // a native checkpoint that is converted from this one has equal values
        let dir = make_memory_dir();
        let out = dir.path().join("out");
        convert_checkpoint(&*found, &out, &ConvertOptions::new(ConvertTarget::Native), |_, _| {})
            .expect("converted");
        let ours = open_checkpoint(&out).expect("whole");
        for t in found.tensors() {
            let values = |source: &dyn TensorSource| {
                let mut out = vec![0f32; t.element_count() as usize];
                let request =
                    crate::F32ReadRequest { name: &t.name, role: t.role, start_element: 0, out: &mut out };
                source.read_verified(&mut [request]).expect("sound");
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(values(&*found), values(ours.tensor_source()), "{name}: {}/{}", t.role, t.name);
        }
    }
}
