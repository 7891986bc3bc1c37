//! Mixtures of experts as HF Trainer saves them: `optimizer.pt` has the experts of a layer as one tensor, the weights are one by one.
use super::fast_dir;
use super::foreign::{open, read};
use crate::catalog::Role;
use crate::convert::{ConvertOptions, Target, convert};
use crate::external::draft::{Draft, GLOBALS};
use crate::external::{Entry, Foreign};
use crate::formats::optimizer::{Id, Optimizer};
use crate::root::find;
use crate::source::Source;
use std::path::{Path, PathBuf};

/// Folder; gate, up and down of an expert; where experts lie in a layer; layers, experts, width of one.
const MIXTURES: [(&str, [&str; 3], &str, [usize; 3]); 2] = [
    ("trainer_mixtral", ["w1", "w3", "w2"], "block_sparse_moe", [2, 3, 20]),
    ("trainer_qwen3_moe", ["gate_proj", "up_proj", "down_proj"], "mlp", [1, 4, 12]),
];
const HIDDEN: usize = 16;

fn saved(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/resume");
    golden.join(name).join("checkpoint-3")
}

/// The states of the file as they are: `N` is the parameter's number.
fn raw(path: &Path) -> (Foreign, Vec<(u64, Vec<u64>)>) {
    let mut draft = Draft::new(path).expect("a folder");
    let (file, torch) = draft.torch("optimizer.pt", GLOBALS).expect("a torch file");
    let optimizer = Optimizer::read(&torch, torch.value()).expect("an optimizer");
    let mut shapes = Vec::new();
    for (id, state) in &optimizer.states {
        let Id::Number(n) = id else { panic!("it has names") };
        for (role, view) in &state.tensors {
            draft.entries.push(Entry::whole(&n.to_string(), *role, file, view));
        }
        shapes.push((*n, state.tensors[0].1.shape.clone()));
    }
    shapes.sort();
    (draft.finish().expect("whole"), shapes)
}

/// Each expert's states are the parts of the fused ones that torch computes with: `linear(x, gate_up[e]).chunk(2)` gives gate and up.
#[test]
fn states_of_fused_experts_are_those_of_each_expert() {
    for (name, [gate, up, down], module, [layers, experts, width]) in MIXTURES {
        let found = open(&saved(name)).expect("whole");
        let (raw, shapes) = raw(&saved(name));
        let of_shape = |shape: [usize; 3]| {
            let is = |s: &[u64]| s.iter().map(|&n| n as usize).eq(shape);
            shapes.iter().filter(|(_, s)| is(s)).map(|(n, _)| n.to_string()).collect::<Vec<_>>()
        };
        let gate_ups = of_shape([experts, 2 * width, HIDDEN]);
        let downs = of_shape([experts, HIDDEN, width]);
        assert_eq!((gate_ups.len(), downs.len()), (layers, layers), "{name}");
        for role in [Role::ExpAvg, Role::ExpAvgSq] {
            for layer in 0..layers {
                let both = read(&raw, &gate_ups[layer], role).expect("sound");
                let last = read(&raw, &downs[layer], role).expect("sound");
                let own = |expert: usize, matrix: &str| {
                    let name = format!("model.layers.{layer}.{module}.experts.{expert}.{matrix}.weight");
                    read(&found, &name, role).expect("sound")
                };
                let size = width * HIDDEN;
                for e in 0..experts {
                    let (a, b) = (2 * e * size, (2 * e + 1) * size);
                    assert_eq!(own(e, gate), both[a..b], "{name} {role} {layer} {e}");
                    assert_eq!(own(e, up), both[b..b + size], "{name} {role} {layer} {e}");
                    assert_eq!(own(e, down), last[e * size..(e + 1) * size], "{name} {role} {layer} {e}");
                }
            }
        }
    }
}

#[test]
fn every_weight_has_its_states_steps_and_group() {
    for (name, [gate, ..], module, _) in MIXTURES {
        let found = open(&saved(name)).expect("whole");
        let facts = found.facts();
        assert_eq!(facts.unread(), None, "{name}");
        let of = |role: Role| found.tensors().iter().filter(|t| t.role == role).count();
        let all = of(Role::Weight);
        assert_eq!((of(Role::ExpAvg), of(Role::ExpAvgSq), facts.steps.len()), (all, all, all), "{name}");
        assert!(facts.steps.values().all(|&s| s == 3), "{name}: {:?}", facts.steps);
        let grouped: usize = facts.groups.iter().map(|g| g.names.len()).sum();
        assert_eq!((facts.groups.len(), grouped), (2, all), "{name}");
        for decayed in ["gate.weight".to_owned(), format!("experts.1.{gate}.weight")] {
            let weight = format!("model.layers.0.{module}.{decayed}");
            assert!(facts.groups[0].names.contains(&weight), "{name}: {weight}");
        }
        assert!(facts.groups[1].names.iter().all(|n| n.contains("norm")), "{name}");
        // and through a checkpoint of ours
        let dir = fast_dir();
        let out = dir.path().join("out");
        convert(&*found, &out, &ConvertOptions::to(Target::Native), |_, _| {}).expect("converted");
        let ours = find(&out).expect("whole");
        for t in found.tensors() {
            let values = |source: &dyn Source| {
                let mut out = vec![0f32; t.elements() as usize];
                let all = crate::Request { name: &t.name, role: t.role, start_element: 0, out: &mut out };
                source.read_many(&mut [all]).expect("sound");
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            assert_eq!(values(&*found), values(ours.source()), "{name}: {}/{}", t.role, t.name);
        }
    }
}
