//! Folders of DeepSpeed's ZeRO stages 0 to 3, also inside those of HF Trainer and Accelerate.
//!
//! `DIR/latest` names a tag; `DIR/TAG` holds model states and, per rank, optimizer states. Where sources of a weight
//! contradict, one in the flat groups (`param_shapes`) wins, then a frozen one, then the 16-bit `module`.
mod collect;
pub(crate) mod donor;
mod extras;
mod layout;
mod names;
mod stage0;
mod states;
mod tag;
pub(crate) mod universal;

use self::names::Names;
use self::tag::Tag;
use crate::catalog::is_plain_file_name;
use crate::disk::{Folder, exists, parent_of};
use crate::error::{CkptError, Result};
use crate::external::{Entry, Foreign, ForeignFacts, add_beside};
use std::path::Path;

pub(crate) const LATEST: &str = "latest";
pub(crate) const LATEST_UNIVERSAL: &str = "latest_universal";

/// Opens a folder of DeepSpeed's, or a tag's folder inside one. `None` when it is neither.
pub(crate) fn open(path: &Path) -> Result<Option<Foreign>> {
    let folder = Folder::open(path)?;
    if universal::is(path) {
        return universal::open(path, &parent_of(path), Vec::new()).map(Some);
    }
    let universal = match folder.size_of(LATEST_UNIVERSAL)? {
        Some(_) => Some(latest(&folder, LATEST_UNIVERSAL)?),
        None => None,
    };
    if let Some(tag) = universal.as_ref().filter(|_| !exists(&path.join(LATEST)) && !is_any_tag(path)) {
        return match universal::is(&path.join(tag)) {
            true => universal::open(&path.join(tag), path, Vec::new()).map(Some),
            false => {
                let what = format!("{tag}, which `{LATEST_UNIVERSAL}` names,");
                Err(CkptError::Missing { path: path.to_owned(), what })
            }
        };
    }
    if !Names::of(&folder)?.model.is_empty() {
        return open_tag(path, path, &parent_of(path), Vec::new()).map(Some);
    }
    let tags = tags(path)?;
    let latest = match folder.size_of(LATEST)? {
        Some(_) => Some(latest(&folder, LATEST)?),
        None => None,
    };
    match latest {
        Some(tag) if is_tag(&path.join(&tag)) => {
            let warnings = stale(path, &tag, &tags)?;
            let beside = universal.map(|other| {
                let (tag, other) = (path.join(&tag), path.join(other));
                format!(
                    "{} is used; a universal checkpoint lies beside it: {}",
                    tag.display(),
                    other.display()
                )
            });
            let mut found = open_tag(path, &path.join(&tag), path, beside.into_iter().collect())?;
            found.warn(warnings);
            Ok(Some(found))
        }
        Some(_) if tags.is_empty() => Ok(None),
        Some(tag) => {
            let what = format!("{tag}, which `latest` names (there are {}),", tags.join(", "));
            Err(CkptError::Missing { path: path.to_owned(), what })
        }
        None if tags.is_empty() => Ok(None),
        None => newest(path, &tags).map(Some),
    }
}

/// The folder that the file `latest` or `latest_universal` names.
pub(crate) fn latest(folder: &Folder, file: &str) -> Result<String> {
    let text = folder.read(file, 4096)?;
    let tag = std::str::from_utf8(&text).map(str::trim).unwrap_or_default();
    match is_plain_file_name(tag) {
        true => Ok(tag.to_owned()),
        false => Err(CkptError::damaged(folder.path(), file, "it names no folder in here")),
    }
}

/// Of a folder without any tag: says so when `latest` names one.
pub(crate) fn absent(folder: &Folder) -> Result<Option<String>> {
    if folder.size_of(LATEST)?.is_none() {
        return Ok(None);
    }
    let tag = latest(folder, LATEST)?;
    Ok(Some(format!(
        "`{LATEST}` names {tag}, DeepSpeed's state, which isn't here; without it there are the weights alone"
    )))
}

/// True when tags are in the folder.
fn is_any_tag(path: &Path) -> bool {
    tags(path).is_ok_and(|tags| !tags.is_empty())
}

/// True for a folder with files of DeepSpeed's.
pub(crate) fn is_tag(path: &Path) -> bool {
    if !path.symlink_metadata().is_ok_and(|m| m.is_dir()) || universal::is(path) {
        return false;
    }
    match Folder::open(path).and_then(|f| Names::of(&f)) {
        Ok(names) => names.count() > 0,
        // what is wrong with it is said when it is opened
        Err(e) => !matches!(e, CkptError::Io { .. }),
    }
}

/// All tags, the oldest first.
pub(crate) fn tags(path: &Path) -> Result<Vec<String>> {
    let mut tags = Folder::open(path)?.names()?;
    tags.retain(|t| is_plain_file_name(t) && is_tag(&path.join(t)));
    tags.sort_by_key(|t| (names::step_of(t), t.clone()));
    Ok(tags)
}

/// Says so when a newer tag than the one that `latest` names has as many files.
fn stale(path: &Path, tag: &str, tags: &[String]) -> Result<Vec<String>> {
    let files = |tag: &str| Ok((Names::of(&Folder::open(&path.join(tag))?)?).count());
    let (Some(step), Some(newest)) = (names::step_of(tag), tags.last()) else { return Ok(Vec::new()) };
    let newer = names::step_of(newest).is_some_and(|s| s > step) && files(newest)? >= files(tag)?;
    let notice = format!(
        "`latest` names {tag}, but a newer complete checkpoint is there: {newest}; to use it, give {}",
        path.join(newest).display()
    );
    Ok(if newer { vec![notice] } else { Vec::new() })
}

/// Without `latest`: the newest tag that opens.
fn newest(path: &Path, tags: &[String]) -> Result<Foreign> {
    let mut notices = Vec::new();
    let mut first = None;
    for tag in tags.iter().rev() {
        let mut said = notices.clone();
        said.push(format!("there is no `latest`: {tag} is the newest complete checkpoint"));
        match open_tag(path, &path.join(tag), path, said) {
            Ok(foreign) => return Ok(foreign),
            Err(e) => {
                notices.push(format!("passed over: {e}"));
                first = first.or(Some(e));
            }
        }
    }
    Err(first.unwrap_or(CkptError::NotACheckpoint { path: path.to_owned(), why: "it has no tag".into() }))
}

/// Opens the tag at `path`, which the user named as `given`; `beside` may hold a config and a tokenizer.
fn open_tag(given: &Path, path: &Path, beside: &Path, mut notices: Vec<String>) -> Result<Foreign> {
    let tag = Tag::load(path)?;
    let stage = tag.check_ranks()?;
    let done = tag.check_steps()?;
    let mut found = collect::weights(&tag, stage)?;
    let Some((_, model)) = tag.model.get(&0) else { return Err(tag.missing("the model file".into())) };
    let mut contradiction = None;
    if let (Some(done), Some(step)) = (model.step, done)
        && done.saturating_sub(model.skipped) as f64 != step
    {
        contradiction = Some(format!(
            "the model is of step {done} ({} skipped), the optimizer state of step {step}",
            model.skipped
        ));
    }
    let (mut groups, loss_scaler) = tag.groups(model, stage);
    let mut steps = tag.steps(model)?;
    if let Some((file, _)) = tag.model.get(&0).filter(|_| stage == 0) {
        (groups, steps) = stage0::add(&tag, *file, model, &mut found)?;
    }
    notices.append(&mut found.notices);
    let facts = ForeignFacts {
        kind: kind(beside),
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
        warnings: contradiction.into_iter().collect(),
        ..ForeignFacts::default()
    };
    let extras = extras::of(&tag, &facts)?;
    let facts = beside_facts(facts, beside, &found.entries)?;
    Ok(Foreign::new(given, beside, facts, tag.store, found.entries)?.with_extras(extras))
}

/// Adds what lies beside a tag, and what is missing.
fn beside_facts(mut facts: ForeignFacts, beside: &Path, entries: &[Entry]) -> Result<ForeignFacts> {
    if !entries.iter().any(|e| e.info.role.is_optimizer_state()) {
        facts.missing.push("optimizer state".into());
    }
    add_beside(&mut facts, &Folder::open(beside)?)?;
    Ok(facts)
}

/// Which program drove DeepSpeed, by what lies beside the tag.
fn kind(beside: &Path) -> &'static str {
    let has = |name: &str| exists(&beside.join(name));
    match () {
        () if has("trainer_state.json") => "HF Trainer with DeepSpeed",
        () if has("random_states_0.pkl") => "Accelerate with DeepSpeed",
        () => "DeepSpeed",
    }
}
