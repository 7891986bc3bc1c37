//! Rewrites the sharded DeepSpeed state of a checkpoint for another number of ranks, in DeepSpeed's
//! own format.
use crate::catalog::{ExternalCheckpoint, PassthroughState, TensorSource};
use crate::codec::disk::{self, Directory, path_exists};
use crate::codec::json::read_json;
use crate::codec::pickle::PythonObject;
use crate::convert::{
    ConvertNotice, ConvertOptions, ConvertTarget, compute_source_fingerprint, convert_into_directory,
};
use crate::error::{CkptError, Result};
use diagnostic::quantity::{format_bytes, format_count};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the JSON file that launch writes to a checkpoint copy for another number of ranks, with
/// the original checkpoint's name and the options. A later start with the same world size reuses a
/// directory with a matching record.
pub(super) const PREPARED_RECORD_FILE: &str = "launch_prepared.json";
/// Maximum size in bytes of `launch_prepared.json`, the record of a checkpoint copy for another
/// number of ranks.
const PREPARED_RECORD_BYTES_MAX: u64 = 1 << 20;
/// The value of the field `format` in `launch_prepared.json`, the record of a checkpoint copy for
/// another number of ranks.
const PREPARED_RECORD_FORMAT: &str = "launch prepared checkpoint";
/// Name of the file in which DeepSpeed stores the name of the newest checkpoint (tag).
const LATEST_FILE: &str = "latest";
/// Number of elements of a ZeRO-3 sub-group if the config does not state `sub_group_size`.
/// DeepSpeed has the same default.
const SUB_GROUP_SIZE: u64 = 1_000_000_000;

/// The content of `launch_prepared.json`, which records from which checkpoint and with which
/// options a copy for another number of ranks was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PreparedRecord {
    format: String,
    version: u32,
    /// Name of the directory of the original checkpoint.
    pub(super) from: String,
    world: u32,
    /// The options of the RNG reconciliation, as text.
    policy: String,
    /// Fingerprint of the original checkpoint, which changes when a file of the checkpoint changes.
    source: String,
    /// One line for the user about the changes that were made.
    #[serde(rename = "line")]
    pub(super) summary: String,
}

impl PreparedRecord {
    /// Creates the content of `launch_prepared.json` for a copy, made for `world` ranks, of the
    /// checkpoint named `from` in the directory `dir`. Computes the fingerprint of `dir`.
    pub(super) fn new(dir: &Path, from: &str, world: u32, policy: String) -> Result<PreparedRecord> {
        let (format, source) = (PREPARED_RECORD_FORMAT.to_owned(), compute_source_fingerprint(dir)?);
        Ok(PreparedRecord {
            format,
            version: 1,
            from: from.to_owned(),
            world,
            policy,
            source,
            summary: String::new(),
        })
    }

    /// Returns true if both records describe a copy of the same, unchanged checkpoint, made for an
    /// equal number of ranks and with an equal policy for random generators. The summaries may
    /// differ.
    pub(super) fn has_same_request(&self, other: &PreparedRecord) -> bool {
        *self == PreparedRecord { summary: self.summary.clone(), ..other.clone() }
    }

    /// Reads `launch_prepared.json` in the directory `dir`, the record of a checkpoint copy for
    /// another number of ranks. Returns `None` if the directory has no valid record.
    pub(super) fn read(dir: &Path) -> Option<PreparedRecord> {
        let record: PreparedRecord =
            read_json(&Directory::open(dir).ok()?, PREPARED_RECORD_FILE, PREPARED_RECORD_BYTES_MAX).ok()?;
        (record.format == PREPARED_RECORD_FORMAT && record.version == 1).then_some(record)
    }

    /// Writes this record durably to the directory `dir`. Fails if `dir` already has a record.
    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(CkptError::invalid_save)?;
        text.push(b'\n');
        disk::write_file(dir.join(PREPARED_RECORD_FILE), &text).map(drop)
    }
}

/// Returns true if DeepSpeed sharded the state of the checkpoint for a number of ranks other than
/// `world`, so that it must be resharded. The state of ZeRO stages 1 to 3 is sharded by rank, while
/// stage 0 stores everything in one file.
pub(super) fn needs_deepspeed_reshard(state: &ExternalCheckpoint, world: u32) -> bool {
    let facts = state.facts();
    facts.state.stage != Some(0) && facts.state.world.is_some_and(|w| w != world)
}

/// Fails unless the directory `dir` has a file `latest` or `latest_universal`, from which
/// DeepSpeed's engine learns which checkpoint (tag) to load.
pub(super) fn check_loadable_by_deepspeed(dir: &Path, state: &ExternalCheckpoint) -> Result<()> {
    match path_exists(&dir.join(LATEST_FILE)) || path_exists(&dir.join("latest_universal")) {
        true => Ok(()),
        false => {
            let what = format!(
                "the directory is that of tag {}; resume from the parent directory, which has `{LATEST_FILE}`",
                state.facts().tag
            );
            Err(CkptError::unsupported(dir, what))
        }
    }
}

/// Returns true if the entry `name` of a checkpoint directory must be rewritten, and not linked, in
/// a copy of the checkpoint for another number of ranks.
pub(super) fn is_replaced_entry(state: &ExternalCheckpoint, name: &str) -> bool {
    name == state.facts().tag || [LATEST_FILE, "latest_universal", PREPARED_RECORD_FILE].contains(&name)
}

/// Divides the DeepSpeed state of a checkpoint among `world` ranks, and writes it to the directory
/// `into`. Returns a summary in one line for the user.
pub(super) fn write_resharded_state(state: &ExternalCheckpoint, world: u32, into: &Path) -> Result<String> {
    let sub_group_size = read_sub_group_size(&state.read_passthrough()?);
    let to = ConvertOptions::new(ConvertTarget::DeepSpeed);
    let report =
        convert_into_directory(state, into, &ConvertOptions { world: Some(world), sub_group_size, ..to })?;
    let mut summary = format!(
        "DeepSpeed state (ZeRO-{}) resharded for {}, {} in {} files",
        report.stage.unwrap_or(0),
        format_count(world, "rank"),
        format_bytes(report.bytes),
        report.files
    );
    // the notice about the sub-group size is left out, since the run's config has this size
    for notice in report.notices.iter().filter(|n| !matches!(n, ConvertNotice::SubGroupSize { .. })) {
        summary.push_str(&format!(" ({notice})"));
    }
    Ok(summary)
}

/// Returns the number of elements of ZeRO-3's sub-groups from the run's DeepSpeed config, or
/// DeepSpeed's default if the config does not state it. The engine that loads the result uses the
/// same config.
fn read_sub_group_size(passthrough: &PassthroughState) -> u64 {
    let config = passthrough.deepspeed_model_entry("ds_config");
    let size = config.and_then(|c| c.get("zero_optimization")?.get("sub_group_size"));
    match size {
        Some(PythonObject::Int(n)) if *n > 0 => *n as u64,
        Some(PythonObject::Float(n)) if *n >= 1.0 => *n as u64,
        _ => SUB_GROUP_SIZE,
    }
}
