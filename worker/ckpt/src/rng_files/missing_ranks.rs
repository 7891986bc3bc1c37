//! Creates RNG state files for ranks whose files were lost, from those of the other ranks.
use super::decode;
use super::encode;
use super::rank_files::{RngFilesError, file_name, parse_file_name};
use super::reconcile::{ReconcileOptions, ReconcilePolicy, RngDecision, reconcile};
use super::streams::{CudaStates, RankStates, RngFormat};
use crate::disk::{self, Directory};
use crate::error::{CkptError, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Most ranks of a checkpoint. A file name may claim any rank, and memory holds the states of all
/// ranks at once (10 kB each).
const RANKS_MAX: u32 = 1 << 14;

/// The files that were created.
pub(crate) struct FilledRanks {
    /// File names, in the order of ranks.
    pub(crate) files: Vec<String>,
    pub(crate) decision: RngDecision,
}

/// Writes the files of those of `world` ranks that have none, or an unreadable one; the other files
/// stay.
///
/// The rule is that of a changed number of ranks ([`reconcile`]): a stream that all other ranks
/// share is copied; a stream of which each rank has a different one is reseeded with the rank's
/// number, so that no two ranks get equal numbers. `None` when no file is lost, or when no rank has
/// a file.
pub(crate) fn fill_missing_ranks(path: &Path, world: u32, step: u64) -> Result<Option<FilledRanks>> {
    if world > RANKS_MAX {
        let error = RngFilesError::TooManyRanks { world, limit: RANKS_MAX };
        return Err(CkptError::damaged(path, "RNG state files", error));
    }
    let directory = Directory::open(path)?;
    let (mut known, mut names): (BTreeMap<u32, RankStates>, BTreeMap<u32, String>) = Default::default();
    let mut writer: Option<RngFormat> = None;
    for name in directory.names()? {
        let Some((format, rank)) = parse_file_name(&name).filter(|&(_, rank)| rank < world) else { continue };
        match decode::read_rank_file(&directory, &name) {
            Ok((found, _)) if found != format || writer.is_some_and(|w| w != format) => {
                return Err(CkptError::damaged(path, name, RngFilesError::MixedPrograms));
            }
            Ok((_, states)) => {
                writer = Some(format);
                known.insert(rank, states);
            }
            Err(e) if e.is_checkpoint_at_fault() => {}
            Err(e) => return Err(e),
        }
        names.insert(rank, name);
    }
    let Some(writer) = writer else { return Ok(None) };
    let lost: Vec<u32> = (0..world).filter(|r| !known.contains_key(r)).collect();
    if lost.is_empty() || (world == 1 && names.len() == 1) {
        return Ok(None);
    }
    let old: Vec<RankStates> = known.into_values().collect();
    let options = ReconcileOptions {
        step,
        gpus: visible_gpus(&old),
        ..ReconcileOptions::new(world, ReconcilePolicy::Reconcile)
    };
    let (mut new, decision) = reconcile(&old, &options).map_err(|error| error.at(path))?;
    let mut files = Vec::new();
    for rank in lost {
        let (name, Some(states)) = (file_name(writer, rank, world), new.get_mut(rank as usize)) else {
            continue;
        };
        states.step = old.first().and_then(|f| f.step);
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        let bytes = encode::encode_rank_file(writer, stem, states);
        disk::unlink(&path.join(names.get(&rank).unwrap_or(&name)))?;
        disk::write_file(path.join(&name), &bytes)?;
        files.push(name);
    }
    Ok(Some(FilledRanks { files, decision }))
}

/// The number of GPUs that ranks saw; `None` when no rank saved a list of states.
fn visible_gpus(old: &[RankStates]) -> Option<u32> {
    let lists = old.iter().filter_map(|s| match &s.cuda {
        Some(CudaStates::All(devices)) => u32::try_from(devices.len()).ok(),
        _ => None,
    });
    lists.max()
}
