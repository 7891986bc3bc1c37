//! Rebuilds lost model files of DeepSpeed from those of other ranks, or from a universal checkpoint
//! with the same training state.
use super::universal::{SUFFIX, candidate_paths};
use super::{RepairDir, external, join_name};
use crate::convert::{ConvertOptions, ConvertTarget, convert_into};
use crate::diff::{DiffOptions, Side, diff};
use crate::disk::{self, Directory, exists};
use crate::error::Result;
use crate::external::ExternalCheckpoint;
use crate::formats::deepspeed::{self, donor};
use crate::source::TensorSource;

/// Rebuilds the lost model files of a tag, if a source for them exists.
///
/// # Errors
/// When no source exists: the files of other ranks cannot be read, or have content that differs by
/// rank.
pub(super) fn repair_model_files(bench: &mut RepairDir, tag: &str) -> Result<()> {
    let from_ranks = copy_from_ranks(bench, tag);
    let path = bench.dir.join(tag);
    let Some(lost) = donor::lost(&path)? else { return from_ranks };
    for source in universal_checkpoints(bench, tag)? {
        if copy_from_universal(bench, tag, &lost, &source)? {
            return Ok(());
        }
    }
    from_ranks
}

/// Rebuilds lost model files of a stage 3 tag as copies of another rank's model file. At stage 3
/// all ranks have equal model files, unless weights are frozen.
fn copy_from_ranks(bench: &mut RepairDir, tag: &str) -> Result<()> {
    let path = bench.dir.join(tag);
    for donor in donor::find(&path)? {
        donor::write(&path, &donor)?;
        let buffers = if donor.buffers { " (with that rank's buffers)" } else { "" };
        bench.rebuilt.push(format!("{tag}/{}: rebuilt from {}{buffers}", donor.lost, donor.from));
    }
    Ok(())
}

/// Finds the intact universal checkpoints with the tag's name, next to the tag and in sibling
/// directories.
fn universal_checkpoints(bench: &RepairDir, tag: &str) -> Result<Vec<ExternalCheckpoint>> {
    let name = bench.original.join(tag).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let places = candidate_paths(bench, tag, &format!("{name}{SUFFIX}"))?;
    let universal = places.iter().filter(|p| exists(p) && deepspeed::universal::is_universal(p));
    Ok(universal.filter_map(|p| external::open_sound(p).ok()).collect())
}

/// Converts a universal checkpoint to the tag's layout and copies the lost model files from the
/// result. Keeps the copies only if every weight and state of the tag is then bit-equal to the
/// universal checkpoint.
fn copy_from_universal(
    bench: &mut RepairDir,
    tag: &str,
    lost: &donor::LostModelFiles,
    source: &ExternalCheckpoint,
) -> Result<bool> {
    let temp = bench.temp_dir();
    disk::make_dirs(&temp.0)?;
    let options = ConvertOptions {
        stage: Some(lost.stage),
        world: Some(lost.world),
        ..ConvertOptions::new(ConvertTarget::DeepSpeed)
    };
    if convert_into(source, &temp.0, &options).is_err() {
        return Ok(false);
    }
    let Some(made) = deepspeed::tags(&temp.0)?.pop().map(|t| temp.0.join(t)) else { return Ok(false) };
    let names = Directory::open(&made)?.names()?;
    let mut copied = Vec::new();
    for file in &lost.files {
        let (to, from) = (join_name(tag, file), made.join(file));
        if names.contains(file) {
            bench.copy_in(&from, &to)?;
            copied.push(to);
        }
    }
    if copied.len() == lost.files.len() && is_same_state(bench, tag, source) {
        let from = source.path().display();
        let line = |file: &String| {
            format!("{file}: rebuilt from {from}, to which all weights and optimizer states are bit-equal")
        };
        bench.rebuilt.extend(copied.iter().map(line));
        return Ok(true);
    }
    for file in copied {
        disk::unlink(&bench.dir.join(&file))?;
        if exists(&bench.original.join(&file)) {
            bench.copy_original(&file)?;
        }
    }
    Ok(false)
}

/// Whether all tensors of the repaired tag are bit-equal to those of `source`.
fn is_same_state(bench: &RepairDir, tag: &str, source: &ExternalCheckpoint) -> bool {
    let Ok(repaired) = external::open_sound(&bench.dir.join(tag)) else { return false };
    let (a, b) = (
        Side { source: &repaired, ties: &repaired.facts().ties },
        Side { source, ties: &source.facts().ties },
    );
    diff(a, b, &DiffOptions::default(), |_, _| ())
        .is_ok_and(|report| report.is_equal() && report.compared > 0)
}
