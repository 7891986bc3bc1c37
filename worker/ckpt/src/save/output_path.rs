//! Checks that an operation may create or replace the output directory that the user gave, such as
//! the target of `launch ckpt convert`.
use super::output_record::OutputRecordKind;
use crate::codec::disk::{self, Directory};
use crate::error::{CkptError, OutputProblem, Result};
use std::path::{Path, PathBuf};

/// Checks that an operation may create or replace the output directory `out`, and returns the
/// parent directory and the name of `out`. Creates the parent directory if needed.
///
/// # Errors
/// Fails if `out` exists and can't be replaced (see [`check_output_replaceable`]), or is inside of
/// the checkpoint `source`.
pub(crate) fn resolve_output_path(
    source: &Path,
    out: &Path,
    force: bool,
    marker: &OutputRecordKind,
) -> Result<(PathBuf, String)> {
    let rejected = |problem| CkptError::output_rejected(out, problem);
    let (parent, name) = match disk::path_exists(out) {
        true => {
            let real = out.canonicalize().map_err(CkptError::io("look at", out))?;
            check_output_replaceable(&real, force, marker)?;
            (disk::parent_dir(&real), real.file_name().map(|n| n.to_owned()))
        }
        false => {
            disk::make_dirs(&disk::parent_dir(out))?;
            let parent = disk::parent_dir(out);
            let name = out.file_name().map(|n| n.to_owned());
            (parent.canonicalize().map_err(CkptError::io("look at", &parent))?, name)
        }
    };
    let name = name.ok_or_else(|| rejected(OutputProblem::NoName))?.to_string_lossy().into_owned();
    if parent.starts_with(source.canonicalize().map_err(CkptError::io("look at", source))?) {
        return Err(rejected(OutputProblem::InsideInput));
    }
    Ok((parent, name))
}

/// Checks that the output directory `out` may be replaced: it is empty, or `force` is true and the
/// same operation wrote all files in it earlier. Other directories may be replaced if `force` is
/// true and the operation of the marker wrote every file.
fn check_output_replaceable(out: &Path, force: bool, marker: &OutputRecordKind) -> Result<()> {
    let rejected = |problem| Err(CkptError::output_rejected(out, problem));
    if !out.is_dir() {
        return rejected(OutputProblem::NotADirectory);
    }
    let directory = Directory::open(out)?;
    let names = directory.list_names()?;
    if names.is_empty() {
        return Ok(());
    }
    let operation = marker.operation;
    let Some(record) = marker.read_record(&directory).ok().flatten() else {
        return rejected(OutputProblem::NotOurs { operation });
    };
    let written = record.list_recorded_entries();
    if let Some(file) = names.iter().find(|n| *n != marker.file && !written.contains(n.as_str())) {
        return rejected(OutputProblem::OtherFile { file: file.clone(), operation });
    }
    match force {
        true => Ok(()),
        false => rejected(OutputProblem::NeedsForce { operation }),
    }
}
