//! What a training state says of itself beside its tensors, in the same words whatever program wrote it.
use crate::catalog::Tie;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A group of the optimizer: its hyper-parameters and the weights that it trains.
///
/// As JSON it is one object: the hyper-parameters and `params`, the names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// As torch calls them (`lr`, `betas`, `eps`, `weight_decay`, …); empty where the checkpoint has none.
    #[serde(flatten)]
    pub hyper: Map<String, Value>,
    /// Weights in the group's own order.
    #[serde(rename = "params", default)]
    pub names: Vec<String>,
}

/// What every training state has beside its tensors, as far as its checkpoint says it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrainingState {
    /// Steps done, skipped ones included.
    pub step: Option<u64>,
    /// Samples consumed by all ranks together.
    pub samples: Option<u64>,
    /// Ranks that wrote it.
    pub world: Option<u32>,
    /// ZeRO stage.
    pub stage: Option<u8>,
    pub groups: Vec<Group>,
    /// Updates that the optimizer made to each weight.
    pub steps: BTreeMap<String, u64>,
    /// State of the learning rate scheduler, as torch's `state_dict` has it; null when there is none.
    pub scheduler: Value,
    /// State of the loss scaler of fp16, as its program has it; null when there is none.
    pub loss_scaler: Value,
    pub ties: Vec<Tie>,
    /// Weights that are not trained.
    pub frozen: Vec<String>,
    /// Tensors of role [`crate::Role::Buffer`].
    pub buffers: Vec<String>,
}

/// Where the loss scale of fp16 stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    pub scale: f64,
    /// Steps since it last changed.
    pub steps: u64,
}

impl TrainingState {
    /// What DeepSpeed's `DynamicLossScaler`, torch's `GradScaler` or a run of ours says of it. `None`: there is none, or one
    /// that is always the same.
    pub fn loss_scale(&self) -> Option<LossScale> {
        let number = |key: &str| self.loss_scaler.get(key).and_then(Value::as_f64);
        let count = |key: &str| number(key).filter(|n| (0.0..9e15).contains(n)).map(|n| n as u64);
        if let Some(scale) = number("cur_scale") {
            // DeepSpeed counts from the last overflow, -1 before any, and changes the scale every so many steps
            let since = number("cur_iter")? - number("last_overflow_iter")? - 1.0;
            let window = count("scale_window").filter(|w| *w > 0)?;
            return Some(LossScale { scale, steps: since.clamp(0.0, 9e15) as u64 % window });
        }
        Some(LossScale { scale: number("scale")?, steps: count("_growth_tracker").or(count("steps"))? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn loss_scales_of_every_program() {
        let of = |loss_scaler: Value| TrainingState { loss_scaler, ..TrainingState::default() }.loss_scale();
        let deepspeed = |iter: i64, overflow: i64| {
            of(
                json!({"cur_scale": 256.0, "cur_iter": iter, "last_overflow_iter": overflow, "scale_window": 4, "dynamic": true}),
            )
        };
        assert_eq!(deepspeed(3, -1), Some(LossScale { scale: 256.0, steps: 3 }));
        assert_eq!(deepspeed(9, 2), Some(LossScale { scale: 256.0, steps: 2 }));
        let torch = json!({"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7});
        assert_eq!(of(torch), Some(LossScale { scale: 65536.0, steps: 7 }));
        assert_eq!(
            of(json!({"scale": 8.0, "steps": 1, "skipped": 3})),
            Some(LossScale { scale: 8.0, steps: 1 })
        );
        for none in [Value::Null, json!({"cur_scale": 128.0, "dynamic": false}), json!({"scale": "much"})] {
            assert_eq!(of(none.clone()), None, "{none}");
        }
    }
}
