//! Logits, loss, every gradient and ten AdamW steps of a case, compared with what other programs got.
use super::*;
use device::{
    Buf,
    ops::{LayerNorm, Write},
};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// Largest |ours − theirs| / |theirs| over a whole tensor (L2), the bound of docs/numerics.md.
const TOLERANCE: f64 = 1e-5;

/// What a golden folder says.
pub(crate) struct Case {
    pub(crate) tensors: BTreeMap<String, Vec<f32>>,
    pub(crate) batches: Vec<[Vec<u32>; 3]>,
    pub(crate) spec: TrainSpec,
}

impl SampleSource for Case {
    /// Golden batch i is step i's only slot.
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()> {
        let [tokens, labels, starts] = &self.batches[first as usize / batch.b];
        batch.tokens.copy_from_slice(tokens);
        batch.labels.copy_from_slice(labels);
        batch.starts.copy_from_slice(starts);
        Ok(())
    }
}

/// A JSON file.
pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The job and the batches of `case.json` for this model, with the answers.
pub(crate) fn case(about: &Value, model: ModelSpec, answers: &[u8]) -> Case {
    let (b, t) = (about["batch"].as_u64().unwrap() as u32, about["seq"].as_u64().unwrap() as u32);
    let mut spec = train_spec(model, 3, b, b, t);
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
    spec.clip_norm = opt["clip_norm"].as_f64();
    spec.schedule.name = ScheduleName::Constant;
    spec.schedule.warmup_steps = 0;
    let list =
        |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let batches = about["batches"].as_array().unwrap().iter();
    Case {
        tensors: tensors(answers),
        batches: batches.map(|b| ["tokens", "labels", "starts"].map(|k| list(&b[k]))).collect(),
        spec,
    }
}

pub(crate) fn tensors(file: &[u8]) -> BTreeMap<String, Vec<f32>> {
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
pub(crate) type Shaped = (String, (Vec<u64>, Vec<f32>));

/// The same with shapes, in the order of names.
pub(crate) fn tensors_with_shapes(file: &[u8]) -> Vec<Shaped> {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + n]).unwrap();
    let shape = |name: &str| header[name]["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
    let all = tensors(file).into_iter();
    all.map(|(name, x)| (name.clone(), (shape(&name).collect(), x))).collect()
}

/// A file of these tensors.
pub(crate) fn safetensors(all: &[Shaped]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in all {
        let from = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [from, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

#[track_caller]
pub(crate) fn close(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let (mut diff, mut size) = (0.0f64, 0.0f64);
    for (a, b) in ours.iter().zip(theirs) {
        diff += f64::from(a - b).powi(2);
        size += f64::from(*b).powi(2);
    }
    let relative = (diff / size.max(1e-30)).sqrt();
    assert!(relative <= TOLERANCE, "{what}: relative difference {relative:e}");
}

/// Visits every parameter of a one-rank run: its name and its values.
pub(crate) fn params(running: &RunningTrainer, mut f: impl FnMut(&str, &[f32])) {
    for (u, s) in running.trainer.engine.shards.iter().enumerate() {
        let p = running.trainer.engine.params(u);
        for (i, spec) in s.unit.params.iter().enumerate() {
            f(&spec.name, &p.host()[s.unit.range(i)]);
        }
    }
}

/// Compares everything; `make` gives a run at step 0 with the golden weights.
pub(crate) fn check(case: &Case, make: impl Fn(&Case) -> RunningTrainer) {
    let mut running = make(case);
    let outcome = running.trainer.accumulate(case, 0, StepReport::default()).unwrap();
    close("loss", &[outcome.loss as f32], &case.tensors["loss"]);
    close("loss_per_token", running.trainer.work.loss.host(), &case.tensors["loss_per_token"]);
    close("logits", &logits(&running, case), &case.tensors["logits"]);
    let mean = (case.spec.batch.global * case.spec.data.seq_len) as f32 / outcome.targets as f32;
    for u in 0..running.trainer.engine.shards.len() {
        let g = running.trainer.engine.finish_gradient(u).unwrap();
        let unit = &running.trainer.engine.shards[u].unit;
        let mut rest = g.host();
        for spec in unit.trained_params() {
            let (ours, after) = rest.split_at(spec.len());
            rest = after;
            let ours: Vec<f32> = ours.iter().map(|x| x * mean).collect();
            close(&spec.name, &ours, &case.tensors[&format!("grad/{}", spec.name)]);
        }
        assert!(rest.is_empty(), "gradients of the trained tensors alone");
    }

    let mut running = make(case);
    let mut before = BTreeMap::new();
    params(&running, |name, values| drop(before.insert(name.to_string(), values.to_vec())));
    for i in 0..10 {
        let (o, _) = running.step(case, StepReport::default()).unwrap();
        close("losses", &[o.loss as f32], &case.tensors["losses"][i..=i]);
        close("grad_norms", &[o.grad_norm as f32], &case.tensors["grad_norms"][i..=i]);
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
    let all: usize = running.trainer.engine.shards.iter().map(|s| s.unit.params.len()).sum();
    assert_eq!(answers, all - frozen.len(), "what was trained there is trained here");
    params(&running, |name, ours| match frozen.contains(&name) {
        true => assert_eq!(ours, before[name], "{name} is frozen"),
        false => close(name, ours, &case.tensors[&format!("after10/{name}")]),
    });
}

/// Logits of the batch that was just computed, from the head's input, with weights as ops compute with them.
pub(crate) fn logits(running: &RunningTrainer, case: &Case) -> Vec<f32> {
    let t = &running.trainer;
    let (m, d, v, dtype) = (t.batch.rows(), t.model.hidden(), t.model.vocab(), t.engine.weights().dtype);
    let mut weights: BTreeMap<String, Buf> = BTreeMap::new();
    params(running, |name, values| {
        let mut rounded = Buf::zeroed_as(dtype, values.len());
        t.ops.cast(rounded.view_mut(), values.into());
        weights.insert(name.to_string(), rounded);
    });
    let (mut normed, mut stats, mut out) =
        (Buf::zeroed_as(dtype, m * d), Buf::zeroed(2 * m), Buf::zeroed(m * v));
    let number = |key: &str| t.model.hf_config().get(key).and_then(Value::as_f64).map(|x| x as f32);
    let (x, y) = (t.work.x.last().unwrap().view(), normed.view_mut());
    if let Some(w) = weights.get("transformer.ln_f.weight") {
        let b = weights["transformer.ln_f.bias"].view();
        let norm = LayerNorm { w: w.view(), b, eps: number("layer_norm_epsilon").unwrap() };
        t.ops.layernorm_forward(y, stats.view_mut(), x, norm, m);
    } else {
        let mut w = Buf::zeroed(d);
        t.ops.cast(w.view_mut(), weights["model.norm.weight"].view());
        if number("query_pre_attn_scalar").is_some() {
            w.host_mut().iter_mut().for_each(|w| *w += 1.0);
        }
        let eps = case.spec.model.rms_norm_eps as f32;
        t.ops.rmsnorm_forward(y, stats.view_mut().slice(0..m), x, w.view(), m, d, eps);
    }
    let heads = ["lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"];
    let head = heads.iter().find_map(|name| weights.get(*name)).unwrap().view().slice(0..v * d);
    t.ops.matmul_forward(out.view_mut(), normed.view(), head, m, v, d, Write::Set);
    let cap = number("final_logit_softcapping");
    out.host().iter().map(|l| cap.map_or(*l, |cap| cap * (l / cap).tanh())).collect()
}
