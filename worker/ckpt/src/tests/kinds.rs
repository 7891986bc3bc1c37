//! Every kind of checkpoint of the outside world: real ones bit for bit, and byte by byte when damaged.
use super::foreign::{differences, golden, open, references};
use super::{copy_tree, fast_dir};
use crate::catalog::Role;
use crate::convert::{ConvertOptions, Target, convert};
use crate::source::Source;
use std::fs;
use std::path::{Path, PathBuf};

/// Folder, kind, ranks, updates of the optimizer.
const KINDS: [(&str, &str, &str, u32, u64); 6] = [
    ("hf_ddp", "checkpoint-3", "HF Trainer", 2, 3),
    ("fsdp2_sharded", "", "Accelerate with FSDP, sharded", 2, 3),
    ("dcp", "", "torch distributed checkpoint", 2, 3),
    ("z0", "", "DeepSpeed", 2, 4),
    ("universal_z2", "", "DeepSpeed universal", 2, 3),
    ("universal_z3", "", "DeepSpeed universal", 4, 3),
];

fn place(name: &str, inside: &str) -> PathBuf {
    if inside.is_empty() { golden(name) } else { golden(name).join(inside) }
}

#[test]
fn real_folders_of_every_kind_are_read_bit_for_bit() {
    for (name, inside, kind, world, updates) in KINDS {
        let found = open(&place(name, inside)).expect("whole");
        let facts = found.facts();
        assert_eq!((facts.kind, facts.world, facts.step), (kind, Some(world), Some(3)), "{name}");
        assert_eq!(differences(&found, name).expect("sound"), [""; 0], "{name}");
        let known = references(name);
        let held = found.tensors().into_iter().map(|t| format!("{}/{}", t.role, t.name));
        let others: Vec<String> = held.filter(|k| !known.contains_key(k)).collect();
        assert_eq!(others, [""; 0], "{name}");
        // every trained weight is in one group and has its number of updates
        let trained = found.tensors().into_iter().filter(|t| t.role == Role::ExpAvg).count();
        let grouped: usize = facts.groups.iter().map(|g| g.names.len()).sum();
        assert_eq!((facts.groups.len(), grouped, facts.steps.len()), (2, trained, trained), "{name}");
        assert!(facts.steps.values().all(|&s| s == updates), "{name}");
        let decay = |g: usize| facts.groups[g].hyper["weight_decay"].as_f64();
        assert_eq!((decay(0), decay(1)), (Some(0.1), Some(0.0)), "{name}");
        assert!(facts.groups[1].names.contains(&"model.norm.weight".to_owned()), "{name}");
        assert_eq!(facts.scheduler.is_null(), name == "dcp", "{name}");
        assert_eq!((facts.notices.len(), facts.warnings.len()), (0, 0), "{name}: {facts:?}");
        let report = crate::verify(&place(name, inside)).expect("a report");
        assert!(report.is_sound() && report.warnings.is_empty(), "{name}: {report:?}");
    }
}

#[test]
fn frozen_weights_of_universal_checkpoints_come_from_the_model_files() {
    for (name, frozen) in [("universal_z2", 10), ("universal_z3", 7)] {
        assert_eq!(open(&golden(name)).expect("whole").facts().frozen.len(), frozen, "{name}");
    }
}

#[test]
fn the_newest_of_several_is_taken_and_named() {
    let dir = fast_dir();
    for step in ["checkpoint-3", "checkpoint-20", "checkpoint-100"] {
        copy_tree(&place("hf_ddp", "checkpoint-3"), &dir.path().join(step));
    }
    fs::remove_file(dir.path().join("checkpoint-100/model.safetensors")).expect("removed");
    let found = open(dir.path()).expect("the newest that is whole");
    let notices = &found.facts().notices;
    assert_eq!(found.facts().tag, "checkpoint-20");
    assert!(
        notices[0].contains("of the 3 checkpoints") && notices[0].contains("checkpoint-20"),
        "{notices:?}"
    );
    assert!(notices[1].contains("passed over") && notices[1].contains("without weights"), "{notices:?}");
    assert!(found.facts().warnings[0].contains("of step 3, the folder is named for step 20"));
}

#[test]
fn an_optimizer_that_does_not_fit_the_weights_is_left_out_with_the_reason() {
    let dir = fast_dir();
    copy_tree(&place("hf_ddp", "checkpoint-3"), dir.path());
    let path = dir.path().join("model.safetensors");
    let text = fs::read(&path).expect("there");
    let at = text.windows(9).position(|w| w == b"q_proj.we").expect("a name");
    let mut renamed = text.clone();
    renamed[at] = b'x';
    fs::write(&path, renamed).expect("written");
    let found = open(dir.path()).expect("weights alone");
    assert!(
        found.facts().notices[0].contains("order of the model's weights isn't known"),
        "{:?}",
        found.facts()
    );
    assert_eq!(found.facts().missing[0], "optimizer state");
    assert!(found.tensors().iter().all(|t| t.role == Role::Weight));
}

#[test]
fn pieces_that_are_missing_are_named() {
    let dir = fast_dir();
    let error = || open(dir.path()).expect_err("refused").to_string();
    copy_tree(&golden("fsdp2_sharded"), dir.path());
    fs::remove_file(dir.path().join("optimizer_0/__1_0.distcp")).expect("removed");
    assert!(error().contains("optimizer_0/__1_0.distcp is missing"), "{}", error());
    fs::remove_file(dir.path().join("pytorch_model_fsdp_0/.metadata")).expect("removed");
    assert!(error().contains("lacks its .metadata"), "{}", error());
    let dir = fast_dir();
    copy_tree(&golden("universal_z2"), dir.path());
    let error = || open(dir.path()).expect_err("refused").to_string();
    let zero = dir.path().join("global_step3_universal/zero");
    fs::remove_file(zero.join("lm_head.weight/exp_avg_sq.pt")).expect("removed");
    assert!(error().contains("zero/lm_head.weight/exp_avg_sq.pt is missing"), "{}", error());
    fs::remove_dir_all(zero.join("lm_head.weight")).expect("removed");
    assert!(error().contains("the folder zero/lm_head.weight is missing"), "{}", error());
    // a link that leads out is not followed
    std::os::unix::fs::symlink("/etc", zero.join("lm_head.weight")).expect("linked");
    assert!(error().contains("lm_head.weight"), "{}", error());
}

#[test]
fn legacy_files_of_torch_hold_the_same_as_zip_ones() {
    let text = fs::read(golden("legacy").join("reference.json")).expect("there");
    let expected: std::collections::BTreeMap<String, (Vec<u64>, Vec<f32>)> =
        serde_json::from_slice(&text).expect("JSON");
    for file in ["legacy.pt", "zip.pt"] {
        let found = open(&golden("legacy").join(file)).expect("whole");
        for info in found.tensors().iter().filter(|t| t.role == Role::Weight) {
            let (shape, values) = &expected[&info.name];
            assert_eq!(&info.shape, shape, "{file} {}", info.name);
            assert_eq!(
                &super::foreign::read(&found, &info.name, Role::Weight).expect("sound"),
                values,
                "{file}"
            );
        }
        // `count` is of integers, and none is tied: views of one storage differ
        assert_eq!(found.tensors().len(), expected.len() + 1, "{file}");
    }
}

/// What lies beside a file that was named is no part of it.
#[test]
fn a_single_file_is_verified_by_itself() {
    let dir = fast_dir();
    fs::write(dir.path().join("broken.pt"), "no torch file").expect("written");
    fs::write(dir.path().join("text.txt"), "hello").expect("written");
    let file = dir.path().join("weights.pt");
    let mut bytes = fs::read(golden("legacy").join("zip.pt")).expect("there");
    fs::write(&file, &bytes).expect("written");
    let report = crate::verify(&file).expect("a report");
    assert!(report.is_sound() && report.checkpoints[0].bytes > 0, "{report:?}");
    let at = bytes.windows(6).position(|w| w == b"data/0").expect("a storage") + 200;
    bytes[at] ^= 1;
    fs::write(&file, &bytes).expect("written");
    assert!(!crate::verify(&file).expect("a report").is_sound());
    assert!(!crate::verify(&dir.path().join("broken.pt")).expect("a report").is_sound());
    let why = crate::verify(&dir.path().join("text.txt")).expect_err("no checkpoint").to_string();
    assert!(why.contains("its name doesn't end in"), "{why}");
}

/// `latest` of another program that names nothing is none of ours that is damaged.
#[test]
fn what_a_folder_without_a_checkpoint_is_verify_says_as_inspect_does() {
    let dir = fast_dir();
    let said = || {
        let verified = crate::verify(dir.path()).expect_err("none").to_string();
        let found = crate::find(dir.path()).expect_err("none").to_string();
        assert_eq!(verified, found);
        found
    };
    assert!(said().contains("it is empty"));
    fs::write(dir.path().join("latest"), "global_step1").expect("written");
    assert!(said().contains("bring that folder back"));
}

#[test]
fn every_cut_of_a_legacy_file_is_told() {
    let dir = fast_dir();
    let sound = fs::read(golden("legacy").join("legacy.pt")).expect("there");
    let path = dir.path().join("pytorch_model.bin");
    for len in 0..sound.len() {
        fs::write(&path, &sound[..len]).expect("written");
        let why = open(dir.path()).expect_err("cut").to_string();
        assert!(why.contains("cut short"), "{len} of {}: {why}", sound.len());
    }
    let mut longer = sound;
    longer.push(0);
    fs::write(&path, longer).expect("written");
    assert!(open(dir.path()).expect_err("longer").to_string().contains("storages end at byte"));
}

/// A universal checkpoint of 10,000 files: each is opened once, read in one go, and looked at twice at most. Calls are
/// counted, not time.
#[test]
fn ten_thousand_files_cost_a_few_calls_each() {
    let dir = fast_dir();
    copy_tree(&golden("universal_z2"), dir.path());
    let _ = fs::remove_file(dir.path().join("reference.json"));
    let tag = dir.path().join("global_step3_universal");
    let model = tag.join("zero/model.norm.weight");
    for i in 0..2500 {
        let layer = tag.join(format!("zero/extra.{i}.weight"));
        fs::create_dir(&layer).expect("made");
        for file in ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"] {
            fs::hard_link(model.join(file), layer.join(file)).expect("linked");
        }
    }
    let calls = || {
        let text = fs::read_to_string("/proc/self/io").unwrap_or_default();
        let of = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)?.trim().parse::<u64>().ok());
        of("syscr:")
    };
    let before = calls();
    let found = open(dir.path()).expect("whole");
    assert_eq!(found.tensors().iter().filter(|t| t.role == Role::ExpAvg).count(), 2511);
    assert!(found.files().count() > 10_000);
    if let (Some(before), Some(after)) = (before, calls()) {
        // reads of other tests in this process count as well; a loop over all files per file would be millions
        assert!(after - before < 400_000, "{} reads", after - before);
    }
}

/// The folder of DeepSpeed's state was lost or not copied: the weights are there, the training state isn't.
#[test]
fn a_state_that_latest_names_and_that_is_gone_is_damage() {
    let dir = fast_dir();
    let root = dir.path().join("checkpoint-3");
    copy_tree(&golden("hf_ddp").join("checkpoint-3"), &root);
    fs::remove_file(root.join("optimizer.pt")).expect("removed");
    fs::write(root.join("latest"), "global_step3").expect("written");
    let found = open(&root).expect("weights are there");
    let report = crate::verify(&root).expect("a report");
    let problems: Vec<String> = report.problems().map(|(_, p)| p.to_string()).collect();
    assert!(problems.len() == 1 && problems[0].contains("`latest` names global_step3"), "{problems:?}");
    for target in [Target::Native, Target::DeepSpeed, Target::Universal] {
        let out = dir.path().join("out");
        let why =
            convert(&*found, &out, &ConvertOptions::to(target), |_, _| {}).expect_err("refused").to_string();
        assert!(
            why.contains("the training state of step 3 but lacks the optimizer's; --to safetensors"),
            "{why}"
        );
    }
}

#[test]
fn what_is_beside_the_mark_is_told_with_what_helps() {
    let dir = fast_dir();
    let said = |path: &Path| crate::root::find(path).expect_err("refused").to_string();
    // the tag's folder is a link
    let linked = dir.path().join("linked");
    copy_tree(&golden("tiny").join("z2"), &linked);
    fs::rename(linked.join("global_step3"), dir.path().join("elsewhere")).expect("moved");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), linked.join("global_step3")).expect("linked");
    assert!(
        said(&linked).contains("global_step3, which `latest` names, is a symbolic link"),
        "{}",
        said(&linked)
    );
    // folders of folders
    let runs = dir.path().join("runs");
    fs::create_dir(&runs).expect("made");
    copy_tree(&golden("tiny").join("z2"), &runs.join("a/ckpt"));
    assert!(said(&runs).contains("a/ckpt may hold one: give its path"), "{}", said(&runs));
    copy_tree(&golden("tiny").join("z3"), &runs.join("b"));
    assert!(said(&runs).contains("a/ckpt, b may hold some: give the path of one"), "{}", said(&runs));
    // what a download left in place of the weights
    let weights = dir.path().join("weights");
    fs::create_dir(&weights).expect("made");
    for name in ["model.safetensors", "pytorch_model.bin"] {
        for (text, reason) in [
            ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "`git lfs pull`"),
            ("<!DOCTYPE html><html><body>404</body></html>", "download the file again"),
        ] {
            fs::write(weights.join(name), text).expect("written");
            assert!(said(&weights).contains(reason), "{name}: {}", said(&weights));
        }
        fs::remove_file(weights.join(name)).expect("removed");
    }
}
