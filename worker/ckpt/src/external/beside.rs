//! What programs put beside weights and optimizer: scheduler, trainer state, files of random states.
use super::ForeignFacts;
use super::RANDOM_STATE_OF;
use super::draft::GLOBALS;
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use crate::formats::torch_file::TorchFile;
use serde_json::Value as Json;

/// Longest `trainer_state.json`, bytes: it holds the log of the whole run.
const TRAINER_MAX: u64 = 256 << 20;
const TRAINER: &str = "trainer_state.json";
const SCHEDULERS: [&str; 2] = ["scheduler.pt", "scheduler.bin"];
/// torch's `GradScaler`, of fp16.
const SCALER: &str = "scaler.pt";

/// True when HF Trainer made the folder.
pub(crate) fn is_trainer(folder: &Folder) -> Result<bool> {
    folder.has(TRAINER)
}

/// True when Accelerate made the folder.
pub(crate) fn is_accelerate(folder: &Folder) -> Result<bool> {
    Ok(folder.has("random_states_0.pkl")? || folder.has("scheduler.bin")? || folder.has("optimizer.bin")?)
}

/// Adds scheduler, step, random states and what of them is missing.
pub(crate) fn add(facts: &mut ForeignFacts, folder: &Folder) -> Result<()> {
    if facts.scheduler.is_null() {
        facts.scheduler = state_in(&SCHEDULERS, facts, folder)?;
    }
    if facts.loss_scaler.is_null() {
        facts.loss_scaler = state_in(&[SCALER], facts, folder)?;
    }
    trainer(facts, folder)?;
    facts.rng_files = rng_files(folder)?;
    if facts.world.is_none() {
        facts.world = world_of(&facts.rng_files);
    }
    if facts.scheduler.is_null() {
        facts.missing.push("scheduler".into());
    }
    facts.missing.extend(missing_rng(&facts.rng_files, facts.world.unwrap_or(1)));
    Ok(())
}

/// What the first of these files says that is there; null when none is.
fn state_in(names: &[&str], facts: &mut ForeignFacts, folder: &Folder) -> Result<Json> {
    for name in names {
        if folder.size_of(name)?.is_none() {
            continue;
        }
        match TorchFile::open(folder, name, GLOBALS) {
            Ok(file) => return Ok(file.value().json()),
            // one of a class of its own is of no use to others
            Err(CkptError::Damaged { damage, .. }) if damage.why.contains("names ") => {
                facts.notices.push(format!("{name} isn't read: {}", damage.why));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(Json::Null)
}

fn trainer(facts: &mut ForeignFacts, folder: &Folder) -> Result<()> {
    if folder.size_of(TRAINER)?.is_none() {
        return Ok(());
    }
    let text = folder.read(TRAINER, TRAINER_MAX)?;
    let state: Json = serde_json::from_slice(&text)
        .map_err(|e| CkptError::damaged(folder.path(), TRAINER, e.to_string()))?;
    let step = state.get("global_step").and_then(Json::as_u64);
    let step = step.ok_or_else(|| CkptError::damaged(folder.path(), TRAINER, "it has no global_step"))?;
    if let Some(other) = facts.step.filter(|&s| s != step) {
        facts.warnings.push(format!("{TRAINER} is of step {step}, the state of step {other}"));
    }
    let named =
        folder.path().file_name().and_then(|n| n.to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    if let Some(named) = named.filter(|&n| n != step) {
        facts.warnings.push(format!("{TRAINER} is of step {step}, the folder is named for step {named}"));
    }
    facts.step.get_or_insert(step);
    Ok(())
}

fn rng_files(folder: &Folder) -> Result<Vec<String>> {
    let mut names = folder.names()?;
    names.retain(|n| {
        (n.starts_with("rng_state") && n.ends_with(".pth"))
            || (n.starts_with("random_states_") && n.ends_with(".pkl"))
    });
    Ok(names)
}

/// The rank whose random state a file is.
fn rank_of(file: &str) -> Option<u32> {
    let middle = file.strip_prefix("rng_state_").or(file.strip_prefix("random_states_"))?;
    middle.split('.').next()?.parse::<u32>().ok()
}

/// The least number of ranks that the files of random states are of.
fn world_of(files: &[String]) -> Option<u32> {
    let ranks = files.iter().filter_map(|f| rank_of(f)?.checked_add(1)).max();
    let alone = files.iter().any(|f| f == "rng_state.pth");
    // HF Trainer numbers them only when there are several
    let numbered = files.iter().any(|f| f.starts_with("rng_state_"));
    ranks.map(|r| if numbered { r.max(2) } else { r }).or(alone.then_some(1))
}

/// Where some ranks have a file of random states, those that have none.
fn missing_rng(found: &[String], world: u32) -> Vec<String> {
    let there: std::collections::BTreeSet<u32> = found.iter().filter_map(|f| rank_of(f)).collect();
    // a world may be of any size that a file claims: only so many are named
    let absent = (0..world).filter(|r| !there.contains(r)).take(16);
    match found.is_empty() {
        true => vec!["random states".into()],
        false if world == 1 && found.iter().any(|n| n == "rng_state.pth") => Vec::new(),
        false => absent.map(|r| format!("{RANDOM_STATE_OF} {r}")).collect(),
    }
}
