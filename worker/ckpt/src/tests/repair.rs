//! Tests that repairs rebuild derivable files bit for bit, report losses, and never modify the
//! original.
use super::external::{find_differences, golden_path, open_external};
use super::*;
use crate::catalog::TensorSource;
use crate::error::OutputProblem;
use crate::rng_files::rank_files;
use crate::rng_files::reconcile::derive_stream_seed;
use crate::rng_stream_kind::RngStreamKind;
use crate::{RepairOptions, RepairReport, repair_checkpoints, verify_checkpoints};
use std::fs;
use std::os::unix::fs::FileExt;

/// Copies a golden checkpoint to `ckpt` in a new directory. Returns the directory, and the path of
/// the copy.
fn copy_golden_checkpoint(name: &str) -> (TempDir, PathBuf) {
    let dir = make_memory_dir();
    let path = dir.path().join("ckpt");
    copy_tree(&golden_path(name), &path);
    let _ = fs::remove_file(path.join("reference.json"));
    (dir, path)
}

/// Repairs the checkpoint at `path` with default options, and returns the report. Asserts that the
/// original is unchanged and no temporary files remain.
fn repair_and_check_original(path: &Path) -> RepairReport {
    let before = read_tree(path);
    let report = repair_checkpoints(path, &RepairOptions::default()).expect("no error of the disk");
    assert!(read_tree(path) == before, "the original was modified");
    let left: Vec<String> = list_entry_names(path.parent().expect("a parent"))
        .into_iter()
        .filter(|n| n.starts_with('.'))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    report
}

/// Asserts that the result of a repair is sound and equals the reference of the golden checkpoint
/// `reference`. Returns the path of the result.
fn assert_repaired(report: &RepairReport, reference: &str) -> PathBuf {
    assert!(report.sound, "{report:#?}");
    let path = report.path.clone().expect("made");
    assert!(verify_checkpoints(&path).expect("there").is_sound());
    let wrong = find_differences(&open_external(&path).expect("whole"), reference).expect("readable");
    assert!(wrong.is_empty(), "{wrong:?}");
    path
}

/// Compares the lines of a report with the snapshot `snapshot`. `path` is the repaired checkpoint,
/// whose parent directory is replaced by `[dir]`.
fn assert_report(snapshot: &str, report: &RepairReport, path: &Path) {
    let rebuilt = report.rebuilt.iter().map(|line| format!("rebuilt: {line}"));
    let lost = report.lost.iter().map(|line| format!("lost: {line}"));
    let lines: Vec<String> = rebuilt.chain(lost).collect();
    let dir = path.parent().expect("a parent");
    insta::assert_snapshot!(snapshot, replace_dir(&lines.join("\n"), dir));
}

/// Asserts that the result of the repair is not sound, and compares the report with the snapshot
/// `snapshot`.
fn assert_lost(snapshot: &str, report: &RepairReport, path: &Path) {
    assert!(!report.sound, "{report:#?}");
    assert_report(snapshot, report, path);
}

/// Returns the path of the DeepSpeed tag in a copy of a golden checkpoint.
fn tag_path(path: &Path) -> PathBuf {
    path.join("global_step3")
}

#[test]
fn a_sound_checkpoint_is_not_changed() {
    for name in ["z2_padded", "z3_frozen", "universal_z2", "universal_z3", "z0"] {
        let (_dir, path) = copy_golden_checkpoint(name);
        let report = repair_and_check_original(&path);
        assert!(report.sound && report.rebuilt.is_empty() && report.lost.is_empty(), "{name}: {report:#?}");
        assert_eq!(report.path, Some(path));
    }
}

#[test]
fn latest_is_pointed_to_the_newest_sound_tag() {
    let newer = |path: &Path| copy_tree(&tag_path(path), &path.join("global_step5"));
    type DamageCheckpoint = fn(&Path);
    let removed: DamageCheckpoint = |p| fs::remove_file(p.join("latest")).expect("removed");
    let dangling: DamageCheckpoint = |p| fs::write(p.join("latest"), "global_step9").expect("written");
    let stale: DamageCheckpoint = |_| ();
    for (spoil, snapshot) in
        [(removed, "latest_removed"), (dangling, "latest_dangling"), (stale, "latest_stale")]
    {
        let (_dir, path) = copy_golden_checkpoint("z2_padded");
        newer(&path);
        spoil(&path);
        let report = repair_and_check_original(&path);
        let made = assert_repaired(&report, "z2_padded");
        assert_report(snapshot, &report, &path);
        assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step5");
        assert_eq!(report.newest.as_deref(), Some("global_step5"));
    }
}

#[test]
fn latest_falls_back_to_the_previous_tag_when_the_newest_is_incomplete() {
    let (_dir, path) = copy_golden_checkpoint("z2_padded");
    copy_tree(&tag_path(&path), &path.join("global_step5"));
    fs::write(path.join("latest"), "global_step5").expect("written");
    fs::remove_file(path.join("global_step5/zero_pp_rank_2_mp_rank_00_optim_states.pt")).expect("removed");
    let report = repair_and_check_original(&path);
    let made = assert_repaired(&report, "z2_padded");
    assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step3");
    assert_report("newest_tag_incomplete", &report, &path);
    // the remaining files of the newest tag are kept
    assert!(made.join("global_step5/mp_rank_00_model_states.pt").exists());
}

#[test]
fn a_tag_with_exchanged_rank_files_is_not_sound() {
    let (_dir, path) = copy_golden_checkpoint("z2_padded");
    let older = path.join("global_step2");
    copy_tree(&tag_path(&path), &older);
    // a file has the name of another rank's file, so that only its content shows the exchange
    let name = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    fs::copy(
        path.join("global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        path.join("global_step3").join(name),
    )
    .expect("exchanged");
    let report = repair_and_check_original(&path);
    let made = assert_repaired(&report, "z2_padded");
    assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step2");
    assert_report("exchanged_rank_files", &report, &path);
}

#[test]
fn a_single_flipped_bit_is_flipped_back() {
    let (_dir, path) = copy_golden_checkpoint("z2_padded");
    let file = tag_path(&path).join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
    let good = fs::read(&file).expect("read");
    for (part, at) in [(3, good.len() / 3), (2, good.len() / 2)] {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        fs::write(&file, &bad).expect("written");
        let report = repair_and_check_original(&path);
        let made = assert_repaired(&report, "z2_padded");
        assert_report(&format!("flipped_bit_{part}"), &report, &path);
        assert!(
            fs::read(tag_path(&made).join("zero_pp_rank_1_mp_rank_00_optim_states.pt")).expect("read")
                == good
        );
        fs::remove_dir_all(made).expect("removed");
        // the CRC doesn't identify two bits
        bad[at + 40] ^= 0x02;
        fs::write(&file, &bad).expect("written");
        assert_lost(&format!("two_flipped_bits_{part}"), &repair_and_check_original(&path), &path);
    }
}

#[test]
fn files_without_redundancy_are_reported_as_lost() {
    let rank = |r: u32| format!("zero_pp_rank_{r}_mp_rank_00_optim_states.pt");
    // the file of one rank is lost
    let (_dir, path) = copy_golden_checkpoint("z2_padded");
    fs::remove_file(tag_path(&path).join(rank(2))).expect("removed");
    let report = repair_and_check_original(&path);
    assert_lost("optimizer_file_removed", &report, &path);
    assert!(report.path.is_none() && report.rebuilt.is_empty(), "{report:#?}");
    // one file is truncated, and the second half of another file is zeros
    let half: fn(&mut Vec<u8>) = |b| {
        let middle = b.len() / 2;
        b[middle..].fill(0);
    };
    let cut: fn(&mut Vec<u8>) = |b| b.truncate(b.len() - 5000);
    for (snapshot, spoil) in [("optimizer_file_zeroed", half), ("optimizer_file_truncated", cut)] {
        let (_dir, path) = copy_golden_checkpoint("z2_padded");
        let file = tag_path(&path).join(rank(1));
        let mut bytes = fs::read(&file).expect("read");
        spoil(&mut bytes);
        fs::write(&file, bytes).expect("written");
        assert_lost(snapshot, &repair_and_check_original(&path), &path);
    }
    // the only model file of stage 2 is lost
    let (_dir, path) = copy_golden_checkpoint("z2_padded");
    fs::remove_file(tag_path(&path).join("mp_rank_00_model_states.pt")).expect("removed");
    assert_lost("stage_2_model_file_removed", &repair_and_check_original(&path), &path);
}

/// Overwrites elements of the largest storage of a torch file, beginning at element 100, with
/// `values`. Updates the CRC-32.
fn overwrite_values(file: &Path, values: &[f32]) {
    use crate::codec::zip;
    let bytes = fs::read(file).expect("read");
    let opened = fs::OpenOptions::new().read(true).write(true).open(file).expect("opened");
    let members =
        zip::read_members(bytes.len() as u64, |at, out| opened.read_exact_at(out, at)).expect("a zip");
    let member =
        members.iter().filter(|m| m.name.contains("/data/")).max_by_key(|m| m.data.end - m.data.start);
    let member = member.expect("a storage");
    let mut data = bytes[member.data.start as usize..member.data.end as usize].to_vec();
    for (i, v) in values.iter().enumerate() {
        data[400 + 4 * i..404 + 4 * i].copy_from_slice(&v.to_le_bytes());
    }
    let (old, new) = (member.crc.expect("a CRC").to_le_bytes(), crc32fast::hash(&data).to_le_bytes());
    opened.write_all_at(&data, member.data.start).expect("written");
    for at in 0..bytes.len() - 4 {
        if bytes[at..at + 4] == old {
            opened.write_all_at(&new, at as u64).expect("written");
        }
    }
}

#[test]
fn nan_and_infinite_values_are_not_repairable() {
    let (_dir, path) = copy_golden_checkpoint("z2_frozen");
    overwrite_values(
        &tag_path(&path).join("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        &[f32::NAN, f32::INFINITY],
    );
    assert!(verify_checkpoints(&path).expect("there").is_sound(), "the file itself is intact");
    assert_lost("non_finite_values", &repair_and_check_original(&path), &path);
    // an older step with finite values is preferred
    copy_tree(&golden_path("z2_frozen/global_step3"), &path.join("global_step2"));
    let report = repair_and_check_original(&path);
    let made = assert_repaired(&report, "z2_frozen");
    assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step2");
}

#[test]
fn model_files_of_stage_3_are_rebuilt_from_another_rank() {
    let (_dir, path) = copy_golden_checkpoint("z3_buffers");
    let name = |rank: u32| format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
    for lost in [0u32, 1] {
        let file = tag_path(&path).join(name(lost));
        let good = fs::read(&file).expect("read");
        for cut in [false, true] {
            match cut {
                false => fs::remove_file(&file).expect("removed"),
                true => fs::write(&file, &good[..good.len() / 2]).expect("cut"),
            }
            let report = repair_and_check_original(&path);
            let made = assert_repaired(&report, "z3_buffers");
            assert_report(&format!("model_file_of_rank_{lost}_cut_{cut}"), &report, &path);
            fs::remove_dir_all(made).expect("removed");
        }
        fs::write(&file, good).expect("restored");
    }
    // frozen weights are sharded, so this rank's part is lost
    let (_dir, path) = copy_golden_checkpoint("z3_frozen");
    fs::remove_file(tag_path(&path).join(name(1))).expect("removed");
    assert_lost("model_file_with_frozen_slices", &repair_and_check_original(&path), &path);
}

#[test]
fn lost_files_of_a_universal_checkpoint_are_rebuilt_from_its_zero_checkpoint() {
    let lost = ["model.norm.weight/exp_avg_sq.pt", "lm_head.weight/fp32.pt", "model.norm.weight/step.pt"];
    for name in lost {
        let (dir, path) = copy_golden_checkpoint("universal_z2");
        let file = path.join("global_step3_universal/zero").join(name);
        fs::remove_file(&file).expect("removed");
        let snapshot = |case: &str| format!("universal_{case}_{}", name.replace(['/', '.'], "_"));
        // without a ZeRO checkpoint
        assert_lost(&snapshot("alone"), &repair_and_check_original(&path), &path);
        // a ZeRO checkpoint of another state is not used, though all names and shapes match
        let zero = dir.path().join("zero");
        copy_tree(&golden_path("z2_frozen"), &zero);
        overwrite_values(
            &zero.join("global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            &[4.5, 3.25],
        );
        assert_lost(&snapshot("other_state"), &repair_and_check_original(&path), &path);
        fs::remove_dir_all(&zero).expect("removed");
        copy_tree(&golden_path("z2_frozen"), &zero);
        let report = repair_and_check_original(&path);
        assert_repaired(&report, "universal_z2");
        assert_report(&snapshot("rebuilt"), &report, &path);
    }
}

#[test]
fn latest_universal_is_recreated() {
    let (_dir, path) = copy_golden_checkpoint("universal_z2");
    fs::remove_file(path.join("latest_universal")).expect("removed");
    let report = repair_and_check_original(&path);
    let made = assert_repaired(&report, "universal_z2");
    assert_eq!(fs::read(made.join("latest_universal")).expect("there"), b"global_step3_universal");
}

#[test]
fn lost_rng_states_are_created_by_the_rule_and_others_are_kept() {
    // HF Trainer with DeepSpeed inside, which contains the number of ranks
    let (_dir, path) = copy_golden_checkpoint("z2_frozen");
    let trainer_files =
        ["config.json", "trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"];
    for name in trainer_files.into_iter().chain(["model.safetensors"]) {
        fs::copy(golden_path("hf_ddp/checkpoint-3").join(name), path.join(name)).expect("copied");
    }
    let good = rank_files::read_all_rank_states(&path, None).expect("readable").expect("there");
    for cut in [false, true] {
        match cut {
            false => fs::remove_file(path.join("rng_state_1.pth")).expect("removed"),
            true => fs::write(path.join("rng_state_1.pth"), b"PK").expect("cut"),
        }
        let report = repair_and_check_original(&path);
        assert!(report.sound, "{report:#?}");
        assert_report(&format!("rng_state_of_rank_1_cut_{cut}"), &report, &path);
        let made = report.path.clone().expect("made");
        let now = rank_files::read_all_rank_states(&made, None).expect("readable").expect("there");
        assert_eq!(now.ranks.len(), 2);
        for kind in RngStreamKind::ALL {
            assert_eq!(
                now.ranks[0].compute_rng_state_digest(kind),
                good.ranks[0].compute_rng_state_digest(kind),
                "rank 0 keeps its {kind} stream"
            );
        }
        // replicated streams are copied; torch's stream of rank 1 is reseeded
        assert_eq!(
            now.ranks[1].compute_rng_state_digest(RngStreamKind::Python),
            now.ranks[0].compute_rng_state_digest(RngStreamKind::Python)
        );
        assert_eq!(
            now.ranks[1].compute_rng_state_digest(RngStreamKind::Numpy),
            now.ranks[0].compute_rng_state_digest(RngStreamKind::Numpy)
        );
        let expected = derive_stream_seed(good.ranks[0].cpu.seed(), 1, 3, RngStreamKind::TorchCpu, 1);
        let number = u64::from_le_bytes(expected.0[..8].try_into().expect("8 bytes"));
        assert_eq!(now.ranks[1].cpu.seed(), number);
        fs::remove_dir_all(made).expect("removed");
    }
}

#[test]
fn an_unknown_number_of_ranks_is_not_invented() {
    let dir = make_memory_dir();
    let path = dir.path().join("checkpoint-3");
    copy_tree(&golden_path("hf_ddp/checkpoint-3"), &path);
    fs::remove_file(path.join("rng_state_1.pth")).expect("removed");
    let report = repair_and_check_original(&path);
    assert!(report.rebuilt.is_empty(), "{report:#?}");
    assert_report("rng_world_unknown", &report, &path);
    // a file of rank 1 shows that there was a rank 0
    let dir = make_memory_dir();
    let path = dir.path().join("checkpoint-3");
    copy_tree(&golden_path("hf_ddp/checkpoint-3"), &path);
    fs::remove_file(path.join("rng_state_0.pth")).expect("removed");
    let report = repair_and_check_original(&path);
    assert!(report.sound, "{report:#?}");
    assert_report("rng_state_of_rank_0", &report, &path);
}

#[test]
fn an_incomplete_newest_trainer_checkpoint_is_removed_from_the_result() {
    let dir = make_memory_dir();
    let path = dir.path().join("out");
    copy_tree(&golden_path("hf_ddp/checkpoint-3"), &path.join("checkpoint-3"));
    copy_tree(&golden_path("hf_ddp/checkpoint-3"), &path.join("checkpoint-6"));
    fs::remove_file(path.join("checkpoint-6/optimizer.pt")).expect("removed");
    fs::write(path.join("checkpoint-6/model.safetensors"), b"short").expect("written");
    let report = repair_and_check_original(&path);
    assert!(report.sound, "{report:#?}");
    assert_report("trainer_checkpoint_removed", &report, &path);
    assert_eq!(list_entry_names(&report.path.expect("made")), ["checkpoint-3"]);
}

#[test]
fn a_lost_index_is_rebuilt_from_the_shard_headers() {
    let dir = make_memory_dir();
    let path = dir.path().join("model");
    let source = open_external(&golden_path("z2_frozen")).expect("whole");
    let options = crate::GatherOptions { max_shard_size: 20_000, ..crate::GatherOptions::default() };
    crate::gather_weights(&*source, &path, &options, |_, _| ()).expect("gathered");
    let index = path.join("model.safetensors.index.json");
    let read_json = |path: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path).expect("read")).expect("JSON")
    };
    let good = read_json(&index);
    for spoil in ["", "{\"weight_map\": {}}", "{"] {
        match spoil {
            "" => fs::remove_file(&index).expect("removed"),
            text => fs::write(&index, text).expect("written"),
        }
        let report = repair_and_check_original(&path);
        assert!(report.sound, "{report:#?}");
        let made = report.path.expect("made");
        let new = read_json(&made.join("model.safetensors.index.json"));
        assert_eq!(
            (&new["weight_map"], &new["metadata"]["total_size"]),
            (&good["weight_map"], &good["metadata"]["total_size"])
        );
        fs::remove_dir_all(made).expect("removed");
    }
    // a lost shard can't be rebuilt
    let shard = list_entry_names(&path).into_iter().find(|n| n.ends_with(".safetensors")).expect("a shard");
    fs::remove_file(path.join(shard)).expect("removed");
    assert_lost("shard_of_weights_removed", &repair_and_check_original(&path), &path);
}

#[test]
fn lost_trainer_weights_are_gathered_from_the_deepspeed_state() {
    let (_dir, path) = copy_golden_checkpoint("z2_frozen");
    for name in ["config.json", "trainer_state.json"] {
        fs::copy(golden_path("hf_ddp/checkpoint-3").join(name), path.join(name)).expect("copied");
    }
    let report = repair_and_check_original(&path);
    assert!(report.sound, "{report:#?}");
    assert_report("trainer_weights_gathered", &report, &path);
    let made = report.path.expect("made");
    let (weights, state) = (
        open_external(&made.join("model.safetensors")).expect("whole"),
        open_external(&path).expect("whole"),
    );
    let mut compared = 0;
    for info in weights.tensors() {
        let got = crate::tests::external::read_tensor(&weights, &info.name, info.role).expect("there");
        let want =
            crate::tests::external::read_tensor(&state, &info.name, TensorRole::Weight).expect("there");
        let rounded: Vec<f32> = want.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
        assert_eq!(got, rounded, "{}", info.name);
        compared += 1;
    }
    assert!(compared > 10);
}

#[test]
fn a_result_never_replaces_existing_files() {
    let (dir, path) = copy_golden_checkpoint("z2_padded");
    fs::remove_file(path.join("latest")).expect("removed");
    fs::create_dir(dir.path().join("ckpt.repaired")).expect("made");
    let problem = |options: &RepairOptions| match repair_checkpoints(&path, options) {
        Err(CkptError::OutputRejected { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    assert_eq!(problem(&RepairOptions::default()), OutputProblem::Exists);
    let inside = RepairOptions { out: Some(path.join("out")), in_place: false };
    assert_eq!(problem(&inside), OutputProblem::InsideInput);
    assert!(repair_checkpoints(&dir.path().join("nowhere"), &RepairOptions::default()).is_err());
    // an incomplete repair doesn't replace the original
    fs::remove_dir(dir.path().join("ckpt.repaired")).expect("removed");
    fs::remove_file(tag_path(&path).join("zero_pp_rank_2_mp_rank_00_optim_states.pt")).expect("removed");
    let report = repair_checkpoints(&path, &RepairOptions { out: None, in_place: true }).expect("looked at");
    assert!(!report.sound && report.path.is_none(), "{report:#?}");
    assert_eq!(list_entry_names(dir.path()), ["ckpt"]);
}

/// Adds a universal checkpoint to the directory `path`, converted from the ZeRO checkpoint there.
fn add_universal_checkpoint(path: &Path) {
    let source = open_external(path).expect("whole");
    let made = path.with_file_name("universal");
    let options = crate::ConvertOptions::new(crate::ConvertTarget::Universal);
    crate::convert_checkpoint(&*source, &made, &options, |_, _| ()).expect("converted");
    copy_tree(&made, path);
    fs::remove_dir_all(made).expect("removed");
}

#[test]
fn lost_model_files_are_rebuilt_from_a_universal_checkpoint_of_an_equal_state() {
    let stage3_file = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    for (name, model) in [
        ("z2_padded", "mp_rank_00_model_states.pt"),
        ("z1_tied", "mp_rank_00_model_states.pt"),
        ("z3_frozen", stage3_file),
    ] {
        for damaged in [false, true] {
            let (_dir, path) = copy_golden_checkpoint(name);
            let tag = path.join(fs::read_to_string(path.join("latest")).expect("there").trim());
            let file = tag.join(model);
            // without a universal checkpoint
            let good = fs::read(&file).expect("there");
            fs::remove_file(&file).expect("removed");
            assert_lost(&format!("model_file_removed_{name}"), &repair_and_check_original(&path), &path);
            fs::write(&file, &good).expect("written");
            add_universal_checkpoint(&path);
            match damaged {
                true => fs::write(&file, &good[..good.len() / 2]).expect("written"),
                false => fs::remove_file(&file).expect("removed"),
            }
            let report = repair_and_check_original(&path);
            let made = assert_repaired(&report, name);
            assert_report(&format!("model_file_rebuilt_{name}_{damaged}"), &report, &path);
            assert!(made.join(tag.file_name().expect("a name")).join(model).exists(), "{name}");
        }
    }
}

/// Checks that a lost model file is not rebuilt from a universal checkpoint of another state,
/// though all shapes match.
#[test]
fn model_files_are_not_copied_from_another_state() {
    let (_dir, path) = copy_golden_checkpoint("z2_padded");
    add_universal_checkpoint(&path);
    let fp32 = path.join("global_step3_universal/zero/model.norm.weight/fp32.pt");
    let other = path.join("global_step3_universal/zero/model.norm.weight/exp_avg.pt");
    fs::copy(other, fp32).expect("another value");
    fs::remove_file(tag_path(&path).join("mp_rank_00_model_states.pt")).expect("removed");
    let report = repair_and_check_original(&path);
    assert_lost("model_file_of_another_state", &report, &path);
}

#[test]
fn damaged_weights_of_a_run_are_gathered_again() {
    let dir = make_memory_dir();
    let root = dir.path().join("checkpoints");
    let saved =
        save_checkpoint(&root, &make_facts(2, 2, &[("a", &[4]), ("b", &[3, 5])])).expect("saved").path;
    let weights = root.join("weights");
    let options = crate::GatherOptions { dtype: Some(crate::Dtype::BF16), ..Default::default() };
    crate::gather_weights(&crate::Checkpoint::open(&saved).expect("whole"), &weights, &options, |_, _| ())
        .expect("gathered");
    let file = weights.join("model.safetensors");
    let good = fs::read(&file).expect("there");
    assert!(repair_and_check_original(&root).rebuilt.is_empty());
    for cut in [Some(good.len() / 2), Some(0), None] {
        match cut {
            Some(len) => fs::write(&file, &good[..len]).expect("written"),
            None => fs::remove_file(&file).expect("removed"),
        }
        let report = repair_and_check_original(&root);
        assert!(report.sound, "{report:#?}");
        let case =
            cut.map_or("removed".to_owned(), |len| format!("cut_to_{}", if len > 0 { "half" } else { "0" }));
        assert_report(&format!("run_weights_{case}"), &report, &root);
        let made = report.path.expect("made");
        assert!(fs::read(made.join("weights/model.safetensors")).expect("there") == good);
        fs::remove_dir_all(made).expect("removed");
    }
    // without a weights directory nothing is missing
    fs::remove_dir_all(&weights).expect("removed");
    assert!(repair_and_check_original(&root).rebuilt.is_empty());
}
