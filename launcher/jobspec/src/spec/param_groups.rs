//! Declares the keys of an item of `train.optimizer.groups`, with the parsers and printers
//! ([`ValueType`]) for name patterns and decay rates.
use crate::keys::{
    collections::{list_type, pair_type},
    key::Key,
    key_info::{Condition, Rule},
    numbers::{fraction_type, non_negative_number_type, positive_f32_type, positive_number_type},
    section::section,
    text::text_type,
    value_type::ValueType,
};

section! {
    /// An item of `train.optimizer.groups`: hyper-parameters for the parameters that match its
    /// patterns. A `None` stands for the value in `train.optimizer`.
    #[derive(Default)]
    pub struct ParamGroupSpec at "";
    /// The name patterns (`*`, `?`) of the parameters that belong to the group.
    pub r#match: Vec<String> = Key::required(patterns_type().not_empty());
    /// The highest learning rate of the group.
    pub lr: Option<f64> = Key::optional(positive_number_type(), UNCHANGED_DEFAULT_TEXT);
    /// The highest learning rate of the group, as a multiple of `optimizer.lr`.
    pub lr_scale: Option<f64> = Key::optional(non_negative_number_type(), UNCHANGED_DEFAULT_TEXT).with_rules(LR_SCALE_RULES);
    /// The weight decay, which also applies to parameters that `no_decay` names.
    pub weight_decay: Option<f64> = Key::optional(non_negative_number_type(), UNCHANGED_DEFAULT_TEXT);
    /// The decay rates of the first and second moments.
    pub betas: Option<(f64, f64)> = Key::optional(betas_type(), UNCHANGED_DEFAULT_TEXT);
    /// The constant that is added to the denominator of the update.
    pub eps: Option<f64> = Key::optional(positive_f32_type(), UNCHANGED_DEFAULT_TEXT);
    /// The momentum of SGD or Muon.
    pub momentum: Option<f64> = Key::optional(fraction_type(), UNCHANGED_DEFAULT_TEXT);
}

/// The text by which docs/job.md describes the default of each hyper-parameter of a parameter
/// group: the value in `train.optimizer`.
const UNCHANGED_DEFAULT_TEXT: &str = "the value of `train.optimizer`";
/// The rule that rejects an item of `train.optimizer.groups` that sets both `lr` and `lr_scale`.
const LR_SCALE_RULES: &[Rule] = &[Rule::conflict(&[Condition::Given("lr")]).with_help("keep one of them")];

/// Returns the parser and printer ([`ValueType`]) for lists of patterns that select parameters by
/// name.
pub(crate) fn patterns_type() -> ValueType<Vec<String>> {
    list_type("list of patterns", text_type())
}

/// Returns the parser and printer ([`ValueType`]) for `betas`, the decay rates of an optimizer's
/// moments: two numbers from 0 to below 1.
pub(crate) fn betas_type() -> ValueType<(f64, f64)> {
    pair_type("two numbers from 0 to below 1", "a list of two numbers from 0 to below 1", fraction_type())
}
