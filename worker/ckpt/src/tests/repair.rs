//! What can be derived is, bit for bit; what can't is said; the original is never touched.
use super::foreign::{differences, golden, open};
use super::*;
use crate::rng_files::folder;
use crate::rng_files::rule::seed;
use crate::rng_files::streams::Kind;
use crate::source::Source;
use crate::{RepairOptions, RepairReport, repair, verify};
use std::fs;
use std::os::unix::fs::FileExt;

/// A copy of a golden folder as `ckpt` in a directory of its own.
fn copied(name: &str) -> (TempDir, PathBuf) {
    let dir = fast_dir();
    let path = dir.path().join("ckpt");
    copy_tree(&golden(name), &path);
    let _ = fs::remove_file(path.join("reference.json"));
    (dir, path)
}

/// Repairs into `ckpt.repaired`; the original stays byte for byte.
fn repaired(path: &Path) -> RepairReport {
    let before = files(path);
    let report = repair(path, &RepairOptions::default()).expect("no error of the disk");
    assert!(files(path) == before, "the original was touched");
    let left: Vec<String> =
        names(path.parent().expect("a parent")).into_iter().filter(|n| n.starts_with('.')).collect();
    assert!(left.is_empty(), "{left:?}");
    report
}

/// The result, sound and right.
fn sound(report: &RepairReport, reference: &str) -> PathBuf {
    assert!(report.sound, "{report:#?}");
    let path = report.path.clone().expect("made");
    assert!(verify(&path).expect("there").is_sound());
    let wrong = differences(&open(&path).expect("whole"), reference).expect("readable");
    assert!(wrong.is_empty(), "{wrong:?}");
    path
}

fn refused(report: &RepairReport, why: &[&str]) {
    assert!(!report.sound, "{report:#?}");
    for part in why {
        assert!(report.lost.iter().any(|l| l.contains(part)), "{part:?} is not in {report:#?}");
    }
}

fn tag(path: &Path) -> PathBuf {
    path.join("global_step3")
}

fn has(lines: &[String], part: &str) -> bool {
    lines.iter().any(|l| l.contains(part))
}

#[test]
fn what_is_whole_stays_as_it_is() {
    for name in ["z2_padded", "z3_frozen", "universal_z2", "universal_z3", "z0"] {
        let (_dir, path) = copied(name);
        let report = repaired(&path);
        assert!(report.sound && report.rebuilt.is_empty() && report.lost.is_empty(), "{name}: {report:#?}");
        assert_eq!(report.path, Some(path));
    }
}

#[test]
fn latest_names_the_newest_whole_tag() {
    let newer = |path: &Path| copy_tree(&tag(path), &path.join("global_step5"));
    // gone, naming nothing, naming the older of two
    type Spoil = fn(&Path);
    let gone: Spoil = |p| fs::remove_file(p.join("latest")).expect("removed");
    let nothing: Spoil = |p| fs::write(p.join("latest"), "global_step9").expect("written");
    let stale: Spoil = |_| ();
    for (spoil, said) in
        [(gone, "was missing"), (nothing, "named global_step9"), (stale, "named global_step3")]
    {
        let (_dir, path) = copied("z2_padded");
        newer(&path);
        spoil(&path);
        let report = repaired(&path);
        let made = sound(&report, "z2_padded");
        assert!(has(&report.rebuilt, said), "{report:#?}");
        assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step5");
        assert_eq!(report.newest.as_deref(), Some("global_step5"));
    }
}

#[test]
fn a_newest_tag_that_is_not_whole_gives_way_to_the_one_before() {
    let (_dir, path) = copied("z2_padded");
    copy_tree(&tag(&path), &path.join("global_step5"));
    fs::write(path.join("latest"), "global_step5").expect("written");
    fs::remove_file(path.join("global_step5/zero_pp_rank_2_mp_rank_00_optim_states.pt")).expect("removed");
    let report = repaired(&path);
    let made = sound(&report, "z2_padded");
    assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step3");
    assert!(has(&report.lost, "the optimizer file of rank 2"), "{report:#?}");
    // what is left of the newer one is still there for whoever can use it
    assert!(made.join("global_step5/mp_rank_00_model_states.pt").exists());
}

#[test]
fn mixed_steps_are_not_taken_for_one() {
    let (_dir, path) = copied("z2_padded");
    let older = path.join("global_step2");
    copy_tree(&tag(&path), &older);
    // the same file in another step's folder: only its content says that it doesn't belong there
    let name = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    fs::copy(
        path.join("global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        path.join("global_step3").join(name),
    )
    .expect("exchanged");
    let report = repaired(&path);
    let made = sound(&report, "z2_padded");
    assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step2");
    assert!(has(&report.lost, "files of two ranks were exchanged"), "{report:#?}");
}

#[test]
fn one_flipped_bit_is_found_and_flipped_back() {
    let (_dir, path) = copied("z2_padded");
    let file = tag(&path).join("zero_pp_rank_1_mp_rank_00_optim_states.pt");
    let good = fs::read(&file).expect("read");
    for at in [good.len() / 3, good.len() / 2] {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        fs::write(&file, &bad).expect("written");
        let report = repaired(&path);
        let made = sound(&report, "z2_padded");
        assert!(has(&report.rebuilt, "bit 6 of byte"), "{report:#?}");
        assert!(
            fs::read(tag(&made).join("zero_pp_rank_1_mp_rank_00_optim_states.pt")).expect("read") == good
        );
        fs::remove_dir_all(made).expect("removed");
        // two bits: nothing says which
        bad[at + 40] ^= 0x02;
        fs::write(&file, &bad).expect("written");
        refused(&repaired(&path), &["don't fit their CRC-32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]);
    }
}

#[test]
fn what_is_nowhere_else_is_refused_by_name() {
    let rank = |r: u32| format!("zero_pp_rank_{r}_mp_rank_00_optim_states.pt");
    // a lost rank
    let (_dir, path) = copied("z2_padded");
    fs::remove_file(tag(&path).join(rank(2))).expect("removed");
    let report = repaired(&path);
    refused(&report, &["rank 2 of 4"]);
    assert!(report.path.is_none() && report.rebuilt.is_empty(), "{report:#?}");
    // a cut file, and one whose second half is zeros
    let half: fn(&mut Vec<u8>) = |b| {
        let middle = b.len() / 2;
        b[middle..].fill(0);
    };
    let cut: fn(&mut Vec<u8>) = |b| b.truncate(b.len() - 5000);
    for spoil in [half, cut] {
        let (_dir, path) = copied("z2_padded");
        let file = tag(&path).join(rank(1));
        let mut bytes = fs::read(&file).expect("read");
        spoil(&mut bytes);
        fs::write(&file, bytes).expect("written");
        refused(&repaired(&path), &["zero_pp_rank_1_mp_rank_00_optim_states.pt"]);
    }
    // the only model file of stage 2
    let (_dir, path) = copied("z2_padded");
    fs::remove_file(tag(&path).join("mp_rank_00_model_states.pt")).expect("removed");
    refused(&repaired(&path), &["model"]);
}

/// Writes `values` over the first floats of the first large storage, with a CRC-32 that fits.
fn poison(file: &Path, values: &[f32]) {
    use crate::formats::zip;
    let bytes = fs::read(file).expect("read");
    let opened = fs::OpenOptions::new().read(true).write(true).open(file).expect("opened");
    let members = zip::members(bytes.len() as u64, |at, out| opened.read_exact_at(out, at)).expect("a zip");
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
fn values_that_are_no_numbers_can_not_be_repaired() {
    let (_dir, path) = copied("z2_frozen");
    poison(&tag(&path).join("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), &[f32::NAN, f32::INFINITY]);
    assert!(verify(&path).expect("there").is_sound(), "the file itself is sound");
    refused(&repaired(&path), &["1 NaN and 1 infinite of"]);
    // an older step with numbers is better
    copy_tree(&golden("z2_frozen/global_step3"), &path.join("global_step2"));
    let report = repaired(&path);
    let made = sound(&report, "z2_frozen");
    assert_eq!(fs::read(made.join("latest")).expect("there"), b"global_step2");
}

#[test]
fn model_files_of_stage_3_are_made_from_those_of_the_others() {
    let (_dir, path) = copied("z3_buffers");
    let name = |rank: u32| format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
    for lost in [0u32, 1] {
        let file = tag(&path).join(name(lost));
        let good = fs::read(&file).expect("read");
        for cut in [false, true] {
            match cut {
                false => fs::remove_file(&file).expect("removed"),
                true => fs::write(&file, &good[..good.len() / 2]).expect("cut"),
            }
            let report = repaired(&path);
            let made = sound(&report, "z3_buffers");
            assert!(has(&report.rebuilt, &format!("made from {}", name(1 - lost))), "{report:#?}");
            assert!(has(&report.rebuilt, "buffers are that rank's"), "{report:#?}");
            fs::remove_dir_all(made).expect("removed");
        }
        fs::write(&file, good).expect("restored");
    }
    // frozen weights are cut over the ranks: a part of them is gone
    let (_dir, path) = copied("z3_frozen");
    fs::remove_file(tag(&path).join(name(1))).expect("removed");
    refused(&repaired(&path), &["frozen weights"]);
}

#[test]
fn parts_of_universal_checkpoints_come_from_the_zero_checkpoint_beside() {
    let lost = ["model.norm.weight/exp_avg_sq.pt", "lm_head.weight/fp32.pt", "model.norm.weight/step.pt"];
    for name in lost {
        let (dir, path) = copied("universal_z2");
        let file = path.join("global_step3_universal/zero").join(name);
        fs::remove_file(&file).expect("removed");
        // alone it can't be made whole
        refused(&repaired(&path), &[name.split('/').next().expect("a name")]);
        // of another state, though all names and shapes fit, nothing is taken
        let beside = dir.path().join("zero");
        copy_tree(&golden("z2_frozen"), &beside);
        poison(&beside.join("global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), &[4.5, 3.25]);
        refused(&repaired(&path), &["no ZeRO checkpoint of the same state"]);
        fs::remove_dir_all(&beside).expect("removed");
        copy_tree(&golden("z2_frozen"), &beside);
        let report = repaired(&path);
        sound(&report, "universal_z2");
        assert!(has(&report.rebuilt, name), "{report:#?}");
    }
}

#[test]
fn latest_universal_names_the_universal_checkpoint() {
    let (_dir, path) = copied("universal_z2");
    fs::remove_file(path.join("latest_universal")).expect("removed");
    let report = repaired(&path);
    let made = sound(&report, "universal_z2");
    assert_eq!(fs::read(made.join("latest_universal")).expect("there"), b"global_step3_universal");
}

#[test]
fn lost_random_states_follow_the_rule_and_the_others_stay() {
    // as HF Trainer has it with DeepSpeed inside, which says how many ranks there were
    let (_dir, path) = copied("z2_frozen");
    let beside = ["config.json", "trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"];
    for name in beside.into_iter().chain(["model.safetensors"]) {
        fs::copy(golden("hf_ddp/checkpoint-3").join(name), path.join(name)).expect("copied");
    }
    let good = folder::read(&path, None).expect("readable").expect("there");
    for cut in [false, true] {
        match cut {
            false => fs::remove_file(path.join("rng_state_1.pth")).expect("removed"),
            true => fs::write(path.join("rng_state_1.pth"), b"PK").expect("cut"),
        }
        let report = repaired(&path);
        assert!(report.sound && has(&report.rebuilt, "rng_state_1.pth"), "{report:#?}");
        let made = report.path.clone().expect("made");
        let now = folder::read(&made, None).expect("readable").expect("there");
        assert_eq!(now.ranks.len(), 2);
        for kind in Kind::ALL {
            assert_eq!(now.ranks[0].digest(kind), good.ranks[0].digest(kind), "rank 0 keeps its own {kind}");
        }
        // what all ranks decide alike goes on alike, torch's stream is new and rank 1's own
        assert_eq!(now.ranks[1].digest(Kind::Python), now.ranks[0].digest(Kind::Python));
        assert_eq!(now.ranks[1].digest(Kind::Numpy), now.ranks[0].digest(Kind::Numpy));
        let expected = seed(good.ranks[0].cpu.seed(), 1, 3, Kind::TorchCpu, 1);
        let number = u64::from_le_bytes(expected.0[..8].try_into().expect("8 bytes"));
        assert_eq!(now.ranks[1].cpu.seed(), number);
        fs::remove_dir_all(made).expect("removed");
    }
}

#[test]
fn a_number_of_ranks_that_nothing_says_is_not_made_up() {
    let dir = fast_dir();
    let path = dir.path().join("checkpoint-3");
    copy_tree(&golden("hf_ddp/checkpoint-3"), &path);
    fs::remove_file(path.join("rng_state_1.pth")).expect("removed");
    let report = repaired(&path);
    assert!(report.rebuilt.is_empty() && has(&report.lost, "nothing says how many"), "{report:#?}");
    // the lower rank is known to have been there
    let dir = fast_dir();
    let path = dir.path().join("checkpoint-3");
    copy_tree(&golden("hf_ddp/checkpoint-3"), &path);
    fs::remove_file(path.join("rng_state_0.pth")).expect("removed");
    let report = repaired(&path);
    assert!(report.sound && has(&report.rebuilt, "rng_state_0.pth"), "{report:#?}");
}

#[test]
fn a_broken_newest_checkpoint_of_trainer_is_left_out() {
    let dir = fast_dir();
    let path = dir.path().join("out");
    copy_tree(&golden("hf_ddp/checkpoint-3"), &path.join("checkpoint-3"));
    copy_tree(&golden("hf_ddp/checkpoint-3"), &path.join("checkpoint-6"));
    fs::remove_file(path.join("checkpoint-6/optimizer.pt")).expect("removed");
    fs::write(path.join("checkpoint-6/model.safetensors"), b"short").expect("written");
    let report = repaired(&path);
    assert!(report.sound && has(&report.lost, "checkpoint-6"), "{report:#?}");
    assert_eq!(names(&report.path.expect("made")), ["checkpoint-3"]);
}

#[test]
fn an_index_of_shards_is_made_from_their_headers() {
    let dir = fast_dir();
    let path = dir.path().join("model");
    let source = open(&golden("z2_frozen")).expect("whole");
    let options = crate::GatherOptions { max_shard_size: 20_000, ..crate::GatherOptions::default() };
    crate::gather(&*source, &path, &options, |_, _| ()).expect("gathered");
    let index = path.join("model.safetensors.index.json");
    let read = |path: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path).expect("read")).expect("JSON")
    };
    let good = read(&index);
    for spoil in ["", "{\"weight_map\": {}}", "{"] {
        match spoil {
            "" => fs::remove_file(&index).expect("removed"),
            text => fs::write(&index, text).expect("written"),
        }
        let report = repaired(&path);
        assert!(report.sound, "{report:#?}");
        let made = report.path.expect("made");
        let new = read(&made.join("model.safetensors.index.json"));
        assert_eq!(
            (&new["weight_map"], &new["metadata"]["total_size"]),
            (&good["weight_map"], &good["metadata"]["total_size"])
        );
        fs::remove_dir_all(made).expect("removed");
    }
    // a shard that isn't there can't be made
    let shard = names(&path).into_iter().find(|n| n.ends_with(".safetensors")).expect("a shard");
    fs::remove_file(path.join(shard)).expect("removed");
    refused(&repaired(&path), &["shards are there"]);
}

#[test]
fn weights_of_a_trainer_folder_are_gathered_from_its_deepspeed_state() {
    let (_dir, path) = copied("z2_frozen");
    for name in ["config.json", "trainer_state.json"] {
        fs::copy(golden("hf_ddp/checkpoint-3").join(name), path.join(name)).expect("copied");
    }
    let report = repaired(&path);
    assert!(report.sound && has(&report.rebuilt, "model.safetensors: gathered"), "{report:#?}");
    let made = report.path.expect("made");
    let (own, state) = (open(&made.join("model.safetensors")).expect("whole"), open(&path).expect("whole"));
    let mut compared = 0;
    for info in own.tensors() {
        let got = super::foreign::read(&own, &info.name, info.role).expect("there");
        let want = super::foreign::read(&state, &info.name, Role::Weight).expect("there");
        let rounded: Vec<f32> = want.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
        assert_eq!(got, rounded, "{}", info.name);
        compared += 1;
    }
    assert!(compared > 10);
}

#[test]
fn results_never_take_the_place_of_something_else() {
    let (dir, path) = copied("z2_padded");
    fs::remove_file(path.join("latest")).expect("removed");
    fs::create_dir(dir.path().join("ckpt.repaired")).expect("made");
    let refused = |options: &RepairOptions| repair(&path, options).expect_err("refused").to_string();
    assert!(refused(&RepairOptions::default()).contains("is there already"));
    let inside = RepairOptions { out: Some(path.join("out")), in_place: false };
    assert!(refused(&inside).contains("inside the folder"));
    assert!(repair(&dir.path().join("nowhere"), &RepairOptions::default()).is_err());
    // half of a repair doesn't replace anything
    fs::remove_dir(dir.path().join("ckpt.repaired")).expect("removed");
    fs::remove_file(tag(&path).join("zero_pp_rank_2_mp_rank_00_optim_states.pt")).expect("removed");
    let report = repair(&path, &RepairOptions { out: None, in_place: true }).expect("looked at");
    assert!(!report.sound && report.path.is_none(), "{report:#?}");
    assert_eq!(names(dir.path()), ["ckpt"]);
}

/// Beside the ZeRO checkpoint in `path`, the universal one that is made of it.
fn add_universal(path: &Path) {
    let source = open(path).expect("whole");
    let made = path.with_file_name("universal");
    let options = crate::ConvertOptions::to(crate::Target::Universal);
    crate::convert(&*source, &made, &options, |_, _| ()).expect("converted");
    copy_tree(&made, path);
    fs::remove_dir_all(made).expect("removed");
}

#[test]
fn lost_model_files_come_from_a_universal_checkpoint_of_the_same_state() {
    let third = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    for (name, model) in [
        ("z2_padded", "mp_rank_00_model_states.pt"),
        ("z1_tied", "mp_rank_00_model_states.pt"),
        ("z3_frozen", third),
    ] {
        for damaged in [false, true] {
            let (_dir, path) = copied(name);
            let tag = path.join(fs::read_to_string(path.join("latest")).expect("there").trim());
            let file = tag.join(model);
            // as it is, it can't be had from anywhere
            let good = fs::read(&file).expect("there");
            fs::remove_file(&file).expect("removed");
            refused(&repaired(&path), &["model file"]);
            fs::write(&file, &good).expect("written");
            add_universal(&path);
            match damaged {
                true => fs::write(&file, &good[..good.len() / 2]).expect("written"),
                false => fs::remove_file(&file).expect("removed"),
            }
            let report = repaired(&path);
            let made = sound(&report, name);
            assert!(has(&report.rebuilt, "agree bit for bit"), "{report:#?}");
            assert!(made.join(tag.file_name().expect("a name")).join(model).exists(), "{name}");
        }
    }
}

/// A universal checkpoint of another state is none to rebuild from, though its shapes are the same.
#[test]
fn model_files_are_not_taken_from_another_state() {
    let (_dir, path) = copied("z2_padded");
    add_universal(&path);
    let fp32 = path.join("global_step3_universal/zero/model.norm.weight/fp32.pt");
    let other = path.join("global_step3_universal/zero/model.norm.weight/exp_avg.pt");
    fs::copy(other, fp32).expect("another value");
    fs::remove_file(tag(&path).join("mp_rank_00_model_states.pt")).expect("removed");
    let report = repaired(&path);
    refused(&report, &["model file"]);
    assert!(!has(&report.rebuilt, "model_states"), "{report:#?}");
}

#[test]
fn gathered_weights_beside_our_checkpoints_are_gathered_again() {
    let dir = fast_dir();
    let root = dir.path().join("checkpoints");
    let saved = save(&root, &facts(2, 2, &[("a", &[4]), ("b", &[3, 5])])).expect("saved").path;
    let weights = root.join("weights");
    let options = crate::GatherOptions { dtype: Some(crate::Dtype::BF16), ..Default::default() };
    crate::gather(&crate::Checkpoint::open(&saved).expect("whole"), &weights, &options, |_, _| ())
        .expect("gathered");
    let file = weights.join("model.safetensors");
    let good = fs::read(&file).expect("there");
    assert!(repaired(&root).rebuilt.is_empty());
    for cut in [Some(good.len() / 2), Some(0), None] {
        match cut {
            Some(len) => fs::write(&file, &good[..len]).expect("written"),
            None => fs::remove_file(&file).expect("removed"),
        }
        let report = repaired(&root);
        assert!(report.sound && has(&report.rebuilt, "gathered from step-00000002 as BF16"), "{report:#?}");
        let made = report.path.expect("made");
        assert!(fs::read(made.join("weights/model.safetensors")).expect("there") == good);
        fs::remove_dir_all(made).expect("removed");
    }
    // never gathered: nothing is missing
    fs::remove_dir_all(&weights).expect("removed");
    assert!(repaired(&root).rebuilt.is_empty());
}
