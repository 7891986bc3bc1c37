//! `train.optimizer` and `train.schedule`: the update rule and the learning rate over steps.
use super::{
    decode::{Decoder, Section},
    read::{choice, int, list, number, text},
    train::positive,
    tune::{self, GroupSpec, betas, share},
};
use serde::{Deserialize, Serialize};

/// `train.optimizer`: the update rule and its hyper-parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    /// The update rule.
    pub name: OptimizerName,
    /// The highest learning rate.
    pub lr: f64,
    /// The decay rates of the moments (AdamW, Lion, and AdamW within Muon).
    pub betas: (f64, f64),
    /// Added to the denominator (AdamW, and AdamW within Muon).
    pub eps: f64,
    /// Momentum of SGD and Muon.
    pub momentum: f64,
    /// Weight decay, decoupled from the gradient.
    pub weight_decay: f64,
    /// Patterns (`*`, `?`) of the names of parameters without weight decay.
    pub no_decay: Vec<String>,
    /// Groups of parameters with other hyper-parameters; the first that matches a parameter
    /// applies.
    #[serde(default)]
    pub groups: Vec<GroupSpec>,
}

/// An update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    /// AdamW.
    Adamw,
    /// SGD with momentum.
    Sgd,
    /// Lion.
    Lion,
    /// Muon for the matrices of layers, AdamW for all other parameters.
    Muon,
}

/// `train.schedule`: the learning rate over steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleSpec {
    /// The shape after the warm-up.
    pub name: ScheduleName,
    /// Steps of the linear warm-up.
    pub warmup_steps: u64,
    /// The learning rate at the end.
    pub min_lr: f64,
    /// Steps of the final decay of `wsd`.
    pub decay_steps: u64,
}

/// The shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScheduleName {
    /// A half cosine down to `min_lr` at the last step.
    Cosine,
    /// A line down to `min_lr` at the last step.
    Linear,
    /// No decay.
    Constant,
    /// Warm-up, stable, decay: constant until the last `decay_steps`.
    Wsd,
}

/// Decodes `train.optimizer`.
pub(crate) fn decode_optimizer(d: &mut Decoder, train: &Section<'_>) -> OptimizerSpec {
    let t = d.section(train, "train.optimizer");
    let name = d.get(
        &t,
        "train.optimizer.name",
        choice(&[
            ("adamw", OptimizerName::Adamw),
            ("sgd", OptimizerName::Sgd),
            ("lion", OptimizerName::Lion),
            ("muon", OptimizerName::Muon),
        ]),
    );
    let momentum = d.get_optional(&t, "train.optimizer.momentum", share("a number from 0 to below 1"));
    let default_betas = if name == OptimizerName::Lion { (0.9, 0.99) } else { (0.9, 0.95) };
    OptimizerSpec {
        name,
        lr: d.get(&t, "train.optimizer.lr", number("a number above 0", |x| x > 0.0)),
        betas: d.get_optional(&t, "train.optimizer.betas", betas).unwrap_or(default_betas),
        eps: d.get(&t, "train.optimizer.eps", positive),
        momentum: momentum.unwrap_or(match name {
            OptimizerName::Sgd => 0.9,
            OptimizerName::Muon => 0.95,
            OptimizerName::Adamw | OptimizerName::Lion => 0.0,
        }),
        weight_decay: d.get(
            &t,
            "train.optimizer.weight_decay",
            number("a number of 0 or more", |x| x >= 0.0),
        ),
        no_decay: d.get(&t, "train.optimizer.no_decay", list("a list of patterns", text)),
        groups: d.get(&t, "train.optimizer.groups", tune::groups),
    }
}

/// Decodes `train.schedule`. `lr` and `steps` determine the defaults of `min_lr` and `decay_steps`.
pub(crate) fn decode_schedule(d: &mut Decoder, train: &Section<'_>, lr: f64, steps: u64) -> ScheduleSpec {
    let t = d.section(train, "train.schedule");
    let name = d.get(
        &t,
        "train.schedule.name",
        choice(&[
            ("cosine", ScheduleName::Cosine),
            ("linear", ScheduleName::Linear),
            ("constant", ScheduleName::Constant),
            ("wsd", ScheduleName::Wsd),
        ]),
    );
    let min_lr = d.get_optional(&t, "train.schedule.min_lr", number("a number of 0 or more", |x| x >= 0.0));
    let decay = d.get_optional(&t, "train.schedule.decay_steps", int(1..=u64::MAX));
    ScheduleSpec {
        name,
        warmup_steps: d.get(&t, "train.schedule.warmup_steps", int(0..=u64::MAX)),
        min_lr: min_lr.unwrap_or(lr / 10.0),
        decay_steps: decay.unwrap_or(if name == ScheduleName::Wsd { (steps / 5).max(1) } else { 0 }),
    }
}
