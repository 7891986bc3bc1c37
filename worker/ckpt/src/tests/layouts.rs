//! Tests every layout of external checkpoints. Golden checkpoints are read bit for bit, and damaged
//! checkpoints give errors.
use super::convert::expect_convert_error;
use super::external::{
    expect_open_error, find_differences, golden_path, open_external, read_reference_hashes,
};
use super::{copy_tree, format_error, format_problems, make_memory_dir, replace_dir};
use crate::catalog::TensorSource;
use crate::convert::{ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::error::{CkptError, ConvertError, Diagnosis};
use crate::tensor::TensorRole;
use diagnostic::codes::checkpoint as codes;
use std::fs;
use std::path::{Path, PathBuf};

/// The golden checkpoints, one for each layout. The fields are the directory, the subdirectory to
/// open, the kind, the number of ranks, and the update count of the weights.
const LAYOUTS: [(&str, &str, &str, u32, u64); 6] = [
    ("hf_ddp", "checkpoint-3", "HF Trainer", 2, 3),
    ("fsdp2_sharded", "", "Accelerate with FSDP, sharded", 2, 3),
    ("dcp", "", "torch distributed checkpoint", 2, 3),
    ("z0", "", "DeepSpeed", 2, 4),
    ("universal_z2", "", "DeepSpeed universal", 2, 3),
    ("universal_z3", "", "DeepSpeed universal", 4, 3),
];

fn golden_subdirectory(name: &str, inside: &str) -> PathBuf {
    if inside.is_empty() { golden_path(name) } else { golden_path(name).join(inside) }
}

#[test]
fn golden_checkpoints_of_every_layout_are_read_bit_for_bit() {
    for (name, inside, kind, world, updates) in LAYOUTS {
        let found = open_external(&golden_subdirectory(name, inside)).expect("whole");
        let facts = found.facts();
        assert_eq!((facts.kind, facts.state.world, facts.state.step), (kind, Some(world), Some(3)), "{name}");
        assert_eq!(find_differences(&found, name).expect("sound"), [""; 0], "{name}");
        let known = read_reference_hashes(name);
        let tensors = found.tensors().into_iter().map(|t| format!("{}/{}", t.role, t.name));
        let others: Vec<String> = tensors.filter(|k| !known.contains_key(k)).collect();
        assert_eq!(others, [""; 0], "{name}");
        // every trained weight is in one group and has its number of updates
        let trained = found.tensors().into_iter().filter(|t| t.role == TensorRole::ExpAvg).count();
        let grouped: usize = facts.state.groups.iter().map(|g| g.names.len()).sum();
        assert_eq!(
            (facts.state.groups.len(), grouped, facts.state.steps.len()),
            (2, trained, trained),
            "{name}"
        );
        assert!(facts.state.steps.values().all(|&s| s == updates), "{name}");
        let decay = |g: usize| facts.state.groups[g].hyper["weight_decay"].as_f64();
        assert_eq!((decay(0), decay(1)), (Some(0.1), Some(0.0)), "{name}");
        assert!(facts.state.groups[1].names.contains(&"model.norm.weight".to_owned()), "{name}");
        assert_eq!(facts.state.scheduler.is_null(), name == "dcp", "{name}");
        assert_eq!((facts.notices.len(), facts.warnings.len()), (0, 0), "{name}: {facts:?}");
        let report = crate::verify_checkpoints(&golden_subdirectory(name, inside)).expect("a report");
        assert!(report.is_sound() && report.warnings.is_empty(), "{name}: {report:?}");
    }
}

#[test]
fn frozen_weights_of_universal_checkpoints_come_from_the_model_files() {
    for (name, frozen) in [("universal_z2", 10), ("universal_z3", 7)] {
        assert_eq!(
            open_external(&golden_path(name)).expect("whole").facts().state.frozen.len(),
            frozen,
            "{name}"
        );
    }
}

#[test]
fn the_newest_complete_checkpoint_of_several_is_opened() {
    let dir = make_memory_dir();
    for step in ["checkpoint-3", "checkpoint-20", "checkpoint-100"] {
        copy_tree(&golden_subdirectory("hf_ddp", "checkpoint-3"), &dir.path().join(step));
    }
    fs::remove_file(dir.path().join("checkpoint-100/model.safetensors")).expect("removed");
    let found = open_external(dir.path()).expect("the newest complete checkpoint");
    assert_eq!(found.facts().tag, "checkpoint-20");
    let lines = [found.facts().notices.as_slice(), found.facts().warnings.as_slice()].concat();
    insta::assert_snapshot!("layouts_newest_of_several", replace_dir(&lines.join("\n"), dir.path()));
}

#[test]
fn an_error_states_how_many_checkpoints_were_not_tried() {
    let dir = make_memory_dir();
    for step in 1..=16 {
        fs::create_dir(dir.path().join(format!("checkpoint-{step}"))).expect("made");
    }
    // without older checkpoints, the error is that of the newest one
    let error = open_external(dir.path()).expect_err("empty directories");
    assert_eq!(error.code(), diagnostic::codes::checkpoint::CHECKPOINT_DIRECTORY_EMPTY);
    copy_tree(&golden_subdirectory("hf_ddp", "checkpoint-3"), &dir.path().join("checkpoint-0"));
    insta::assert_snapshot!("layouts_newest_unreadable", expect_open_error(dir.path()));
}

#[test]
fn an_optimizer_that_does_not_match_the_weights_is_left_out_with_a_notice() {
    let dir = make_memory_dir();
    copy_tree(&golden_subdirectory("hf_ddp", "checkpoint-3"), dir.path());
    let path = dir.path().join("model.safetensors");
    let text = fs::read(&path).expect("there");
    let at = text.windows(9).position(|w| w == b"q_proj.we").expect("a name");
    let mut renamed = text.clone();
    renamed[at] = b'x';
    fs::write(&path, renamed).expect("written");
    let found = open_external(dir.path()).expect("weights only");
    insta::assert_snapshot!("layouts_optimizer_left_out", found.facts().notices.join("\n"));
    assert_eq!(found.facts().missing[0], crate::TrainingStatePart::OptimizerState);
    assert!(found.tensors().iter().all(|t| t.role == TensorRole::Weight));
}

#[test]
fn missing_files_are_named() {
    let dir = make_memory_dir();
    copy_tree(&golden_path("fsdp2_sharded"), dir.path());
    fs::remove_file(dir.path().join("optimizer_0/__1_0.distcp")).expect("removed");
    insta::assert_snapshot!("layouts_distcp_file_missing", expect_open_error(dir.path()));
    fs::remove_file(dir.path().join("pytorch_model_fsdp_0/.metadata")).expect("removed");
    insta::assert_snapshot!("layouts_fsdp_metadata_missing", expect_open_error(dir.path()));
    let dir = make_memory_dir();
    copy_tree(&golden_path("universal_z2"), dir.path());
    let zero = dir.path().join("global_step3_universal/zero");
    fs::remove_file(zero.join("lm_head.weight/exp_avg_sq.pt")).expect("removed");
    insta::assert_snapshot!("layouts_universal_file_missing", expect_open_error(dir.path()));
    fs::remove_dir_all(zero.join("lm_head.weight")).expect("removed");
    insta::assert_snapshot!("layouts_universal_directory_missing", expect_open_error(dir.path()));
    // a symbolic link to a directory outside of the checkpoint is not followed
    std::os::unix::fs::symlink("/etc", zero.join("lm_head.weight")).expect("linked");
    insta::assert_snapshot!("layouts_universal_directory_is_a_symlink", expect_open_error(dir.path()));
}

#[test]
fn legacy_torch_files_contain_the_tensors_of_zip_files() {
    let text = fs::read(golden_path("legacy").join("reference.json")).expect("there");
    let expected: std::collections::BTreeMap<String, (Vec<u64>, Vec<f32>)> =
        serde_json::from_slice(&text).expect("JSON");
    for file in ["legacy.pt", "zip.pt"] {
        let found = open_external(&golden_path("legacy").join(file)).expect("whole");
        for info in found.tensors().iter().filter(|t| t.role == TensorRole::Weight) {
            let (shape, values) = &expected[&info.name];
            assert_eq!(&info.shape, shape, "{file} {}", info.name);
            assert_eq!(
                &crate::tests::external::read_tensor(&found, &info.name, TensorRole::Weight).expect("sound"),
                values,
                "{file}"
            );
        }
        // one more tensor is `count`, which has integers; views of one storage are not ties
        assert_eq!(found.tensors().len(), expected.len() + 1, "{file}");
    }
}

#[test]
fn verify_of_a_single_file_ignores_its_neighbours() {
    let dir = make_memory_dir();
    fs::write(dir.path().join("broken.pt"), "no torch file").expect("written");
    fs::write(dir.path().join("text.txt"), "hello").expect("written");
    let file = dir.path().join("weights.pt");
    let mut bytes = fs::read(golden_path("legacy").join("zip.pt")).expect("there");
    fs::write(&file, &bytes).expect("written");
    let report = crate::verify_checkpoints(&file).expect("a report");
    assert!(report.is_sound() && report.checkpoints[0].bytes > 0, "{report:?}");
    let at = bytes.windows(6).position(|w| w == b"data/0").expect("a storage") + 200;
    bytes[at] ^= 1;
    fs::write(&file, &bytes).expect("written");
    assert!(!crate::verify_checkpoints(&file).expect("a report").is_sound());
    assert!(!crate::verify_checkpoints(&dir.path().join("broken.pt")).expect("a report").is_sound());
    let error = crate::verify_checkpoints(&dir.path().join("text.txt")).expect_err("no checkpoint");
    let CkptError::NotACheckpoint { diagnosis, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*diagnosis, Diagnosis::NotAWeightsFile);
}

/// Checks that [`crate::verify_checkpoints`] and [`crate::open_checkpoint`] give equal errors for
/// directories without a checkpoint, also for a dangling `latest`.
#[test]
fn verify_and_find_give_equal_diagnoses() {
    let dir = make_memory_dir();
    let diagnosis = || {
        let verified = format_error(&crate::verify_checkpoints(dir.path()).expect_err("none"), dir.path());
        let found = format_error(&crate::open_checkpoint(dir.path()).expect_err("none"), dir.path());
        assert_eq!(verified, found);
        found
    };
    insta::assert_snapshot!("layouts_empty_directory", diagnosis());
    fs::write(dir.path().join("latest"), "global_step1").expect("written");
    insta::assert_snapshot!("layouts_dangling_latest", diagnosis());
}

#[test]
fn every_truncation_of_a_legacy_file_is_detected() {
    let dir = make_memory_dir();
    let sound = fs::read(golden_path("legacy").join("legacy.pt")).expect("there");
    let path = dir.path().join("pytorch_model.bin");
    for len in 0..sound.len() {
        fs::write(&path, &sound[..len]).expect("written");
        let error = open_external(dir.path()).expect_err("truncated");
        let truncated = [codes::CHECKPOINT_FILE_TRUNCATED, codes::ZIP_INVALID, codes::TORCH_FILE_INVALID];
        assert!(truncated.contains(&error.code()), "{len} of {}: {error}", sound.len());
    }
    let mut longer = sound;
    longer.push(0);
    fs::write(&path, longer).expect("written");
    insta::assert_snapshot!("layouts_legacy_file_too_long", expect_open_error(dir.path()));
}

/// Checks how often files are read when a universal checkpoint of 2511 parameters is opened. Counts
/// read system calls instead of time, which would depend on the machine.
#[test]
fn a_universal_checkpoint_of_10_000_files_takes_a_few_reads_per_file() {
    let dir = make_memory_dir();
    copy_tree(&golden_path("universal_z2"), dir.path());
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
        let field = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)?.trim().parse::<u64>().ok());
        field("syscr:")
    };
    let before = calls();
    let found = open_external(dir.path()).expect("whole");
    assert_eq!(found.tensors().iter().filter(|t| t.role == TensorRole::ExpAvg).count(), 2511);
    assert!(found.files().count() > 10_000);
    if let (Some(before), Some(after)) = (before, calls()) {
        // includes reads of concurrent tests; reading all files for each file would take millions
        assert!(after - before < 400_000, "{} reads", after - before);
    }
}

/// Checks a checkpoint whose weights exist, but whose DeepSpeed tag directory is missing.
/// Verification must report damage, and every conversion must fail.
#[test]
fn a_missing_tag_directory_that_latest_names_is_damage() {
    let dir = make_memory_dir();
    let root = dir.path().join("checkpoint-3");
    copy_tree(&golden_path("hf_ddp").join("checkpoint-3"), &root);
    fs::remove_file(root.join("optimizer.pt")).expect("removed");
    fs::write(root.join("latest"), "global_step3").expect("written");
    let found = open_external(&root).expect("the weights exist");
    let report = crate::verify_checkpoints(&root).expect("a report");
    insta::assert_snapshot!("layouts_tag_of_latest_missing", format_problems(&report, dir.path()));
    for target in [ConvertTarget::Native, ConvertTarget::DeepSpeed, ConvertTarget::Universal] {
        let out = dir.path().join("out");
        let error =
            convert_checkpoint(&*found, &out, &ConvertOptions::new(target), |_, _| {}).expect_err("rejected");
        assert_eq!(expect_convert_error(&error), &ConvertError::OptimizerMissing { step: 3 });
    }
}

#[test]
fn wrong_paths_and_placeholder_files_are_diagnosed_with_help() {
    let dir = make_memory_dir();
    let diagnosis = |path: &Path| {
        let error = crate::open::open_checkpoint(path).expect_err("rejected");
        let text = format!("[{}] {error}\nhelp: {}", error.code(), error.help().join("\nhelp: "));
        replace_dir(&text, dir.path())
    };
    // the tag directory is a symlink
    let linked = dir.path().join("linked");
    copy_tree(&golden_path("tiny").join("z2"), &linked);
    fs::rename(linked.join("global_step3"), dir.path().join("elsewhere")).expect("moved");
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), linked.join("global_step3")).expect("linked");
    insta::assert_snapshot!("layouts_tag_is_a_symlink", diagnosis(&linked));
    // parent directories of checkpoints
    let runs = dir.path().join("runs");
    fs::create_dir(&runs).expect("made");
    copy_tree(&golden_path("tiny").join("z2"), &runs.join("a/ckpt"));
    insta::assert_snapshot!("layouts_parent_of_one_checkpoint", diagnosis(&runs));
    copy_tree(&golden_path("tiny").join("z3"), &runs.join("b"));
    insta::assert_snapshot!("layouts_parent_of_two_checkpoints", diagnosis(&runs));
    // placeholders that a download left in place of the weights
    let weights = dir.path().join("weights");
    fs::create_dir(&weights).expect("made");
    for name in ["model.safetensors", "pytorch_model.bin"] {
        for (text, kind) in [
            ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git_lfs"),
            ("<!DOCTYPE html><html><body>404</body></html>", "html"),
        ] {
            fs::write(weights.join(name), text).expect("written");
            let snapshot = format!("layouts_{kind}_{}", name.replace('.', "_"));
            insta::assert_snapshot!(snapshot, diagnosis(&weights));
        }
        fs::remove_file(weights.join(name)).expect("removed");
    }
}
