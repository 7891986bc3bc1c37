//! Names and lists the directories `step-N` of checkpoints in launch's own format, and reads the
//! file `latest` with the name of the newest one.
use crate::codec::disk::{Directory, path_exists};
use crate::error::{CkptError, DamageReason, MissingPart, Result};
use crate::format_constants::MANIFEST_FILE;
use crate::hash::Hash;
use std::path::{Path, PathBuf};

/// Name of the file that contains the name of the checkpoint that was completed last.
pub(crate) const LATEST_FILE: &str = "latest";
/// Prefix of the name that the directory of a checkpoint has while it is being saved.
pub(crate) const SAVING_PREFIX: &str = ".saving-";
/// Prefix of the directory name that a checkpoint gets before its files are removed, so that no
/// process takes it for a complete checkpoint.
pub(crate) const DELETING_PREFIX: &str = ".deleting-";
/// Prefix of the directory name that an old checkpoint gets while a new checkpoint of an equal step
/// takes over its name.
pub(crate) const REPLACED_PREFIX: &str = ".replaced-";
/// Name of the temporary file that becomes the file `latest` when it is complete.
pub(crate) const LATEST_TEMP_FILE: &str = ".latest-new";

/// Makes the directory name of a step's checkpoint, such as `step-00000010`.
pub fn step_dir_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Parses a directory name such as `step-00000010` and returns the step. Returns `None` for other
/// names.
pub fn parse_step_dir_name(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_dir_name(step) == name).then_some(step)
}

/// Encodes the content of the file `latest`: the directory name of the step's checkpoint, and the
/// hash of this name. The hash prevents a flipped bit from selecting another checkpoint.
pub(crate) fn encode_latest(step: u64) -> String {
    let name = step_dir_name(step);
    format!("{name} blake3:{}\n", Hash::digest(name.as_bytes()).to_hex())
}

/// Returns the path of a step's checkpoint in the checkpoint directory `root`. Also finds a
/// checkpoint whose replacement was interrupted. Returns `None` if there is no checkpoint of this
/// step.
pub(crate) fn locate_step_checkpoint(root: &Path, step: u64) -> Option<PathBuf> {
    let name = step_dir_name(step);
    [root.join(&name), root.join(format!("{REPLACED_PREFIX}{name}"))].into_iter().find(|p| has_manifest(p))
}

/// Returns true if `path` is a directory with a file `manifest.json`, by which checkpoints in
/// launch's own format are recognized.
fn has_manifest(path: &Path) -> bool {
    let is_dir = path.symlink_metadata().is_ok_and(|m| m.is_dir());
    is_dir && path.join(MANIFEST_FILE).symlink_metadata().is_ok_and(|m| m.is_file())
}

/// Lists the steps of all entries `step-…` and `.replaced-step-…` in the directory `root`, in
/// descending order. Does not check whether these entries contain a manifest.
pub(crate) fn list_steps(root: &Path) -> Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in std::fs::read_dir(root).map_err(CkptError::io("list", root))? {
        let name = entry.map_err(CkptError::io("list", root))?.file_name();
        let name = name.to_string_lossy();
        steps.extend(parse_step_dir_name(name.strip_prefix(REPLACED_PREFIX).unwrap_or(&name)));
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    steps.dedup();
    Ok(steps)
}

/// Lists the step and the path of each checkpoint in launch's own format in the directory `root`,
/// newest first. The list is empty if `root` does not exist.
pub fn list_checkpoints(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    if !path_exists(root) {
        return Ok(Vec::new());
    }
    Ok(list_steps(root)?
        .into_iter()
        .filter_map(|step| Some((step, locate_step_checkpoint(root, step)?)))
        .collect())
}

/// Reads the step of the newest checkpoint from the file `latest` in the directory `root`. Returns
/// `None` if the file does not exist, and an error if its content does not match its hash.
pub(crate) fn read_latest_step(root: &Path) -> Result<Option<u64>> {
    if !path_exists(&root.join(LATEST_FILE)) {
        return Ok(None);
    }
    let text = Directory::open(root)?.read_file(LATEST_FILE, 4096)?;
    let step = std::str::from_utf8(&text).ok().and_then(|t| parse_step_dir_name(t.split(' ').next()?));
    match step {
        Some(step) if encode_latest(step).as_bytes() == text => Ok(Some(step)),
        _ => Err(CkptError::damaged(root, LATEST_FILE, DamageReason::HashMismatch)),
    }
}

/// Returns the path of the checkpoint that the file `latest` in the directory `root` names. Returns
/// `None` if `latest` does not exist, and an error if the checkpoint does not exist.
pub fn find_latest_checkpoint(root: &Path) -> Result<Option<PathBuf>> {
    let Some(step) = read_latest_step(root)? else { return Ok(None) };
    match locate_step_checkpoint(root, step) {
        Some(path) => Ok(Some(path)),
        None => Err(CkptError::missing(
            root,
            MissingPart::LatestTarget {
                target: step_dir_name(step),
                pointer: LATEST_FILE,
                present: Vec::new(),
            },
        )),
    }
}
