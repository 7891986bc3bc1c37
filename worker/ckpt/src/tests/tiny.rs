//! Tests tiny golden checkpoints of a model with some 200 parameters. Each value is compared with
//! the value in the program that saved the checkpoint, after every operation.
use super::external::{golden_path, open_external, read_tensor};
use super::{copy_tree, make_memory_dir};
use crate::catalog::TensorSource;
use crate::convert::{ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::gather::{GatherOptions, gather_weights};
use crate::tensor::TensorRole;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// Directory and kind of each tiny golden checkpoint.
pub(super) const TINY_CHECKPOINTS: [(&str, &str); 13] = [
    ("z0_tied", "DeepSpeed"),
    ("z1", "DeepSpeed"),
    ("z2", "DeepSpeed"),
    ("z3", "DeepSpeed"),
    ("z2_old", "DeepSpeed"),
    ("z2_fp16_moe", "DeepSpeed"),
    ("z3_offload", "DeepSpeed"),
    ("z3_tiny_group", "DeepSpeed"),
    ("universal", "DeepSpeed universal"),
    ("accelerate_z2", "Accelerate with DeepSpeed"),
    ("fsdp_full", "Accelerate with FSDP, full"),
    ("dcp", "torch distributed checkpoint"),
    ("trainer", "HF Trainer"),
];

/// Copies a tiny checkpoint to a temporary directory, without its `reference.json`, which contains
/// the expected tensors. Returns the temporary directory, and the path of the copied checkpoint.
pub(super) fn copy_tiny_checkpoint(name: &str) -> (TempDir, PathBuf) {
    let dir = make_memory_dir();
    let root = dir.path().join(name);
    copy_tree(&golden_path("tiny").join(name), &root);
    fs::remove_file(root.join("reference.json")).expect("there");
    let inside = if name == "trainer" { root.join("checkpoint-3") } else { root };
    (dir, inside)
}

/// Reads `reference.json` of a tiny checkpoint: the tensors that the program that saved the
/// checkpoint exported. Returns shape and values of each tensor by `role/name`.
fn read_reference(name: &str) -> BTreeMap<String, (Vec<u64>, Vec<f32>)> {
    let text = fs::read(golden_path("tiny").join(name).join("reference.json")).expect("there");
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(&text).expect("JSON");
    let shape_and_values = |v: Value| {
        let shape = serde_json::from_value(v["shape"].clone()).expect("a shape");
        let values: Vec<f64> = serde_json::from_value(v["values"].clone()).expect("numbers");
        (shape, values.into_iter().map(|v| v as f32).collect())
    };
    tensors.into_iter().map(|(k, v)| (k, shape_and_values(v))).collect()
}

/// Asserts that the source and the reference of the tiny checkpoint `name` have equal tensors.
/// `what` describes the source in the message of a failure.
pub(super) fn assert_equals_reference(source: &dyn TensorSource, name: &str, what: &str) {
    let expected = read_reference(name);
    let mut count = 0;
    for t in source.tensors() {
        let mut out = vec![f32::NAN; t.element_count() as usize];
        let request = crate::F32ReadRequest { name: &t.name, role: t.role, start_element: 0, out: &mut out };
        source.read_verified(&mut [request]).expect("sound");
        let key = format!("{}/{}", t.role, t.name);
        let (shape, values) =
            expected.get(&key).unwrap_or_else(|| panic!("{name} {what}: {key} is not in the reference"));
        assert_eq!((&t.shape, &out), (shape, values), "{name} {what}: {key}");
        count += 1;
    }
    assert_eq!(count, expected.len(), "{name} {what}");
}

#[test]
fn every_value_is_that_of_the_program_that_wrote_it() {
    for (name, kind) in TINY_CHECKPOINTS {
        let (_dir, root) = copy_tiny_checkpoint(name);
        let found = open_external(&root).expect(name);
        let facts = found.facts();
        assert_eq!((facts.kind, facts.state.step, facts.state.world), (kind, Some(3), Some(2)), "{name}");
        assert_equals_reference(&*found, name, "original");
        let trained = found.tensors().iter().filter(|t| t.role == TensorRole::ExpAvg).count();
        let grouped: usize = facts.state.groups.iter().map(|g| g.names.len()).sum();
        let groups = if name == "z3_tiny_group" { 3 } else { 2 };
        assert_eq!(
            (facts.state.groups.len(), grouped, facts.state.steps.len()),
            (groups, trained, trained),
            "{name}"
        );
        assert!(facts.state.steps.values().all(|&s| s == 3), "{name}: {:?}", facts.state.steps);
        assert_eq!((facts.notices.len(), facts.warnings.len()), (0, 0), "{name}: {facts:?}");
        let report = crate::verify_checkpoints(&root).expect("a report");
        assert!(report.is_sound() && report.warnings.is_empty(), "{name}: {report:?}");
    }
}

/// Checks the special properties for which some golden checkpoints exist, such as an old DeepSpeed
/// version or a dynamic loss scale.
#[test]
fn tiny_checkpoints_have_their_special_properties() {
    let facts = |name: &str| {
        let (_dir, root) = copy_tiny_checkpoint(name);
        let found = open_external(&root).expect(name);
        (found.facts().clone(), found.read_passthrough().expect("known"), found.tensors())
    };
    assert_eq!(facts("z2_old").0.writer, "DeepSpeed 0.14.5");
    assert_eq!(facts("z2").0.writer, "DeepSpeed 0.19.8");
    let (moe, passthrough, tensors) = facts("z2_fp16_moe");
    let experts = tensors.iter().find(|t| t.name.ends_with("experts.gate_up_proj")).expect("fused");
    assert_eq!((&experts.shape[..], passthrough.precision), (&[3, 16, 8][..], Some(crate::Dtype::F16)));
    assert!(moe.state.loss_scaler["cur_scale"].is_number(), "{}", moe.state.loss_scaler);
    let tiny = facts("z3_tiny_group").0;
    assert_eq!(
        (tiny.state.groups[2].names.as_slice(), tiny.state.world),
        (&["temperature".to_owned()][..], Some(2))
    );
}

#[test]
fn every_tiny_checkpoint_is_gathered_and_converted_to_every_target() {
    for (name, _) in TINY_CHECKPOINTS {
        let (dir, root) = copy_tiny_checkpoint(name);
        let found = open_external(&root).expect(name);
        let out = |to: &str| dir.path().join(format!("to-{to}"));
        gather_weights(&*found, &out("gathered"), &GatherOptions::default(), |_, _| {}).expect(name);
        let gathered = open_external(&out("gathered")).expect("weights");
        for ((key, (_, values)), t) in
            read_reference(name).iter().filter(|(k, _)| k.starts_with("weight/")).zip(0..)
        {
            let weight =
                read_tensor(&gathered, key.trim_start_matches("weight/"), TensorRole::Weight).expect("sound");
            assert_eq!(&weight, values, "{name} {key} {t}");
        }
        for (to, stage, world) in [
            (ConvertTarget::Native, 2, 3),
            (ConvertTarget::Universal, 2, 1),
            (ConvertTarget::DeepSpeed, 1, 4),
            (ConvertTarget::DeepSpeed, 3, 3),
        ] {
            let what = format!("{to:?}-{stage}");
            let options =
                ConvertOptions { stage: Some(stage), world: Some(world), ..ConvertOptions::new(to) };
            convert_checkpoint(&*found, &out(&what), &options, |_, _| {})
                .unwrap_or_else(|e| panic!("{name} {what}: {e}"));
            let made = crate::open::open_checkpoint(&out(&what)).expect("whole");
            assert_equals_reference(made.tensor_source(), name, &what);
            assert!(crate::verify_checkpoints(&out(&what)).expect("a report").is_sound(), "{name} {what}");
        }
    }
}
