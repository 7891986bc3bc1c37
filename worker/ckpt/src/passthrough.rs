//! What goes along when a checkpoint is written anew and [`crate::TrainingState`] has no words for: exact objects, as its files
//! hold them.
use crate::catalog::Facts;
use crate::dtype::Dtype;
use crate::pickle::Object;
use crate::state::Group;
use std::collections::BTreeMap;

/// Beside [`crate::TrainingState`]. What a format doesn't say is empty.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// The optimizer's groups, in its own order, where the state doesn't say all of them.
    pub groups: Vec<ParamGroup>,
    /// Names of the module's tensors in its own order, aliases and buffers too.
    pub module: Vec<String>,
    /// Weights that were frozen after the optimizer was made, and are in a group.
    pub frozen_late: Vec<String>,
    /// What the model computes in.
    pub precision: Option<Dtype>,
    /// State of the learning rate scheduler, where it is more than JSON can say.
    pub scheduler: Object,
    /// Of a checkpoint of ours, all that it says.
    pub native: Option<Box<Facts>>,
    /// Steps skipped for overflows.
    pub skipped: u64,
    /// Other parts of DeepSpeed's model file: of the engine and of the client.
    pub model: Vec<(String, Object)>,
    /// Other parts of DeepSpeed's optimizer file: loss scaler, clipping.
    pub optimizer: Vec<(String, Object)>,
    /// Version of DeepSpeed that wrote it.
    pub version: Option<String>,
    /// Name of the folder of the state.
    pub tag: Option<String>,
    /// What could not be taken along.
    pub notices: Vec<String>,
}

/// Parameters that share hyper-parameters.
#[derive(Clone, Debug, Default)]
pub struct ParamGroup {
    /// In the optimizer's order. Empty: the format doesn't say which.
    pub names: Vec<String>,
    /// Updates that each of them has had; `None` where it isn't written down.
    pub steps: Vec<Option<f64>>,
    /// Hyper-parameters by their names in torch.
    pub options: Vec<(String, Object)>,
}

impl ParamGroup {
    /// A group with the updates that each of its weights has had.
    pub(crate) fn of(group: &Group, steps: &BTreeMap<String, u64>) -> ParamGroup {
        ParamGroup {
            names: group.names.clone(),
            steps: group.names.iter().map(|name| steps.get(name).map(|&s| s as f64)).collect(),
            options: ParamGroup::from_json(&group.hyper),
        }
    }

    /// Hyper-parameters that are known as JSON.
    fn from_json(hyper: &serde_json::Map<String, serde_json::Value>) -> Vec<(String, Object)> {
        let of = |(key, value): (&String, &serde_json::Value)| match (key.as_str(), Object::from_json(value))
        {
            // our own name of the group
            ("name", _) => None,
            ("betas", Object::List(betas)) => Some((key.clone(), Object::Tuple(betas))),
            (_, value) => Some((key.clone(), value)),
        };
        hyper.iter().filter_map(of).collect()
    }
}
