//! [`Part`]: a piece of `launch gpu-check` that runs in a separate process, and the ordered list of
//! all parts.
use super::{
    curve_cases::{CURVE_PRECISIONS, CurveRanks, select_curve_cases},
    op_speed::TimedOpGroup,
    part_filter::PartFilter,
    timed_models::select_timed_models,
};
use device::conformance;
use diagnostic::{Diagnostic, codes};
use jobspec::env;
use std::ffi::OsString;

/// The name of the part of `launch gpu-check` that prints the GPU, its libraries and environment
/// variables before all other parts run.
pub(super) const ENVIRONMENT_PART: &str = "environment";
/// The group name of the parts of `launch gpu-check` that time the single operations of a training
/// step and nothing else. They run only if `--only` or `--profile` selects them, because the parts
/// that time models do this, too.
pub(super) const PROFILES_GROUP: &str = "profiles";

/// What a part of the GPU check does, such as comparing operations with the CPU or timing the
/// training of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartWork {
    /// Describes the GPU and its libraries.
    Environment,
    /// Compiles and loads every kernel.
    Kernels,
    /// Times a group of operations.
    Speed(TimedOpGroup),
    /// Compares the family of operations with this number with the CPU.
    Family(usize),
    /// Compares operations with the CPU on the realistic shape with this number.
    Shape(usize),
    /// Compares cuDNN's attention with the CPU.
    CudnnAttention,
    /// Compares training with the CPU, for a case and a precision given by their numbers.
    Curve { case: usize, precision: usize, transport: CurveRanks },
    /// Trains again on the same GPU after the collectives were aborted.
    Restart,
    /// Times the training of the model with this number.
    Model(usize),
    /// Times each operation of a training step of the model with this number.
    Profile(usize),
    /// Measures the cost of saving the model with this number.
    Save(usize),
}

/// A part of the GPU check, which runs in a separate process and has a time limit.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The name for `--only`: a group, or a group and a name in it, such as `ops/attention`.
    pub(super) name: String,
    pub(super) work: PartWork,
    /// About how long the part takes on an H100. A part starts only if this much time is left.
    pub(super) expected_seconds: u64,
    /// The time after which the process of the part is killed.
    pub(super) limit_seconds: u64,
}

impl Part {
    /// Returns the environment variables that must be set for the process that runs this part of
    /// the GPU check.
    pub(super) fn list_environment_variables(&self) -> Vec<(&'static str, OsString)> {
        match self.work {
            PartWork::Curve { transport: CurveRanks::NcclTwoRanks, .. } => vec![
                (env::NCCL_MULTI_RANK_GPU_ENABLE, "1".into()),
                // A kernel of NCCL that waits for another rank must not prevent that rank from
                // loading kernels, and must leave it multiprocessors.
                (env::CUDA_MODULE_LOADING, "EAGER".into()),
                (env::NCCL_MAX_CTAS, "4".into()),
            ],
            _ => Vec::new(),
        }
    }

    /// Returns whether `selector`, a name in the option `--only` of `launch gpu-check`, is the name
    /// of this part or of its group.
    fn is_selected_by(&self, selector: &str) -> bool {
        self.name == selector || self.name.split_once('/').is_some_and(|(group, _)| group == selector)
    }
}

/// Returns the parts of the GPU check in the order in which they run.
pub(super) fn list_parts(filter: PartFilter) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut add = |name: String, work, expected_seconds, limit_seconds| {
        parts.push(Part { name, work, expected_seconds, limit_seconds });
    };
    add(ENVIRONMENT_PART.to_owned(), PartWork::Environment, 2, 30);
    add("kernels".to_owned(), PartWork::Kernels, 5, 180);
    if !filter.quick {
        add("ceilings".to_owned(), PartWork::Speed(TimedOpGroup::Ceilings), 3, 60);
    }
    for (number, family) in conformance::OP_FAMILY_NAMES.iter().enumerate() {
        add(format!("ops/{}", to_part_name(family)), PartWork::Family(number), 3, 60);
    }
    add("ops/cudnn".to_owned(), PartWork::CudnnAttention, 4, 60);
    if !filter.quick {
        for (number, shape) in conformance::REALISTIC_SHAPE_NAMES.iter().enumerate() {
            add(format!("shapes/{}", to_part_name(shape)), PartWork::Shape(number), 5, 90);
        }
        for (name, group) in TimedOpGroup::MODEL_OPERATION_GROUPS {
            add(format!("speed/{name}"), PartWork::Speed(group), 5, 60);
        }
    }
    if !filter.ops_only && (filter.tiny || !filter.quick) {
        add_training_parts(filter.tiny, &mut add);
    }
    for (number, model) in select_timed_models(filter.tiny).0.iter().enumerate() {
        let seconds = model.expected_seconds;
        add(
            format!("{PROFILES_GROUP}/{}", model.part_name),
            PartWork::Profile(number),
            seconds,
            60 + 2 * seconds,
        );
    }
    parts
}

/// Adds the parts of the GPU check that train models to the list of parts, which grows by one part
/// with each call of `add`.
fn add_training_parts(tiny: bool, add: &mut dyn FnMut(String, PartWork, u64, u64)) {
    let add_curves = |add: &mut dyn FnMut(String, PartWork, u64, u64), transport: CurveRanks| {
        for (case, curve) in select_curve_cases(tiny).iter().enumerate() {
            let precisions = CURVE_PRECISIONS.iter().enumerate();
            for (precision, (name, _)) in precisions.filter(|(_, p)| transport.compares_precision(p.0)) {
                let name = format!("{}/{}-{name}", transport.part_group_name(), curve.part_name);
                let work = PartWork::Curve { case, precision, transport };
                add(name, work, transport.expected_seconds(), 90);
            }
        }
    };
    let models = select_timed_models(tiny).0;
    let add_models = |add: &mut dyn FnMut(String, PartWork, u64, u64), is_late: bool| {
        let mut order: Vec<usize> = (0..models.len()).filter(|n| models[*n].is_late == is_late).collect();
        order.sort_by_key(|n| models[*n].order);
        for number in order {
            let (name, seconds) = (models[number].part_name, models[number].expected_seconds);
            add(format!("models/{name}"), PartWork::Model(number), seconds, 60 + 2 * seconds);
        }
    };
    add_curves(add, CurveRanks::OneRank);
    add_models(add, false);
    add_curves(add, CurveRanks::SeveralRanks);
    add_curves(add, CurveRanks::NcclOneRank);
    add("restart".to_owned(), PartWork::Restart, 5, 90);
    for (number, model) in models.iter().enumerate().filter(|(_, model)| model.saves) {
        add(format!("saves/{}", model.part_name), PartWork::Save(number), model.expected_seconds + 15, 120);
    }
    add_models(add, true);
    add_curves(add, CurveRanks::NcclTwoRanks);
}

/// Converts the name of a family of operations to the name of its GPU-check part, such as `norms,
/// bias` to `norms-bias`.
fn to_part_name(family: &str) -> String {
    let words = family.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

/// Returns the GPU-check parts in `parts` that the names in `only` (option `--only`) select, in
/// unchanged order. An empty `only` selects every part except those of the group
/// [`PROFILES_GROUP`]. Fails if an element of `only` selects no part.
pub(super) fn select_parts(parts: Vec<Part>, only: &[String]) -> diagnostic::Result<Vec<Part>> {
    if let Some(unknown) = only.iter().find(|name| !parts.iter().any(|part| part.is_selected_by(name))) {
        let message = format!("the part `{unknown}` does not exist");
        let help = "`launch gpu-check --list` lists the parts";
        return Err(Diagnostic::error(codes::command::USAGE, message).with_help(help));
    }
    let is_selected = |part: &Part| {
        only.is_empty() && !part.is_selected_by(PROFILES_GROUP)
            || only.iter().any(|name| part.is_selected_by(name))
    };
    Ok(parts.into_iter().filter(is_selected).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const FILTERS: [PartFilter; 3] = [
        PartFilter { quick: false, tiny: false, ops_only: false },
        PartFilter { quick: false, tiny: true, ops_only: false },
        PartFilter { quick: true, tiny: false, ops_only: true },
    ];

    #[test]
    fn names_are_unique_and_can_be_given_to_only() {
        for filter in FILTERS {
            let parts = list_parts(filter);
            let names: HashSet<_> = parts.iter().map(|part| part.name.clone()).collect();
            assert_eq!(names.len(), parts.len());
            let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-./".contains(c);
            assert!(names.iter().all(|name| name.chars().all(is_valid)), "{names:?}");
            assert!(parts.iter().all(|part| part.expected_seconds < part.limit_seconds));
            for name in names {
                let selected = select_parts(list_parts(filter), std::slice::from_ref(&name)).expect("a part");
                assert_eq!(selected.len(), 1, "{name}");
            }
        }
    }

    #[test]
    fn a_group_selects_its_parts_in_their_order() {
        let select = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            select_parts(list_parts(FILTERS[0]), &only)
        };
        let names = |parts: Vec<Part>| parts.into_iter().map(|part| part.name).collect::<Vec<_>>();
        let selected = names(select(&["speed", "environment"]).expect("parts"));
        assert_eq!(selected, ["environment", "speed/matmul", "speed/attention", "speed/memory"]);
        assert!(names(select(&[]).expect("parts")).iter().all(|name| !name.starts_with(PROFILES_GROUP)));
        assert_eq!(select(&["speed", "spee"]).err().map(|error| error.code()), Some(codes::command::USAGE));
    }

    #[test]
    fn every_model_is_timed_and_models_that_take_long_come_late() {
        let parts = list_parts(FILTERS[0]);
        let models = select_timed_models(false).0;
        let numbers: Vec<usize> = parts
            .iter()
            .filter_map(|part| if let PartWork::Model(number) = part.work { Some(number) } else { None })
            .collect();
        assert_eq!(numbers.len(), models.len());
        assert!(numbers.is_sorted_by_key(|number| (models[*number].is_late, models[*number].order)));
    }
}
