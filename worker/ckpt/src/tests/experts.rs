//! HF Trainer's checkpoints of mixtures of experts: `optimizer.pt` stores the experts of a layer as
//! one fused tensor, the weights file stores each expert.
use super::external::{open, read};
use super::memory_dir;
use crate::catalog::TensorRole;
use crate::convert::{ConvertOptions, ConvertTarget, convert};
use crate::external::builder::{CheckpointBuilder, GLOBALS};
use crate::external::{ExternalCheckpoint, ExternalTensor};
use crate::formats::optimizer::{OptimizerStateDict, ParamId};
use crate::root::find;
use crate::source::TensorSource;
use std::path::{Path, PathBuf};

/// Golden directory; names of gate, up and down; the experts' module in a layer; layers, experts,
/// expert width.
const MIXTURES: [(&str, [&str; 3], &str, [usize; 3]); 2] = [
    ("trainer_mixtral", ["w1", "w3", "w2"], "block_sparse_moe", [2, 3, 20]),
    ("trainer_qwen3_moe", ["gate_proj", "up_proj", "down_proj"], "mlp", [1, 4, 12]),
];
const HIDDEN: usize = 16;

fn golden_checkpoint(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/resume");
    golden.join(name).join("checkpoint-3")
}

/// The states in the file with parameter numbers as names, and their shapes.
fn raw_states(path: &Path) -> (ExternalCheckpoint, Vec<(u64, Vec<u64>)>) {
    let mut builder = CheckpointBuilder::new(path).expect("a directory");
    let (file, torch) = builder.open_torch_file("optimizer.pt", GLOBALS).expect("a torch file");
    let optimizer = OptimizerStateDict::read(&torch, torch.value()).expect("an optimizer");
    let mut shapes = Vec::new();
    for (id, state) in &optimizer.states {
        let ParamId::Number(n) = id else { panic!("it has names") };
        for (role, view) in &state.tensors {
            builder.entries.push(ExternalTensor::whole(&n.to_string(), *role, file, view));
        }
        shapes.push((*n, state.tensors[0].1.shape.clone()));
    }
    shapes.sort();
    (builder.finish().expect("whole"), shapes)
}

/// In the fused tensor `gate_up`, the rows of gate precede those of up: transformers computes gate
/// and up as `linear(x, gate_up[e]).chunk(2)`.
#[test]
fn fused_optimizer_states_are_split_by_expert() {
    for (name, [gate, up, down], module, [layers, experts, width]) in MIXTURES {
        let found = open(&golden_checkpoint(name)).expect("whole");
        let (raw, shapes) = raw_states(&golden_checkpoint(name));
        let with_shape = |shape: [usize; 3]| {
            let is = |s: &[u64]| s.iter().map(|&n| n as usize).eq(shape);
            shapes.iter().filter(|(_, s)| is(s)).map(|(n, _)| n.to_string()).collect::<Vec<_>>()
        };
        let gate_ups = with_shape([experts, 2 * width, HIDDEN]);
        let downs = with_shape([experts, HIDDEN, width]);
        assert_eq!((gate_ups.len(), downs.len()), (layers, layers), "{name}");
        for role in [TensorRole::ExpAvg, TensorRole::ExpAvgSq] {
            for layer in 0..layers {
                let both = read(&raw, &gate_ups[layer], role).expect("sound");
                let last = read(&raw, &downs[layer], role).expect("sound");
                let state = |expert: usize, matrix: &str| {
                    let name = format!("model.layers.{layer}.{module}.experts.{expert}.{matrix}.weight");
                    read(&found, &name, role).expect("sound")
                };
                let size = width * HIDDEN;
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
        let found = open(&golden_checkpoint(name)).expect("whole");
        let facts = found.facts();
        assert_eq!(facts.ignored_optimizer_reason(), None, "{name}");
        let count = |role: TensorRole| found.tensors().iter().filter(|t| t.role == role).count();
        let weights = count(TensorRole::Weight);
        assert_eq!(
            (count(TensorRole::ExpAvg), count(TensorRole::ExpAvgSq), facts.steps.len()),
            (weights, weights, weights),
            "{name}"
        );
        assert!(facts.steps.values().all(|&s| s == 3), "{name}: {:?}", facts.steps);
        let grouped: usize = facts.groups.iter().map(|g| g.names.len()).sum();
        assert_eq!((facts.groups.len(), grouped), (2, weights), "{name}");
        for decayed in ["gate.weight".to_owned(), format!("experts.1.{gate}.weight")] {
            let weight = format!("model.layers.0.{module}.{decayed}");
            assert!(facts.groups[0].names.contains(&weight), "{name}: {weight}");
        }
        assert!(facts.groups[1].names.iter().all(|n| n.contains("norm")), "{name}");
        // a native checkpoint made from it has equal values
        let dir = memory_dir();
        let out = dir.path().join("out");
        convert(&*found, &out, &ConvertOptions::new(ConvertTarget::Native), |_, _| {}).expect("converted");
        let ours = find(&out).expect("whole");
        for t in found.tensors() {
            let values = |source: &dyn TensorSource| {
                let mut out = vec![0f32; t.elements() as usize];
                let request =
                    crate::ReadRequest { name: &t.name, role: t.role, start_element: 0, out: &mut out };
                source.read_many(&mut [request]).expect("sound");
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(values(&*found), values(ours.source()), "{name}: {}/{}", t.role, t.name);
        }
    }
}
