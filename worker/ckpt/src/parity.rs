//! XOR parity over the shards of a checkpoint: one lost or damaged shard of N is rebuilt from the others, bit for bit.
//!
//! The parity of N shards is as long as the longest of them; shorter ones count as if zeros followed. It is cut into N
//! stripes of whole blocks, and rank r writes stripe r into its own file `parity-r-of-N.bin`, from the same stripe of every
//! shard: no rank holds or reads more than one Nth of the checkpoint. Shards and stripes have a BLAKE3 per block in the
//! manifest, so damage is rebuilt block by block: each block of which at most one shard is damaged comes back.
use crate::disk::{self, BLOCK, BlockFile, Buffers, FileWriter, Folder, Job, WINDOW, WritePath, stream};
use crate::error::{CkptError, Result};
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

/// What rank 0 needs to know of a written stripe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParityReport {
    pub rank: u32,
    pub world: u32,
    pub file: String,
    pub bytes: u64,
    /// BLAKE3 of each MiB of the file.
    pub blocks: Vec<Hash>,
}

/// Writes this rank's stripe into the folder of [`crate::Staging::path`] and makes it durable, once every shard is written.
/// `shards` are the reports of all ranks. Every block that is read is checked, so a shard that did not reach the disk as
/// it was written is found before the commit. Needs 40 MiB.
pub fn write_parity(staging: &Path, rank: u32, world: u32, shards: &[ShardReport]) -> Result<ParityReport> {
    let mut sorted: Vec<&ShardReport> = shards.iter().collect();
    sorted.sort_by_key(|s| s.rank);
    if rank >= world || !sorted.iter().map(|s| s.rank).eq(0..world) {
        return Err(CkptError::invalid(format!("parity of {} shards for a world of {world}", shards.len())));
    }
    let folder = Folder::open(staging)?;
    let sizes: Vec<u64> = sorted.iter().map(|s| s.bytes).collect();
    let (blocks, _) = stripe(&sizes, rank);
    let file = parity_name(rank, world);
    let mut out = FileWriter::create(staging.join(&file), WritePath::Direct, true)?;
    let jobs = jobs(&sizes, blocks);
    let open = |i: usize| BlockFile::open(&folder, &sorted[i].file);
    let mut sum: Vec<u8> = Vec::new();
    let mut window = None;
    stream(&Buffers::default(), &jobs, open, |(job, read)| {
        let bytes = read.map_err(|e| CkptError::invalid(format!("a shard can't be read back: {e}")))?;
        if window.is_some_and(|w| w != job.blocks.start) {
            out.write(&sum)?;
            sum.clear();
        }
        window = Some(job.blocks.start);
        for (block, content) in job.blocks.clone().zip(bytes.chunks(BLOCK)) {
            if sorted[job.file].blocks.get(block as usize) != Some(&Hash::of(content)) {
                return Err(CkptError::damaged(
                    staging,
                    &sorted[job.file].file,
                    format!(
                        "block {block} is not what was written a moment ago: the disk or its file system is at fault"
                    ),
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

/// Reads of the blocks of all shards, window by window.
fn jobs(sizes: &[u64], blocks: Range<u64>) -> Vec<Job> {
    let mut jobs = Vec::new();
    let mut start = blocks.start;
    while start < blocks.end {
        let end = (start + WINDOW_BLOCKS).min(blocks.end);
        for (file, &size) in sizes.iter().enumerate() {
            let own = size.div_ceil(BLOCK as u64).min(end);
            if start < own {
                jobs.push(Job { file, size, blocks: start..own });
            }
        }
        start = end;
    }
    jobs
}

/// `sum ^= bytes`; the sum grows to the length of the longest.
fn xor(sum: &mut Vec<u8>, bytes: &[u8]) {
    if sum.len() < bytes.len() {
        sum.resize(bytes.len(), 0);
    }
    sum.iter_mut().zip(bytes).for_each(|(s, b)| *s ^= b);
}

/// What [`rebuild`] did, one line each.
#[derive(Debug, Default)]
pub(crate) struct Rebuilt {
    pub(crate) rebuilt: Vec<String>,
    pub(crate) lost: Vec<String>,
}

/// Sets right the files of a checkpoint: what is sound of them is read from `from`, whole files are written to `to`, where
/// what belongs to no checkpoint is removed too.
pub(crate) fn rebuild(from: &Path, to: &Path) -> Result<Rebuilt> {
    let folder = Folder::open(from)?;
    let manifest = Manifest::load(&folder)?;
    let mut done = Rebuilt::default();
    for name in Folder::open(to)?.names()? {
        let known = manifest.all_files().any(|f| f.name == name);
        if !known && name != crate::manifest::MANIFEST {
            match to.join(&name).is_dir() {
                true => disk::remove_tree(&to.join(&name))?,
                false => disk::unlink(&to.join(&name))?,
            }
            done.rebuilt.push(format!("{name}, which does not belong to the checkpoint, is left out"));
        }
    }
    let set = Set::open(&folder, &manifest);
    for shard in 0..manifest.files.len() {
        let read = |block| set.shard(shard, block);
        remake(&manifest.files[shard], set.size(shard), to, &mut done, &read)?;
    }
    for (rank, entry) in manifest.parity.iter().flatten().enumerate() {
        let (blocks, _) = stripe(&set.sizes, rank as u32);
        let size = set.parity.get(rank).and_then(size_of);
        let read = |block: u64| match set.own_parity(rank, block) {
            Some(bytes) => Some((bytes, false)),
            None => set.sum_of_shards(blocks.start + block, None).map(|bytes| (bytes, true)),
        };
        remake(entry, size, to, &mut done, &read)?;
    }
    Ok(done)
}

fn size_of(file: &Option<File>) -> Option<u64> {
    file.as_ref()?.metadata().ok().map(|m| m.len())
}

/// All files of a checkpoint, as far as they are there.
struct Set<'m> {
    manifest: &'m Manifest,
    sizes: Vec<u64>,
    shards: Vec<Option<File>>,
    parity: Vec<Option<File>>,
}

impl<'m> Set<'m> {
    fn open(folder: &Folder, manifest: &'m Manifest) -> Set<'m> {
        let open = |f: &FileEntry| folder.open_file(&f.name, nix::fcntl::OFlag::empty()).ok().map(|(f, _)| f);
        Set {
            manifest,
            sizes: manifest.files.iter().map(|f| f.bytes).collect(),
            shards: manifest.files.iter().map(open).collect(),
            parity: manifest.parity.iter().flatten().map(open).collect(),
        }
    }

    fn size(&self, shard: usize) -> Option<u64> {
        self.shards.get(shard).and_then(size_of)
    }

    /// A block of a shard, and whether it had to be rebuilt; `None` when it can't be.
    fn shard(&self, shard: usize, block: u64) -> Option<(Vec<u8>, bool)> {
        let entry = self.manifest.files.get(shard)?;
        if let Some(bytes) = sound(self.shards.get(shard)?.as_ref(), entry, block) {
            return Some((bytes, false));
        }
        let mut bytes = self.sum_of_shards(block, Some(shard))?;
        xor(&mut bytes, &self.parity_of(block)?);
        bytes.truncate(length(entry.bytes, block));
        (entry.blocks.get(block as usize) == Some(&Hash::of(&bytes))).then_some((bytes, true))
    }

    /// XOR of a block of all shards but one; `None` when one of them isn't sound.
    fn sum_of_shards(&self, block: u64, but: Option<usize>) -> Option<Vec<u8>> {
        let mut sum = Vec::new();
        for (i, entry) in self.manifest.files.iter().enumerate() {
            if but != Some(i) && block < entry.blocks.len() as u64 {
                xor(&mut sum, &sound(self.shards.get(i)?.as_ref(), entry, block)?);
            }
        }
        let longest = self.sizes.iter().copied().max().unwrap_or(0);
        sum.resize(length(longest, block), 0);
        Some(sum)
    }

    /// The block of the parity for this block of the shards.
    fn parity_of(&self, block: u64) -> Option<Vec<u8>> {
        let rank = (0..self.sizes.len()).find(|&r| stripe(&self.sizes, r as u32).0.contains(&block))?;
        self.own_parity(rank, block - stripe(&self.sizes, rank as u32).0.start)
    }

    fn own_parity(&self, rank: usize, block: u64) -> Option<Vec<u8>> {
        let entry = self.manifest.parity.as_ref()?.get(rank)?;
        sound(self.parity.get(rank)?.as_ref(), entry, block)
    }
}

/// Bytes of a block of a file of `size` bytes.
fn length(size: u64, block: u64) -> usize {
    size.saturating_sub(block.saturating_mul(BLOCK as u64)).min(BLOCK as u64) as usize
}

/// A block that fits its hash.
fn sound(file: Option<&File>, entry: &FileEntry, block: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0u8; length(entry.bytes, block)];
    file?.read_exact_at(&mut bytes, block * BLOCK as u64).ok()?;
    (entry.blocks.get(block as usize) == Some(&Hash::of(&bytes))).then_some(bytes)
}

/// Writes a file anew if anything of it is wrong and all of it can be had.
fn remake(
    entry: &FileEntry,
    size: Option<u64>,
    to: &Path,
    done: &mut Rebuilt,
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
            "{}: block {first}{others} of {count} can't be rebuilt: without parity, or with more than one file damaged there, the bytes are nowhere",
            entry.name
        ));
        return Ok(());
    }
    if new.is_empty() && size == Some(entry.bytes) {
        return Ok(());
    }
    let path = to.join(&entry.name);
    disk::unlink(&path)?;
    let mut out = FileWriter::create(path.clone(), WritePath::Direct, true)?;
    for block in 0..count {
        let (bytes, _) = read(block)
            .ok_or_else(|| CkptError::damaged(to, &entry.name, "it changes while it is repaired"))?;
        out.write(&bytes)?;
    }
    let (bytes, blocks) = out.finish()?;
    if bytes != entry.bytes || blocks != entry.blocks {
        return Err(CkptError::damaged(to, &entry.name, "it changes while it is repaired"));
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
