//! Tests that rejected saves leave no checkpoint and no temporary files.
use super::*;
use crate::error::CkptError;
use crate::layout::native::Checkpoint;
use crate::save::commit_save;
use crate::{find_latest_checkpoint, list_checkpoints, write_shard_until};
use std::fs;
use std::ops::ControlFlow;

const WEIGHTS: &[(&str, &[u64])] = &[("a", &[4]), ("b", &[2, 3])];

/// A change to the facts, reports and staging directory of a save before the commit.
type SaveChange = Box<dyn FnOnce(&mut RunFacts, &mut Vec<ShardReport>, &Path)>;

/// Applies `change` to the facts, reports and staging directory of a save of step 2, and commits
/// the save. Returns the text of the error. Panics if the commit succeeds.
fn expect_commit_error(change: impl FnOnce(&mut RunFacts, &mut Vec<ShardReport>, &Path)) -> String {
    let dir = make_memory_dir();
    let old = make_facts(1, 2, WEIGHTS);
    save_checkpoint(dir.path(), &old).expect("saved");
    let mut facts = make_facts(2, 2, WEIGHTS);
    let staging = StagingDir::create(dir.path(), 2, 0).expect("begun");
    let mut reports = write_shards(staging.path(), &facts).expect("written");
    change(&mut facts, &mut reports, staging.path());
    let error = commit_save(staging, facts, reports).expect_err("rejected");
    assert!(matches!(error, CkptError::InvalidSave(_)), "{error:?}");
    assert_eq!(list_entry_names(dir.path()), ["latest", "step-00000001"], "no temporary files remain");
    assert_contains_saved(
        &Checkpoint::open(&find_latest_checkpoint(dir.path()).expect("sound").expect("there"))
            .expect("complete"),
        &old,
    );
    format_error(&error, dir.path())
}

#[test]
fn inconsistent_saves_are_rejected() {
    let cases: Vec<(&str, SaveChange)> = vec![
        ("first piece of a removed", Box::new(|_, r, _| drop(r[0].pieces.remove(0)))),
        ("second piece of a begins one element early", Box::new(|_, r, _| r[1].pieces[0].start = 1)),
        ("second piece of a begins one element late", Box::new(|_, r, _| r[1].pieces[0].start = 3)),
        ("second piece of exp_avg/b removed", Box::new(|_, r, _| drop(r[1].pieces.remove(3)))),
        (
            "unsaved weight added to the model",
            Box::new(|f, _, _| f.model.weights.push(make_weight_shape("c", &[1]))),
        ),
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
            Box::new(|f, _, _| f.model.buffers.push(make_weight_shape("inv_freq", &[2]))),
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
            Box::new(|f, _, _| {
                f.model.ties.push(crate::TiedWeight { alias: "a".into(), target: "b".into() })
            }),
        ),
    ];
    let lines: Vec<String> =
        cases.into_iter().map(|(what, change)| format!("{what}: {}", expect_commit_error(change))).collect();
    insta::assert_snapshot!("saving_inconsistent_saves", lines.join("\n"));
}

fn make_weight_shape(name: &str, shape: &[u64]) -> WeightShape {
    WeightShape { name: name.into(), shape: shape.into() }
}

#[test]
fn only_trained_weights_need_optimizer_state() {
    let dir = make_memory_dir();
    let mut facts = make_facts(1, 1, WEIGHTS);
    facts.model.frozen = vec!["b".into()];
    facts.model.buffers = vec![make_weight_shape("scale", &[])];
    let save = |roles: &[(&str, TensorRole)]| {
        let staging = StagingDir::create(dir.path(), 1, 0)?;
        let tensors: Vec<_> = roles
            .iter()
            .map(|&(n, r)| {
                (n, r, vec![1.5f32; [4, 6, 1][usize::from(n == "b") + 2 * usize::from(n == "scale")]])
            })
            .collect();
        let pieces: Vec<TensorPiece<'_>> = tensors
            .iter()
            .map(|(name, role, data)| TensorPiece {
                name,
                role: *role,
                start_element: 0,
                data: data[..].into(),
            })
            .collect();
        let report = write_shard(staging.path(), 0, 1, &pieces)?;
        commit_save(staging, facts.clone(), vec![report])
    };
    let weights = [("a", TensorRole::Weight), ("b", TensorRole::Weight), ("scale", TensorRole::Buffer)];
    let with = |more: &[(&'static str, TensorRole)]| [&weights[..], more].concat();
    save(&weights).expect("complete without optimizer state");
    let path = save(&with(&[("a", TensorRole::Momentum)])).expect("complete").path;
    let checkpoint = Checkpoint::open(&path).expect("complete");
    assert!(
        checkpoint.has_tensor("a", TensorRole::Momentum) && !checkpoint.has_tensor("b", TensorRole::Momentum)
    );
    let mut scale = [0.0];
    checkpoint.read_f32("scale", TensorRole::Buffer, 0..1, &mut scale).expect("there");
    assert_eq!(scale, [1.5]);
    let error = save(&with(&[("b", TensorRole::Momentum)])).expect_err("a is trained");
    insta::assert_snapshot!("saving_momentum_missing", format_error(&error, dir.path()));
}

#[test]
fn a_piece_that_is_given_twice_is_rejected() {
    let dir = make_memory_dir();
    let staging = StagingDir::create(dir.path(), 1, 0).expect("begun");
    let piece =
        TensorPiece { name: "a", role: TensorRole::Weight, start_element: 0, data: (&[1.0][..]).into() };
    let error = write_shard(staging.path(), 0, 1, &[piece, piece]).expect_err("twice");
    insta::assert_snapshot!("saving_piece_twice", format_error(&error, dir.path()));
    assert!(write_shard(staging.path(), 1, 1, &[]).is_err());
}

#[test]
fn an_interrupted_shard_is_incomplete_and_removed_with_its_save() {
    let dir = make_memory_dir();
    let staging = StagingDir::create(dir.path(), 1, 0).expect("begun");
    let values = vec![1.0_f32; 5 << 20];
    let piece =
        TensorPiece { name: "a", role: TensorRole::Weight, start_element: 0, data: values[..].into() };
    let mut calls = Vec::new();
    let written = write_shard_until(staging.path(), 0, 1, &[piece], |bytes| {
        calls.push(bytes);
        if calls.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(written.expect("no error").is_none());
    assert_eq!(calls, [0, 8 << 20]);
    drop(staging);
    assert!(list_entry_names(dir.path()).is_empty());
}

#[test]
fn a_dropped_save_leaves_no_files() {
    let dir = make_memory_dir();
    let root = dir.path().join("deep/er");
    let staging = StagingDir::create(&root, 1, 0).expect("begun");
    write_shards(staging.path(), &make_facts(1, 2, WEIGHTS)).expect("written");
    assert!(list_checkpoints(&root).expect("listable").is_empty(), "a save in progress is not listed");
    drop(staging);
    assert!(list_entry_names(&root).is_empty());
}

#[test]
fn a_second_concurrent_save_is_rejected() {
    let dir = make_memory_dir();
    let first = StagingDir::create(dir.path(), 1, 0).expect("begun");
    let second = StagingDir::create(dir.path(), 2, 0).map(drop).expect_err("busy");
    assert!(matches!(second, CkptError::DirectoryBusy { .. }), "{second}");
    assert!(first.path().is_dir(), "the first save continues");
    drop(first);
    StagingDir::create(dir.path(), 2, 0).expect("free again");
}

#[test]
fn a_file_in_place_of_a_directory_is_an_error_with_help() {
    let dir = make_memory_dir();
    let file = dir.path().join("file");
    fs::write(&file, "x").expect("written");
    for root in [file.clone(), file.join("below")] {
        let error = StagingDir::create(&root, 1, 0).map(drop).expect_err("rejected");
        let CkptError::Io { source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(source.kind(), std::io::ErrorKind::NotADirectory);
        assert_eq!(error.help().len(), 1);
    }
}

#[test]
fn facts_are_restored_bit_for_bit() {
    let dir = make_memory_dir();
    let mut facts = make_facts(1, 1, WEIGHTS);
    facts.groups = json!([{"lr": 0.1 + 0.2, "eps": 1e-308, "steps": u64::MAX}]);
    facts.tokenizer[0].text = "\u{0}\u{1f600}\"\\ \u{2028}".into();
    let path = save_checkpoint(dir.path(), &facts).expect("saved").path;
    assert_contains_saved(&Checkpoint::open(&path).expect("complete"), &facts);
}
