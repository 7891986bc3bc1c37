//! Opens DeepSpeed checkpoints of ZeRO stages 0 to 3.
use super::collect_passthrough::collect_passthrough;
use super::file_names::TagFiles;
use super::tag::TagContents;
use super::tag_directories::{
    LATEST_FILE, LATEST_UNIVERSAL_FILE, has_tags, is_tag_directory, list_tags, read_latest,
    stale_latest_warning,
};
use super::{collect, stage0, universal};
use crate::catalog::ExternalCheckpoint;
use crate::codec::disk::{Directory, parent_dir, path_exists};
use crate::error::{CkptError, Diagnosis, MissingPart, Result};
use crate::layout::hf::companion_files;
use std::path::Path;

/// Opens the DeepSpeed checkpoint at `path`: a directory with checkpoints (tags), the directory of
/// one tag, or a universal checkpoint. Returns `None` for any other directory.
pub(crate) fn open_deepspeed(path: &Path) -> Result<Option<ExternalCheckpoint>> {
    let directory = Directory::open(path)?;
    if universal::is_universal_directory(path) {
        return universal::open_universal(path, &parent_dir(path), Vec::new()).map(Some);
    }
    let universal = match directory.file_size(LATEST_UNIVERSAL_FILE)? {
        Some(_) => Some(read_latest(&directory, LATEST_UNIVERSAL_FILE)?),
        None => None,
    };
    if let Some(tag) = universal.as_ref().filter(|_| !path_exists(&path.join(LATEST_FILE)) && !has_tags(path))
    {
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
            let warnings = stale_latest_warning(path, &tag, &tags)?;
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

/// Opens the newest complete checkpoint among the DeepSpeed checkpoints `tags` in the directory
/// `path`, which has no file `latest`. `tags` are in ascending order of their steps. Notices of the
/// checkpoint list the skipped tags.
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

/// Opens the DeepSpeed checkpoint (tag) in the directory `path`. `given` is the path that the user
/// gave. The directory `root` may have a config, a tokenizer and companion files. `notices` come
/// first among the notices of the checkpoint.
fn open_tag(given: &Path, path: &Path, root: &Path, notices: Vec<String>) -> Result<ExternalCheckpoint> {
    let mut tag = TagContents::load(path, notices)?;
    let stage = tag.check_rank_files()?;
    let updates = tag.check_equal_steps()?;
    collect::collect_tensors(&mut tag, stage)?;
    let Some((file, model)) = tag.model.get(&0) else {
        return Err(tag.builder.missing_part_error("the model file"));
    };
    if let (Some(done), Some(updates)) = (model.step, updates)
        && done.saturating_sub(model.skipped) as f64 != updates
    {
        tag.builder.facts.warnings.push(format!(
            "the model file is of step {done} ({} skipped), the optimizer state of step {updates}",
            model.skipped
        ));
    }
    let (groups, loss_scaler) = tag.collect_param_groups(model, stage);
    let steps = tag.read_weight_steps(model)?;
    let facts = &mut tag.builder.facts;
    (facts.state.groups, facts.state.steps, facts.state.loss_scaler) = (groups, steps, loss_scaler);
    if let Some(embedded) = model.embedded_optimizer.as_ref().filter(|_| stage == 0) {
        stage0::add_embedded_optimizer(&mut tag.builder, *file, embedded)?;
    }
    let facts = &mut tag.builder.facts;
    collect::add_model_file_facts(facts, model, stage, path);
    facts.kind = detect_program(root);
    let passthrough = collect_passthrough(&tag)?;
    companion_files::read_companion_files(&mut tag.builder.facts, &Directory::open(root)?)?;
    Ok(tag.builder.finish_with_paths(given, root)?.with_passthrough_state(passthrough))
}

/// Returns the name of the program that used DeepSpeed, such as HF Trainer, which is recognized by
/// its files in the directory `root`.
fn detect_program(root: &Path) -> &'static str {
    let has = |name: &str| path_exists(&root.join(name));
    match () {
        () if has("trainer_state.json") => "HF Trainer with DeepSpeed",
        () if has("random_states_0.pkl") => "Accelerate with DeepSpeed",
        () => "DeepSpeed",
    }
}
