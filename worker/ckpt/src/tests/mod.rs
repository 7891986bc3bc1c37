//! Tests across modules, and helpers that make small checkpoints.
mod bf16_weights;
mod convert;
mod damage;
mod diff;
mod experts;
mod external;
mod flipped_bytes;
mod forged_manifest;
mod gather;
mod host_local;
mod killed_saves;
mod layouts;
mod no_space;
mod param_groups;
mod parity;
mod peft;
mod repair;
mod roundtrip;
mod saving;
mod tiny;
mod torch_values;
mod watch;

use crate::catalog::{ModelSpec, RunFacts, TensorRole, TextFile, WeightShape};
use crate::commit::{CommittedCheckpoint, Staging, Swap, commit_with};
use crate::error::{CkptError, Damage, Result};
use crate::save::{Piece, ShardReport, write_shard};
use crate::verify::VerifyReport;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const ADAMW: [TensorRole; 3] = [TensorRole::Weight, TensorRole::ExpAvg, TensorRole::ExpAvgSq];

/// A temporary directory, in memory where possible, for tests with many small files.
fn memory_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

/// Facts of an invented model with these weights.
fn facts(step: u64, world: u32, weights: &[(&str, &[u64])]) -> RunFacts {
    let weights = weights.iter().map(|(n, s)| WeightShape { name: (*n).into(), shape: s.to_vec() }).collect();
    RunFacts {
        step,
        world,
        stage: 3,
        run_seed: 7,
        tokens: step * 100,
        program: "launch test".into(),
        cursor: json!({"epoch": 0, "consumed": step}),
        rng: json!({"kind": "counter"}),
        groups: json!([{"lr": 3e-4, "betas": [0.9, 0.95]}]),
        model: ModelSpec {
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

/// Pseudo-random elements of a tensor, which depend on role, name, run seed and step.
fn values(role: TensorRole, name: &str, facts: &RunFacts, count: u64) -> Vec<f32> {
    let key = format!("{role}/{name}/{}/{}", facts.run_seed, facts.step);
    let seed = crate::hash::Hash::digest(key.as_bytes()).0;
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

/// Writes the shards of all ranks: weights and both AdamW moments, each tensor divided evenly among
/// ranks.
fn write_shards(staging: &Path, facts: &RunFacts) -> Result<Vec<ShardReport>> {
    let tensors: Vec<(TensorRole, &WeightShape, Vec<f32>)> = ADAMW
        .into_iter()
        .flat_map(|role| {
            facts.model.weights.iter().map(move |w| (role, w, values(role, &w.name, facts, elements(w))))
        })
        .collect();
    let (world, mut reports) = (facts.world as usize, Vec::new());
    for rank in 0..world {
        let piece = |(role, w, data): &'_ (TensorRole, &'_ WeightShape, Vec<f32>)| {
            let (from, to) = (data.len() * rank / world, data.len() * (rank + 1) / world);
            (*role, w.name.clone(), from, data[from..to].to_vec())
        };
        let ranges: Vec<_> = tensors.iter().map(piece).collect();
        let pieces: Vec<Piece<'_>> = ranges
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

/// Saves a complete checkpoint.
fn save(root: &Path, facts: &RunFacts) -> Result<CommittedCheckpoint> {
    save_with(root, facts, Swap::Atomic)
}

fn save_with(root: &Path, facts: &RunFacts, swap: Swap) -> Result<CommittedCheckpoint> {
    let total = facts.model.weights.iter().map(|w| elements(w) * 12).sum();
    let staging = Staging::begin(root, facts.step, total)?;
    let reports = write_shards(staging.path(), facts)?;
    commit_with(staging, facts.clone(), reports, None, swap)
}

/// Asserts that the checkpoint contains exactly what [`save`] wrote with these facts.
fn assert_holds(checkpoint: &crate::Checkpoint, facts: &RunFacts) {
    assert_eq!(checkpoint.facts(), facts);
    assert_eq!(checkpoint.tensors().count(), facts.model.weights.len() * 3);
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.elements() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.elements(), &mut out).expect("readable");
        assert_eq!(out, values(t.role, &t.name, facts, t.elements()), "{}/{}", t.role, t.name);
    }
}

/// Names in a directory, sorted.
fn entry_names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("listable")
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

pub(crate) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for name in entry_names(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        match from.is_dir() {
            true => copy_tree(&from, &to),
            false => drop(std::fs::copy(from, to).expect("copied")),
        }
    }
}

/// Name of the environment variable that marks a child process of a test.
const CHILD: &str = "CKPT_TEST_CHILD";

/// Runs the test `name` of this binary in a child process, with `argument` for [`child_argument`].
fn run_child(name: &str, argument: &str) -> Output {
    let exe = std::env::current_exe().expect("path of this binary");
    let mut command = Command::new(exe);
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, argument);
    command.output().expect("a child")
}

/// The argument of [`run_child`]; `None` outside of a child process.
fn child_argument() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// All files of a directory tree with their contents.
fn tree_contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    entry_names(dir)
        .into_iter()
        .map(|n| dir.join(n))
        .flat_map(|p| {
            if p.is_dir() {
                tree_contents(&p)
            } else {
                vec![(p.clone(), std::fs::read(&p).expect("readable"))]
            }
        })
        .collect()
}

/// An error as `[code] message`, with the path `dir` replaced by `[dir]`.
fn describe(error: &CkptError, dir: &Path) -> String {
    without_dir(&format!("[{}] {error}", error.code()), dir)
}

/// A damage as `[code] file: reason`.
fn describe_damage(damage: &Damage) -> String {
    format!("[{}] {damage}", damage.reason.code())
}

/// The problems of a report, one per line.
fn describe_problems(report: &VerifyReport, dir: &Path) -> String {
    let lines: Vec<String> = report.problems().map(|(_, p)| describe_damage(p)).collect();
    without_dir(&lines.join("\n"), dir)
}

/// The text with the path or name of a temporary directory replaced by `[dir]`.
fn without_dir(text: &str, dir: &Path) -> String {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    text.replace(&dir.display().to_string(), "[dir]").replace(&*name, "[dir]")
}
