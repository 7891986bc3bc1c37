//! Repairs native checkpoints: rebuilds blocks from parity, and points `latest` to the newest
//! complete step.
use super::{Loss, RepairDir, join_name, weights};
use crate::commit::update_latest;
use crate::disk;
use crate::error::Result;
use crate::manifest::MANIFEST;
use crate::parity;
use crate::root::{self, step_name};
use crate::verify::verify;

/// Repairs the checkpoint, or each checkpoint of the directory. Removes those that can't be
/// completed.
pub(super) fn repair_native(bench: &mut RepairDir) -> Result<()> {
    if disk::exists(&bench.dir.join(MANIFEST)) {
        return repair_step(bench, "").map(drop);
    }
    let previous = root::latest_step(&bench.dir).ok().flatten();
    let mut newest = None;
    for step in root::steps(&bench.dir)? {
        let name = match root::locate(&bench.dir, step) {
            Some(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            None => step_name(step),
        };
        match repair_step(bench, &name)? {
            true => newest = newest.or(Some(step)),
            false => {
                disk::remove_tree(&bench.dir.join(&name))?;
                bench.rebuilt.push(format!("{name}: left out, because it cannot be completed"));
            }
        }
    }
    if let Some(step) = newest {
        bench.newest = Some(step_name(step));
        if previous != Some(step) {
            update_latest(&bench.dir, step)?;
            bench.rebuilt.push(format!("latest: points to {} now", step_name(step)));
        }
        weights::repair_run_weights(bench, &step_name(step))?;
    }
    Ok(())
}

/// Repairs the checkpoint in a subdirectory of the copy. False when the repair is incomplete; the
/// reasons are added to the losses.
fn repair_step(bench: &mut RepairDir, directory: &str) -> Result<bool> {
    let path = bench.dir.join(directory);
    let report = verify(&path)?;
    if report.is_sound() {
        return Ok(true);
    }
    let done = parity::rebuild(&bench.original.join(directory), &path);
    let lost = match done {
        Ok(done) => {
            bench.rebuilt.extend(done.rebuilt.iter().map(|line| join_name(directory, line)));
            done.lost
        }
        Err(e) if e.is_checkpoint_at_fault() => vec![e.to_string()],
        Err(e) => return Err(e),
    };
    let after = verify(&path)?;
    if after.is_sound() {
        return Ok(true);
    }
    let reasons = if lost.is_empty() { after.problems().map(|(_, p)| p.to_string()).collect() } else { lost };
    bench.lost.extend(reasons.iter().map(|line| Loss::new("", vec![join_name(directory, line)])));
    Ok(false)
}
