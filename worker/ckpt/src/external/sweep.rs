//! Looks at every file of a checkpoint by itself, whatever the checkpoint as a whole is: containers and their CRC-32.
use crate::disk::{Folder, exists};
use crate::error::{CkptError, Damage, Result};
use crate::formats::torch_file::crc_flaw;
use crate::formats::{legacy, safetensors, zip};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Deepest folder that is looked into when a checkpoint doesn't open.
pub(crate) const DEPTH: u32 = 3;
/// Most files.
const FILES_MAX: usize = 1 << 20;
/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
/// Endings of files that torch writes as containers.
const TORCH: [&str; 4] = [".pt", ".pth", ".bin", ".pkl"];

/// What was found.
#[derive(Default)]
pub(crate) struct Swept {
    pub(crate) bytes: u64,
    pub(crate) members: u64,
    pub(crate) problems: Vec<Damage>,
}

/// Sweeps the folder at `path` and `depth` levels of those in it, except the files in `known` (named from `path` on).
pub(crate) fn sweep(path: &Path, known: &BTreeSet<String>, depth: u32) -> Result<Swept> {
    let folder = Folder::open(path)?;
    let mut swept = Swept::default();
    let mut files = Vec::new();
    list(&folder, "", depth, &mut files)?;
    for name in files.iter().filter(|n| !known.contains(*n)) {
        let problem = match one(&folder, name, &mut swept) {
            Ok(problem) => problem,
            Err(CkptError::Damaged { damage, .. }) => Some(damage.why),
            Err(e) => Some(e.to_string()),
        };
        swept.problems.extend(problem.map(|why| Damage {
            file: name.clone(),
            block: None,
            tensors: Vec::new(),
            why,
        }));
    }
    Ok(swept)
}

/// Names of the files below a folder that have a form that is known.
fn list(folder: &Folder, inside: &str, depth: u32, files: &mut Vec<String>) -> Result<()> {
    let names = if inside.is_empty() { folder.names()? } else { folder.names_in(inside)? };
    for name in names {
        let name = if inside.is_empty() { name } else { format!("{inside}/{name}") };
        if files.len() >= FILES_MAX {
            return Ok(());
        }
        if folder.has_folder(&name)? {
            // another checkpoint of a directory of them is verified by itself
            let own = exists(&folder.path().join(&name).join("latest"));
            if depth > 0 && !own {
                list(folder, &name, depth - 1, files)?;
            }
        } else if name.ends_with(".safetensors") || TORCH.iter().any(|end| name.ends_with(end)) {
            files.push(name);
        }
    }
    Ok(())
}

/// What is wrong with a file by itself, every byte of it read.
pub(crate) fn flaw(folder: &Folder, name: &str) -> Result<Option<String>> {
    match one(folder, name, &mut Swept::default()) {
        Err(CkptError::Damaged { damage, .. }) => Ok(Some(damage.why)),
        other => other,
    }
}

fn one(folder: &Folder, name: &str, swept: &mut Swept) -> Result<Option<String>> {
    let (file, size) = folder.open_file(name, nix::fcntl::OFlag::empty())?;
    swept.bytes += size;
    swept.members += 1;
    let read_at = |at: u64, out: &mut [u8]| file.read_exact_at(out, at);
    if name.ends_with(".safetensors") {
        return Ok(safetensors::read_header(size, read_at).err());
    }
    let mut magic = [0u8; legacy::MAGIC.len()];
    let begins = size >= magic.len() as u64 && file.read_exact_at(&mut magic, 0).is_ok();
    // a pickle alone, as of other programs, and the legacy form have nothing to check
    if begins && (magic == legacy::MAGIC || (magic[0] == 0x80 && (2..=5).contains(&magic[1]))) {
        return Ok(None);
    }
    let members = match zip::members(size, read_at) {
        Ok(members) => members,
        Err(why) => return Ok(Some(why)),
    };
    let mut buffer = vec![0u8; CHUNK];
    for member in &members {
        swept.members += 1;
        if !fits(&file, member, &mut buffer).map_err(CkptError::io("read", &folder.path().join(name)))? {
            return Ok(Some(crc_flaw(&member.name)));
        }
    }
    Ok(None)
}

fn fits(file: &File, member: &zip::Member, buffer: &mut [u8]) -> std::io::Result<bool> {
    let mut hasher = crc32fast::Hasher::new();
    let mut at = member.data.start;
    while at < member.data.end {
        let len = (member.data.end - at).min(buffer.len() as u64) as usize;
        file.read_exact_at(&mut buffer[..len], at)?;
        hasher.update(&buffer[..len]);
        at += len as u64;
    }
    Ok(member.crc.is_none_or(|crc| hasher.finalize() == crc))
}
