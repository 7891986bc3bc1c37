//! Reads DeepSpeed checkpoints of ZeRO stages 0 to 3, also if HF Trainer or Accelerate wrote them.
//!
//! `DIR/latest` names a tag. `DIR/TAG` has model files and the optimizer files of all ranks. If
//! several sources have values of a weight, the flat groups (`param_shapes`) take precedence, then
//! the frozen weights, then the 16-bit `module`.
mod collect;
pub(crate) mod error;
mod file_names;
mod layout;
pub(crate) mod lost_model_files;
mod passthrough;
mod stage0;
mod states;
mod tag;
pub(crate) mod universal;

use self::error::DeepSpeedError;
use self::file_names::TagFiles;
use self::tag::TagContents;
use crate::catalog::is_plain_file_name;
use crate::diagnosis::Diagnosis;
use crate::disk::{Directory, exists, parent_dir};
use crate::error::{CkptError, MissingPart, Result};
use crate::external::{ExternalCheckpoint, ExternalFacts, ExternalTensor, StatePart, companion_files};
use std::path::Path;

/// Name of the file that names the newest tag.
pub(crate) const LATEST_FILE: &str = "latest";
/// Name of the file that names the newest universal checkpoint.
pub(crate) const LATEST_UNIVERSAL_FILE: &str = "latest_universal";

/// Opens the DeepSpeed checkpoint at `path`, which is a directory with tags, the directory of a
/// tag, or a universal checkpoint. Returns `None` for any other directory.
pub(crate) fn open_deepspeed(path: &Path) -> Result<Option<ExternalCheckpoint>> {
    let directory = Directory::open(path)?;
    if universal::is_universal_directory(path) {
        return universal::open_universal(path, &parent_dir(path), Vec::new()).map(Some);
    }
    let universal = match directory.file_size(LATEST_UNIVERSAL_FILE)? {
        Some(_) => Some(read_latest(&directory, LATEST_UNIVERSAL_FILE)?),
        None => None,
    };
    if let Some(tag) = universal.as_ref().filter(|_| !exists(&path.join(LATEST_FILE)) && !has_tags(path)) {
        return match universal::is_universal_directory(&path.join(tag)) {
            true => universal::open_universal(&path.join(tag), path, Vec::new()).map(Some),
            false => {
                let (target, pointer) = (tag.clone(), LATEST_UNIVERSAL_FILE);
                let part = MissingPart::LatestTarget { target, pointer, present: Vec::new() };
                Err(CkptError::missing(path, part))
            }
        };
    }
    if !TagFiles::list(&directory)?.model.is_empty() {
        return open_tag(path, path, &parent_dir(path), Vec::new()).map(Some);
    }
    let tags = list_tags(path)?;
    let latest = match directory.file_size(LATEST_FILE)? {
        Some(_) => Some(read_latest(&directory, LATEST_FILE)?),
        None => None,
    };
    match latest {
        Some(tag) if is_tag_directory(&path.join(&tag)) => {
            let warnings = find_stale_latest(path, &tag, &tags)?;
            let notice = universal.map(|other| {
                let (tag, other) = (path.join(&tag), path.join(other));
                format!("using {}; there is also a universal checkpoint: {}", tag.display(), other.display())
            });
            let mut found = open_tag(path, &path.join(&tag), path, notice.into_iter().collect())?;
            found.add_warnings(warnings);
            Ok(Some(found))
        }
        Some(_) if tags.is_empty() => Ok(None),
        Some(tag) => {
            let part = MissingPart::LatestTarget { target: tag, pointer: LATEST_FILE, present: tags };
            Err(CkptError::missing(path, part))
        }
        None if tags.is_empty() => Ok(None),
        None => open_newest_tag(path, &tags).map(Some),
    }
}

/// Reads `latest` or `latest_universal` and returns the directory name in it.
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

/// Returns a message that the tag named in `latest` does not exist, or `None` if the directory has
/// no file `latest`. Does not check the tag: the caller must have found that the directory has no
/// tags.
pub(crate) fn describe_missing_tag(directory: &Directory) -> Result<Option<String>> {
    if directory.file_size(LATEST_FILE)?.is_none() {
        return Ok(None);
    }
    let tag = read_latest(directory, LATEST_FILE)?;
    Ok(Some(format!(
        "`{LATEST_FILE}` names {tag}, which does not exist; only the weights are available, without the DeepSpeed state"
    )))
}

/// Returns true if a subdirectory of `path` is a tag.
fn has_tags(path: &Path) -> bool {
    list_tags(path).is_ok_and(|tags| !tags.is_empty())
}

/// Returns true if `path` is a directory with DeepSpeed's model or optimizer files, but not a
/// universal checkpoint.
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

/// Lists the names of the tags in the directory `path`, in ascending order of their steps.
pub(crate) fn list_tags(path: &Path) -> Result<Vec<String>> {
    let mut tags = Directory::open(path)?.list_names()?;
    tags.retain(|t| is_plain_file_name(t) && is_tag_directory(&path.join(t)));
    tags.sort_by_key(|t| (file_names::parse_step_in_tag(t), t.clone()));
    Ok(tags)
}

/// Returns a warning if `latest` is stale. This is assumed if the newest of `tags` is newer than
/// `tag`, which `latest` names, and has at least as many files.
fn find_stale_latest(path: &Path, tag: &str, tags: &[String]) -> Result<Vec<String>> {
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

/// Opens the newest tag that can be opened among `tags`, for a directory without `latest`. `tags`
/// are in ascending order of their steps. Notices of the checkpoint list the skipped tags.
///
/// # Errors
/// Fails with the error of the newest tag if no tag can be opened.
fn open_newest_tag(path: &Path, tags: &[String]) -> Result<ExternalCheckpoint> {
    let mut notices = Vec::new();
    let mut first = None;
    for tag in tags.iter().rev() {
        let mut tag_notices = notices.clone();
        tag_notices.push(format!("no `latest`; using the newest complete checkpoint, {tag}"));
        match open_tag(path, &path.join(tag), path, tag_notices) {
            Ok(checkpoint) => return Ok(checkpoint),
            Err(e) => {
                notices.push(format!("skipped: {e}"));
                first = first.or(Some(e));
            }
        }
    }
    Err(first.unwrap_or(CkptError::not_a_checkpoint(path, Diagnosis::NoTag)))
}

/// Opens the tag in the directory `path`. `given` is the path that the user gave. The directory
/// `root` may have a config, a tokenizer and companion files. `notices` come first among the
/// notices of the checkpoint.
fn open_tag(given: &Path, path: &Path, root: &Path, mut notices: Vec<String>) -> Result<ExternalCheckpoint> {
    let tag = TagContents::load(path)?;
    let stage = tag.check_ranks()?;
    let done = tag.check_steps()?;
    let mut found = collect::collect_tensors(&tag, stage)?;
    let Some((_, model)) = tag.model.get(&0) else { return Err(tag.missing("the model file")) };
    let mut contradiction = None;
    if let (Some(done), Some(step)) = (model.step, done)
        && done.saturating_sub(model.skipped) as f64 != step
    {
        contradiction = Some(format!(
            "the model file is of step {done} ({} skipped), the optimizer state of step {step}",
            model.skipped
        ));
    }
    let (mut groups, loss_scaler) = tag.collect_param_groups(model, stage);
    let mut steps = tag.read_weight_steps(model)?;
    if let Some((file, _)) = tag.model.get(&0).filter(|_| stage == 0) {
        (groups, steps) = stage0::add_embedded_optimizer(&tag, *file, model, &mut found)?;
    }
    notices.append(&mut found.notices);
    let facts = ExternalFacts {
        kind: detect_program(root),
        writer: format!("DeepSpeed {}", model.version.as_deref().unwrap_or("of unknown version")),
        tag: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        step: model.step,
        samples: model.samples,
        world: Some(model.world),
        stage: Some(stage),
        groups,
        steps,
        loss_scaler,
        scheduler: model.scheduler.clone(),
        ties: found.ties,
        frozen: found.frozen,
        lost: found.lost,
        notices,
        ignored_optimizer: found.ignored_optimizer,
        warnings: contradiction.into_iter().collect(),
        ..ExternalFacts::default()
    };
    let passthrough = passthrough::collect_passthrough(&tag, &facts)?;
    let facts = add_companion_files(facts, root, &found.entries)?;
    Ok(ExternalCheckpoint::new(given, root, facts, tag.store, found.entries)?.with_passthrough(passthrough))
}

/// Reads the companion files in `root` into the facts. Adds an absent optimizer state and absent
/// companion files to `facts.missing`.
fn add_companion_files(
    mut facts: ExternalFacts,
    root: &Path,
    entries: &[ExternalTensor],
) -> Result<ExternalFacts> {
    if !entries.iter().any(|e| e.info.role.is_optimizer_state()) {
        facts.missing.push(StatePart::OptimizerState);
    }
    companion_files::add_companion_facts(&mut facts, &Directory::open(root)?)?;
    Ok(facts)
}

/// Returns the program that ran DeepSpeed. The program's files in the directory `root` identify it.
fn detect_program(root: &Path) -> &'static str {
    let has = |name: &str| exists(&root.join(name));
    match () {
        () if has("trainer_state.json") => "HF Trainer with DeepSpeed",
        () if has("random_states_0.pkl") => "Accelerate with DeepSpeed",
        () => "DeepSpeed",
    }
}
