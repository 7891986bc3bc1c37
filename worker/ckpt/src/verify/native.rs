//! Verifies the files of a checkpoint in launch's own (native) format against the hashes in its
//! manifest.
use super::report::{CheckpointReport, convert_error_to_damage};
use crate::codec::disk::{BLOCK_BYTES, BlockReader, BlockRequest, Directory, DiskBufferPool, stream_windows};
use crate::codec::safetensors;
use crate::error::{CkptError, Damage, DamageReason, RemoteShard, Result};
use crate::format_constants::MANIFEST_FILE;
use crate::hash::Hash;
use crate::layout::native::{FileEntry, Manifest, RemoteShards, ShardPiece, TensorEntry};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Verifies every file of the checkpoint in launch's own (native) format at `path`, except ranks'
/// files (shards) on other hosts. `named` is the step in the name of the directory, which must
/// equal the step in the manifest, or `None` if the name has no step.
pub(super) fn verify_native(path: &Path, named: Option<u64>) -> Result<CheckpointReport> {
    let mut report = CheckpointReport { path: path.to_owned(), ..CheckpointReport::default() };
    let loaded = Directory::open(path).and_then(|directory| Ok((Manifest::load(&directory)?, directory)));
    let (manifest, directory) = match loaded {
        Ok(loaded) => loaded,
        Err(e) => {
            report.problems.push(convert_error_to_damage(MANIFEST_FILE, e));
            return Ok(report);
        }
    };
    let step = manifest.facts.step;
    report.step = Some(step);
    if let Some(named) = named.filter(|&n| n != step) {
        let reason = DamageReason::StepMismatch { named, stored: step };
        report.problems.push(Damage::for_file(MANIFEST_FILE, reason));
    }
    let buffers = DiskBufferPool::default();
    let remote = RemoteShards::new(path, &manifest);
    let pieces = manifest.list_pieces_by_shard();
    for (file, pieces) in pieces.iter().enumerate() {
        let name = &manifest.files[file].name;
        if let Some(host) = remote.remote_host(file)
            && !directory.has_entry(name)?
        {
            let host = host.to_string();
            report.elsewhere.push(RemoteShard { file: name.clone(), host });
            continue;
        }
        let shard = ShardToVerify { manifest: &manifest, file, pieces };
        shard.verify(&directory, &buffers, &mut report)?;
    }
    for file in manifest.parity.iter().flatten() {
        verify_parity_file(&directory, file, &buffers, &mut report)?;
    }
    let listed: HashSet<&str> = manifest.all_files().map(|f| f.name.as_str()).collect();
    for name in directory.list_names()? {
        if name != MANIFEST_FILE && !listed.contains(name.as_str()) {
            report.problems.push(Damage::for_file(name, DamageReason::UnexpectedFile));
        }
    }
    Ok(report)
}

/// A rank's shard that is to be verified: its index in the manifest of the checkpoint, and the
/// tensor pieces in the shard according to the manifest.
struct ShardToVerify<'m> {
    manifest: &'m Manifest,
    /// Index of the shard.
    file: usize,
    /// The pieces in the shard, sorted by their byte ranges.
    pieces: &'m [ShardPiece<'m>],
}

impl ShardToVerify<'_> {
    /// Verifies the size, the blocks and the header of the rank's file, and adds its problems to
    /// `report`.
    fn verify(
        &self,
        directory: &Directory,
        buffers: &DiskBufferPool,
        report: &mut CheckpointReport,
    ) -> Result<()> {
        let entry = &self.manifest.files[self.file];
        let size = match BlockReader::open(directory, &entry.name) {
            Ok(open) => open.size(),
            Err(e) => {
                let tensors = self.list_tensors_in_range(0..u64::MAX);
                report.problems.push(Damage { tensors, ..convert_error_to_damage(&entry.name, e) });
                return Ok(());
            }
        };
        // the size mismatch reports blocks that are only partly present
        let readable = if size < entry.bytes { size / BLOCK_BYTES as u64 } else { entry.blocks.len() as u64 };
        if size != entry.bytes {
            let mut damage = describe_size_mismatch(entry, size);
            if size < entry.bytes {
                damage.tensors = self.list_tensors_in_range(readable * BLOCK_BYTES as u64..u64::MAX);
            }
            report.problems.push(damage);
        }
        let tensors_in_block = |block: u64| {
            let start = block * BLOCK_BYTES as u64;
            self.list_tensors_in_range(start..start + BLOCK_BYTES as u64)
        };
        let describe =
            |blocks: &Range<u64>, e: &CkptError| format!("blocks {}..{}: {e}", blocks.start, blocks.end);
        let first_block_is_valid =
            verify_blocks(directory, entry, readable, buffers, report, &tensors_in_block, &describe)?;
        if size == entry.bytes && first_block_is_valid {
            let problem = |reason| Damage { block: Some(0), ..Damage::for_file(&entry.name, reason) };
            report.problems.extend(self.find_header_problem(directory).map(problem));
        }
        Ok(())
    }

    /// Lists the labels (such as `exp_avg/lm_head.weight`) of the tensors that have bytes in the
    /// byte range `bytes` of this shard, in manifest order.
    fn list_tensors_in_range(&self, bytes: Range<u64>) -> Vec<String> {
        let first = self.pieces.partition_point(|p| p.byte_range().end <= bytes.start);
        let inside = self.pieces[first..].iter().take_while(|p| p.byte_range().start < bytes.end);
        let tensors: BTreeMap<usize, &TensorEntry> = inside.map(|p| (p.index, p.tensor)).collect();
        tensors.into_values().map(TensorEntry::label).collect()
    }

    /// Compares the safetensors header of the rank's file with the manifest, and returns the first
    /// difference, or `None` if the header matches.
    fn find_header_problem(&self, directory: &Directory) -> Option<DamageReason> {
        let header = match safetensors::open_header(directory, &self.manifest.files[self.file].name) {
            Ok((header, _)) => header,
            Err(e) => return Some(convert_error_to_damage("", e).reason),
        };
        let entry = |p: &ShardPiece<'_>| (p.header_key(), (p.tensor.dtype, p.piece.count, p.byte_range()));
        let mut expected: HashMap<_, _> =
            self.pieces.iter().filter(|p| p.piece.count > 0).map(entry).collect();
        for e in &header.entries {
            let elements: u64 = e.shape.iter().product();
            if expected.remove(&e.name) != Some((e.dtype, elements, e.bytes.clone())) {
                return Some(DamageReason::HeaderMismatch { piece: e.name.clone() });
            }
        }
        expected.into_keys().next().map(|piece| DamageReason::HeaderMismatch { piece })
    }
}

/// Creates the damage report of a checkpoint file whose size, `found` bytes, differs from the size
/// in the manifest.
fn describe_size_mismatch(entry: &FileEntry, found: u64) -> Damage {
    Damage::for_file(&entry.name, DamageReason::SizeMismatch { expected: entry.bytes, found })
}

/// Verifies a parity file (XOR of the ranks' files) of a checkpoint against the hashes in the
/// manifest, and adds its problems to `report`.
fn verify_parity_file(
    directory: &Directory,
    entry: &FileEntry,
    buffers: &DiskBufferPool,
    report: &mut CheckpointReport,
) -> Result<()> {
    let damage = match directory.file_size(&entry.name) {
        Ok(Some(found)) if found == entry.bytes => None,
        Ok(Some(found)) => Some(describe_size_mismatch(entry, found)),
        Ok(None) => Some(Damage::for_file(&entry.name, DamageReason::FileMissing)),
        Err(e) => Some(convert_error_to_damage(&entry.name, e)),
    };
    if damage.is_some() {
        report.problems.extend(damage);
        return Ok(());
    }
    let readable = entry.blocks.len() as u64;
    verify_blocks(directory, entry, readable, buffers, report, &|_| Vec::new(), &|_, e| e.to_string())
        .map(drop)
}

/// Verifies the blocks 0 to `readable` − 1 (1 MiB each) of a file against the hashes in the
/// manifest, and adds the problems to `report`. `describe_error` makes the text of a problem from
/// the blocks that cannot be read. Blocks in holes of a sparse file are not read. Returns whether
/// the first block is valid.
fn verify_blocks(
    directory: &Directory,
    entry: &FileEntry,
    readable: u64,
    buffers: &DiskBufferPool,
    report: &mut CheckpointReport,
    tensors_in_block: &dyn Fn(u64) -> Vec<String>,
    describe_error: &dyn Fn(&Range<u64>, &CkptError) -> String,
) -> Result<bool> {
    let open = |_| BlockReader::open(directory, &entry.name);
    let readable_blocks = 0..readable;
    let stored = match open(0) {
        Ok(reader) => reader.list_data_blocks(readable_blocks),
        Err(_) => Vec::from([readable_blocks]),
    };
    let mut invalid: Vec<(u64, DamageReason)> = Vec::new();
    let holes = list_gaps(&stored, readable);
    let mut zeros = ZeroBlockHashes::default();
    for block in holes.into_iter().flatten() {
        let len = block_length(entry, block);
        report.blocks += 1;
        report.bytes = report.bytes.saturating_add(len as u64);
        if entry.blocks.get(block as usize) != Some(zeros.hash(len)) {
            invalid.push((block, DamageReason::HashMismatch));
        }
    }
    let job = |blocks: Range<u64>| BlockRequest { file: 0, size: entry.bytes, blocks };
    let jobs: Vec<BlockRequest> = stored.into_iter().map(job).collect();
    stream_windows(buffers, &jobs, open, |(job, read)| {
        let window = match read {
            Ok(window) => window,
            Err(e) => {
                invalid.push((job.blocks.start, describe_error(&job.blocks, e).into()));
                return Ok(());
            }
        };
        for (block, bytes) in job.blocks.clone().zip(window.chunks(BLOCK_BYTES)) {
            report.blocks += 1;
            report.bytes += bytes.len() as u64;
            if entry.blocks.get(block as usize) != Some(&Hash::digest(bytes)) {
                invalid.push((block, DamageReason::HashMismatch));
            }
        }
        Ok(())
    })?;
    invalid.sort_unstable_by_key(|(block, _)| *block);
    let first_block_is_valid = readable > 0 && invalid.first().is_none_or(|(block, _)| *block > 0);
    let problem = |(block, reason)| {
        let (file, tensors) = (entry.name.clone(), tensors_in_block(block));
        Damage { file, block: Some(block), tensors, reason }
    };
    report.problems.extend(invalid.into_iter().map(problem));
    Ok(first_block_is_valid)
}

/// Returns the length in bytes of the block number `block` of a file. The last block may be shorter
/// than the others.
fn block_length(entry: &FileEntry, block: u64) -> usize {
    (entry.bytes - block * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64) as usize
}

/// Returns the ranges of block numbers from 0 to `end` (exclusive) that no range in the sorted list
/// `stored` contains.
fn list_gaps(stored: &[Range<u64>], end: u64) -> Vec<Range<u64>> {
    let starts = std::iter::once(0).chain(stored.iter().map(|range| range.end));
    let ends = stored.iter().map(|range| range.start).chain([end]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
}

/// Computes the hashes of blocks of zero bytes, and remembers the latest hash, so that holes of
/// sparse files are verified without reads.
#[derive(Default)]
struct ZeroBlockHashes {
    /// The length and the hash of the last block.
    last: Option<(usize, Hash)>,
}

impl ZeroBlockHashes {
    /// Returns the hash of a block of `len` zero bytes. Computes the hash only if `len` differs
    /// from that of the previous call.
    fn hash(&mut self, len: usize) -> &Hash {
        if self.last.is_none_or(|(known, _)| known != len) {
            self.last = None;
        }
        &self.last.get_or_insert_with(|| (len, Hash::digest(&vec![0; len]))).1
    }
}
