//! DeepSpeed's part of a checkpoint, cut anew for another number of ranks in its own layout, which an unmodified script
//! loads without any setting.
use crate::convert::{ConvertOptions, Target, convert_into, output::fingerprint};
use crate::disk::{self, Folder, exists};
use crate::error::{self, CkptError, Result};
use crate::passthrough::Extras;
use crate::external::Foreign;
use crate::pickle::Object;
use crate::source::Source;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Beside the files: what a prepared folder was made of, so that the next start with the same world uses it again.
pub(super) const RECORD: &str = "launch_prepared.json";
/// Largest record that is read, bytes.
const RECORD_MAX: u64 = 1 << 20;
const FORMAT: &str = "launch prepared checkpoint";
const LATEST: &str = "latest";
/// Elements of a sub-group of stage 3 where the config doesn't say: DeepSpeed's own default.
const SUB_GROUP_SIZE: u64 = 1_000_000_000;

/// What a prepared folder was made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Prepared {
    format: String,
    version: u32,
    /// Name of the checkpoint it was made from.
    pub(super) from: String,
    world: u32,
    /// How random states were to be treated.
    policy: String,
    /// Changes when a file of the original does.
    source: String,
    /// The line that told what was done.
    pub(super) line: String,
}

impl Prepared {
    pub(super) fn of(dir: &Path, from: &str, world: u32, policy: String) -> Result<Prepared> {
        let (format, source) = (FORMAT.to_owned(), fingerprint(dir)?);
        Ok(Prepared { format, version: 1, from: from.to_owned(), world, policy, source, line: String::new() })
    }

    /// True when `other` was made of the same original for the same purpose.
    pub(super) fn is_like(&self, other: &Prepared) -> bool {
        *self == Prepared { line: self.line.clone(), ..other.clone() }
    }

    /// The record in a folder; `None` when there is none that can be read.
    pub(super) fn read(dir: &Path) -> Option<Prepared> {
        let text = Folder::open(dir).ok()?.read(RECORD, RECORD_MAX).ok()?;
        let record: Prepared = serde_json::from_slice(&text).ok()?;
        (record.format == FORMAT && record.version == 1).then_some(record)
    }

    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(|e| CkptError::invalid(e.to_string()))?;
        text.push(b'\n');
        disk::write_file(dir.join(RECORD), &text).map(drop)
    }
}

/// True when ranks can't go on with it as it is: in stages 1 to 3 each has a part. Stage 0 is whole in one file.
pub(super) fn is_needed(state: &Foreign, world: u32) -> bool {
    let facts = state.facts();
    facts.stage != Some(0) && facts.world.is_some_and(|w| w != world)
}

/// Refuses a folder that an engine doesn't load by its `latest`.
pub(super) fn check(dir: &Path, state: &Foreign) -> Result<()> {
    match exists(&dir.join(LATEST)) || exists(&dir.join("latest_universal")) {
        true => Ok(()),
        false => {
            let what = format!(
                "it is the folder of one tag, {}; resume from the folder that holds it and `{LATEST}`",
                state.facts().tag
            );
            Err(CkptError::Unsupported { path: dir.to_owned(), what })
        }
    }
}

/// True for the entries of the original that the new cut replaces.
pub(super) fn replaces(state: &Foreign, name: &str) -> bool {
    name == state.facts().tag || [LATEST, "latest_universal", RECORD].contains(&name)
}

/// Writes the state for `world` ranks into a folder; what was done, in words.
pub(super) fn write(state: &Foreign, world: u32, into: &Path) -> Result<String> {
    let sub_group_size = sub_group_size(&state.extras()?);
    let to = ConvertOptions::to(Target::DeepSpeed);
    let report = convert_into(state, into, &ConvertOptions { world: Some(world), sub_group_size, ..to })?;
    let mut line = format!(
        "its DeepSpeed state (ZeRO-{}) is cut anew for {world}, {} in {} files",
        report.stage.unwrap_or(0),
        error::bytes(report.bytes),
        report.files
    );
    // the config that made it has the same size of sub-groups
    for notice in report.notices.iter().filter(|n| !n.contains("sub_group_size")) {
        line.push_str(&format!(" ({notice})"));
    }
    Ok(line)
}

/// As the config of the run has it, whose engine will load the result.
fn sub_group_size(extras: &Extras) -> u64 {
    let config = extras.model.iter().find(|(key, _)| key == "ds_config").map(|(_, config)| config);
    let size = config.and_then(|c| c.get("zero_optimization")?.get("sub_group_size"));
    match size {
        Some(Object::Int(n)) if *n > 0 => *n as u64,
        Some(Object::Float(n)) if *n >= 1.0 => *n as u64,
        _ => SUB_GROUP_SIZE,
    }
}
