//! Repairs universal checkpoints from the ZeRO checkpoint that they were converted from.
use super::{Loss, RepairDir, external, join_name, list_files};
use crate::convert::{ConvertOptions, ConvertTarget, convert};
use crate::disk::{self, Directory, exists};
use crate::error::Result;
use crate::external::ExternalCheckpoint;
use crate::formats::deepspeed::{self, LATEST_UNIVERSAL};
use crate::formats::torch_file::TorchFile;
use crate::formats::zip::Member;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const SUFFIX: &str = "_universal";
/// Most sibling directories that are searched for the ZeRO checkpoint.
const SIBLINGS_MAX: usize = 64;
/// Files whose tensors show that two universal checkpoints are of the same state.
const TENSOR_FILES: [&str; 4] = ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "momentum_buffer.pt"];

/// Repairs the newest universal checkpoint and points `latest_universal` to it; tries older ones
/// when that fails.
pub(super) fn repair_universal(bench: &mut RepairDir, directory: &str) -> Result<()> {
    let path = bench.dir.join(directory);
    let opened = Directory::open(&path)?;
    if directory.is_empty() && deepspeed::universal::is_universal(&path) {
        return repair_tag(bench, "").map(drop);
    }
    let mut tags: Vec<(u64, String)> = Vec::new();
    for name in opened.names()? {
        let step = name.strip_suffix(SUFFIX).and_then(|n| n.strip_prefix("global_step")?.parse().ok());
        if let Some(step) = step.filter(|_| deepspeed::universal::is_universal(&path.join(&name))) {
            tags.push((step, name));
        }
    }
    tags.sort();
    let has_latest = opened.has(LATEST_UNIVERSAL)?;
    let previous = if has_latest { deepspeed::latest(&opened, LATEST_UNIVERSAL).ok() } else { None };
    for (_, tag) in tags.iter().rev() {
        if !repair_tag(bench, &join_name(directory, tag))? {
            continue;
        }
        if previous.as_ref() != Some(tag) {
            bench.write(&join_name(directory, LATEST_UNIVERSAL), tag.as_bytes())?;
            bench.rebuilt.push(format!("{LATEST_UNIVERSAL}: points to {tag} now"));
        }
        if directory.is_empty() && bench.newest.is_none() {
            bench.newest = Some(tag.clone());
        }
        return Ok(());
    }
    Ok(())
}

/// Whether the universal checkpoint `tag` is sound, after a repair where needed.
fn repair_tag(bench: &mut RepairDir, tag: &str) -> Result<bool> {
    let Err(why) = external::open_sound(&bench.dir.join(tag)) else { return Ok(true) };
    let before = bench.rebuilt.len();
    for source in zero_checkpoints(bench, tag)? {
        if copy_missing_from(bench, tag, &source)? && external::open_sound(&bench.dir.join(tag)).is_ok() {
            return Ok(true);
        }
        bench.rebuilt.truncate(before);
    }
    let shown = if tag.is_empty() { "the universal checkpoint" } else { tag };
    let remark = "no ZeRO checkpoint of this state in this directory or its siblings";
    bench.lost.push(Loss::new(shown, why).with_remark(remark));
    Ok(false)
}

/// Sound ZeRO checkpoints with the tag's name, in this directory and its siblings.
fn zero_checkpoints(bench: &RepairDir, tag: &str) -> Result<Vec<ExternalCheckpoint>> {
    let at = bench.original.join(tag);
    let name = at.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let base = name.strip_suffix(SUFFIX).unwrap_or(&name).to_owned();
    let mut places = candidate_paths(bench, tag, &base)?;
    places.retain(|p| exists(p) && deepspeed::is_tag(p));
    Ok(places.iter().filter_map(|p| external::open_sound(p).ok()).collect())
}

/// Paths where a directory `name` that belongs to the tag may be: next to the tag, and in the
/// siblings of the tag's parent.
pub(super) fn candidate_paths(bench: &RepairDir, tag: &str, name: &str) -> Result<Vec<PathBuf>> {
    let at = bench.original.join(tag);
    let mut places = vec![disk::parent_of(&bench.dir.join(join_name(tag, "x"))).with_file_name(name)];
    let parent = disk::parent_of(&disk::parent_of(&at));
    for sibling in
        Directory::open(&parent)?.names()?.into_iter().filter(|n| !n.starts_with('.')).take(SIBLINGS_MAX)
    {
        places.push(parent.join(sibling).join(name));
    }
    Ok(places)
}

/// Copies missing files from the conversion of `source` to a universal checkpoint. False when a
/// remaining file shows another state.
fn copy_missing_from(bench: &mut RepairDir, tag: &str, source: &ExternalCheckpoint) -> Result<bool> {
    let temp = bench.temp_dir();
    if convert(source, &temp.0, &ConvertOptions::new(ConvertTarget::Universal), |_, _| ()).is_err() {
        return Ok(false);
    }
    let made = temp.0.join(deepspeed::latest(&Directory::open(&temp.0)?, LATEST_UNIVERSAL)?);
    let mut files = Vec::new();
    list_files(&made, "", 2, &mut files)?;
    let (mut equal, mut lost) = (0u64, Vec::new());
    let mut kinds: BTreeSet<String> = BTreeSet::new();
    let dir = bench.dir.join(tag);
    for name in files.iter().filter(|n| n.ends_with(".pt")) {
        let kind = name.rsplit('/').next().unwrap_or(name);
        match (storage_digests(&dir, name), storage_digests(&made, name)) {
            (None, _) => lost.push(name.clone()),
            (Some(old), Some(new)) => {
                if TENSOR_FILES.contains(&kind) {
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
    // a kind of file that this checkpoint never had isn't lost
    lost.retain(|n| kinds.contains(n.rsplit('/').next().unwrap_or(n)) || n.ends_with("optimizer_state.pt"));
    if equal == 0 || lost.is_empty() {
        return Ok(false);
    }
    for name in lost {
        disk::make_dirs(&disk::parent_of(&dir.join(&name)))?;
        let file = join_name(tag, &name);
        bench.copy_in(&made.join(&name), &file)?;
        bench
            .rebuilt
            .push(format!("{file}: rebuilt from {}", crate::source::TensorSource::path(source).display()));
    }
    Ok(true)
}

/// Sizes and CRCs of the storages of a torch file; `None` when it is missing or damaged.
fn storage_digests(directory: &Path, name: &str) -> Option<BTreeMap<String, (u64, Option<u32>)>> {
    let directory = Directory::open(directory).ok()?;
    let known = crate::external::builder::GLOBALS;
    let file = TorchFile::open(&directory, name, known).ok()?;
    let data = |m: &Member| {
        let (_, inner) = m.name.split_once('/')?;
        inner.starts_with("data/").then(|| (inner.to_owned(), (m.data.end - m.data.start, m.crc)))
    };
    Some(file.members.iter().filter_map(data).collect())
}
