//! Finds the directories of DeepSpeed checkpoints (tags), and reads the files that name the newest
//! one.
use super::file_names::{self, TagFiles};
use super::universal;
use crate::codec::disk::{Directory, is_plain_file_name};
use crate::error::{CkptError, DeepSpeedError, Result};
use std::path::Path;

/// Name of the file that contains the name of the newest DeepSpeed checkpoint (tag).
pub(crate) const LATEST_FILE: &str = "latest";
/// Name of the file that contains the name of the newest universal checkpoint.
pub(crate) const LATEST_UNIVERSAL_FILE: &str = "latest_universal";

/// Reads `latest` or `latest_universal` in a directory of DeepSpeed checkpoints, and returns the
/// name of the checkpoint that the file contains.
///
/// # Errors
/// Fails if the content is not a plain file name.
pub(crate) fn read_latest(directory: &Directory, file: &str) -> Result<String> {
    let text = directory.read_file(file, 4096)?;
    let tag = std::str::from_utf8(&text).map(str::trim).unwrap_or_default();
    match is_plain_file_name(tag) {
        true => Ok(tag.to_owned()),
        false => Err(CkptError::damaged(directory.path(), file, DeepSpeedError::InvalidLatest)),
    }
}

/// Returns an error message that the DeepSpeed checkpoint named in the file `latest` is missing
/// from the directory, or `None` if the file does not exist. Does not look for the checkpoint, so
/// the caller must have found that the directory has no tags.
pub(crate) fn missing_tag_message(directory: &Directory) -> Result<Option<String>> {
    if directory.file_size(LATEST_FILE)?.is_none() {
        return Ok(None);
    }
    let tag = read_latest(directory, LATEST_FILE)?;
    Ok(Some(format!(
        "`{LATEST_FILE}` names {tag}, which does not exist; only the weights are available, without the DeepSpeed state"
    )))
}

/// Returns true if a subdirectory of `path` is a DeepSpeed checkpoint (tag).
pub(super) fn has_tags(path: &Path) -> bool {
    list_tags(path).is_ok_and(|tags| !tags.is_empty())
}

/// Returns true if `path` is the directory of a DeepSpeed checkpoint (tag): it has model or
/// optimizer files, but is not a universal checkpoint.
pub(crate) fn is_tag_directory(path: &Path) -> bool {
    if !path.symlink_metadata().is_ok_and(|m| m.is_dir()) || universal::is_universal_directory(path) {
        return false;
    }
    match Directory::open(path).and_then(|f| TagFiles::list(&f)) {
        Ok(names) => names.count() > 0,
        // opening the tag later reports any error other than an I/O error
        Err(e) => !matches!(e, CkptError::Io { .. }),
    }
}

/// Lists the names of the DeepSpeed checkpoints (tags) in the directory `path`, in ascending order
/// of their steps.
pub(crate) fn list_tags(path: &Path) -> Result<Vec<String>> {
    let mut tags = Directory::open(path)?.list_names()?;
    tags.retain(|t| is_plain_file_name(t) && is_tag_directory(&path.join(t)));
    tags.sort_by_key(|t| (file_names::parse_step_in_tag(t), t.clone()));
    Ok(tags)
}

/// Returns a warning if `latest`, which names `tag`, is probably out of date: if the newest of
/// `tags` is newer than `tag` and has at least as many files.
pub(super) fn stale_latest_warning(path: &Path, tag: &str, tags: &[String]) -> Result<Vec<String>> {
    let files = |tag: &str| Ok((TagFiles::list(&Directory::open(&path.join(tag))?)?).count());
    let (Some(step), Some(newest)) = (file_names::parse_step_in_tag(tag), tags.last()) else {
        return Ok(Vec::new());
    };
    let newer =
        file_names::parse_step_in_tag(newest).is_some_and(|s| s > step) && files(newest)? >= files(tag)?;
    let notice = format!(
        "`latest` names {tag}, but {newest} is newer and complete; give {} to use it",
        path.join(newest).display()
    );
    Ok(if newer { vec![notice] } else { Vec::new() })
}
