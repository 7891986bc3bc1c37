//! Verifies the output of `launch ckpt gather` and `launch ckpt convert` against the BLAKE3 hashes
//! that launch recorded when it wrote the files.
use super::report::convert_error_to_damage;
use crate::codec::disk::{Directory, OffsetReader, ReadBuffers, hash_open_file};
use crate::error::{CkptError, Damage, DamageReason, Result};
use crate::parallel;
use crate::save::output_record::{CONVERT_RECORD_KIND, GATHER_RECORD_KIND, OutputRecord, RecordedContent};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Limit on the number of threads that verify hashes. More threads would only wait for the disk.
const THREADS_MAX: usize = 16;
/// Maximum number of bytes in holes of sparse files that are hashed in order to verify one output
/// directory. Without the limit, a file that takes little space on the disk could take very long to
/// hash.
const HOLE_BYTES_MAX: u64 = 16 << 30;

/// Result of verifying the output of `launch ckpt gather` and `launch ckpt convert` against the
/// hashes that launch recorded when it wrote the files.
#[derive(Default)]
pub(super) struct RecordedFileResults {
    /// Device and inode number of every file that matches its hash.
    verified: HashSet<(u64, u64)>,
    /// Total size of the files in `verified`, in bytes.
    pub(super) bytes: u64,
    pub(super) problems: Vec<Damage>,
    pub(super) warnings: Vec<String>,
}

/// The result of verifying one file against its recorded hash.
enum FileCheck {
    /// The file matches its hash. The fields identify the file.
    Match((u64, u64)),
    Damaged(Damage),
    /// The file was not hashed, because its holes have too many bytes.
    TooSparse,
}

impl RecordedFileResults {
    /// Returns true if the file at `path` was found to match its recorded hash.
    pub(super) fn is_verified(&self, path: &Path) -> bool {
        !self.verified.is_empty()
            && path.symlink_metadata().is_ok_and(|m| self.verified.contains(&(m.dev(), m.ino())))
    }

    /// Returns the number of files that were found to match their recorded hashes.
    pub(super) fn count_verified(&self) -> u64 {
        self.verified.len() as u64
    }
}

/// Verifies the output of `launch ckpt gather` and `launch ckpt convert` in the directories `roots`
/// against the hashes that launch recorded when it wrote the files. Skips those for which `is_due`
/// is false.
///
/// # Errors
/// Fails if a directory cannot be opened. A damaged record or file is a problem in the result.
pub(super) fn verify_recorded_files(
    roots: &BTreeSet<&Path>,
    is_due: &dyn Fn(&str) -> bool,
) -> Result<RecordedFileResults> {
    let mut found = RecordedFileResults::default();
    for root in roots {
        let directory = Directory::open(root)?;
        for marker in [GATHER_RECORD_KIND, CONVERT_RECORD_KIND] {
            match marker.read_record(&directory) {
                Ok(None) => {}
                Ok(Some(record)) => {
                    verify_record(&directory, &record, (marker.file, is_due), &mut found);
                }
                Err(e) => found.problems.push(convert_error_to_damage(marker.file, e)),
            }
        }
    }
    Ok(found)
}

/// Verifies the files in `directory` that `record` (a list of written files) names, and adds the
/// results to `found`. `file` is the name of the record's file. Skips files for which `is_due` is
/// false.
fn verify_record(
    directory: &Directory,
    record: &OutputRecord,
    (file, is_due): (&'static str, &dyn Fn(&str) -> bool),
    found: &mut RecordedFileResults,
) {
    let absent = find_absent_directories(directory, record);
    for (name, count) in &absent {
        found.warnings.push(format!("{file} lists {count} files in {name}, which does not exist"));
    }
    let is_present = |name: &str| !name.split_once('/').is_some_and(|(first, _)| absent.contains_key(first));
    let due: Vec<(&str, RecordedContent)> = record
        .files
        .iter()
        .filter(|f| is_due(&f.name) && is_present(&f.name))
        .filter_map(|f| Some((f.name.as_str(), f.content?)))
        .collect();
    let (scratch, holes_left) = (ReadBuffers::default(), AtomicU64::new(HOLE_BYTES_MAX));
    let check = |_: &mut (), i: usize| {
        let (name, content) = due[i];
        let checked = verify_file(directory, name, content, file, (&scratch, &holes_left));
        Ok(checked.unwrap_or_else(|e| FileCheck::Damaged(convert_error_to_damage(name, e))))
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() + 1).min(THREADS_MAX);
    let checked = parallel::map_indices(threads, due.len(), || (), check);
    for (result, (name, content)) in checked.into_iter().flatten().zip(&due) {
        match result {
            FileCheck::Match(identity) => {
                found.verified.insert(identity);
                found.bytes = found.bytes.saturating_add(content.bytes);
            }
            FileCheck::Damaged(damage) => found.problems.push(damage),
            FileCheck::TooSparse => {
                let limit = HOLE_BYTES_MAX >> 30;
                let line =
                    format!("{name} was not hashed, since more than {limit} GiB of the files are holes");
                found.warnings.push(line);
            }
        }
    }
}

/// Finds the subdirectories that are missing in an output directory although launch's list of
/// written files (record) names files in these subdirectories. Returns the number of recorded files
/// of each. A program that continues the training may have removed an old state.
fn find_absent_directories<'r>(directory: &Directory, record: &'r OutputRecord) -> BTreeMap<&'r str, usize> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for file in &record.files {
        if let Some((first, _)) = file.name.split_once('/') {
            *counts.entry(first).or_default() += 1;
        }
    }
    counts.retain(|name, _| directory.has_entry(name).is_ok_and(|exists| !exists));
    counts
}

/// Verifies the file `name` against the size and the hash that launch recorded when it wrote the
/// file.
fn verify_file(
    directory: &Directory,
    name: &str,
    content: RecordedContent,
    record: &'static str,
    (scratch, holes_left): (&ReadBuffers, &AtomicU64),
) -> Result<FileCheck> {
    let damaged = |reason: DamageReason| Ok(FileCheck::Damaged(Damage::for_file(name, reason)));
    let (mut reader, size) = OffsetReader::open(directory, name, scratch)?;
    if size != content.bytes {
        return damaged(DamageReason::SizeMismatch { expected: content.bytes, found: size });
    }
    let holes = reader.count_hole_bytes(0..size);
    let take = |left: u64| left.checked_sub(holes);
    if holes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
        return Ok(FileCheck::TooSparse);
    }
    match hash_open_file(&mut reader, size)? == content.blake3 {
        true => {
            let path = directory.path().join(name);
            let metadata = path.symlink_metadata().map_err(CkptError::io("look at", &path))?;
            Ok(FileCheck::Match((metadata.dev(), metadata.ino())))
        }
        false => damaged(DamageReason::RecordMismatch { record }),
    }
}
