//! Repairs checkpoints of other programs: flipped bits, DeepSpeed's files, weights and random
//! generator states. Of several checkpoints, repairs the newest one that can be completed.
use super::repair_dir::{RepairDir, join_subpath, list_files_recursively};
use super::repair_loss::{RepairLoss, format_reason};
use super::sound_checkpoint::open_if_sound;
use super::{bit_flips, model_files, universal, weights};
use crate::codec::disk::{self, Directory};
use crate::error::Result;
use crate::layout::deepspeed::{self, LATEST_FILE, LATEST_UNIVERSAL_FILE};
use crate::open::open_external_checkpoint;
use crate::rng_files::{missing_rng_files, rank_files};
use std::path::Path;

/// Number of levels of subdirectories of a checkpoint in which a repair looks for torch files.
const SEARCH_DEPTH_MAX: u32 = 4;
/// Suffixes of the names of torch files.
const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".pkl"];

/// Repairs checkpoints of another program by modifying `repair_dir`, a copy of the damaged
/// checkpoint or of a directory with several checkpoints. If `repair_dir` contains several numbered
/// checkpoints, repairs the newest one that can be completed, removes the newer ones, and keeps the
/// older ones unchanged.
pub(super) fn repair_external_checkpoint(repair_dir: &mut RepairDir) -> Result<()> {
    let checkpoints = Directory::open(&repair_dir.dir)?.list_numbered_directories(parse_checkpoint_name)?;
    if checkpoints.is_empty() || is_deepspeed_checkpoint(&repair_dir.dir)? {
        return repair_checkpoint(repair_dir, "");
    }
    for name in checkpoints.iter().rev() {
        let before = repair_dir.lost.len();
        repair_checkpoint(repair_dir, name)?;
        match open_if_sound(&repair_dir.dir.join(name)) {
            Ok(_) => {
                repair_dir.newest = Some(name.clone());
                return Ok(());
            }
            Err(why) => {
                repair_dir.lost.truncate(before);
                repair_dir.lost.push(RepairLoss::new(name, why));
                // programs resume from the highest number, so an incomplete one must not stay
                repair_dir.rebuilt.push(format!("{name}: left out, because it cannot be completed"));
                disk::remove_tree(&repair_dir.dir.join(name))?;
            }
        }
    }
    Ok(())
}

/// Parses the step in the name of a checkpoint's directory, `checkpoint-N` or `checkpoint_N`.
/// Returns `None` for other names.
fn parse_checkpoint_name(name: &str) -> Option<u64> {
    ["checkpoint-", "checkpoint_"].iter().find_map(|p| name.strip_prefix(p)?.parse().ok())
}

/// Returns true if the directory at `path` is a DeepSpeed checkpoint, which contains `latest`,
/// `latest_universal` or the directory of a checkpoint (tag).
fn is_deepspeed_checkpoint(path: &Path) -> Result<bool> {
    let directory = Directory::open(path)?;
    Ok(directory.has_entry(LATEST_FILE)?
        || directory.has_entry(LATEST_UNIVERSAL_FILE)?
        || !deepspeed::list_tags(path)?.is_empty())
}

/// Repairs one checkpoint of another program, which `repair_dir`, the working copy of the damaged
/// directory, contains in its subdirectory `directory`. Reports repairs and losses in `repair_dir`.
fn repair_checkpoint(repair_dir: &mut RepairDir, directory: &str) -> Result<()> {
    let mut files = Vec::new();
    list_files_recursively(&repair_dir.dir, directory, SEARCH_DEPTH_MAX, &mut files)?;
    for name in files.iter().filter(|n| TORCH_SUFFIXES.iter().any(|end| n.ends_with(end))) {
        bit_flips::revert_bit_flips(repair_dir, name)?;
    }
    repair_latest_tag(repair_dir, directory)?;
    universal::repair_universal(repair_dir, directory)?;
    weights::repair_external_weights(repair_dir, directory)?;
    repair_rng_files(repair_dir, directory)
}

/// Repairs the newest DeepSpeed checkpoint (tag) that can be completed in the subdirectory
/// `directory` of the hidden copy, in which the repair takes place. Points `latest` to it, and
/// reports newer ones as lost.
fn repair_latest_tag(repair_dir: &mut RepairDir, directory: &str) -> Result<()> {
    let path = repair_dir.dir.join(directory);
    let tags = deepspeed::list_tags(&path)?;
    let opened = Directory::open(&path)?;
    let previous = deepspeed::read_latest(&opened, LATEST_FILE).ok();
    for tag in tags.iter().rev() {
        let before = repair_dir.rebuilt.len();
        let name = join_subpath(directory, tag);
        if let Err(why) = model_files::repair_model_files(repair_dir, &name) {
            repair_dir.lost.push(RepairLoss::new(name, vec![format_reason(&why)]));
            continue;
        }
        match open_if_sound(&repair_dir.dir.join(&name)) {
            Ok(_) => {
                if previous.as_ref() != Some(tag) {
                    repair_dir.write_file(&join_subpath(directory, LATEST_FILE), tag.as_bytes())?;
                    let change = previous
                        .map_or_else(|| "recreated".to_owned(), |previous| format!("pointed to {previous}"));
                    repair_dir.rebuilt.push(format!("latest: {change}, points to {tag} now"));
                }
                if directory.is_empty() {
                    repair_dir.newest = Some(tag.clone());
                }
                return Ok(());
            }
            Err(why) => {
                repair_dir.rebuilt.truncate(before);
                repair_dir.lost.push(RepairLoss::new(name, why));
            }
        }
    }
    Ok(())
}

/// Creates files with random generator states for ranks whose files are missing or invalid, in the
/// subdirectory `directory` of the working copy `repair_dir`. Reports the created files.
fn repair_rng_files(repair_dir: &mut RepairDir, directory: &str) -> Result<()> {
    let path = repair_dir.dir.join(directory);
    // without a checkpoint, RNG streams are useless
    let Ok(Some(found)) = open_external_checkpoint(&path) else { return Ok(()) };
    let step = found.facts().state.step.unwrap_or(0);
    let highest = found
        .facts()
        .rng_files
        .iter()
        .filter_map(|n| rank_files::parse_rank_file_name(n))
        .map(|(_, rank)| rank)
        .max();
    let world = match (found.facts().state.stage, found.facts().state.world, highest) {
        (Some(_), Some(world), _) => world,
        (.., Some(highest)) => highest.saturating_add(1),
        _ => return Ok(()),
    };
    if world == 1 && found.facts().rng_files.iter().any(|n| n == "rng_state_0.pth") {
        // a run of one process writes `rng_state.pth`, so there were more ranks
        let reason = "RNG states of all ranks except 0; the number of ranks is unknown".to_owned();
        let loss = RepairLoss::new(join_subpath(directory, "rng_state_*.pth"), vec![reason]);
        repair_dir.lost.push(loss.with_remark("`launch ckpt rng` creates them for a number that you know"));
    }
    match missing_rng_files::create_missing_rng_files(&path, world, step) {
        Ok(None) => {}
        Ok(Some(filled)) => {
            let files =
                filled.files.iter().map(|f| join_subpath(directory, f)).collect::<Vec<_>>().join(", ");
            repair_dir.rebuilt.push(format!("{files}: {}", filled.decision.summary()));
        }
        Err(e) if e.is_checkpoint_at_fault() => {
            repair_dir.lost.push(RepairLoss::new("", vec![format_reason(&e)]))
        }
        Err(e) => return Err(e),
    }
    Ok(())
}
