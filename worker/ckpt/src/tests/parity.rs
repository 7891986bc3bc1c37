//! Tests that a repair with parity restores one lost or damaged file bit for bit.
use super::*;
use crate::codec::disk::BLOCK_BYTES;
use crate::layout::native::{Checkpoint, compute_parity_blocks_of_rank};
use crate::save::{commit_save_with_parity, write_parity};
use crate::{RepairOptions, repair_checkpoints, verify_checkpoints};
use std::fs;

/// Saves a checkpoint of `facts` with parity to the checkpoint directory `root`. Returns the path
/// of the checkpoint.
fn save_with_parity(root: &Path, facts: &RunFacts) -> PathBuf {
    let staging = StagingDir::create(root, facts.step, 0).expect("begun");
    let reports = write_shards(staging.path(), facts).expect("written");
    let stripe = |rank| write_parity(staging.path(), rank, facts.world, &reports).expect("written");
    let parity = (0..facts.world).map(stripe).collect();
    commit_save_with_parity(staging, facts.clone(), reports, parity).expect("complete").path
}

fn make_repair_options(dir: &Path) -> RepairOptions {
    RepairOptions { out: Some(dir.join("out")), in_place: false }
}

fn assert_same_files(a: &Path, b: &Path) {
    assert_eq!(list_entry_names(a), list_entry_names(b));
    for name in list_entry_names(a) {
        assert!(fs::read(a.join(&name)).expect("read") == fs::read(b.join(&name)).expect("read"), "{name}");
    }
}

/// Makes facts with some MB per rank, so that each shard has several blocks, of which the last one
/// is partial.
fn make_large_facts(world: u32) -> RunFacts {
    make_facts(7, world, &[("a", &[700, 1001]), ("b", &[3]), ("c", &[123_457])])
}

#[test]
fn any_single_lost_truncated_or_flipped_file_is_rebuilt() {
    for world in 2..=5 {
        let dir = make_memory_dir();
        let facts = make_large_facts(world);
        let path = save_with_parity(dir.path(), &facts);
        assert!(verify_checkpoints(dir.path()).expect("there").is_sound());
        let good = dir.path().join("good");
        copy_tree(&path, &good);
        let files: Vec<String> =
            list_entry_names(&path).into_iter().filter(|n| n != "manifest.json").collect();
        assert_eq!(files.len(), 2 * world as usize);
        for (i, name) in files.iter().enumerate() {
            let sound = fs::read(good.join(name)).expect("read");
            let file = path.join(name);
            for damage in 0..4 {
                let mut bad = sound.clone();
                let at = (i * 7919 + damage * 104_729) % bad.len().max(1);
                match damage {
                    0 => fs::remove_file(&file).expect("removed"),
                    1 if bad.is_empty() => continue,
                    1 => fs::write(&file, &bad[..at]).expect("cut"),
                    2 if bad.is_empty() => continue,
                    2 => {
                        bad[at] ^= 0x10;
                        fs::write(&file, &bad).expect("flipped");
                    }
                    _ => {
                        bad.push(1);
                        fs::write(&file, &bad).expect("longer");
                    }
                }
                assert!(!verify_checkpoints(&path).expect("there").is_sound(), "{name} {damage}");
                let report = repair_checkpoints(&path, &make_repair_options(dir.path())).expect("repaired");
                assert!(report.sound && report.lost.is_empty(), "{name} {damage}: {report:?}");
                assert!(report.rebuilt.len() == 1 && report.rebuilt[0].contains(name), "{report:?}");
                assert_same_files(&dir.path().join("out"), &good);
                fs::remove_dir_all(dir.path().join("out")).expect("removed");
                // the original is unchanged
                assert!(fs::read(&file).ok().is_none_or(|b| b != sound));
                fs::write(&file, &sound).expect("restored");
            }
        }
        assert_contains_saved(&Checkpoint::open(&path).expect("complete"), &facts);
    }
}

#[test]
fn damage_of_several_files_is_rebuilt_unless_one_block_index_is_hit_twice() {
    let dir = make_memory_dir();
    let path = save_with_parity(dir.path(), &make_large_facts(3));
    let good = dir.path().join("good");
    copy_tree(&path, &good);
    let shard = |r: u32| path.join(format!("shard-{r:05}-of-00003.safetensors"));
    let flip = |file: &Path, at: usize| {
        let mut bytes = fs::read(file).expect("read");
        bytes[at] ^= 1;
        fs::write(file, bytes).expect("written");
    };
    flip(&shard(0), 5);
    flip(&shard(1), BLOCK_BYTES + 5);
    flip(&shard(2), 2 * BLOCK_BYTES + 5);
    let report = repair_checkpoints(&path, &make_repair_options(dir.path())).expect("repaired");
    assert!(report.sound && report.rebuilt.len() == 3, "{report:?}");
    assert_same_files(&dir.path().join("out"), &good);
    fs::remove_dir_all(dir.path().join("out")).expect("removed");
    // a second file with damage in block 0 can't be rebuilt
    flip(&shard(1), 9);
    let report = repair_checkpoints(&path, &make_repair_options(dir.path())).expect("looked at");
    assert!(!report.sound, "{report:?}");
    insta::assert_snapshot!("parity_lost_blocks", replace_dir(&report.lost.join("\n"), dir.path()));
}

#[test]
fn stripes_cover_the_longest_shard_for_any_shard_sizes() {
    for sizes in [
        vec![0u64],
        vec![5],
        vec![5 << 20, 1, 0],
        vec![1 << 20, (1 << 20) + 1],
        vec![17 << 20; 5],
        vec![0, 0],
    ] {
        let (longest, world) = (sizes.iter().copied().max().unwrap_or(0), sizes.len() as u32);
        let stripes: Vec<_> = (0..world).map(|r| compute_parity_blocks_of_rank(&sizes, r)).collect();
        assert_eq!(stripes.iter().map(|s| s.1).sum::<u64>(), longest, "{sizes:?}");
        assert_eq!(stripes[0].0.start, 0);
        assert!(stripes.windows(2).all(|w| w[0].0.end == w[1].0.start), "{sizes:?}");
    }
}

#[test]
fn parity_takes_at_most_one_nth_of_the_shards() {
    let dir = make_memory_dir();
    let path = save_with_parity(dir.path(), &make_large_facts(4));
    let bytes = |start: &str| -> u64 {
        let files = list_entry_names(&path).into_iter().filter(|n| n.starts_with(start));
        files.map(|n| fs::metadata(path.join(n)).expect("there").len()).sum()
    };
    let padding = 4096;
    assert!(bytes("parity-") <= bytes("shard-") / 4 + padding, "{} {}", bytes("parity-"), bytes("shard-"));
}

#[test]
fn the_manifest_version_is_1_without_parity_and_2_with_parity() {
    let dir = make_memory_dir();
    let text =
        |path: &Path| String::from_utf8(fs::read(path.join("manifest.json")).expect("read")).expect("text");
    let old = text(&save_checkpoint(dir.path(), &make_facts(1, 2, &[("a", &[4])])).expect("saved").path);
    assert!(old.contains("\"version\":1") && !old.contains("parity"), "{old}");
    assert!(text(&save_with_parity(dir.path(), &make_facts(2, 2, &[("a", &[4])]))).contains("\"version\":2"));
}

#[test]
fn a_directory_is_repaired_and_latest_names_the_newest_sound_step() {
    let dir = make_memory_dir();
    let root = dir.path().join("checkpoints");
    save_checkpoint(&root, &make_facts(1, 2, &[("a", &[4])])).expect("saved");
    let second = save_with_parity(&root, &make_facts(2, 2, &[("a", &[4])]));
    let third = save_checkpoint(&root, &make_facts(3, 2, &[("a", &[4])])).expect("saved").path;
    fs::remove_file(second.join("shard-00001-of-00002.safetensors")).expect("removed");
    fs::remove_file(third.join("shard-00001-of-00002.safetensors")).expect("removed");
    let before = read_tree(&root);
    let report = repair_checkpoints(&root, &RepairOptions::default()).expect("repaired");
    let made = dir.path().join("checkpoints.repaired");
    assert_eq!((report.path.as_deref(), report.sound), (Some(made.as_path()), true), "{report:?}");
    assert_eq!(report.newest.as_deref(), Some("step-00000002"));
    insta::assert_snapshot!("parity_lost_step", replace_dir(&report.lost.join("\n"), dir.path()));
    assert_eq!(list_entry_names(&made), ["latest", "step-00000001", "step-00000002"]);
    assert!(verify_checkpoints(&made).expect("there").is_sound());
    assert_contains_saved(
        &crate::open_newest_native(&made).expect("whole").checkpoint,
        &make_facts(2, 2, &[("a", &[4])]),
    );
    assert!(read_tree(&root) == before, "the original is unchanged");
    // a repair in place keeps the original under another name
    fs::remove_dir_all(&made).expect("removed");
    let report = repair_checkpoints(&root, &RepairOptions { out: None, in_place: true }).expect("repaired");
    let kept = dir.path().join("checkpoints.before-repair");
    assert_eq!((report.path, report.kept.clone()), (Some(root.clone()), Some(kept.clone())));
    assert_eq!(list_entry_names(&root), ["latest", "step-00000001", "step-00000002"]);
    assert!(
        kept.join("step-00000003").is_dir()
            && !kept.join("step-00000002/shard-00001-of-00002.safetensors").exists()
    );
    assert_eq!(list_entry_names(dir.path()), ["checkpoints", "checkpoints.before-repair"]);
    // a sound directory is not changed
    let report = repair_checkpoints(&root, &RepairOptions::default()).expect("looked at");
    assert!(report.sound && report.rebuilt.is_empty() && report.path == Some(root), "{report:?}");
}

/// The child process of `a_kill_at_any_fault_point_leaves_a_complete_checkpoint`, with the argument
/// `n:directory`. Saves with parity, and is killed at the fault point `n`. Does nothing outside of
/// a child process.
#[test]
fn child_process_of_a_killed_save_with_parity() {
    let Some(argument) = read_child_argument() else { return };
    let (n, root) = argument.split_once(':').expect("n:root");
    let root = Path::new(root);
    crate::fault_points::arm_fault_points(n.parse().expect("a number"));
    save_with_parity(root, &make_facts(20, 2, &[("a", &[9]), ("b", &[5])]));
    fs::write(root.join("passed"), crate::fault_points::count_passed_points().to_string()).expect("written");
}

#[test]
fn a_kill_at_any_fault_point_leaves_a_complete_checkpoint() {
    let name = "tests::parity::child_process_of_a_killed_save_with_parity";
    let old = make_facts(10, 2, &[("a", &[9]), ("b", &[5])]);
    let dir = make_memory_dir();
    save_checkpoint(dir.path(), &old).expect("saved");
    run_child_test(name, &format!("0:{}", dir.path().display()));
    let points: u64 =
        fs::read_to_string(dir.path().join("passed")).expect("written").parse().expect("a number");
    assert!(points > 30, "{points}");
    for n in 1..=points {
        let dir = make_memory_dir();
        save_checkpoint(dir.path(), &old).expect("saved");
        let run = run_child_test(name, &format!("{n}:{}", dir.path().display()));
        assert!(!run.status.success(), "point {n}");
        let found = crate::open_newest_native(dir.path()).expect("a complete checkpoint").checkpoint;
        let expected = make_facts(found.run_facts().step, 2, &[("a", &[9]), ("b", &[5])]);
        assert_contains_saved(&found, &expected);
        assert!(verify_checkpoints(found.path()).expect("there").is_sound(), "point {n}");
    }
}
