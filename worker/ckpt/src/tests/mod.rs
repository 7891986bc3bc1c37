//! Tests of several modules together, and helpers that make small checkpoints.
mod bf16_weights;
mod convert;
mod convert_failures;
mod damage;
mod dcp_values;
mod diff;
mod experts;
mod external;
mod flipped_bytes;
mod forged_manifest;
mod gather;
mod host_local;
mod killed_saves;
mod layouts;
mod memory_store;
mod no_space;
mod param_groups;
mod parity;
mod peft;
mod recorded_hashes;
mod repair;
mod roundtrip;
mod saving;
mod tiny;
mod torch_values;
mod unreadable_rng_states;
mod watch;
mod world_sizes;

use crate::catalog::{ModelSpec, RunFacts, TextFile, WeightShape};
use crate::error::{CkptError, Damage, Result};
use crate::save::commit::commit_save_replacing;
use crate::save::{CommittedCheckpoint, ReplaceMethod, ShardReport, StagingDir, TensorPiece, write_shard};
use crate::tensor::TensorRole;
use crate::verify::VerifyReport;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const ADAMW: [TensorRole; 3] = [TensorRole::Weight, TensorRole::ExpAvg, TensorRole::ExpAvgSq];

/// Creates a temporary directory for tests with many small files: in `/dev/shm` if possible,
/// otherwise in the default directory.
fn make_memory_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

/// Makes the facts of a run at `step` with `world` ranks. The invented model has the weights
/// `weights`, given by name and shape.
fn make_facts(step: u64, world: u32, weights: &[(&str, &[u64])]) -> RunFacts {
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

/// Computes `count` pseudo-random elements of a tensor, which depend on its role and name and on
/// the run's seed and step.
fn compute_values(role: TensorRole, name: &str, facts: &RunFacts, count: u64) -> Vec<f32> {
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

fn count_elements(w: &WeightShape) -> u64 {
    w.shape.iter().product()
}

/// Writes the shards of all ranks to `staging`, with weights and both moments of AdamW. Divides
/// each tensor evenly among the ranks. Returns the reports of all shards.
fn write_shards(staging: &Path, facts: &RunFacts) -> Result<Vec<ShardReport>> {
    let tensors: Vec<(TensorRole, &WeightShape, Vec<f32>)> = ADAMW
        .into_iter()
        .flat_map(|role| {
            facts
                .model
                .weights
                .iter()
                .map(move |w| (role, w, compute_values(role, &w.name, facts, count_elements(w))))
        })
        .collect();
    let (world, mut reports) = (facts.world as usize, Vec::new());
    for rank in 0..world {
        let piece = |(role, w, data): &'_ (TensorRole, &'_ WeightShape, Vec<f32>)| {
            let (from, to) = (data.len() * rank / world, data.len() * (rank + 1) / world);
            (*role, w.name.clone(), from, data[from..to].to_vec())
        };
        let ranges: Vec<_> = tensors.iter().map(piece).collect();
        let pieces: Vec<TensorPiece<'_>> = ranges
            .iter()
            .map(|(role, name, from, data)| TensorPiece {
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

/// Saves a complete checkpoint of `facts` to the checkpoint directory `root`.
fn save_checkpoint(root: &Path, facts: &RunFacts) -> Result<CommittedCheckpoint> {
    save_checkpoint_replacing(root, facts, ReplaceMethod::AtomicExchange)
}

/// Saves a complete checkpoint of `facts` to the directory `root`, and replaces an existing
/// checkpoint of this step by the method `swap`.
fn save_checkpoint_replacing(
    root: &Path,
    facts: &RunFacts,
    swap: ReplaceMethod,
) -> Result<CommittedCheckpoint> {
    let total = facts.model.weights.iter().map(|w| count_elements(w) * 12).sum();
    let staging = StagingDir::create(root, facts.step, total)?;
    let reports = write_shards(staging.path(), facts)?;
    commit_save_replacing(staging, facts.clone(), reports, None, swap)
}

/// Asserts that the checkpoint contains exactly the tensors and facts that [`save_checkpoint`]
/// wrote for `facts`.
fn assert_contains_saved(checkpoint: &crate::Checkpoint, facts: &RunFacts) {
    assert_eq!(checkpoint.run_facts(), facts);
    assert_eq!(checkpoint.tensors().count(), facts.model.weights.len() * 3);
    for t in checkpoint.tensors() {
        let mut out = vec![f32::NAN; t.element_count() as usize];
        checkpoint.read_f32(&t.name, t.role, 0..t.element_count(), &mut out).expect("readable");
        assert_eq!(out, compute_values(t.role, &t.name, facts, t.element_count()), "{}/{}", t.role, t.name);
    }
}

/// Lists the names of the entries of a directory, sorted.
fn list_entry_names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("listable")
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Copies the directory `from` with all files and subdirectories to `to`.
pub(crate) fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for name in list_entry_names(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        match from.is_dir() {
            true => copy_tree(&from, &to),
            false => drop(std::fs::copy(from, to).expect("copied")),
        }
    }
}

/// Name of the environment variable through which [`run_child_test`] passes an argument.
const CHILD_ARGUMENT_VARIABLE: &str = "CKPT_TEST_CHILD";

/// Runs the test `name` of this binary in a child process, in which [`read_child_argument`] returns
/// `argument`. Waits until the process ends, and returns its status and output.
fn run_child_test(name: &str, argument: &str) -> Output {
    let exe = std::env::current_exe().expect("path of this binary");
    let mut command = Command::new(exe);
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD_ARGUMENT_VARIABLE, argument);
    command.output().expect("a child")
}

/// Returns the argument that [`run_child_test`] passed to this process. Returns `None` outside of a
/// child process.
fn read_child_argument() -> Option<String> {
    std::env::var(CHILD_ARGUMENT_VARIABLE).ok()
}

/// Reads all files of a directory tree. Returns path and content of each file, sorted by name.
fn read_tree(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    list_entry_names(dir)
        .into_iter()
        .map(|n| dir.join(n))
        .flat_map(|p| {
            if p.is_dir() { read_tree(&p) } else { vec![(p.clone(), std::fs::read(&p).expect("readable"))] }
        })
        .collect()
}

/// Formats an error as `[code] message`, and replaces the path `dir` by `[dir]`.
fn format_error(error: &CkptError, dir: &Path) -> String {
    replace_dir(&format!("[{}] {error}", error.code()), dir)
}

/// Formats damage as `[code] file: reason`.
fn format_damage(damage: &Damage) -> String {
    format!("[{}] {damage}", damage.reason.code())
}

/// Formats the problems of a report, one per line, and replaces the path `dir` by `[dir]`.
fn format_problems(report: &VerifyReport, dir: &Path) -> String {
    let lines: Vec<String> = report.all_problems().map(|(_, p)| format_damage(p)).collect();
    replace_dir(&lines.join("\n"), dir)
}

/// Replaces the path and the name of a temporary directory in a text by `[dir]`.
fn replace_dir(text: &str, dir: &Path) -> String {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    text.replace(&dir.display().to_string(), "[dir]").replace(&*name, "[dir]")
}

/// Returns the bytes of a zip container with these names and contents of members.
pub(crate) fn pack_zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in members {
        let (at, len, crc) = (file.len() as u32, data.len() as u32, crc32fast::hash(data));
        let fields = |out: &mut Vec<u8>| {
            for v in [crc, len, len] {
                out.extend(v.to_le_bytes());
            }
            out.extend((name.len() as u16).to_le_bytes());
            out.extend([0, 0]);
        };
        file.extend(b"PK\x03\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00");
        fields(&mut file);
        file.extend(name.as_bytes());
        file.extend(*data);
        directory.extend(b"PK\x01\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00");
        fields(&mut directory);
        directory.extend([0u8; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (at, len, count) = (file.len() as u32, directory.len() as u32, members.len() as u16);
    file.extend(directory);
    file.extend(b"PK\x05\x06\x00\x00\x00\x00");
    file.extend(count.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend(len.to_le_bytes());
    file.extend(at.to_le_bytes());
    file.extend([0, 0]);
    file
}
