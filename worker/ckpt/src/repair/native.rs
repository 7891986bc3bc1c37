//! Checkpoints of ours: lost and flipped blocks from parity, and `latest` naming the newest that is whole.
use super::{Bench, weights, within};
use crate::commit::point_latest;
use crate::disk;
use crate::error::Result;
use crate::manifest::MANIFEST;
use crate::parity;
use crate::root::{self, step_name};
use crate::verify::verify;

/// Repairs the checkpoint, or each one of the directory; those that can't be whole are left out.
pub(super) fn mend(bench: &mut Bench) -> Result<()> {
    if disk::exists(&bench.dir.join(MANIFEST)) {
        return one(bench, "").map(drop);
    }
    let said = root::latest_step(&bench.dir).ok().flatten();
    let mut newest = None;
    for step in root::steps(&bench.dir)? {
        let name = match root::locate(&bench.dir, step) {
            Some(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            None => step_name(step),
        };
        match one(bench, &name)? {
            true => newest = newest.or(Some(step)),
            false => {
                disk::remove_tree(&bench.dir.join(&name))?;
                bench.rebuilt.push(format!("{name}, which can't be made whole, is left out"));
            }
        }
    }
    if let Some(step) = newest {
        bench.newest = Some(step_name(step));
        if said != Some(step) {
            point_latest(&bench.dir, step)?;
            bench.rebuilt.push(format!("latest: names {} now", step_name(step)));
        }
        weights::mend_ours(bench, &step_name(step))?;
    }
    Ok(())
}

/// Makes the checkpoint in a folder of the bench whole. False when that can't be; why is among what is lost.
fn one(bench: &mut Bench, folder: &str) -> Result<bool> {
    let path = bench.dir.join(folder);
    let report = verify(&path)?;
    if report.is_sound() {
        return Ok(true);
    }
    let done = parity::rebuild(&bench.original.join(folder), &path);
    let lost = match done {
        Ok(done) => {
            bench.rebuilt.extend(done.rebuilt.iter().map(|line| within(folder, line)));
            done.lost
        }
        Err(e) if e.is_checkpoint_at_fault() => vec![e.to_string()],
        Err(e) => return Err(e),
    };
    let after = verify(&path)?;
    if after.is_sound() {
        return Ok(true);
    }
    let wrong = if lost.is_empty() { after.problems().map(|(_, p)| p.to_string()).collect() } else { lost };
    bench.lost.extend(wrong.iter().map(|line| within(folder, line)));
    Ok(false)
}
