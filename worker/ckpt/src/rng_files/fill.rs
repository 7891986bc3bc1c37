//! Random states of ranks whose files are lost, from those of the others.
use super::folder::{file_name, named};
use super::parse;
use super::rule::{Asked, Decision, Policy, reconcile};
use super::streams::{CudaStates, RankStates, Writer};
use super::write;
use crate::disk::{self, Folder};
use crate::error::{CkptError, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Most ranks of a checkpoint; a file may claim any number, and the states of all are held at once (10 kB each).
const RANKS_MAX: u32 = 1 << 14;

/// What was written.
pub(crate) struct Filled {
    /// Names of the files.
    pub(crate) files: Vec<String>,
    pub(crate) decision: Decision,
}

/// Writes the files of the ranks of `world` that have none, or one that can't be read, and leaves the others alone. The
/// rule is that of a changed number of ranks (`super::rule`): a stream that all others share is copied, one that each
/// has for itself is seeded anew with the rank's number, so no two ranks get the same. `None` when nothing is lost, or
/// when no rank has a file.
pub(crate) fn fill(path: &Path, world: u32, step: u64) -> Result<Option<Filled>> {
    if world > RANKS_MAX {
        return Err(CkptError::Unsupported {
            path: path.to_owned(),
            what: format!("it claims {world} ranks; random states are made for at most {RANKS_MAX}"),
        });
    }
    let folder = Folder::open(path)?;
    let (mut known, mut names): (BTreeMap<u32, RankStates>, BTreeMap<u32, String>) = Default::default();
    let mut writer: Option<Writer> = None;
    for name in folder.names()? {
        let Some((of, rank)) = named(&name).filter(|&(_, rank)| rank < world) else { continue };
        match parse::read(&folder, &name) {
            Ok((found, _)) if found != of || writer.is_some_and(|w| w != of) => {
                return Err(CkptError::damaged(
                    path,
                    name,
                    "files of HF Trainer and of Accelerate are mixed",
                ));
            }
            Ok((_, states)) => {
                writer = Some(of);
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
    let asked = Asked { step, gpus: devices(&old), ..Asked::new(world, Policy::Reconcile) };
    let unusable = |what: String| CkptError::Unsupported { path: path.to_owned(), what };
    let (mut new, decision) = reconcile(&old, &asked).map_err(unusable)?;
    let mut files = Vec::new();
    for rank in lost {
        let (name, Some(states)) = (file_name(writer, rank, world), new.get_mut(rank as usize)) else {
            continue;
        };
        states.step = old.first().and_then(|f| f.step);
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        let bytes = write::encode(writer, stem, states);
        disk::unlink(&path.join(names.get(&rank).unwrap_or(&name)))?;
        disk::write_file(path.join(&name), &bytes)?;
        files.push(name);
    }
    Ok(Some(Filled { files, decision }))
}

/// How many GPUs the ranks saw, where they wrote a list.
fn devices(old: &[RankStates]) -> Option<u32> {
    let lists = old.iter().filter_map(|s| match &s.cuda {
        Some(CudaStates::All(devices)) => u32::try_from(devices.len()).ok(),
        _ => None,
    });
    lists.max()
}
