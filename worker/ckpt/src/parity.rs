//! XOR parity over the shards of a checkpoint. One lost or damaged shard of N is rebuilt bit for
//! bit from the others.
//!
//! The parity of N shards is as long as the longest shard; shorter shards are padded with zeros.
//! The parity is split into N stripes of whole blocks. Rank r writes stripe r to the file
//! `parity-r-of-N.bin`, from the same stripe of every shard, so that no rank reads more than one
//! Nth of the checkpoint. The manifest has a BLAKE3 hash per block of shards and stripes. Each
//! block that is damaged in at most one file is rebuilt.
use crate::disk::{self, BLOCK, BlockFile, Buffers, Directory, FileWriter, IoMode, ReadJob, WINDOW, stream};
use crate::error::{CkptError, DamageReason, Result, SaveProblem};
use crate::hash::Hash;
use crate::manifest::{FileEntry, Manifest};
use crate::save::ShardReport;
use crate::stripes::{parity_name, stripe};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Blocks per window.
const WINDOW_BLOCKS: u64 = (WINDOW / BLOCK) as u64;

/// Describes a written parity file to rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParityReport {
    /// Rank that wrote the file.
    pub rank: u32,
    /// World size.
    pub world: u32,
    /// Name of the file.
    pub file: String,
    /// Size of the file.
    pub bytes: u64,
    /// BLAKE3 hash of each MiB of the file.
    pub blocks: Vec<Hash>,
}

/// Writes this rank's parity file to the directory [`crate::Staging::path`] and makes it durable.
/// Must be called after every shard is written; `shards` are the reports of all ranks. Every block
/// that is read is verified, so that a faulty write of a shard is detected before the commit. Needs
/// 40 MiB.
pub fn write_parity(staging: &Path, rank: u32, world: u32, shards: &[ShardReport]) -> Result<ParityReport> {
    let mut sorted: Vec<&ShardReport> = shards.iter().collect();
    sorted.sort_by_key(|s| s.rank);
    if rank >= world || !sorted.iter().map(|s| s.rank).eq(0..world) {
        return Err(CkptError::invalid_save(SaveProblem::RankReports {
            ranks: sorted.iter().map(|s| s.rank).collect(),
            world,
        }));
    }
    let directory = Directory::open(staging)?;
    let sizes: Vec<u64> = sorted.iter().map(|s| s.bytes).collect();
    let (blocks, _) = stripe(&sizes, rank);
    let file = parity_name(rank, world);
    let mut out = FileWriter::create(staging.join(&file), IoMode::Direct, true)?;
    let jobs = jobs(&sizes, blocks);
    let open = |i: usize| BlockFile::open(&directory, &sorted[i].file);
    let mut sum: Vec<u8> = Vec::new();
    let mut window = None;
    stream(&Buffers::default(), &jobs, open, |(job, read)| {
        let bytes = read.map_err(|e| CkptError::invalid_save(SaveProblem::ReadBack(e.to_string())))?;
        if window.is_some_and(|w| w != job.blocks.start) {
            out.write(&sum)?;
            sum.clear();
        }
        window = Some(job.blocks.start);
        for (block, content) in job.blocks.clone().zip(bytes.chunks(BLOCK)) {
            if sorted[job.file].blocks.get(block as usize) != Some(&Hash::digest(content)) {
                return Err(CkptError::damaged(
                    staging,
                    &sorted[job.file].file,
                    DamageReason::ReadBackMismatch { block },
                ));
            }
        }
        xor(&mut sum, bytes);
        Ok(())
    })?;
    out.write(&sum)?;
    let (bytes, blocks) = out.finish()?;
    Ok(ParityReport { rank, world, file, bytes, blocks })
}

/// The reads of these blocks of all shards, window by window.
fn jobs(sizes: &[u64], blocks: Range<u64>) -> Vec<ReadJob> {
    let mut jobs = Vec::new();
    let mut start = blocks.start;
    while start < blocks.end {
        let end = (start + WINDOW_BLOCKS).min(blocks.end);
        for (file, &size) in sizes.iter().enumerate() {
            let shard_end = size.div_ceil(BLOCK as u64).min(end);
            if start < shard_end {
                jobs.push(ReadJob { file, size, blocks: start..shard_end });
            }
        }
        start = end;
    }
    jobs
}

/// Computes `sum ^= bytes`; the sum grows to the longest length.
fn xor(sum: &mut Vec<u8>, bytes: &[u8]) {
    if sum.len() < bytes.len() {
        sum.resize(bytes.len(), 0);
    }
    sum.iter_mut().zip(bytes).for_each(|(s, b)| *s ^= b);
}

/// What [`rebuild`] did, one line per file.
#[derive(Debug, Default)]
pub(crate) struct RebuildReport {
    pub(crate) rebuilt: Vec<String>,
    pub(crate) lost: Vec<String>,
}

/// Rebuilds the damaged files of a checkpoint: reads intact blocks from `from` and writes complete
/// files to `to`. Removes files in `to` that do not belong to the checkpoint.
pub(crate) fn rebuild(from: &Path, to: &Path) -> Result<RebuildReport> {
    let directory = Directory::open(from)?;
    let manifest = Manifest::load(&directory)?;
    let mut done = RebuildReport::default();
    for name in Directory::open(to)?.names()? {
        let known = manifest.all_files().any(|f| f.name == name);
        if !known && name != crate::manifest::MANIFEST {
            match to.join(&name).is_dir() {
                true => disk::remove_tree(&to.join(&name))?,
                false => disk::unlink(&to.join(&name))?,
            }
            done.rebuilt.push(format!("{name}: removed, since it does not belong to the checkpoint"));
        }
    }
    let set = FileSet::open(&directory, &manifest);
    for shard in 0..manifest.files.len() {
        let read = |block| set.shard(shard, block);
        rewrite_if_damaged(&manifest.files[shard], set.size(shard), to, &mut done, &read)?;
    }
    for (rank, entry) in manifest.parity.iter().flatten().enumerate() {
        let (blocks, _) = stripe(&set.sizes, rank as u32);
        let size = set.parity.get(rank).and_then(size_of);
        let read = |block: u64| match set.stripe_block(rank, block) {
            Some(bytes) => Some((bytes, false)),
            None => set.sum_of_shards(blocks.start + block, None).map(|bytes| (bytes, true)),
        };
        rewrite_if_damaged(entry, size, to, &mut done, &read)?;
    }
    Ok(done)
}

fn size_of(file: &Option<File>) -> Option<u64> {
    file.as_ref()?.metadata().ok().map(|m| m.len())
}

/// The files of a checkpoint that exist.
struct FileSet<'m> {
    manifest: &'m Manifest,
    sizes: Vec<u64>,
    shards: Vec<Option<File>>,
    parity: Vec<Option<File>>,
}

impl<'m> FileSet<'m> {
    fn open(directory: &Directory, manifest: &'m Manifest) -> FileSet<'m> {
        let open =
            |f: &FileEntry| directory.open_file(&f.name, nix::fcntl::OFlag::empty()).ok().map(|(f, _)| f);
        FileSet {
            manifest,
            sizes: manifest.files.iter().map(|f| f.bytes).collect(),
            shards: manifest.files.iter().map(open).collect(),
            parity: manifest.parity.iter().flatten().map(open).collect(),
        }
    }

    fn size(&self, shard: usize) -> Option<u64> {
        self.shards.get(shard).and_then(size_of)
    }

    /// A block of a shard, and whether it was rebuilt; `None` when it cannot be rebuilt.
    fn shard(&self, shard: usize, block: u64) -> Option<(Vec<u8>, bool)> {
        let entry = self.manifest.files.get(shard)?;
        if let Some(bytes) = intact_block(self.shards.get(shard)?.as_ref(), entry, block) {
            return Some((bytes, false));
        }
        let mut bytes = self.sum_of_shards(block, Some(shard))?;
        xor(&mut bytes, &self.parity_block(block)?);
        bytes.truncate(block_len(entry.bytes, block));
        (entry.blocks.get(block as usize) == Some(&Hash::digest(&bytes))).then_some((bytes, true))
    }

    /// XOR of a block of all shards except one; `None` when one of them is damaged.
    fn sum_of_shards(&self, block: u64, except: Option<usize>) -> Option<Vec<u8>> {
        let mut sum = Vec::new();
        for (i, entry) in self.manifest.files.iter().enumerate() {
            if except != Some(i) && block < entry.blocks.len() as u64 {
                xor(&mut sum, &intact_block(self.shards.get(i)?.as_ref(), entry, block)?);
            }
        }
        let longest = self.sizes.iter().copied().max().unwrap_or(0);
        sum.resize(block_len(longest, block), 0);
        Some(sum)
    }

    /// The parity of this block of the shards.
    fn parity_block(&self, block: u64) -> Option<Vec<u8>> {
        let rank = (0..self.sizes.len()).find(|&r| stripe(&self.sizes, r as u32).0.contains(&block))?;
        self.stripe_block(rank, block - stripe(&self.sizes, rank as u32).0.start)
    }

    fn stripe_block(&self, rank: usize, block: u64) -> Option<Vec<u8>> {
        let entry = self.manifest.parity.as_ref()?.get(rank)?;
        intact_block(self.parity.get(rank)?.as_ref(), entry, block)
    }
}

/// Length of a block of a file of `size` bytes.
fn block_len(size: u64, block: u64) -> usize {
    size.saturating_sub(block.saturating_mul(BLOCK as u64)).min(BLOCK as u64) as usize
}

/// Reads a block that matches its hash; `None` otherwise.
fn intact_block(file: Option<&File>, entry: &FileEntry, block: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0u8; block_len(entry.bytes, block)];
    file?.read_exact_at(&mut bytes, block * BLOCK as u64).ok()?;
    (entry.blocks.get(block as usize) == Some(&Hash::digest(&bytes))).then_some(bytes)
}

/// Rewrites a file if it is damaged and every block is available.
fn rewrite_if_damaged(
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
    let mut out = FileWriter::create(path.clone(), IoMode::Direct, true)?;
    for block in 0..count {
        let (bytes, _) =
            read(block).ok_or_else(|| CkptError::damaged(to, &entry.name, DamageReason::Changed))?;
        out.write(&bytes)?;
    }
    let (bytes, blocks) = out.finish()?;
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
