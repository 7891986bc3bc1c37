//! Reads DeepSpeed checkpoints of ZeRO stages 0 to 3, including those of HF Trainer and Accelerate.
//!
//! `DIR/latest` names a tag. `DIR/TAG` has model files and the optimizer files of all ranks. When
//! several sources have a weight, the flat groups (`param_shapes`) take precedence, then frozen
//! weights, then the 16-bit `module`.
mod collect;
pub(crate) mod donor;
pub(crate) mod error;
mod file_names;
mod layout;
mod passthrough;
mod stage0;
mod states;
mod tag;
pub(crate) mod universal;

use self::error::DeepSpeedError;
use self::file_names::TagFiles;
use self::tag::Tag;
use crate::catalog::is_plain_file_name;
use crate::diagnosis::Diagnosis;
use crate::disk::{Directory, exists, parent_of};
use crate::error::{CkptError, MissingPart, Result};
use crate::external::{ExternalCheckpoint, ExternalFacts, ExternalTensor, StatePart, companion_files};
use std::path::Path;

pub(crate) const LATEST: &str = "latest";
pub(crate) const LATEST_UNIVERSAL: &str = "latest_universal";

/// Opens a DeepSpeed checkpoint directory, or a tag in one. `None` when the path is neither.
pub(crate) fn open(path: &Path) -> Result<Option<ExternalCheckpoint>> {
    let directory = Directory::open(path)?;
    if universal::is_universal(path) {
        return universal::open(path, &parent_of(path), Vec::new()).map(Some);
    }
    let universal = match directory.size_of(LATEST_UNIVERSAL)? {
        Some(_) => Some(latest(&directory, LATEST_UNIVERSAL)?),
        None => None,
    };
    if let Some(tag) = universal.as_ref().filter(|_| !exists(&path.join(LATEST)) && !has_tags(path)) {
        return match universal::is_universal(&path.join(tag)) {
            true => universal::open(&path.join(tag), path, Vec::new()).map(Some),
            false => {
                let (target, pointer) = (tag.clone(), LATEST_UNIVERSAL);
                let part = MissingPart::LatestTarget { target, pointer, present: Vec::new() };
                Err(CkptError::missing(path, part))
            }
        };
    }
    if !TagFiles::list(&directory)?.model.is_empty() {
        return open_tag(path, path, &parent_of(path), Vec::new()).map(Some);
    }
    let tags = tags(path)?;
    let latest = match directory.size_of(LATEST)? {
        Some(_) => Some(latest(&directory, LATEST)?),
        None => None,
    };
    match latest {
        Some(tag) if is_tag(&path.join(&tag)) => {
            let warnings = stale_latest(path, &tag, &tags)?;
            let notice = universal.map(|other| {
                let (tag, other) = (path.join(&tag), path.join(other));
                format!("using {}; there is also a universal checkpoint: {}", tag.display(), other.display())
            });
            let mut found = open_tag(path, &path.join(&tag), path, notice.into_iter().collect())?;
            found.warn(warnings);
            Ok(Some(found))
        }
        Some(_) if tags.is_empty() => Ok(None),
        Some(tag) => {
            let part = MissingPart::LatestTarget { target: tag, pointer: LATEST, present: tags };
            Err(CkptError::missing(path, part))
        }
        None if tags.is_empty() => Ok(None),
        None => newest(path, &tags).map(Some),
    }
}

/// Reads `latest` or `latest_universal`; returns the name of the directory.
pub(crate) fn latest(directory: &Directory, file: &str) -> Result<String> {
    let text = directory.read(file, 4096)?;
    let tag = std::str::from_utf8(&text).map(str::trim).unwrap_or_default();
    match is_plain_file_name(tag) {
        true => Ok(tag.to_owned()),
        false => Err(CkptError::damaged(directory.path(), file, DeepSpeedError::InvalidLatest)),
    }
}

/// Reports a `latest` that names a tag, for a directory without tags.
pub(crate) fn missing_tag(directory: &Directory) -> Result<Option<String>> {
    if directory.size_of(LATEST)?.is_none() {
        return Ok(None);
    }
    let tag = latest(directory, LATEST)?;
    Ok(Some(format!(
        "`{LATEST}` names {tag}, which does not exist; only the weights are available, without the DeepSpeed state"
    )))
}

/// True when the directory has tags.
fn has_tags(path: &Path) -> bool {
    tags(path).is_ok_and(|tags| !tags.is_empty())
}

/// True for a directory with DeepSpeed files.
pub(crate) fn is_tag(path: &Path) -> bool {
    if !path.symlink_metadata().is_ok_and(|m| m.is_dir()) || universal::is_universal(path) {
        return false;
    }
    match Directory::open(path).and_then(|f| TagFiles::list(&f)) {
        Ok(names) => names.count() > 0,
        // opening the tag reports the error
        Err(e) => !matches!(e, CkptError::Io { .. }),
    }
}

/// All tags, the oldest step first.
pub(crate) fn tags(path: &Path) -> Result<Vec<String>> {
    let mut tags = Directory::open(path)?.names()?;
    tags.retain(|t| is_plain_file_name(t) && is_tag(&path.join(t)));
    tags.sort_by_key(|t| (file_names::step_from_tag(t), t.clone()));
    Ok(tags)
}

/// Warns when a newer tag than the one that `latest` names has as many files.
fn stale_latest(path: &Path, tag: &str, tags: &[String]) -> Result<Vec<String>> {
    let files = |tag: &str| Ok((TagFiles::list(&Directory::open(&path.join(tag))?)?).count());
    let (Some(step), Some(newest)) = (file_names::step_from_tag(tag), tags.last()) else {
        return Ok(Vec::new());
    };
    let newer = file_names::step_from_tag(newest).is_some_and(|s| s > step) && files(newest)? >= files(tag)?;
    let notice = format!(
        "`latest` names {tag}, but {newest} is newer and complete; give {} to use it",
        path.join(newest).display()
    );
    Ok(if newer { vec![notice] } else { Vec::new() })
}

/// Opens the newest readable tag, when there is no `latest`.
fn newest(path: &Path, tags: &[String]) -> Result<ExternalCheckpoint> {
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

/// Opens the tag at `path`, for which the user gave the path `given`; `root` may have a config and
/// a tokenizer.
fn open_tag(given: &Path, path: &Path, root: &Path, mut notices: Vec<String>) -> Result<ExternalCheckpoint> {
    let tag = Tag::load(path)?;
    let stage = tag.check_ranks()?;
    let done = tag.check_steps()?;
    let mut found = collect::collect(&tag, stage)?;
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
    let (mut groups, loss_scaler) = tag.groups(model, stage);
    let mut steps = tag.steps(model)?;
    if let Some((file, _)) = tag.model.get(&0).filter(|_| stage == 0) {
        (groups, steps) = stage0::add(&tag, *file, model, &mut found)?;
    }
    notices.append(&mut found.notices);
    let facts = ExternalFacts {
        kind: program(root),
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
    let passthrough = passthrough::collect(&tag, &facts)?;
    let facts = add_companions(facts, root, &found.entries)?;
    Ok(ExternalCheckpoint::new(given, root, facts, tag.store, found.entries)?.with_passthrough(passthrough))
}

/// Adds the files next to a tag, and lists what is missing.
fn add_companions(
    mut facts: ExternalFacts,
    root: &Path,
    entries: &[ExternalTensor],
) -> Result<ExternalFacts> {
    if !entries.iter().any(|e| e.info.role.is_optimizer_state()) {
        facts.missing.push(StatePart::OptimizerState);
    }
    companion_files::add(&mut facts, &Directory::open(root)?)?;
    Ok(facts)
}

/// The program that ran DeepSpeed, recognized by its files next to the tag.
fn program(root: &Path) -> &'static str {
    let has = |name: &str| exists(&root.join(name));
    match () {
        () if has("trainer_state.json") => "HF Trainer with DeepSpeed",
        () if has("random_states_0.pkl") => "Accelerate with DeepSpeed",
        () => "DeepSpeed",
    }
}
