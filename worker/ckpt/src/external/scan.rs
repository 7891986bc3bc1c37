//! Checks every file of a directory on its own: zip containers with their CRC-32s, and safetensors
//! headers. Does not depend on the layout of the checkpoint.
use crate::disk::{Directory, exists};
use crate::error::{CkptError, Damage, DamageReason, Result};
use crate::formats::{safetensors, torch_legacy, zip};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Depth of the scan when a checkpoint cannot be opened.
pub(crate) const DEPTH: u32 = 3;
/// Limit on the number of files.
const FILES_MAX: usize = 1 << 20;
/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
/// Suffixes of files that torch writes as zip containers.
const TORCH: [&str; 4] = [".pt", ".pth", ".bin", ".pkl"];

/// The result of a scan.
#[derive(Default)]
pub(crate) struct ScanReport {
    pub(crate) bytes: u64,
    pub(crate) members: u64,
    pub(crate) problems: Vec<Damage>,
}

/// Scans the directory at `path` and `depth` levels of subdirectories, except the files in `known`
/// (relative to `path`).
pub(crate) fn scan_directory(path: &Path, known: &BTreeSet<String>, depth: u32) -> Result<ScanReport> {
    let directory = Directory::open(path)?;
    let mut report = ScanReport::default();
    let mut files = Vec::new();
    list_files(&directory, "", depth, &mut files)?;
    for name in files.iter().filter(|n| !known.contains(*n)) {
        let problem = match scan_file(&directory, name, &mut report) {
            Ok(problem) => problem,
            Err(CkptError::Damaged { damage, .. }) => Some(damage.reason),
            Err(e) => Some(e.to_string().into()),
        };
        report.problems.extend(problem.map(|reason| Damage::of_file(name.as_str(), reason)));
    }
    Ok(report)
}

/// Lists the files with a known suffix.
fn list_files(directory: &Directory, inside: &str, depth: u32, files: &mut Vec<String>) -> Result<()> {
    let names = if inside.is_empty() { directory.names()? } else { directory.names_in(inside)? };
    for name in names {
        let name = if inside.is_empty() { name } else { format!("{inside}/{name}") };
        if files.len() >= FILES_MAX {
            return Ok(());
        }
        if directory.has_directory(&name)? {
            // another checkpoint in the same directory is verified separately
            let is_checkpoint = exists(&directory.path().join(&name).join("latest"));
            if depth > 0 && !is_checkpoint {
                list_files(directory, &name, depth - 1, files)?;
            }
        } else if name.ends_with(".safetensors") || TORCH.iter().any(|end| name.ends_with(end)) {
            files.push(name);
        }
    }
    Ok(())
}

/// Reads every byte of a file and checks it on its own; `None` when it is valid.
pub(crate) fn check_file(directory: &Directory, name: &str) -> Result<Option<DamageReason>> {
    match scan_file(directory, name, &mut ScanReport::default()) {
        Err(CkptError::Damaged { damage, .. }) => Ok(Some(damage.reason)),
        other => other,
    }
}

fn scan_file(directory: &Directory, name: &str, report: &mut ScanReport) -> Result<Option<DamageReason>> {
    let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
    report.bytes += size;
    report.members += 1;
    let read_at = |at: u64, out: &mut [u8]| file.read_exact_at(out, at);
    if name.ends_with(".safetensors") {
        return Ok(safetensors::read_header(size, read_at).err().map(Into::into));
    }
    let mut magic = [0u8; torch_legacy::MAGIC.len()];
    let begins = size >= magic.len() as u64 && file.read_exact_at(&mut magic, 0).is_ok();
    // bare pickles and the legacy format have no checksums
    if begins && (magic == torch_legacy::MAGIC || (magic[0] == 0x80 && (2..=5).contains(&magic[1]))) {
        return Ok(None);
    }
    let members = match zip::members(size, read_at) {
        Ok(members) => members,
        Err(error) => return Ok(Some(error.into())),
    };
    let mut buffer = vec![0u8; CHUNK];
    for member in &members {
        report.members += 1;
        if !matches_crc(&file, member, &mut buffer)
            .map_err(CkptError::io("read", &directory.path().join(name)))?
        {
            return Ok(Some(DamageReason::CrcMismatch { member: member.name.clone() }));
        }
    }
    Ok(None)
}

fn matches_crc(file: &File, member: &zip::Member, buffer: &mut [u8]) -> std::io::Result<bool> {
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
