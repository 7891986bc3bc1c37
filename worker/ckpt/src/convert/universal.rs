//! Plans the files of a checkpoint in DeepSpeed's universal format, which ZeRO stages 1, 2 and 3
//! can load.
//!
//! The loader of stage 3 copies the hyper-parameters in `optimizer_state_dict` of the optimizer
//! file to every group. This entry therefore has only hyper-parameters that are equal in all
//! groups.
use super::deepspeed::{add_default_options, add_full_tensor, make_model_entries, make_shape_dict};
use super::file_plan::{FileContent, FilePlan, OutputPlan, StorageBuilder, StorageSpan};
use super::notice::ConvertNotice;
use super::param_groups::IndexedParamGroup;
use super::source_state::SourceState;
use crate::codec::pickle::PythonObject;
use crate::error::{CkptError, ConvertError, Result};
use crate::tensor::Dtype;
use std::collections::HashSet;

/// Maximum length in bytes of a parameter's name, which becomes the name of a directory.
const PARAMETER_NAME_MAX: usize = 200;

/// Plans the files of a checkpoint in DeepSpeed's universal format. Also adds missing options to
/// the parameter groups in `state`, and notices for the user.
///
/// # Errors
/// Fails if the name of a parameter can't be a directory name.
pub(super) fn plan_universal(state: &mut SourceState) -> Result<OutputPlan> {
    add_default_options(state);
    let tag = format!("{}_universal", state.choose_tag());
    let mut files = Vec::new();
    for group in &state.groups {
        for (&w, &step) in group.weights.iter().zip(&group.steps) {
            files.extend(plan_parameter_files(
                state,
                &format!("{tag}/zero/{}", parameter_dir_name(state, w)?),
                w,
                step,
            ));
        }
    }
    files.push(plan_universal_optimizer_file(state, format!("{tag}/zero/optimizer_state.pt")));
    for name in ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"] {
        files.push(plan_universal_model_file(state, format!("{tag}/{name}")));
    }
    files.push(FilePlan { path: "latest_universal".into(), content: FileContent::Bytes(tag.into_bytes()) });
    state.notices.push(ConvertNotice::LoadUniversal);
    if !state.frozen.is_empty() || !state.buffers.is_empty() {
        state.notices.push(ConvertNotice::FrozenNotRestored);
    }
    if state.groups.len() > 1 {
        state.notices.push(ConvertNotice::SharedUpdateCount);
    }
    Ok(OutputPlan { files, stage: None, world: state.world })
}

/// Returns the name of the weight's directory in a universal checkpoint, which is the name of the
/// weight. Fails if this name is too long, starts with a dot, or contains a path separator.
fn parameter_dir_name(state: &SourceState, weight: usize) -> Result<&str> {
    let name = state.tensor_name(weight);
    match name.len() > PARAMETER_NAME_MAX || name.contains(['/', '\\']) || name.starts_with('.') {
        true => Err(CkptError::unsupported(
            &state.path,
            ConvertError::NameNotADirectory { name: name.to_owned() },
        )),
        false => Ok(name),
    }
}

/// Plans the files in a parameter's directory `dir`: the weight, its optimizer states, and its
/// update count `step`.
fn plan_parameter_files(state: &SourceState, dir: &str, weight: usize, step: f64) -> Vec<FilePlan> {
    let mut files = Vec::new();
    let shape = &state.tensors[weight].shape;
    let states = state
        .roles
        .iter()
        .filter_map(|role| role.torch_key().zip(state.find_optimizer_state_index(weight, *role)));
    for (name, tensor) in [("fp32", weight)].into_iter().chain(states) {
        let mut storages = StorageBuilder::default();
        let spans = vec![StorageSpan::Elements(tensor, 0..state.element_count(tensor))];
        let param = storages.add_tensor(Dtype::F32, shape.clone(), spans);
        let value = PythonObject::dict_from_pairs([("cat_dim", PythonObject::Int(0)), ("param", param)]);
        files.push(storages.into_file_plan(format!("{dir}/{name}.pt"), value));
    }
    let mut storages = StorageBuilder::default();
    let step = storages.add_scalar(step);
    files.push(storages.into_file_plan(format!("{dir}/step.pt"), step));
    files
}

/// Plans the file of a universal checkpoint that contains the hyper-parameters of all parameter
/// groups. The file has no loss scaler, so that DeepSpeed keeps the scaler of the run that loads
/// the checkpoint.
fn plan_universal_optimizer_file(state: &SourceState, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let groups: Vec<PythonObject> = state
        .groups
        .iter()
        .enumerate()
        .map(|(g, group)| {
            let params =
                [("params".to_owned(), PythonObject::List(vec![PythonObject::from_count(g as u64)]))];
            PythonObject::dict_from_pairs(group.options.iter().cloned().chain(params))
        })
        .collect();
    let is_equal_in_all = |(key, value): &&(String, PythonObject)| {
        let has_equal = |g: &IndexedParamGroup| g.options.iter().any(|(k, v)| k == key && v == value);
        state.groups.iter().all(has_equal)
    };
    let first =
        state.groups.first().map(|g| g.options.iter().filter(is_equal_in_all).cloned().collect::<Vec<_>>());
    let mut common = first.unwrap_or_default();
    common.push(("params".into(), PythonObject::List(vec![PythonObject::Int(0)])));
    let step = state.groups.first().and_then(|g| g.steps.first()).copied().unwrap_or(state.step as f64);
    let first_state = PythonObject::dict_from_pairs([("step", storages.add_scalar(step))]);
    let stage3 = PythonObject::dict_from_pairs([
        ("state", PythonObject::Dict(vec![(PythonObject::Int(0), first_state)])),
        ("param_groups", PythonObject::List(vec![PythonObject::dict_from_pairs(common)])),
    ]);
    let value = PythonObject::dict_from_pairs([
        ("dynamic_loss_scale", PythonObject::Bool(false)),
        ("overflow", PythonObject::Bool(false)),
        ("ds_version", PythonObject::from_text(&state.version)),
        ("param_groups", PythonObject::List(groups)),
        ("optimizer_state_dict", stage3),
    ]);
    storages.into_file_plan(path, value)
}

/// Plans the model file of a universal checkpoint: its path, and the frozen weights, buffers and
/// DeepSpeed engine state that it will contain.
fn plan_universal_model_file(state: &SourceState, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let tensors = state.frozen.iter().chain(&state.buffers);
    let module: Vec<(String, PythonObject)> = tensors
        .map(|&t| {
            (
                state.tensor_name(t).to_owned(),
                add_full_tensor(state, &mut storages, t, state.tensors[t].dtype),
            )
        })
        .collect();
    let frozen: HashSet<&str> = state.frozen.iter().map(|&f| state.tensor_name(f)).collect();
    let is_frozen = |(name, _): &&(String, PythonObject)| frozen.contains(name.as_str());
    let fragments: Vec<(String, PythonObject)> = module.iter().filter(is_frozen).cloned().collect();
    let groups = state.groups.iter().map(|g| make_shape_dict(state, &g.weights)).collect();
    let info = PythonObject::dict_from_pairs([("universal_checkpoint_version", PythonObject::Float(0.4))]);
    let module = PythonObject::ordered_dict_from_pairs(module);
    let mut pairs = make_model_entries(state, &mut storages, module, groups, (&state.frozen, fragments));
    pairs.push(("universal_checkpoint_info".into(), info));
    storages.into_file_plan(path, PythonObject::dict_from_pairs(pairs))
}
