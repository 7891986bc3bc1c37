//! Tests external checkpoints. Golden checkpoints are read bit for bit, small constructed
//! checkpoints test the rules of the readers, and errors name the damaged file.
use super::torch_values::{TestValue, encode_torch_file, make_dict};
use super::{format_error, format_problems, make_memory_dir, replace_dir};
use crate::catalog::{ExternalCheckpoint, F32ReadRequest, TensorSource, TrainingStatePart};
use crate::codec::{safetensors, zip};
use crate::error::{CkptError, Damage, DamageReason, MissingPart, Result, UnsupportedFeature};
use crate::gather::{GatherOptions, gather_weights};
use crate::hash::Hash;
use crate::open::{OpenedCheckpoint, open_checkpoint};
use crate::tensor::TensorRole;
use diagnostic::codes::checkpoint as codes;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const GOLDEN_CHECKPOINTS: [(&str, u8, u32); 6] = [
    ("z1_tied", 1, 1),
    ("z2_aligned", 2, 2),
    ("z2_frozen", 2, 2),
    ("z2_padded", 2, 4),
    ("z3_frozen", 3, 4),
    ("z3_buffers", 3, 2),
];

pub(super) fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Opens the external checkpoint at `path`. Panics if the checkpoint is a native one.
pub(super) fn open_external(path: &Path) -> Result<Box<ExternalCheckpoint>> {
    match open_checkpoint(path)? {
        OpenedCheckpoint::External(checkpoint) => Ok(checkpoint),
        OpenedCheckpoint::Native(_) => panic!("{} is native", path.display()),
    }
}

/// Tries to open the checkpoint at `path`, and returns the text of the error for a snapshot. Panics
/// if the checkpoint opens, or the checkpoint is not at fault for the error.
pub(super) fn expect_open_error(path: &Path) -> String {
    let e = open_external(path).expect_err("rejected");
    assert!(e.is_checkpoint_at_fault(), "{e}");
    format_error(&e, path)
}

/// Reads all elements of the tensor `name` with the role `role`. If `name` is an alias, reads the
/// stored weight to which it is tied.
pub(super) fn read_tensor(checkpoint: &ExternalCheckpoint, name: &str, role: TensorRole) -> Result<Vec<f32>> {
    let target = checkpoint.facts().state.ties.iter().find(|t| t.alias == name).map_or(name, |t| &t.target);
    let infos = checkpoint.tensors();
    let info = infos.iter().find(|t| t.name == target && t.role == role).expect("there");
    let mut out = vec![0f32; info.element_count() as usize];
    checkpoint.read_verified(&mut [F32ReadRequest {
        name: target,
        role,
        start_element: 0,
        out: &mut out,
    }])?;
    Ok(out)
}

/// Reads the expected BLAKE3 hashes of those tensors of the golden checkpoint `name` that have the
/// dtype F32. The keys have the form `role/name`.
pub(super) fn read_reference_hashes(name: &str) -> BTreeMap<String, String> {
    let text = fs::read(golden_path(name).join("reference.json")).expect("there");
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(&text).expect("JSON");
    let floats = tensors.into_iter().filter(|(_, v)| v["dtype"] == "F32");
    floats.map(|(k, v)| (k, v["blake3"].as_str().expect("a hash").to_owned())).collect()
}

fn parse_role(name: &str) -> TensorRole {
    TensorRole::ALL.into_iter().find(|r| r.name() == name).expect("a role")
}

pub(super) fn hash_values(values: &[f32]) -> String {
    Hash::digest(bytemuck::cast_slice(values)).to_hex()
}

/// Compares the F32 tensors of a checkpoint with the hashes that are recorded (`reference.json`)
/// for the golden checkpoint `name`. Returns `role/name` of each tensor that differs.
pub(super) fn find_differences(checkpoint: &ExternalCheckpoint, name: &str) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (key, expected) in read_reference_hashes(name) {
        let (role, tensor) = key.split_once('/').expect("role/name");
        if hash_values(&read_tensor(checkpoint, tensor, parse_role(role))?) != expected {
            wrong.push(key);
        }
    }
    Ok(wrong)
}

#[test]
fn golden_zero_checkpoints_are_read_bit_for_bit() {
    for (name, stage, world) in GOLDEN_CHECKPOINTS {
        let checkpoint = open_external(&golden_path(name)).expect("whole");
        let facts = checkpoint.facts();
        assert_eq!(
            (facts.state.step, facts.state.world, facts.state.stage),
            (Some(3), Some(world), Some(stage)),
            "{name}"
        );
        assert_eq!((facts.writer.as_str(), facts.kind), ("DeepSpeed 0.19.8", "DeepSpeed"));
        assert_eq!(find_differences(&checkpoint, name).expect("sound"), [""; 0], "{name}");
        // there is no tensor that the reference lacks
        let known = read_reference_hashes(name);
        let floats = checkpoint.tensors().into_iter().filter(|t| t.dtype != crate::Dtype::I64);
        let others: Vec<String> =
            floats.map(|t| format!("{}/{}", t.role, t.name)).filter(|k| !known.contains_key(k)).collect();
        assert_eq!(others, [""; 0], "{name}");
        assert_eq!(facts.notices, [""; 0], "{name}");
        assert!(
            facts.state.groups[0].hyper["lr"].is_f64() && facts.state.groups[0].hyper.get("params").is_none(),
            "{name}"
        );
    }
}

#[test]
fn golden_checkpoints_have_their_known_facts() {
    let tied = open_external(&golden_path("z1_tied")).expect("whole");
    assert_eq!(tied.facts().state.ties[0].alias, "lm_head.weight");
    let expected = [TrainingStatePart::RngStates, TrainingStatePart::Config, TrainingStatePart::Tokenizer];
    assert_eq!(tied.facts().missing, expected);
    assert_eq!(open_external(&golden_path("z2_frozen")).expect("whole").facts().state.frozen.len(), 10);
    assert_eq!(open_external(&golden_path("z3_frozen")).expect("whole").facts().state.frozen.len(), 7);
    let buffers = open_external(&golden_path("z3_buffers")).expect("whole");
    let count = |role| buffers.tensors().iter().filter(|t| t.role == role).count();
    assert_eq!((count(TensorRole::Buffer), count(TensorRole::Weight)), (2, 22));
    let error = read_tensor(&buffers, "tokens_seen", TensorRole::Buffer).expect_err("an integer");
    let CkptError::Unsupported { feature: UnsupportedFeature::Dtype { tensor, dtype }, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!((tensor.as_str(), *dtype), ("buffer/tokens_seen", crate::Dtype::I64));
    // the directory of the tag can also be opened
    let tag = open_external(&golden_path("z2_padded").join("global_step3")).expect("whole");
    assert_eq!(find_differences(&tag, "z2_padded").expect("sound"), [""; 0]);
}

#[test]
fn any_range_of_a_tensor_equals_that_part_of_the_whole() {
    for name in ["z2_padded", "z3_frozen"] {
        let checkpoint = open_external(&golden_path(name)).expect("whole");
        for info in checkpoint.tensors() {
            let whole = read_tensor(&checkpoint, &info.name, info.role).expect("sound");
            let n = whole.len();
            for (a, b) in [(0, n / 3), (n / 3, n / 2 + 1), (n - 1, n), (n, n)] {
                let mut out = vec![0f32; b - a];
                let (name, role, start_element) = (info.name.as_str(), info.role, a as u64);
                checkpoint
                    .read_verified(&mut [F32ReadRequest { name, role, start_element, out: &mut out }])
                    .expect("sound");
                assert_eq!(hash_values(&out), hash_values(&whole[a..b]), "{name} {a}..{b}");
            }
        }
    }
}

#[test]
fn gathered_weights_are_those_of_the_reference() {
    use std::os::unix::fs::FileExt;
    for (name, _, _) in GOLDEN_CHECKPOINTS {
        let dir = make_memory_dir();
        let out = dir.path().join("out");
        let checkpoint = open_external(&golden_path(name)).expect("whole");
        let report =
            gather_weights(&*checkpoint, &out, &GatherOptions::default(), |_, _| {}).expect("gathered");
        assert!(!report.config && !out.join("config.json").exists());
        assert_eq!(report.left_out.is_empty(), name != "z3_buffers");
        let file = fs::File::open(out.join("model.safetensors")).expect("there");
        let size = file.metadata().expect("a size").len();
        let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at)).expect("sound");
        let known = read_reference_hashes(name);
        for entry in &header.entries {
            let mut bytes = vec![0; (entry.bytes.end - entry.bytes.start) as usize];
            file.read_exact_at(&mut bytes, entry.bytes.start).expect("there");
            let reference = |role: &str| known.get(&format!("{role}/{}", entry.name));
            assert_eq!(
                Some(&Hash::digest(&bytes).to_hex()),
                reference("weight").or(reference("buffer")),
                "{name} {}",
                entry.name
            );
        }
        let expected = known.keys().filter(|k| k.starts_with("weight/") || k.starts_with("buffer/")).count();
        assert_eq!(header.entries.len() + checkpoint.facts().state.ties.len(), expected, "{name}");
    }
}

/// Copies a golden ZeRO checkpoint to a temporary directory, so that a test may damage the copy.
/// Returns the temporary directory, and the path of the tag in the copy.
pub(super) fn copy_golden_checkpoint(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = make_memory_dir();
    let tag = dir.path().join("global_step3");
    fs::create_dir(&tag).expect("made");
    fs::write(dir.path().join("latest"), "global_step3").expect("written");
    for entry in fs::read_dir(golden_path(name).join("global_step3")).expect("there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, tag.join(path.file_name().expect("a name"))).expect("copied");
    }
    (dir, tag)
}

fn find_optimizer_file(tag: &Path, rank: u32) -> PathBuf {
    let plain = tag.join(format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"));
    if plain.exists() {
        plain
    } else {
        tag.join(format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    }
}

/// Calls `change` with the name and the bytes of each member of a torch file, and rewrites the file
/// with the changed bytes and matching CRCs.
pub(super) fn rewrite_members(path: &Path, mut change: impl FnMut(&str, &mut Vec<u8>)) {
    let file = fs::read(path).expect("there");
    let members = zip::read_members(file.len() as u64, |at, out| {
        out.copy_from_slice(&file[at as usize..at as usize + out.len()]);
        Ok(())
    });
    let contents: Vec<(String, Vec<u8>)> = members
        .expect("sound")
        .into_iter()
        .map(|m| {
            let mut bytes = file[m.data.start as usize..m.data.end as usize].to_vec();
            change(&m.name, &mut bytes);
            (m.name, bytes)
        })
        .collect();
    let packed: Vec<(&str, &[u8])> = contents.iter().map(|(n, b)| (n.as_str(), b.as_slice())).collect();
    fs::write(path, crate::tests::pack_zip(&packed)).expect("written");
}

#[test]
fn missing_and_misplaced_rank_files_are_named() {
    let (dir, tag) = copy_golden_checkpoint("z2_padded");
    fs::remove_file(find_optimizer_file(&tag, 2)).expect("removed");
    insta::assert_snapshot!("external_optimizer_file_missing", expect_open_error(dir.path()));
    fs::copy(find_optimizer_file(&tag, 1), tag.join("zero_pp_rank_2_mp_rank_00_optim_states.pt"))
        .expect("copied");
    insta::assert_snapshot!("external_optimizer_file_of_another_rank", expect_open_error(dir.path()));

    let (dir, tag) = copy_golden_checkpoint("z3_frozen");
    fs::remove_file(tag.join("zero_pp_rank_3_mp_rank_00_model_states.pt")).expect("removed");
    insta::assert_snapshot!("external_model_file_missing", expect_open_error(dir.path()));
    fs::remove_file(tag.join("zero_pp_rank_0_mp_rank_00_model_states.pt")).expect("removed");
    insta::assert_snapshot!("external_model_file_of_rank_0_missing", expect_open_error(dir.path()));

    let (dir, tag) = copy_golden_checkpoint("z2_frozen");
    fs::write(tag.join("zero_pp_rank_0_mp_rank_01_optim_states.pt"), "").expect("written");
    insta::assert_snapshot!("external_model_parallel_file", expect_open_error(dir.path()));
    fs::remove_file(tag.join("zero_pp_rank_0_mp_rank_01_optim_states.pt")).expect("removed");
    let first = find_optimizer_file(&tag, 0);
    fs::rename(&first, dir.path().join("elsewhere")).expect("moved");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &first).expect("linked");
    insta::assert_snapshot!("external_optimizer_file_is_a_symlink", expect_open_error(dir.path()));
}

#[test]
fn a_wrong_latest_is_an_error_and_a_stale_one_a_warning() {
    let (dir, tag) = copy_golden_checkpoint("z1_tied");
    let latest = dir.path().join("latest");
    fs::write(&latest, "global_step9").expect("written");
    insta::assert_snapshot!("external_latest_dangling", expect_open_error(dir.path()));
    fs::write(&latest, "../global_step3").expect("written");
    insta::assert_snapshot!("external_latest_outside", expect_open_error(dir.path()));
    fs::remove_file(&latest).expect("removed");
    let found = open_external(dir.path()).expect("the newest");
    insta::assert_snapshot!("external_latest_missing_notices", found.facts().notices.join("\n"));
    fs::rename(&tag, dir.path().join("global_step2")).expect("renamed");
    fs::create_dir(&tag).expect("made");
    for entry in fs::read_dir(dir.path().join("global_step2")).expect("there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, tag.join(path.file_name().expect("a name"))).expect("copied");
    }
    fs::write(&latest, "global_step2\n").expect("written");
    let stale = open_external(dir.path()).expect("the tag in `latest`");
    assert_eq!(stale.facts().tag, "global_step2");
    let warnings = replace_dir(&stale.facts().warnings.join("\n"), dir.path());
    insta::assert_snapshot!("external_latest_stale_warnings", warnings);
}

#[test]
fn rank_files_of_two_steps_are_an_error() {
    let (dir, tag) = copy_golden_checkpoint("z2_frozen");
    let mut changed = 0;
    rewrite_members(&find_optimizer_file(&tag, 1), |_, bytes| {
        if *bytes == 3f32.to_le_bytes() {
            *bytes = 2f32.to_le_bytes().to_vec();
            changed += 1;
        }
    });
    assert!(changed > 0, "the file contains its step");
    insta::assert_snapshot!("external_rank_files_of_two_steps", expect_open_error(dir.path()));
}

#[test]
fn pickles_with_commands_are_rejected_and_not_executed() {
    let (dir, tag) = copy_golden_checkpoint("z2_frozen");
    let marker = dir.path().join("executed");
    let command = format!("touch {}", marker.display());
    rewrite_members(&tag.join("mp_rank_00_model_states.pt"), |name, bytes| {
        if name.ends_with("data.pkl") {
            let mut input = b"\x80\x02cposix\nsystem\nX".to_vec();
            input.extend((command.len() as u32).to_le_bytes());
            input.extend(command.as_bytes());
            input.extend(b"\x85R.");
            *bytes = input;
        }
    });
    insta::assert_snapshot!("external_pickle_with_a_command", expect_open_error(dir.path()));
    assert!(!marker.exists());
}

#[test]
fn a_flipped_bit_is_detected_or_harmless() {
    let (dir, tag) = copy_golden_checkpoint("z3_frozen");
    for path in [find_optimizer_file(&tag, 1), tag.join("zero_pp_rank_2_mp_rank_00_model_states.pt")] {
        let sound = fs::read(&path).expect("there");
        let (mut detected, mut harmless) = (0, 0);
        for i in 0..120 {
            let mut bytes = sound.clone();
            // half of the flips hit the zip directory at the end
            let at = if i % 2 == 0 { i * bytes.len() / 120 } else { bytes.len() - 1 - i * 20 };
            bytes[at] ^= 1 << (i % 8);
            fs::write(&path, bytes).expect("written");
            match open_external(dir.path()).and_then(|f| find_differences(&f, "z3_frozen")) {
                Err(CkptError::Damaged { .. } | CkptError::Missing { .. }) => detected += 1,
                Ok(wrong) => {
                    assert_eq!(wrong, [""; 0], "byte {at} of {}", path.display());
                    harmless += 1;
                }
                Err(e) => panic!("{e}"),
            }
        }
        assert!(detected > 50 && harmless > 0, "{detected} detected, {harmless} harmless");
        fs::write(&path, &sound).expect("written");
    }
}

#[test]
fn every_truncation_is_detected() {
    let (dir, tag) = copy_golden_checkpoint("z2_frozen");
    let path = find_optimizer_file(&tag, 1);
    let sound = fs::read(&path).expect("there");
    for len in (0..sound.len()).step_by(sound.len() / 40) {
        fs::write(&path, &sound[..len]).expect("written");
        let error = open_external(dir.path()).expect_err("truncated");
        let CkptError::Damaged { damage, .. } = &error else { panic!("{error:?}") };
        assert_eq!(Some(damage.file.as_str()), path.file_name().and_then(|n| n.to_str()));
        let truncated = [codes::CHECKPOINT_FILE_TRUNCATED, codes::ZIP_INVALID];
        assert!(truncated.contains(&error.code()), "{len}: {error}");
    }
    let mut zeroed = sound;
    let half = zeroed.len() / 2;
    zeroed[half..].fill(0);
    fs::write(&path, zeroed).expect("written");
    insta::assert_snapshot!("external_optimizer_file_half_zero", expect_open_error(dir.path()));
}

/// Makes a ZeRO-2 checkpoint of one rank with the trained weights `a` (2 elements) and `b` (1
/// element). `model` and `optimizer` are entries of the model file and the optimizer file.
fn make_stage2_checkpoint(
    model: Vec<(&str, TestValue)>,
    optimizer: Vec<(&str, TestValue)>,
) -> tempfile::TempDir {
    let dir = make_memory_dir();
    let tag = dir.path().join("global_step1");
    fs::create_dir(&tag).expect("made");
    fs::write(dir.path().join("latest"), "global_step1").expect("written");
    let shapes = make_dict(vec![("a", TestValue::Size(vec![2])), ("b", TestValue::Size(vec![1]))]);
    let mut entries = vec![
        ("param_shapes", TestValue::List(vec![shapes])),
        ("dp_world_size", TestValue::Int(1)),
        ("global_steps", TestValue::Int(1)),
    ];
    entries.extend(model);
    fs::write(tag.join("mp_rank_00_model_states.pt"), encode_torch_file(&make_dict(entries)))
        .expect("written");
    let inner = make_dict(optimizer);
    let file = encode_torch_file(&make_dict(vec![("optimizer_state_dict", inner)]));
    fs::write(tag.join("zero_pp_rank_0_mp_rank_00_optim_states.pt"), file).expect("written");
    dir
}

fn make_tensor_value(values: &[f32]) -> TestValue {
    TestValue::Tensor(vec![values.len() as u64], values.to_vec())
}

/// Makes optimizer entries for [`make_stage2_checkpoint`]: the FP32 weights 1, 2 and 3, and moments
/// with `extra` elements of padding.
fn make_adam_entries(extra: usize) -> Vec<(&'static str, TestValue)> {
    let moment = |x: f32| {
        let mut values = vec![x, x + 1.0, x + 2.0];
        values.extend(vec![0.0; extra]);
        make_tensor_value(&values)
    };
    let state = make_dict(vec![
        ("step", TestValue::Tensor(vec![], vec![1.0])),
        ("exp_avg", moment(10.0)),
        ("exp_avg_sq", moment(20.0)),
    ]);
    vec![
        ("zero_stage", TestValue::Int(2)),
        ("partition_count", TestValue::List(vec![TestValue::Int(1)])),
        ("group_paddings", TestValue::List(vec![TestValue::Int(extra as i64)])),
        ("single_partition_of_fp32_groups", TestValue::List(vec![make_tensor_value(&[1.0, 2.0, 3.0])])),
        (
            "base_optimizer_state",
            make_dict(vec![("state", TestValue::Dict(vec![(TestValue::Int(0), state)]))]),
        ),
    ]
}

#[test]
fn moments_may_have_padding_that_weights_lack() {
    let dir = make_stage2_checkpoint(vec![("module", make_dict(vec![]))], make_adam_entries(1));
    let checkpoint = open_external(dir.path()).expect("whole");
    assert_eq!(read_tensor(&checkpoint, "b", TensorRole::ExpAvg).expect("sound"), [12.0]);
    assert_eq!(read_tensor(&checkpoint, "a", TensorRole::ExpAvgSq).expect("sound"), [20.0, 21.0]);
    let mut wrong = make_adam_entries(1);
    wrong[2].1 = TestValue::List(vec![TestValue::Int(2)]);
    let dir = make_stage2_checkpoint(vec![("module", make_dict(vec![]))], wrong);
    insta::assert_snapshot!("external_wrong_padding", expect_open_error(dir.path()));
}

#[test]
fn an_elastic_checkpoint_has_a_list_of_states() {
    let mut elastic = make_adam_entries(0);
    let state = make_dict(vec![("exp_avg", make_tensor_value(&[7.0, 8.0, 9.0]))]);
    elastic[4].1 = TestValue::List(vec![state]);
    let dir = make_stage2_checkpoint(vec![("module", make_dict(vec![]))], elastic);
    let checkpoint = open_external(dir.path()).expect("whole");
    assert_eq!(read_tensor(&checkpoint, "b", TensorRole::ExpAvg).expect("sound"), [9.0]);
}

#[test]
fn partitions_may_be_padded_where_the_file_has_no_stage() {
    let mut padded = make_adam_entries(0);
    padded.remove(0);
    padded[2].1 = TestValue::List(vec![make_tensor_value(&[1.0, 2.0, 3.0, 0.0])]);
    padded.truncate(3);
    padded.push(("base_optimizer_state", make_dict(vec![("state", TestValue::Dict(vec![]))])));
    let dir = make_stage2_checkpoint(vec![("module", make_dict(vec![]))], padded);
    let checkpoint = open_external(dir.path()).expect("whole");
    assert_eq!(
        (checkpoint.facts().state.stage, read_tensor(&checkpoint, "b", TensorRole::Weight).expect("sound")),
        (Some(1), vec![3.0])
    );
    assert!(checkpoint.facts().missing.contains(&TrainingStatePart::OptimizerState));
    // in a file with a stage, padded partitions are a contradiction
    let mut lean = make_adam_entries(0);
    lean[3].1 = TestValue::List(vec![make_tensor_value(&[1.0, 2.0, 3.0, 0.0])]);
    let dir = make_stage2_checkpoint(vec![("module", make_dict(vec![]))], lean);
    insta::assert_snapshot!("external_padded_partition_with_stage", expect_open_error(dir.path()));
}

#[test]
fn contradicting_entries_follow_the_precedence_and_are_reported() {
    let shape = |n| TestValue::Size(vec![n]);
    let model = vec![
        // `a` is trained and frozen, `b` trained and tied, `f` frozen, `t` tied, `u` in no list
        (
            "module",
            make_dict(vec![
                ("a", make_tensor_value(&[0.0, 0.0])),
                ("b", make_tensor_value(&[0.0])),
                ("f", make_tensor_value(&[0.0])),
                ("t", make_tensor_value(&[0.0])),
                ("u", make_tensor_value(&[5.0])),
            ]),
        ),
        ("frozen_param_shapes", make_dict(vec![("a", shape(2)), ("f", shape(1))])),
        (
            "frozen_param_fragments",
            make_dict(vec![("a", make_tensor_value(&[8.0, 8.0])), ("f", make_tensor_value(&[4.0]))]),
        ),
        (
            "shared_params",
            make_dict(vec![("b", TestValue::Str("f".into())), ("t", TestValue::Str("f".into()))]),
        ),
    ];
    let dir = make_stage2_checkpoint(model, make_adam_entries(0));
    let checkpoint = open_external(dir.path()).expect("whole");
    let weight = |name| read_tensor(&checkpoint, name, TensorRole::Weight).expect("sound");
    assert_eq!((weight("a"), weight("b")), (vec![1.0, 2.0], vec![3.0]), "param_shapes takes precedence");
    assert_eq!((weight("f"), weight("t"), weight("u")), (vec![4.0], vec![4.0], vec![5.0]));
    let facts = checkpoint.facts();
    let names: Vec<String> =
        checkpoint.tensors().into_iter().filter(|t| t.role == TensorRole::Weight).map(|t| t.name).collect();
    assert_eq!(names, ["a", "b", "f", "u"], "the module's order without aliases");
    assert_eq!(
        (facts.state.ties.len(), facts.state.frozen.as_slice()),
        (1, &["f".to_owned(), "u".to_owned()][..])
    );
    insta::assert_snapshot!("external_contradicting_entries_notices", facts.notices.join("\n"));
}

#[test]
fn a_weight_that_no_file_stores_is_an_error_for_gather() {
    let dir = make_memory_dir();
    let tag = dir.path().join("global_step1");
    fs::create_dir(&tag).expect("made");
    let shapes = make_dict(vec![("a", TestValue::Size(vec![3]))]);
    let model = make_dict(vec![
        ("module", make_dict(vec![("a", make_tensor_value(&[])), ("gone", make_tensor_value(&[]))])),
        ("param_shapes", TestValue::List(vec![shapes])),
        ("dp_world_size", TestValue::Int(1)),
    ]);
    fs::write(tag.join("zero_pp_rank_0_mp_rank_00_model_states.pt"), encode_torch_file(&model))
        .expect("written");
    let inner = make_dict(vec![
        ("zero_stage", TestValue::Int(3)),
        ("partition_count", TestValue::Int(1)),
        ("fp32_flat_groups", TestValue::List(vec![make_tensor_value(&[1.0, 2.0, 3.0])])),
        ("optimizer_state_dict", make_dict(vec![("state", TestValue::Dict(vec![]))])),
    ]);
    let file = encode_torch_file(&make_dict(vec![("optimizer_state_dict", inner)]));
    fs::write(tag.join("zero_pp_rank_0_mp_rank_00_optim_states.pt"), file).expect("written");
    let checkpoint = open_external(dir.path()).expect("readable");
    assert_eq!(checkpoint.facts().lost, ["gone"]);
    let error = gather_weights(&*checkpoint, &dir.path().join("out"), &GatherOptions::default(), |_, _| {})
        .expect_err("rejected");
    let CkptError::Missing { part: MissingPart::Weights(names), .. } = &error else { panic!("{error:?}") };
    assert_eq!(names, &["gone"]);
}

#[test]
fn verify_reports_every_damaged_file_of_an_external_checkpoint() {
    let report = crate::verify_checkpoints(&golden_path("z3_frozen")).expect("a report");
    assert!(report.is_sound() && report.notes.is_empty(), "{report:?}");
    assert_eq!(report.checkpoints[0].step, Some(3));
    let (dir, tag) = copy_golden_checkpoint("z2_frozen");
    let rng_state = golden_path("hf_ddp/checkpoint-3/rng_state_0.pth");
    fs::copy(rng_state, dir.path().join("rng_state_0.pth")).expect("copied");
    let report = crate::verify_checkpoints(dir.path()).expect("a report");
    assert!(report.is_sound(), "{report:?}");
    insta::assert_snapshot!("external_rng_state_missing_warnings", report.warnings.join("\n"));
    for rank in [0, 1] {
        let mut bytes = fs::read(find_optimizer_file(&tag, rank)).expect("there");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(find_optimizer_file(&tag, rank), bytes).expect("written");
    }
    let report = crate::verify_checkpoints(dir.path()).expect("a report");
    let problems = &report.checkpoints[0].problems;
    assert_eq!(problems.len(), 2, "both at once: {problems:?}");
    let is_crc = |p: &Damage| matches!(p.reason, DamageReason::CrcMismatch { .. });
    assert!(problems.iter().all(|p| is_crc(p) && !p.tensors.is_empty()), "{problems:?}");
    fs::remove_file(find_optimizer_file(&tag, 1)).expect("removed");
    let report = crate::verify_checkpoints(dir.path()).expect("a report");
    insta::assert_snapshot!("external_verify_rank_missing", format_problems(&report, dir.path()));
}

#[test]
fn nan_and_infinite_values_are_warnings_and_gathered_unchanged() {
    let mut odd = make_adam_entries(0);
    odd[3].1 = TestValue::List(vec![make_tensor_value(&[f32::NAN, f32::INFINITY, 3.0])]);
    let dir = make_stage2_checkpoint(vec![("module", make_dict(vec![]))], odd);
    let options = crate::VerifyOptions { values: true };
    let report = crate::verify_checkpoints_with(dir.path(), options).expect("a report");
    assert!(report.is_sound(), "the files are intact");
    insta::assert_snapshot!("external_non_finite_warnings", report.warnings.join("\n"));
    let checkpoint = open_external(dir.path()).expect("whole");
    let out = make_memory_dir();
    let gathered =
        gather_weights(&*checkpoint, &out.path().join("out"), &GatherOptions::default(), |_, _| {});
    assert_eq!(gathered.expect("gathered").not_finite, ["a"]);
}

#[test]
fn directories_without_a_usable_checkpoint_are_diagnosed() {
    let cases: [&[&str]; 8] = [
        &["optimizer.bin", "random_states_0.pkl"],
        &["__0_0.distcp"],
        &["pytorch_model_fsdp_rank0.bin"],
        &["adapter_model.safetensors"],
        &["latest_universal"],
        &["consolidated.00.pth"],
        &[],
        &["notes.txt"],
    ];
    let mut lines = Vec::new();
    for files in cases {
        let dir = make_memory_dir();
        files.iter().for_each(|name| fs::write(dir.path().join(name), "").expect("written"));
        let error = open_checkpoint(dir.path()).expect_err("rejected");
        lines.push(format!("{files:?}: {}", format_error(&error, dir.path())));
    }
    insta::assert_snapshot!("external_diagnoses", lines.join("\n"));
}
