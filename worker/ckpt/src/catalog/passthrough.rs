//! [`PassthroughState`]: the format-specific training state that a conversion copies unchanged to
//! the new checkpoint.
use super::model::RunFacts;
use super::training_state::ParamGroupInfo;
use crate::codec::pickle::PythonObject;
use crate::tensor::Dtype;
use std::collections::BTreeMap;

/// The parts of a training state that launch's common types do not represent, such as the state of
/// DeepSpeed's engine, which a conversion copies unchanged. Fields that the format of the
/// checkpoint lacks are empty.
#[derive(Clone, Debug, Default)]
pub struct PassthroughState {
    /// The parameter groups in the order of the optimizer, including values that JSON cannot
    /// represent.
    pub groups: Vec<ParamGroup>,
    /// Names of all entries of the module's `state_dict`, including aliases and buffers, in the
    /// order of the `state_dict`.
    pub module_tensor_names: Vec<String>,
    /// Names of weights that were frozen after the optimizer was created. Such weights are still in
    /// a parameter group.
    pub frozen_late: Vec<String>,
    /// Dtype in which the model computes.
    pub precision: Option<Dtype>,
    /// State of the learning rate scheduler, including values that JSON cannot represent.
    pub scheduler: PythonObject,
    /// What a native checkpoint (one in launch's own format) records about its run. `None` for an
    /// external checkpoint.
    pub native_facts: Option<Box<RunFacts>>,
    /// Number of steps that FP16 training skipped because gradients overflowed.
    pub skipped_steps: u64,
    /// Entries of DeepSpeed's model file that no other field represents: state of the engine and of
    /// the training program.
    pub model_entries: Vec<(String, PythonObject)>,
    /// Entries of DeepSpeed's optimizer file that no other field represents, such as the loss
    /// scaler and the limit of the gradient norm.
    pub optimizer_entries: Vec<(String, PythonObject)>,
    /// Version of DeepSpeed that wrote the checkpoint.
    pub deepspeed_version: Option<String>,
    /// DeepSpeed tag of the checkpoint, which is the name of its directory.
    pub tag: Option<String>,
    /// Messages to the user about entries that cannot be copied.
    pub notices: Vec<String>,
}

impl PassthroughState {
    /// Returns the Python object that DeepSpeed's model file contains under the key `key`, or
    /// `None` if there is no such key.
    pub(crate) fn deepspeed_model_entry(&self, key: &str) -> Option<&PythonObject> {
        self.model_entries.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// Returns the Python object that DeepSpeed's optimizer file contains under the key `key`, or
    /// `None` if there is no such key.
    pub(crate) fn deepspeed_optimizer_entry(&self, key: &str) -> Option<&PythonObject> {
        self.optimizer_entries.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }
}

/// A parameter group of the optimizer, whose hyper-parameters may be any Python objects.
#[derive(Clone, Debug, Default)]
pub struct ParamGroup {
    /// Names of the parameters in the order of the optimizer. Empty if the names are unknown.
    pub names: Vec<String>,
    /// Update count of each parameter, or `None` if the checkpoint does not record the count.
    pub steps: Vec<Option<f64>>,
    /// Hyper-parameters by their names in torch.
    pub options: Vec<(String, PythonObject)>,
}

impl ParamGroup {
    /// Converts a parameter group with hyper-parameters in JSON to a parameter group with Python
    /// objects. `steps` maps the names of weights to their update counts.
    pub(crate) fn from_info(group: &ParamGroupInfo, steps: &BTreeMap<String, u64>) -> ParamGroup {
        ParamGroup {
            names: group.names.clone(),
            steps: group.names.iter().map(|name| steps.get(name).map(|&s| s as f64)).collect(),
            options: ParamGroup::options_from_json(&group.hyper),
        }
    }

    /// Converts the hyper-parameters of a parameter group from JSON to the Python objects that
    /// torch stores in a parameter group, without the key `name`.
    fn options_from_json(hyper: &serde_json::Map<String, serde_json::Value>) -> Vec<(String, PythonObject)> {
        // only groups of native checkpoints have a name
        let options = hyper.iter().filter(|(key, _)| *key != "name");
        let convert = |(key, value): (&String, _)| match PythonObject::from_json(value) {
            PythonObject::List(betas) if key == "betas" => (key.clone(), PythonObject::Tuple(betas)),
            value => (key.clone(), value),
        };
        options.map(convert).collect()
    }
}
