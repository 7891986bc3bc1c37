//! Groups of parameters of which a checkpoint doesn't say what is in them: a universal folder that another writer made.
use super::foreign::open;
use super::tiny::{assert_is, copy};
use crate::convert::{ConvertOptions, ConvertReport, Target, convert, ungrouped};
use crate::error::Result;
use crate::external::Foreign;
use crate::root::find;
use crate::source::Source;
use crate::state::Group;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Name of the recorded folder.
const HYBRID: &str = "hybrid";

fn norms(source: &dyn Source) -> BTreeMap<String, usize> {
    let names = ungrouped(source).expect("known").names;
    names.into_iter().filter(|n| n.contains("norm")).map(|n| (n, 1)).collect()
}

fn to(target: Target, groups: BTreeMap<String, usize>) -> ConvertOptions {
    ConvertOptions { groups, ..ConvertOptions::to(target) }
}

fn made(source: &dyn Source, out: &Path, options: &ConvertOptions) -> Result<ConvertReport> {
    convert(source, out, options, |_, _| {})
}

/// Names and weight decay of each group.
fn told(source: &dyn Source) -> Vec<(Vec<String>, f64)> {
    let decay = |g: &Group| g.hyper["weight_decay"].as_f64().expect("a number");
    source.state().groups.iter().map(|g| (g.names.clone(), decay(g))).collect()
}

#[test]
fn every_value_and_step_is_read_and_what_is_open_is_known() {
    let (_dir, root) = copy(HYBRID);
    let found = open(&root).expect("whole");
    assert_is(&*found, HYBRID, "as it is");
    assert_eq!(told(&*found), [(vec![], 0.1), (vec![], 0.0)]);
    assert!(found.facts().steps.len() == 12 && found.facts().steps.values().all(|&s| s == 3));
    let open_ones = ungrouped(&*found).expect("known");
    assert_eq!((open_ones.names.len(), open_ones.groups), (12, 2));
    for known in ["z3", "universal", "dcp"] {
        let (_dir, root) = copy(known);
        assert_eq!(ungrouped(&*open(&root).expect("whole")).expect("known").names, [""; 0], "{known}");
    }
}

/// A run of ours goes by names: states and steps come along, and the groups as far as they are known.
#[test]
fn a_checkpoint_of_ours_is_made_without_them() {
    let (dir, root) = copy(HYBRID);
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let report =
        made(&*open(&root).expect("whole"), &one, &to(Target::Native, BTreeMap::new())).expect("made");
    let about = |r: &ConvertReport| r.notices.iter().filter(|n| n.contains("2 groups")).count();
    assert_eq!(about(&report), 1, "{:?}", report.notices);
    let again =
        made(find(&one).expect("whole").source(), &two, &to(Target::Native, BTreeMap::new())).expect("made");
    assert_eq!(about(&again), 1, "{:?}", again.notices);
    for path in [&one, &two] {
        let ours = find(path).expect("whole");
        assert_is(ours.source(), HYBRID, "ours");
        assert_eq!(told(ours.source()), [(vec![], 0.1), (vec![], 0.0)]);
        let state = ours.source().state();
        assert_eq!((state.frozen.len(), state.steps.len()), (0, 12));
        assert!(state.steps.values().all(|&s| s == 3), "{:?}", state.steps);
        assert!(crate::verify(path).expect("a report").is_sound());
    }
}

/// What needs them is refused, or made with what the caller says; then it is as if the checkpoint had said it.
#[test]
fn other_formats_are_made_with_what_the_caller_says() {
    let (dir, root) = copy(HYBRID);
    let (_other, z3) = copy("z3");
    let (found, z3) = (open(&root).expect("whole"), open(&z3).expect("whole"));
    let ours = dir.path().join("ours");
    made(&*found, &ours, &to(Target::Native, BTreeMap::new())).expect("made");
    let ours = find(&ours).expect("whole");
    for (from, source) in [("hybrid", &*found as &dyn Source), ("ours", ours.source())] {
        for target in [Target::DeepSpeed, Target::Universal, Target::Native] {
            let out = dir.path().join(format!("{from}-{target:?}"));
            if target != Target::Native {
                let why = made(source, &out, &to(target, BTreeMap::new())).expect_err("refused").to_string();
                assert!(
                    why.contains("2 groups") && why.contains("--group") && why.contains("12 parameters"),
                    "{why}"
                );
                assert!(!out.exists());
            }
            let report = made(source, &out, &to(target, norms(source))).expect("made");
            assert!(
                !report.notices.iter().any(|n| n.contains("groups of parameters")),
                "{:?}",
                report.notices
            );
            let result = find(&out).expect("whole");
            assert_is(result.source(), HYBRID, from);
            // in the order of the model, by which DeepSpeed lays them out
            assert_eq!(told(result.source()), told(&*z3), "{from} to {target:?}");
        }
    }
}

/// A name that isn't open, and a group that isn't there.
#[test]
fn what_the_caller_says_must_have_a_use() {
    let (dir, root) = copy(HYBRID);
    let found = open(&root).expect("whole");
    let out = dir.path().join("out");
    for (name, group, reason) in [
        ("model.norm.weight", 2, "groups 0 to 1, and no group 2"),
        ("mine.weight", 1, "mine.weight is no parameter of which it doesn't say the group"),
    ] {
        let groups = BTreeMap::from([(name.to_owned(), group)]);
        let why = made(&*found, &out, &to(Target::Universal, groups)).expect_err("refused").to_string();
        assert!(why.contains(reason) && !out.exists(), "{why}");
    }
    let (_other, z3) = copy("z3");
    let groups = BTreeMap::from([("model.norm.weight".to_owned(), 1)]);
    let why = made(&*open(&z3).expect("whole"), &out, &to(Target::DeepSpeed, groups)).expect_err("refused");
    assert!(why.to_string().contains("doesn't say the group"), "{why}");
}

/// A ZeRO checkpoint has parameters one after the other: of a model of its own kind nothing says in which order.
#[test]
fn an_order_that_is_not_known_is_not_made_up() {
    let (dir, root) = copy(HYBRID);
    let zero = root.join("global_step3_universal/zero");
    fs::rename(zero.join("model.norm.weight"), zero.join("model.mine.weight")).expect("renamed");
    let found: Box<Foreign> = open(&root).expect("whole");
    let out = |name: &str| dir.path().join(name);
    let why =
        made(&*found, &out("z"), &to(Target::DeepSpeed, norms(&*found))).expect_err("refused").to_string();
    assert!(why.contains("in which order") && why.contains("--to universal"), "{why}");
    made(&*found, &out("u"), &to(Target::Universal, norms(&*found))).expect("by names");
    assert!(crate::verify(&out("u")).expect("a report").is_sound());
}
