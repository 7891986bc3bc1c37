//! What a checkpoint says beside its tensors, as far as it must go along when the checkpoint is written anew: exact objects,
//! as its files hold them. What is shown and compared is [`crate::TrainingState`], the same as JSON.
use crate::catalog::{Facts, Tie};
use crate::dtype::Dtype;
use crate::pickle::Object;
use crate::state::Group;
use std::collections::BTreeMap;

/// Everything that a training state has beside tensors. What a format doesn't say is empty.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// The optimizer's groups, in its own order.
    pub groups: Vec<ParamGroup>,
    /// Names of the module's tensors in its own order, aliases and buffers too.
    pub module: Vec<String>,
    pub ties: Vec<Tie>,
    /// Weights that are not trained; a weight that was frozen after the optimizer was made is in a group as well.
    pub frozen: Vec<String>,
    /// What the model computes in.
    pub precision: Option<Dtype>,
    /// State of the learning rate scheduler.
    pub scheduler: Object,
    /// ZeRO stage and number of ranks that wrote it.
    pub stage: Option<u8>,
    pub world: Option<u32>,
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
        let mut found = ParamGroup::from_json(&serde_json::Value::Object(group.hyper.clone()));
        found.steps = group.names.iter().map(|name| steps.get(name).map(|&s| s as f64)).collect();
        found.names.clone_from(&group.names);
        found
    }

    /// Hyper-parameters that are known as JSON; `names` is taken from `params` when those are names.
    pub(crate) fn from_json(group: &serde_json::Value) -> ParamGroup {
        let mut found = ParamGroup::default();
        for (key, value) in group.as_object().into_iter().flatten() {
            match (key.as_str(), Object::from_json(value)) {
                ("params", Object::List(params)) => {
                    let names = params.into_iter().filter_map(|p| match p {
                        Object::Str(name) => Some(name),
                        _ => None,
                    });
                    found.names = names.collect();
                }
                // our own name of the group
                ("name", _) => {}
                ("betas", Object::List(betas)) => {
                    found.options.push(("betas".into(), Object::Tuple(betas)));
                }
                (_, value) => found.options.push((key.clone(), value)),
            }
        }
        found.steps = vec![None; found.names.len()];
        found
    }
}
