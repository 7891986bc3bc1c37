//! [`PassthroughState`]: objects that a conversion copies unchanged, since [`crate::TrainingState`]
//! cannot represent them.
use crate::catalog::RunFacts;
use crate::dtype::Dtype;
use crate::pickle::Object;
use crate::state::ParamGroupInfo;
use std::collections::BTreeMap;

/// State that a conversion copies unchanged, in addition to [`crate::TrainingState`]. Fields that a
/// format does not have are empty.
#[derive(Clone, Debug, Default)]
pub struct PassthroughState {
    /// The parameter groups in the order of the optimizer, with values that JSON cannot represent.
    pub groups: Vec<ParamGroup>,
    /// Names of the tensors of the module in its order, including aliases and buffers.
    pub module: Vec<String>,
    /// Weights that were frozen after the optimizer was created, and are still in a parameter
    /// group.
    pub frozen_late: Vec<String>,
    /// Dtype in which the model computes.
    pub precision: Option<Dtype>,
    /// State of the learning rate scheduler, including values that JSON cannot represent.
    pub scheduler: Object,
    /// All facts of a native checkpoint.
    pub native: Option<Box<RunFacts>>,
    /// Steps skipped because of overflows.
    pub skipped: u64,
    /// Other entries of DeepSpeed's model file, of the engine and the client state.
    pub model: Vec<(String, Object)>,
    /// Other entries of DeepSpeed's optimizer file, such as loss scaler and clipping.
    pub optimizer: Vec<(String, Object)>,
    /// Version of DeepSpeed that wrote the checkpoint.
    pub version: Option<String>,
    /// Name of the tag.
    pub tag: Option<String>,
    /// Notices about entries that cannot be copied.
    pub notices: Vec<String>,
}

/// Parameters that share hyper-parameters, with exact values.
#[derive(Clone, Debug, Default)]
pub struct ParamGroup {
    /// Names in the order of the optimizer; empty when unknown.
    pub names: Vec<String>,
    /// Number of updates of each parameter; `None` when not recorded.
    pub steps: Vec<Option<f64>>,
    /// Hyper-parameters by torch's names.
    pub options: Vec<(String, Object)>,
}

impl ParamGroup {
    /// Makes a group, with the number of updates of each weight.
    pub(crate) fn from_info(group: &ParamGroupInfo, steps: &BTreeMap<String, u64>) -> ParamGroup {
        ParamGroup {
            names: group.names.clone(),
            steps: group.names.iter().map(|name| steps.get(name).map(|&s| s as f64)).collect(),
            options: ParamGroup::from_json(&group.hyper),
        }
    }

    /// Converts hyper-parameters from JSON.
    fn from_json(hyper: &serde_json::Map<String, serde_json::Value>) -> Vec<(String, Object)> {
        let convert =
            |(key, value): (&String, &serde_json::Value)| match (key.as_str(), Object::from_json(value)) {
                // the name of the group in native checkpoints
                ("name", _) => None,
                ("betas", Object::List(betas)) => Some((key.clone(), Object::Tuple(betas))),
                (_, value) => Some((key.clone(), value)),
            };
        hyper.iter().filter_map(convert).collect()
    }
}
