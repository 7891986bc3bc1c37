//! Plans a native checkpoint, from an external one or from a native one with another number of
//! ranks.
use super::file_plan::{FileContent, FilePlan, ShardPiece};
use super::notice::ConvertNotice;
use super::param_groups::WeightGroup;
use super::training_state::SourceState;
use super::write_files::WrittenFiles;
use super::{ConvertOptions, OutputPlan};
use crate::catalog::{LATE, ModelSpec, RunFacts, TensorInfo, TensorRole, WeightShape};
use crate::commit::write_manifest;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::manifest::shard_name;
use crate::root::{LATEST, latest_text, step_name};
use crate::state::LossScale;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Plans shards of equal size, each with an equal part of every tensor.
pub(super) fn plan(state: &mut SourceState, _options: &ConvertOptions) -> Result<OutputPlan> {
    let world = u64::from(state.world);
    let left_out: Vec<String> = state
        .buffers
        .iter()
        .filter(|&&b| !state.tensors[b].dtype.is_float())
        .map(|&b| state.name(b).into())
        .collect();
    if !left_out.is_empty() {
        state.notices.push(ConvertNotice::BuffersLeftOut { names: left_out });
    }
    state.buffers.retain(|&b| state.tensors[b].dtype.is_float());
    let dir = step_name(state.step);
    let stored: Vec<usize> = (0..state.tensors.len())
        .filter(|i| state.tensors[*i].role != TensorRole::Buffer || state.buffers.contains(i))
        .collect();
    let mut files = Vec::new();
    for rank in 0..state.world {
        let piece = |&i: &usize| {
            let n = u128::from(state.elements(i));
            let boundary = |r: u64| (n * u128::from(r) / u128::from(world)) as u64;
            let elements = boundary(rank.into())..boundary(u64::from(rank) + 1);
            ShardPiece { tensor: i, elements, dtype: shard_dtype(state, i) }
        };
        let pieces = stored.iter().map(piece).filter(|p| p.element_count() > 0).collect();
        let path = format!("{dir}/{}", shard_name(rank, state.world));
        files.push(FilePlan { path, content: FileContent::Shard { rank, pieces } });
    }
    files.push(FilePlan {
        path: LATEST.into(),
        content: FileContent::Bytes(latest_text(state.step).into_bytes()),
    });
    Ok(OutputPlan { files, stage: Some(state.stage), world: state.world })
}

/// The dtype of a tensor in the shards: BF16 for a BF16 weight of a native source, which has no F32
/// master weights; otherwise F32.
fn shard_dtype(state: &SourceState, tensor: usize) -> Dtype {
    let TensorInfo { role, dtype, .. } = &state.tensors[tensor];
    let is_bf16_master =
        state.passthrough.native.is_some() && *role == TensorRole::Weight && *dtype == Dtype::BF16;
    if is_bf16_master { Dtype::BF16 } else { Dtype::F32 }
}

/// Writes the manifest after all shards.
pub(super) fn finish(
    state: &mut SourceState,
    plan: &OutputPlan,
    dir: &Path,
    done: &WrittenFiles,
) -> Result<()> {
    let facts = run_facts(state, plan);
    write_manifest(&dir.join(step_name(state.step)), facts, done.shards.clone(), None).map(|_| ())
}

fn run_facts(state: &mut SourceState, plan: &OutputPlan) -> RunFacts {
    let program = format!("launch {}", env!("CARGO_PKG_VERSION"));
    let stage = plan.stage.unwrap_or(state.stage);
    if let Some(native) = &state.passthrough.native {
        let facts = RunFacts { world: plan.world, stage, ..(**native).clone() };
        return match state.regrouped {
            true => RunFacts { groups: groups_json(state), ..facts },
            false => facts,
        };
    }
    let samples = state.samples;
    // a source of weights only begins at the first sample
    if !(state.groups.is_empty() && state.step == 0) {
        state.notices.push(ConvertNotice::DataOrderUnknown { samples });
    }
    let listed = |tensors: Vec<usize>| -> Vec<WeightShape> {
        let shape =
            |i: usize| WeightShape { name: state.name(i).into(), shape: state.tensors[i].shape.clone() };
        tensors.into_iter().map(shape).collect()
    };
    let weights = (0..state.tensors.len()).filter(|&i| state.tensors[i].role == TensorRole::Weight).collect();
    // without a cursor the run computes its position from step and batch
    let mut cursor = samples.map_or(
        json!({}),
        |n| json!({"at": {"step": state.step, "consumed_samples": n, "tokens": state.tokens}}),
    );
    let late = late_updates(state);
    if !late.is_empty() {
        cursor[LATE] = Value::Object(late);
    }
    if let Some(LossScale { scale, steps }) = state.loss_scale {
        cursor["loss_scale"] = json!({"scale": scale, "steps": steps, "skipped": state.passthrough.skipped});
    }
    let family = state.config.get("model_type").and_then(Value::as_str).unwrap_or("unknown");
    RunFacts {
        step: state.step,
        world: plan.world,
        stage,
        run_seed: 0,
        tokens: state.tokens,
        program,
        cursor,
        rng: Value::Null,
        groups: groups_json(state),
        model: ModelSpec {
            family: family.into(),
            hf_config: Value::Object(state.config.clone()),
            weights: listed(weights),
            ties: state.ties.clone(),
            frozen: state.frozen.iter().map(|&f| state.name(f).to_owned()).collect(),
            buffers: listed(state.buffers.clone()),
            adapter: None,
        },
        tokenizer: state.text_files.clone(),
        job: json!({"converted": {"from": state.path, "scheduler": state.passthrough.scheduler.json()}}),
    }
}

/// By name, how many updates each weight is behind the run; weights that aren't behind are left
/// out.
fn late_updates(state: &SourceState) -> Map<String, Value> {
    let updates = state.groups.iter().chain(&state.ungrouped).flat_map(|g| g.weights.iter().zip(&g.steps));
    let behind =
        updates.map(|(&w, &steps)| (state.name(w).to_owned(), state.step.saturating_sub(steps as u64)));
    behind.filter(|(_, late)| *late > 0).map(|(name, late)| (name, late.into())).collect()
}

fn groups_json(state: &SourceState) -> Value {
    state.groups.iter().map(|g| group_json(state, g)).collect()
}

/// A group in the form of a native manifest, with every other hyper-parameter of the source.
fn group_json(state: &SourceState, group: &WeightGroup) -> Value {
    let mut json: Map<String, Value> = group.options.iter().map(|(k, v)| (k.clone(), v.json())).collect();
    let number = |key: &str| group.options.iter().find(|(k, _)| k == key).map(|(_, v)| v.json());
    let decayed = number("weight_decay").and_then(|w| w.as_f64()).unwrap_or(0.0) != 0.0;
    json.insert("name".into(), if decayed { "decay" } else { "no_decay" }.into());
    // the learning rate before the schedule
    if let Some(base) = number("initial_lr") {
        json.insert("lr".into(), base);
    }
    for (key, value) in [
        ("momentum", json!(0.0)),
        ("eps", json!(0.0)),
        ("weight_decay", json!(0.0)),
        ("betas", json!([0.0, 0.0])),
    ] {
        json.entry(key).or_insert(value);
    }
    let names: Vec<&str> = group.weights.iter().map(|&w| state.name(w)).collect();
    json.insert("params".into(), json!(names));
    Value::Object(json)
}
