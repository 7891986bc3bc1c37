//! `train.optimizer`: the optimizer and its hyper-parameters.
use super::param_groups::{ParamGroupSpec, betas, patterns};
use crate::keys::{
    choice::{choice, choices},
    collections::list_expecting,
    info::{Condition, Rule},
    key::Key,
    numbers::{non_negative_number, positive_float, positive_number, share},
    record::record,
    section::section,
};

section! {
    /// The optimizer and its hyper-parameters.
    pub struct OptimizerSpec at "train.optimizer";
    /// The update rule.
    pub name: OptimizerName = Key::new(choice(), "adamw");
    /// The highest learning rate.
    pub lr: f64 = Key::new(positive_number(), "3e-4");
    /// The decay rates of the moments of AdamW and Lion, also of AdamW within Muon.
    pub betas: (f64, f64) = Key::computed(betas(), BETAS_DEFAULT, |o: &OptimizerSpec, _| o.name.default_betas())
        .rules(BETAS_RULES);
    /// The term added to the denominator of AdamW, also of AdamW within Muon.
    pub eps: f64 = Key::new(positive_float(), "1e-8").rules(EPS_RULES);
    /// The momentum of SGD and Muon.
    pub momentum: f64 = Key::computed(share(), MOMENTUM_DEFAULT, |o: &OptimizerSpec, _| o.name.default_momentum())
        .rules(MOMENTUM_RULES);
    /// The weight decay, decoupled from the gradient.
    pub weight_decay: f64 = Key::new(non_negative_number(), "0.1");
    /// The parameters without weight decay.
    ///
    /// Each item is a name pattern (`*`, `?`).
    pub no_decay: Vec<String> = Key::new(patterns(), "[\"*norm*\", \"*.ln_*\", \"*.bias\"]");
    /// The hyper-parameters of some parameters.
    ///
    /// If several groups match a parameter, the first one applies.
    #[serde(default)]
    pub groups: Vec<ParamGroupSpec> = Key::new(
        list_expecting(
            "list of groups",
            "a list of groups such as `{match: [\"*embed*\"], lr: 1e-4}`",
            record("group", "a group such as `{match: [\"*embed*\"], lr: 1e-4}`"),
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
    }
}

const NAME: &str = "train.optimizer.name";
/// The optimizers without decay rates of moments, without a term in the denominator, and without
/// momentum.
const BETAS_RULES: &[Rule] = &[Rule::no_effect(&[Condition::OneOf(NAME, &["sgd"])])];
const EPS_RULES: &[Rule] = &[Rule::no_effect(&[Condition::OneOf(NAME, &["sgd", "lion"])])];
const MOMENTUM_RULES: &[Rule] = &[Rule::no_effect(&[Condition::OneOf(NAME, &["adamw", "lion"])])];
/// The defaults of `betas` and `momentum`, for docs/job.md.
const BETAS_DEFAULT: &str = "[0.9, 0.95]; with `lion` [0.9, 0.99]";
const MOMENTUM_DEFAULT: &str = "0.9 with `sgd`, 0.95 with `muon`";

impl OptimizerName {
    /// Returns the default decay rates of the moments.
    fn default_betas(self) -> (f64, f64) {
        if self == OptimizerName::Lion { (0.9, 0.99) } else { (0.9, 0.95) }
    }

    /// Returns the default momentum; 0 for an optimizer without momentum.
    fn default_momentum(self) -> f64 {
        match self {
            OptimizerName::Sgd => 0.9,
            OptimizerName::Muon => 0.95,
            OptimizerName::Adamw | OptimizerName::Lion => 0.0,
        }
    }

    /// Returns whether the optimizer has the hyper-parameter `key`: `betas`, `eps` or `momentum`.
    pub(crate) fn has_hyper_parameter(self, key: &str) -> bool {
        let rules = match key {
            "betas" => BETAS_RULES,
            "eps" => EPS_RULES,
            _ => MOMENTUM_RULES,
        };
        !rules.iter().flat_map(|rule| rule.when).any(|condition| condition.holds(Some(self.name())))
    }
}
