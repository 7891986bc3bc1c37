//! Repairs native checkpoints (those in launch's own format): rebuilds blocks from parity files,
//! and points `latest` to the newest complete checkpoint.
use super::repair_dir::{RepairDir, join_subpath};
use super::repair_loss::RepairLoss;
use super::weights;
use crate::codec::disk;
use crate::error::Result;
use crate::format_constants::MANIFEST_FILE;
use crate::layout::native::{step_dir_name, step_directories};
use crate::save::{rebuild_from_parity, update_latest};
use crate::verify::verify_checkpoints;

/// Repairs checkpoints in launch's own format by modifying `repair_dir`, a copy of the damaged
/// checkpoint or of a directory with several checkpoints. In a directory, removes the checkpoints
/// that can't be completed, points `latest` to the newest complete checkpoint, and repairs the
/// gathered weights of the run.
pub(super) fn repair_native_checkpoints(repair_dir: &mut RepairDir) -> Result<()> {
    if disk::path_exists(&repair_dir.dir.join(MANIFEST_FILE)) {
        return repair_step_checkpoint(repair_dir, "").map(drop);
    }
    let previous = step_directories::read_latest_step(&repair_dir.dir).ok().flatten();
    let mut newest = None;
    for step in step_directories::list_steps(&repair_dir.dir)? {
        let name = match step_directories::locate_step_checkpoint(&repair_dir.dir, step) {
            Some(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            None => step_dir_name(step),
        };
        match repair_step_checkpoint(repair_dir, &name)? {
            true => newest = newest.or(Some(step)),
            false => {
                disk::remove_tree(&repair_dir.dir.join(&name))?;
                repair_dir.rebuilt.push(format!("{name}: left out, because it cannot be completed"));
            }
        }
    }
    if let Some(step) = newest {
        repair_dir.newest = Some(step_dir_name(step));
        if previous != Some(step) {
            update_latest(&repair_dir.dir, step)?;
            repair_dir.rebuilt.push(format!("latest: points to {} now", step_dir_name(step)));
        }
        weights::repair_run_weights(repair_dir, &step_dir_name(step))?;
    }
    Ok(())
}

/// Rebuilds the damaged 1 MiB blocks of one checkpoint in launch's own format from its parity
/// files, which hold XOR redundancy over the shards. Returns whether the checkpoint is sound after
/// the repair. If not, adds the reasons to the losses.
fn repair_step_checkpoint(repair_dir: &mut RepairDir, directory: &str) -> Result<bool> {
    let path = repair_dir.dir.join(directory);
    let report = verify_checkpoints(&path)?;
    if report.is_sound() {
        return Ok(true);
    }
    let done = rebuild_from_parity(&repair_dir.original.join(directory), &path);
    let lost = match done {
        Ok(done) => {
            repair_dir.rebuilt.extend(done.rebuilt.iter().map(|line| join_subpath(directory, line)));
            done.lost
        }
        Err(e) if e.is_checkpoint_at_fault() => vec![e.to_string()],
        Err(e) => return Err(e),
    };
    let after = verify_checkpoints(&path)?;
    if after.is_sound() {
        return Ok(true);
    }
    let reasons =
        if lost.is_empty() { after.all_problems().map(|(_, p)| p.to_string()).collect() } else { lost };
    repair_dir
        .lost
        .extend(reasons.iter().map(|line| RepairLoss::new("", vec![join_subpath(directory, line)])));
    Ok(false)
}
