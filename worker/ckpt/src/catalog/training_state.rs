//! [`TrainingState`]: what a resumed training needs in addition to tensors, such as the step and
//! the scheduler state, for all checkpoint formats.
use super::model::TiedWeight;
use diagnostic::quantity::format_count;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A parameter group of the optimizer, whose hyper-parameters are given as JSON.
///
/// A group is serialized as one object with the hyper-parameters and the key `params`, the names of
/// the weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParamGroupInfo {
    /// Hyper-parameters by their names in torch (`lr`, `betas`, `eps`, `weight_decay`, …). Empty if
    /// the checkpoint has no hyper-parameters.
    #[serde(flatten)]
    pub hyper: Map<String, Value>,
    /// Names of the weights in this parameter group, in the order of the optimizer.
    #[serde(rename = "params", default)]
    pub names: Vec<String>,
}

/// What a resumed training needs in addition to tensors, such as the step, the parameter groups and
/// the scheduler state. Values that the checkpoint does not record are `None`, null or empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrainingState {
    /// Number of completed steps, including skipped ones.
    pub step: Option<u64>,
    /// Number of samples that all ranks together consumed.
    pub samples: Option<u64>,
    /// Number of ranks that wrote the checkpoint.
    pub world: Option<u32>,
    /// ZeRO stage of the run.
    pub stage: Option<u8>,
    /// Parameter groups of the optimizer, with hyper-parameters and names of weights.
    pub groups: Vec<ParamGroupInfo>,
    /// Maps the name of each weight to its number of optimizer updates.
    pub steps: BTreeMap<String, u64>,
    /// State of the learning rate scheduler, in the form of torch's `state_dict`. Null if the
    /// checkpoint has no scheduler.
    pub scheduler: Value,
    /// State of the FP16 loss scaler, in the form of the program that wrote the checkpoint. Null if
    /// the checkpoint has no loss scaler.
    pub loss_scaler: Value,
    /// Tied weights of the model: further names of stored weights.
    pub ties: Vec<TiedWeight>,
    /// Names of the weights that are not trained.
    pub frozen: Vec<String>,
    /// Names of the tensors of the role [`crate::TensorRole::Buffer`].
    pub buffers: Vec<String>,
}

/// The state of the dynamic loss scale of FP16 training: the factor for the loss, and the number of
/// optimizer steps since this factor last changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The factor by which the loss is multiplied.
    pub scale: f64,
    /// Number of steps since the scale last changed.
    pub steps: u64,
}

impl TrainingState {
    /// Returns a warning for the user if the checkpoint states that a weight received more
    /// optimizer updates than the run had steps. Such a state was mixed from the files of two
    /// checkpoints. Returns `None` if every weight has exactly one update more than the run, since
    /// DeepSpeed can initialize optimizer states by a first update.
    pub(crate) fn impossible_update_count_warning(&self) -> Option<String> {
        let run = self.step?;
        if self.steps.values().all(|updates| Some(*updates) == run.checked_add(1)) {
            return None;
        }
        let ahead: Vec<(&String, &u64)> = self.steps.iter().filter(|(_, updates)| **updates > run).collect();
        let (name, updates) = *ahead.iter().max_by_key(|(_, updates)| **updates)?;
        let others = match ahead.len() - 1 {
            0 => String::new(),
            n => format!(" (and {} too many)", format_count(n, "more weight")),
        };
        Some(format!("{name} has {updates} updates{others}, but the run is at step {run}"))
    }

    /// Extracts the scale and the step count of dynamic loss scaling from the JSON in
    /// `loss_scaler`, which DeepSpeed, torch or launch has written. Returns `None` if there is no
    /// loss scale or a constant one.
    pub fn parse_loss_scale(&self) -> Option<LossScale> {
        let number = |key: &str| self.loss_scaler.get(key).and_then(Value::as_f64);
        let count = |key: &str| number(key).filter(|n| (0.0..9e15).contains(n)).map(|n| n as u64);
        if let Some(scale) = number("cur_scale") {
            // DeepSpeed stores the iteration of the last overflow (-1 before any), and changes the
            // scale after every `scale_window` steps
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
    fn more_updates_than_steps_are_reported() {
        let steps = [("a", 3), ("b", 7), ("c", 9)].map(|(name, n)| (name.to_owned(), n));
        let find = |step| {
            let steps = BTreeMap::from(steps.clone());
            TrainingState { step, steps, ..TrainingState::default() }.impossible_update_count_warning()
        };
        assert_eq!(find(Some(9)), None);
        assert_eq!(find(Some(8)), Some("c has 9 updates, but the run is at step 8".into()));
        let others = "c has 9 updates (and 1 more weight too many), but the run is at step 3";
        assert_eq!(find(Some(3)), Some(others.into()));
        assert_eq!(find(None), None);
        let steps = ["a", "b"].map(|name| (name.to_owned(), 4)).into();
        let initialized = TrainingState { step: Some(3), steps, ..TrainingState::default() };
        assert_eq!(initialized.impossible_update_count_warning(), None);
    }

    #[test]
    fn loss_scales_of_every_program_are_read() {
        let parse =
            |loss_scaler: Value| TrainingState { loss_scaler, ..TrainingState::default() }.parse_loss_scale();
        let deepspeed = |iter: i64, overflow: i64| {
            parse(
                json!({"cur_scale": 256.0, "cur_iter": iter, "last_overflow_iter": overflow, "scale_window": 4, "dynamic": true}),
            )
        };
        assert_eq!(deepspeed(3, -1), Some(LossScale { scale: 256.0, steps: 3 }));
        assert_eq!(deepspeed(9, 2), Some(LossScale { scale: 256.0, steps: 2 }));
        let torch = json!({"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7});
        assert_eq!(parse(torch), Some(LossScale { scale: 65536.0, steps: 7 }));
        assert_eq!(
            parse(json!({"scale": 8.0, "steps": 1, "skipped": 3})),
            Some(LossScale { scale: 8.0, steps: 1 })
        );
        for none in [Value::Null, json!({"cur_scale": 128.0, "dynamic": false}), json!({"scale": "much"})] {
            assert_eq!(parse(none.clone()), None, "{none}");
        }
    }
}
