//! Reads golden cases, and compares launch with them. A golden case has the logits, loss, gradients
//! and ten optimizer steps that PyTorch computed.
use super::*;
use device::{
    Buf,
    ops::{LayerNormParams, WriteMode},
};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// The largest accepted relative difference |ours − theirs| / |theirs| between a tensor of launch
/// and of PyTorch (L2 norms), from docs/numerics.md.
const MAX_RELATIVE_DIFFERENCE: f64 = 1e-5;

/// A model, its samples, and the values that PyTorch computed for them.
pub(crate) struct GoldenCase {
    /// The expected values by name. `grad/NAME` is the gradient of a parameter, and `after10/NAME`
    /// its value after ten steps.
    pub(crate) tensors: BTreeMap<String, Vec<f32>>,
    /// The tokens, labels and document starts of each step.
    pub(crate) batches: Vec<[Vec<u32>; 3]>,
    /// The `train` section that trains the model.
    pub(crate) spec: TrainSpec,
}

impl SampleSource for GoldenCase {
    /// Copies the samples of one step of the golden case to `batch`. Each step has a single
    /// micro-batch.
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> Result<()> {
        let [tokens, labels, starts] = &self.batches[first as usize / batch.sequences];
        batch.tokens.copy_from_slice(tokens);
        batch.labels.copy_from_slice(labels);
        batch.starts.copy_from_slice(starts);
        Ok(())
    }
}

/// Reads a JSON file. Panics if the file cannot be read or parsed.
pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Parses a golden case of `model`. `about` is the content of case.json, and `answers` the
/// safetensors file with the expected values.
pub(crate) fn parse_golden_case(about: &Value, model: ModelSpec, answers: &[u8]) -> GoldenCase {
    let (b, t) = (about["batch"].as_u64().unwrap() as u32, about["seq"].as_u64().unwrap() as u32);
    let mut spec = create_train_spec(model, 3, b, b, t);
    let opt = &about["optimizer"];
    spec.optimizer.lr = opt["lr"].as_f64().unwrap();
    spec.optimizer.weight_decay = opt["weight_decay"].as_f64().unwrap();
    if let Some(eps) = opt["eps"].as_f64() {
        spec.optimizer.eps = eps;
    }
    if opt["name"] == "lion" {
        (spec.optimizer.name, spec.optimizer.betas) = (OptimizerName::Lion, (0.9, 0.99));
    }
    if opt["name"] == "muon" {
        (spec.optimizer.name, spec.optimizer.momentum) = (OptimizerName::Muon, 0.9);
    }
    if opt["name"] == "adafactor" {
        let number = |key: &str, default| opt[key].as_f64().unwrap_or(default);
        spec.optimizer.name = OptimizerName::Adafactor;
        spec.optimizer.eps = number("eps", 1e-30);
        spec.optimizer.beta1 = opt["beta1"].as_f64();
        spec.optimizer.beta2_decay = number("decay_rate", -0.8);
        spec.optimizer.clip_threshold = number("clip_threshold", 1.0);
    }
    spec.clip_norm = opt["clip_norm"].as_f64();
    spec.schedule.name = ScheduleName::Constant;
    spec.schedule.warmup_steps = 0;
    let list =
        |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let batches = about["batches"].as_array().unwrap().iter();
    GoldenCase {
        tensors: parse_safetensors(answers),
        batches: batches.map(|b| ["tokens", "labels", "starts"].map(|k| list(&b[k]))).collect(),
        spec,
    }
}

/// Parses the fp32 tensors of a safetensors file. Returns their values by name.
pub(crate) fn parse_safetensors(file: &[u8]) -> BTreeMap<String, Vec<f32>> {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + n]).unwrap();
    let data = &file[8 + n..];
    let entries = header.iter().filter(|(k, _)| *k != "__metadata__").map(|(k, v)| {
        let at = |i: usize| v["data_offsets"][i].as_u64().unwrap() as usize;
        let floats = data[at(0)..at(1)].chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap()));
        (k.clone(), floats.collect())
    });
    entries.collect()
}

/// A tensor's name, shape and values.
pub(crate) type NamedTensor = (String, (Vec<u64>, Vec<f32>));

/// Parses the fp32 tensors of a safetensors file. Returns their shapes and values, sorted by name.
pub(crate) fn parse_safetensors_with_shapes(file: &[u8]) -> Vec<NamedTensor> {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + n]).unwrap();
    let shape = |name: &str| header[name]["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
    let tensors = parse_safetensors(file).into_iter();
    tensors.map(|(name, x)| (name.clone(), (shape(&name).collect(), x))).collect()
}

/// Encodes a safetensors file with these fp32 tensors.
pub(crate) fn encode_safetensors(tensors: &[NamedTensor]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in tensors {
        let from = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [from, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// Asserts that the relative difference of two tensors is at most [`MAX_RELATIVE_DIFFERENCE`].
#[track_caller]
pub(crate) fn assert_tensors_close(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let (mut diff, mut size) = (0.0f64, 0.0f64);
    for (a, b) in ours.iter().zip(theirs) {
        diff += f64::from(a - b).powi(2);
        size += f64::from(*b).powi(2);
    }
    let relative = (diff / size.max(1e-30)).sqrt();
    assert!(relative <= MAX_RELATIVE_DIFFERENCE, "{what}: relative difference {relative:e}");
}

/// Calls `f` with the name and values of every parameter of a run of one rank.
pub(crate) fn visit_params(running: &RunningTrainer, mut f: impl FnMut(&str, &[f32])) {
    for (u, s) in running.trainer.engine.shards.iter().enumerate() {
        let p = running.trainer.engine.lock_resident_params(u);
        for (i, spec) in s.unit.params.iter().enumerate() {
            f(&spec.name, &p.host_slice()[s.unit.tensor_range(i)]);
        }
    }
}

/// Asserts that runs of launch compute the values of `case`, which PyTorch computed: loss and
/// logits, gradients, and the losses, gradient norms and parameters of ten steps. `make` starts a
/// run at step 0 with the golden weights.
pub(crate) fn assert_golden_case(case: &GoldenCase, make: impl Fn(&GoldenCase) -> RunningTrainer) {
    let mut running = make(case);
    let outcome = running.trainer.compute_global_batch_gradients(case, 0, RankStepReport::default()).unwrap();
    assert_tensors_close("loss", &[outcome.loss as f32], &case.tensors["loss"]);
    assert_tensors_close(
        "loss_per_token",
        running.trainer.activations.row_losses.host_slice(),
        &case.tensors["loss_per_token"],
    );
    assert_tensors_close("logits", &compute_logits(&running, case), &case.tensors["logits"]);
    let mean = (case.spec.batch.global * case.spec.data.seq_len) as f32 / outcome.targets as f32;
    for u in 0..running.trainer.engine.shards.len() {
        let g = running.trainer.engine.finish_gradient(u).unwrap().owned;
        let unit = &running.trainer.engine.shards[u].unit;
        let mut rest = g.host_slice();
        for spec in unit.list_trained_params() {
            let (ours, after) = rest.split_at(spec.len());
            rest = after;
            let ours: Vec<f32> = ours.iter().map(|x| x * mean).collect();
            assert_tensors_close(&spec.name, &ours, &case.tensors[&format!("grad/{}", spec.name)]);
        }
        assert!(rest.is_empty(), "gradients of parameters that are not trained");
    }

    let mut running = make(case);
    let mut before = BTreeMap::new();
    visit_params(&running, |name, values| drop(before.insert(name.to_string(), values.to_vec())));
    for i in 0..10 {
        let (o, _) = running.run_step(case, RankStepReport::default()).unwrap();
        assert_tensors_close("losses", &[o.loss as f32], &case.tensors["losses"][i..=i]);
        assert_tensors_close("grad_norms", &[o.grad_norm as f32], &case.tensors["grad_norms"][i..=i]);
    }
    let frozen: Vec<&str> = running
        .trainer
        .engine
        .shards
        .iter()
        .flat_map(|s| {
            (0..s.unit.params.len())
                .filter(|&i| !s.unit.is_trained(i))
                .map(|i| s.unit.params[i].name.as_str())
        })
        .collect();
    let answers = case.tensors.keys().filter(|k| k.starts_with("after10/")).count();
    let params: usize = running.trainer.engine.shards.iter().map(|s| s.unit.params.len()).sum();
    assert_eq!(answers, params - frozen.len(), "PyTorch trained the same parameters");
    visit_params(&running, |name, ours| match frozen.contains(&name) {
        true => assert_eq!(ours, before[name], "{name} is frozen"),
        false => assert_tensors_close(name, ours, &case.tensors[&format!("after10/{name}")]),
    });
}

/// Computes the logits of the most recent micro-batch from the input of the output layer and its
/// weights. Training itself never stores all logits.
pub(crate) fn compute_logits(running: &RunningTrainer, case: &GoldenCase) -> Vec<f32> {
    let t = &running.trainer;
    let (m, d, v, dtype) =
        (t.batch.row_count(), t.model.sizes().hidden, t.model.sizes().vocab, t.engine.param_dtypes().compute);
    let mut weights: BTreeMap<String, Buf> = BTreeMap::new();
    visit_params(running, |name, values| {
        let mut rounded = Buf::zeroed_as(dtype, values.len());
        t.ops.cast(rounded.view_mut(), values.into());
        weights.insert(name.to_string(), rounded);
    });
    let (mut normed, mut stats, mut out) =
        (Buf::zeroed_as(dtype, m * d), Buf::zeroed(2 * m), Buf::zeroed(m * v));
    let number = |key: &str| t.model.hf_config().get(key).and_then(Value::as_f64).map(|x| x as f32);
    let (x, y) = (t.activations.layer_inputs.last().unwrap().view(), normed.view_mut());
    if let Some(w) = weights.get("transformer.ln_f.weight") {
        let b = weights["transformer.ln_f.bias"].view();
        let norm = LayerNormParams { w: w.view(), b, eps: number("layer_norm_epsilon").unwrap() };
        t.ops.layernorm_forward(y, stats.view_mut(), x, norm, m);
    } else {
        let mut w = Buf::zeroed(d);
        t.ops.cast(w.view_mut(), weights["model.norm.weight"].view());
        if number("query_pre_attn_scalar").is_some() {
            w.host_slice_mut().iter_mut().for_each(|w| *w += 1.0);
        }
        let eps = case.spec.model.rms_norm_eps as f32;
        t.ops.rmsnorm_forward(y, stats.view_mut().slice(0..m), x, w.view(), m, d, eps);
    }
    let heads = ["lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"];
    let head = heads.iter().find_map(|name| weights.get(*name)).unwrap().view().slice(0..v * d);
    t.ops.matmul_forward(out.view_mut(), normed.view(), head, m, v, d, WriteMode::Overwrite);
    let cap = number("final_logit_softcapping");
    out.host_slice().iter().map(|l| cap.map_or(*l, |cap| cap * (l / cap).tanh())).collect()
}
