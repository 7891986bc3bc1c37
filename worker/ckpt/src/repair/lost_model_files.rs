//! Replaces lost model files of a DeepSpeed checkpoint of ZeRO stage 3 by copies of another rank's
//! model file. The model files of all ranks are equal if no weights are frozen.
use crate::codec::disk::{self, Directory, DiskBufferPool, SMALL_WINDOW_BYTES};
use crate::codec::torch_file::TorchFile;
use crate::codec::torch_writer::TorchWriter;
use crate::error::{CkptError, MissingPart, Result};
use crate::layout::deepspeed::{ALLOWED_GLOBALS, ModelStates, OptimizerStates, TagFiles};
use crate::verify::file_scan;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Number of bytes of a zip member that are copied at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// The name of a lost model file of a DeepSpeed checkpoint, and the name of another rank's model
/// file that replaces it.
#[derive(Debug)]
pub(crate) struct ReplacementFile {
    /// Name of the lost file.
    pub(crate) lost_file: String,
    /// Name of the equal file of another rank.
    pub(crate) source_file: String,
    /// True if the module has buffers, whose values on the rank of the lost file may have differed.
    pub(crate) has_buffers: bool,
}

/// Finds the missing or damaged model files of a DeepSpeed checkpoint of ZeRO stage 3, and for each
/// the model file of another rank as a replacement. Returns an empty list if no file is lost, the
/// stage is not 3, no model file is readable, or optimizer files are missing.
///
/// # Errors
/// Fails if a lost file had the only copy of slices of frozen weights.
pub(crate) fn find_replacement_files(path: &Path) -> Result<Vec<ReplacementFile>> {
    let directory = Directory::open(path)?;
    let names = TagFiles::list(&directory)?;
    let mut donor: Option<(u32, String, ModelStates)> = None;
    let mut sound = Vec::new();
    for (&rank, name) in &names.model {
        let read = TorchFile::open(&directory, name, ALLOWED_GLOBALS).map(|file| ModelStates::read(&file));
        if let Ok(Ok(states)) = read {
            sound.push(rank);
            donor.get_or_insert((rank, name.clone(), states));
        }
    }
    let Some(optimizer) = names.optimizer.values().next() else { return Ok(Vec::new()) };
    let Some((donor_rank, from, states)) = donor else { return Ok(Vec::new()) };
    let stage = states.stage.or_else(|| {
        let file = TorchFile::open(&directory, optimizer, ALLOWED_GLOBALS).ok()?;
        OptimizerStates::read(&file).ok().map(|o| o.stage)
    });
    if stage != Some(3) || states.world as usize != names.optimizer.len() {
        return Ok(Vec::new());
    }
    let lost: Vec<u32> = (0..states.world).filter(|rank| !sound.contains(rank)).collect();
    if lost.is_empty() {
        return Ok(Vec::new());
    }
    if !states.frozen_shapes.is_empty() || !states.frozen_fragments.is_empty() {
        let part = MissingPart::FrozenSlices { rank: lost[0], weights: states.frozen_shapes.len() };
        return Err(CkptError::missing(path, part));
    }
    let named = |rank: u32| {
        names.model.get(&rank).cloned().unwrap_or_else(|| {
            from.replacen(&format!("zero_pp_rank_{donor_rank}_"), &format!("zero_pp_rank_{rank}_"), 1)
        })
    };
    let buffers = !states.buffers.is_empty();
    Ok(lost
        .into_iter()
        .map(|rank| ReplacementFile {
            lost_file: named(rank),
            source_file: from.clone(),
            has_buffers: buffers,
        })
        .collect())
}

/// The model files of a DeepSpeed checkpoint that are missing or damaged.
#[derive(Debug)]
pub(crate) struct LostModelFiles {
    /// ZeRO stage of the checkpoint.
    pub(crate) stage: u8,
    /// Number of ranks that wrote the checkpoint.
    pub(crate) world: u32,
    /// Names of the lost files.
    pub(crate) files: Vec<String>,
}

/// Finds the missing and damaged model files of the DeepSpeed checkpoint in the directory `path`.
/// The optimizer files determine which model files must exist. Returns `None` if no file is lost,
/// or no optimizer file is readable.
pub(crate) fn find_lost_model_files(path: &Path) -> Result<Option<LostModelFiles>> {
    let directory = Directory::open(path)?;
    let names = TagFiles::list(&directory)?;
    let read = |name: &String| {
        let file = TorchFile::open(&directory, name, ALLOWED_GLOBALS).ok()?;
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
            Some(name) => file_scan::check_file(&directory, name)?.is_none(),
            None => false,
        };
        if !sound {
            files.push(names.model.get(&rank).cloned().unwrap_or(name));
        }
    }
    Ok((!files.is_empty()).then_some(LostModelFiles { stage, world, files }))
}

/// Restores a lost model file of the DeepSpeed checkpoint in the directory `path` as a copy of
/// another rank's model file. Removes a damaged file of this name first. The new file is not
/// durable on return.
pub(crate) fn write_replacement_file(path: &Path, donor: &ReplacementFile) -> Result<()> {
    let directory = Directory::open(path)?;
    let (file, size) = directory.open_file(&donor.source_file, nix::fcntl::OFlag::empty())?;
    let members = TorchFile::open(&directory, &donor.source_file, ALLOWED_GLOBALS)?.members;
    let root = donor.lost_file.strip_suffix(".pt").unwrap_or(&donor.lost_file);
    disk::unlink(&path.join(&donor.lost_file))?;
    let mut writer = TorchWriter::create_empty(
        path.join(&donor.lost_file),
        root,
        size,
        &DiskBufferPool::with_size(SMALL_WINDOW_BYTES),
    )?;
    let mut buffer = vec![0u8; CHUNK_BYTES as usize];
    for member in &members {
        let Some((_, name)) = member.name.split_once('/') else { continue };
        // `TorchWriter::finish` adds these two members
        if name == "version" || name == ".data/serialization_id" {
            continue;
        }
        writer.begin_member(name)?;
        let mut at = member.data.start;
        while at < member.data.end {
            let chunk = &mut buffer[..(member.data.end - at).min(CHUNK_BYTES) as usize];
            file.read_exact_at(chunk, at).map_err(CkptError::io("read", &path.join(&donor.source_file)))?;
            writer.write(chunk)?;
            at += chunk.len() as u64;
        }
        writer.end_member()?;
    }
    writer.finish().map(drop)
}
