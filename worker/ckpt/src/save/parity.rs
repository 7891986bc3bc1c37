//! Parity files, which contain the XOR of the ranks' files (shards) of a checkpoint, so that one
//! lost or damaged file can be rebuilt bit for bit.
//!
//! The parity of N shards is as long as the longest shard. Shorter shards count as padded with
//! zeros. The parity is divided into N stripes of whole blocks. Rank r computes stripe r from the
//! blocks of all shards at the positions of the stripe, and writes the stripe to the file
//! `parity-r-of-N.bin`. No rank therefore reads more than one Nth of the checkpoint. The manifest
//! has a BLAKE3 hash per block of shards and stripes. A damaged block can be rebuilt if no other
//! file is damaged at the position of this block.
use super::shard_writer::ShardReport;
use crate::codec::disk::{
    self, BLOCK_BYTES, BlockReader, BlockRequest, Directory, DiskBufferPool, FileWriter, HashMode, IoMode,
    WINDOW_BYTES, WrittenFile, stream_windows,
};
use crate::error::{CkptError, DamageReason, Result, SaveProblem};
use crate::hash::Hash;
use crate::layout::native::{FileEntry, Manifest, compute_parity_blocks_of_rank, parity_file_name};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Number of blocks of each file that are read at a time to compute parity.
const WINDOW_BLOCKS: u64 = (WINDOW_BYTES / BLOCK_BYTES) as u64;

/// Name, size and block hashes of the parity file that a rank wrote, which the rank sends to rank
/// 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParityFileReport {
    /// Rank that wrote the file.
    pub rank: u32,
    /// World size of the save.
    pub world: u32,
    /// Name of the file.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of each MiB of the file.
    pub blocks: Vec<Hash>,
}

/// Writes and syncs this rank's parity file (a share of the XOR of all ranks' checkpoint files) in
/// the hidden directory of a save. Must be called after all ranks have written their shards.
/// `shards` has one report per rank. Verifies every block that is read, so that a faulty write of a
/// shard is detected before the commit. Needs 40 MiB of memory.
///
/// # Errors
/// Fails if a report is missing, a shard differs from its report, or I/O fails.
pub fn write_parity(
    staging: &Path,
    rank: u32,
    world: u32,
    shards: &[ShardReport],
) -> Result<ParityFileReport> {
    let mut sorted: Vec<&ShardReport> = shards.iter().collect();
    sorted.sort_unstable_by_key(|s| s.rank);
    if rank >= world || !sorted.iter().map(|s| s.rank).eq(0..world) {
        return Err(CkptError::invalid_save(SaveProblem::RankReports {
            ranks: sorted.iter().map(|s| s.rank).collect(),
            world,
        }));
    }
    let directory = Directory::open(staging)?;
    let sizes: Vec<u64> = sorted.iter().map(|s| s.bytes).collect();
    let (blocks, _) = compute_parity_blocks_of_rank(&sizes, rank);
    let file = parity_file_name(rank, world);
    let mut out = FileWriter::create(staging.join(&file), IoMode::Direct, HashMode::Blocks)?;
    let jobs = order_block_reads(&sizes, blocks);
    let open = |i: usize| BlockReader::open(&directory, &sorted[i].file);
    let mut sum: Vec<u8> = Vec::new();
    let mut window = None;
    stream_windows(&DiskBufferPool::default(), &jobs, open, |(job, read)| {
        let bytes = read.map_err(|e| CkptError::invalid_save(SaveProblem::ReadBack(e.to_string())))?;
        if window.is_some_and(|w| w != job.blocks.start) {
            out.write(&sum)?;
            sum.clear();
        }
        window = Some(job.blocks.start);
        for (block, content) in job.blocks.clone().zip(bytes.chunks(BLOCK_BYTES)) {
            if sorted[job.file].blocks.get(block as usize) != Some(&Hash::digest(content)) {
                return Err(CkptError::damaged(
                    staging,
                    &sorted[job.file].file,
                    DamageReason::ReadBackMismatch { block },
                ));
            }
        }
        xor_into(&mut sum, bytes);
        Ok(())
    })?;
    out.write(&sum)?;
    let WrittenFile { bytes, blocks, .. } = out.finish()?;
    Ok(ParityFileReport { rank, world, file, bytes, blocks })
}

/// Returns the reads, in order, of the blocks `blocks` of all ranks' files (shards) for computing
/// parity: [`WINDOW_BLOCKS`] blocks of each file at a time. Reads of the same blocks of all shards
/// are adjacent. `sizes` are the sizes of the shards in bytes.
fn order_block_reads(sizes: &[u64], blocks: Range<u64>) -> Vec<BlockRequest> {
    let mut jobs = Vec::new();
    let mut start = blocks.start;
    while start < blocks.end {
        let end = (start + WINDOW_BLOCKS).min(blocks.end);
        for (file, &size) in sizes.iter().enumerate() {
            let shard_end = size.div_ceil(BLOCK_BYTES as u64).min(end);
            if start < shard_end {
                jobs.push(BlockRequest { file, size, blocks: start..shard_end });
            }
        }
        start = end;
    }
    jobs
}

/// Replaces `sum` by the XOR of `sum` and `bytes`. If `sum` is shorter than `bytes`, extends it
/// with zeros first.
fn xor_into(sum: &mut Vec<u8>, bytes: &[u8]) {
    if sum.len() < bytes.len() {
        sum.resize(bytes.len(), 0);
    }
    // Eight bytes at a time, which is faster even where the compiler does not vectorize.
    let (words, rest) = bytes.as_chunks::<8>();
    let (sum_words, sum_rest) = sum[..bytes.len()].as_chunks_mut::<8>();
    for (s, b) in sum_words.iter_mut().zip(words) {
        *s = (u64::from_ne_bytes(*s) ^ u64::from_ne_bytes(*b)).to_ne_bytes();
    }
    sum_rest.iter_mut().zip(rest).for_each(|(s, b)| *s ^= b);
}

/// Messages for the user about the files of a checkpoint that were rebuilt from parity files, and
/// about the files that were lost.
#[derive(Debug, Default)]
pub(crate) struct RebuildReport {
    pub(crate) rebuilt: Vec<String>,
    pub(crate) lost: Vec<String>,
}

/// Rebuilds damaged files of the checkpoint at `from` (in launch's own format) from its parity
/// files, and writes the rebuilt files to `to`, a copy of `from`. Removes files from `to` that do
/// not belong to the checkpoint. The report lists rebuilt, removed and lost files.
pub(crate) fn rebuild_from_parity(from: &Path, to: &Path) -> Result<RebuildReport> {
    let directory = Directory::open(from)?;
    let manifest = Manifest::load(&directory)?;
    let mut done = RebuildReport::default();
    for name in Directory::open(to)?.list_names()? {
        let known = manifest.all_files().any(|f| f.name == name);
        if !known && name != crate::format_constants::MANIFEST_FILE {
            match to.join(&name).is_dir() {
                true => disk::remove_tree(&to.join(&name))?,
                false => disk::unlink(&to.join(&name))?,
            }
            done.rebuilt.push(format!("{name}: removed, since it does not belong to the checkpoint"));
        }
    }
    let set = CheckpointFiles::open(&directory, &manifest);
    for shard in 0..manifest.files.len() {
        let read = |block| set.read_or_rebuild_block(shard, block);
        rewrite_file_if_damaged(&manifest.files[shard], set.shard_size(shard), to, &mut done, &read)?;
    }
    for (rank, entry) in manifest.parity.iter().flatten().enumerate() {
        let (blocks, _) = compute_parity_blocks_of_rank(&set.sizes, rank as u32);
        let size = set.parity.get(rank).and_then(read_file_size);
        let read = |block: u64| match set.read_parity_file_block(rank, block) {
            Some(bytes) => Some((bytes, false)),
            None => set.xor_shards(blocks.start + block, None).map(|bytes| (bytes, true)),
        };
        rewrite_file_if_damaged(entry, size, to, &mut done, &read)?;
    }
    Ok(done)
}

/// Returns the size of an open file in bytes. Returns `None` if the file is missing or its size
/// can't be read.
fn read_file_size(file: &Option<File>) -> Option<u64> {
    file.as_ref()?.metadata().ok().map(|m| m.len())
}

/// The open file handles of all shards (ranks' files) and parity files of a checkpoint. `None`
/// stands for a file that can't be opened.
struct CheckpointFiles<'m> {
    manifest: &'m Manifest,
    sizes: Vec<u64>,
    shards: Vec<Option<File>>,
    parity: Vec<Option<File>>,
}

impl<'m> CheckpointFiles<'m> {
    /// Opens all ranks' files (shards) and parity files that `manifest` lists and that can be
    /// opened.
    fn open(directory: &Directory, manifest: &'m Manifest) -> CheckpointFiles<'m> {
        let open =
            |f: &FileEntry| directory.open_file(&f.name, nix::fcntl::OFlag::empty()).ok().map(|(f, _)| f);
        CheckpointFiles {
            manifest,
            sizes: manifest.files.iter().map(|f| f.bytes).collect(),
            shards: manifest.files.iter().map(open).collect(),
            parity: manifest.parity.iter().flatten().map(open).collect(),
        }
    }

    /// Returns the actual size in bytes of the file of rank `shard`. Returns `None` if the file
    /// can't be opened.
    fn shard_size(&self, shard: usize) -> Option<u64> {
        self.shards.get(shard).and_then(read_file_size)
    }

    /// Reads a block of a rank's file (shard), or rebuilds a damaged block from the other ranks'
    /// files and the parity. Returns the block, and whether it was rebuilt. Returns `None` if the
    /// block is damaged and cannot be rebuilt.
    fn read_or_rebuild_block(&self, shard: usize, block: u64) -> Option<(Vec<u8>, bool)> {
        let entry = self.manifest.files.get(shard)?;
        if let Some(bytes) = read_intact_block(self.shards.get(shard)?.as_ref(), entry, block) {
            return Some((bytes, false));
        }
        let mut bytes = self.xor_shards(block, Some(shard))?;
        xor_into(&mut bytes, &self.read_parity_block(block)?);
        bytes.truncate(compute_block_len(entry.bytes, block));
        (entry.blocks.get(block as usize) == Some(&Hash::digest(&bytes))).then_some((bytes, true))
    }

    /// Computes the XOR of block number `block` over the shards (files) of all ranks, leaving out
    /// the shard of rank `except` if given. Returns `None` if one of these blocks is damaged.
    fn xor_shards(&self, block: u64, except: Option<usize>) -> Option<Vec<u8>> {
        let mut sum = Vec::new();
        for (i, entry) in self.manifest.files.iter().enumerate() {
            if except != Some(i) && block < entry.blocks.len() as u64 {
                xor_into(&mut sum, &read_intact_block(self.shards.get(i)?.as_ref(), entry, block)?);
            }
        }
        let longest = self.sizes.iter().copied().max().unwrap_or(0);
        sum.resize(compute_block_len(longest, block), 0);
        Some(sum)
    }

    /// Reads the parity block that is the XOR of the block number `block` of every rank's file
    /// (shard). Returns `None` if it is damaged or missing.
    fn read_parity_block(&self, block: u64) -> Option<Vec<u8>> {
        let rank = (0..self.sizes.len())
            .find(|&r| compute_parity_blocks_of_rank(&self.sizes, r as u32).0.contains(&block))?;
        self.read_parity_file_block(
            rank,
            block - compute_parity_blocks_of_rank(&self.sizes, rank as u32).0.start,
        )
    }

    /// Reads the block number `block` of the parity file of `rank`. Returns `None` if this block is
    /// damaged or missing.
    fn read_parity_file_block(&self, rank: usize, block: u64) -> Option<Vec<u8>> {
        let entry = self.manifest.parity.as_ref()?.get(rank)?;
        read_intact_block(self.parity.get(rank)?.as_ref(), entry, block)
    }
}

/// Computes the length in bytes of the block number `block` of a file of `size` bytes. Only the
/// last block may be shorter than [`BLOCK_BYTES`].
fn compute_block_len(size: u64, block: u64) -> usize {
    size.saturating_sub(block.saturating_mul(BLOCK_BYTES as u64)).min(BLOCK_BYTES as u64) as usize
}

/// Reads block number `block` of a file, and verifies the block against its hash in the manifest.
/// Returns `None` if the block can't be read or does not match its hash.
fn read_intact_block(file: Option<&File>, entry: &FileEntry, block: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0u8; compute_block_len(entry.bytes, block)];
    file?.read_exact_at(&mut bytes, block * BLOCK_BYTES as u64).ok()?;
    (entry.blocks.get(block as usize) == Some(&Hash::digest(&bytes))).then_some(bytes)
}

/// Writes a complete version of a file to the directory `to` if blocks of the file had to be
/// rebuilt or the file has the wrong size. Adds a line about the file to `done`. `size` is the size
/// of the existing file, or `None` if the file is missing. `read` returns the block with the given
/// index, and whether this block was rebuilt. If a block can't be rebuilt, reports the file as lost
/// and leaves it unchanged.
fn rewrite_file_if_damaged(
    entry: &FileEntry,
    size: Option<u64>,
    to: &Path,
    done: &mut RebuildReport,
    read: &dyn Fn(u64) -> Option<(Vec<u8>, bool)>,
) -> Result<()> {
    let count = entry.blocks.len() as u64;
    let (mut new, mut lost) = (Vec::new(), Vec::new());
    for block in 0..count {
        match read(block) {
            Some((_, true)) => new.push(block),
            Some((_, false)) => {}
            None => lost.push(block),
        }
    }
    if let Some(first) = lost.first() {
        let others = if lost.len() > 1 { format!(" and {} more", lost.len() - 1) } else { String::new() };
        done.lost.push(format!(
            "{}: cannot rebuild block {first}{others} of {count}: there is no parity, or more than one file is damaged at this block",
            entry.name
        ));
        return Ok(());
    }
    if new.is_empty() && size == Some(entry.bytes) {
        return Ok(());
    }
    let path = to.join(&entry.name);
    disk::unlink(&path)?;
    let mut out = FileWriter::create(path.clone(), IoMode::Direct, HashMode::Blocks)?;
    for block in 0..count {
        let (bytes, _) =
            read(block).ok_or_else(|| CkptError::damaged(to, &entry.name, DamageReason::Changed))?;
        out.write(&bytes)?;
    }
    let WrittenFile { bytes, blocks, .. } = out.finish()?;
    if bytes != entry.bytes || blocks != entry.blocks {
        return Err(CkptError::damaged(to, &entry.name, DamageReason::Changed));
    }
    let what = match size {
        None => "was missing".to_owned(),
        Some(size) if size != entry.bytes => format!("had {size} bytes"),
        Some(_) => "was damaged".to_owned(),
    };
    done.rebuilt.push(format!(
        "{}: {what}; {} of {count} blocks rebuilt from parity, bit for bit",
        entry.name,
        new.len()
    ));
    Ok(())
}
