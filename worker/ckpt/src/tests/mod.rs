//! Whole-crate tests, and small checkpoints for them.
mod convert;
mod damage;
mod diff;
mod experts;
mod flips;
mod foreign;
mod forged;
mod full;
mod gather;
mod groups;
mod kill;
mod kinds;
mod narrow;
mod parity;
mod peft;
mod pickled;
mod repair;
mod roundtrip;
mod saving;
mod scattered;
mod tiny;
mod watch;

use crate::catalog::{Facts, ModelCard, Role, TextFile, WeightShape};
use crate::commit::{Committed, Staging, Swap, commit_with};
use crate::error::Result;
use crate::save::{Piece, ShardReport, write_shard};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const ADAMW: [Role; 3] = [Role::Weight, Role::ExpAvg, Role::ExpAvgSq];

/// A temporary directory in memory where there is one: tests with many small files.
fn fast_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

/// Facts of a made-up model with these weights.
fn facts(step: u64, world: u32, weights: &[(&str, &[u64])]) -> Facts {
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
            adapter: None,
        },
        tokenizer: vec![TextFile { name: "tokenizer_config.json".into(), text: "{}".into() }],
        job: json!({"name": "test"}),
    }
}

/// The elements of a tensor: different for every role, name, run seed and step.
fn values(role: Role, name: &str, facts: &Facts, count: u64) -> Vec<f32> {
    let key = format!("{role}/{name}/{}/{}", facts.run_seed, facts.step);
    let seed = crate::hash::Hash::of(key.as_bytes()).0;
    let mut x = u64::from_le_bytes(seed[..8].try_into().expect("8 bytes")) | 1;
    let next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 24) as f32 * 8.0 - 4.0
    };
    std::iter::repeat_with(next).take(count as usize).collect()
}

fn elements(w: &WeightShape) -> u64 {
    w.shape.iter().product()
}

/// Writes the shards of all ranks: weights and both AdamW moments, each tensor cut evenly over the ranks.
fn write_shards(staging: &Path, facts: &Facts) -> Result<Vec<ShardReport>> {
    let all: Vec<(Role, &WeightShape, Vec<f32>)> = ADAMW
        .into_iter()
        .flat_map(|role| {
            facts.model.weights.iter().map(move |w| (role, w, values(role, &w.name, facts, elements(w))))
        })
        .collect();
    let (world, mut reports) = (facts.world as usize, Vec::new());
    for rank in 0..world {
        let piece = |(role, w, data): &'_ (Role, &'_ WeightShape, Vec<f32>)| {
            let (from, to) = (data.len() * rank / world, data.len() * (rank + 1) / world);
            (*role, w.name.clone(), from, data[from..to].to_vec())
        };
        let held: Vec<_> = all.iter().map(piece).collect();
        let pieces: Vec<Piece<'_>> = held
            .iter()
            .map(|(role, name, from, data)| Piece {
                name,
                role: *role,
                start_element: *from as u64,
                data: data[..].into(),
            })
            .collect();
        reports.push(write_shard(staging, rank as u32, facts.world, &pieces)?);
    }
    Ok(reports)
}

/// A whole save.
fn save(root: &Path, facts: &Facts) -> Result<Committed> {
    save_with(root, facts, Swap::Atomic)
}

fn save_with(root: &Path, facts: &Facts, swap: Swap) -> Result<Committed> {
    let total = facts.model.weights.iter().map(|w| elements(w) * 12).sum();
    let staging = Staging::begin(root, facts.step, total)?;
    let reports = write_shards(staging.path(), facts)?;
    commit_with(staging, facts.clone(), reports, None, swap)
}

/// Asserts that everything in the checkpoint is what [`save`] wrote with these facts.
fn assert_holds(checkpoint: &crate::Checkpoint, facts: &Facts) {
    assert_eq!(checkpoint.facts(), facts);
    assert_eq!(checkpoint.tensors().count(), facts.model.weights.len() * 3);
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.elements() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.elements(), &mut out).expect("readable");
        assert_eq!(out, values(t.role, &t.name, facts, t.elements()), "{}/{}", t.role, t.name);
    }
}

/// Names in a directory, sorted.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("listable")
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

pub(crate) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for name in names(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        match from.is_dir() {
            true => copy_tree(&from, &to),
            false => drop(std::fs::copy(from, to).expect("copied")),
        }
    }
}

/// Name of the environment variable by which a test finds out that it is a child.
const CHILD: &str = "CKPT_TEST_CHILD";

/// Runs the test `name` of this binary in a process of its own, with `argument` for [`child_argument`].
fn run_child(name: &str, argument: &str) -> Output {
    let exe = std::env::current_exe().expect("our own path");
    let mut command = Command::new(exe);
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, argument);
    command.output().expect("a child")
}

/// In a child: what its parent gave it.
fn child_argument() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// All files of a checkpoint's directory with their contents.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    names(dir)
        .into_iter()
        .map(|n| dir.join(n))
        .flat_map(|p| {
            if p.is_dir() { files(&p) } else { vec![(p.clone(), std::fs::read(&p).expect("readable"))] }
        })
        .collect()
}
