//! Small checkpoints for the tests of this crate.
use crate::catalog::{Facts, ModelCard, Role, TextFile, Tie, WeightShape};
use crate::commit::{Committed, commit};
use crate::error::Result;
use crate::save::{Piece, Staging, write_shard};
use serde_json::json;
use std::path::Path;

/// Facts of a made-up model with these weights.
pub(crate) fn facts(step: u64, world: u32, weights: &[(&str, &[u64])]) -> Facts {
    let weights = weights.iter().map(|(n, s)| WeightShape { name: (*n).into(), shape: s.to_vec() }).collect();
    Facts {
        step,
        world,
        stage: 3,
        run_seed: 7,
        tokens: step * 100,
        program: "launch test".into(),
        cursor: json!({"epoch": 0, "consumed": step}),
        rng: json!({"kind": "counter"}),
        groups: json!([{"lr": 3e-4, "betas": [0.9, 0.95]}]),
        model: ModelCard {
            family: "llama".into(),
            hf_config: json!({"model_type": "llama", "eos_token_id": 2}),
            weights,
            ties: Vec::new(),
            frozen: Vec::new(),
            buffers: Vec::new(),
        },
        tokenizer: vec![TextFile { name: "tokenizer_config.json".into(), text: "{}".into() }],
        job: json!({"name": "test"}),
    }
}

/// With a tied alias.
pub(crate) fn tied(mut facts: Facts, alias: &str, target: &str) -> Facts {
    facts.model.ties.push(Tie { alias: alias.into(), target: target.into() });
    facts
}

/// The value of an element: different for every role, tensor, element and step.
pub(crate) fn value(role: Role, name: &str, step: u64, element: u64) -> f32 {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(role.name().as_bytes());
    bytes.extend_from_slice(name.as_bytes());
    bytes.extend_from_slice(&step.to_le_bytes());
    bytes.extend_from_slice(&element.to_le_bytes());
    let hash = crate::hash::Hash::of(&bytes).0;
    let x = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
    (x as f32 / u32::MAX as f32 - 0.5) * 8.0
}

/// All elements of a tensor.
pub(crate) fn values(role: Role, name: &str, step: u64, count: u64) -> Vec<f32> {
    (0..count).map(|i| value(role, name, step, i)).collect()
}

/// Saves weights and both AdamW moments, each tensor cut evenly over the ranks.
pub(crate) fn save(root: &Path, facts: &Facts) -> Result<Committed> {
    let total = facts.model.weights.iter().map(|w| w.shape.iter().product::<u64>() * 12).sum();
    let staging = Staging::begin(root, facts.step, total)?;
    let mut reports = Vec::new();
    for rank in 0..facts.world {
        let mut held = Vec::new();
        for role in [Role::Weight, Role::ExpAvg, Role::ExpAvgSq] {
            for w in &facts.model.weights {
                let all = values(role, &w.name, facts.step, w.shape.iter().product());
                let (n, world, r) = (all.len(), facts.world as usize, rank as usize);
                let (from, to) = (n * r / world, n * (r + 1) / world);
                held.push((role, w.name.as_str(), from, all[from..to].to_vec()));
            }
        }
        let pieces: Vec<Piece<'_>> = held
            .iter()
            .map(|(role, name, from, data)| Piece { name, role: *role, start_element: *from as u64, data })
            .collect();
        reports.push(write_shard(staging.path(), rank, facts.world, &pieces)?);
    }
    commit(staging, facts.clone(), reports)
}

/// Asserts that everything in the checkpoint is what [`save`] wrote.
pub(crate) fn assert_holds(checkpoint: &crate::Checkpoint) {
    let step = checkpoint.facts().step;
    for t in checkpoint.tensors() {
        let mut out = vec![0.0; t.elements() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.elements(), &mut out).expect("readable");
        assert_eq!(out, values(t.role, &t.name, step, t.elements()), "{}/{}", t.role, t.name);
    }
}
