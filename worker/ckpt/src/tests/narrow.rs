//! Checkpoints of runs whose only weights are in bf16: kept so, and read, gathered and converted as what they are.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::commit::commit;
use crate::convert::{ConvertOptions, Target, convert};
use crate::dtype::Dtype;
use crate::formats::safetensors::read_header;
use crate::gather::{GatherOptions, gather};
use crate::hash::Hash;
use crate::manifest::Manifest;
use crate::save::Elements;
use crate::source::Request;
use crate::verify;
use half::bf16;
use proptest::prelude::*;
use serde_json::Value;
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[7, 5]), ("empty", &[0]), ("b", &[900_001])];

/// The elements of a weight, as bf16.
fn halves(name: &str, facts: &Facts, count: u64) -> Vec<u16> {
    values(Role::Weight, name, facts, count).iter().map(|v| bf16::from_f32(*v).to_bits()).collect()
}

fn widened(halves: &[u16]) -> Vec<f32> {
    halves.iter().map(|h| bf16::from_bits(*h).to_f32()).collect()
}

/// A save by `facts.world` ranks: weights in bf16, AdamW's moments in f32.
fn save_narrow(root: &Path, facts: &Facts) -> Checkpoint {
    let staging = Staging::begin(root, facts.step, 0).expect("begun");
    let mut reports = Vec::new();
    for rank in 0..facts.world as usize {
        let part = |len: usize| len * rank / facts.world as usize..len * (rank + 1) / facts.world as usize;
        let weights: Vec<(&str, Vec<u16>)> = facts
            .model
            .weights
            .iter()
            .map(|w| (w.name.as_str(), halves(&w.name, facts, elements(w))))
            .collect();
        let states: Vec<(Role, &str, Vec<f32>)> = [Role::ExpAvg, Role::ExpAvgSq]
            .into_iter()
            .flat_map(|role| {
                facts
                    .model
                    .weights
                    .iter()
                    .map(move |w| (role, w.name.as_str(), values(role, &w.name, facts, elements(w))))
            })
            .collect();
        let narrow = weights.iter().map(|(name, data)| {
            let r = part(data.len());
            let (start_element, data) = (r.start as u64, Elements::Bf16(&data[r]));
            Piece { name, role: Role::Weight, start_element, data }
        });
        let wide = states.iter().map(|(role, name, data)| {
            let r = part(data.len());
            Piece { name, role: *role, start_element: r.start as u64, data: data[r].into() }
        });
        let pieces: Vec<Piece<'_>> = narrow.chain(wide).collect();
        reports.push(write_shard(staging.path(), rank as u32, facts.world, &pieces).expect("written"));
    }
    Checkpoint::open(&commit(staging, facts.clone(), reports).expect("complete").path).expect("complete")
}

/// Holds what [`save_narrow`] wrote, of these types.
fn assert_narrow(checkpoint: &Checkpoint, facts: &Facts) {
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.elements() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.elements(), &mut out).expect("readable");
        let (dtype, want) = match t.role {
            Role::Weight if t.elements() > 0 => (Dtype::BF16, widened(&halves(&t.name, facts, t.elements()))),
            role => (Dtype::F32, values(role, &t.name, facts, t.elements())),
        };
        assert!(t.dtype == dtype && out == want, "{}/{}", t.role, t.name);
    }
    assert_eq!(checkpoint.tensors().count(), 3 * facts.model.weights.len());
}

fn manifest(checkpoint: &Checkpoint) -> Value {
    serde_json::from_slice(&fs::read(checkpoint.path().join("manifest.json")).expect("read")).expect("JSON")
}

#[test]
fn weights_in_bf16_are_kept_as_they_are() {
    let dir = fast_dir();
    let facts = facts(4, 3, WEIGHTS);
    let checkpoint = save_narrow(dir.path(), &facts);
    assert_narrow(&checkpoint, &facts);
    assert_eq!(
        manifest(&checkpoint)["version"],
        3,
        "older versions of the program say that they can't read it"
    );
    let (count, bytes) = (900_036, checkpoint.bytes());
    assert!((10 * count..10 * count + 4096).contains(&bytes), "2 + 4 + 4 bytes for each: {bytes}");
    assert!(verify(checkpoint.path()).expect("there").is_sound());
}

/// All weights in one file, in the type that they have and in f32; nothing is rounded on the way.
#[test]
fn gathered_weights_are_in_bf16_unless_another_type_is_asked_for() {
    let dir = fast_dir();
    let facts = facts(4, 2, WEIGHTS);
    let checkpoint = save_narrow(&dir.path().join("root"), &facts);
    for (asked, dtype) in [(None, Dtype::BF16), (Some(Dtype::F32), Dtype::F32)] {
        let out = dir.path().join(dtype.to_string());
        let options = GatherOptions { dtype: asked, ..GatherOptions::default() };
        assert_eq!(gather(&checkpoint, &out, &options, |_, _| ()).expect("gathered").dtype, dtype);
        let file = fs::read(out.join("model.safetensors")).expect("read");
        let header = read_header(file.len() as u64, |at, to| {
            to.copy_from_slice(&file[at as usize..][..to.len()]);
            Ok(())
        });
        for e in header.expect("a header").entries {
            let w = facts.model.weights.iter().find(|w| w.name == e.name).expect("a weight");
            let want = halves(&w.name, &facts, elements(w));
            let want: Vec<u8> = match dtype {
                Dtype::BF16 => want.iter().flat_map(|h| h.to_le_bytes()).collect(),
                _ => widened(&want).iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            let there = &file[e.bytes.start as usize..e.bytes.end as usize];
            assert!(e.dtype == dtype && there == want, "{} as {dtype}", e.name);
        }
        let config: Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).expect("read")).expect("JSON");
        assert_eq!(config["torch_dtype"], dtype.torch_name());
    }
}

#[test]
fn converted_to_another_world_they_stay_so_and_deepspeed_gets_masters() {
    let dir = fast_dir();
    let groups = json!([{"name": "decay", "lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.0, "params": ["a", "empty", "b"]}]);
    let facts = Facts { groups, ..facts(4, 3, WEIGHTS) };
    let source = save_narrow(&dir.path().join("root"), &facts);
    let to = |to, world| ConvertOptions { stage: Some(2), world: Some(world), ..ConvertOptions::to(to) };
    let at = |name: &str| dir.path().join(name);
    convert(&source, &at("native"), &to(Target::Native, 2), |_, _| {}).expect("converted");
    let native = Checkpoint::open(&at("native/step-00000004")).expect("complete");
    assert_narrow(&native, &Facts { world: 2, ..facts.clone() });
    assert!(native.bytes() < source.bytes() + 4096 && verify(native.path()).expect("there").is_sound());
    // what DeepSpeed trains in bf16 has masters in f32: the same numbers
    convert(&source, &at("zero"), &to(Target::DeepSpeed, 2), |_, _| {}).expect("converted");
    let crate::Found::Foreign(zero) = crate::find(&at("zero")).expect("a checkpoint") else {
        panic!("it is DeepSpeed's")
    };
    let mut out = vec![0.0; 35];
    let request = Request { name: "a", role: Role::Weight, start_element: 0, out: &mut out };
    crate::Source::read_many(&*zero, &mut [request]).expect("read");
    assert_eq!(out, widened(&halves("a", &facts, 35)));
}

#[test]
fn only_weights_may_be_in_bf16_and_each_in_one_type() {
    let dir = fast_dir();
    let facts = facts(1, 1, &[("a", &[4])]);
    let refused = |weights: &[Piece<'_>]| {
        let staging = Staging::begin(dir.path(), 1, 0).expect("begun");
        let report = write_shard(staging.path(), 0, 1, weights).expect("written");
        commit(staging, facts.clone(), vec![report]).expect_err("refused").to_string()
    };
    let piece = |role, start_element, data| Piece { name: "a", role, start_element, data };
    let (half, wide) = (Elements::Bf16(&[1, 2]), Elements::F32(&[1.0, 2.0]));
    let said = refused(&[piece(Role::Weight, 0, half), piece(Role::Weight, 2, wide)]);
    assert!(said.contains("pieces of one weight are BF16 and F32"), "{said}");
    let four = Elements::Bf16(&[1, 2, 3, 4]);
    let said = refused(&[piece(Role::Weight, 0, four), piece(Role::ExpAvg, 0, four)]);
    assert!(said.contains("exp_avg/a is BF16, but state is kept as F32, weights also as BF16"), "{said}");
}

/// A shard that says another type of as many bytes contradicts its manifest, though every hash fits.
#[test]
fn verify_sees_another_type_in_a_shard() {
    let dir = fast_dir();
    let checkpoint = save_narrow(dir.path(), &facts(1, 1, &[("a", &[4])]));
    let shard = checkpoint.path().join("shard-00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    let at = bytes.windows(6).position(|w| w == b"\"BF16\"").expect("there");
    bytes[at..at + 6].copy_from_slice(b"\"I16\" ");
    let before = manifest(&checkpoint)["files"][0]["blocks"][0].as_str().expect("a hash").to_owned();
    let text = fs::read_to_string(checkpoint.path().join("manifest.json")).expect("read");
    let mut text = text.replace(&before, &Hash::of(&bytes).hex()).into_bytes();
    Manifest::seal(&mut text);
    fs::write(&shard, bytes).expect("written");
    fs::write(checkpoint.path().join("manifest.json"), text).expect("written");
    let report = verify(checkpoint.path()).expect("there");
    let told: Vec<String> = report.problems().map(|(_, p)| p.to_string()).collect();
    assert!(told.iter().any(|p| p.contains("its header has weight/a@0")), "{told:?}");
}

proptest! {
    #[test]
    fn any_range_of_narrow_and_wide_tensors_at_once(reads in proptest::collection::vec((0usize..6, 0u64..36, 0u64..36), 1..9)) {
        let dir = fast_dir();
        let facts = facts(4, 3, &[("a", &[7, 5]), ("b", &[35])]);
        let checkpoint = save_narrow(dir.path(), &facts);
        let tensors: Vec<_> = checkpoint.tensors().collect();
        let mut wanted: Vec<(usize, u64, Vec<f32>)> = reads.iter()
            .map(|(t, a, b)| (*t, *a.min(b), vec![f32::NAN; a.abs_diff(*b) as usize])).collect();
        let mut requests: Vec<Request<'_>> = wanted.iter_mut().map(|(t, start, out)| Request {
            name: &tensors[*t].name, role: tensors[*t].role, start_element: *start, out,
        }).collect();
        checkpoint.read_many(&mut requests).expect("read");
        for (t, start, out) in wanted {
            let (role, name) = (tensors[t].role, &tensors[t].name);
            let all = match role {
                Role::Weight => widened(&halves(name, &facts, 35)),
                _ => values(role, name, &facts, 35),
            };
            prop_assert_eq!(&out[..], &all[start as usize..][..out.len()]);
        }
    }
}
