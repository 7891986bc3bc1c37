//! Every flip is found, and never loaded.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::error::CkptError;
use crate::{latest, list, newest, prune, verify};
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[2]), ("b", &[3])];

/// Reads everything; `Err` when anything is refused. What is read must be right.
fn load(path: &Path, facts: &Facts) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.elements() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.elements(), &mut out)?;
        assert_eq!(out, values(t.role, &t.name, facts, t.elements()), "wrong data were handed out");
    }
    assert_eq!(checkpoint.facts(), facts, "wrong facts were handed out");
    Ok(())
}

/// Two checkpoints, so that a flip in `latest` could name the other one.
fn two(dir: &Path) -> (PathBuf, Facts) {
    save(dir, &facts(10, 1, WEIGHTS)).expect("saved");
    let facts = facts(11, 2, WEIGHTS);
    (save(dir, &facts).expect("saved").path, facts)
}

#[test]
fn every_flip_of_every_byte_is_found_and_never_loaded() {
    let dir = fast_dir();
    let (path, facts) = two(dir.path());
    assert!(verify(dir.path()).expect("there").is_sound());
    let mut flips = 0;
    let mut targets = files(&path);
    targets.push((dir.path().join("latest"), fs::read(dir.path().join("latest")).expect("read")));
    assert_eq!(targets.len(), 4, "two shards, the manifest, latest");
    for (file, good) in targets {
        for at in 0..good.len() {
            for mask in [0x01, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= mask;
                fs::write(&file, &bad).expect("written");
                let report = verify(dir.path()).expect("there");
                assert!(!report.is_sound(), "flip {mask:#x} at {at} of {} is not found", file.display());
                let loaded = load(&path, &facts);
                assert!(loaded.is_err() || file.ends_with("latest"), "flip at {at} of {}", file.display());
                flips += 1;
            }
        }
        fs::write(&file, &good).expect("restored");
    }
    assert!(flips > 5000, "{flips}");
    assert!(verify(dir.path()).expect("there").is_sound());
    load(&path, &facts).expect("whole again");
}

#[test]
fn every_length_but_the_right_one_is_found() {
    let dir = fast_dir();
    let (path, facts) = two(dir.path());
    for (file, good) in files(&path) {
        for len in (0..good.len()).chain([good.len() + 1, good.len() + 5000]) {
            let mut bad = good.clone();
            bad.resize(len, 0);
            fs::write(&file, &bad).expect("written");
            assert!(!verify(&path).expect("there").is_sound(), "{len} bytes of {}", file.display());
            assert!(load(&path, &facts).is_err(), "{len} bytes of {}", file.display());
        }
        fs::write(&file, &good).expect("restored");
    }
    assert!(verify(&path).expect("there").is_sound());
}

#[test]
fn all_problems_are_named_at_once() {
    let dir = fast_dir();
    let (path, _) = two(dir.path());
    fs::remove_file(path.join("shard-00000-of-00002.safetensors")).expect("removed");
    fs::write(path.join("stranger"), "x").expect("written");
    let shard = path.join("shard-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    *bytes.last_mut().expect("not empty") ^= 4;
    bytes.push(0);
    fs::write(&shard, bytes).expect("written");
    fs::write(dir.path().join("latest"), "step-00000011\n").expect("written");
    let report = verify(dir.path()).expect("there");
    let text: Vec<String> = report.problems().map(|(_, p)| p.to_string()).collect();
    let has = |parts: &[&str]| text.iter().any(|t| parts.iter().all(|p| t.contains(p)));
    assert!(has(&["latest", "BLAKE3"]), "{text:?}");
    assert!(has(&["shard-00000", "missing"]), "{text:?}");
    assert!(has(&["shard-00001", "1 bytes more"]), "{text:?}");
    assert!(has(&["shard-00001", "block 0", "weight/a"]), "{text:?}");
    assert!(has(&["stranger", "does not belong"]), "{text:?}");
    assert_eq!(text.len(), 5, "{text:?}");
}

#[test]
fn damage_names_its_block_and_tensors_and_spares_the_others() {
    let dir = fast_dir();
    let facts = facts(1, 1, &[("first", &[300_000]), ("second", &[300_000]), ("third", &[5])]);
    let path = save(dir.path(), &facts).expect("saved").path;
    let shard = path.join("shard-00000-of-00001.safetensors");
    let mut bytes = fs::read(&shard).expect("read");
    // weights first = bytes 0..1.2 M, second = 1.2..2.4 M: this is in block 2, where only `second` and what follows lie
    bytes[(2 << 20) + 17] ^= 0x20;
    fs::write(&shard, bytes).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("sizes are right");
    let mut out = vec![0.0; 300_000];
    checkpoint.read_f32("first", Role::Weight, 0..300_000, &mut out).expect("untouched blocks are readable");
    assert_eq!(out, values(Role::Weight, "first", &facts, 300_000));
    let error = checkpoint.read_f32("second", Role::Weight, 0..300_000, &mut out).expect_err("damaged");
    let CkptError::Damaged { damage, .. } = &error else { panic!("{error}") };
    assert_eq!((damage.block, damage.tensors[0].as_str()), (Some(2), "weight/second"));
    assert!(!damage.tensors.contains(&"weight/first".to_owned()));
    assert!(error.to_string().contains("block 2 (holds weight/second"), "{error}");
    let report = verify(&path).expect("there");
    assert_eq!(report.checkpoints[0].problems.len(), 1);
    assert_eq!(&report.checkpoints[0].problems[0], damage);
}

#[test]
fn half_deleted_checkpoints_are_passed_over() {
    let dir = fast_dir();
    let (path, _) = two(dir.path());
    fs::remove_file(path.join("shard-00001-of-00002.safetensors")).expect("removed");
    let found = newest(dir.path()).expect("the older one");
    assert_eq!(found.checkpoint.facts().step, 10);
    assert!(
        found.skipped[0].to_string().contains("shard-00001-of-00002.safetensors is missing"),
        "{:?}",
        found.skipped
    );
    // without a manifest it is not even listed, but `latest` still names it
    fs::remove_file(path.join("manifest.json")).expect("removed");
    assert_eq!(list(dir.path()).expect("listed").len(), 1);
    assert!(matches!(latest(dir.path()), Err(CkptError::Missing { .. })));
    assert_eq!(newest(dir.path()).expect("the older one").checkpoint.facts().step, 10);
    assert!(newest(&path).expect_err("nothing there").to_string().contains("cut short"));
    assert!(!verify(dir.path()).expect("there").is_sound());
}

#[test]
fn only_real_checkpoints_are_listed() {
    let dir = fast_dir();
    let root = dir.path();
    save(root, &facts(5, 1, WEIGHTS)).expect("saved");
    save(root, &facts(123_456_789, 1, WEIGHTS)).expect("saved");
    fs::create_dir(root.join("step-00000006")).expect("made");
    copy_tree(&root.join("step-00000005"), &root.join("step-7"));
    copy_tree(&root.join("step-00000005"), &root.join("step-00000008.bak"));
    fs::write(root.join("step-00000009"), "a file").expect("written");
    std::os::unix::fs::symlink("step-00000005", root.join("step-00000010")).expect("linked");
    let steps: Vec<u64> = list(root).expect("listed").into_iter().map(|(s, _)| s).collect();
    assert_eq!(steps, [123_456_789, 5]);
    assert!(list(&root.join("nowhere")).expect("nothing").is_empty());
}

#[test]
fn pruning_keeps_the_newest_and_the_one_latest_names() {
    let dir = fast_dir();
    let root = dir.path();
    let steps = || list(root).expect("listed").into_iter().map(|(s, _)| s).collect::<Vec<_>>();
    for step in [40, 10, 30, 20] {
        save(root, &facts(step, 1, WEIGHTS)).expect("saved");
    }
    assert!(prune(root, 0).expect("nothing to do").is_empty());
    assert_eq!(steps(), [40, 30, 20, 10]);
    // the last one saved was 20
    assert_eq!(prune(root, 1).expect("pruned"), [root.join("step-00000030"), root.join("step-00000010")]);
    assert_eq!(steps(), [40, 20]);
    assert_eq!(names(root), ["latest", "step-00000020", "step-00000040"]);
}
