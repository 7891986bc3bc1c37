//! Checkpoints of other programs: real ones bit for bit, made-up ones for the rules, damaged ones by name.
use super::fast_dir;
use crate::catalog::Role;
use crate::error::{CkptError, Result};
use crate::external::Foreign;
use crate::formats::{safetensors, zip};
use crate::gather::{GatherOptions, gather};
use crate::hash::Hash;
use crate::root::{Found, find};
use crate::source::{Request, Source};
use crate::tests::pickled::{P, dict, torch_file};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const GOLDEN: [(&str, u8, u32); 6] = [
    ("z1_tied", 1, 1),
    ("z2_aligned", 2, 2),
    ("z2_frozen", 2, 2),
    ("z2_padded", 2, 4),
    ("z3_frozen", 3, 4),
    ("z3_buffers", 3, 2),
];

pub(super) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub(super) fn open(path: &Path) -> Result<Box<Foreign>> {
    match find(path)? {
        Found::Foreign(foreign) => Ok(foreign),
        Found::Native(_) => panic!("{} is of DeepSpeed", path.display()),
    }
}

/// One line.
fn error(path: &Path) -> String {
    let e = open(path).expect_err("refused");
    assert!(e.is_checkpoint_at_fault(), "{e}");
    e.to_string()
}

pub(super) fn read(foreign: &Foreign, name: &str, role: Role) -> Result<Vec<f32>> {
    let target = foreign.facts().ties.iter().find(|t| t.alias == name).map_or(name, |t| &t.target);
    let infos = foreign.tensors();
    let info = infos.iter().find(|t| t.name == target && t.role == role).expect("there");
    let mut out = vec![0f32; info.elements() as usize];
    foreign.read_many(&mut [Request { name: target, role, start_element: 0, out: &mut out }])?;
    Ok(out)
}

/// `role/name` → BLAKE3 of the bytes, of all that is F32.
pub(super) fn references(name: &str) -> BTreeMap<String, String> {
    let text = fs::read(golden(name).join("reference.json")).expect("there");
    let all: BTreeMap<String, Value> = serde_json::from_slice(&text).expect("JSON");
    let floats = all.into_iter().filter(|(_, v)| v["dtype"] == "F32");
    floats.map(|(k, v)| (k, v["blake3"].as_str().expect("a hash").to_owned())).collect()
}

fn role_of(name: &str) -> Role {
    Role::ALL.into_iter().find(|r| r.name() == name).expect("a role")
}

pub(super) fn hash(values: &[f32]) -> String {
    Hash::of(bytemuck::cast_slice(values)).hex()
}

/// What differs from the reference.
pub(super) fn differences(foreign: &Foreign, name: &str) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (key, expected) in references(name) {
        let (role, tensor) = key.split_once('/').expect("role/name");
        if hash(&read(foreign, tensor, role_of(role))?) != expected {
            wrong.push(key);
        }
    }
    Ok(wrong)
}

#[test]
fn real_folders_are_read_bit_for_bit() {
    for (name, stage, world) in GOLDEN {
        let foreign = open(&golden(name)).expect("whole");
        let facts = foreign.facts();
        assert_eq!((facts.step, facts.world, facts.stage), (Some(3), Some(world), Some(stage)), "{name}");
        assert_eq!((facts.writer.as_str(), facts.kind), ("DeepSpeed 0.19.8", "DeepSpeed"));
        assert_eq!(differences(&foreign, name).expect("sound"), [""; 0], "{name}");
        // nothing is there that the reference hasn't
        let known = references(name);
        let floats = foreign.tensors().into_iter().filter(|t| t.dtype != crate::Dtype::I64);
        let others: Vec<String> =
            floats.map(|t| format!("{}/{}", t.role, t.name)).filter(|k| !known.contains_key(k)).collect();
        assert_eq!(others, [""; 0], "{name}");
        assert_eq!(facts.notices, [""; 0], "{name}");
        assert!(
            facts.groups[0].hyper["lr"].is_f64() && facts.groups[0].hyper.get("params").is_none(),
            "{name}"
        );
    }
}

#[test]
fn facts_of_real_folders() {
    let tied = open(&golden("z1_tied")).expect("whole");
    assert_eq!(tied.facts().ties[0].alias, "lm_head.weight");
    assert_eq!(tied.facts().missing, ["random states", "config.json", "tokenizer"]);
    assert_eq!(open(&golden("z2_frozen")).expect("whole").facts().frozen.len(), 10);
    assert_eq!(open(&golden("z3_frozen")).expect("whole").facts().frozen.len(), 7);
    let buffers = open(&golden("z3_buffers")).expect("whole");
    let count = |role| buffers.tensors().iter().filter(|t| t.role == role).count();
    assert_eq!((count(Role::Buffer), count(Role::Weight)), (2, 22));
    let why = read(&buffers, "tokens_seen", Role::Buffer).expect_err("an integer").to_string();
    assert!(why.contains("buffer/tokens_seen is I64"), "{why}");
    // a tag's own folder does as well
    let tag = open(&golden("z2_padded").join("global_step3")).expect("whole");
    assert_eq!(differences(&tag, "z2_padded").expect("sound"), [""; 0]);
}

#[test]
fn parts_of_tensors_are_the_same_as_the_whole() {
    for name in ["z2_padded", "z3_frozen"] {
        let foreign = open(&golden(name)).expect("whole");
        for info in foreign.tensors() {
            let whole = read(&foreign, &info.name, info.role).expect("sound");
            let n = whole.len();
            for (a, b) in [(0, n / 3), (n / 3, n / 2 + 1), (n - 1, n), (n, n)] {
                let mut out = vec![0f32; b - a];
                let (name, role, start_element) = (info.name.as_str(), info.role, a as u64);
                foreign
                    .read_many(&mut [Request { name, role, start_element, out: &mut out }])
                    .expect("sound");
                assert_eq!(hash(&out), hash(&whole[a..b]), "{name} {a}..{b}");
            }
        }
    }
}

#[test]
fn gathered_weights_are_those_of_the_reference() {
    use std::os::unix::fs::FileExt;
    for (name, _, _) in GOLDEN {
        let dir = fast_dir();
        let out = dir.path().join("out");
        let foreign = open(&golden(name)).expect("whole");
        let report = gather(&*foreign, &out, &GatherOptions::default(), |_, _| {}).expect("gathered");
        assert!(!report.config && !out.join("config.json").exists());
        assert_eq!(report.left_out.is_empty(), name != "z3_buffers");
        let file = fs::File::open(out.join("model.safetensors")).expect("there");
        let size = file.metadata().expect("a size").len();
        let header = safetensors::read_header(size, |at, out| file.read_exact_at(out, at)).expect("sound");
        let known = references(name);
        for entry in &header.entries {
            let mut bytes = vec![0; (entry.bytes.end - entry.bytes.start) as usize];
            file.read_exact_at(&mut bytes, entry.bytes.start).expect("there");
            let of = |role: &str| known.get(&format!("{role}/{}", entry.name));
            assert_eq!(Some(&Hash::of(&bytes).hex()), of("weight").or(of("buffer")), "{name} {}", entry.name);
        }
        let expected = known.keys().filter(|k| k.starts_with("weight/") || k.starts_with("buffer/")).count();
        assert_eq!(header.entries.len() + foreign.facts().ties.len(), expected, "{name}");
    }
}

/// A copy of a golden folder that may be spoilt, with the folder of its tag.
fn copy(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = fast_dir();
    let tag = dir.path().join("global_step3");
    fs::create_dir(&tag).expect("made");
    fs::write(dir.path().join("latest"), "global_step3").expect("written");
    for entry in fs::read_dir(golden(name).join("global_step3")).expect("there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, tag.join(path.file_name().expect("a name"))).expect("copied");
    }
    (dir, tag)
}

fn optimizer(tag: &Path, rank: u32) -> PathBuf {
    let plain = tag.join(format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"));
    if plain.exists() {
        plain
    } else {
        tag.join(format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    }
}

/// Contents of all members of a torch file, changed by `change`, packed again with right CRCs.
fn repack(path: &Path, mut change: impl FnMut(&str, &mut Vec<u8>)) {
    let file = fs::read(path).expect("there");
    let members = zip::members(file.len() as u64, |at, out| {
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
    fs::write(path, zip::pack(&packed)).expect("written");
}

#[test]
fn missing_and_foreign_files_are_named() {
    let (dir, tag) = copy("z2_padded");
    fs::remove_file(optimizer(&tag, 2)).expect("removed");
    assert!(
        error(dir.path()).contains("the optimizer file of rank 2 of 4 is missing"),
        "{}",
        error(dir.path())
    );
    fs::copy(optimizer(&tag, 1), tag.join("zero_pp_rank_2_mp_rank_00_optim_states.pt")).expect("copied");
    let why = error(dir.path());
    assert!(why.contains("zero_pp_rank_2") && why.contains("written by rank 1"), "{why}");

    let (dir, tag) = copy("z3_frozen");
    fs::remove_file(tag.join("zero_pp_rank_3_mp_rank_00_model_states.pt")).expect("removed");
    assert!(error(dir.path()).contains("the model file of rank 3 of 4 is missing"));
    fs::remove_file(tag.join("zero_pp_rank_0_mp_rank_00_model_states.pt")).expect("removed");
    assert!(error(dir.path()).contains("the model file (of rank 0) is missing"));

    let (dir, tag) = copy("z2_frozen");
    fs::write(tag.join("zero_pp_rank_0_mp_rank_01_optim_states.pt"), "").expect("written");
    assert!(error(dir.path()).contains("tensor, pipeline or expert"));
    fs::remove_file(tag.join("zero_pp_rank_0_mp_rank_01_optim_states.pt")).expect("removed");
    let first = optimizer(&tag, 0);
    fs::rename(&first, dir.path().join("elsewhere")).expect("moved");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &first).expect("linked");
    assert!(error(dir.path()).contains("symbolic link"), "{}", error(dir.path()));
}

#[test]
fn latest_is_checked() {
    let (dir, tag) = copy("z1_tied");
    let latest = dir.path().join("latest");
    fs::write(&latest, "global_step9").expect("written");
    let why = error(dir.path());
    assert!(why.contains("global_step9, which `latest` names (there are global_step3), is missing"), "{why}");
    fs::write(&latest, "../global_step3").expect("written");
    assert!(error(dir.path()).contains("names no folder in here"));
    fs::remove_file(&latest).expect("removed");
    let found = open(dir.path()).expect("the newest");
    assert!(found.facts().notices[0].contains("no `latest`: global_step3 is the newest"));
    fs::rename(&tag, dir.path().join("global_step2")).expect("renamed");
    fs::create_dir(&tag).expect("made");
    for entry in fs::read_dir(dir.path().join("global_step2")).expect("there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, tag.join(path.file_name().expect("a name"))).expect("copied");
    }
    fs::write(&latest, "global_step2\n").expect("written");
    let stale = open(dir.path()).expect("as it says");
    assert_eq!(stale.facts().tag, "global_step2");
    assert!(stale.facts().warnings[0].contains("a newer complete checkpoint is there: global_step3"));
}

#[test]
fn shards_of_two_steps_are_named() {
    let (dir, tag) = copy("z2_frozen");
    let mut changed = 0;
    repack(&optimizer(&tag, 1), |_, bytes| {
        if *bytes == 3f32.to_le_bytes() {
            *bytes = 2f32.to_le_bytes().to_vec();
            changed += 1;
        }
    });
    assert!(changed > 0, "the steps are found");
    let why = error(dir.path());
    assert!(why.contains("of step 2, that of rank 0 of step 3") && why.contains("zero_pp_rank_1"), "{why}");
}

#[test]
fn pickles_with_commands_are_refused_by_name() {
    let (dir, tag) = copy("z2_frozen");
    let marker = dir.path().join("executed");
    let command = format!("touch {}", marker.display());
    repack(&tag.join("mp_rank_00_model_states.pt"), |name, bytes| {
        if name.ends_with("data.pkl") {
            let mut input = b"\x80\x02cposix\nsystem\nX".to_vec();
            input.extend((command.len() as u32).to_le_bytes());
            input.extend(command.as_bytes());
            input.extend(b"\x85R.");
            *bytes = input;
        }
    });
    let why = error(dir.path());
    assert!(why.contains("names posix.system") && why.contains("mp_rank_00_model_states.pt"), "{why}");
    assert!(!marker.exists());
}

#[test]
fn a_flipped_bit_is_found_or_does_not_matter() {
    let (dir, tag) = copy("z3_frozen");
    for path in [optimizer(&tag, 1), tag.join("zero_pp_rank_2_mp_rank_00_model_states.pt")] {
        let sound = fs::read(&path).expect("there");
        let (mut found, mut harmless) = (0, 0);
        for i in 0..120 {
            let mut bytes = sound.clone();
            // the directory at the end more often than the data
            let at = if i % 2 == 0 { i * bytes.len() / 120 } else { bytes.len() - 1 - i * 20 };
            bytes[at] ^= 1 << (i % 8);
            fs::write(&path, bytes).expect("written");
            match open(dir.path()).and_then(|f| differences(&f, "z3_frozen")) {
                Err(CkptError::Damaged { .. } | CkptError::Missing { .. }) => found += 1,
                Ok(wrong) => {
                    assert_eq!(wrong, [""; 0], "byte {at} of {}", path.display());
                    harmless += 1;
                }
                Err(e) => panic!("{e}"),
            }
        }
        assert!(found > 50 && harmless > 0, "{found} found, {harmless} harmless");
        fs::write(&path, &sound).expect("written");
    }
}

#[test]
fn every_cut_is_named() {
    let (dir, tag) = copy("z2_frozen");
    let path = optimizer(&tag, 1);
    let sound = fs::read(&path).expect("there");
    for len in (0..sound.len()).step_by(sound.len() / 40) {
        fs::write(&path, &sound[..len]).expect("written");
        let why = error(dir.path());
        assert!(why.contains("zero_pp_rank_1") && why.contains("cut short"), "{why}");
    }
    let mut zeroed = sound;
    let half = zeroed.len() / 2;
    zeroed[half..].fill(0);
    fs::write(&path, zeroed).expect("written");
    assert!(error(dir.path()).contains("never written out"));
}

/// A folder of stage 2 on one rank: weights `a` (2 elements) and `b` (1) trained; `model` and `optimizer` are added.
fn made(model: Vec<(&str, P)>, optimizer: Vec<(&str, P)>) -> tempfile::TempDir {
    let dir = fast_dir();
    let tag = dir.path().join("global_step1");
    fs::create_dir(&tag).expect("made");
    fs::write(dir.path().join("latest"), "global_step1").expect("written");
    let shapes = dict(vec![("a", P::Size(vec![2])), ("b", P::Size(vec![1]))]);
    let mut said = vec![
        ("param_shapes", P::List(vec![shapes])),
        ("dp_world_size", P::Int(1)),
        ("global_steps", P::Int(1)),
    ];
    said.extend(model);
    fs::write(tag.join("mp_rank_00_model_states.pt"), torch_file(&dict(said))).expect("written");
    let inner = dict(optimizer);
    let file = torch_file(&dict(vec![("optimizer_state_dict", inner)]));
    fs::write(tag.join("zero_pp_rank_0_mp_rank_00_optim_states.pt"), file).expect("written");
    dir
}

fn tensor(values: &[f32]) -> P {
    P::Tensor(vec![values.len() as u64], values.to_vec())
}

/// Optimizer state of [`made`]: fp32 weights 1, 2, 3 and `extra` elements of padding in the moments.
fn adam(extra: usize) -> Vec<(&'static str, P)> {
    let moment = |x: f32| {
        let mut values = vec![x, x + 1.0, x + 2.0];
        values.extend(vec![0.0; extra]);
        tensor(&values)
    };
    let state = dict(vec![
        ("step", P::Tensor(vec![], vec![1.0])),
        ("exp_avg", moment(10.0)),
        ("exp_avg_sq", moment(20.0)),
    ]);
    vec![
        ("zero_stage", P::Int(2)),
        ("partition_count", P::List(vec![P::Int(1)])),
        ("group_paddings", P::List(vec![P::Int(extra as i64)])),
        ("single_partition_of_fp32_groups", P::List(vec![tensor(&[1.0, 2.0, 3.0])])),
        ("base_optimizer_state", dict(vec![("state", P::Dict(vec![(P::Int(0), state)]))])),
    ]
}

#[test]
fn padding_ends_before_the_moments_do() {
    let dir = made(vec![("module", dict(vec![]))], adam(1));
    let foreign = open(dir.path()).expect("whole");
    assert_eq!(read(&foreign, "b", Role::ExpAvg).expect("sound"), [12.0]);
    assert_eq!(read(&foreign, "a", Role::ExpAvgSq).expect("sound"), [20.0, 21.0]);
    let mut wrong = adam(1);
    wrong[2].1 = P::List(vec![P::Int(2)]);
    let dir = made(vec![("module", dict(vec![]))], wrong);
    assert!(
        error(dir.path()).contains("4 elements of exp_avg (F32) for 3 of weights"),
        "{}",
        error(dir.path())
    );
}

#[test]
fn an_elastic_checkpoint_has_a_list_of_states() {
    let mut elastic = adam(0);
    let state = dict(vec![("exp_avg", tensor(&[7.0, 8.0, 9.0]))]);
    elastic[4].1 = P::List(vec![state]);
    let dir = made(vec![("module", dict(vec![]))], elastic);
    let foreign = open(dir.path()).expect("whole");
    assert_eq!(read(&foreign, "b", Role::ExpAvg).expect("sound"), [9.0]);
}

#[test]
fn partitions_are_padded_where_no_stage_is_written() {
    let mut padded = adam(0);
    padded.remove(0);
    padded[2].1 = P::List(vec![tensor(&[1.0, 2.0, 3.0, 0.0])]);
    padded.truncate(3);
    padded.push(("base_optimizer_state", dict(vec![("state", P::Dict(vec![]))])));
    let dir = made(vec![("module", dict(vec![]))], padded);
    let foreign = open(dir.path()).expect("whole");
    assert_eq!(
        (foreign.facts().stage, read(&foreign, "b", Role::Weight).expect("sound")),
        (Some(1), vec![3.0])
    );
    assert!(foreign.facts().missing.contains(&"optimizer state".to_owned()));
    // with a stage the same is a contradiction
    let mut lean = adam(0);
    lean[3].1 = P::List(vec![tensor(&[1.0, 2.0, 3.0, 0.0])]);
    let dir = made(vec![("module", dict(vec![]))], lean);
    assert!(error(dir.path()).contains("have 3 elements, the ranks hold 4"), "{}", error(dir.path()));
}

#[test]
fn sources_that_contradict_follow_the_rule_and_are_named() {
    let shape = |n| P::Size(vec![n]);
    let model = vec![
        // `a` is also frozen, `b` also tied: both are trained; `f` is frozen; `t` is tied; `u` is in no list
        (
            "module",
            dict(vec![
                ("a", tensor(&[0.0, 0.0])),
                ("b", tensor(&[0.0])),
                ("f", tensor(&[0.0])),
                ("t", tensor(&[0.0])),
                ("u", tensor(&[5.0])),
            ]),
        ),
        ("frozen_param_shapes", dict(vec![("a", shape(2)), ("f", shape(1))])),
        ("frozen_param_fragments", dict(vec![("a", tensor(&[8.0, 8.0])), ("f", tensor(&[4.0]))])),
        ("shared_params", dict(vec![("b", P::Str("f".into())), ("t", P::Str("f".into()))])),
    ];
    let dir = made(model, adam(0));
    let foreign = open(dir.path()).expect("whole");
    let weight = |name| read(&foreign, name, Role::Weight).expect("sound");
    assert_eq!((weight("a"), weight("b")), (vec![1.0, 2.0], vec![3.0]), "param_shapes wins");
    assert_eq!((weight("f"), weight("t"), weight("u")), (vec![4.0], vec![4.0], vec![5.0]));
    let facts = foreign.facts();
    let names: Vec<String> =
        foreign.tensors().into_iter().filter(|t| t.role == Role::Weight).map(|t| t.name).collect();
    assert_eq!(names, ["a", "b", "f", "u"], "the module's order, aliases aside");
    assert_eq!((facts.ties.len(), facts.frozen.as_slice()), (1, &["f".to_owned(), "u".to_owned()][..]));
    for (notice, word) in facts.notices.iter().zip([
        "frozen after the optimizer was made (a)",
        "b was tied to f after",
        "(u): values of the 16-bit module",
    ]) {
        assert!(notice.contains(word), "{notice} lacks {word}");
    }
    assert_eq!(facts.notices.len(), 3, "{:?}", facts.notices);
}

#[test]
fn weights_that_are_nowhere_stop_a_gather() {
    let dir = fast_dir();
    let tag = dir.path().join("global_step1");
    fs::create_dir(&tag).expect("made");
    let shapes = dict(vec![("a", P::Size(vec![3]))]);
    let model = dict(vec![
        ("module", dict(vec![("a", tensor(&[])), ("gone", tensor(&[]))])),
        ("param_shapes", P::List(vec![shapes])),
        ("dp_world_size", P::Int(1)),
    ]);
    fs::write(tag.join("zero_pp_rank_0_mp_rank_00_model_states.pt"), torch_file(&model)).expect("written");
    let inner = dict(vec![
        ("zero_stage", P::Int(3)),
        ("partition_count", P::Int(1)),
        ("fp32_flat_groups", P::List(vec![tensor(&[1.0, 2.0, 3.0])])),
        ("optimizer_state_dict", dict(vec![("state", P::Dict(vec![]))])),
    ]);
    let file = torch_file(&dict(vec![("optimizer_state_dict", inner)]));
    fs::write(tag.join("zero_pp_rank_0_mp_rank_00_optim_states.pt"), file).expect("written");
    let foreign = open(dir.path()).expect("readable");
    assert_eq!(foreign.facts().lost, ["gone"]);
    let why = gather(&*foreign, &dir.path().join("out"), &GatherOptions::default(), |_, _| {});
    assert!(why.expect_err("refused").to_string().contains("the weight gone is missing"));
}

#[test]
fn verify_reads_every_byte_and_looks_at_the_values() {
    let report = crate::verify(&golden("z3_frozen")).expect("a report");
    assert!(report.is_sound() && report.notes.is_empty(), "{report:?}");
    assert_eq!(report.checkpoints[0].step, Some(3));
    let (dir, tag) = copy("z2_frozen");
    fs::write(dir.path().join("rng_state_0.pth"), zip::pack(&[("rng/version", b"3")])).expect("written");
    let report = crate::verify(dir.path()).expect("a report");
    assert_eq!(report.warnings, ["the random state of rank 1 is missing"]);
    for rank in [0, 1] {
        let mut bytes = fs::read(optimizer(&tag, rank)).expect("there");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(optimizer(&tag, rank), bytes).expect("written");
    }
    let report = crate::verify(dir.path()).expect("a report");
    let problems = &report.checkpoints[0].problems;
    assert_eq!(problems.len(), 2, "both at once: {problems:?}");
    assert!(problems.iter().all(|p| p.why.contains("CRC-32") && !p.tensors.is_empty()), "{problems:?}");
    fs::remove_file(optimizer(&tag, 1)).expect("removed");
    let report = crate::verify(dir.path()).expect("a report");
    assert!(report.checkpoints[0].problems[0].why.contains("rank 1 of 2"), "{report:?}");
}

#[test]
fn values_that_are_no_numbers_are_named() {
    let mut odd = adam(0);
    odd[3].1 = P::List(vec![tensor(&[f32::NAN, f32::INFINITY, 3.0])]);
    let dir = made(vec![("module", dict(vec![]))], odd);
    let options = crate::VerifyOptions { values: true };
    let report = crate::verify_with(dir.path(), options).expect("a report");
    assert!(report.is_sound(), "they are what was saved");
    assert!(
        report.warnings.contains(&"weight/a has 1 NaN and 1 infinite of 2 values".to_owned()),
        "{:?}",
        report.warnings
    );
    let foreign = open(dir.path()).expect("whole");
    let out = fast_dir();
    let gathered = gather(&*foreign, &out.path().join("out"), &GatherOptions::default(), |_, _| {});
    assert_eq!(gathered.expect("gathered").not_finite, ["a"]);
}

#[test]
fn folders_that_hold_nothing_usable_are_called_by_their_names() {
    for (files, reason) in [
        (&["optimizer.bin", "random_states_0.pkl"][..], "HF Trainer or Accelerate without weights"),
        (&["__0_0.distcp"], "without .metadata"),
        (&["pytorch_model_fsdp_rank0.bin"], "local shards"),
        (&["adapter_model.safetensors"], "adapter of PEFT"),
        (&["latest_universal"], "names no folder in here"),
        (&["consolidated.00.pth"], "Meta's own"),
        (&[], "it is empty"),
        (&["notes.txt"], "no DeepSpeed state"),
    ] {
        let dir = fast_dir();
        files.iter().for_each(|name| fs::write(dir.path().join(name), "").expect("written"));
        let why = find(dir.path()).expect_err("refused").to_string();
        assert!(why.contains(reason), "{why} lacks {reason}");
    }
}
