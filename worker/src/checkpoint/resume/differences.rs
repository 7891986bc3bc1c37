//! Notices about differences between a job and the checkpoint from which it resumes. The job's
//! values apply, and every difference is reported.
use super::weight_match::format_names;
use crate::{optim::ParamGroup, params::ParamUnit, trainer_stages::UninitializedTrainer};
use ckpt::{Dtype, RunFacts, TensorInfo, TensorRole};
use jobspec::{Precision, ScheduleName};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::{BTreeSet, HashSet},
    path::Path,
};

/// Formats the notice which states that the checkpoint at `path` has weights but no training state,
/// such as optimizer states.
pub(super) fn format_weights_only_notice(path: &Path) -> String {
    format!(
        "{} holds only weights: the optimizer, the learning rate and the data start at step 0",
        path.display()
    )
}

/// Returns a notice if resuming changes the precision of the weights: from fp32 to bf16, or from
/// bf16 to fp32.
pub(super) fn find_precision_change_notice(
    ready: &UninitializedTrainer,
    tensors: &[TensorInfo],
) -> Option<String> {
    let has_weights = |dtype| tensors.iter().any(|t| t.role == TensorRole::Weight && t.dtype == dtype);
    let weights = ready.trainer.engine.param_dtypes();
    match weights.updated {
        device::Dtype::F32 if has_weights(Dtype::BF16) => Some(format!(
            "the checkpoint has bf16 weights and no fp32 master weights: the {} start at their values",
            if weights.has_master_weights() { "master weights" } else { "fp32 weights" }
        )),
        device::Dtype::Bf16 if has_weights(Dtype::F32) => Some(
            "train.master_weights is false: the checkpoint's fp32 weights are rounded once, to the nearest bf16"
                .into(),
        ),
        _ => None,
    }
}

/// Returns messages about parameters that this job trains although the job that wrote the
/// checkpoint did not, or the reverse.
pub(super) fn collect_frozen_parameter_notices(
    units: &[ParamUnit],
    tensors: &[TensorInfo],
    reset_states: &HashSet<String>,
) -> Vec<String> {
    let mut notices = Vec::new();
    if !reset_states.is_empty() {
        let names: BTreeSet<&String> = reset_states.iter().collect();
        let (count, verb, pronoun) = match names.len() {
            1 => ("1 parameter".to_owned(), "was", "its"),
            n => (format!("{n} parameters"), "were", "their"),
        };
        notices.push(format!(
            "{count} {verb} frozen in the checkpoint's run; {pronoun} optimizer states start at zero ({})",
            format_names(&names.into_iter().collect::<Vec<_>>())
        ));
    }
    let trained: HashSet<&str> =
        units.iter().flat_map(ParamUnit::list_trained_params).map(|p| p.name.as_str()).collect();
    let with_states = tensors.iter().filter(|t| t.role.is_optimizer_state()).map(|t| t.name.as_str());
    let unused: BTreeSet<&str> = with_states.filter(|name| !trained.contains(name)).collect();
    if !unused.is_empty() {
        let (count, present, past, pronoun) = match unused.len() {
            1 => ("1 parameter".to_owned(), "is", "was", "its"),
            n => (format!("{n} parameters"), "are", "were", "their"),
        };
        notices.push(format!(
            "{count} {present} frozen but {past} trained in the checkpoint's run; \
             {pronoun} optimizer states are not loaded ({})",
            format_names(&unused.into_iter().collect::<Vec<_>>())
        ));
    }
    notices
}

/// Returns notices about settings that differ between this job and the job that wrote the
/// checkpoint, such as the seed or the data.
pub(super) fn collect_job_setting_notices(
    ready: &UninitializedTrainer,
    facts: &RunFacts,
    data_digest: &str,
) -> Vec<String> {
    let mut notices = Vec::new();
    let train = ready.train_spec();
    let stored = &facts.job["train"];
    if facts.run_seed != train.seed {
        notices.push(format!(
            "train.seed is {} (checkpoint: {}): the order of samples changes",
            train.seed, facts.run_seed
        ));
    }
    let stored_dropout = stored["model"]["dropout"].as_f64();
    if stored_dropout != train.model.dropout {
        let rate = |rate: Option<f64>| rate.map_or("not set".to_owned(), |rate| rate.to_string());
        notices.push(format!(
            "train.model.dropout is {} (checkpoint: {})",
            rate(train.model.dropout),
            rate(stored_dropout)
        ));
    }
    if facts.cursor.get("data").and_then(|d| d.as_str()) != Some(data_digest) {
        notices.push(
            "the training data differ from those of the checkpoint; the run resumes at the same position \
             in other samples"
                .into(),
        );
    }
    let has_masters = stored["master_weights"] != json!(false);
    let precision = Precision::deserialize(&stored["precision"]).ok().filter(|p| *p != train.precision);
    if let Some(precision) = precision {
        notices.push(format!(
            "train.precision is {} (checkpoint: {}): training resumes from the checkpoint's {} weights",
            train.precision.name(),
            precision.name(),
            if has_masters { "fp32 master" } else { "bf16" }
        ));
    }
    if train.schedule.name != ScheduleName::Constant
        && let Some(steps) = stored["steps"].as_u64().filter(|s| *s != train.steps)
    {
        notices.push(format!(
            "train.steps is {} (checkpoint: {steps}): the learning-rate schedule changes",
            train.steps
        ));
    }
    notices.extend(find_expert_placement_notice(ready, &stored["experts"]));
    let units = ready.trainer.engine.clone_units();
    let stored_groups: Vec<ParamGroup> = serde_json::from_value(facts.groups.clone()).unwrap_or_default();
    for group in &ready.trainer.optimizer.list_param_groups(&units) {
        match stored_groups.iter().find(|stored| stored.name == group.name) {
            Some(stored) => notices.extend(find_group_difference_notice(group, stored)),
            None => notices.push(format!("parameter group `{}` is new", group.name)),
        }
    }
    notices
}

/// Returns a message if the expert-parallel size or the placement of experts on ranks differs
/// between this job and the job that wrote the checkpoint. `stored` is the `train.experts` section
/// of the checkpoint's job.
fn find_expert_placement_notice(ready: &UninitializedTrainer, stored: &Value) -> Option<String> {
    ready.trainer.experts.as_ref()?;
    let experts = &ready.train_spec().experts;
    let ours = json!({ "parallel": experts.expert_parallel_size, "placement": experts.placement });
    let differs = ["parallel", "placement"].iter().any(|key| stored[key] != ours[key]);
    differs.then(|| {
        format!(
            "experts are placed differently than in the checkpoint (expert-parallel size {}, checkpoint: {}): \
             their weights and optimizer states are redistributed",
            experts.expert_parallel_size, stored["parallel"]
        )
    })
}

/// Compares settings such as learning rate and weight decay of a parameter group between the job
/// and the checkpoint. Returns a notice about the differences, or `None` if there are none.
fn find_group_difference_notice(ours: &ParamGroup, stored: &ParamGroup) -> Option<String> {
    let betas = |group: &ParamGroup| format!("{:?}", [group.betas.0, group.betas.1]);
    let fields = [
        ("lr", ours.lr.to_string(), stored.lr.to_string()),
        ("betas", betas(ours), betas(stored)),
        ("eps", ours.eps.to_string(), stored.eps.to_string()),
        ("momentum", ours.momentum.to_string(), stored.momentum.to_string()),
        ("weight_decay", ours.weight_decay.to_string(), stored.weight_decay.to_string()),
        ("parameters", ours.params.len().to_string(), stored.params.len().to_string()),
    ];
    // A checkpoint converted from another program's may not record the parameters of its groups.
    let is_known = |name: &str| name != "parameters" || !stored.params.is_empty();
    let changed: Vec<String> = fields
        .iter()
        .filter(|(name, ours, stored)| ours != stored && is_known(name))
        .map(|(name, ours, stored)| format!("{name} {ours} (checkpoint: {stored})"))
        .collect();
    (!changed.is_empty()).then(|| format_group_notice(&ours.name, &changed))
}

/// Formats the notice about optimizer settings of the parameter group `group` that differ between
/// the job and the checkpoint.
pub(super) fn format_group_notice(group: &str, changed: &[String]) -> String {
    format!("parameter group `{group}` resumes with {}", changed.join(", "))
}
