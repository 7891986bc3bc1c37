//! Reads the files that HF Trainer and Accelerate need to resume in addition to weights and
//! optimizer states: the scheduler, the loss scaler, the trainer state and the RNG states.
use crate::catalog::{ALLOWED_GLOBALS, ExternalFacts, TrainingStatePart};
use crate::codec::disk::Directory;
use crate::codec::json::parse_object;
use crate::codec::torch_file::TorchFile;
use crate::error::{CkptError, DamageReason, Result};
use serde::Deserialize;
use serde_json::Value as Json;

/// Limit on the size of `trainer_state.json` in bytes. The file has the log of the whole run.
const TRAINER_STATE_BYTES_MAX: u64 = 256 << 20;
/// Name of HF Trainer's file with the step and the log of the run.
pub(crate) const TRAINER_STATE_FILE: &str = "trainer_state.json";
/// Names of the files with the state of the learning rate scheduler.
const SCHEDULER_FILES: [&str; 2] = ["scheduler.pt", "scheduler.bin"];
/// Name of the file with the state of torch's `GradScaler`, which FP16 training uses.
const GRAD_SCALER_FILE: &str = "scaler.pt";

/// Returns true if the directory has `trainer_state.json`, which only HF Trainer writes.
pub(crate) fn is_hf_trainer_directory(directory: &Directory) -> Result<bool> {
    directory.has_entry(TRAINER_STATE_FILE)
}

/// Returns true if the directory has a file that only Accelerate writes, such as `optimizer.bin`.
pub(crate) fn is_accelerate_directory(directory: &Directory) -> Result<bool> {
    Ok(directory.has_entry("random_states_0.pkl")?
        || directory.has_entry("scheduler.bin")?
        || directory.has_entry("optimizer.bin")?)
}

/// Reads the scheduler state, the loss scaler state, the step and the names of RNG state files from
/// a checkpoint directory into `facts`. A scheduler, loss scaler or step that `facts` has already
/// is kept. Adds a missing scheduler and missing RNG states to `facts.missing`.
pub(crate) fn read_companion_files(facts: &mut ExternalFacts, directory: &Directory) -> Result<()> {
    if facts.state.scheduler.is_null() {
        facts.state.scheduler = read_first_readable_state(&SCHEDULER_FILES, facts, directory)?;
    }
    if facts.state.loss_scaler.is_null() {
        facts.state.loss_scaler = read_first_readable_state(&[GRAD_SCALER_FILE], facts, directory)?;
    }
    read_trainer_state(facts, directory)?;
    facts.rng_files = list_rng_files(directory)?;
    if facts.state.world.is_none() {
        facts.state.world = compute_min_world_size(&facts.rng_files);
    }
    if facts.state.scheduler.is_null() {
        facts.missing.push(TrainingStatePart::Scheduler);
    }
    facts.missing.extend(find_missing_rng_states(&facts.rng_files, facts.state.world.unwrap_or(1)));
    Ok(())
}

/// Returns the content, as JSON, of the first readable file among the torch files `names` in the
/// checkpoint directory. Skips files that do not exist. Skips files with classes that are not
/// allowed, with a notice in `facts`. Returns null if no file is left.
fn read_first_readable_state(
    names: &[&str],
    facts: &mut ExternalFacts,
    directory: &Directory,
) -> Result<Json> {
    for name in names {
        if directory.file_size(name)?.is_none() {
            continue;
        }
        match TorchFile::open(directory, name, ALLOWED_GLOBALS) {
            Ok(file) => return Ok(file.value().to_json()),
            // a state that contains objects of other libraries is ignored with a notice
            Err(CkptError::Damaged { damage, .. }) if damage.reason.is_forbidden_global() => {
                facts.notices.push(format!("ignoring {name}: {}", damage.reason));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(Json::Null)
}

/// Reads the step from `trainer_state.json` and records it as the step of the checkpoint, unless
/// another file has already determined the step. Adds a warning if the step in the file differs
/// from the existing step in `facts`, or from the step in the directory's name. Does nothing if the
/// file does not exist.
fn read_trainer_state(facts: &mut ExternalFacts, directory: &Directory) -> Result<()> {
    let Some(step) = read_global_step(directory)? else { return Ok(()) };
    if let Some(other) = facts.state.step.filter(|&s| s != step) {
        let warning = format!("{TRAINER_STATE_FILE} is of step {step}, the training state of step {other}");
        facts.warnings.push(warning);
    }
    let named = directory
        .path()
        .file_name()
        .and_then(|n| n.to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    if let Some(named) = named.filter(|&n| n != step) {
        facts
            .warnings
            .push(format!("{TRAINER_STATE_FILE} is of step {step}, the directory is named for step {named}"));
    }
    facts.state.step.get_or_insert(step);
    Ok(())
}

/// The content of `trainer_state.json` without the log of the run, which the parser skips.
#[derive(Deserialize)]
struct TrainerState {
    #[serde(default)]
    global_step: Option<u64>,
}

/// Reads `global_step` of `trainer_state.json`. Returns `None` if the directory has no such file.
pub(crate) fn read_global_step(directory: &Directory) -> Result<Option<u64>> {
    if directory.file_size(TRAINER_STATE_FILE)?.is_none() {
        return Ok(None);
    }
    let text = directory.read_file(TRAINER_STATE_FILE, TRAINER_STATE_BYTES_MAX)?;
    let damaged =
        |reason: Box<DamageReason>| CkptError::damaged(directory.path(), TRAINER_STATE_FILE, *reason);
    parse_global_step(&text).map(Some).map_err(damaged)
}

/// Returns `global_step` from `text`, the content of `trainer_state.json`.
pub(crate) fn parse_global_step(text: &[u8]) -> std::result::Result<u64, Box<DamageReason>> {
    let TrainerState { global_step } = parse_object(text).map_err(DamageReason::from)?;
    global_step.ok_or_else(|| Box::new("no global_step".into()))
}

/// Lists the names of the RNG state files in the directory, sorted.
fn list_rng_files(directory: &Directory) -> Result<Vec<String>> {
    let mut names = directory.list_names()?;
    names.retain(|n| {
        (n.starts_with("rng_state") && n.ends_with(".pth"))
            || (n.starts_with("random_states_") && n.ends_with(".pkl"))
    });
    Ok(names)
}

/// Returns the rank in the name of an RNG state file, or `None` if the name has no rank.
fn parse_rank_in_name(file: &str) -> Option<u32> {
    let middle = file.strip_prefix("rng_state_").or(file.strip_prefix("random_states_"))?;
    middle.split('.').next()?.parse::<u32>().ok()
}

/// Returns the smallest number of ranks that a run must have had to write RNG state files with the
/// given names. Returns `None` for an empty list.
fn compute_min_world_size(files: &[String]) -> Option<u32> {
    let ranks = files.iter().filter_map(|f| parse_rank_in_name(f)?.checked_add(1)).max();
    let has_unnumbered = files.iter().any(|f| f == "rng_state.pth");
    // HF Trainer numbers the files only if there are several ranks
    let numbered = files.iter().any(|f| f.starts_with("rng_state_"));
    ranks.map(|r| if numbered { r.max(2) } else { r }).or(has_unnumbered.then_some(1))
}

/// Lists the ranks, at most 16, whose RNG state files are missing among the files `found` of a run
/// with `world` ranks. Returns only [`TrainingStatePart::RngStates`] if `found` is empty.
fn find_missing_rng_states(found: &[String], world: u32) -> Vec<TrainingStatePart> {
    let present: std::collections::BTreeSet<u32> =
        found.iter().filter_map(|f| parse_rank_in_name(f)).collect();
    // an untrusted file may state any world size, so the list is bounded
    let absent = (0..world).filter(|r| !present.contains(r)).take(16);
    match found.is_empty() {
        true => vec![TrainingStatePart::RngStates],
        false if world == 1 && found.iter().any(|n| n == "rng_state.pth") => Vec::new(),
        false => absent.map(|rank| TrainingStatePart::RankRngState { rank }).collect(),
    }
}
