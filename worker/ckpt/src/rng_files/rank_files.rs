//! The RNG state files of all ranks in a checkpoint directory.
use super::decode;
use super::encode;
use super::reconcile::RngDecision;
use super::streams::{RankStates, RngFormat, StreamKind};
use crate::disk::{self, Directory};
use crate::error::{CkptError, MissingPart, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Most ranks of a checkpoint.
const RANKS_MAX: u32 = 1 << 16;
/// Name of the file that records the decision by which the RNG files were made.
pub const RECORD: &str = "launch_rng.json";
/// Largest record that is read, bytes.
const RECORD_MAX: u64 = 1 << 20;

/// How the RNG state files of the ranks contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RngFilesError {
    /// Files of two programs are in one directory.
    #[error("RNG state files of HF Trainer and of Accelerate are mixed")]
    MixedPrograms,
    /// Two files are of one rank: one is stale, left behind by a run with another number of ranks.
    #[error("{other} is of rank {rank}, too; one of them is left from a run with another number of ranks")]
    DuplicateRank {
        /// The rank.
        rank: u32,
        /// Name of the other file.
        other: String,
    },
    /// The highest rank exceeds the limit.
    #[error("{world} ranks, more than the limit of {limit}")]
    TooManyRanks {
        /// Number of ranks.
        world: u32,
        /// The limit.
        limit: u32,
    },
    /// `rng_state.pth` is next to files of ranks.
    #[error("saved by a run of one process, but the other files by a run of several ranks")]
    MixedWorlds,
    /// The file name and the keys of the content belong to different programs.
    #[error("the file name and the content belong to different programs")]
    OtherProgram,
}

/// The RNG states of all ranks, as a checkpoint directory stores them.
#[derive(Clone, Debug)]
pub struct StoredStates {
    /// The program whose files they are.
    pub writer: RngFormat,
    /// The states by rank.
    pub ranks: Vec<RankStates>,
    /// The file names by rank.
    pub file_names: Vec<String>,
}

/// The digest of one stream of one rank, for `launch ckpt inspect`.
#[derive(Clone, Debug, Serialize)]
pub struct StreamDigest {
    /// The rank that saved the stream.
    pub rank: u32,
    /// Name of the rank's file.
    pub file: String,
    /// The generator of the stream.
    pub kind: StreamKind,
    /// BLAKE3 in hexadecimal, equal exactly when two streams continue with equal numbers.
    pub digest: String,
}

/// The name that `format` gives to the file of `rank` in a run of `world` ranks.
pub fn file_name(writer: RngFormat, rank: u32, world: u32) -> String {
    match (writer, world) {
        (RngFormat::Trainer, 1) => "rng_state.pth".into(),
        (RngFormat::Trainer, _) => format!("rng_state_{rank}.pth"),
        (RngFormat::Accelerate, _) => format!("random_states_{rank}.pkl"),
    }
}

/// The format and rank in a file name; `rng_state.pth` belongs to rank 0. `None` for other files.
pub(crate) fn parse_file_name(name: &str) -> Option<(RngFormat, u32)> {
    let number = |prefix: &str, suffix: &str| {
        let digits = name.strip_prefix(prefix)?.strip_suffix(suffix)?;
        let rank: u32 = digits.parse().ok()?;
        (rank.to_string() == digits).then_some(rank)
    };
    match name {
        "rng_state.pth" => Some((RngFormat::Trainer, 0)),
        _ => number("rng_state_", ".pth")
            .map(|r| (RngFormat::Trainer, r))
            .or_else(|| number("random_states_", ".pkl").map(|r| (RngFormat::Accelerate, r))),
    }
}

/// Whether this is the name of an RNG state file or of [`RECORD`]: the files that depend on the
/// number of ranks.
pub(super) fn is_rng_file(name: &str) -> bool {
    parse_file_name(name).is_some() || name == RECORD
}

/// Reads the states of all ranks; `None` when the directory has no RNG state files. `world` is the
/// number of ranks, if it is known. Otherwise the highest rank in the file names determines it.
///
/// # Errors
/// When a rank has no file (the error names the first one), when files of different programs or
/// runs are mixed, or when a file is invalid.
pub fn read_ranks(path: &Path, world: Option<u32>) -> Result<Option<StoredStates>> {
    let directory = Directory::open(path)?;
    let mut files: BTreeMap<u32, String> = BTreeMap::new();
    let mut writer = None;
    for name in directory.names()? {
        let Some((format, rank)) = parse_file_name(&name) else { continue };
        if writer.is_some_and(|w| w != format) {
            return Err(CkptError::damaged(path, name, RngFilesError::MixedPrograms));
        }
        writer = Some(format);
        if let Some(other) = files.insert(rank, name.clone()) {
            return Err(CkptError::damaged(path, name, RngFilesError::DuplicateRank { rank, other }));
        }
    }
    let Some(writer) = writer else { return Ok(None) };
    let lone = files.len() == 1 && files.get(&0).is_some_and(|n| n == "rng_state.pth");
    let found = files.keys().next_back().map_or(0, |last| last.saturating_add(1));
    let world = world.unwrap_or(found).max(found);
    if world > RANKS_MAX {
        let error = RngFilesError::TooManyRanks { world, limit: RANKS_MAX };
        return Err(CkptError::damaged(path, "RNG state files", error));
    }
    if let Some(rank) = (0..world).find(|r| !files.contains_key(r)) {
        let file = file_name(writer, rank, world);
        return Err(CkptError::missing(path, MissingPart::RngFile { file, rank, world }));
    }
    if !lone && files.values().any(|n| n == "rng_state.pth") {
        return Err(CkptError::damaged(path, "rng_state.pth", RngFilesError::MixedWorlds));
    }
    let (mut ranks, mut names) = (Vec::new(), Vec::new());
    for name in files.into_values() {
        let (format, states) = decode::read_rank_file(&directory, &name)?;
        if format != writer {
            return Err(CkptError::damaged(path, name, RngFilesError::OtherProgram));
        }
        ranks.push(states);
        names.push(name);
    }
    Ok(Some(StoredStates { writer, ranks, file_names: names }))
}

/// The digest of every stream of every rank.
///
/// # Errors
/// When a file is missing or invalid.
pub fn digests(path: &Path) -> Result<Vec<StreamDigest>> {
    let Some(stored) = read_ranks(path, None)? else { return Ok(Vec::new()) };
    let rows =
        (0u32..).zip(stored.ranks.iter().zip(&stored.file_names)).flat_map(|(rank, (states, file))| {
            StreamKind::ALL.into_iter().filter_map(move |kind| {
                let digest = states.digest(kind)?.hex();
                Some(StreamDigest { rank, file: file.clone(), kind, digest })
            })
        });
    Ok(rows.collect())
}

/// Writes the files of these ranks and the record into a directory that has none. The files are
/// durable on return; their directory entries are not.
pub(super) fn write_ranks(
    path: &Path,
    writer: RngFormat,
    ranks: &[RankStates],
    record: &RngRecord,
) -> Result<()> {
    for (rank, states) in (0u32..).zip(ranks) {
        let name = file_name(writer, rank, ranks.len() as u32);
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        disk::write_file(path.join(&name), &encode::encode_rank_file(writer, stem, states))?;
    }
    let mut text = serde_json::to_vec_pretty(record).map_err(CkptError::invalid_save)?;
    text.push(b'\n');
    disk::write_file(path.join(RECORD), &text)?;
    Ok(())
}

/// The record next to the RNG state files that `launch` made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngRecord {
    /// Always `launch rng record`.
    pub format: String,
    /// Version of the record, 1.
    pub version: u32,
    /// Directory name of the checkpoint that the states come from.
    pub from: String,
    /// How the states were assigned to ranks.
    #[serde(flatten)]
    pub decision: RngDecision,
}

impl RngRecord {
    pub(super) fn new(from: String, decision: RngDecision) -> RngRecord {
        RngRecord { format: "launch rng record".into(), version: 1, from, decision }
    }

    /// Reads the record of a directory; `None` when it has none.
    ///
    /// # Errors
    /// When the record is damaged or of another version.
    pub fn read(path: &Path) -> Result<Option<RngRecord>> {
        let directory = Directory::open(path)?;
        if directory.size_of(RECORD)?.is_none() {
            return Ok(None);
        }
        let text = directory.read(RECORD, RECORD_MAX)?;
        let record: RngRecord =
            serde_json::from_slice(&text).map_err(|e| CkptError::damaged(path, RECORD, e))?;
        match record.version {
            1 => Ok(Some(record)),
            other => {
                let what = format!("{RECORD} has version {other}, expected 1");
                Err(CkptError::unsupported(path, what))
            }
        }
    }
}
