//! [`MemoryStore`]: keeps copies of ranks' shards of the training state in the memory of a host,
//! where the copies remain when the workers exit.
//!
//! All workers of a host write to one memory file (memfd), which their agent holds open. The file
//! consists of regions with a distance of [`REGION_BYTES`]. Each rank has two regions, which its
//! copies use in turn, so that a kill during a copy leaves the previous copy whole. Regions without
//! a copy are holes, which need no memory.
//!
//! A region begins with a header of one page. The shard follows, and then the description of the
//! copy as JSON. A copy is written in the order shard, description, header, so that the header of
//! an incomplete copy is not valid.
use super::commit::assemble_manifest;
use super::shard_writer::{ShardPlan, ShardReport, TensorPiece};
use crate::catalog::RunFacts;
use crate::codec::disk::{BLOCK_BYTES, find_data};
use crate::codec::json;
use crate::error::{CkptError, DamageReason, Result};
use crate::fault_points::pass_fault_point;
use crate::format_constants::MEMORY_STORE_NAME;
use crate::hash::Hash;
use crate::layout::native::{Checkpoint, MemoryShard, shard_file_name};
use crate::parallel::map_indices;
use nix::fcntl::{FallocateFlags, fallocate};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Size in bytes of each region of a host's memory file, in which one copy of a rank's training
/// state is stored.
const REGION_BYTES: u64 = 1 << 40;
/// Size in bytes of the header at the beginning of a memory copy, a copy of a rank's training state
/// in host memory.
pub const COPY_HEADER_BYTES: u64 = 4096;
/// Maximum size in bytes of the JSON that describes a memory copy, a copy of a rank's training
/// state in host memory.
const DESCRIPTION_BYTES_MAX: u64 = 256 << 20;
/// Limit on the number of ranks in a job that keeps copies of the ranks' training states in host
/// memory.
const STORED_RANKS_MAX: u32 = 1 << 21;
/// The first bytes of the header of a memory copy (a rank's training state in host memory): a name
/// and the version of the format.
const MAGIC: [u8; 16] = *b"launch copy   1\n";
/// Number of leading bytes, in the header of a copy of a rank's training state in host memory, over
/// which the header's hash is computed.
const HASHED_HEADER_BYTES: usize = 64;

/// Identifies one training state that all ranks copied to host memory: the step, the number of
/// earlier copies, the attempt (start of all workers) and the world size. All copies of the state
/// have the same identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryCopyId {
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Number of earlier copies in the run. Whether the number is even or odd selects one of the
    /// two regions of a rank. The number selects the region.
    pub sequence: u64,
    /// The attempt (start of all workers of the run) in which the copies were made.
    pub attempt: u32,
    /// Number of ranks.
    pub world: u32,
}

/// Description of a copy of one rank's training state in host memory: the step and attempt of the
/// state, the tensors in the copy, and the hashes of its blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryCopyDescription {
    /// The identity of the copied training state.
    pub id: MemoryCopyId,
    /// Facts about the run, except for the files of the tokenizer. Only the copy of rank 0 has
    /// them.
    pub facts: Option<Box<RunFacts>>,
    /// The description of the copied shard, with the hashes of its blocks.
    pub shard: ShardReport,
}

/// A complete copy of a rank's part of the training state (shard) that was found in the memory of
/// this host.
#[derive(Clone, Debug)]
pub struct StoredMemoryCopy {
    /// The identity of the copied training state.
    pub id: MemoryCopyId,
    /// The rank whose shard was copied.
    pub rank: u32,
    /// The encoded [`MemoryCopyDescription`].
    pub description: Vec<u8>,
    /// BLAKE3 hash of the description, which contains the hashes of the shard's blocks.
    pub hash: Hash,
    /// The bytes of the copied shard in the memory file.
    pub shard: MemoryShard,
}

/// The copies of ranks' training states that were found in the memory of this host, and the ranks
/// whose copies are incomplete.
#[derive(Debug, Default)]
pub struct StoredMemoryCopies {
    /// The complete copies. Their shards are not verified.
    pub complete: Vec<StoredMemoryCopy>,
    /// The ranks of which an incomplete or damaged copy was found.
    pub incomplete: Vec<u32>,
}

/// A memory file of a host, in which the workers store copies of their parts of the training state
/// (shards).
#[derive(Clone, Debug)]
pub struct MemoryStore {
    file: Arc<File>,
}

/// The header of a copy of a rank's training state in host memory: the sizes of the shard and of
/// the description that follow, and the description's hash.
struct RegionHeader {
    shard_bytes: u64,
    description_bytes: u64,
    description_hash: [u8; 32],
}

impl RegionHeader {
    /// Encodes this header, followed by a hash of the header, as one page of [`COPY_HEADER_BYTES`]
    /// bytes.
    fn encode(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(COPY_HEADER_BYTES as usize);
        page.extend(MAGIC);
        page.extend(self.shard_bytes.to_le_bytes());
        page.extend(self.description_bytes.to_le_bytes());
        page.extend(self.description_hash);
        page.extend(Hash::digest(&page).0);
        page.resize(COPY_HEADER_BYTES as usize, 0);
        page
    }

    /// Decodes the header of a copy of a rank's training state, which is at the beginning of
    /// `page`. Returns `None` if its hash, name or sizes are not valid.
    fn decode(page: &[u8]) -> Option<RegionHeader> {
        let (hashed, rest) = page.split_at_checked(HASHED_HEADER_BYTES)?;
        let number = |at: usize| Some(u64::from_le_bytes(hashed.get(at..at + 8)?.try_into().ok()?));
        let is_valid = hashed.starts_with(&MAGIC) && rest.get(..32)? == Hash::digest(hashed).0;
        let header = RegionHeader {
            shard_bytes: number(16)?,
            description_bytes: number(24)?,
            description_hash: hashed.get(32..64)?.try_into().ok()?,
        };
        let fits = header.description_bytes <= DESCRIPTION_BYTES_MAX
            && header.shard_bytes <= REGION_BYTES - COPY_HEADER_BYTES - DESCRIPTION_BYTES_MAX;
        (is_valid && fits).then_some(header)
    }

    /// Returns the size in bytes of the whole copy of a rank's training state to which this header
    /// belongs: header, shard and description.
    fn image_bytes(&self) -> u64 {
        COPY_HEADER_BYTES + self.shard_bytes + self.description_bytes
    }
}

/// Returns the byte offset of a region in the memory file: the region in which copy number
/// `sequence` of the training state of `rank` is stored.
fn locate_region(rank: u32, sequence: u64) -> Result<u64> {
    match rank < STORED_RANKS_MAX {
        true => Ok((u64::from(rank) * 2 + sequence % 2) * REGION_BYTES),
        false => Err(CkptError::internal("a memory copy of a rank beyond the limit")),
    }
}

/// Returns a function that wraps an I/O error of the memory file in [`CkptError::Io`], for use with
/// `map_err`.
fn store_error(action: &'static str) -> impl FnOnce(io::Error) -> CkptError {
    CkptError::io(action, Path::new(MEMORY_STORE_NAME))
}

impl MemoryStore {
    /// Creates a store for copies of ranks' training states, which are kept in the memory file
    /// (memfd) `file`.
    pub fn new(file: File) -> MemoryStore {
        MemoryStore { file: Arc::new(file) }
    }

    /// Copies the tensor ranges `pieces`, which form the shard of `rank`, to the memory file of
    /// this host with up to `threads` threads. Returns the size of the copy in bytes.
    ///
    /// # Errors
    /// Fails if the host has too little memory, or `pieces` has a piece twice.
    pub fn write_copy(
        &self,
        id: MemoryCopyId,
        rank: u32,
        facts: Option<RunFacts>,
        pieces: &[TensorPiece<'_>],
        threads: usize,
    ) -> Result<u64> {
        let plan = ShardPlan::new(rank, id.world, pieces)?;
        let region = locate_region(rank, id.sequence)?;
        self.invalidate_region(region)?;
        let parts: Vec<&[u8]> =
            std::iter::once(plan.header.as_slice()).chain(plan.contents.iter().copied()).collect();
        let (shard_bytes, blocks) = self.write_blocks(region + COPY_HEADER_BYTES, &parts, threads)?;
        let file = shard_file_name(rank, id.world);
        let shard =
            ShardReport { rank, world: id.world, file, bytes: shard_bytes, blocks, pieces: plan.reports };
        let description = MemoryCopyDescription { id, facts: facts.map(Box::new), shard };
        let text = serde_json::to_vec(&description)
            .map_err(|_| CkptError::internal("cannot encode the description of a memory copy"))?;
        let header = RegionHeader {
            shard_bytes,
            description_bytes: text.len() as u64,
            description_hash: Hash::digest(&text).0,
        };
        if RegionHeader::decode(&header.encode()).is_none() {
            return Err(CkptError::internal("a memory copy is larger than its region"));
        }
        self.write_at(region + COPY_HEADER_BYTES + shard_bytes, &text)?;
        pass_fault_point("complete_copy");
        self.write_at(region, &header.encode())?;
        Ok(header.image_bytes())
    }

    /// Writes the byte slices `parts` one after another to the memory file, starting at `offset`,
    /// and returns their total size and the hash of each 1 MiB block. Returns the number of bytes
    /// and the hashes.
    fn write_blocks(&self, offset: u64, parts: &[&[u8]], threads: usize) -> Result<(u64, Vec<Hash>)> {
        let mut starts = Vec::with_capacity(parts.len());
        let mut total = 0u64;
        for part in parts {
            starts.push(total);
            total += part.len() as u64;
        }
        let block = BLOCK_BYTES as u64;
        let count = total.div_ceil(block) as usize;
        let hashes = map_indices(threads.max(1), count, Vec::new, |buffer: &mut Vec<u8>, i| {
            let at = i as u64 * block;
            let end = (at + block).min(total);
            buffer.clear();
            let mut part = starts.partition_point(|start| *start <= at) - 1;
            while (buffer.len() as u64) < end - at {
                let from = (at + buffer.len() as u64 - starts[part]) as usize;
                let missing = (end - at) as usize - buffer.len();
                let bytes = &parts[part][from..];
                buffer.extend_from_slice(&bytes[..bytes.len().min(missing)]);
                part += 1;
            }
            self.write_at(offset + at, buffer)?;
            Ok(Hash::digest(buffer))
        });
        Ok((total, hashes.into_iter().collect::<Result<_>>()?))
    }

    /// Lists all copies of ranks' training states in the memory file, complete and incomplete ones.
    /// Verifies their descriptions, but not their shards.
    ///
    /// # Errors
    /// Fails if the memory file cannot be read.
    pub fn list_copies(&self) -> Result<StoredMemoryCopies> {
        let mut copies = StoredMemoryCopies::default();
        for region in self.list_used_regions()? {
            let rank = (region / 2) as u32;
            match self.read_copy(region * REGION_BYTES)?.filter(|copy| copy.rank == rank) {
                Some(copy) if copy.id.sequence % 2 == region % 2 => copies.complete.push(copy),
                _ => copies.incomplete.push(rank),
            }
        }
        Ok(copies)
    }

    /// Returns the numbers of the regions that contain data in the memory file, which has one
    /// region for each copy of a rank's training state.
    fn list_used_regions(&self) -> Result<Vec<u64>> {
        let length = self.file.metadata().map_err(store_error("examine"))?.len();
        let (mut at, mut regions) = (0, Vec::new());
        while at < length {
            let data = find_data(&self.file, at..length);
            if data.is_empty() {
                break;
            }
            let region = data.start / REGION_BYTES;
            regions.push(region);
            at = (region + 1) * REGION_BYTES;
        }
        Ok(regions)
    }

    /// Reads the description of the copy of a rank's training state that begins at `offset` in the
    /// memory file. Returns `None` if the copy is not complete.
    fn read_copy(&self, offset: u64) -> Result<Option<StoredMemoryCopy>> {
        let Some(header) = self.read_header(offset)? else { return Ok(None) };
        let mut text = vec![0; header.description_bytes as usize];
        let start = offset + COPY_HEADER_BYTES;
        let end = start + header.shard_bytes;
        match self.file.read_exact_at(&mut text, end) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other.map_err(store_error("read"))?,
        }
        let hash = Hash::digest(&text);
        if hash.0 != header.description_hash {
            return Ok(None);
        }
        let Ok(description) = json::parse_object::<MemoryCopyDescription>(&text) else { return Ok(None) };
        if description.shard.bytes != header.shard_bytes || description.shard.world != description.id.world {
            return Ok(None);
        }
        let shard = MemoryShard::new(self.file.clone(), start..end);
        let MemoryCopyDescription { id, shard: ShardReport { rank, .. }, .. } = description;
        Ok(Some(StoredMemoryCopy { id, rank, description: text, hash, shard }))
    }

    /// Reads the header of the copy of a rank's training state that begins at `offset` in the
    /// memory file. Returns `None` if the header is not valid.
    fn read_header(&self, offset: u64) -> Result<Option<RegionHeader>> {
        let mut page = [0; HASHED_HEADER_BYTES + 32];
        match self.file.read_exact_at(&mut page, offset) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            other => other.map(|()| RegionHeader::decode(&page)).map_err(store_error("read")),
        }
    }

    /// Returns the size in bytes, with the header, of copy number `sequence` of the training state
    /// of `rank` in this host's memory.
    ///
    /// # Errors
    /// Fails if the copy is not complete.
    pub fn copy_image_size_in_bytes(&self, rank: u32, sequence: u64) -> Result<u64> {
        let header = self.read_header(locate_region(rank, sequence)?)?;
        let torn = || {
            CkptError::damaged(Path::new(MEMORY_STORE_NAME), format!("rank {rank}"), DamageReason::Truncated)
        };
        header.map(|header| header.image_bytes()).ok_or_else(torn)
    }

    /// Reads bytes from copy number `sequence` of the training state of `rank` in this host's
    /// memory into `out`, starting at byte `offset` of the copy. Another host stores these bytes,
    /// too. The copy begins with its header.
    pub fn read_copy_image(&self, rank: u32, sequence: u64, offset: u64, out: &mut [u8]) -> Result<()> {
        let region = locate_region(rank, sequence)?;
        self.file.read_exact_at(out, region + offset).map_err(store_error("read"))
    }

    /// Writes `bytes` from another host to copy number `sequence` of the training state of `rank`
    /// in this host's memory, at byte `offset` of the copy. The bytes at offset 0 must be written
    /// last, because they complete the copy.
    ///
    /// # Errors
    /// Fails if the bytes do not fit into the region, or the host has too little memory.
    pub fn write_copy_image(&self, rank: u32, sequence: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let region = locate_region(rank, sequence)?;
        if offset.saturating_add(bytes.len() as u64) > REGION_BYTES {
            return Err(CkptError::internal("a memory copy is larger than its region"));
        }
        self.write_at(region + offset, bytes)
    }

    /// Invalidates the old copy of the training state of `rank` in the memory region where copy
    /// number `sequence` of the run will be stored.
    pub fn invalidate_copy_image(&self, rank: u32, sequence: u64) -> Result<()> {
        self.invalidate_region(locate_region(rank, sequence)?)
    }

    /// Frees the host memory of the training state copies of every rank for which `keeps(rank)`
    /// returns false.
    pub fn free_copies_except(&self, keeps: impl Fn(u32) -> bool) -> Result<()> {
        for region in self.list_used_regions()?.into_iter().filter(|region| !keeps((region / 2) as u32)) {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let (start, length) = ((region * REGION_BYTES) as i64, REGION_BYTES as i64);
            let freed = fallocate(&*self.file, flags, start, length);
            freed.map_err(CkptError::io("free", Path::new(MEMORY_STORE_NAME)))?;
        }
        Ok(())
    }

    /// Marks the copy of a rank's training state that begins at `offset` in the memory file as
    /// invalid, by overwriting its header with zeros.
    fn invalidate_region(&self, offset: u64) -> Result<()> {
        self.write_at(offset, &[0; COPY_HEADER_BYTES as usize])
    }

    /// Writes `bytes` to the memory file at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(store_error("write"))
    }
}

/// Parses the text that another rank sent to describe a copy of a rank's training state in host
/// memory, after checking the text against `hash`.
///
/// # Errors
/// Fails if the text does not match `hash` or is not valid.
pub fn parse_copy_description(text: &[u8], hash: Hash) -> Result<MemoryCopyDescription> {
    let damaged =
        |reason: DamageReason| CkptError::damaged(Path::new(MEMORY_STORE_NAME), "description", reason);
    if Hash::digest(text) != hash {
        return Err(damaged(DamageReason::HashMismatch));
    }
    json::parse_object(text).map_err(|e| damaged(e.to_string().into()))
}

/// Opens a checkpoint that consists of the copies of all ranks' training states in host memory
/// instead of files. `descriptions` has the description of the copy of each rank, and `shards` the
/// shards that are on this host. `path` names the checkpoint in messages. Reads verify every block.
///
/// # Errors
/// Fails if the copies do not contain every element of every tensor exactly once.
pub fn open_memory_checkpoint(
    path: &Path,
    descriptions: Vec<MemoryCopyDescription>,
    shards: Vec<Option<MemoryShard>>,
) -> Result<Checkpoint> {
    let damaged = |reason: String| CkptError::damaged(path, "description", DamageReason::from(reason));
    let mut facts = None;
    let mut reports = Vec::with_capacity(descriptions.len());
    for description in descriptions {
        facts = facts.or(description.facts);
        reports.push(description.shard);
    }
    let facts = facts.ok_or_else(|| damaged("no copy has the facts about the run".into()))?;
    let manifest = assemble_manifest(*facts, reports, None).map_err(|e| damaged(e.to_string()))?;
    Ok(Checkpoint::from_memory_shards(path, manifest, shards))
}
