//! Selects by name patterns which parameters are trained, and divides them into the optimizer's
//! parameter groups.
//!
//! Each pattern must match a parameter. With low-rank adapters only the adapters are trained. A
//! tied matrix is one parameter with two names, and a pattern that matches either name selects the
//! matrix.
use crate::{
    expert_layout::{self, ExpertLayout},
    model::{Model, TiedWeight, lora::LoraConfig},
    params::ParamUnit,
};
use ckpt::peft::is_lora_matrix;
use diagnostic::{Diagnostic, codes};
use globset::{Glob, GlobMatcher};
use jobspec::{OptimizerSpec, Precision, TrainSpec};

/// The key of job.yaml for name patterns of the parameters that are not trained (frozen).
const FREEZE_KEY: &str = "train.freeze";
/// The key of job.yaml for name patterns of the parameters that are trained. If the key is set, all
/// other parameters are frozen.
const TRAIN_ONLY_KEY: &str = "train.train_only";
/// The key of job.yaml for the optimizer's parameter groups (parameters with equal optimizer
/// settings).
const GROUPS_KEY: &str = "train.optimizer.groups";
/// The key of job.yaml for the names of matrices that get LoRA adapters.
const LORA_TARGETS_KEY: &str = "train.lora.targets";
/// The key of job.yaml for the precision of the training.
const PRECISION_KEY: &str = "train.precision";
/// The key of job.yaml for name patterns of the parameters that are exempt from weight decay.
const NO_DECAY_KEY: &str = "train.optimizer.no_decay";
/// The key of job.yaml for the directory of pretrained LoRA adapters.
pub const LORA_FROM_KEY: &str = "train.lora.from";

/// Prepares a job's model for training: adds the LoRA adapters, sets fp8 precision and the dropout
/// seed, and marks each parameter as trained or frozen. Returns the model's parameter units
/// (parameters that are gathered together), in which each parameter is marked as trained or frozen.
///
/// # Errors
///
/// Fails if a key that selects parameters has a mistake, and reports all mistakes. The subject of
/// each error is the key with the mistake.
pub fn build_trainable_units(
    model: &mut Model,
    layout: Option<&ExpertLayout>,
    train: &TrainSpec,
) -> Result<Vec<ParamUnit>, Vec<Diagnostic>> {
    if train.precision == Precision::Fp8 {
        model.enable_fp8().map_err(|e| vec![Diagnostic::from(e).with_subject(PRECISION_KEY)])?;
    }
    if let Some(spec) = &train.lora {
        let lora = LoraConfig { spec: spec.clone(), seed: train.seed };
        let key = if spec.from.is_some() { LORA_FROM_KEY } else { LORA_TARGETS_KEY };
        model.add_lora_adapters(&lora).map_err(|e| vec![Diagnostic::from(e).with_subject(key)])?;
    }
    model.set_dropout_seed(train.seed);
    let mut units = expert_layout::build_units_with_experts(model, layout);
    mark_trained_params(&mut units, &model.tied_weights(), train)?;
    let dense_units = units.iter().filter(|u| !u.holds_experts()).count();
    model.set_trained_params(&units[..dense_units]);
    Ok(units)
}

/// Marks each parameter of the model as trained or frozen, by the keys `train.freeze` and
/// `train.train_only` of job.yaml. With `train.lora`, only adapters are marked as trained.
///
/// # Errors
///
/// Fails if a pattern is invalid or matches no parameter, or if no parameter is trained. The
/// subject of each error is the key of the setting.
pub fn mark_trained_params(
    units: &mut [ParamUnit],
    ties: &[TiedWeight],
    train: &TrainSpec,
) -> Result<(), Vec<Diagnostic>> {
    let names = || units.iter().flat_map(|u| &u.params).map(|p| p.name.as_str());
    let mut mistakes = Vec::new();
    let freeze =
        NamePatterns::compile_matched_patterns(FREEZE_KEY, &train.freeze, names(), ties, &mut mistakes);
    let only = NamePatterns::compile_matched_patterns(
        TRAIN_ONLY_KEY,
        &train.train_only,
        names(),
        ties,
        &mut mistakes,
    );
    let has_selection = !train.train_only.is_empty();
    for unit in units.iter_mut() {
        unit.set_trained(|name| match train.lora {
            Some(_) => is_lora_matrix(name),
            None => !freeze.matches(name, ties) && (!has_selection || only.matches(name, ties)),
        });
    }
    if mistakes.is_empty() && !units.iter().any(ParamUnit::has_any_trained) {
        let message = format!("`{FREEZE_KEY}` freezes every parameter; at least one must be trained");
        let code = codes::training::NO_TRAINED_PARAMETERS;
        mistakes.push(Diagnostic::error(code, message).with_subject(FREEZE_KEY));
    }
    if mistakes.is_empty() { Ok(()) } else { Err(mistakes) }
}

/// Returns the index of the first parameter unit (tensors that are gathered together) that needs a
/// gradient because it is trained. A layer's unit needs one also if only the layer's experts are
/// trained. Units with lower indices need no gradient.
pub fn find_first_trained_unit<'a>(units: impl Iterator<Item = &'a ParamUnit>) -> usize {
    let dense_index =
        |(i, u): (usize, &ParamUnit)| u.has_any_trained().then(|| u.expert_layer().map_or(i, |l| l + 1));
    units.enumerate().filter_map(dense_index).min().unwrap_or(0)
}

/// Returns the index of the first layer for which a backward pass must be computed, because it or
/// an earlier part of the model is trained. All parameters before this layer are frozen.
pub fn find_first_backward_layer(units: &[ParamUnit]) -> usize {
    let layers = units.iter().filter(|u| !u.holds_experts()).count().saturating_sub(2);
    find_first_trained_unit(units.iter()).saturating_sub(1).min(layers)
}

/// The compiled glob patterns of one key of job.yaml, which select parameters by their names.
struct NamePatterns(Vec<GlobMatcher>);

impl NamePatterns {
    /// Compiles glob patterns for parameter names from one key of job.yaml, and adds an error for
    /// each pattern that matches no name in `names`. Adds every error to `mistakes`.
    fn compile_matched_patterns<'a>(
        key: &'static str,
        patterns: &[String],
        names: impl Iterator<Item = &'a str> + Clone,
        ties: &[TiedWeight],
        mistakes: &mut Vec<Diagnostic>,
    ) -> Self {
        let compiled = NamePatterns::compile_patterns(key, patterns, mistakes);
        for pattern in &compiled.0 {
            if !names.clone().any(|n| matches_name_or_alias(pattern, n, ties)) {
                let examples: Vec<&str> = names.clone().take(3).collect();
                let pattern = pattern.glob().glob();
                let message = format!("the pattern `{pattern}` in `{key}` matches no parameter");
                mistakes.push(
                    Diagnostic::error(codes::training::PARAMETER_PATTERN_UNMATCHED, message)
                        .with_subject(key)
                        .with_field("pattern", pattern)
                        .with_help(format!("parameter names are of the form {}", examples.join(", "))),
                );
            }
        }
        compiled
    }

    /// Compiles glob patterns that select parameters by their names, even if a pattern matches no
    /// name. Adds every error to `mistakes`.
    fn compile_patterns(key: &'static str, patterns: &[String], mistakes: &mut Vec<Diagnostic>) -> Self {
        let mut compiled = Vec::new();
        for pattern in patterns {
            match Glob::new(pattern) {
                Ok(glob) => compiled.push(glob.compile_matcher()),
                Err(e) => {
                    let message = format!("the pattern `{pattern}` in `{key}` is not valid: {}", e.kind());
                    mistakes.push(
                        Diagnostic::error(codes::training::PARAMETER_PATTERN_INVALID, message)
                            .with_subject(key)
                            .with_field("pattern", pattern.as_str()),
                    );
                }
            }
        }
        NamePatterns(compiled)
    }

    /// Returns whether a pattern matches the parameter name `name`, or the other name of a
    /// parameter that has two names because of tied weights.
    fn matches(&self, name: &str, ties: &[TiedWeight]) -> bool {
        self.0.iter().any(|p| matches_name_or_alias(p, name, ties))
    }
}

/// Returns whether the glob pattern matches the parameter name `name`, or the other name of a
/// parameter that has two names because of tied weights.
fn matches_name_or_alias(pattern: &GlobMatcher, name: &str, ties: &[TiedWeight]) -> bool {
    let matches_alias = |t: &TiedWeight| t.target == name && pattern.is_match(&t.alias);
    pattern.is_match(name) || ties.iter().any(matches_alias)
}

/// The optimizer settings of one parameter group, and the name of the group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupHyperparams {
    /// The name of the group: `decay` or `no_decay`, or `group 1` or `group 1 no_decay` for entry 1
    /// of `optimizer.groups`.
    pub name: String,
    /// The factor by which the job's learning rate is multiplied.
    pub lr_scale: f64,
    /// The decay rates of the moments (AdamW, Lion).
    pub betas: (f64, f64),
    /// The constant added to the root of the second moment (AdamW).
    pub eps: f64,
    /// The momentum factor (SGD, Muon).
    pub momentum: f64,
    /// The coefficient of weight decay; 0 for parameters without weight decay.
    pub weight_decay: f64,
}

/// The optimizer's parameter groups (parameters with equal optimizer settings), and the group of
/// each parameter.
pub struct ParamGroups {
    /// The hyper-parameters of each group.
    pub hyperparams: Vec<GroupHyperparams>,
    /// For each unit and parameter, the index of the parameter's group. The index of a frozen
    /// parameter is meaningless.
    pub group_indices: Vec<Vec<usize>>,
}

/// Assigns each trained parameter to one of the optimizer's parameter groups (parameters with equal
/// settings), by the name patterns in job.yaml.
///
/// # Errors
///
/// Fails if a pattern is invalid or matches no parameter, and reports every such pattern. The
/// subject of each error is the key of the pattern.
pub fn assign_param_groups(
    spec: &OptimizerSpec,
    units: &[ParamUnit],
    ties: &[TiedWeight],
) -> Result<ParamGroups, Vec<Diagnostic>> {
    let mut mistakes = Vec::new();
    let no_decay = NamePatterns::compile_patterns(NO_DECAY_KEY, &spec.no_decay, &mut mistakes);
    let trained = units.iter().flat_map(ParamUnit::list_trained_params).map(|p| p.name.as_str());
    let mut rules = Vec::new();
    for g in &spec.groups {
        rules.push(NamePatterns::compile_matched_patterns(
            GROUPS_KEY,
            &g.r#match,
            trained.clone(),
            ties,
            &mut mistakes,
        ));
    }
    if !mistakes.is_empty() {
        return Err(mistakes);
    }
    let mut groups: Vec<GroupHyperparams> = Vec::new();
    let mut group_of = Vec::with_capacity(units.len());
    for unit in units {
        let mut of_unit = Vec::with_capacity(unit.params.len());
        for (i, p) in unit.params.iter().enumerate() {
            let rule = rules.iter().position(|r| r.matches(&p.name, ties));
            let hyperparams = resolve_group_hyperparams(spec, rule, no_decay.matches(&p.name, ties));
            let group = groups.iter().position(|g| *g == hyperparams);
            of_unit.push(group.unwrap_or(groups.len()));
            if group.is_none() && unit.is_trained(i) {
                groups.push(hyperparams);
            }
        }
        group_of.push(of_unit);
    }
    Ok(ParamGroups { hyperparams: groups, group_indices: group_of })
}

/// Determines the optimizer settings of one parameter group from the job's optimizer settings and
/// from the entry of `train.optimizer.groups` that defines the group, if any.
fn resolve_group_hyperparams(spec: &OptimizerSpec, rule: Option<usize>, no_decay: bool) -> GroupHyperparams {
    let default_decay = if no_decay { 0.0 } else { spec.weight_decay };
    let default_name = if no_decay { "no_decay" } else { "decay" };
    let Some((n, g)) = rule.and_then(|n| Some((n + 1, spec.groups.get(n)?))) else {
        return GroupHyperparams {
            name: default_name.into(),
            lr_scale: 1.0,
            betas: spec.betas,
            eps: spec.eps,
            momentum: spec.momentum,
            weight_decay: default_decay,
        };
    };
    GroupHyperparams {
        name: match g.weight_decay {
            None if no_decay => format!("group {n} no_decay"),
            _ => format!("group {n}"),
        },
        lr_scale: g.lr.map(|lr| lr / spec.lr).or(g.lr_scale).unwrap_or(1.0),
        betas: g.betas.unwrap_or(spec.betas),
        eps: g.eps.unwrap_or(spec.eps),
        momentum: g.momentum.unwrap_or(spec.momentum),
        weight_decay: g.weight_decay.unwrap_or(default_decay),
    }
}
