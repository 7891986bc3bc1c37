//! Parameter groups without names, as in a universal checkpoint of another program.
use super::convert::convert_error;
use super::external::open;
use super::tiny::{assert_is, copy};
use crate::convert::{
    ConvertError, ConvertNotice, ConvertOptions, ConvertReport, ConvertTarget, convert, find_ungrouped,
};
use crate::error::Result;
use crate::external::ExternalCheckpoint;
use crate::root::find;
use crate::source::TensorSource;
use crate::state::ParamGroupInfo;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The notice about its 12 parameters in 2 groups.
const GROUPS_UNKNOWN: ConvertNotice = ConvertNotice::GroupsUnknown { parameters: 12, groups: 2 };
/// Name of the golden checkpoint.
const HYBRID: &str = "hybrid";

fn norm_groups(source: &dyn TensorSource) -> BTreeMap<String, usize> {
    let names = find_ungrouped(source).expect("known").names;
    names.into_iter().filter(|n| n.contains("norm")).map(|n| (n, 1)).collect()
}

fn options(target: ConvertTarget, groups: BTreeMap<String, usize>) -> ConvertOptions {
    ConvertOptions { groups, ..ConvertOptions::new(target) }
}

fn convert_to(source: &dyn TensorSource, out: &Path, options: &ConvertOptions) -> Result<ConvertReport> {
    convert(source, out, options, |_, _| {})
}

/// The names and weight decay of each group.
fn groups_and_decay(source: &dyn TensorSource) -> Vec<(Vec<String>, f64)> {
    let decay = |g: &ParamGroupInfo| g.hyper["weight_decay"].as_f64().expect("a number");
    source.state().groups.iter().map(|g| (g.names.clone(), decay(g))).collect()
}

#[test]
fn values_and_steps_are_read_and_ungrouped_weights_are_listed() {
    let (_dir, root) = copy(HYBRID);
    let found = open(&root).expect("whole");
    assert_is(&*found, HYBRID, "original");
    assert_eq!(groups_and_decay(&*found), [(vec![], 0.1), (vec![], 0.0)]);
    assert!(found.facts().steps.len() == 12 && found.facts().steps.values().all(|&s| s == 3));
    let ungrouped = find_ungrouped(&*found).expect("known");
    assert_eq!((ungrouped.names.len(), ungrouped.groups), (12, 2));
    for grouped in ["z3", "universal", "dcp"] {
        let (_dir, root) = copy(grouped);
        assert_eq!(find_ungrouped(&*open(&root).expect("whole")).expect("known").names, [""; 0], "{grouped}");
    }
}

/// A native checkpoint stores states and steps by name.
#[test]
fn a_native_checkpoint_needs_no_groups() {
    let (dir, root) = copy(HYBRID);
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let report =
        convert_to(&*open(&root).expect("whole"), &one, &options(ConvertTarget::Native, BTreeMap::new()))
            .expect("made");
    assert!(report.notices.contains(&GROUPS_UNKNOWN), "{:?}", report.notices);
    let again = convert_to(
        find(&one).expect("whole").source(),
        &two,
        &options(ConvertTarget::Native, BTreeMap::new()),
    )
    .expect("made");
    assert!(again.notices.contains(&GROUPS_UNKNOWN), "{:?}", again.notices);
    for path in [&one, &two] {
        let ours = find(path).expect("whole");
        assert_is(ours.source(), HYBRID, "ours");
        assert_eq!(groups_and_decay(ours.source()), [(vec![], 0.1), (vec![], 0.0)]);
        let state = ours.source().state();
        assert_eq!((state.frozen.len(), state.steps.len()), (0, 12));
        assert!(state.steps.values().all(|&s| s == 3), "{:?}", state.steps);
        assert!(crate::verify(path).expect("a report").is_sound());
    }
}

#[test]
fn other_targets_need_the_groups_from_the_options() {
    let (dir, root) = copy(HYBRID);
    let (_other, z3) = copy("z3");
    let (found, z3) = (open(&root).expect("whole"), open(&z3).expect("whole"));
    let ours = dir.path().join("ours");
    convert_to(&*found, &ours, &options(ConvertTarget::Native, BTreeMap::new())).expect("made");
    let ours = find(&ours).expect("whole");
    for (from, source) in [("hybrid", &*found as &dyn TensorSource), ("ours", ours.source())] {
        for target in [ConvertTarget::DeepSpeed, ConvertTarget::Universal, ConvertTarget::Native] {
            let out = dir.path().join(format!("{from}-{target:?}"));
            if target != ConvertTarget::Native {
                let error =
                    convert_to(source, &out, &options(target, BTreeMap::new())).expect_err("rejected");
                let expected = ConvertError::GroupsUnknown { parameters: 12, groups: 2 };
                assert_eq!(convert_error(&error), &expected);
                assert!(!out.exists());
            }
            let report = convert_to(source, &out, &options(target, norm_groups(source))).expect("made");
            assert!(!report.notices.contains(&GROUPS_UNKNOWN), "{:?}", report.notices);
            let result = find(&out).expect("whole");
            assert_is(result.source(), HYBRID, from);
            // in the order of the model's parameters, in which DeepSpeed stores them
            assert_eq!(groups_and_decay(result.source()), groups_and_decay(&*z3), "{from} to {target:?}");
        }
    }
}

#[test]
fn an_assignment_to_a_missing_group_or_of_a_grouped_weight_is_rejected() {
    let (dir, root) = copy(HYBRID);
    let found = open(&root).expect("whole");
    let out = dir.path().join("out");
    for (name, group, expected) in [
        ("model.norm.weight", 2, ConvertError::GroupOutOfRange { group: 2, groups: 2 }),
        ("mine.weight", 1, ConvertError::GroupNotAssignable { name: "mine.weight".into() }),
    ] {
        let groups = BTreeMap::from([(name.to_owned(), group)]);
        let error =
            convert_to(&*found, &out, &options(ConvertTarget::Universal, groups)).expect_err("rejected");
        assert_eq!(convert_error(&error), &expected);
        assert!(!out.exists());
    }
    let (_other, z3) = copy("z3");
    let groups = BTreeMap::from([("model.norm.weight".to_owned(), 1)]);
    let why = convert_to(&*open(&z3).expect("whole"), &out, &options(ConvertTarget::DeepSpeed, groups))
        .expect_err("rejected");
    assert!(matches!(convert_error(&why), ConvertError::GroupNotAssignable { .. }), "{why}");
}

/// A ZeRO checkpoint stores parameters by position, so a model of an unknown family can't be
/// converted to it.
#[test]
fn an_unknown_parameter_order_is_an_error_for_zero_and_not_for_universal() {
    let (dir, root) = copy(HYBRID);
    let zero = root.join("global_step3_universal/zero");
    fs::rename(zero.join("model.norm.weight"), zero.join("model.mine.weight")).expect("renamed");
    let found: Box<ExternalCheckpoint> = open(&root).expect("whole");
    let out = |name: &str| dir.path().join(name);
    let why = convert_to(&*found, &out("z"), &options(ConvertTarget::DeepSpeed, norm_groups(&*found)))
        .expect_err("rejected");
    assert!(matches!(convert_error(&why), ConvertError::OrderUnknown { .. }), "{why}");
    convert_to(&*found, &out("u"), &options(ConvertTarget::Universal, norm_groups(&*found)))
        .expect("by names");
    assert!(crate::verify(&out("u")).expect("a report").is_sound());
}
