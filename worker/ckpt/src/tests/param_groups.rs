//! Tests parameter groups that list no names, as in a universal checkpoint of another program.
use super::convert::expect_convert_error;
use super::external::open_external;
use super::tiny::{assert_equals_reference, copy_tiny_checkpoint};
use crate::catalog::{ExternalCheckpoint, ParamGroupInfo, TensorSource};
use crate::convert::{
    ConvertNotice, ConvertOptions, ConvertReport, ConvertTarget, convert_checkpoint, find_ungrouped_weights,
};
use crate::error::{ConvertError, Result};
use crate::open::open_checkpoint;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The notice that conversions of [`HYBRID_CHECKPOINT`] give about its 12 parameters without a
/// group.
const GROUPS_UNKNOWN: ConvertNotice = ConvertNotice::GroupsUnknown { parameters: 12, groups: 2 };
/// Name of the golden checkpoint of these tests, whose parameter groups list no names.
const HYBRID_CHECKPOINT: &str = "hybrid";

fn assign_norms_to_group_1(source: &dyn TensorSource) -> BTreeMap<String, usize> {
    let names = find_ungrouped_weights(source).expect("known").names;
    names.into_iter().filter(|n| n.contains("norm")).map(|n| (n, 1)).collect()
}

fn make_convert_options(target: ConvertTarget, groups: BTreeMap<String, usize>) -> ConvertOptions {
    ConvertOptions { groups, ..ConvertOptions::new(target) }
}

fn convert_to(source: &dyn TensorSource, out: &Path, options: &ConvertOptions) -> Result<ConvertReport> {
    convert_checkpoint(source, out, options, |_, _| {})
}

/// Returns, for each parameter group, the names of its weights and its weight decay.
fn read_groups_and_decay(source: &dyn TensorSource) -> Vec<(Vec<String>, f64)> {
    let decay = |g: &ParamGroupInfo| g.hyper["weight_decay"].as_f64().expect("a number");
    source.training_state().groups.iter().map(|g| (g.names.clone(), decay(g))).collect()
}

#[test]
fn values_and_steps_are_read_and_ungrouped_weights_are_listed() {
    let (_dir, root) = copy_tiny_checkpoint(HYBRID_CHECKPOINT);
    let found = open_external(&root).expect("whole");
    assert_equals_reference(&*found, HYBRID_CHECKPOINT, "original");
    assert_eq!(read_groups_and_decay(&*found), [(vec![], 0.1), (vec![], 0.0)]);
    assert!(found.facts().state.steps.len() == 12 && found.facts().state.steps.values().all(|&s| s == 3));
    let ungrouped = find_ungrouped_weights(&*found).expect("known");
    assert_eq!((ungrouped.names.len(), ungrouped.groups), (12, 2));
    for grouped in ["z3", "universal", "dcp"] {
        let (_dir, root) = copy_tiny_checkpoint(grouped);
        assert_eq!(
            find_ungrouped_weights(&*open_external(&root).expect("whole")).expect("known").names,
            [""; 0],
            "{grouped}"
        );
    }
}

/// Checks that [`HYBRID_CHECKPOINT`] can be converted to a native checkpoint, and the result to
/// another native checkpoint, without assigning groups. A native checkpoint stores optimizer states
/// and update counts by name, so no state is lost.
#[test]
fn a_native_checkpoint_needs_no_groups() {
    let (dir, root) = copy_tiny_checkpoint(HYBRID_CHECKPOINT);
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let report = convert_to(
        &*open_external(&root).expect("whole"),
        &one,
        &make_convert_options(ConvertTarget::Native, BTreeMap::new()),
    )
    .expect("made");
    assert!(report.notices.contains(&GROUPS_UNKNOWN), "{:?}", report.notices);
    let again = convert_to(
        open_checkpoint(&one).expect("whole").tensor_source(),
        &two,
        &make_convert_options(ConvertTarget::Native, BTreeMap::new()),
    )
    .expect("made");
    assert!(again.notices.contains(&GROUPS_UNKNOWN), "{:?}", again.notices);
    for path in [&one, &two] {
        let ours = open_checkpoint(path).expect("whole");
        assert_equals_reference(ours.tensor_source(), HYBRID_CHECKPOINT, "ours");
        assert_eq!(read_groups_and_decay(ours.tensor_source()), [(vec![], 0.1), (vec![], 0.0)]);
        let state = ours.tensor_source().training_state();
        assert_eq!((state.frozen.len(), state.steps.len()), (0, 12));
        assert!(state.steps.values().all(|&s| s == 3), "{:?}", state.steps);
        assert!(crate::verify_checkpoints(path).expect("a report").is_sound());
    }
}

#[test]
fn other_targets_need_the_groups_from_the_options() {
    let (dir, root) = copy_tiny_checkpoint(HYBRID_CHECKPOINT);
    let (_other, z3) = copy_tiny_checkpoint("z3");
    let (found, z3) = (open_external(&root).expect("whole"), open_external(&z3).expect("whole"));
    let ours = dir.path().join("ours");
    convert_to(&*found, &ours, &make_convert_options(ConvertTarget::Native, BTreeMap::new())).expect("made");
    let ours = open_checkpoint(&ours).expect("whole");
    for (from, source) in [("hybrid", &*found as &dyn TensorSource), ("ours", ours.tensor_source())] {
        for target in [ConvertTarget::DeepSpeed, ConvertTarget::Universal, ConvertTarget::Native] {
            let out = dir.path().join(format!("{from}-{target:?}"));
            if target != ConvertTarget::Native {
                let error = convert_to(source, &out, &make_convert_options(target, BTreeMap::new()))
                    .expect_err("rejected");
                let expected = ConvertError::GroupsUnknown { parameters: 12, groups: 2 };
                assert_eq!(expect_convert_error(&error), &expected);
                assert!(!out.exists());
            }
            let report =
                convert_to(source, &out, &make_convert_options(target, assign_norms_to_group_1(source)))
                    .expect("made");
            assert!(!report.notices.contains(&GROUPS_UNKNOWN), "{:?}", report.notices);
            let result = open_checkpoint(&out).expect("whole");
            assert_equals_reference(result.tensor_source(), HYBRID_CHECKPOINT, from);
            // DeepSpeed stores the parameters in the order of the model
            assert_eq!(
                read_groups_and_decay(result.tensor_source()),
                read_groups_and_decay(&*z3),
                "{from} to {target:?}"
            );
        }
    }
}

#[test]
fn an_assignment_to_a_missing_group_or_of_a_grouped_weight_is_rejected() {
    let (dir, root) = copy_tiny_checkpoint(HYBRID_CHECKPOINT);
    let found = open_external(&root).expect("whole");
    let out = dir.path().join("out");
    for (name, group, expected) in [
        ("model.norm.weight", 2, ConvertError::GroupOutOfRange { group: 2, groups: 2 }),
        ("mine.weight", 1, ConvertError::GroupNotAssignable { name: "mine.weight".into() }),
    ] {
        let groups = BTreeMap::from([(name.to_owned(), group)]);
        let error = convert_to(&*found, &out, &make_convert_options(ConvertTarget::Universal, groups))
            .expect_err("rejected");
        assert_eq!(expect_convert_error(&error), &expected);
        assert!(!out.exists());
    }
    let (_other, z3) = copy_tiny_checkpoint("z3");
    let groups = BTreeMap::from([("model.norm.weight".to_owned(), 1)]);
    let why = convert_to(
        &*open_external(&z3).expect("whole"),
        &out,
        &make_convert_options(ConvertTarget::DeepSpeed, groups),
    )
    .expect_err("rejected");
    assert!(matches!(expect_convert_error(&why), ConvertError::GroupNotAssignable { .. }), "{why}");
}

/// Checks conversions of a model of an unknown family, whose order of parameters is unknown. The
/// conversion to ZeRO must fail, since ZeRO stores parameters by position. The universal format
/// stores names.
#[test]
fn an_unknown_parameter_order_is_an_error_for_zero_and_not_for_universal() {
    let (dir, root) = copy_tiny_checkpoint(HYBRID_CHECKPOINT);
    let zero = root.join("global_step3_universal/zero");
    fs::rename(zero.join("model.norm.weight"), zero.join("model.mine.weight")).expect("renamed");
    let found: Box<ExternalCheckpoint> = open_external(&root).expect("whole");
    let out = |name: &str| dir.path().join(name);
    let why = convert_to(
        &*found,
        &out("z"),
        &make_convert_options(ConvertTarget::DeepSpeed, assign_norms_to_group_1(&*found)),
    )
    .expect_err("rejected");
    assert!(matches!(expect_convert_error(&why), ConvertError::OrderUnknown { .. }), "{why}");
    convert_to(
        &*found,
        &out("u"),
        &make_convert_options(ConvertTarget::Universal, assign_norms_to_group_1(&*found)),
    )
    .expect("by names");
    assert!(crate::verify_checkpoints(&out("u")).expect("a report").is_sound());
}
