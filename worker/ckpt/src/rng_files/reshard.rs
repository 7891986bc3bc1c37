//! Reshards the DeepSpeed state in a checkpoint for another number of ranks, in DeepSpeed's own
//! layout, so that an unmodified script loads it without further settings.
use super::reconcile::count_ranks;
use crate::convert::{ConvertNotice, ConvertOptions, ConvertTarget, convert_into, output::fingerprint};
use crate::disk::{self, Directory, exists};
use crate::error::{self, CkptError, Result};
use crate::external::ExternalCheckpoint;
use crate::passthrough::PassthroughState;
use crate::pickle::Object;
use crate::source::TensorSource;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the record of a prepared directory, by which a later start with that world size reuses
/// it.
pub(super) const RECORD: &str = "launch_prepared.json";
/// Largest record that is read, bytes.
const RECORD_MAX: u64 = 1 << 20;
const FORMAT: &str = "launch prepared checkpoint";
const LATEST: &str = "latest";
/// Elements of a ZeRO-3 sub-group where the config has no `sub_group_size`; DeepSpeed's default.
const SUB_GROUP_SIZE: u64 = 1_000_000_000;

/// The record of a prepared directory: its source and options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PreparedRecord {
    format: String,
    version: u32,
    /// Directory name of the original checkpoint.
    pub(super) from: String,
    world: u32,
    /// Options of the RNG reconciliation.
    policy: String,
    /// Fingerprint of the original, which changes when one of its files does.
    source: String,
    /// What was done, in one line for the user.
    #[serde(rename = "line")]
    pub(super) summary: String,
}

impl PreparedRecord {
    pub(super) fn new(dir: &Path, from: &str, world: u32, policy: String) -> Result<PreparedRecord> {
        let (format, source) = (FORMAT.to_owned(), fingerprint(dir)?);
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

    /// Whether `other` describes equal work: an unchanged original and equal options.
    pub(super) fn is_same_work(&self, other: &PreparedRecord) -> bool {
        *self == PreparedRecord { summary: self.summary.clone(), ..other.clone() }
    }

    /// Reads the record of a directory; `None` when it has no readable one.
    pub(super) fn read(dir: &Path) -> Option<PreparedRecord> {
        let text = Directory::open(dir).ok()?.read(RECORD, RECORD_MAX).ok()?;
        let record: PreparedRecord = serde_json::from_slice(&text).ok()?;
        (record.format == FORMAT && record.version == 1).then_some(record)
    }

    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(CkptError::invalid_save)?;
        text.push(b'\n');
        disk::write_file(dir.join(RECORD), &text).map(drop)
    }
}

/// Whether `world` ranks can resume only after resharding. ZeRO stages 1 to 3 are sharded by rank;
/// stage 0 keeps everything in one file.
pub(super) fn needs_reshard(state: &ExternalCheckpoint, world: u32) -> bool {
    let facts = state.facts();
    facts.stage != Some(0) && facts.world.is_some_and(|w| w != world)
}

/// Rejects a directory that DeepSpeed's engine wouldn't load, because no `latest` names its tag.
pub(super) fn check_loadable(dir: &Path, state: &ExternalCheckpoint) -> Result<()> {
    match exists(&dir.join(LATEST)) || exists(&dir.join("latest_universal")) {
        true => Ok(()),
        false => {
            let what = format!(
                "it is the directory of tag {}; resume from its parent, which has `{LATEST}`",
                state.facts().tag
            );
            Err(CkptError::unsupported(dir, what))
        }
    }
}

/// Whether resharding replaces this entry of the original.
pub(super) fn is_replaced(state: &ExternalCheckpoint, name: &str) -> bool {
    name == state.facts().tag || [LATEST, "latest_universal", RECORD].contains(&name)
}

/// Writes the state for `world` ranks into directory `into`. Returns what was done, in words.
pub(super) fn write(state: &ExternalCheckpoint, world: u32, into: &Path) -> Result<String> {
    let sub_group_size = sub_group_size(&state.passthrough()?);
    let to = ConvertOptions::new(ConvertTarget::DeepSpeed);
    let report = convert_into(state, into, &ConvertOptions { world: Some(world), sub_group_size, ..to })?;
    let mut summary = format!(
        "DeepSpeed state (ZeRO-{}) resharded for {}, {} in {} files",
        report.stage.unwrap_or(0),
        count_ranks(world),
        error::format_bytes(report.bytes),
        report.files
    );
    // the run's config has this sub-group size already
    for notice in report.notices.iter().filter(|n| !matches!(n, ConvertNotice::SubGroupSize { .. })) {
        summary.push_str(&format!(" ({notice})"));
    }
    Ok(summary)
}

/// The sub-group size in the config of the run, whose engine will load the result.
fn sub_group_size(passthrough: &PassthroughState) -> u64 {
    let config = passthrough.model.iter().find(|(key, _)| key == "ds_config").map(|(_, config)| config);
    let size = config.and_then(|c| c.get("zero_optimization")?.get("sub_group_size"));
    match size {
        Some(Object::Int(n)) if *n > 0 => *n as u64,
        Some(Object::Float(n)) if *n >= 1.0 => *n as u64,
        _ => SUB_GROUP_SIZE,
    }
}
