//! Repairs weights in Hugging Face's layout: a lost index from the headers of the shards, lost
//! weights from the training state.
use super::{Loss, RepairDir, external, join_name, reason_of};
use crate::checkpoint::Checkpoint;
use crate::disk::Directory;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::{deepspeed, safetensors};
use crate::gather::{GatherOptions, gather};
use crate::source::TensorSource;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

/// Directory in which a run stores its gathered weights, next to its checkpoints.
const RUN_WEIGHTS_DIR: &str = "weights";
const SINGLE_FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The reason for a gather where there are no weights.
const MISSING: &str = "the weights are missing";
/// Longest index that is read, bytes.
const INDEX_MAX: u64 = 64 << 20;
/// Most shards.
const SHARDS_MAX: u64 = 100_000;
/// Weights in other layouts. If one exists, safetensors files aren't missing.
const OTHER_WEIGHT_FILES: [&str; 4] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_model.bin"];

/// The condition of a directory's weights.
enum WeightsCondition {
    Sound,
    /// All shards exist, but the index is missing or wrong: file by tensor name, and total bytes.
    NoIndex(BTreeMap<String, String>, u64),
    /// The weights are damaged or incomplete for this reason.
    Broken(String),
    /// There are no weights.
    None,
}

/// Rebuilds the index, or gathers the weights from DeepSpeed's state in the directory.
pub(super) fn repair_weights(bench: &mut RepairDir, directory: &str) -> Result<()> {
    let path = bench.dir.join(directory);
    let opened = Directory::open(&path)?;
    let why = match weights_condition(&opened)? {
        WeightsCondition::Sound => return Ok(()),
        WeightsCondition::NoIndex(map, bytes) => return add_index(bench, directory, &map, bytes),
        WeightsCondition::Broken(why) => why,
        WeightsCondition::None => {
            let expected = opened.has("trainer_state.json")? && opened.has("config.json")?;
            let mut other = false;
            for name in OTHER_WEIGHT_FILES {
                other |= opened.has(name)?;
            }
            if !expected || other {
                return Ok(());
            }
            MISSING.into()
        }
    };
    match deepspeed::open(&path) {
        Ok(Some(_)) => regather_from_deepspeed(bench, directory, &why),
        _ => {
            let loss = Loss::new(format!("weights of {}", path.display()), vec![why]);
            bench.lost.push(loss.with_remark("there is no DeepSpeed state to gather them from"));
            Ok(())
        }
    }
}

fn add_index(
    bench: &mut RepairDir,
    directory: &str,
    map: &BTreeMap<String, String>,
    bytes: u64,
) -> Result<()> {
    let index = json!({"metadata": {"total_size": bytes}, "weight_map": map});
    let text = format!("{index:#}\n");
    bench.write(&join_name(directory, INDEX), text.as_bytes())?;
    let name = join_name(directory, INDEX);
    bench.rebuilt.push(format!("{name}: rebuilt from the headers of the shards ({} tensors)", map.len()));
    Ok(())
}

/// Gathers the weights of a run again from its newest checkpoint, if its `weights` directory is
/// damaged or incomplete. Does nothing without such a directory.
pub(super) fn repair_run_weights(bench: &mut RepairDir, newest: &str) -> Result<()> {
    if !Directory::open(&bench.dir)?.has_directory(RUN_WEIGHTS_DIR)? {
        return Ok(());
    }
    let opened = Directory::open(&bench.dir.join(RUN_WEIGHTS_DIR))?;
    match weights_condition(&opened)? {
        WeightsCondition::Sound => Ok(()),
        WeightsCondition::NoIndex(map, bytes) => add_index(bench, RUN_WEIGHTS_DIR, &map, bytes),
        WeightsCondition::Broken(why) => regather_from_step(bench, newest, &why),
        WeightsCondition::None => regather_from_step(bench, newest, MISSING),
    }
}

fn regather_from_step(bench: &mut RepairDir, newest: &str, why: &str) -> Result<()> {
    let checkpoint = Checkpoint::open(&bench.dir.join(newest))?;
    // the dtype in which a run gathers its weights
    regather(bench, RUN_WEIGHTS_DIR, &checkpoint, Some(Dtype::BF16), &format!("from {newest}"), why)
}

/// Gathers the weights from DeepSpeed's state in the directory.
fn regather_from_deepspeed(bench: &mut RepairDir, directory: &str, why: &str) -> Result<()> {
    let Ok(state) = external::open_sound(&bench.dir.join(directory)) else { return Ok(()) };
    regather(bench, directory, &state, state.passthrough()?.precision, "from DeepSpeed's state", why)
}

/// Replaces the weight files of a subdirectory by weights gathered from `source`.
fn regather(
    bench: &mut RepairDir,
    directory: &str,
    source: &dyn TensorSource,
    dtype: Option<Dtype>,
    from: &str,
    why: &str,
) -> Result<()> {
    let path = bench.dir.join(directory);
    let temp = bench.temp_dir();
    let options = GatherOptions { dtype, ..GatherOptions::default() };
    let made = gather(source, &temp.0, &options, |_, _| ())?;
    for name in Directory::open(&path)?
        .names()?
        .iter()
        .filter(|n| *n == SINGLE_FILE || *n == INDEX || parse_shard_name(n).is_some())
    {
        crate::disk::unlink(&path.join(name))?;
    }
    let mut names: Vec<&str> = made.files.iter().map(|f| f.name.as_str()).collect();
    if names.len() > 1 {
        names.push(INDEX);
    }
    for name in names {
        bench.copy_in(&temp.0.join(name), &join_name(directory, name))?;
        bench.rebuilt.push(format!(
            "{}: gathered {from} as {} (reason: {why})",
            join_name(directory, name),
            made.dtype
        ));
    }
    Ok(())
}

/// The number of a shard and the number of shards in a name like
/// `model-00001-of-00003.safetensors`.
fn parse_shard_name(name: &str) -> Option<(u64, u64)> {
    let (number, count) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

/// Determines the condition of the weights in a directory from their files and headers.
fn weights_condition(directory: &Directory) -> Result<WeightsCondition> {
    if directory.has(SINGLE_FILE)? {
        return Ok(match read_header(directory, SINGLE_FILE) {
            Ok(_) => WeightsCondition::Sound,
            Err(e) => WeightsCondition::Broken(reason_of(&e)),
        });
    }
    let shards: Vec<(String, (u64, u64))> =
        directory.names()?.into_iter().filter_map(|n| Some((n.clone(), parse_shard_name(&n)?))).collect();
    let Some(&(_, (_, count))) = shards.first() else {
        return Ok(match directory.has(INDEX)? {
            true => WeightsCondition::Broken("the index exists, but all of its shards are missing".into()),
            false => WeightsCondition::None,
        });
    };
    let numbers: Vec<u64> = shards.iter().filter(|(_, s)| s.1 == count).map(|(_, s)| s.0).collect();
    if count > SHARDS_MAX || numbers.len() != shards.len() || !numbers.iter().copied().eq(1..=count) {
        return Ok(WeightsCondition::Broken(format!("{} of {count} shards exist", numbers.len())));
    }
    let (mut map, mut bytes) = (BTreeMap::new(), 0u64);
    for (name, _) in &shards {
        match read_header(directory, name) {
            Ok(header) => {
                for e in header.entries {
                    bytes = bytes.saturating_add(e.bytes.end - e.bytes.start);
                    if map.insert(e.name.clone(), name.clone()).is_some() {
                        return Ok(WeightsCondition::Broken(format!("{} is in two shards", e.name)));
                    }
                }
            }
            Err(e) => return Ok(WeightsCondition::Broken(reason_of(&e))),
        }
    }
    match read_weight_map(directory).is_some_and(|stored| stored == map) {
        true => Ok(WeightsCondition::Sound),
        false => Ok(WeightsCondition::NoIndex(map, bytes)),
    }
}

fn read_header(directory: &Directory, name: &str) -> Result<safetensors::Header> {
    let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
    safetensors::read_header(size, |at, out| file.read_exact_at(out, at))
        .map_err(|why| CkptError::damaged(directory.path(), name, why))
}

/// The weight map of the index, if there is a readable one.
fn read_weight_map(directory: &Directory) -> Option<BTreeMap<String, String>> {
    let text = directory.read(INDEX, INDEX_MAX).ok()?;
    let index: Value = serde_json::from_slice(&text).ok()?;
    serde_json::from_value(index.get("weight_map")?.clone()).ok()
}
