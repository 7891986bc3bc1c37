//! Plans the files of a native checkpoint (one in launch's own format), into which another
//! checkpoint is converted.
use super::file_plan::{FileContent, FilePlan, OutputPlan, PlannedShardPiece};
use super::notice::ConvertNotice;
use super::param_groups::IndexedParamGroup;
use super::source_state::SourceState;
use super::write_files::WrittenFiles;
use crate::catalog::{LossScale, ModelSpec, RunFacts, STEP_LAG_KEY, TensorInfo, WeightShape};
use crate::error::Result;
use crate::layout::native::{LATEST_FILE, encode_latest, shard_file_name, step_dir_name};
use crate::save::write_manifest;
use crate::tensor::{Dtype, TensorRole};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::Path;

/// Plans a checkpoint in launch's own (native) format: one file per rank, with an equal part of
/// every tensor, and the file `latest`. Leaves out integer buffers, with a notice in `state`. Does
/// not plan the manifest, which [`write_native_manifest`] writes.
pub(super) fn plan_native(state: &mut SourceState) -> OutputPlan {
    let world = u64::from(state.world);
    let left_out: Vec<String> = state
        .buffers
        .iter()
        .filter(|&&b| !state.tensors[b].dtype.is_float())
        .map(|&b| state.tensor_name(b).into())
        .collect();
    if !left_out.is_empty() {
        state.notices.push(ConvertNotice::BuffersLeftOut { names: left_out });
    }
    state.buffers.retain(|&b| state.tensors[b].dtype.is_float());
    let dir = step_dir_name(state.step);
    let buffers: HashSet<usize> = state.buffers.iter().copied().collect();
    let stored: Vec<usize> = (0..state.tensors.len())
        .filter(|i| state.tensors[*i].role != TensorRole::Buffer || buffers.contains(i))
        .collect();
    let mut files = Vec::new();
    for rank in 0..state.world {
        let piece = |&i: &usize| {
            let n = u128::from(state.element_count(i));
            let boundary = |r: u64| (n * u128::from(r) / u128::from(world)) as u64;
            let elements = boundary(rank.into())..boundary(u64::from(rank) + 1);
            PlannedShardPiece { tensor: i, elements, dtype: choose_shard_dtype(state, i) }
        };
        let pieces = stored.iter().map(piece).filter(|p| p.element_count() > 0).collect();
        let path = format!("{dir}/{}", shard_file_name(rank, state.world));
        files.push(FilePlan { path, content: FileContent::Shard { rank, pieces } });
    }
    files.push(FilePlan {
        path: LATEST_FILE.into(),
        content: FileContent::Bytes(encode_latest(state.step).into_bytes()),
    });
    OutputPlan { files, stage: Some(state.stage), world: state.world }
}

/// Returns the dtype in which a shard of the converted checkpoint stores a tensor: BF16 for a BF16
/// weight of a source in launch's own format, else F32.
fn choose_shard_dtype(state: &SourceState, tensor: usize) -> Dtype {
    let TensorInfo { role, dtype, .. } = &state.tensors[tensor];
    let is_bf16_master =
        state.passthrough.native_facts.is_some() && *role == TensorRole::Weight && *dtype == Dtype::BF16;
    if is_bf16_master { Dtype::BF16 } else { Dtype::F32 }
}

/// Writes `manifest.json` of a checkpoint that was converted to launch's own format. `dir` is the
/// output directory, and `done` the result of writing all shards.
pub(super) fn write_native_manifest(
    state: &mut SourceState,
    plan: &OutputPlan,
    dir: &Path,
    done: &WrittenFiles,
) -> Result<()> {
    let facts = make_run_facts(state, plan);
    let shards = done.files.iter().filter_map(|f| f.shard.clone()).collect();
    write_manifest(&dir.join(step_dir_name(state.step)), facts, shards, None).map(|_| ())
}

/// Returns what the manifest of the converted checkpoint will record about the training run, such
/// as the step, the ZeRO stage and the number of ranks. Copies the facts of a native source with
/// the new number of ranks, and derives facts from an external source. Adds a notice to `state` if
/// the source's data order is unknown.
fn make_run_facts(state: &mut SourceState, plan: &OutputPlan) -> RunFacts {
    let program = format!("launch {}", env!("CARGO_PKG_VERSION"));
    let stage = plan.stage.unwrap_or(state.stage);
    if let Some(native) = &state.passthrough.native_facts {
        let facts = RunFacts { world: plan.world, stage, ..(**native).clone() };
        return match state.regrouped {
            true => RunFacts { groups: encode_param_groups(state), ..facts },
            false => facts,
        };
    }
    let samples = state.samples;
    // a run from weights alone begins at the first sample
    if !(state.groups.is_empty() && state.step == 0) {
        state.notices.push(ConvertNotice::DataOrderUnknown { samples });
    }
    let listed = |tensors: Vec<usize>| -> Vec<WeightShape> {
        let shape = |i: usize| WeightShape {
            name: state.tensor_name(i).into(),
            shape: state.tensors[i].shape.clone(),
        };
        tensors.into_iter().map(shape).collect()
    };
    let weights = (0..state.tensors.len()).filter(|&i| state.tensors[i].role == TensorRole::Weight).collect();
    // without a cursor the run computes its position from step and batch
    let mut cursor = samples.map_or(
        json!({}),
        |n| json!({"at": {"step": state.step, "consumed_samples": n, "tokens": state.tokens}}),
    );
    let late = compute_step_lags(state);
    if !late.is_empty() {
        cursor[STEP_LAG_KEY] = Value::Object(late);
    }
    if let Some(LossScale { scale, steps }) = state.loss_scale {
        cursor["loss_scale"] =
            json!({"scale": scale, "steps": steps, "skipped": state.passthrough.skipped_steps});
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
        groups: encode_param_groups(state),
        model: ModelSpec {
            family: family.into(),
            hf_config: Value::Object(state.config.clone()),
            weights: listed(weights),
            ties: state.ties.clone(),
            frozen: state.frozen.iter().map(|&f| state.tensor_name(f).to_owned()).collect(),
            buffers: listed(state.buffers.clone()),
            adapter: None,
        },
        tokenizer: state.text_files.clone(),
        job: json!({"converted": {"from": state.path, "scheduler": state.passthrough.scheduler.to_json()}}),
    }
}

/// Maps each weight's name to its step lag, the number of optimizer updates by which the weight is
/// behind the checkpoint's step. Leaves out weights without a step lag.
fn compute_step_lags(state: &SourceState) -> Map<String, Value> {
    let updates = state.groups.iter().chain(&state.ungrouped).flat_map(|g| g.weights.iter().zip(&g.steps));
    let behind = updates
        .map(|(&w, &steps)| (state.tensor_name(w).to_owned(), state.step.saturating_sub(steps as u64)));
    behind.filter(|(_, late)| *late > 0).map(|(name, late)| (name, late.into())).collect()
}

/// Encodes all parameter groups as JSON for the manifest of a checkpoint in launch's own (native)
/// format.
fn encode_param_groups(state: &SourceState) -> Value {
    state.groups.iter().map(|g| encode_param_group(state, g)).collect()
}

/// Encodes a parameter group as JSON for the manifest of a checkpoint in launch's own (native)
/// format. Keeps the hyper-parameters of the source, except that `lr` becomes `initial_lr`, the
/// learning rate without the schedule, if the source has this value. Adds hyper-parameters that a
/// native manifest requires and the source lacks, with the value 0.
fn encode_param_group(state: &SourceState, group: &IndexedParamGroup) -> Value {
    let mut json: Map<String, Value> = group.options.iter().map(|(k, v)| (k.clone(), v.to_json())).collect();
    let number = |key: &str| group.options.iter().find(|(k, _)| k == key).map(|(_, v)| v.to_json());
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
    let names: Vec<&str> = group.weights.iter().map(|&w| state.tensor_name(w)).collect();
    json.insert("params".into(), json!(names));
    Value::Object(json)
}
