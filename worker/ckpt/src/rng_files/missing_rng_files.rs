//! Creates files with random generator states (RNG) for ranks whose files were lost, from the files
//! of the other ranks.
use super::rank_files::{parse_rank_file_name, rank_file_name};
use super::reconcile::{ReconcileOptions, ReconcilePolicy, RngDecision, reconcile_rng_states};
use super::streams::{RankRngStates, RngFormat, TorchCudaStates};
use super::{decode, encode};
use crate::codec::disk::{self, Directory};
use crate::error::{CkptError, Result, RngFilesError};
use std::collections::BTreeMap;
use std::path::Path;

/// Limit on the number of ranks of a checkpoint for which lost files with random generator states
/// are created. A single file name can claim any rank, and the states of all lower ranks are then
/// created in memory (10 kB each). The limit is therefore lower than that for reading, which
/// requires a file of every rank.
const CREATED_RANKS_MAX: u32 = 1 << 14;

/// The names of random generator state files that were created for ranks without a file, and how
/// the states in these files were chosen.
pub(crate) struct CreatedRngFiles {
    /// Names of the created files, in the order of ranks.
    pub(crate) files: Vec<String>,
    /// How the random generator states were assigned to the ranks.
    pub(crate) decision: RngDecision,
}

/// Creates a file with random generator states for each rank below `world` whose file is missing or
/// invalid, using the states of the other ranks. Valid files stay unchanged. Returns `None` if
/// every rank has a valid file, or if no rank has one.
///
/// The streams are assigned by the rule for a changed number of ranks ([`reconcile_rng_states`]). A
/// stream that all other ranks share is copied. A stream that differs between ranks is reseeded
/// with the rank's number and `step`, the completed optimizer steps of the checkpoint, so that no
/// two ranks draw equal numbers.
///
/// # Errors
/// Fails if `world` exceeds [`CREATED_RANKS_MAX`], the files of two programs are mixed, or I/O
/// fails.
pub(crate) fn create_missing_rng_files(
    path: &Path,
    world: u32,
    step: u64,
) -> Result<Option<CreatedRngFiles>> {
    if world > CREATED_RANKS_MAX {
        let error = RngFilesError::TooManyRanks { world, limit: CREATED_RANKS_MAX };
        return Err(CkptError::damaged(path, "RNG state files", error));
    }
    let directory = Directory::open(path)?;
    let (mut known, mut names): (BTreeMap<u32, RankRngStates>, BTreeMap<u32, String>) = Default::default();
    let mut writer: Option<RngFormat> = None;
    for name in directory.list_names()? {
        let Some((format, rank)) = parse_rank_file_name(&name).filter(|&(_, rank)| rank < world) else {
            continue;
        };
        match decode::read_rank_rng_file(&directory, &name) {
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
    let old: Vec<RankRngStates> = known.into_values().collect();
    let options = ReconcileOptions {
        step,
        gpus: count_visible_gpus(&old),
        ..ReconcileOptions::new(world, ReconcilePolicy::Reconcile)
    };
    let (mut new, decision) =
        reconcile_rng_states(&old, &options).map_err(|error| CkptError::unsupported(path, error))?;
    let mut files = Vec::new();
    for rank in lost {
        let (name, Some(states)) = (rank_file_name(writer, rank, world), new.get_mut(rank as usize)) else {
            continue;
        };
        states.step = old.first().and_then(|f| f.step);
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        let bytes = encode::encode_rank_rng_file(writer, stem, states);
        disk::unlink(&path.join(names.get(&rank).unwrap_or(&name)))?;
        disk::write_file(path.join(&name), &bytes)?;
        files.push(name);
    }
    Ok(Some(CreatedRngFiles { files, decision }))
}

/// Returns the largest number of GPUs whose CUDA generator states one rank saved, or `None` if no
/// rank saved a list of such states.
fn count_visible_gpus(old: &[RankRngStates]) -> Option<u32> {
    let lists = old.iter().filter_map(|s| match &s.cuda {
        Some(TorchCudaStates::PerDevice(devices)) => u32::try_from(devices.len()).ok(),
        _ => None,
    });
    lists.max()
}
