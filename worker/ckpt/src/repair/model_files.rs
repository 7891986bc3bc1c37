//! Lost model files of ZeRO: from those of the other ranks, or from a universal checkpoint of the same state.
use super::universal::{ENDING, beside};
use super::{Bench, foreign, within};
use crate::convert::{ConvertOptions, Target, convert_into};
use crate::diff::{DiffOptions, Side, diff};
use crate::disk::{self, Folder, exists};
use crate::error::Result;
use crate::external::Foreign;
use crate::formats::deepspeed::{self, donor};
use crate::source::Source;

/// Makes the model files that a tag lacks. `Err` says why they can't be had from the other ranks, where it isn't plain.
pub(super) fn mend(bench: &mut Bench, tag: &str) -> std::result::Result<(), String> {
    let by_ranks = from_ranks(bench, tag);
    let path = bench.dir.join(tag);
    let Some(lost) = donor::lost(&path).map_err(|e| e.to_string())? else { return by_ranks };
    for source in universals(bench, tag).map_err(|e| e.to_string())? {
        if from_universal(bench, tag, &lost, &source).map_err(|e| e.to_string())? {
            return Ok(());
        }
    }
    by_ranks
}

/// Of stage 3, from the other ranks, which say the same.
fn from_ranks(bench: &mut Bench, tag: &str) -> std::result::Result<(), String> {
    let path = bench.dir.join(tag);
    for donor in donor::find(&path).map_err(|e| e.to_string())? {
        donor::write(&path, &donor).map_err(|e| e.to_string())?;
        let buffers = if donor.buffers { " (its buffers are that rank's)" } else { "" };
        bench.rebuilt.push(format!("{tag}/{}: made from {}{buffers}", donor.lost, donor.from));
    }
    Ok(())
}

/// Universal checkpoints of the tag's name, whole, beside it and in the folders beside.
fn universals(bench: &Bench, tag: &str) -> Result<Vec<Foreign>> {
    let name = bench.original.join(tag).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let places = beside(bench, tag, &format!("{name}{ENDING}"))?;
    let there = places.iter().filter(|p| exists(p) && deepspeed::universal::is(p));
    Ok(there.filter_map(|p| foreign::whole(p).ok()).collect())
}

/// Takes the model files that the universal checkpoint would have in this tag's form. They stay when with them every
/// weight and state of the tag is the universal checkpoint's, bit for bit.
fn from_universal(bench: &mut Bench, tag: &str, lost: &donor::Lost, source: &Foreign) -> Result<bool> {
    let aside = bench.aside();
    disk::make_dirs(&aside.0)?;
    let options = ConvertOptions {
        stage: Some(lost.stage),
        world: Some(lost.world),
        ..ConvertOptions::to(Target::DeepSpeed)
    };
    if convert_into(source, &aside.0, &options).is_err() {
        return Ok(false);
    }
    let Some(made) = deepspeed::tags(&aside.0)?.pop().map(|t| aside.0.join(t)) else { return Ok(false) };
    let names = Folder::open(&made)?.names()?;
    let mut taken = Vec::new();
    for file in &lost.files {
        let (to, from) = (within(tag, file), made.join(file));
        if names.contains(file) {
            bench.take(&from, &to)?;
            taken.push(to);
        }
    }
    if taken.len() == lost.files.len() && is_same_state(bench, tag, source) {
        let from = source.path().display();
        let said = |file: &String| {
            format!("{file}: made from {from}, with which all weights and optimizer states agree bit for bit")
        };
        bench.rebuilt.extend(taken.iter().map(said));
        return Ok(true);
    }
    for file in taken {
        disk::unlink(&bench.dir.join(&file))?;
        if exists(&bench.original.join(&file)) {
            bench.own(&file)?;
        }
    }
    Ok(false)
}

fn is_same_state(bench: &Bench, tag: &str, source: &Foreign) -> bool {
    let Ok(mended) = foreign::whole(&bench.dir.join(tag)) else { return false };
    let (a, b) =
        (Side { source: &mended, ties: &mended.facts().ties }, Side { source, ties: &source.facts().ties });
    diff(a, b, &DiffOptions::default(), |_, _| ())
        .is_ok_and(|report| report.is_equal() && report.compared > 0)
}
