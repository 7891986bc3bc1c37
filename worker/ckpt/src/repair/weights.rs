//! Repairs weights in Hugging Face's layout: rebuilds a lost index file, or gathers lost weights
//! from the training state.
use super::repair_dir::{RepairDir, join_subpath};
use super::repair_loss::{RepairLoss, format_reason};
use super::sound_checkpoint::open_if_sound;
use crate::catalog::TensorSource;
use crate::codec::disk::Directory;
use crate::codec::safetensors;
use crate::error::Result;
use crate::format_constants::RUN_WEIGHTS_DIR;
use crate::gather::{GatherOptions, gather_weights};
use crate::layout::deepspeed;
use crate::layout::hf::weights::read_weight_map;
use crate::layout::native::Checkpoint;
use crate::tensor::Dtype;
use serde_json::json;
use std::collections::BTreeMap;

/// Name of the safetensors file that contains all weights of a model.
const SINGLE_WEIGHTS_FILE: &str = "model.safetensors";
/// Name of the index file, which states in which safetensors file each weight is stored.
const WEIGHT_INDEX_FILE: &str = "model.safetensors.index.json";
/// The reason that a repair's report gives if weights were rebuilt from the training state, because
/// the checkpoint had no weights files.
const MISSING_WEIGHTS_REASON: &str = "the weights are missing";
/// Maximum number of safetensors files that the weights of a model may have.
const SHARDS_MAX: u64 = 100_000;
/// Names of files that contain weights in other layouts than safetensors. A directory with such a
/// file needs no safetensors file.
const OTHER_WEIGHT_FILES: [&str; 4] =
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_model.bin"];

/// The condition of the safetensors weights in a directory: complete, without a correct index file,
/// damaged, or absent.
enum WeightsCondition {
    /// All weight files exist and have valid headers, and the index is right.
    Sound,
    /// All shards exist, but the index is missing or wrong. The fields are the content of a correct
    /// index: the file by tensor name, and the total size in bytes.
    IndexInvalid(BTreeMap<String, String>, u64),
    /// The weights are damaged or incomplete. The field is the reason as text.
    Broken(String),
    /// The directory has no safetensors weights.
    None,
}

/// Repairs the Hugging Face weights files of one checkpoint, in the subdirectory `directory` of the
/// working copy, by rebuilding the index or the weights. Rebuilds the index, or gathers the weights
/// from the DeepSpeed state in `directory`. Reports a loss if there is no such state.
pub(super) fn repair_external_weights(repair_dir: &mut RepairDir, directory: &str) -> Result<()> {
    let path = repair_dir.dir.join(directory);
    let opened = Directory::open(&path)?;
    let why = match determine_weights_condition(&opened)? {
        WeightsCondition::Sound => return Ok(()),
        WeightsCondition::IndexInvalid(map, bytes) => return write_index(repair_dir, directory, &map, bytes),
        WeightsCondition::Broken(why) => why,
        WeightsCondition::None => {
            let expected = opened.has_entry("trainer_state.json")? && opened.has_entry("config.json")?;
            let mut other = false;
            for name in OTHER_WEIGHT_FILES {
                other |= opened.has_entry(name)?;
            }
            if !expected || other {
                return Ok(());
            }
            MISSING_WEIGHTS_REASON.into()
        }
    };
    match deepspeed::open_deepspeed(&path) {
        Ok(Some(_)) => regather_from_deepspeed(repair_dir, directory, &why),
        _ => {
            let loss = RepairLoss::new(format!("weights of {}", path.display()), vec![why]);
            repair_dir.lost.push(loss.with_remark("there is no DeepSpeed state to gather them from"));
            Ok(())
        }
    }
}

/// Writes the rebuilt index file, which maps each tensor name to its weights file, to the
/// subdirectory `directory` of the working copy. `map` is the file by tensor name, and `bytes` the
/// total size of the tensors.
fn write_index(
    repair_dir: &mut RepairDir,
    directory: &str,
    map: &BTreeMap<String, String>,
    bytes: u64,
) -> Result<()> {
    let index = json!({"metadata": {"total_size": bytes}, "weight_map": map});
    let text = format!("{index:#}\n");
    repair_dir.write_file(&join_subpath(directory, WEIGHT_INDEX_FILE), text.as_bytes())?;
    let name = join_subpath(directory, WEIGHT_INDEX_FILE);
    repair_dir
        .rebuilt
        .push(format!("{name}: rebuilt from the headers of the shards ({} tensors)", map.len()));
    Ok(())
}

/// Repairs the directory `weights` of a run, which contains its full weights, and rebuilds lost
/// weights from the checkpoint `newest` of the run. Does nothing if `repair_dir` has no such
/// directory.
pub(super) fn repair_run_weights(repair_dir: &mut RepairDir, newest: &str) -> Result<()> {
    if !Directory::open(&repair_dir.dir)?.has_directory(RUN_WEIGHTS_DIR)? {
        return Ok(());
    }
    let opened = Directory::open(&repair_dir.dir.join(RUN_WEIGHTS_DIR))?;
    match determine_weights_condition(&opened)? {
        WeightsCondition::Sound => Ok(()),
        WeightsCondition::IndexInvalid(map, bytes) => write_index(repair_dir, RUN_WEIGHTS_DIR, &map, bytes),
        WeightsCondition::Broken(why) => regather_from_native(repair_dir, newest, &why),
        WeightsCondition::None => regather_from_native(repair_dir, newest, MISSING_WEIGHTS_REASON),
    }
}

/// Replaces the full weights of a run by BF16 weights that are assembled from the shards of its
/// checkpoint `newest`. `why` is the reason that the report gives for gathering the weights.
fn regather_from_native(repair_dir: &mut RepairDir, newest: &str, why: &str) -> Result<()> {
    let checkpoint = Checkpoint::open(&repair_dir.dir.join(newest))?;
    let from = format!("from {newest}");
    // a run gathers its weights as BF16
    regather_weights(repair_dir, RUN_WEIGHTS_DIR, &checkpoint, Some(Dtype::BF16), &from, why)
}

/// Rebuilds the Hugging Face weights in the subdirectory `directory` of the working copy from the
/// intact DeepSpeed checkpoint in the same subdirectory. Does nothing if the state isn't sound.
/// `why` is the reason that the report gives for gathering the weights.
fn regather_from_deepspeed(repair_dir: &mut RepairDir, directory: &str, why: &str) -> Result<()> {
    let Ok(state) = open_if_sound(&repair_dir.dir.join(directory)) else { return Ok(()) };
    let dtype = state.read_passthrough()?.precision;
    regather_weights(repair_dir, directory, &state, dtype, "from DeepSpeed's state", why)
}

/// Replaces the safetensors weights in a directory by weights that are exported from the intact
/// checkpoint `source`. Adds a line about each new file to the report, with the origin `from` of
/// the weights and the reason `why`.
fn regather_weights(
    repair_dir: &mut RepairDir,
    directory: &str,
    source: &dyn TensorSource,
    dtype: Option<Dtype>,
    from: &str,
    why: &str,
) -> Result<()> {
    let path = repair_dir.dir.join(directory);
    let temp = repair_dir.temp_dir();
    let options = GatherOptions { dtype, ..GatherOptions::default() };
    let made = gather_weights(source, &temp.0, &options, |_, _| ())?;
    for name in Directory::open(&path)?
        .list_names()?
        .iter()
        .filter(|n| *n == SINGLE_WEIGHTS_FILE || *n == WEIGHT_INDEX_FILE || parse_shard_name(n).is_some())
    {
        crate::codec::disk::unlink(&path.join(name))?;
    }
    let mut names: Vec<&str> = made.files.iter().map(|f| f.name.as_str()).collect();
    if names.len() > 1 {
        names.push(WEIGHT_INDEX_FILE);
    }
    for name in names {
        repair_dir.copy_file_in(&temp.0.join(name), &join_subpath(directory, name))?;
        repair_dir.rebuilt.push(format!(
            "{}: gathered {from} as {} (reason: {why})",
            join_subpath(directory, name),
            made.dtype
        ));
    }
    Ok(())
}

/// Parses the name of one of several weights files, such as `model-00001-of-00003.safetensors`.
/// Returns the number of the shard and the number of shards, or `None` for other names.
fn parse_shard_name(name: &str) -> Option<(u64, u64)> {
    let (number, count) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    Some((number.parse().ok()?, count.parse().ok()?))
}

/// Determines from file names and safetensors headers whether the weights in a directory are
/// complete, damaged or absent, or only their index is wrong.
fn determine_weights_condition(directory: &Directory) -> Result<WeightsCondition> {
    if directory.has_entry(SINGLE_WEIGHTS_FILE)? {
        return Ok(match safetensors::open_header(directory, SINGLE_WEIGHTS_FILE) {
            Ok(_) => WeightsCondition::Sound,
            Err(e) => WeightsCondition::Broken(format_reason(&e)),
        });
    }
    let shards: Vec<(String, (u64, u64))> = directory
        .list_names()?
        .into_iter()
        .filter_map(|n| Some((n.clone(), parse_shard_name(&n)?)))
        .collect();
    let Some(&(_, (_, count))) = shards.first() else {
        return Ok(match directory.has_entry(WEIGHT_INDEX_FILE)? {
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
        match safetensors::open_header(directory, name) {
            Ok((header, _)) => {
                for e in header.entries {
                    bytes = bytes.saturating_add(e.bytes.end - e.bytes.start);
                    if map.insert(e.name.clone(), name.clone()).is_some() {
                        return Ok(WeightsCondition::Broken(format!("{} is in two shards", e.name)));
                    }
                }
            }
            Err(e) => return Ok(WeightsCondition::Broken(format_reason(&e))),
        }
    }
    match read_weight_map(directory, WEIGHT_INDEX_FILE).is_ok_and(|stored| stored == map) {
        true => Ok(WeightsCondition::Sound),
        false => Ok(WeightsCondition::IndexInvalid(map, bytes)),
    }
}
