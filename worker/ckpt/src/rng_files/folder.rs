//! The files of random states in a checkpoint's folder.
use super::parse;
use super::rule::Decision;
use super::streams::{Kind, RankStates, Writer};
use super::write;
use crate::disk::{self, Folder};
use crate::error::{CkptError, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Most ranks of a checkpoint.
const RANKS_MAX: usize = 1 << 16;
/// Beside the files: what was decided when they were made.
pub const RECORD: &str = "launch_rng.json";
/// Largest record that is read, bytes.
const RECORD_MAX: u64 = 1 << 20;

/// All ranks' states.
#[derive(Clone, Debug)]
pub struct Stored {
    pub writer: Writer,
    /// By rank.
    pub ranks: Vec<RankStates>,
    /// By rank.
    pub names: Vec<String>,
}

/// The digest of one stream of one rank, as `inspect` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct StreamDigest {
    pub rank: u32,
    pub file: String,
    pub kind: Kind,
    /// BLAKE3; equal exactly when the streams go on with the same numbers.
    pub digest: String,
}

/// Name of a rank's file.
pub fn file_name(writer: Writer, rank: u32, world: u32) -> String {
    match (writer, world) {
        (Writer::Trainer, 1) => "rng_state.pth".into(),
        (Writer::Trainer, _) => format!("rng_state_{rank}.pth"),
        (Writer::Accelerate, _) => format!("random_states_{rank}.pkl"),
    }
}

/// The writer and rank that a file's name says; `rng_state.pth` is of rank 0.
pub(crate) fn named(name: &str) -> Option<(Writer, u32)> {
    let number = |prefix: &str, suffix: &str| {
        let digits = name.strip_prefix(prefix)?.strip_suffix(suffix)?;
        let rank: u32 = digits.parse().ok()?;
        (rank.to_string() == digits).then_some(rank)
    };
    match name {
        "rng_state.pth" => Some((Writer::Trainer, 0)),
        _ => number("rng_state_", ".pth")
            .map(|r| (Writer::Trainer, r))
            .or_else(|| number("random_states_", ".pkl").map(|r| (Writer::Accelerate, r))),
    }
}

/// True for the files that a new world replaces.
pub(super) fn is_state(name: &str) -> bool {
    named(name).is_some() || name == RECORD
}

/// Reads all of them; `None` when there are none. Each rank up to the highest, or to `world` where that is known, has its
/// file, or one error names the first that hasn't.
pub fn read(path: &Path, world: Option<u32>) -> Result<Option<Stored>> {
    let folder = Folder::open(path)?;
    let mut files: BTreeMap<u32, String> = BTreeMap::new();
    let mut writer = None;
    for name in folder.names()? {
        let Some((of, rank)) = named(&name) else { continue };
        if writer.is_some_and(|w| w != of) {
            return Err(CkptError::damaged(path, name, "files of HF Trainer and of Accelerate are mixed"));
        }
        writer = Some(of);
        if let Some(other) = files.insert(rank, name.clone()) {
            let why = format!(
                "{other} is of the same rank, from a run with another number of ranks; remove the stale one"
            );
            return Err(CkptError::damaged(path, name, why));
        }
    }
    let Some(writer) = writer else { return Ok(None) };
    let lone = files.len() == 1 && files.get(&0).is_some_and(|n| n == "rng_state.pth");
    let found = files.keys().next_back().map_or(0, |last| last.saturating_add(1));
    let world = world.unwrap_or(found).max(found);
    if world as usize > RANKS_MAX {
        return Err(CkptError::damaged(path, "random states", format!("a world of {world} ranks")));
    }
    if let Some(rank) = (0..world).find(|r| !files.contains_key(r)) {
        let what = format!("{} (the random state of rank {rank} of {world})", file_name(writer, rank, world));
        return Err(CkptError::Missing { path: path.to_owned(), what });
    }
    if !lone && files.values().any(|n| n == "rng_state.pth") {
        return Err(CkptError::damaged(
            path,
            "rng_state.pth",
            "it is of a run without ranks, the others of one with",
        ));
    }
    let (mut ranks, mut names) = (Vec::new(), Vec::new());
    for name in files.into_values() {
        let (of, states) = parse::read(&folder, &name)?;
        if of != writer {
            return Err(CkptError::damaged(
                path,
                name,
                "its content is another program's than its name says",
            ));
        }
        ranks.push(states);
        names.push(name);
    }
    Ok(Some(Stored { writer, ranks, names }))
}

/// Every stream with its digest; files that can't be read are errors.
pub fn digests(path: &Path) -> Result<Vec<StreamDigest>> {
    let Some(stored) = read(path, None)? else { return Ok(Vec::new()) };
    let rows = (0u32..).zip(stored.ranks.iter().zip(&stored.names)).flat_map(|(rank, (states, file))| {
        Kind::ALL.into_iter().filter_map(move |kind| {
            let digest = states.digest(kind)?.hex();
            Some(StreamDigest { rank, file: file.clone(), kind, digest })
        })
    });
    Ok(rows.collect())
}

/// Writes the files of these ranks and the record into a folder that has none, durably except for the folder itself.
pub(super) fn write(path: &Path, writer: Writer, ranks: &[RankStates], record: &Record) -> Result<()> {
    for (rank, states) in (0u32..).zip(ranks) {
        let name = file_name(writer, rank, ranks.len() as u32);
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        disk::write_file(path.join(&name), &write::encode(writer, stem, states))?;
    }
    let mut text = serde_json::to_vec_pretty(record).map_err(|e| CkptError::invalid(e.to_string()))?;
    text.push(b'\n');
    disk::write_file(path.join(RECORD), &text)?;
    Ok(())
}

/// What lies beside the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub format: String,
    pub version: u32,
    /// Name of the checkpoint they were made from.
    pub from: String,
    #[serde(flatten)]
    pub decision: Decision,
}

impl Record {
    pub(super) fn new(from: String, decision: Decision) -> Record {
        Record { format: "launch rng record".into(), version: 1, from, decision }
    }

    /// The record in a folder; `None` when there is none.
    pub fn read(path: &Path) -> Result<Option<Record>> {
        let folder = Folder::open(path)?;
        if folder.size_of(RECORD)?.is_none() {
            return Ok(None);
        }
        let text = folder.read(RECORD, RECORD_MAX)?;
        let record: Record =
            serde_json::from_slice(&text).map_err(|e| CkptError::damaged(path, RECORD, e.to_string()))?;
        match record.version {
            1 => Ok(Some(record)),
            other => {
                let what = format!("{RECORD} is of version {other}, not 1");
                Err(CkptError::Unsupported { path: path.to_owned(), what })
            }
        }
    }
}
