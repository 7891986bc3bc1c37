//! Repairs external checkpoints: the newest step that can be completed, and the files that belong
//! to it.
use super::{Loss, RepairDir, bit_flips, join_name, list_files, model_files, reason_of, universal, weights};
use crate::disk::{self, Directory};
use crate::error::Result;
use crate::external::values::non_finite_values;
use crate::external::{self, ExternalCheckpoint};
use crate::formats::deepspeed::{self, LATEST, LATEST_UNIVERSAL};
use crate::rng_files::{missing_ranks, rank_files as rng_folder};
use std::path::Path;

/// Depth of directories that are searched for files.
const DEPTH_MAX: u32 = 4;
/// File name extensions of torch containers.
const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".pkl"];

/// Repairs a directory with one checkpoint, or with several, of which the newest that can be
/// completed is kept with all older ones.
pub(super) fn repair_external(bench: &mut RepairDir) -> Result<()> {
    let checkpoints = numbered_checkpoints(&Directory::open(&bench.dir)?)?;
    if checkpoints.is_empty() || is_checkpoint(&bench.dir)? {
        return repair_checkpoint(bench, "");
    }
    for name in checkpoints.iter().rev() {
        let before = bench.lost.len();
        repair_checkpoint(bench, name)?;
        match open_sound(&bench.dir.join(name)) {
            Ok(_) => {
                bench.newest = Some(name.clone());
                return Ok(());
            }
            Err(why) => {
                bench.lost.truncate(before);
                bench.lost.push(Loss::new(name, why));
                // programs resume from the highest number, so an incomplete one must not stay
                bench.rebuilt.push(format!("{name}: left out, because it cannot be completed"));
                disk::remove_tree(&bench.dir.join(name))?;
            }
        }
    }
    Ok(())
}

/// Names of the directories `checkpoint-N` and `checkpoint_N`, oldest first.
fn numbered_checkpoints(directory: &Directory) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for name in directory.names()? {
        let step =
            ["checkpoint-", "checkpoint_"].iter().find_map(|p| name.strip_prefix(p)?.parse::<u64>().ok());
        if let Some(step) = step
            && directory.has_directory(&name)?
        {
            found.push((step, name));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// Whether the directory itself is a DeepSpeed checkpoint.
fn is_checkpoint(path: &Path) -> Result<bool> {
    let directory = Directory::open(path)?;
    Ok(directory.has(LATEST)? || directory.has(LATEST_UNIVERSAL)? || !deepspeed::tags(path)?.is_empty())
}

/// Opens the checkpoint at `path` if every byte is intact and every value finite. The error lists
/// the reasons why it isn't sound.
pub(super) fn open_sound(path: &Path) -> std::result::Result<ExternalCheckpoint, Vec<String>> {
    let line = |e: crate::error::CkptError| vec![reason_of(&e)];
    let Some(found) = external::open(path).map_err(line)? else {
        return Err(vec![crate::diagnosis::diagnose(path).to_string()]);
    };
    let (report, _) = found.verify().map_err(line)?;
    if !report.problems.is_empty() {
        return Err(report.problems.iter().map(ToString::to_string).collect());
    }
    match non_finite_values(&found).map_err(line)? {
        lines if lines.is_empty() => Ok(found),
        lines => Err(lines),
    }
}

/// Repairs one checkpoint, which is in subdirectory `directory` of the copy.
fn repair_checkpoint(bench: &mut RepairDir, directory: &str) -> Result<()> {
    let mut files = Vec::new();
    list_files(&bench.dir, directory, DEPTH_MAX, &mut files)?;
    for name in files.iter().filter(|n| TORCH_SUFFIXES.iter().any(|end| n.ends_with(end))) {
        bit_flips::repair_file(bench, name)?;
    }
    repair_latest_tag(bench, directory)?;
    universal::repair_universal(bench, directory)?;
    weights::repair_weights(bench, directory)?;
    repair_rng_files(bench, directory)
}

/// Repairs the newest DeepSpeed tag and points `latest` to it; tries older tags when that fails.
fn repair_latest_tag(bench: &mut RepairDir, directory: &str) -> Result<()> {
    let path = bench.dir.join(directory);
    let tags = deepspeed::tags(&path)?;
    let opened = Directory::open(&path)?;
    let previous = if opened.has(LATEST)? { deepspeed::latest(&opened, LATEST).ok() } else { None };
    for tag in tags.iter().rev() {
        let before = bench.rebuilt.len();
        let name = join_name(directory, tag);
        if let Err(why) = model_files::repair_model_files(bench, &name) {
            bench.lost.push(Loss::new(name, vec![reason_of(&why)]));
            continue;
        }
        match open_sound(&bench.dir.join(&name)) {
            Ok(_) => {
                if previous.as_ref() != Some(tag) {
                    bench.write(&join_name(directory, LATEST), tag.as_bytes())?;
                    let change = previous
                        .map_or_else(|| "recreated".to_owned(), |previous| format!("pointed to {previous}"));
                    bench.rebuilt.push(format!("latest: {change}, points to {tag} now"));
                }
                if directory.is_empty() {
                    bench.newest = Some(tag.clone());
                }
                return Ok(());
            }
            Err(why) => {
                bench.rebuilt.truncate(before);
                bench.lost.push(Loss::new(name, why));
            }
        }
    }
    Ok(())
}

/// Creates the RNG state files of ranks that have none.
fn repair_rng_files(bench: &mut RepairDir, directory: &str) -> Result<()> {
    let path = bench.dir.join(directory);
    // RNG states are of no use without a checkpoint
    let Ok(Some(found)) = external::open(&path) else { return Ok(()) };
    let step = found.facts().step.unwrap_or(0);
    let highest = found
        .facts()
        .rng_files
        .iter()
        .filter_map(|n| rng_folder::parse_file_name(n))
        .map(|(_, rank)| rank)
        .max();
    let world = match (found.facts().stage, found.facts().world, highest) {
        (Some(_), Some(world), _) => world,
        (.., Some(highest)) => highest.saturating_add(1),
        _ => return Ok(()),
    };
    if world == 1 && found.facts().rng_files.iter().any(|n| n == "rng_state_0.pth") {
        // a run of one process writes rng_state.pth
        let reason = "RNG states of all ranks except 0; the number of ranks is unknown".to_owned();
        let loss = Loss::new(join_name(directory, "rng_state_*.pth"), vec![reason]);
        bench.lost.push(loss.with_remark("`launch ckpt rng` creates them for a number that you know"));
    }
    match missing_ranks::fill_missing_ranks(&path, world, step) {
        Ok(None) => {}
        Ok(Some(filled)) => {
            let files = filled.files.iter().map(|f| join_name(directory, f)).collect::<Vec<_>>().join(", ");
            bench.rebuilt.push(format!("{files}: {}", filled.decision.summary()));
        }
        Err(e) if e.is_checkpoint_at_fault() => bench.lost.push(Loss::new("", vec![reason_of(&e)])),
        Err(e) => return Err(e),
    }
    Ok(())
}
