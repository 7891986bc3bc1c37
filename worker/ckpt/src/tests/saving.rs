//! Saves that must not become checkpoints, and what a save leaves behind.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::commit::commit;
use crate::error::CkptError;
use crate::{latest, list};
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[4]), ("b", &[2, 3])];

/// Touches what is about to be committed.
type Change = Box<dyn FnOnce(&mut Facts, &mut Vec<ShardReport>, &Path)>;

/// Saves after `change` has touched the facts and the reports; the refusal's text.
fn refused(change: impl FnOnce(&mut Facts, &mut Vec<ShardReport>, &Path)) -> String {
    let dir = fast_dir();
    let old = facts(1, 2, WEIGHTS);
    save(dir.path(), &old).expect("saved");
    let mut facts = facts(2, 2, WEIGHTS);
    let staging = Staging::begin(dir.path(), 2, 0).expect("begun");
    let mut reports = write_shards(staging.path(), &facts).expect("written");
    change(&mut facts, &mut reports, staging.path());
    let error = commit(staging, facts, reports).expect_err("refused");
    assert!(matches!(error, CkptError::Invalid { .. }), "{error:?}");
    assert_eq!(names(dir.path()), ["latest", "step-00000001"], "nothing is left of it");
    assert_holds(
        &Checkpoint::open(&latest(dir.path()).expect("sound").expect("there")).expect("complete"),
        &old,
    );
    error.to_string()
}

#[test]
fn incomplete_or_doubled_tensors_are_refused() {
    let cases: Vec<(&str, Change)> = vec![
        ("weight/a: elements 0..2 are held by no shard", Box::new(|_, r, _| drop(r[0].pieces.remove(0)))),
        ("weight/a: elements 1..2 are held twice", Box::new(|_, r, _| r[1].pieces[0].start = 1)),
        ("weight/a: elements 4..5 are beyond its end", Box::new(|_, r, _| r[1].pieces[0].start = 3)),
        ("exp_avg/b: elements 3..6 are held by no shard", Box::new(|_, r, _| drop(r[1].pieces.remove(3)))),
        ("weight/c is held by no shard", Box::new(|f, _, _| f.model.weights.push(shape("c", &[1])))),
        ("is no tensor of the model", Box::new(|f, _, _| drop(f.model.weights.pop()))),
        (
            "weight/b: elements 5..6 are beyond its end",
            Box::new(|f, _, _| f.model.weights[1].shape = vec![5]),
        ),
        (
            "exp_avg_sq/a is held by no shard",
            Box::new(|_, r, _| {
                for report in r {
                    report.pieces.retain(|p| (p.role, p.name.as_str()) != (Role::ExpAvgSq, "a"));
                }
            }),
        ),
        (
            "buffer/inv_freq is held by no shard",
            Box::new(|f, _, _| f.model.buffers.push(shape("inv_freq", &[2]))),
        ),
        ("reports of ranks [0] for a world of 2", Box::new(|_, r, _| drop(r.pop()))),
        ("reports of ranks [0, 0]", Box::new(|_, r, _| r[1].rank = 0)),
        ("is not a shard of a world of 2", Box::new(|_, r, _| r[1].world = 3)),
        ("is not a shard of a world of 2", Box::new(|_, r, _| r[1].file = "../shard".into())),
        ("bytes 0..8 are not in shard 0", Box::new(|_, r, _| r[0].pieces[0].offset = 0)),
        ("belong to two tensors", Box::new(|_, r, _| r[0].pieces[1].offset = r[0].pieces[0].offset)),
        ("begun at step 2, committed at step 3", Box::new(|f, _, _| f.step = 3)),
        ("found no such file", Box::new(|_, r, dir| fs::remove_file(dir.join(&r[0].file)).expect("removed"))),
        ("should have", Box::new(|_, r, dir| fs::write(dir.join(&r[0].file), "short").expect("written"))),
        ("no file name for a tokenizer", Box::new(|f, _, _| f.tokenizer[0].name = "../config.json".into())),
        (
            "is tied to",
            Box::new(|f, _, _| f.model.ties.push(crate::Tie { alias: "a".into(), target: "b".into() })),
        ),
    ];
    for (reason, change) in cases {
        let why = refused(change);
        assert!(why.contains(reason), "{why:?} lacks {reason:?}");
    }
}

fn shape(name: &str, shape: &[u64]) -> WeightShape {
    WeightShape { name: name.into(), shape: shape.into() }
}

#[test]
fn frozen_weights_need_no_optimizer_state_and_others_do() {
    let dir = fast_dir();
    let mut facts = facts(1, 1, WEIGHTS);
    facts.model.frozen = vec!["b".into()];
    facts.model.buffers = vec![shape("scale", &[])];
    let save = |roles: &[(&str, Role)]| {
        let staging = Staging::begin(dir.path(), 1, 0)?;
        let held: Vec<_> = roles
            .iter()
            .map(|&(n, r)| {
                (n, r, vec![1.5f32; [4, 6, 1][usize::from(n == "b") + 2 * usize::from(n == "scale")]])
            })
            .collect();
        let pieces: Vec<Piece<'_>> = held
            .iter()
            .map(|(name, role, data)| Piece { name, role: *role, start_element: 0, data: data[..].into() })
            .collect();
        let report = write_shard(staging.path(), 0, 1, &pieces)?;
        commit(staging, facts.clone(), vec![report])
    };
    let weights = [("a", Role::Weight), ("b", Role::Weight), ("scale", Role::Buffer)];
    let with = |more: &[(&'static str, Role)]| [&weights[..], more].concat();
    save(&weights).expect("no optimizer state at all is fine");
    let path = save(&with(&[("a", Role::Momentum)])).expect("complete").path;
    let checkpoint = Checkpoint::open(&path).expect("complete");
    assert!(checkpoint.holds("a", Role::Momentum) && !checkpoint.holds("b", Role::Momentum));
    let mut scale = [0.0];
    checkpoint.read_f32("scale", Role::Buffer, 0..1, &mut scale).expect("there");
    assert_eq!(scale, [1.5]);
    let error = save(&with(&[("b", Role::Momentum)])).expect_err("a is trained").to_string();
    assert!(error.contains("momentum/a is held by no shard"), "{error}");
}

#[test]
fn a_piece_is_given_once() {
    let dir = fast_dir();
    let staging = Staging::begin(dir.path(), 1, 0).expect("begun");
    let piece = Piece { name: "a", role: Role::Weight, start_element: 0, data: (&[1.0][..]).into() };
    let error = write_shard(staging.path(), 0, 1, &[piece, piece]).expect_err("twice").to_string();
    assert!(error.contains("rank 0 gives weight/a@0 twice"), "{error}");
    assert!(write_shard(staging.path(), 1, 1, &[]).is_err());
}

#[test]
fn an_abandoned_save_leaves_nothing() {
    let dir = fast_dir();
    let root = dir.path().join("deep/er");
    let staging = Staging::begin(&root, 1, 0).expect("begun");
    write_shards(staging.path(), &facts(1, 2, WEIGHTS)).expect("written");
    assert!(list(&root).expect("listable").is_empty(), "a save in progress is no checkpoint");
    drop(staging);
    assert!(names(&root).is_empty());
}

#[test]
fn two_saves_at_once_are_refused() {
    let dir = fast_dir();
    let first = Staging::begin(dir.path(), 1, 0).expect("begun");
    let second = Staging::begin(dir.path(), 2, 0).map(drop).expect_err("busy");
    assert!(matches!(second, CkptError::Busy { .. }), "{second}");
    assert!(first.path().is_dir(), "the running one is untouched");
    drop(first);
    Staging::begin(dir.path(), 2, 0).expect("free again");
}

#[test]
fn a_file_in_the_way_is_named() {
    let dir = fast_dir();
    let file = dir.path().join("file");
    fs::write(&file, "x").expect("written");
    for root in [file.clone(), file.join("below")] {
        let error = Staging::begin(&root, 1, 0).map(drop).expect_err("refused").to_string();
        assert!(error.contains("a file is in the way"), "{error}");
    }
}

#[test]
fn the_same_facts_come_back_bit_for_bit() {
    let dir = fast_dir();
    let mut facts = facts(1, 1, WEIGHTS);
    facts.groups = json!([{"lr": 0.1 + 0.2, "eps": 1e-308, "steps": u64::MAX}]);
    facts.tokenizer[0].text = "\u{0}\u{1f600}\"\\ \u{2028}".into();
    let path = save(dir.path(), &facts).expect("saved").path;
    assert_holds(&Checkpoint::open(&path).expect("complete"), &facts);
}
