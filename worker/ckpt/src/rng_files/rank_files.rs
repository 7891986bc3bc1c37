//! Reads and writes the random generator states (RNG) of all ranks in a checkpoint directory.
use super::reconcile::RngDecision;
use super::streams::{RankRngStates, RngFormat};
use super::{decode, encode};
use crate::codec::disk::{self, Directory};
use crate::codec::json::read_json_if_exists;
use crate::error::{CkptError, DamageReason, MissingPart, Result, RngFilesError, RngStateError};
use crate::rng_stream_kind::RngStreamKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Limit on the number of ranks of a checkpoint whose random generator states are read. The limit
/// rejects an absurd rank in a file name. Every rank must have a file, so the files on disk bound
/// the memory.
const READ_RANKS_MAX: u32 = 1 << 16;
/// Name of the file that records how `launch` created the random generator states of all ranks in a
/// directory.
pub const RNG_RECORD_FILE: &str = "launch_rng.json";
/// Maximum size in bytes of the file in which launch records where a directory's random generator
/// states come from.
const RNG_RECORD_BYTES_MAX: u64 = 1 << 20;

/// The random generator states of all ranks in a checkpoint directory, with the names of the ranks'
/// files and the program that wrote them.
#[derive(Clone, Debug)]
pub struct AllRankRngStates {
    /// The format of the files: the program whose file names and dict keys they have.
    pub writer: RngFormat,
    /// The states of each rank, in the order of ranks.
    pub ranks: Vec<RankRngStates>,
    /// The name of each rank's file, in the order of ranks.
    pub file_names: Vec<String>,
}

/// The hash of the state of one rank's random generator, as `launch ckpt inspect` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct RngStateDigest {
    /// The rank that saved the stream.
    pub rank: u32,
    /// Name of the rank's file.
    pub file: String,
    /// The generator of the stream.
    pub kind: RngStreamKind,
    /// BLAKE3 hash of the generator's state, in hexadecimal. Two digests are equal exactly if the
    /// streams continue with equal numbers.
    pub digest: String,
}

/// Returns the name that the program `writer` gives to the file with the random generator states of
/// `rank`, in a run of `world` ranks.
pub fn rank_file_name(writer: RngFormat, rank: u32, world: u32) -> String {
    match (writer, world) {
        (RngFormat::Trainer, 1) => "rng_state.pth".into(),
        (RngFormat::Trainer, _) => format!("rng_state_{rank}.pth"),
        (RngFormat::Accelerate, _) => format!("random_states_{rank}.pkl"),
    }
}

/// Parses the name of a file with random generator states, and returns the program that wrote it
/// and the rank. `rng_state.pth` belongs to rank 0. Returns `None` for other files.
pub(crate) fn parse_rank_file_name(name: &str) -> Option<(RngFormat, u32)> {
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

/// Returns true if `name` is the name of a rank's random generator state file, or of launch's
/// record about such files. These files depend on the number of ranks.
pub(super) fn is_rng_file(name: &str) -> bool {
    parse_rank_file_name(name).is_some() || name == RNG_RECORD_FILE
}

/// Checks that the states in the file `name` can be read if it is a rank's random generator state
/// file. Other files pass. `name` is relative to `directory` and may be in a subdirectory. A state
/// of an unknown generator, such as that of another kind of accelerator, is not an error.
///
/// # Errors
/// Fails if the file is missing, too large or damaged, or if a state is invalid.
pub(crate) fn check_rng_file(directory: &Directory, name: &str) -> Result<()> {
    let file_name = name.rsplit('/').next().unwrap_or(name);
    if parse_rank_file_name(file_name).is_none() {
        return Ok(());
    }
    let is_unknown =
        |reason: &DamageReason| matches!(reason, DamageReason::RngState(RngStateError::UnknownStream { .. }));
    match decode::read_rank_rng_file(directory, name) {
        Err(CkptError::Damaged { damage, .. }) if is_unknown(&damage.reason) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Reads the files with the random generator states of all ranks in the directory `path`. Returns
/// `None` if the directory has no such files. `world` is the least number of ranks, or `None` if it
/// is unknown. If the name of a file has a rank of `world` or above, the number of ranks is the
/// highest such rank plus 1.
///
/// # Errors
/// Fails if a rank has no file (the error names the first such rank), files of different programs
/// or runs are mixed, or a file is invalid.
pub fn read_all_rank_states(path: &Path, world: Option<u32>) -> Result<Option<AllRankRngStates>> {
    let directory = Directory::open(path)?;
    let mut files: BTreeMap<u32, String> = BTreeMap::new();
    let mut writer = None;
    for name in directory.list_names()? {
        let Some((format, rank)) = parse_rank_file_name(&name) else { continue };
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
    if world > READ_RANKS_MAX {
        let error = RngFilesError::TooManyRanks { world, limit: READ_RANKS_MAX };
        return Err(CkptError::damaged(path, "RNG state files", error));
    }
    if let Some(rank) = (0..world).find(|r| !files.contains_key(r)) {
        let file = rank_file_name(writer, rank, world);
        return Err(CkptError::missing(path, MissingPart::RngFile { file, rank, world }));
    }
    if !lone && files.values().any(|n| n == "rng_state.pth") {
        return Err(CkptError::damaged(path, "rng_state.pth", RngFilesError::MixedWorlds));
    }
    let (mut ranks, mut names) = (Vec::new(), Vec::new());
    for name in files.into_values() {
        let (format, states) = decode::read_rank_rng_file(&directory, &name)?;
        if format != writer {
            return Err(CkptError::damaged(path, name, RngFilesError::OtherProgram));
        }
        ranks.push(states);
        names.push(name);
    }
    Ok(Some(AllRankRngStates { writer, ranks, file_names: names }))
}

/// Computes the hash of every random generator's state of every rank in the directory `path`.
/// Returns an empty list if the directory has no such files.
///
/// # Errors
/// Fails if a file is missing or invalid.
pub fn compute_rng_state_digests(path: &Path) -> Result<Vec<RngStateDigest>> {
    let Some(stored) = read_all_rank_states(path, None)? else { return Ok(Vec::new()) };
    let rows =
        (0u32..).zip(stored.ranks.iter().zip(&stored.file_names)).flat_map(|(rank, (states, file))| {
            RngStreamKind::ALL.into_iter().filter_map(move |kind| {
                let digest = states.compute_rng_state_digest(kind)?.to_hex();
                Some(RngStateDigest { rank, file: file.clone(), kind, digest })
            })
        });
    Ok(rows.collect())
}

/// Writes one file of random generator states per rank to the directory `path`, and the file
/// `launch_rng.json`, which states where they come from. Fails if a file of the same name exists.
/// The content of the files is durable on return, but not their directory entries.
pub(super) fn write_all_rank_states(
    path: &Path,
    writer: RngFormat,
    ranks: &[RankRngStates],
    record: &RngRecord,
) -> Result<()> {
    for (rank, states) in (0u32..).zip(ranks) {
        let name = rank_file_name(writer, rank, ranks.len() as u32);
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        disk::write_file(path.join(&name), &encode::encode_rank_rng_file(writer, stem, states))?;
    }
    let mut text = serde_json::to_vec_pretty(record).map_err(CkptError::invalid_save)?;
    text.push(b'\n');
    disk::write_file(path.join(RNG_RECORD_FILE), &text)?;
    Ok(())
}

/// The content of `launch_rng.json`, which states from which checkpoint launch took the random
/// generator states in a directory, and how they were assigned to ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngRecord {
    /// Name of the record's format, always `launch rng record`.
    pub format: String,
    /// Version of the record's format, which must be 1.
    pub version: u32,
    /// Name of the directory that the states come from.
    pub from: String,
    /// How the states were assigned to ranks.
    #[serde(flatten)]
    pub decision: RngDecision,
}

impl RngRecord {
    /// Creates the record for a directory whose random generator states were assigned from the
    /// checkpoint `from` as `decision` describes.
    pub(super) fn new(from: String, decision: RngDecision) -> RngRecord {
        RngRecord { format: "launch rng record".into(), version: 1, from, decision }
    }

    /// Reads the record of the checkpoint from which launch took the random generator states in the
    /// directory `path`. Returns `None` if the directory has no record.
    ///
    /// # Errors
    /// Fails if the record is damaged or of another version.
    pub fn read(path: &Path) -> Result<Option<RngRecord>> {
        let directory = Directory::open(path)?;
        let Some(record) =
            read_json_if_exists::<RngRecord>(&directory, RNG_RECORD_FILE, RNG_RECORD_BYTES_MAX)?
        else {
            return Ok(None);
        };
        match record.version {
            1 => Ok(Some(record)),
            other => {
                let what = format!("{RNG_RECORD_FILE} has version {other}, expected 1");
                Err(CkptError::unsupported(path, what))
            }
        }
    }
}
