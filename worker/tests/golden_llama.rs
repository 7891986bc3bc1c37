//! Logits, loss, every gradient and ten AdamW steps against real transformers and torch (tests/golden/llama/README.md).
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::{ModelSpec, ScheduleName, TrainSpec};
use device::{Buf, ops::Write};
use serde_json::Value;
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};
use worker::{
    error::Result,
    model::Batch,
    stages::Running,
    train::step::{Source, Word},
};

/// Largest |ours − theirs| / |theirs| over a whole tensor (L2), the bound of docs/numerics.md.
const TOLERANCE: f64 = 1e-5;

struct Case {
    tensors: BTreeMap<String, Vec<f32>>,
    batches: Vec<[Vec<u32>; 3]>,
    spec: TrainSpec,
}

impl Source for Case {
    /// Golden batch i is step i's only slot.
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<()> {
        let [tokens, labels, starts] = &self.batches[first as usize / batch.b];
        batch.tokens.copy_from_slice(tokens);
        batch.labels.copy_from_slice(labels);
        batch.starts.copy_from_slice(starts);
        Ok(())
    }
}

fn load(name: &str) -> Case {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama").join(name);
    let json =
        |file: &str| -> Value { serde_json::from_slice(&std::fs::read(dir.join(file)).unwrap()).unwrap() };
    let (config, case) = (json("config.json"), json("case.json"));
    let n = |key: &str| config[key].as_u64().unwrap() as u32;
    let model = ModelSpec {
        family: "llama".into(),
        vocab_size: n("vocab_size"),
        hidden_size: n("hidden_size"),
        intermediate_size: n("intermediate_size"),
        num_hidden_layers: n("num_hidden_layers"),
        num_attention_heads: n("num_attention_heads"),
        num_key_value_heads: n("num_key_value_heads"),
        head_dim: n("head_dim"),
        max_position_embeddings: n("max_position_embeddings"),
        rms_norm_eps: config["rms_norm_eps"].as_f64().unwrap(),
        rope_theta: config["rope_parameters"]["rope_theta"].as_f64().unwrap(),
        tie_word_embeddings: config["tie_word_embeddings"].as_bool().unwrap(),
        initializer_range: 0.02,
    };
    let (b, t) = (case["batch"].as_u64().unwrap() as u32, case["seq"].as_u64().unwrap() as u32);
    let mut spec = train_spec(model, 3, b, b, t);
    let opt = &case["optimizer"];
    spec.optimizer.lr = opt["lr"].as_f64().unwrap();
    spec.optimizer.weight_decay = opt["weight_decay"].as_f64().unwrap();
    spec.clip_norm = opt["clip_norm"].as_f64();
    spec.schedule.name = ScheduleName::Constant;
    spec.schedule.warmup_steps = 0;
    let list =
        |v: &Value| v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let batches = case["batches"].as_array().unwrap().iter();
    Case {
        tensors: tensors(&std::fs::read(dir.join("tensors.safetensors")).unwrap()),
        batches: batches.map(|b| ["tokens", "labels", "starts"].map(|k| list(&b[k]))).collect(),
        spec,
    }
}

fn tensors(file: &[u8]) -> BTreeMap<String, Vec<f32>> {
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

#[track_caller]
fn close(what: &str, ours: &[f32], theirs: &[f32]) {
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
fn params(running: &Running, mut f: impl FnMut(&str, &[f32])) {
    for (u, s) in running.trainer.engine.shards.iter().enumerate() {
        let p = running.trainer.engine.params(u);
        for (i, spec) in s.unit.params.iter().enumerate() {
            f(&spec.name, &p.host()[s.unit.range(i)]);
        }
    }
}

fn with_golden_weights(case: &Case) -> Running {
    let comm = Arc::new(comm::local::group(1).remove(0));
    let running = build(&case.spec, comm, 1).fresh();
    let engine = &running.trainer.engine;
    for (u, s) in engine.shards.iter().enumerate() {
        engine.with_resident(u, |p| {
            for (i, spec) in s.unit.params.iter().enumerate() {
                p.host_mut()[s.unit.range(i)].copy_from_slice(&case.tensors[&spec.name]);
            }
        });
    }
    running
}

fn check(name: &str) {
    let case = load(name);
    let mut running = with_golden_weights(&case);
    let outcome = running.trainer.accumulate(&case, 0, Word::default()).unwrap();
    close("loss", &[outcome.loss as f32], &case.tensors["loss"]);
    close("loss_per_token", running.trainer.work.loss.host(), &case.tensors["loss_per_token"]);
    close("logits", &logits(&running), &case.tensors["logits"]);
    let mean = (case.spec.batch.global * case.spec.data.seq_len) as f32 / outcome.targets as f32;
    for u in 0..running.trainer.engine.shards.len() {
        let g = running.trainer.engine.finish(u).unwrap();
        let unit = &running.trainer.engine.shards[u].unit;
        for (i, spec) in unit.params.iter().enumerate() {
            let ours: Vec<f32> = g.host()[unit.range(i)].iter().map(|x| x * mean).collect();
            close(&spec.name, &ours, &case.tensors[&format!("grad/{}", spec.name)]);
        }
    }

    let mut running = with_golden_weights(&case);
    for i in 0..10 {
        let (o, _) = running.step(&case, Word::default()).unwrap();
        close("losses", &[o.loss as f32], &case.tensors["losses"][i..=i]);
        close("grad_norms", &[o.grad_norm as f32], &case.tensors["grad_norms"][i..=i]);
    }
    params(&running, |name, ours| close(name, ours, &case.tensors[&format!("after10/{name}")]));
}

/// Logits of the batch that was just computed, from the head's input.
fn logits(running: &Running) -> Vec<f32> {
    let t = &running.trainer;
    let (m, d, v) = (t.batch.rows(), t.model.hidden(), t.model.vocab());
    let weights: BTreeMap<String, Vec<f32>> = {
        let mut w = BTreeMap::new();
        params(running, |name, values| drop(w.insert(name.to_string(), values.to_vec())));
        w
    };
    let (mut normed, mut rstd, mut out) = (Buf::zeroed(m * d), Buf::zeroed(m), Buf::zeroed(m * v));
    let norm = weights["model.norm.weight"].as_slice();
    let x = t.work.x.last().unwrap().view();
    t.ops.rmsnorm_forward(
        normed.view_mut(),
        rstd.view_mut(),
        x,
        norm.into(),
        m,
        d,
        running.train().model.rms_norm_eps as f32,
    );
    let head = weights.get("lm_head.weight").unwrap_or(&weights["model.embed_tokens.weight"]).as_slice();
    t.ops.matmul_forward(out.view_mut(), normed.view(), head.into(), m, v, d, Write::Set);
    out.host().to_vec()
}

#[test]
fn multi_head_untied() {
    check("mha");
}

#[test]
fn grouped_query_tied() {
    check("gqa_tied");
}

#[test]
fn sizes_that_nothing_divides() {
    check("odd");
}

#[test]
fn packed_documents() {
    check("packed");
}
