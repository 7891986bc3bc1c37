//! `train.optimizer:` and `train.schedule:` — how parameters move, and the learning rate over steps.
use super::{
    decode::{Decoder, Table},
    read::{choice, int, list, number, text},
    train::positive,
    tune::{self, GroupSpec, betas, share},
};
use serde::{Deserialize, Serialize};

/// `optimizer:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    pub name: OptimizerName,
    pub lr: f64,
    pub betas: (f64, f64),
    pub eps: f64,
    /// SGD and Muon.
    pub momentum: f64,
    pub weight_decay: f64,
    /// Patterns (`*`, `?`) of parameter names without weight decay.
    pub no_decay: Vec<String>,
    /// Parameters with numbers of their own; the first that matches counts.
    #[serde(default)]
    pub groups: Vec<GroupSpec>,
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerName {
    Adamw,
    Sgd,
    Lion,
    /// For the matrices of layers; AdamW for the rest.
    Muon,
}

/// `schedule:` — learning rate over steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleSpec {
    pub name: ScheduleName,
    pub warmup_steps: u64,
    pub min_lr: f64,
    /// wsd: steps of the final decay.
    pub decay_steps: u64,
}

/// Shape of the schedule after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScheduleName {
    Cosine,
    Linear,
    Constant,
    Wsd,
}

pub(crate) fn optimizer(d: &mut Decoder, train: &Table<'_>) -> OptimizerSpec {
    let t = d.section(train, "train.optimizer");
    let name = d.get(
        &t,
        "train.optimizer.name",
        choice(
            &[
                ("adamw", OptimizerName::Adamw),
                ("sgd", OptimizerName::Sgd),
                ("lion", OptimizerName::Lion),
                ("muon", OptimizerName::Muon),
            ],
            &[],
        ),
    );
    let momentum = d.opt(&t, "train.optimizer.momentum", share("a number from 0 to below 1"));
    let default_betas = if name == OptimizerName::Lion { (0.9, 0.99) } else { (0.9, 0.95) };
    OptimizerSpec {
        name,
        lr: d.get(&t, "train.optimizer.lr", number("a number above 0", |x| x > 0.0)),
        betas: d.opt(&t, "train.optimizer.betas", betas).unwrap_or(default_betas),
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

pub(crate) fn schedule(d: &mut Decoder, train: &Table<'_>, lr: f64, steps: u64) -> ScheduleSpec {
    let t = d.section(train, "train.schedule");
    let name = d.get(
        &t,
        "train.schedule.name",
        choice(
            &[
                ("cosine", ScheduleName::Cosine),
                ("linear", ScheduleName::Linear),
                ("constant", ScheduleName::Constant),
                ("wsd", ScheduleName::Wsd),
            ],
            &[],
        ),
    );
    let min_lr = d.opt(&t, "train.schedule.min_lr", number("a number of 0 or more", |x| x >= 0.0));
    let decay = d.opt(&t, "train.schedule.decay_steps", int(1..=u64::MAX));
    ScheduleSpec {
        name,
        warmup_steps: d.get(&t, "train.schedule.warmup_steps", int(0..=u64::MAX)),
        min_lr: min_lr.unwrap_or(lr / 10.0),
        decay_steps: decay.unwrap_or(if name == ScheduleName::Wsd { (steps / 5).max(1) } else { 0 }),
    }
}
