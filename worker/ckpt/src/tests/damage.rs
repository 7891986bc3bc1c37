//! Tests that every flipped byte of a native checkpoint is detected and never loaded.
use super::*;
use crate::error::CkptError;
use crate::layout::native::Checkpoint;
use crate::{
    find_latest_checkpoint, list_checkpoints, open_newest_native, prune_checkpoints, verify_checkpoints,
};
use diagnostic::codes::checkpoint as codes;
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[2]), ("b", &[3])];

/// Reads every tensor of the checkpoint at `path`, which was saved with `facts`. Returns the first
/// error.
///
/// # Panics
/// Panics if a read returns wrong data without an error.
fn read_and_check_tensors(path: &Path, facts: &RunFacts) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.element_count() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.element_count(), &mut out)?;
        assert_eq!(
            out,
            compute_values(t.role, &t.name, facts, t.element_count()),
            "wrong data were returned"
        );
    }
    assert_eq!(checkpoint.run_facts(), facts, "wrong facts were returned");
    Ok(())
}

/// Saves checkpoints of steps 10 and 11, whose names differ in one bit, so that a flipped bit in
/// `latest` could select the other checkpoint. Returns path and facts of the newer checkpoint.
fn save_two_checkpoints(dir: &Path) -> (PathBuf, RunFacts) {
    save_checkpoint(dir, &make_facts(10, 1, WEIGHTS)).expect("saved");
    let facts = make_facts(11, 2, WEIGHTS);
    (save_checkpoint(dir, &facts).expect("saved").path, facts)
}

#[test]
fn every_flipped_byte_is_detected_and_never_loaded() {
    let dir = make_memory_dir();
    let (path, facts) = save_two_checkpoints(dir.path());
    assert!(verify_checkpoints(dir.path()).expect("there").is_sound());
    let mut flips = 0;
    let mut targets = read_tree(&path);
    targets.push((dir.path().join("latest"), fs::read(dir.path().join("latest")).expect("read")));
    assert_eq!(targets.len(), 4, "two shards, the manifest, latest");
    for (file, good) in targets {
        for at in 0..good.len() {
            for mask in [0x01, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= mask;
                fs::write(&file, &bad).expect("written");
                let report = verify_checkpoints(dir.path()).expect("there");
                assert!(!report.is_sound(), "flip {mask:#x} at {at} of {} is not detected", file.display());
                let loaded = read_and_check_tensors(&path, &facts);
                assert!(loaded.is_err() || file.ends_with("latest"), "flip at {at} of {}", file.display());
                flips += 1;
            }
        }
        fs::write(&file, &good).expect("restored");
    }
    assert!(flips > 5000, "{flips}");
    assert!(verify_checkpoints(dir.path()).expect("there").is_sound());
    read_and_check_tensors(&path, &facts).expect("intact again");
}

#[test]
fn every_wrong_file_length_is_detected() {
    let dir = make_memory_dir();
    let (path, facts) = save_two_checkpoints(dir.path());
    for (file, good) in read_tree(&path) {
        for len in (0..good.len()).chain([good.len() + 1, good.len() + 5000]) {
            let mut bad = good.clone();
            bad.resize(len, 0);
            fs::write(&file, &bad).expect("written");
            assert!(
                !verify_checkpoints(&path).expect("there").is_sound(),
                "{len} bytes of {}",
                file.display()
            );
            assert!(read_and_check_tensors(&path, &facts).is_err(), "{len} bytes of {}", file.display());
        }
        fs::write(&file, &good).expect("restored");
    }
    assert!(verify_checkpoints(&path).expect("there").is_sound());
}

#[test]
fn verify_reports_all_problems_at_once() {
    let dir = make_memory_dir();
    let (path, _) = save_two_checkpoints(dir.path());
    fs::remove_file(path.join("shard-00000-of-00002.safetensors")).expect("removed");
    fs::write(path.join("unexpected"), "x").expect("written");
    let shard = path.join("shard-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    *bytes.last_mut().expect("not empty") ^= 4;
    bytes.push(0);
    fs::write(&shard, bytes).expect("written");
    fs::write(dir.path().join("latest"), "step-00000011\n").expect("written");
    let report = verify_checkpoints(dir.path()).expect("there");
    assert_eq!(report.all_problems().count(), 5, "{report:?}");
    insta::assert_snapshot!("damage_all_problems", format_problems(&report, dir.path()));
}

#[test]
fn damage_is_reported_by_block_and_other_tensors_stay_readable() {
    let dir = make_memory_dir();
    let facts = make_facts(1, 1, &[("first", &[300_000]), ("second", &[300_000]), ("third", &[5])]);
    let path = save_checkpoint(dir.path(), &facts).expect("saved").path;
    let shard = path.join("shard-00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    // `first` is in bytes 0..1.2 M, `second` in 1.2..2.4 M, so this byte of block 2 belongs to
    // `second`
    bytes[(2 << 20) + 17] ^= 0x20;
    fs::write(&shard, bytes).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("sizes are right");
    let mut out = vec![0.0; 300_000];
    checkpoint
        .read_f32("first", TensorRole::Weight, 0..300_000, &mut out)
        .expect("intact blocks are readable");
    assert_eq!(out, compute_values(TensorRole::Weight, "first", &facts, 300_000));
    let error = checkpoint.read_f32("second", TensorRole::Weight, 0..300_000, &mut out).expect_err("damaged");
    let CkptError::Damaged { damage, .. } = &error else { panic!("{error}") };
    assert_eq!((damage.block, damage.tensors[0].as_str()), (Some(2), "weight/second"));
    assert!(!damage.tensors.contains(&"weight/first".to_owned()));
    let report = verify_checkpoints(&path).expect("there");
    assert_eq!(report.checkpoints[0].problems.len(), 1);
    assert_eq!(report.checkpoints[0].problems[0], **damage);
}

#[test]
fn partly_deleted_checkpoints_are_skipped() {
    let dir = make_memory_dir();
    let (path, _) = save_two_checkpoints(dir.path());
    fs::remove_file(path.join("shard-00001-of-00002.safetensors")).expect("removed");
    let found = open_newest_native(dir.path()).expect("the older one");
    assert_eq!(found.checkpoint.run_facts().step, 10);
    insta::assert_snapshot!("damage_skipped_checkpoint", format_error(&found.skipped[0], dir.path()));
    // a checkpoint without manifest is not listed, but `latest` still names it
    fs::remove_file(path.join("manifest.json")).expect("removed");
    assert_eq!(list_checkpoints(dir.path()).expect("listed").len(), 1);
    assert!(matches!(find_latest_checkpoint(dir.path()), Err(CkptError::Missing { .. })));
    assert_eq!(open_newest_native(dir.path()).expect("the older one").checkpoint.run_facts().step, 10);
    let error = open_newest_native(&path).expect_err("no manifest");
    assert_eq!(error.code(), codes::CHECKPOINT_MANIFEST_MISSING, "{error}");
    assert!(!verify_checkpoints(dir.path()).expect("there").is_sound());
}

#[test]
fn only_checkpoint_directories_are_listed() {
    let dir = make_memory_dir();
    let root = dir.path();
    save_checkpoint(root, &make_facts(5, 1, WEIGHTS)).expect("saved");
    save_checkpoint(root, &make_facts(123_456_789, 1, WEIGHTS)).expect("saved");
    fs::create_dir(root.join("step-00000006")).expect("made");
    copy_tree(&root.join("step-00000005"), &root.join("step-7"));
    copy_tree(&root.join("step-00000005"), &root.join("step-00000008.bak"));
    fs::write(root.join("step-00000009"), "a file").expect("written");
    std::os::unix::fs::symlink("step-00000005", root.join("step-00000010")).expect("linked");
    let steps: Vec<u64> = list_checkpoints(root).expect("listed").into_iter().map(|(s, _)| s).collect();
    assert_eq!(steps, [123_456_789, 5]);
    assert!(list_checkpoints(&root.join("nowhere")).expect("nothing").is_empty());
}

#[test]
fn pruning_keeps_the_newest_step_and_the_step_that_latest_names() {
    let dir = make_memory_dir();
    let root = dir.path();
    let steps = || list_checkpoints(root).expect("listed").into_iter().map(|(s, _)| s).collect::<Vec<_>>();
    for step in [40, 10, 30, 20] {
        save_checkpoint(root, &make_facts(step, 1, WEIGHTS)).expect("saved");
    }
    assert!(prune_checkpoints(root, 0).expect("nothing to do").is_empty());
    assert_eq!(steps(), [40, 30, 20, 10]);
    // step 20 was saved last
    assert_eq!(
        prune_checkpoints(root, 1).expect("pruned"),
        [root.join("step-00000030"), root.join("step-00000010")]
    );
    assert_eq!(steps(), [40, 20]);
    assert_eq!(list_entry_names(root), ["latest", "step-00000020", "step-00000040"]);
}
