//! Rebuilds lost model files of DeepSpeed from the model files of other ranks, or from a universal
//! checkpoint of the same training state.
use super::lost_model_files;
use super::repair_dir::{RepairDir, join_subpath};
use super::sound_checkpoint::open_if_sound;
use super::universal::find_related_checkpoints;
use crate::catalog::{ExternalCheckpoint, TensorSource};
use crate::codec::disk::{self, Directory, path_exists};
use crate::convert::{ConvertOptions, ConvertTarget, convert_into_directory};
use crate::diff::{DiffOptions, DiffSide, diff_checkpoints};
use crate::error::Result;
use crate::layout::deepspeed::{self, UNIVERSAL_SUFFIX};

/// Rebuilds missing or damaged model files of the DeepSpeed checkpoint `tag` in `repair_dir`, the
/// working copy of the damaged directory. Rebuilds the files from the model files of other ranks,
/// or else from a universal checkpoint of the same state. Does nothing if no model file is lost.
///
/// # Errors
/// Fails if there is no universal checkpoint of this state, and the model files of other ranks
/// can't be read or differ by rank.
pub(super) fn repair_model_files(repair_dir: &mut RepairDir, tag: &str) -> Result<()> {
    let from_ranks = copy_model_files_from_ranks(repair_dir, tag);
    let path = repair_dir.dir.join(tag);
    let Some(lost) = lost_model_files::find_lost_model_files(&path)? else { return from_ranks };
    let name = |tag: &str| format!("{tag}{UNIVERSAL_SUFFIX}");
    let is_universal = deepspeed::universal::is_universal_directory;
    for source in find_related_checkpoints(repair_dir, tag, name, is_universal)? {
        if copy_model_files_from_universal(repair_dir, tag, &lost, &source)? {
            return Ok(());
        }
    }
    from_ranks
}

/// Rebuilds the lost model files of a DeepSpeed checkpoint of ZeRO stage 3 as copies of another
/// rank's model file. At stage 3 all ranks have equal model files if no weights are frozen.
fn copy_model_files_from_ranks(repair_dir: &mut RepairDir, tag: &str) -> Result<()> {
    let path = repair_dir.dir.join(tag);
    for donor in lost_model_files::find_replacement_files(&path)? {
        lost_model_files::write_replacement_file(&path, &donor)?;
        let buffers = if donor.has_buffers { " (with that rank's buffers)" } else { "" };
        repair_dir
            .rebuilt
            .push(format!("{tag}/{}: rebuilt from {}{buffers}", donor.lost_file, donor.source_file));
    }
    Ok(())
}

/// Rebuilds the lost model files of a DeepSpeed checkpoint by converting the universal checkpoint
/// `source` to a ZeRO checkpoint, from which the files are taken. Keeps these files only if every
/// weight and optimizer state of the tag is then bit-equal to `source`. Returns whether the files
/// were kept.
fn copy_model_files_from_universal(
    repair_dir: &mut RepairDir,
    tag: &str,
    lost: &lost_model_files::LostModelFiles,
    source: &ExternalCheckpoint,
) -> Result<bool> {
    let temp = repair_dir.temp_dir();
    disk::make_dirs(&temp.0)?;
    let options = ConvertOptions {
        stage: Some(lost.stage),
        world: Some(lost.world),
        ..ConvertOptions::new(ConvertTarget::DeepSpeed)
    };
    if convert_into_directory(source, &temp.0, &options).is_err() {
        return Ok(false);
    }
    let Some(made) = deepspeed::list_tags(&temp.0)?.pop().map(|t| temp.0.join(t)) else { return Ok(false) };
    let names = Directory::open(&made)?.list_names()?;
    let mut copied = Vec::new();
    for file in &lost.files {
        let (to, from) = (join_subpath(tag, file), made.join(file));
        if names.contains(file) {
            repair_dir.copy_file_in(&from, &to)?;
            copied.push(to);
        }
    }
    if copied.len() == lost.files.len() && has_same_state(repair_dir, tag, source) {
        let from = source.path().display();
        let line = |file: &String| {
            format!("{file}: rebuilt from {from}, to which all weights and optimizer states are bit-equal")
        };
        repair_dir.rebuilt.extend(copied.iter().map(line));
        return Ok(true);
    }
    for file in copied {
        disk::unlink(&repair_dir.dir.join(&file))?;
        if path_exists(&repair_dir.original.join(&file)) {
            repair_dir.replace_link_by_copy(&file)?;
        }
    }
    Ok(false)
}

/// Returns true if the repaired DeepSpeed checkpoint `tag` is intact, and all its tensors are
/// bit-identical to those of the universal checkpoint `source`.
fn has_same_state(repair_dir: &RepairDir, tag: &str, source: &ExternalCheckpoint) -> bool {
    let Ok(repaired) = open_if_sound(&repair_dir.dir.join(tag)) else { return false };
    let (a, b) = (
        DiffSide { source: &repaired, ties: &repaired.facts().state.ties },
        DiffSide { source, ties: &source.facts().state.ties },
    );
    diff_checkpoints(a, b, &DiffOptions::default(), |_, _| ())
        .is_ok_and(|report| report.is_equal() && report.compared > 0)
}
