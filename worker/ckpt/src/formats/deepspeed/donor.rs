//! Model files of stage 3 that can stand in for lost ones: without frozen weights every rank's says the same.
use super::names::Names;
use super::states::{GLOBALS, ModelStates, OptimizerStates};
use crate::disk::{self, Buffers, Folder, NARROW};
use crate::error::{CkptError, Result};
use crate::external::sweep;
use crate::formats::torch_file::TorchFile;
use crate::formats::torch_write::TorchWriter;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes copied at a time.
const CHUNK: u64 = 1 << 20;

/// A model file that is lost, and one that says the same.
#[derive(Debug)]
pub(crate) struct Donor {
    pub(crate) lost: String,
    pub(crate) from: String,
    /// The module holds buffers, which may have been the lost rank's own.
    pub(crate) buffers: bool,
}

/// The lost model files of a tag of stage 3 that others can replace. `Err` when one is lost and none can.
pub(crate) fn find(path: &Path) -> Result<Vec<Donor>> {
    let folder = Folder::open(path)?;
    let names = Names::of(&folder)?;
    let mut donor: Option<(u32, String, ModelStates)> = None;
    let mut sound = Vec::new();
    for (&rank, name) in &names.model {
        let read = TorchFile::open(&folder, name, GLOBALS).map(|file| ModelStates::read(&file));
        if let Ok(Ok(states)) = read {
            sound.push(rank);
            donor.get_or_insert((rank, name.clone(), states));
        }
    }
    let Some(optimizer) = names.optimizer.values().next() else { return Ok(Vec::new()) };
    let Some((of, from, states)) = donor else { return Ok(Vec::new()) };
    let stage = states.stage.or_else(|| {
        let file = TorchFile::open(&folder, optimizer, GLOBALS).ok()?;
        OptimizerStates::read(&file).ok().map(|o| o.stage)
    });
    if stage != Some(3) || states.world as usize != names.optimizer.len() {
        return Ok(Vec::new());
    }
    let lost: Vec<u32> = (0..states.world).filter(|rank| !sound.contains(rank)).collect();
    if lost.is_empty() {
        return Ok(Vec::new());
    }
    if !states.frozen_shapes.is_empty() || !states.frozen.is_empty() {
        let what = format!(
            "the model file of rank {}, which held its parts of {} frozen weights (no other file has them),",
            lost[0],
            states.frozen_shapes.len()
        );
        return Err(CkptError::Missing { path: path.to_owned(), what });
    }
    let named = |rank: u32| {
        names.model.get(&rank).cloned().unwrap_or_else(|| {
            from.replacen(&format!("zero_pp_rank_{of}_"), &format!("zero_pp_rank_{rank}_"), 1)
        })
    };
    let buffers = !states.buffers.is_empty();
    Ok(lost.into_iter().map(|rank| Donor { lost: named(rank), from: from.clone(), buffers }).collect())
}

/// Model files that a tag lacks, or that are damaged.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) stage: u8,
    pub(crate) world: u32,
    pub(crate) files: Vec<String>,
}

/// Which model files a tag lacks, as its optimizer files say; `None` when it lacks none, or nothing says what it is.
pub(crate) fn lost(path: &Path) -> Result<Option<Lost>> {
    let folder = Folder::open(path)?;
    let names = Names::of(&folder)?;
    let read = |name: &String| {
        let file = TorchFile::open(&folder, name, GLOBALS).ok()?;
        OptimizerStates::read(&file).ok()
    };
    let Some(stage) = names.optimizer.values().find_map(read).map(|o| o.stage) else { return Ok(None) };
    if !(1..=3).contains(&stage) {
        return Ok(None);
    }
    let world = names.optimizer.len() as u32;
    let expected: Vec<(u32, String)> = match stage {
        3 => (0..world).map(|r| (r, format!("zero_pp_rank_{r}_mp_rank_00_model_states.pt"))).collect(),
        _ => vec![(0, "mp_rank_00_model_states.pt".into())],
    };
    let mut files = Vec::new();
    for (rank, name) in expected {
        let sound = match names.model.get(&rank) {
            Some(there) => sweep::flaw(&folder, there)?.is_none(),
            None => false,
        };
        if !sound {
            files.push(names.model.get(&rank).cloned().unwrap_or(name));
        }
    }
    Ok((!files.is_empty()).then_some(Lost { stage, world, files }))
}

/// Writes `donor.lost` into the folder: the members of the other file under the name that the lost one's had.
pub(crate) fn write(path: &Path, donor: &Donor) -> Result<()> {
    let folder = Folder::open(path)?;
    let (file, size) = folder.open_file(&donor.from, nix::fcntl::OFlag::empty())?;
    let members = TorchFile::open(&folder, &donor.from, GLOBALS)?.members;
    let root = donor.lost.strip_suffix(".pt").unwrap_or(&donor.lost);
    disk::unlink(&path.join(&donor.lost))?;
    let mut writer = TorchWriter::empty(path.join(&donor.lost), root, size, &Buffers::of(NARROW))?;
    let mut buffer = vec![0u8; CHUNK as usize];
    for member in &members {
        let Some((_, name)) = member.name.split_once('/') else { continue };
        // these two the writer makes by itself
        if name == "version" || name == ".data/serialization_id" {
            continue;
        }
        writer.begin(name)?;
        let mut at = member.data.start;
        while at < member.data.end {
            let chunk = &mut buffer[..(member.data.end - at).min(CHUNK) as usize];
            file.read_exact_at(chunk, at).map_err(CkptError::io("read", &path.join(&donor.from)))?;
            writer.write(chunk)?;
            at += chunk.len() as u64;
        }
        writer.end()?;
    }
    writer.finish().map(drop)
}
