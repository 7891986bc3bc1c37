//! Tests checkpoints of runs without FP32 master weights: BF16 weights are stored, read, gathered
//! and converted.
use super::*;
use crate::catalog::F32ReadRequest;
use crate::codec::safetensors::read_header;
use crate::convert::{ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::gather::{GatherOptions, gather_weights};
use crate::hash::Hash;
use crate::layout::native::Checkpoint;
use crate::save::{PieceElements, commit_save};
use crate::tensor::Dtype;
use crate::verify_checkpoints;
use half::bf16;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[7, 5]), ("empty", &[0]), ("b", &[900_001])];

/// Computes `count` elements of the weight `name` as bits of BF16 numbers: the values of
/// [`compute_values`], rounded.
fn compute_bf16_values(name: &str, facts: &RunFacts, count: u64) -> Vec<u16> {
    compute_values(TensorRole::Weight, name, facts, count)
        .iter()
        .map(|v| bf16::from_f32(*v).to_bits())
        .collect()
}

fn widen_to_f32(halves: &[u16]) -> Vec<f32> {
    halves.iter().map(|h| bf16::from_bits(*h).to_f32()).collect()
}

/// Saves a checkpoint of `facts.world` ranks with BF16 weights and F32 moments of AdamW to the
/// checkpoint directory `root`, and opens the checkpoint.
fn save_bf16_checkpoint(root: &Path, facts: &RunFacts) -> Checkpoint {
    let staging = StagingDir::create(root, facts.step, 0).expect("begun");
    let mut reports = Vec::new();
    for rank in 0..facts.world as usize {
        let part = |len: usize| len * rank / facts.world as usize..len * (rank + 1) / facts.world as usize;
        let weights: Vec<(&str, Vec<u16>)> = facts
            .model
            .weights
            .iter()
            .map(|w| (w.name.as_str(), compute_bf16_values(&w.name, facts, count_elements(w))))
            .collect();
        let states: Vec<(TensorRole, &str, Vec<f32>)> = [TensorRole::ExpAvg, TensorRole::ExpAvgSq]
            .into_iter()
            .flat_map(|role| {
                facts.model.weights.iter().map(move |w| {
                    (role, w.name.as_str(), compute_values(role, &w.name, facts, count_elements(w)))
                })
            })
            .collect();
        let narrow = weights.iter().map(|(name, data)| {
            let r = part(data.len());
            let (start_element, data) = (r.start as u64, PieceElements::Bf16(&data[r]));
            TensorPiece { name, role: TensorRole::Weight, start_element, data }
        });
        let wide = states.iter().map(|(role, name, data)| {
            let r = part(data.len());
            TensorPiece { name, role: *role, start_element: r.start as u64, data: data[r].into() }
        });
        let pieces: Vec<TensorPiece<'_>> = narrow.chain(wide).collect();
        reports.push(write_shard(staging.path(), rank as u32, facts.world, &pieces).expect("written"));
    }
    Checkpoint::open(&commit_save(staging, facts.clone(), reports).expect("complete").path).expect("complete")
}

/// Asserts that the checkpoint contains exactly the tensors that [`save_bf16_checkpoint`] wrote for
/// `facts`.
fn assert_contains_bf16(checkpoint: &Checkpoint, facts: &RunFacts) {
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.element_count() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.element_count(), &mut out).expect("readable");
        let (dtype, want) = match t.role {
            TensorRole::Weight if t.element_count() > 0 => {
                (Dtype::BF16, widen_to_f32(&compute_bf16_values(&t.name, facts, t.element_count())))
            }
            role => (Dtype::F32, compute_values(role, &t.name, facts, t.element_count())),
        };
        assert!(t.dtype == dtype && out == want, "{}/{}", t.role, t.name);
    }
    assert_eq!(checkpoint.tensors().count(), 3 * facts.model.weights.len());
}

fn read_manifest_json(checkpoint: &Checkpoint) -> Value {
    serde_json::from_slice(&fs::read(checkpoint.path().join("manifest.json")).expect("read")).expect("JSON")
}

#[test]
fn bf16_weights_are_stored_in_bf16() {
    let dir = make_memory_dir();
    let facts = make_facts(4, 3, WEIGHTS);
    let checkpoint = save_bf16_checkpoint(dir.path(), &facts);
    assert_contains_bf16(&checkpoint, &facts);
    assert_eq!(
        read_manifest_json(&checkpoint)["version"],
        3,
        "older versions of the program reject the manifest"
    );
    let (count, bytes) = (900_036, checkpoint.total_shard_bytes());
    assert!((10 * count..10 * count + 4096).contains(&bytes), "2 + 4 + 4 bytes for each: {bytes}");
    assert!(verify_checkpoints(checkpoint.path()).expect("there").is_sound());
}

#[test]
fn weights_are_gathered_in_bf16_unless_another_dtype_is_requested() {
    let dir = make_memory_dir();
    let facts = make_facts(4, 2, WEIGHTS);
    let checkpoint = save_bf16_checkpoint(&dir.path().join("root"), &facts);
    for (requested, dtype) in [(None, Dtype::BF16), (Some(Dtype::F32), Dtype::F32)] {
        let out = dir.path().join(dtype.to_string());
        let options = GatherOptions { dtype: requested, ..GatherOptions::default() };
        assert_eq!(gather_weights(&checkpoint, &out, &options, |_, _| ()).expect("gathered").dtype, dtype);
        let file = fs::read(out.join("model.safetensors")).expect("read");
        let header = read_header(file.len() as u64, |at, to| {
            to.copy_from_slice(&file[at as usize..][..to.len()]);
            Ok(())
        });
        for e in header.expect("a header").entries {
            let w = facts.model.weights.iter().find(|w| w.name == e.name).expect("a weight");
            let want = compute_bf16_values(&w.name, &facts, count_elements(w));
            let want: Vec<u8> = match dtype {
                Dtype::BF16 => want.iter().flat_map(|h| h.to_le_bytes()).collect(),
                _ => widen_to_f32(&want).iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            let stored = &file[e.bytes.start as usize..e.bytes.end as usize];
            assert!(e.dtype == dtype && stored == want, "{} as {dtype}", e.name);
        }
        let config: Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).expect("read")).expect("JSON");
        assert_eq!(config["torch_dtype"], dtype.torch_name());
    }
}

#[test]
fn conversion_keeps_bf16_in_native_and_writes_fp32_masters_for_deepspeed() {
    let dir = make_memory_dir();
    let groups = json!([{"name": "decay", "lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.0, "params": ["a", "empty", "b"]}]);
    let facts = RunFacts { groups, ..make_facts(4, 3, WEIGHTS) };
    let source = save_bf16_checkpoint(&dir.path().join("root"), &facts);
    let to = |to, world| ConvertOptions { stage: Some(2), world: Some(world), ..ConvertOptions::new(to) };
    let at = |name: &str| dir.path().join(name);
    convert_checkpoint(&source, &at("native"), &to(ConvertTarget::Native, 2), |_, _| {}).expect("converted");
    let native = Checkpoint::open(&at("native/step-00000004")).expect("complete");
    assert_contains_bf16(&native, &RunFacts { world: 2, ..facts.clone() });
    assert!(
        native.total_shard_bytes() < source.total_shard_bytes() + 4096
            && verify_checkpoints(native.path()).expect("there").is_sound()
    );
    // DeepSpeed's fp32 master weights have equal values
    convert_checkpoint(&source, &at("zero"), &to(ConvertTarget::DeepSpeed, 2), |_, _| {}).expect("converted");
    let crate::OpenedCheckpoint::External(zero) = crate::open_checkpoint(&at("zero")).expect("a checkpoint")
    else {
        panic!("a native checkpoint")
    };
    let mut out = vec![0.0; 35];
    let request = F32ReadRequest { name: "a", role: TensorRole::Weight, start_element: 0, out: &mut out };
    crate::TensorSource::read_verified(&*zero, &mut [request]).expect("read");
    assert_eq!(out, widen_to_f32(&compute_bf16_values("a", &facts, 35)));
}

#[test]
fn only_weights_may_be_bf16_and_each_has_one_dtype() {
    let dir = make_memory_dir();
    let facts = make_facts(1, 1, &[("a", &[4])]);
    let commit_error = |weights: &[TensorPiece<'_>]| {
        let staging = StagingDir::create(dir.path(), 1, 0).expect("begun");
        let report = write_shard(staging.path(), 0, 1, weights).expect("written");
        format_error(&commit_save(staging, facts.clone(), vec![report]).expect_err("rejected"), dir.path())
    };
    let piece = |role, start_element, data| TensorPiece { name: "a", role, start_element, data };
    let (half, wide) = (PieceElements::Bf16(&[1, 2]), PieceElements::F32(&[1.0, 2.0]));
    let mixed = commit_error(&[piece(TensorRole::Weight, 0, half), piece(TensorRole::Weight, 2, wide)]);
    insta::assert_snapshot!("bf16_weight_of_two_dtypes", mixed);
    let four = PieceElements::Bf16(&[1, 2, 3, 4]);
    let moment = commit_error(&[piece(TensorRole::Weight, 0, four), piece(TensorRole::ExpAvg, 0, four)]);
    insta::assert_snapshot!("bf16_moment", moment);
}

/// Checks that a verification detects a forged checkpoint that matches every hash. The header of
/// the shard gives the dtype I16 where the manifest gives BF16, which has the same size.
#[test]
fn verify_detects_another_dtype_in_a_shard_header() {
    let dir = make_memory_dir();
    let checkpoint = save_bf16_checkpoint(dir.path(), &make_facts(1, 1, &[("a", &[4])]));
    let shard = checkpoint.path().join("shard-00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    let at = bytes.windows(6).position(|w| w == b"\"BF16\"").expect("there");
    bytes[at..at + 6].copy_from_slice(b"\"I16\" ");
    let before =
        read_manifest_json(&checkpoint)["files"][0]["blocks"][0].as_str().expect("a hash").to_owned();
    let text = fs::read_to_string(checkpoint.path().join("manifest.json")).expect("read");
    let mut text = text.replace(&before, &Hash::digest(&bytes).to_hex()).into_bytes();
    crate::codec::sealed_json::JsonSeal::COMPACT.seal(&mut text);
    fs::write(&shard, bytes).expect("written");
    fs::write(checkpoint.path().join("manifest.json"), text).expect("written");
    let report = verify_checkpoints(checkpoint.path()).expect("there");
    insta::assert_snapshot!("bf16_other_dtype_in_header", format_problems(&report, dir.path()));
}

proptest! {
    #[test]
    fn any_ranges_of_bf16_and_f32_tensors_are_read(reads in proptest::collection::vec((0usize..6, 0u64..36, 0u64..36), 1..9)) {
        let dir = make_memory_dir();
        let facts = make_facts(4, 3, &[("a", &[7, 5]), ("b", &[35])]);
        let checkpoint = save_bf16_checkpoint(dir.path(), &facts);
        let tensors: Vec<_> = checkpoint.tensors().collect();
        let mut ranges: Vec<(usize, u64, Vec<f32>)> = reads.iter()
            .map(|(t, a, b)| (*t, *a.min(b), vec![f32::NAN; a.abs_diff(*b) as usize])).collect();
        let mut requests: Vec<F32ReadRequest<'_>> = ranges.iter_mut().map(|(t, start, out)| F32ReadRequest {
            name: &tensors[*t].name, role: tensors[*t].role, start_element: *start, out,
        }).collect();
        checkpoint.read_verified(&mut requests).expect("read");
        for (t, start, out) in ranges {
            let (role, name) = (tensors[t].role, &tensors[t].name);
            let expected = match role {
                TensorRole::Weight => widen_to_f32(&compute_bf16_values(name, &facts, 35)),
                _ => compute_values(role, name, &facts, 35),
            };
            prop_assert_eq!(&out[..], &expected[start as usize..][..out.len()]);
        }
    }
}
