//! A checkpoint of ours from one of another program, or of ours for another number of ranks.
use super::file::{Content, FilePlan, ShardPiece};
use super::groups::Group;
use super::run::Done;
use super::state::State;
use super::{ConvertOptions, Plan};
use crate::catalog::{Facts, LATE, ModelCard, Role, TensorInfo, WeightShape};
use crate::commit::write_manifest;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::manifest::shard_name;
use crate::root::{LATEST, latest_text, step_name};
use crate::state::LossScale;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Shards of equal size, each with a part of every tensor.
pub(super) fn plan(state: &mut State, _options: &ConvertOptions) -> Result<Plan> {
    let world = u64::from(state.world);
    let left_out: Vec<String> = state
        .buffers
        .iter()
        .filter(|&&b| !state.tensors[b].dtype.is_float())
        .map(|&b| state.name(b).into())
        .collect();
    if !left_out.is_empty() {
        state.notices.push(format!(
            "buffers that are no floating point numbers have no place in it and are left out: {}",
            left_out.join(", ")
        ));
    }
    state.buffers.retain(|&b| state.tensors[b].dtype.is_float());
    let folder = step_name(state.step);
    let kept: Vec<usize> = (0..state.tensors.len())
        .filter(|i| state.tensors[*i].role != Role::Buffer || state.buffers.contains(i))
        .collect();
    let mut files = Vec::new();
    for rank in 0..state.world {
        let part = |&i: &usize| {
            let n = u128::from(state.elements(i));
            let cut = |r: u64| (n * u128::from(r) / u128::from(world)) as u64;
            let elements = cut(rank.into())..cut(u64::from(rank) + 1);
            ShardPiece { tensor: i, elements, dtype: kept_in(state, i) }
        };
        let pieces = kept.iter().map(part).filter(|p| p.count() > 0).collect();
        let path = format!("{folder}/{}", shard_name(rank, state.world));
        files.push(FilePlan { path, content: Content::Shard { rank, pieces } });
    }
    files.push(FilePlan {
        path: LATEST.into(),
        content: Content::Bytes(latest_text(state.step).into_bytes()),
    });
    Ok(Plan { files, stage: Some(state.stage), world: state.world })
}

/// Of a run of ours that has no other weights than those in bf16 they stay so; everything else is F32.
fn kept_in(state: &State, tensor: usize) -> Dtype {
    let TensorInfo { role, dtype, .. } = &state.tensors[tensor];
    let narrow = state.extras.native.is_some() && *role == Role::Weight && *dtype == Dtype::BF16;
    if narrow { Dtype::BF16 } else { Dtype::F32 }
}

/// Writes the manifest when all shards are there.
pub(super) fn finish(state: &mut State, plan: &Plan, dir: &Path, done: &Done) -> Result<()> {
    let facts = facts(state, plan);
    write_manifest(&dir.join(step_name(state.step)), facts, done.shards.clone(), None).map(|_| ())
}

fn facts(state: &mut State, plan: &Plan) -> Facts {
    let program = format!("launch {}", env!("CARGO_PKG_VERSION"));
    let stage = plan.stage.unwrap_or(state.stage);
    if let Some(own) = &state.extras.native {
        let facts = Facts { world: plan.world, stage, ..(**own).clone() };
        return match state.regrouped {
            true => Facts { groups: groups(state), ..facts },
            false => facts,
        };
    }
    let samples = state.samples;
    let told = match samples {
        Some(n) => format!(
            "the source says neither the order of its data nor its seed: a run goes on with sample {n} of its own data, seed 0"
        ),
        None => "the source says neither where its data stood nor its seed: a run goes on at step × its own batch, seed 0".into(),
    };
    // weights alone begin at the first sample
    if !(state.groups.is_empty() && state.step == 0) {
        state.notices.push(told);
    }
    let listed = |tensors: Vec<usize>| -> Vec<WeightShape> {
        let shape =
            |i: usize| WeightShape { name: state.name(i).into(), shape: state.tensors[i].shape.clone() };
        tensors.into_iter().map(shape).collect()
    };
    let weights = (0..state.tensors.len()).filter(|&i| state.tensors[i].role == Role::Weight).collect();
    // without one the run works out from its batch where its data stands
    let mut cursor = samples.map_or(
        json!({}),
        |n| json!({"at": {"step": state.step, "consumed_samples": n, "tokens": state.tokens}}),
    );
    let late = late(state);
    if !late.is_empty() {
        cursor[LATE] = Value::Object(late);
    }
    if let Some(LossScale { scale, steps }) = state.loss_scale {
        cursor["loss_scale"] = json!({"scale": scale, "steps": steps, "skipped": state.extras.skipped});
    }
    let family = state.config.get("model_type").and_then(Value::as_str).unwrap_or("unknown");
    Facts {
        step: state.step,
        world: plan.world,
        stage,
        run_seed: 0,
        tokens: state.tokens,
        program,
        cursor,
        rng: Value::Null,
        groups: groups(state),
        model: ModelCard {
            family: family.into(),
            hf_config: Value::Object(state.config.clone()),
            weights: listed(weights),
            ties: state.ties.clone(),
            frozen: state.frozen.iter().map(|&f| state.name(f).to_owned()).collect(),
            buffers: listed(state.buffers.clone()),
            adapter: None,
        },
        tokenizer: state.texts.clone(),
        job: json!({"converted": {"from": state.path, "scheduler": state.extras.scheduler.json()}}),
    }
}

/// Updates by which weights are behind the run, of those that are.
fn late(state: &State) -> Map<String, Value> {
    let each = state.groups.iter().chain(&state.loose).flat_map(|g| g.weights.iter().zip(&g.steps));
    let behind = each.map(|(&w, &steps)| (state.name(w).to_owned(), state.step.saturating_sub(steps as u64)));
    behind.filter(|(_, late)| *late > 0).map(|(name, late)| (name, late.into())).collect()
}

fn groups(state: &State) -> Value {
    state.groups.iter().map(|g| group(state, g)).collect()
}

/// A group as the built-in runtime lists its own, with everything else that the source says of it.
fn group(state: &State, group: &Group) -> Value {
    let mut all: Map<String, Value> = group.options.iter().map(|(k, v)| (k.clone(), v.json())).collect();
    let number = |key: &str| group.options.iter().find(|(k, _)| k == key).map(|(_, v)| v.json());
    let decayed = number("weight_decay").and_then(|w| w.as_f64()).unwrap_or(0.0) != 0.0;
    all.insert("name".into(), if decayed { "decay" } else { "no_decay" }.into());
    // the rate before the schedule
    if let Some(base) = number("initial_lr") {
        all.insert("lr".into(), base);
    }
    for (key, value) in [
        ("momentum", json!(0.0)),
        ("eps", json!(0.0)),
        ("weight_decay", json!(0.0)),
        ("betas", json!([0.0, 0.0])),
    ] {
        all.entry(key).or_insert(value);
    }
    let names: Vec<&str> = group.weights.iter().map(|&w| state.name(w)).collect();
    all.insert("params".into(), json!(names));
    Value::Object(all)
}
