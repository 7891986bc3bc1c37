//! Checkpoints of other programs: the newest step that is whole or can be made so, and what lies beside it.
use super::{Bench, bits, files_below, model_files, universal, weights, within};
use crate::disk::{self, Folder};
use crate::error::Result;
use crate::external::values::not_finite;
use crate::external::{self, Foreign};
use crate::formats::deepspeed::{self, LATEST, LATEST_UNIVERSAL};
use crate::rng_files::{fill, folder as rng_folder};
use std::path::Path;

/// Deepest folder with files that are looked at.
const DEPTH: u32 = 4;
/// Endings of files that torch writes as containers.
const TORCH: [&str; 4] = [".pt", ".pth", ".bin", ".pkl"];

/// Repairs a folder: one checkpoint, or several of which the newest that can be whole counts.
pub(super) fn mend(bench: &mut Bench) -> Result<()> {
    let inside = numbered(&Folder::open(&bench.dir)?)?;
    if inside.is_empty() || holds_state(&bench.dir)? {
        return one(bench, "");
    }
    for name in inside.iter().rev() {
        let before = bench.lost.len();
        one(bench, name)?;
        match whole(&bench.dir.join(name)) {
            Ok(_) => {
                bench.newest = Some(name.clone());
                return Ok(());
            }
            Err(why) => {
                bench.lost.truncate(before);
                bench.lost.push(format!("{name}: {}", why.join("; ")));
                // programs take the one with the highest number, so it may not stay
                bench.rebuilt.push(format!("{name}, which can't be made whole, is left out"));
                disk::remove_tree(&bench.dir.join(name))?;
            }
        }
    }
    Ok(())
}

/// Folders `checkpoint-N` and the like, oldest first.
fn numbered(folder: &Folder) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for name in folder.names()? {
        let step =
            ["checkpoint-", "checkpoint_"].iter().find_map(|p| name.strip_prefix(p)?.parse::<u64>().ok());
        if let Some(step) = step
            && folder.has_folder(&name)?
        {
            found.push((step, name));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// True when the folder itself is a checkpoint.
fn holds_state(path: &Path) -> Result<bool> {
    let folder = Folder::open(path)?;
    Ok(folder.has(LATEST)? || folder.has(LATEST_UNIVERSAL)? || !deepspeed::tags(path)?.is_empty())
}

/// Opens the checkpoint at `path`, when every byte of it is sound and every value finite.
pub(super) fn whole(path: &Path) -> std::result::Result<Foreign, Vec<String>> {
    let line = |e: crate::error::CkptError| vec![e.to_string()];
    let Some(found) = external::open(path).map_err(line)? else {
        return Err(vec![crate::diagnosis::seems(path)]);
    };
    let (report, _) = found.verify().map_err(line)?;
    if !report.problems.is_empty() {
        return Err(report.problems.iter().map(ToString::to_string).collect());
    }
    match not_finite(&found).map_err(line)? {
        lines if lines.is_empty() => Ok(found),
        lines => Err(lines),
    }
}

/// Repairs one checkpoint's folder.
fn one(bench: &mut Bench, folder: &str) -> Result<()> {
    let mut files = Vec::new();
    files_below(&bench.dir, folder, DEPTH, &mut files)?;
    for name in files.iter().filter(|n| TORCH.iter().any(|end| n.ends_with(end))) {
        bits::mend(bench, name)?;
    }
    tags(bench, folder)?;
    universal::mend(bench, folder)?;
    weights::mend(bench, folder)?;
    random_states(bench, folder)
}

/// Lets `latest` name the newest tag of DeepSpeed's that is whole, after what can be rebuilt of it was.
fn tags(bench: &mut Bench, folder: &str) -> Result<()> {
    let path = bench.dir.join(folder);
    let tags = deepspeed::tags(&path)?;
    let opened = Folder::open(&path)?;
    let said = if opened.has(LATEST)? { deepspeed::latest(&opened, LATEST).ok() } else { None };
    for tag in tags.iter().rev() {
        let before = bench.rebuilt.len();
        let name = within(folder, tag);
        if let Err(why) = model_files::mend(bench, &name) {
            bench.lost.push(format!("{name}: {why}"));
            continue;
        }
        match whole(&bench.dir.join(&name)) {
            Ok(_) => {
                if said.as_ref() != Some(tag) {
                    bench.write(&within(folder, LATEST), tag.as_bytes())?;
                    let was = said.map_or("was missing or named nothing".into(), |s| format!("named {s}"));
                    bench.rebuilt.push(format!("latest: {was}, names {tag} now"));
                }
                if folder.is_empty() {
                    bench.newest = Some(tag.clone());
                }
                return Ok(());
            }
            Err(why) => {
                bench.rebuilt.truncate(before);
                bench.lost.push(format!("{name}: {}", why.join("; ")));
            }
        }
    }
    Ok(())
}

/// Files of random states of ranks that have none.
fn random_states(bench: &mut Bench, folder: &str) -> Result<()> {
    let path = bench.dir.join(folder);
    // without a checkpoint there is nothing to go on from
    let Ok(Some(found)) = external::open(&path) else { return Ok(()) };
    let step = found.facts().step.unwrap_or(0);
    let highest =
        found.facts().rng_files.iter().filter_map(|n| rng_folder::named(n)).map(|(_, rank)| rank).max();
    let world = match (found.facts().stage, found.facts().world, highest) {
        (Some(_), Some(world), _) => world,
        (.., Some(highest)) => highest.saturating_add(1),
        _ => return Ok(()),
    };
    if world == 1 && found.facts().rng_files.iter().any(|n| n == "rng_state_0.pth") {
        // a run of one process writes rng_state.pth
        bench.lost.push(format!(
            "{}: the random states of the other ranks of rng_state_0.pth, and nothing says how many there were; \
             `launch ckpt rng` makes them for a number that you know",
            within(folder, "rng_state_*.pth")
        ));
    }
    match fill::fill(&path, world, step) {
        Ok(None) => {}
        Ok(Some(filled)) => {
            let files = filled.files.iter().map(|f| within(folder, f)).collect::<Vec<_>>().join(", ");
            bench.rebuilt.push(format!("{files}: {}", filled.decision.line()));
        }
        Err(e) if e.is_checkpoint_at_fault() => bench.lost.push(e.to_string()),
        Err(e) => return Err(e),
    }
    Ok(())
}
