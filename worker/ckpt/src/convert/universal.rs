//! DeepSpeed's universal format: a folder per parameter, with the model files of both loaders, so that stages 1, 2 and 3
//! load it. Nothing is in it that makes a loader spoil another group: the loader of stage 3 copies the hyper-parameters
//! that it finds over every group, so it finds only those that are equal in all.
use super::deepspeed::{complete_options, engine, names, shapes, shared, whole};
use super::file::{FilePlan, Span, Storages};
use super::groups::Group;
use super::state::State;
use super::{Content, Plan};
use crate::catalog::Role;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::pickle::Object;

pub(super) fn plan(state: &mut State) -> Result<Plan> {
    complete_options(state);
    let tag = format!("{}_universal", state.tag());
    let mut files = Vec::new();
    for group in &state.groups {
        for (&w, &step) in group.weights.iter().zip(&group.steps) {
            files.extend(parameter(state, &format!("{tag}/zero/{}", folder(state, w)?), w, step));
        }
    }
    files.push(optimizer(state, format!("{tag}/zero/optimizer_state.pt")));
    for name in ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"] {
        files.push(model(state, format!("{tag}/{name}")));
    }
    files.push(FilePlan { path: "latest_universal".into(), content: Content::Bytes(tag.into_bytes()) });
    state.notices.push(
        "the config that loads this must say \"checkpoint\": {\"load_universal\": true}, and must not say it at the restart after that".into(),
    );
    if !state.frozen.is_empty() || !state.buffers.is_empty() {
        state.notices.push(
            "DeepSpeed restores neither frozen weights nor buffers from a universal checkpoint (they are in it); --to deepspeed has no such limit".into(),
        );
    }
    if state.groups.len() > 1 {
        state.notices.push(
            "DeepSpeed's stage 3 gives all groups one shared count of updates when it loads a universal checkpoint, which then runs too fast; for stage 3 with several groups use --to deepspeed".into(),
        );
    }
    Ok(Plan { files, stage: None, world: state.world })
}

/// A parameter's folder. A name that is no path below the folder is refused.
fn folder(state: &State, weight: usize) -> Result<&str> {
    let name = state.name(weight);
    match name.len() > 200 || name.contains(['/', '\\']) || name.starts_with('.') {
        true => Err(CkptError::Unsupported {
            path: state.path.clone(),
            what: format!("{name:?} can't be the name of a folder, which the universal format needs"),
        }),
        false => Ok(name),
    }
}

fn parameter(state: &State, dir: &str, weight: usize, step: f64) -> Vec<FilePlan> {
    let mut files = Vec::new();
    let shape = &state.tensors[weight].shape;
    let tensors = state.roles.iter().filter_map(|&role| Some((role, state.state_of(weight, role)?)));
    for (role, tensor) in [(Role::Weight, weight)].into_iter().chain(tensors) {
        let mut storages = Storages::default();
        let spans = vec![Span::Of(tensor, 0..state.elements(tensor))];
        let param = storages.tensor(Dtype::F32, shape.clone(), spans);
        let name = match role {
            Role::Weight => "fp32",
            Role::Momentum => "momentum_buffer",
            other => other.name(),
        };
        let value = Object::dict([("cat_dim", Object::Int(0)), ("param", param)]);
        files.push(storages.file(format!("{dir}/{name}.pt"), value));
    }
    let mut storages = Storages::default();
    let step = storages.scalar(step);
    files.push(storages.file(format!("{dir}/step.pt"), step));
    files
}

/// The optimizer's own facts, for both loaders. No loss scaler is in it: DeepSpeed then keeps the one of the run.
fn optimizer(state: &State, path: String) -> FilePlan {
    let mut storages = Storages::default();
    let all: Vec<Object> = state
        .groups
        .iter()
        .enumerate()
        .map(|(g, group)| {
            let params = [("params".to_owned(), Object::List(vec![Object::count(g as u64)]))];
            Object::dict(group.options.iter().cloned().chain(params))
        })
        .collect();
    let equal = |(key, value): &&(String, Object)| {
        let same = |g: &Group| g.options.iter().any(|(k, v)| k == key && v == value);
        state.groups.iter().all(same)
    };
    let first = state.groups.first().map(|g| g.options.iter().filter(equal).cloned().collect::<Vec<_>>());
    let mut common = first.unwrap_or_default();
    common.push(("params".into(), Object::List(vec![Object::Int(0)])));
    let step = state.groups.first().and_then(|g| g.steps.first()).copied().unwrap_or(state.step as f64);
    let of_first = Object::dict([("step", storages.scalar(step))]);
    let third = Object::dict([
        ("state", Object::Dict(vec![(Object::Int(0), of_first)])),
        ("param_groups", Object::List(vec![Object::dict(common)])),
    ]);
    let value = Object::dict([
        ("dynamic_loss_scale", Object::Bool(false)),
        ("overflow", Object::Bool(false)),
        ("ds_version", Object::text(&state.version)),
        ("param_groups", Object::List(all)),
        ("optimizer_state_dict", third),
    ]);
    storages.file(path, value)
}

/// A model file: everything that is not in a parameter's folder.
fn model(state: &State, path: String) -> FilePlan {
    let mut storages = Storages::default();
    let kept = state.frozen.iter().chain(&state.buffers);
    let module: Vec<(String, Object)> = kept
        .map(|&t| (state.name(t).to_owned(), whole(state, &mut storages, t, state.tensors[t].dtype)))
        .collect();
    let of_frozen = |(name, _): &&(String, Object)| state.frozen.iter().any(|&f| state.name(f) == name);
    let fragments: Vec<(String, Object)> = module.iter().filter(of_frozen).cloned().collect();
    let groups = state.groups.iter().map(|g| shapes(state, &g.weights)).collect();
    let info = Object::dict([("universal_checkpoint_version", Object::Float(0.4))]);
    let mut pairs = vec![
        ("module".to_owned(), Object::ordered(module)),
        ("buffer_names".into(), names(state, &state.buffers)),
        ("optimizer".into(), Object::None),
        ("param_shapes".into(), Object::List(groups)),
        ("frozen_param_shapes".into(), shapes(state, &state.frozen)),
        ("shared_params".into(), shared(state)),
        ("frozen_param_fragments".into(), Object::ordered(fragments)),
    ];
    pairs.extend(engine(state, &mut storages, state.world));
    pairs.push(("universal_checkpoint_info".into(), info));
    storages.file(path, Object::dict(pairs))
}
