//! `train.optimizer` and `train.schedule`: the optimizer, and the learning rate over the steps.
use super::{
    decode::{JobDecoder, JobSection},
    param_groups::{self, ParamGroupSpec, read_betas, share_reader},
    readers::{choice_reader, int_reader, list_reader, number_reader, read_positive, read_text},
};
use serde::{Deserialize, Serialize};

/// `train.optimizer`: the optimizer and its hyper-parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    /// The optimization algorithm.
    pub name: OptimizerName,
    /// The highest learning rate of the schedule.
    pub lr: f64,
    /// The decay rates of the first and second moments. They apply to AdamW, Lion, and Muon's AdamW
    /// parameters.
    pub betas: (f64, f64),
    /// The constant that is added to the denominator of the update. It applies to AdamW and Muon's
    /// AdamW parameters.
    pub eps: f64,
    /// The momentum, which applies to SGD and Muon.
    pub momentum: f64,
    /// The weight decay, which is decoupled from the gradient.
    pub weight_decay: f64,
    /// Name patterns (`*`, `?`) of the parameters that have no weight decay.
    pub no_decay: Vec<String>,
    /// Groups of parameters with other hyper-parameters. If several groups match a parameter, the
    /// first one applies.
    #[serde(default)]
    pub groups: Vec<ParamGroupSpec>,
}

/// `train.optimizer.name`: the optimization algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay (AdamW).
    Adamw,
    /// Stochastic gradient descent (SGD) with momentum.
    Sgd,
    /// Lion, which updates parameters by the sign of an average of gradients.
    Lion,
    /// Muon for the matrices of layers, AdamW for all other parameters.
    Muon,
}

/// `train.schedule`: how the learning rate changes over the steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleSpec {
    /// The shape of the learning rate after the warm-up.
    pub name: ScheduleName,
    /// The number of steps in which the learning rate rises linearly to its highest value.
    pub warmup_steps: u64,
    /// The learning rate at the end of the schedule.
    pub min_lr: f64,
    /// The number of steps of the final decay of the schedule `wsd`.
    pub decay_steps: u64,
}

/// `train.schedule.name`: the shape of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScheduleName {
    /// A half cosine that ends at `min_lr` at the last step.
    Cosine,
    /// A line that ends at `min_lr` at the last step.
    Linear,
    /// The highest learning rate until the last step.
    Constant,
    /// Warm-up, stable, decay: the highest learning rate until a final decay of `decay_steps`
    /// steps.
    Wsd,
}

/// Decodes the section `train.optimizer`. Reports errors to `d`.
pub(crate) fn decode_optimizer(d: &mut JobDecoder, train: &JobSection<'_>) -> OptimizerSpec {
    let t = d.open_section(train, "train.optimizer");
    let name = d.decode_value(
        &t,
        "train.optimizer.name",
        choice_reader(&[
            ("adamw", OptimizerName::Adamw),
            ("sgd", OptimizerName::Sgd),
            ("lion", OptimizerName::Lion),
            ("muon", OptimizerName::Muon),
        ]),
    );
    let momentum =
        d.decode_optional(&t, "train.optimizer.momentum", share_reader("a number from 0 to below 1"));
    let default_betas = if name == OptimizerName::Lion { (0.9, 0.99) } else { (0.9, 0.95) };
    OptimizerSpec {
        name,
        lr: d.decode_value(&t, "train.optimizer.lr", number_reader("a number above 0", |x| x > 0.0)),
        betas: d.decode_optional(&t, "train.optimizer.betas", read_betas).unwrap_or(default_betas),
        eps: d.decode_value(&t, "train.optimizer.eps", read_positive),
        momentum: momentum.unwrap_or(match name {
            OptimizerName::Sgd => 0.9,
            OptimizerName::Muon => 0.95,
            OptimizerName::Adamw | OptimizerName::Lion => 0.0,
        }),
        weight_decay: d.decode_value(
            &t,
            "train.optimizer.weight_decay",
            number_reader("a number of 0 or more", |x| x >= 0.0),
        ),
        no_decay: d.decode_value(
            &t,
            "train.optimizer.no_decay",
            list_reader("a list of patterns", read_text),
        ),
        groups: d.decode_value(&t, "train.optimizer.groups", param_groups::read_groups),
    }
}

/// Decodes the section `train.schedule`. The default of `min_lr` follows from `lr`, and the default
/// of `decay_steps` from `steps`. Reports errors to `d`.
pub(crate) fn decode_schedule(
    d: &mut JobDecoder,
    train: &JobSection<'_>,
    lr: f64,
    steps: u64,
) -> ScheduleSpec {
    let t = d.open_section(train, "train.schedule");
    let name = d.decode_value(
        &t,
        "train.schedule.name",
        choice_reader(&[
            ("cosine", ScheduleName::Cosine),
            ("linear", ScheduleName::Linear),
            ("constant", ScheduleName::Constant),
            ("wsd", ScheduleName::Wsd),
        ]),
    );
    let min_lr =
        d.decode_optional(&t, "train.schedule.min_lr", number_reader("a number of 0 or more", |x| x >= 0.0));
    let decay = d.decode_optional(&t, "train.schedule.decay_steps", int_reader(1..=u64::MAX));
    ScheduleSpec {
        name,
        warmup_steps: d.decode_value(&t, "train.schedule.warmup_steps", int_reader(0..=u64::MAX)),
        min_lr: min_lr.unwrap_or(lr / 10.0),
        decay_steps: decay.unwrap_or(if name == ScheduleName::Wsd { (steps / 5).max(1) } else { 0 }),
    }
}
