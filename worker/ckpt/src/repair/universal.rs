//! Repairs a DeepSpeed universal checkpoint by converting a ZeRO checkpoint of the same training
//! state, and copying the missing files from the result.
use super::repair_dir::{RepairDir, join_subpath, list_files_recursively};
use super::repair_loss::RepairLoss;
use super::sound_checkpoint::open_if_sound;
use crate::catalog::ExternalCheckpoint;
use crate::codec::disk::{self, Directory, path_exists};
use crate::codec::torch_file::TorchFile;
use crate::codec::zip::ZipMember;
use crate::convert::{ConvertOptions, ConvertTarget, convert_checkpoint};
use crate::error::Result;
use crate::layout::deepspeed::{self, LATEST_UNIVERSAL_FILE, UNIVERSAL_SUFFIX};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Maximum number of neighbouring directories that are searched for a ZeRO checkpoint of the same
/// training state.
const SIBLING_DIRS_MAX: usize = 64;
/// Names of those files of a weight by whose content a repair decides whether two universal
/// checkpoints were saved from the same training state.
const COMPARED_TENSOR_FILES: [&str; 4] = ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "momentum_buffer.pt"];

/// Repairs the newest universal checkpoint that can be repaired in a subdirectory of the working
/// copy, and writes its name to `latest_universal`.
pub(super) fn repair_universal(repair_dir: &mut RepairDir, directory: &str) -> Result<()> {
    let path = repair_dir.dir.join(directory);
    let opened = Directory::open(&path)?;
    if directory.is_empty() && deepspeed::universal::is_universal_directory(&path) {
        return repair_universal_tag(repair_dir, "").map(drop);
    }
    let mut tags: Vec<(u64, String)> = Vec::new();
    for name in opened.list_names()? {
        let step =
            name.strip_suffix(UNIVERSAL_SUFFIX).and_then(|n| n.strip_prefix("global_step")?.parse().ok());
        if let Some(step) = step.filter(|_| deepspeed::universal::is_universal_directory(&path.join(&name))) {
            tags.push((step, name));
        }
    }
    tags.sort_unstable();
    let previous = deepspeed::read_latest(&opened, LATEST_UNIVERSAL_FILE).ok();
    for (_, tag) in tags.iter().rev() {
        if !repair_universal_tag(repair_dir, &join_subpath(directory, tag))? {
            continue;
        }
        if previous.as_ref() != Some(tag) {
            repair_dir.write_file(&join_subpath(directory, LATEST_UNIVERSAL_FILE), tag.as_bytes())?;
            repair_dir.rebuilt.push(format!("{LATEST_UNIVERSAL_FILE}: points to {tag} now"));
        }
        if directory.is_empty() && repair_dir.newest.is_none() {
            repair_dir.newest = Some(tag.clone());
        }
        return Ok(());
    }
    Ok(())
}

/// Rebuilds the missing files of the universal checkpoint `tag` from a ZeRO checkpoint that was
/// saved from equal training state. Returns true if the checkpoint is intact afterwards. If not,
/// reports it as lost.
fn repair_universal_tag(repair_dir: &mut RepairDir, tag: &str) -> Result<bool> {
    let Err(why) = open_if_sound(&repair_dir.dir.join(tag)) else { return Ok(true) };
    let before = repair_dir.rebuilt.len();
    for source in find_zero_checkpoints(repair_dir, tag)? {
        if copy_missing_files(repair_dir, tag, &source)? && open_if_sound(&repair_dir.dir.join(tag)).is_ok() {
            return Ok(true);
        }
        repair_dir.rebuilt.truncate(before);
    }
    let shown = if tag.is_empty() { "the universal checkpoint" } else { tag };
    let remark = "no ZeRO checkpoint of this state in this directory or its siblings";
    repair_dir.lost.push(RepairLoss::new(shown, why).with_remark(remark));
    Ok(false)
}

/// Finds the intact ZeRO checkpoints that may have been saved from the training state of the
/// universal checkpoint `tag`. Their name is `tag` without [`UNIVERSAL_SUFFIX`], and they are next
/// to `tag` or in sibling directories.
fn find_zero_checkpoints(repair_dir: &RepairDir, tag: &str) -> Result<Vec<ExternalCheckpoint>> {
    let name = |name: &str| name.strip_suffix(UNIVERSAL_SUFFIX).unwrap_or(name).to_owned();
    find_related_checkpoints(repair_dir, tag, name, deepspeed::is_tag_directory)
}

/// Opens the intact checkpoints next to the checkpoint `tag`, and in neighboring directories, that
/// may store its training state in the other DeepSpeed format. `derive_name` derives the name of
/// such a checkpoint from that of the tag, and `is_kind` recognizes the kind.
pub(super) fn find_related_checkpoints(
    repair_dir: &RepairDir,
    tag: &str,
    derive_name: impl Fn(&str) -> String,
    is_kind: fn(&Path) -> bool,
) -> Result<Vec<ExternalCheckpoint>> {
    let at = repair_dir.original.join(tag);
    let name = derive_name(&at.file_name().unwrap_or_default().to_string_lossy());
    let paths = list_candidate_paths(repair_dir, tag, &name)?.into_iter();
    Ok(paths.filter(|p| path_exists(p) && is_kind(p)).filter_map(|p| open_if_sound(&p).ok()).collect())
}

/// Lists the paths, next to the checkpoint `tag` and in neighboring directories, where a checkpoint
/// with the directory name `name` may exist. One path is next to the tag. The others are in the
/// directories next to the one that contains the tag. The paths may not exist.
fn list_candidate_paths(repair_dir: &RepairDir, tag: &str, name: &str) -> Result<Vec<PathBuf>> {
    let at = repair_dir.original.join(tag);
    let mut places =
        vec![disk::parent_dir(&repair_dir.dir.join(join_subpath(tag, "x"))).with_file_name(name)];
    let parent = disk::parent_dir(&disk::parent_dir(&at));
    for sibling in Directory::open(&parent)?
        .list_names()?
        .into_iter()
        .filter(|n| !n.starts_with('.'))
        .take(SIBLING_DIRS_MAX)
    {
        places.push(parent.join(sibling).join(name));
    }
    Ok(places)
}

/// Restores the missing files of the universal checkpoint `tag` from the ZeRO checkpoint `source`,
/// which is converted to the universal format for this purpose. Copies nothing and returns false if
/// the remaining files belong to another training state, or if no file is missing.
fn copy_missing_files(repair_dir: &mut RepairDir, tag: &str, source: &ExternalCheckpoint) -> Result<bool> {
    let temp = repair_dir.temp_dir();
    if convert_checkpoint(source, &temp.0, &ConvertOptions::new(ConvertTarget::Universal), |_, _| ()).is_err()
    {
        return Ok(false);
    }
    let made = temp.0.join(deepspeed::read_latest(&Directory::open(&temp.0)?, LATEST_UNIVERSAL_FILE)?);
    let mut files = Vec::new();
    list_files_recursively(&made, "", 2, &mut files)?;
    let (mut equal, mut lost) = (0u64, Vec::new());
    let mut kinds: BTreeSet<String> = BTreeSet::new();
    let dir = repair_dir.dir.join(tag);
    for name in files.iter().filter(|n| n.ends_with(".pt")) {
        let kind = name.rsplit('/').next().unwrap_or(name);
        match (read_storage_digests(&dir, name), read_storage_digests(&made, name)) {
            (None, _) => lost.push(name.clone()),
            (Some(old), Some(new)) => {
                if COMPARED_TENSOR_FILES.contains(&kind) {
                    if old != new {
                        return Ok(false);
                    }
                    equal += 1;
                }
                kinds.insert(kind.to_owned());
            }
            (Some(_), None) => return Ok(false),
        }
    }
    // a file is lost only if the checkpoint has files of this name for other parameters
    lost.retain(|n| kinds.contains(n.rsplit('/').next().unwrap_or(n)) || n.ends_with("optimizer_state.pt"));
    if equal == 0 || lost.is_empty() {
        return Ok(false);
    }
    for name in lost {
        disk::make_dirs(&disk::parent_dir(&dir.join(&name)))?;
        let file = join_subpath(tag, &name);
        repair_dir.copy_file_in(&made.join(&name), &file)?;
        repair_dir
            .rebuilt
            .push(format!("{file}: rebuilt from {}", crate::catalog::TensorSource::path(source).display()));
    }
    Ok(true)
}

/// Reads from a torch file a map from the name of each tensor storage to its size in bytes and its
/// CRC-32. Returns `None` if the file is missing or damaged.
fn read_storage_digests(directory: &Path, name: &str) -> Option<BTreeMap<String, (u64, Option<u32>)>> {
    let directory = Directory::open(directory).ok()?;
    let known = crate::catalog::ALLOWED_GLOBALS;
    let file = TorchFile::open(&directory, name, known).ok()?;
    let data = |m: &ZipMember| {
        let (_, inner) = m.name.split_once('/')?;
        inner.starts_with("data/").then(|| (inner.to_owned(), (m.size(), m.crc)))
    };
    Some(file.members.iter().filter_map(data).collect())
}
