//! `train.schedule`: how the learning rate changes over the steps.
use crate::keys::{
    choice::{choice_type, choices},
    key::Key,
    key_info::{Condition, Rule},
    numbers::{integer_at_least_type, non_negative_number_type},
    section::section,
};

section! {
    /// How the learning rate changes over the steps.
    pub struct ScheduleSpec at "train.schedule";
    /// The shape after the warm-up.
    pub name: ScheduleName = Key::new(choice_type(), "constant");
    /// The number of steps of the warm-up.
    ///
    /// The learning rate rises linearly to its highest value in these steps.
    pub warmup_steps: u64 = Key::new(integer_at_least_type(0), "0").with_aliases(&["warmup_num_steps"]);
    /// The learning rate at the end; not with `constant`.
    pub min_lr: f64 = Key::computed(non_negative_number_type(), "a tenth of `optimizer.lr`", |_, v| {
        v.get_number("train.optimizer.lr") / 10.0
    }).with_rules(MIN_LR_RULES).into_reloadable();
    /// The number of steps of the final decay of `wsd`.
    pub decay_steps: u64 = Key::computed(integer_at_least_type(1), "a fifth of `steps` with `wsd`", |schedule: &ScheduleSpec, v| {
        let steps = v.get("train.steps").and_then(|steps| steps.parse::<u64>().ok()).unwrap_or(0);
        if schedule.name == ScheduleName::Wsd { (steps / 5).max(1) } else { 0 }
    }).with_rules(DECAY_RULES).into_reloadable();
}

/// The path in job.yaml of the key that names the schedule of the learning rate.
const NAME_KEY: &str = "train.schedule.name";
/// The rule that rejects `train.schedule.min_lr` in jobs with a constant learning rate.
const MIN_LR_RULES: &[Rule] = &[Rule::no_effect(&[Condition::OneOf(NAME_KEY, &["constant"])])];
/// The rule that rejects `train.schedule.decay_steps` in jobs with a schedule other than `wsd`.
const DECAY_RULES: &[Rule] = &[Rule::no_effect(&[Condition::NoneOf(NAME_KEY, &["wsd"])])];

choices! {
    /// `train.schedule.name`: the shape of the learning rate after the warm-up.
    pub enum ScheduleName {
        /// A half cosine that ends at `min_lr` at the last step.
        Cosine = "cosine",
        /// A line that ends at `min_lr` at the last step.
        Linear = "linear",
        /// The highest learning rate until the last step.
        Constant = "constant",
        /// Warm-up, stable, decay: the highest learning rate until a final decay of `decay_steps`
        /// steps.
        Wsd = "wsd",
    }
}
