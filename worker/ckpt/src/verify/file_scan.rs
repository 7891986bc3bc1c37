//! Checks the files of a directory one by one, even if the directory cannot be opened as a
//! checkpoint. Verifies the CRC-32s of zip containers, the headers of safetensors files and the
//! content of files with random generator states.
use crate::codec::disk::{Directory, FILES_MAX, path_exists};
use crate::codec::{safetensors, torch_legacy, zip};
use crate::error::{CkptError, Damage, DamageReason, Result};
use crate::rng_files::rank_files::check_rng_file;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Number of levels of subdirectories whose files are checked if a checkpoint cannot be opened.
pub(crate) const SCAN_DEPTH_MAX: u32 = 3;
/// Number of bytes of a zip member that are read and checked at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// The suffixes of the names of files that torch writes as zip containers.
const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".pkl"];

/// The result of checking the files of a directory one by one, without opening them as a
/// checkpoint.
#[derive(Default)]
pub(crate) struct ScanReport {
    /// Total size of all checked files in bytes.
    pub(crate) bytes: u64,
    /// Number of checked files plus the number of checked zip members in these files.
    pub(crate) members: u64,
    /// The damage of each damaged file.
    pub(crate) problems: Vec<Damage>,
    /// Names of files without checksums, of which at most the structure was checked.
    pub(crate) unchecked: Vec<String>,
}

/// Checks zip CRC-32s, safetensors headers and random generator states of each file with a known
/// suffix in the directory `path` and in `depth` levels of subdirectories. Skips the files for
/// which `is_known` is true. Names in the result are relative to `path`.
///
/// # Errors
/// Fails if a directory cannot be listed, or if there are more than [`FILES_MAX`] files with a
/// known suffix, because a check of only some files would report damaged checkpoints as intact. A
/// file that cannot be read is a problem in the report.
pub(crate) fn check_file_contents_in_directory(
    path: &Path,
    is_known: &dyn Fn(&str) -> bool,
    depth: u32,
) -> Result<ScanReport> {
    let directory = Directory::open(path)?;
    let mut report = ScanReport::default();
    let files = list_checkable_files(&directory, depth, FILES_MAX)?;
    for name in files.iter().filter(|n| !is_known(n)) {
        let checked = match check_and_count_file(&directory, name, &mut report) {
            Ok(None) => check_rng_file(&directory, name).map(|()| None),
            other => other,
        };
        let problem = match checked {
            Ok(problem) => problem,
            Err(CkptError::Damaged { damage, .. }) => Some(damage.reason),
            Err(e) => Some(e.to_string().into()),
        };
        report.problems.extend(problem.map(|reason| Damage::for_file(name.as_str(), reason)));
    }
    Ok(report)
}

/// Lists the files with a known suffix in `directory` and in `depth` levels of subdirectories, with
/// names relative to `directory`. Skips subdirectories that are DeepSpeed checkpoints.
///
/// # Errors
/// Fails if a directory cannot be listed, or if there are more than `limit` files.
fn list_checkable_files(directory: &Directory, depth: u32, limit: usize) -> Result<Vec<String>> {
    let mut files = Vec::new();
    append_checkable_files(directory, "", depth, limit, &mut files)?;
    Ok(files)
}

/// Appends the names of the files with a known suffix below `directory/inside` to `files`, relative
/// to `directory`. `inside` is empty for the directory itself. The other parameters and errors are
/// those of [`list_checkable_files`].
fn append_checkable_files(
    directory: &Directory,
    inside: &str,
    depth: u32,
    limit: usize,
    files: &mut Vec<String>,
) -> Result<()> {
    let names =
        if inside.is_empty() { directory.list_names()? } else { directory.list_subdirectory(inside)? };
    for name in names {
        let name = if inside.is_empty() { name } else { format!("{inside}/{name}") };
        if directory.has_directory(&name)? {
            // another checkpoint in the same directory is verified separately
            let is_checkpoint = path_exists(&directory.path().join(&name).join("latest"));
            if depth > 0 && !is_checkpoint {
                append_checkable_files(directory, &name, depth - 1, limit, files)?;
            }
        } else if name.ends_with(".safetensors") || TORCH_SUFFIXES.iter().any(|end| name.ends_with(end)) {
            if files.len() >= limit {
                return Err(CkptError::TooManyFiles { path: directory.path().to_owned(), limit });
            }
            files.push(name);
        }
    }
    Ok(())
}

/// Checks the content of one file: every member of a zip container, or the header of a safetensors
/// file. Returns the damage, or `None` if the file is valid.
///
/// # Errors
/// Fails if the file cannot be opened or read.
pub(crate) fn check_file(directory: &Directory, name: &str) -> Result<Option<DamageReason>> {
    match check_and_count_file(directory, name, &mut ScanReport::default()) {
        Err(CkptError::Damaged { damage, .. }) => Ok(Some(damage.reason)),
        other => other,
    }
}

/// Checks the content of one file, and adds the file, its zip members and its size in bytes to the
/// counts in `report`. Returns the damage, or `None` if the file is valid. Bare pickles and legacy
/// torch files have no checksums and always pass.
fn check_and_count_file(
    directory: &Directory,
    name: &str,
    report: &mut ScanReport,
) -> Result<Option<DamageReason>> {
    let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
    report.bytes = report.bytes.saturating_add(size);
    report.members += 1;
    let read_at = |at: u64, out: &mut [u8]| file.read_exact_at(out, at);
    if name.ends_with(".safetensors") {
        report.unchecked.push(name.to_owned());
        return Ok(safetensors::read_header(size, read_at).err().map(Into::into));
    }
    let mut magic = [0u8; torch_legacy::MAGIC.len()];
    let begins = size >= magic.len() as u64 && file.read_exact_at(&mut magic, 0).is_ok();
    // bare pickles and the legacy format have no checksums
    if begins && (magic == torch_legacy::MAGIC || (magic[0] == 0x80 && (2..=5).contains(&magic[1]))) {
        report.unchecked.push(name.to_owned());
        return Ok(None);
    }
    let members = match zip::read_members(size, read_at) {
        Ok(members) => members,
        Err(error) => return Ok(Some(error.into())),
    };
    let mut buffer = vec![0u8; CHUNK_BYTES];
    for member in &members {
        report.members += 1;
        let matches = member.matches_crc(&file, &mut buffer);
        if !matches.map_err(CkptError::io("read", &directory.path().join(name)))? {
            return Ok(Some(DamageReason::CrcMismatch { member: member.name.clone() }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diagnostic::{Category, Diagnostic, codes::checkpoint as codes};
    use std::fs;

    #[test]
    fn a_directory_with_more_files_than_the_limit_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("inner")).expect("a directory");
        for name in ["a.bin", "inner/b.pt", "notes.txt"] {
            fs::write(dir.path().join(name), "x").expect("a file");
        }
        let directory = Directory::open(dir.path()).expect("a directory");
        let names = list_checkable_files(&directory, 1, 2).expect("two files");
        assert_eq!(names, ["a.bin", "inner/b.pt"]);
        let error = Diagnostic::from(list_checkable_files(&directory, 1, 1).expect_err("two files"));
        assert_eq!((error.code(), error.category()), (codes::CHECKPOINT_FILES_TOO_MANY, Category::Failed));
        assert_eq!(error.field("limit"), Some(&1.into()));
        assert_eq!(error.help().len(), 1);
    }
}
