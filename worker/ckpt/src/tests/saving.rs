//! Rejected saves leave no checkpoint and no temporary files.
use super::*;
use crate::checkpoint::Checkpoint;
use crate::commit::commit;
use crate::error::CkptError;
use crate::{latest, list};
use std::fs;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[4]), ("b", &[2, 3])];

/// Changes what is about to be committed.
type Change = Box<dyn FnOnce(&mut RunFacts, &mut Vec<ShardReport>, &Path)>;

/// Commits a save after `change`, and describes the error.
fn commit_error(change: impl FnOnce(&mut RunFacts, &mut Vec<ShardReport>, &Path)) -> String {
    let dir = memory_dir();
    let old = facts(1, 2, WEIGHTS);
    save(dir.path(), &old).expect("saved");
    let mut facts = facts(2, 2, WEIGHTS);
    let staging = Staging::begin(dir.path(), 2, 0).expect("begun");
    let mut reports = write_shards(staging.path(), &facts).expect("written");
    change(&mut facts, &mut reports, staging.path());
    let error = commit(staging, facts, reports).expect_err("rejected");
    assert!(matches!(error, CkptError::InvalidSave(_)), "{error:?}");
    assert_eq!(entry_names(dir.path()), ["latest", "step-00000001"], "no temporary files remain");
    assert_holds(
        &Checkpoint::open(&latest(dir.path()).expect("sound").expect("there")).expect("complete"),
        &old,
    );
    describe(&error, dir.path())
}

#[test]
fn inconsistent_saves_are_rejected() {
    let cases: Vec<(&str, Change)> = vec![
        ("first piece of a removed", Box::new(|_, r, _| drop(r[0].pieces.remove(0)))),
        ("second piece of a begins one element early", Box::new(|_, r, _| r[1].pieces[0].start = 1)),
        ("second piece of a begins one element late", Box::new(|_, r, _| r[1].pieces[0].start = 3)),
        ("second piece of exp_avg/b removed", Box::new(|_, r, _| drop(r[1].pieces.remove(3)))),
        ("unsaved weight added to the model", Box::new(|f, _, _| f.model.weights.push(shape("c", &[1])))),
        (
            "weight removed from the model",
            Box::new(|f, r, _| {
                f.model.weights.pop();
                for report in r {
                    report.pieces.retain(|p| p.name != "b" || p.role == TensorRole::Weight);
                }
            }),
        ),
        ("weight of the model is smaller", Box::new(|f, _, _| f.model.weights[1].shape = vec![5])),
        (
            "exp_avg_sq of a removed",
            Box::new(|_, r, _| {
                for report in r {
                    report.pieces.retain(|p| (p.role, p.name.as_str()) != (TensorRole::ExpAvgSq, "a"));
                }
            }),
        ),
        (
            "unsaved buffer added to the model",
            Box::new(|f, _, _| f.model.buffers.push(shape("inv_freq", &[2]))),
        ),
        ("report of rank 1 removed", Box::new(|_, r, _| drop(r.pop()))),
        ("two reports of rank 0", Box::new(|_, r, _| r[1].rank = 0)),
        ("report with another world size", Box::new(|_, r, _| r[1].world = 3)),
        ("report of a file outside", Box::new(|_, r, _| r[1].file = "../shard".into())),
        ("piece in the header of the file", Box::new(|_, r, _| r[0].pieces[0].offset = 0)),
        ("two pieces at one offset", Box::new(|_, r, _| r[0].pieces[1].offset = r[0].pieces[0].offset)),
        ("facts of another step", Box::new(|f, _, _| f.step = 3)),
        ("shard removed", Box::new(|_, r, dir| fs::remove_file(dir.join(&r[0].file)).expect("removed"))),
        ("shard truncated", Box::new(|_, r, dir| fs::write(dir.join(&r[0].file), "short").expect("written"))),
        ("tokenizer file outside", Box::new(|f, _, _| f.tokenizer[0].name = "../config.json".into())),
        (
            "tie between two stored weights",
            Box::new(|f, _, _| f.model.ties.push(crate::Tie { alias: "a".into(), target: "b".into() })),
        ),
    ];
    let lines: Vec<String> =
        cases.into_iter().map(|(what, change)| format!("{what}: {}", commit_error(change))).collect();
    insta::assert_snapshot!("saving_inconsistent_saves", lines.join("\n"));
}

fn shape(name: &str, shape: &[u64]) -> WeightShape {
    WeightShape { name: name.into(), shape: shape.into() }
}

#[test]
fn only_trained_weights_need_optimizer_state() {
    let dir = memory_dir();
    let mut facts = facts(1, 1, WEIGHTS);
    facts.model.frozen = vec!["b".into()];
    facts.model.buffers = vec![shape("scale", &[])];
    let save = |roles: &[(&str, TensorRole)]| {
        let staging = Staging::begin(dir.path(), 1, 0)?;
        let tensors: Vec<_> = roles
            .iter()
            .map(|&(n, r)| {
                (n, r, vec![1.5f32; [4, 6, 1][usize::from(n == "b") + 2 * usize::from(n == "scale")]])
            })
            .collect();
        let pieces: Vec<Piece<'_>> = tensors
            .iter()
            .map(|(name, role, data)| Piece { name, role: *role, start_element: 0, data: data[..].into() })
            .collect();
        let report = write_shard(staging.path(), 0, 1, &pieces)?;
        commit(staging, facts.clone(), vec![report])
    };
    let weights = [("a", TensorRole::Weight), ("b", TensorRole::Weight), ("scale", TensorRole::Buffer)];
    let with = |more: &[(&'static str, TensorRole)]| [&weights[..], more].concat();
    save(&weights).expect("complete without optimizer state");
    let path = save(&with(&[("a", TensorRole::Momentum)])).expect("complete").path;
    let checkpoint = Checkpoint::open(&path).expect("complete");
    assert!(checkpoint.holds("a", TensorRole::Momentum) && !checkpoint.holds("b", TensorRole::Momentum));
    let mut scale = [0.0];
    checkpoint.read_f32("scale", TensorRole::Buffer, 0..1, &mut scale).expect("there");
    assert_eq!(scale, [1.5]);
    let error = save(&with(&[("b", TensorRole::Momentum)])).expect_err("a is trained");
    insta::assert_snapshot!("saving_momentum_missing", describe(&error, dir.path()));
}

#[test]
fn a_piece_that_is_given_twice_is_rejected() {
    let dir = memory_dir();
    let staging = Staging::begin(dir.path(), 1, 0).expect("begun");
    let piece = Piece { name: "a", role: TensorRole::Weight, start_element: 0, data: (&[1.0][..]).into() };
    let error = write_shard(staging.path(), 0, 1, &[piece, piece]).expect_err("twice");
    insta::assert_snapshot!("saving_piece_twice", describe(&error, dir.path()));
    assert!(write_shard(staging.path(), 1, 1, &[]).is_err());
}

#[test]
fn a_dropped_save_leaves_no_files() {
    let dir = memory_dir();
    let root = dir.path().join("deep/er");
    let staging = Staging::begin(&root, 1, 0).expect("begun");
    write_shards(staging.path(), &facts(1, 2, WEIGHTS)).expect("written");
    assert!(list(&root).expect("listable").is_empty(), "a save in progress is not listed");
    drop(staging);
    assert!(entry_names(&root).is_empty());
}

#[test]
fn a_second_concurrent_save_is_rejected() {
    let dir = memory_dir();
    let first = Staging::begin(dir.path(), 1, 0).expect("begun");
    let second = Staging::begin(dir.path(), 2, 0).map(drop).expect_err("busy");
    assert!(matches!(second, CkptError::DirectoryBusy { .. }), "{second}");
    assert!(first.path().is_dir(), "the first save continues");
    drop(first);
    Staging::begin(dir.path(), 2, 0).expect("free again");
}

#[test]
fn a_file_in_place_of_a_directory_is_an_error_with_help() {
    let dir = memory_dir();
    let file = dir.path().join("file");
    fs::write(&file, "x").expect("written");
    for root in [file.clone(), file.join("below")] {
        let error = Staging::begin(&root, 1, 0).map(drop).expect_err("rejected");
        let CkptError::Io { source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(source.kind(), std::io::ErrorKind::NotADirectory);
        assert_eq!(error.help().len(), 1);
    }
}

#[test]
fn facts_are_restored_bit_for_bit() {
    let dir = memory_dir();
    let mut facts = facts(1, 1, WEIGHTS);
    facts.groups = json!([{"lr": 0.1 + 0.2, "eps": 1e-308, "steps": u64::MAX}]);
    facts.tokenizer[0].text = "\u{0}\u{1f600}\"\\ \u{2028}".into();
    let path = save(dir.path(), &facts).expect("saved").path;
    assert_holds(&Checkpoint::open(&path).expect("complete"), &facts);
}
