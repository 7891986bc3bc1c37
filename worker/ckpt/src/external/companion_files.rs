//! Reads the files next to weights and optimizer: scheduler, loss scaler, trainer state, random
//! states.
use super::builder::GLOBALS;
use super::{ExternalFacts, StatePart};
use crate::disk::Directory;
use crate::error::{CkptError, Result};
use crate::formats::torch_file::TorchFile;
use serde_json::Value as Json;

/// Limit on `trainer_state.json`, which has the log of the whole run, bytes.
const TRAINER_MAX: u64 = 256 << 20;
const TRAINER: &str = "trainer_state.json";
const SCHEDULERS: [&str; 2] = ["scheduler.pt", "scheduler.bin"];
/// The state of torch's `GradScaler` (FP16).
const SCALER: &str = "scaler.pt";

/// True when HF Trainer wrote the directory.
pub(crate) fn is_trainer(directory: &Directory) -> Result<bool> {
    directory.has(TRAINER)
}

/// True when Accelerate wrote the directory.
pub(crate) fn is_accelerate(directory: &Directory) -> Result<bool> {
    Ok(directory.has("random_states_0.pkl")?
        || directory.has("scheduler.bin")?
        || directory.has("optimizer.bin")?)
}

/// Adds scheduler, loss scaler, step and random states, and lists what is missing.
pub(crate) fn add(facts: &mut ExternalFacts, directory: &Directory) -> Result<()> {
    if facts.scheduler.is_null() {
        facts.scheduler = read_state(&SCHEDULERS, facts, directory)?;
    }
    if facts.loss_scaler.is_null() {
        facts.loss_scaler = read_state(&[SCALER], facts, directory)?;
    }
    read_trainer_state(facts, directory)?;
    facts.rng_files = list_rng_files(directory)?;
    if facts.world.is_none() {
        facts.world = min_world(&facts.rng_files);
    }
    if facts.scheduler.is_null() {
        facts.missing.push(StatePart::Scheduler);
    }
    facts.missing.extend(missing_rng(&facts.rng_files, facts.world.unwrap_or(1)));
    Ok(())
}

/// Reads the first of these files that exists; null when none does.
fn read_state(names: &[&str], facts: &mut ExternalFacts, directory: &Directory) -> Result<Json> {
    for name in names {
        if directory.size_of(name)?.is_none() {
            continue;
        }
        match TorchFile::open(directory, name, GLOBALS) {
            Ok(file) => return Ok(file.value().json()),
            // a state with objects of other libraries is ignored
            Err(CkptError::Damaged { damage, .. }) if damage.reason.is_forbidden_global() => {
                facts.notices.push(format!("ignoring {name}: {}", damage.reason));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(Json::Null)
}

fn read_trainer_state(facts: &mut ExternalFacts, directory: &Directory) -> Result<()> {
    if directory.size_of(TRAINER)?.is_none() {
        return Ok(());
    }
    let text = directory.read(TRAINER, TRAINER_MAX)?;
    let state: Json =
        serde_json::from_slice(&text).map_err(|e| CkptError::damaged(directory.path(), TRAINER, e))?;
    let step = state.get("global_step").and_then(Json::as_u64);
    let step = step.ok_or_else(|| CkptError::damaged(directory.path(), TRAINER, "no global_step"))?;
    if let Some(other) = facts.step.filter(|&s| s != step) {
        facts.warnings.push(format!("{TRAINER} is of step {step}, the training state of step {other}"));
    }
    let named = directory
        .path()
        .file_name()
        .and_then(|n| n.to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    if let Some(named) = named.filter(|&n| n != step) {
        facts.warnings.push(format!("{TRAINER} is of step {step}, the directory is named for step {named}"));
    }
    facts.step.get_or_insert(step);
    Ok(())
}

fn list_rng_files(directory: &Directory) -> Result<Vec<String>> {
    let mut names = directory.names()?;
    names.retain(|n| {
        (n.starts_with("rng_state") && n.ends_with(".pth"))
            || (n.starts_with("random_states_") && n.ends_with(".pkl"))
    });
    Ok(names)
}

/// The rank in the name of a file with random states.
fn rank_in_name(file: &str) -> Option<u32> {
    let middle = file.strip_prefix("rng_state_").or(file.strip_prefix("random_states_"))?;
    middle.split('.').next()?.parse::<u32>().ok()
}

/// The smallest world size that could have written the files with random states.
fn min_world(files: &[String]) -> Option<u32> {
    let ranks = files.iter().filter_map(|f| rank_in_name(f)?.checked_add(1)).max();
    let has_unnumbered = files.iter().any(|f| f == "rng_state.pth");
    // HF Trainer numbers the files only for several ranks
    let numbered = files.iter().any(|f| f.starts_with("rng_state_"));
    ranks.map(|r| if numbered { r.max(2) } else { r }).or(has_unnumbered.then_some(1))
}

/// The ranks without random states, if any rank has some.
fn missing_rng(found: &[String], world: u32) -> Vec<StatePart> {
    let present: std::collections::BTreeSet<u32> = found.iter().filter_map(|f| rank_in_name(f)).collect();
    // an untrusted file may state any world size, so the list is bounded
    let absent = (0..world).filter(|r| !present.contains(r)).take(16);
    match found.is_empty() {
        true => vec![StatePart::RandomStates],
        false if world == 1 && found.iter().any(|n| n == "rng_state.pth") => Vec::new(),
        false => absent.map(|rank| StatePart::RandomState { rank }).collect(),
    }
}
