//! DeepSpeed's universal format: a directory per parameter and the model files of both loaders, so
//! that ZeRO stages 1, 2 and 3 load it.
//!
//! The loader of stage 3 copies the hyper-parameters in the file to every group. The file therefore
//! has only those that are equal in all groups.
use super::deepspeed::{complete_options, engine_entries, full_tensor, name_list, shape_dict, tied_names};
use super::error::ConvertError;
use super::file_plan::{FilePlan, StorageBuilder, StorageSpan};
use super::notice::ConvertNotice;
use super::param_groups::WeightGroup;
use super::training_state::SourceState;
use super::{FileContent, OutputPlan};
use crate::catalog::TensorRole;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::pickle::Object;

/// Longest name of a parameter's directory, bytes.
const NAME_MAX: usize = 200;

/// Plans the files of a universal checkpoint.
pub(super) fn plan(state: &mut SourceState) -> Result<OutputPlan> {
    complete_options(state);
    let tag = format!("{}_universal", state.tag());
    let mut files = Vec::new();
    for group in &state.groups {
        for (&w, &step) in group.weights.iter().zip(&group.steps) {
            files.extend(parameter_files(
                state,
                &format!("{tag}/zero/{}", parameter_dir(state, w)?),
                w,
                step,
            ));
        }
    }
    files.push(optimizer_file(state, format!("{tag}/zero/optimizer_state.pt")));
    for name in ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"] {
        files.push(model_file(state, format!("{tag}/{name}")));
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

/// Name of a parameter's directory. Rejects a name that would leave the output directory.
fn parameter_dir(state: &SourceState, weight: usize) -> Result<&str> {
    let name = state.name(weight);
    match name.len() > NAME_MAX || name.contains(['/', '\\']) || name.starts_with('.') {
        true => Err(ConvertError::NameNotADirectory { name: name.to_owned() }.into_ckpt_error(&state.path)),
        false => Ok(name),
    }
}

fn parameter_files(state: &SourceState, dir: &str, weight: usize, step: f64) -> Vec<FilePlan> {
    let mut files = Vec::new();
    let shape = &state.tensors[weight].shape;
    let tensors =
        state.roles.iter().filter_map(|&role| Some((role, state.optimizer_state_index(weight, role)?)));
    for (role, tensor) in [(TensorRole::Weight, weight)].into_iter().chain(tensors) {
        let mut storages = StorageBuilder::default();
        let spans = vec![StorageSpan::Elements(tensor, 0..state.elements(tensor))];
        let param = storages.tensor(Dtype::F32, shape.clone(), spans);
        let name = match role {
            TensorRole::Weight => "fp32",
            TensorRole::Momentum => "momentum_buffer",
            other => other.name(),
        };
        let value = Object::dict([("cat_dim", Object::Int(0)), ("param", param)]);
        files.push(storages.into_file(format!("{dir}/{name}.pt"), value));
    }
    let mut storages = StorageBuilder::default();
    let step = storages.scalar(step);
    files.push(storages.into_file(format!("{dir}/step.pt"), step));
    files
}

/// The file of optimizer-wide values, for both loaders. It has no loss scaler, so that DeepSpeed
/// keeps the scaler of the run that loads it.
fn optimizer_file(state: &SourceState, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let groups: Vec<Object> = state
        .groups
        .iter()
        .enumerate()
        .map(|(g, group)| {
            let params = [("params".to_owned(), Object::List(vec![Object::count(g as u64)]))];
            Object::dict(group.options.iter().cloned().chain(params))
        })
        .collect();
    let is_equal_in_all = |(key, value): &&(String, Object)| {
        let has_equal = |g: &WeightGroup| g.options.iter().any(|(k, v)| k == key && v == value);
        state.groups.iter().all(has_equal)
    };
    let first =
        state.groups.first().map(|g| g.options.iter().filter(is_equal_in_all).cloned().collect::<Vec<_>>());
    let mut common = first.unwrap_or_default();
    common.push(("params".into(), Object::List(vec![Object::Int(0)])));
    let step = state.groups.first().and_then(|g| g.steps.first()).copied().unwrap_or(state.step as f64);
    let first_state = Object::dict([("step", storages.scalar(step))]);
    let stage3 = Object::dict([
        ("state", Object::Dict(vec![(Object::Int(0), first_state)])),
        ("param_groups", Object::List(vec![Object::dict(common)])),
    ]);
    let value = Object::dict([
        ("dynamic_loss_scale", Object::Bool(false)),
        ("overflow", Object::Bool(false)),
        ("ds_version", Object::text(&state.version)),
        ("param_groups", Object::List(groups)),
        ("optimizer_state_dict", stage3),
    ]);
    storages.into_file(path, value)
}

/// The model file: frozen weights, buffers and the engine's state, which are not in parameter
/// directories.
fn model_file(state: &SourceState, path: String) -> FilePlan {
    let mut storages = StorageBuilder::default();
    let tensors = state.frozen.iter().chain(&state.buffers);
    let module: Vec<(String, Object)> = tensors
        .map(|&t| (state.name(t).to_owned(), full_tensor(state, &mut storages, t, state.tensors[t].dtype)))
        .collect();
    let is_frozen = |(name, _): &&(String, Object)| state.frozen.iter().any(|&f| state.name(f) == name);
    let fragments: Vec<(String, Object)> = module.iter().filter(is_frozen).cloned().collect();
    let groups = state.groups.iter().map(|g| shape_dict(state, &g.weights)).collect();
    let info = Object::dict([("universal_checkpoint_version", Object::Float(0.4))]);
    let mut pairs = vec![
        ("module".to_owned(), Object::ordered(module)),
        ("buffer_names".into(), name_list(state, &state.buffers)),
        ("optimizer".into(), Object::None),
        ("param_shapes".into(), Object::List(groups)),
        ("frozen_param_shapes".into(), shape_dict(state, &state.frozen)),
        ("shared_params".into(), tied_names(state)),
        ("frozen_param_fragments".into(), Object::ordered(fragments)),
    ];
    pairs.extend(engine_entries(state, &mut storages, state.world));
    pairs.push(("universal_checkpoint_info".into(), info));
    storages.into_file(path, Object::dict(pairs))
}
