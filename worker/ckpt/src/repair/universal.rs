//! Lost parts of universal checkpoints, from the ZeRO checkpoint that they were made of.
use super::{Bench, files_below, foreign, within};
use crate::convert::{ConvertOptions, Target, convert};
use crate::disk::{self, Folder, exists};
use crate::error::Result;
use crate::external::Foreign;
use crate::formats::deepspeed::{self, LATEST_UNIVERSAL};
use crate::formats::torch_file::TorchFile;
use crate::formats::zip::Member;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const ENDING: &str = "_universal";
/// Folders beside the checkpoint in which its ZeRO checkpoint is looked for.
const BESIDE_MAX: usize = 64;
/// Files whose tensors show that two universal checkpoints are of the same state.
const TENSORS: [&str; 4] = ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "momentum_buffer.pt"];

/// Lets `latest_universal` name the newest universal checkpoint that is whole, after what can be rebuilt of it was.
pub(super) fn mend(bench: &mut Bench, folder: &str) -> Result<()> {
    let path = bench.dir.join(folder);
    let opened = Folder::open(&path)?;
    if folder.is_empty() && deepspeed::universal::is(&path) {
        return whole_or_mended(bench, "").map(drop);
    }
    let mut tags: Vec<(u64, String)> = Vec::new();
    for name in opened.names()? {
        let step = name.strip_suffix(ENDING).and_then(|n| n.strip_prefix("global_step")?.parse().ok());
        if let Some(step) = step.filter(|_| deepspeed::universal::is(&path.join(&name))) {
            tags.push((step, name));
        }
    }
    tags.sort();
    let there = opened.has(LATEST_UNIVERSAL)?;
    let said = if there { deepspeed::latest(&opened, LATEST_UNIVERSAL).ok() } else { None };
    for (_, tag) in tags.iter().rev() {
        if !whole_or_mended(bench, &within(folder, tag))? {
            continue;
        }
        if said.as_ref() != Some(tag) {
            bench.write(&within(folder, LATEST_UNIVERSAL), tag.as_bytes())?;
            bench.rebuilt.push(format!("{LATEST_UNIVERSAL}: names {tag} now"));
        }
        if folder.is_empty() && bench.newest.is_none() {
            bench.newest = Some(tag.clone());
        }
        return Ok(());
    }
    Ok(())
}

fn whole_or_mended(bench: &mut Bench, tag: &str) -> Result<bool> {
    let Err(why) = foreign::whole(&bench.dir.join(tag)) else { return Ok(true) };
    let before = bench.rebuilt.len();
    for source in sources(bench, tag)? {
        if from(bench, tag, &source)? && foreign::whole(&bench.dir.join(tag)).is_ok() {
            return Ok(true);
        }
        bench.rebuilt.truncate(before);
    }
    let shown = if tag.is_empty() { "the universal checkpoint" } else { tag };
    let none = "and no ZeRO checkpoint of the same state lies in this folder or beside it";
    bench.lost.push(format!("{shown}: {} ({none})", why.join("; ")));
    Ok(false)
}

/// ZeRO checkpoints of the same name, whole, here and in the folders beside.
fn sources(bench: &Bench, tag: &str) -> Result<Vec<Foreign>> {
    let at = bench.original.join(tag);
    let name = at.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let base = name.strip_suffix(ENDING).unwrap_or(&name).to_owned();
    let mut places = beside(bench, tag, &base)?;
    places.retain(|p| exists(p) && deepspeed::is_tag(p));
    Ok(places.iter().filter_map(|p| foreign::whole(p).ok()).collect())
}

/// Where a folder `name` that belongs to the tag may be: with the tag itself, and in the folders beside that one.
pub(super) fn beside(bench: &Bench, tag: &str, name: &str) -> Result<Vec<PathBuf>> {
    let at = bench.original.join(tag);
    let mut places = vec![disk::parent_of(&bench.dir.join(within(tag, "x"))).with_file_name(name)];
    let parent = disk::parent_of(&disk::parent_of(&at));
    for beside in Folder::open(&parent)?.names()?.into_iter().filter(|n| !n.starts_with('.')).take(BESIDE_MAX)
    {
        places.push(parent.join(beside).join(name));
    }
    Ok(places)
}

/// Takes what the tag lacks from what `source` would be as a universal checkpoint. False when they are not of the same
/// state.
fn from(bench: &mut Bench, tag: &str, source: &Foreign) -> Result<bool> {
    let aside = bench.aside();
    if convert(source, &aside.0, &ConvertOptions::to(Target::Universal), |_, _| ()).is_err() {
        return Ok(false);
    }
    let made = aside.0.join(deepspeed::latest(&Folder::open(&aside.0)?, LATEST_UNIVERSAL)?);
    let mut files = Vec::new();
    files_below(&made, "", 2, &mut files)?;
    let (mut alike, mut lost) = (0u64, Vec::new());
    let mut kinds: BTreeSet<String> = BTreeSet::new();
    let here = bench.dir.join(tag);
    for name in files.iter().filter(|n| n.ends_with(".pt")) {
        let kind = name.rsplit('/').next().unwrap_or(name);
        match (storages(&here, name), storages(&made, name)) {
            (None, _) => lost.push(name.clone()),
            (Some(old), Some(new)) => {
                if TENSORS.contains(&kind) {
                    if old != new {
                        return Ok(false);
                    }
                    alike += 1;
                }
                kinds.insert(kind.to_owned());
            }
            (Some(_), None) => return Ok(false),
        }
    }
    // a kind of file that this form never has isn't lost
    lost.retain(|n| kinds.contains(n.rsplit('/').next().unwrap_or(n)) || n.ends_with("optimizer_state.pt"));
    if alike == 0 || lost.is_empty() {
        return Ok(false);
    }
    for name in lost {
        disk::make_dirs(&disk::parent_of(&here.join(&name)))?;
        let file = within(tag, &name);
        bench.take(&made.join(&name), &file)?;
        bench.rebuilt.push(format!("{file}: made from {}", crate::source::Source::path(source).display()));
    }
    Ok(true)
}

/// Sizes and CRCs of the storages of a torch file; `None` when it isn't there or isn't sound.
fn storages(folder: &Path, name: &str) -> Option<BTreeMap<String, (u64, Option<u32>)>> {
    let folder = Folder::open(folder).ok()?;
    let known = crate::external::draft::GLOBALS;
    let file = TorchFile::open(&folder, name, known).ok()?;
    let data = |m: &Member| {
        let (_, inner) = m.name.split_once('/')?;
        inner.starts_with("data/").then(|| (inner.to_owned(), (m.data.end - m.data.start, m.crc)))
    };
    Some(file.members.iter().filter_map(data).collect())
}
