//! `train.optimizer`: the optimizer and its hyper-parameters.
use super::param_groups::{ParamGroupSpec, betas_type, patterns_type};
use crate::keys::{
    choice::{choice_type, choices},
    collections::described_list_type,
    key::Key,
    key_info::{Condition, Rule},
    numbers::{
        fraction_type, non_negative_number_type, non_positive_number_type, positive_f32_type,
        positive_number_type,
    },
    record::record_type,
    section::section,
};

section! {
    /// The optimizer and its hyper-parameters.
    pub struct OptimizerSpec at "train.optimizer";
    /// The update rule.
    pub name: OptimizerName = Key::new(choice_type(), "adamw");
    /// The highest learning rate.
    pub lr: f64 = Key::new(positive_number_type(), "3e-4");
    /// The decay rates of the moments of AdamW (also within Muon) and Lion.
    pub betas: (f64, f64) = Key::computed(betas_type(), BETAS_DEFAULT_TEXT, |o: &OptimizerSpec, _| o.name.default_betas())
        .with_rules(BETAS_RULES);
    /// The term added to the denominator of AdamW (also within Muon), and to the squared gradient
    /// of Adafactor.
    pub eps: f64 = Key::computed(positive_f32_type(), EPS_DEFAULT_TEXT, |o: &OptimizerSpec, _| o.name.default_eps())
        .with_rules(EPS_RULES);
    /// The momentum of SGD and Muon.
    pub momentum: f64 = Key::computed(fraction_type(), MOMENTUM_DEFAULT_TEXT, |o: &OptimizerSpec, _| o.name.default_momentum())
        .with_rules(MOMENTUM_RULES);
    /// The decay rate of the first moment of Adafactor.
    pub beta1: Option<f64> = Key::optional(fraction_type(), "no first moment").with_rules(ADAFACTOR_RULES);
    /// The exponent of Adafactor: the decay rate of second moments is 1 − t^`beta2_decay` in step
    /// t.
    pub beta2_decay: f64 = Key::new(non_positive_number_type(), "-0.8").with_aliases(&["decay_rate"]).with_rules(ADAFACTOR_RULES);
    /// The largest root mean square of an update of Adafactor, as a multiple of the learning rate.
    pub clip_threshold: f64 = Key::new(positive_number_type(), "1.0").with_rules(ADAFACTOR_RULES);
    /// The weight decay: decoupled from the gradient, or with `sgd` added to the gradient.
    pub weight_decay: f64 = Key::new(non_negative_number_type(), "0.1");
    /// The parameters without weight decay.
    ///
    /// Each item is a name pattern (`*`, `?`).
    pub no_decay: Vec<String> = Key::new(patterns_type(), "[\"*norm*\", \"*.ln_*\", \"*.bias\"]");
    /// The hyper-parameters of some parameters.
    ///
    /// If several groups match a parameter, the first one applies.
    #[serde(default)]
    pub groups: Vec<ParamGroupSpec> = Key::new(
        described_list_type(
            "list of groups",
            "a list of groups such as `{match: [\"*embed*\"], lr: 1e-4}`",
            record_type("group", "a group such as `{match: [\"*embed*\"], lr: 1e-4}`"),
        ).hidden_if_empty(),
        "[]",
    );
}

choices! {
    /// `train.optimizer.name`: the optimization algorithm.
    pub enum OptimizerName {
        /// Adam with decoupled weight decay (AdamW).
        Adamw = "adamw",
        /// Stochastic gradient descent (SGD) with momentum.
        Sgd = "sgd",
        /// Lion, which updates parameters by the sign of an average of gradients.
        Lion = "lion",
        /// Muon for the matrices of layers, AdamW for all other parameters.
        Muon = "muon",
        /// Adafactor, which stores row and column means instead of the second moments of matrices.
        Adafactor = "adafactor",
    }
}

/// The path in job.yaml of the key that names the optimizer.
const NAME_KEY: &str = "train.optimizer.name";
/// The rule that rejects the key `betas` in jobs with an optimizer that has no such
/// hyper-parameter.
const BETAS_RULES: &[Rule] = &[Rule::no_effect(&[Condition::OneOf(NAME_KEY, &["sgd", "adafactor"])])];
/// The rule that rejects the key `eps` in jobs with an optimizer that has no such hyper-parameter.
const EPS_RULES: &[Rule] = &[Rule::no_effect(&[Condition::OneOf(NAME_KEY, &["sgd", "lion"])])];
/// The rule that rejects the key `momentum` in jobs with an optimizer that has no such
/// hyper-parameter.
const MOMENTUM_RULES: &[Rule] =
    &[Rule::no_effect(&[Condition::OneOf(NAME_KEY, &["adamw", "lion", "adafactor"])])];
/// The rule that rejects the keys `beta1`, `beta2_decay` and `clip_threshold` in jobs with an
/// optimizer other than Adafactor.
const ADAFACTOR_RULES: &[Rule] = &[Rule::no_effect(&[Condition::NoneOf(NAME_KEY, &["adafactor"])])];
/// The text by which docs/job.md describes the defaults of `betas`.
const BETAS_DEFAULT_TEXT: &str = "[0.9, 0.95]; with `lion` [0.9, 0.99]";
/// The text by which docs/job.md describes the defaults of `eps`.
const EPS_DEFAULT_TEXT: &str = "1e-8; with `adafactor` 1e-30";
/// The text by which docs/job.md describes the defaults of `momentum`.
const MOMENTUM_DEFAULT_TEXT: &str = "0.9 with `sgd`, 0.95 with `muon`";

impl OptimizerName {
    /// Returns the optimizer's default of the key `betas`: the decay rates of its moments.
    fn default_betas(self) -> (f64, f64) {
        if self == OptimizerName::Lion { (0.9, 0.99) } else { (0.9, 0.95) }
    }

    /// Returns the optimizer's default of the key `eps`, the number that avoids divisions by zero.
    fn default_eps(self) -> f64 {
        if self == OptimizerName::Adafactor { 1e-30 } else { 1e-8 }
    }

    /// Returns the optimizer's default of the key `momentum`; 0 for an optimizer without momentum.
    fn default_momentum(self) -> f64 {
        match self {
            OptimizerName::Sgd => 0.9,
            OptimizerName::Muon => 0.95,
            OptimizerName::Adamw | OptimizerName::Lion | OptimizerName::Adafactor => 0.0,
        }
    }

    /// Returns whether the optimizer has the hyper-parameter that the key `key` sets: `betas`,
    /// `eps` or `momentum`.
    pub(crate) fn has_hyper_parameter(self, key: &str) -> bool {
        let rules = match key {
            "betas" => BETAS_RULES,
            "eps" => EPS_RULES,
            _ => MOMENTUM_RULES,
        };
        !rules.iter().flat_map(|rule| rule.when).any(|condition| condition.holds(Some(self.name())))
    }
}
