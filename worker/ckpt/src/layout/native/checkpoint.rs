//! [`Checkpoint`]: reads any range of any tensor of a native checkpoint (one in launch's own
//! format). Every block is verified before its bytes are returned.
use super::manifest::{FileEntry, Manifest, TensorEntry, TensorPieceEntry};
use super::memory_shard::MemoryShard;
use super::remote_shards::RemoteShards;
use super::storage_host::StorageHost;
use crate::catalog::{
    F32ReadRequest, PassthroughState, RunFacts, TensorInfo, TensorSource, TextFile, TrainingState,
    WeightShape, require_same_model,
};
use crate::codec::disk::{BLOCK_BYTES, BlockReader, BlockRequest, Directory, DiskBufferPool, stream_windows};
use crate::error::{CkptError, Damage, DamageReason, MissingPart, RemoteShard, Result};
use crate::hash::Hash;
use crate::tensor::{Dtype, TensorRole, element_ranges};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An open native checkpoint (one in launch's own format), from which ranges of tensors are read.
/// Each read opens the shards that it needs, relative to the open directory. Reads therefore still
/// work after the directory is renamed, but not after its removal.
pub struct Checkpoint {
    path: PathBuf,
    storage: ShardStorage,
    /// For each shard, whether it is stored on this host.
    local_files: Vec<bool>,
    manifest: Manifest,
    index: HashMap<(TensorRole, String), usize>,
    buffers: DiskBufferPool,
}

/// Where this host finds the shards of a checkpoint: in files of a directory, in its memory, or not
/// at all.
enum ShardStorage {
    /// No part of the checkpoint is on this host.
    Absent,
    /// The shards are files of this open directory.
    Directory(Directory),
    /// The shards are in memory. The list has an entry for each shard of the checkpoint, which is
    /// `None` for the shards of other hosts.
    Memory(Vec<Option<MemoryShard>>),
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({})", self.path.display())
    }
}

/// A range of consecutive 1 MiB blocks in the shard of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRange {
    /// Index of the shard, which is the rank that wrote the file.
    pub file: usize,
    /// Indices of the blocks in the file.
    pub blocks: Range<u64>,
}

/// A callback that receives the index of a rank's file, the index of a 1 MiB block in the file, and
/// the bytes of the block.
pub type BlockSink<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<()> + 'a;

/// A callback that obtains the requested 1 MiB blocks of checkpoint files from other hosts, and
/// passes them to a [`BlockSink`]. The callback must pass each block to the sink, in the order of
/// the ranges.
pub type BlockFetcher<'a> = dyn FnMut(Vec<BlockRange>, &mut BlockSink<'_>) -> Result<()> + 'a;

/// A byte range to read from the shard of one rank, and the buffer for the bytes.
struct ByteReadRequest<'a> {
    file: usize,
    bytes: Range<u64>,
    out: &'a mut [u8],
}

impl Checkpoint {
    /// Opens the checkpoint in launch's own (native) format in the directory `path`. Verifies the
    /// hash and the consistency of the manifest, and the sizes of the shards. Reads verify the
    /// content of the shards.
    ///
    /// A shard may be missing if the manifest records that another host stores it.
    ///
    /// # Errors
    /// Fails with [`CkptError::NotFound`] if `path` does not exist. Fails with an error that names
    /// the file if the manifest or a shard is damaged or missing.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        if !crate::codec::disk::path_exists(path) {
            return Err(CkptError::NotFound { path: path.to_owned() });
        }
        let directory = Directory::open(path)?;
        let manifest = Manifest::load(&directory)?;
        let remote = RemoteShards::new(path, &manifest);
        let mut local_files = Vec::with_capacity(manifest.files.len());
        for (i, file) in manifest.files.iter().enumerate() {
            local_files.push(match directory.file_size(&file.name)? {
                Some(size) if size == file.bytes => true,
                Some(size) => {
                    let reason = DamageReason::SizeMismatch { expected: file.bytes, found: size };
                    return Err(CkptError::damaged(path, &file.name, reason));
                }
                None if remote.remote_host(i).is_some() => false,
                None => return Err(CkptError::missing(path, MissingPart::File(file.name.clone()))),
            });
        }
        Ok(Checkpoint::from_parts(path, ShardStorage::Directory(directory), local_files, manifest))
    }

    /// Reads only the manifest of the checkpoint in the directory `path`, and returns its data
    /// about the training run, such as step and model. Verifies the hash and the consistency of the
    /// manifest, and reads no other file.
    pub fn read_run_facts(path: &Path) -> Result<RunFacts> {
        Ok(Manifest::load(&Directory::open(path)?)?.facts)
    }

    /// Opens a checkpoint from the text `text` of its `manifest.json`, for hosts that do not share
    /// a checkpoint directory. If `has_directory` is true, opens the directory `path`, from which
    /// reads take the shards of this host. If false, all shards count as remote. Only
    /// [`Checkpoint::read_verified_with_fetcher`] can read remote shards.
    pub fn from_manifest(path: &Path, text: Vec<u8>, has_directory: bool) -> Result<Checkpoint> {
        let manifest = Manifest::parse(path, text)?;
        let directory = if has_directory { Some(Directory::open(path)?) } else { None };
        let is_local = |f: &FileEntry| {
            directory.as_ref().is_some_and(|d| d.file_size(&f.name).is_ok_and(|n| n == Some(f.bytes)))
        };
        let local_files = manifest.files.iter().map(is_local).collect();
        let storage = directory.map_or(ShardStorage::Absent, ShardStorage::Directory);
        Ok(Checkpoint::from_parts(path, storage, local_files, manifest))
    }

    /// Opens a checkpoint whose shards are stored in the memory of this host instead of in files on
    /// disk. `shards` has an entry for each shard of the checkpoint, which is `None` if this host
    /// does not have the shard. `path` names the checkpoint in messages.
    pub(crate) fn from_memory_shards(
        path: &Path,
        manifest: Manifest,
        shards: Vec<Option<MemoryShard>>,
    ) -> Checkpoint {
        let is_here = |(file, shard): (&FileEntry, &Option<MemoryShard>)| {
            shard.as_ref().is_some_and(|shard| shard.size() == file.bytes)
        };
        let local_files = manifest.files.iter().zip(&shards).map(is_here).collect();
        Checkpoint::from_parts(path, ShardStorage::Memory(shards), local_files, manifest)
    }

    /// Creates a [`Checkpoint`] from its parsed manifest, the place of its shards, and one flag per
    /// shard that states whether this host stores the shard.
    fn from_parts(
        path: &Path,
        storage: ShardStorage,
        local_files: Vec<bool>,
        manifest: Manifest,
    ) -> Checkpoint {
        let index = manifest.tensors.iter().enumerate().map(|(i, t)| ((t.role, t.name.clone()), i)).collect();
        Checkpoint {
            path: path.to_owned(),
            storage,
            local_files,
            manifest,
            index,
            buffers: DiskBufferPool::default(),
        }
    }

    /// Returns the path that was given for the directory of this checkpoint when the checkpoint was
    /// opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a list with one flag per shard of the checkpoint, which is true if this host stores
    /// the shard.
    pub fn local_shard_flags(&self) -> &[bool] {
        &self.local_files
    }

    /// Returns the host that stores the shard with the index `file`, or `None` if all hosts share
    /// the checkpoint directory.
    pub fn shard_host(&self, file: usize) -> Option<&StorageHost> {
        self.manifest.shard_host(file)
    }

    /// Returns the number of 1 MiB blocks of each rank's shard, in the order of the ranks.
    pub fn shard_block_counts(&self) -> Vec<u64> {
        self.manifest.files.iter().map(|f| f.blocks.len() as u64).collect()
    }

    /// Fails with [`CkptError::ShardsOnOtherHosts`] if this host lacks a needed shard, where
    /// `needed` returns true for the index of each needed shard.
    fn require_local_shards(&self, needed: impl Fn(usize) -> bool) -> Result<()> {
        let absent = (0..self.local_files.len()).filter(|&i| !self.local_files[i] && needed(i));
        let shards: Vec<RemoteShard> = absent.map(|i| self.make_remote_shard(i)).collect();
        match shards.is_empty() {
            true => Ok(()),
            false => Err(CkptError::ShardsOnOtherHosts { path: self.path.clone(), shards }),
        }
    }

    /// Returns the name of a shard's file and of the host that stores it, for an error message that
    /// this host cannot read the shard.
    fn make_remote_shard(&self, file: usize) -> RemoteShard {
        let host = self.shard_host(file).map_or("unknown".to_owned(), StorageHost::to_string);
        RemoteShard { file: self.manifest.files[file].name.clone(), host }
    }

    /// Returns what the manifest records about the run that saved the checkpoint.
    pub fn run_facts(&self) -> &RunFacts {
        &self.manifest.facts
    }

    /// Iterates over the descriptions of all tensors: first those of the weights, then those of
    /// each kind of optimizer state, in the order of [`TensorRole::ALL`]. Tensors of one role are
    /// in the order of the model.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo> + '_ {
        self.manifest.tensors.iter().map(|t| TensorInfo {
            name: t.name.clone(),
            role: t.role,
            dtype: t.dtype,
            shape: t.shape.clone(),
        })
    }

    /// Iterates over the file name and the size in bytes of every rank's shard.
    pub fn shard_sizes(&self) -> impl Iterator<Item = (&str, u64)> {
        self.manifest.files.iter().map(|f| (f.name.as_str(), f.bytes))
    }

    /// Returns the total size in bytes of the shards of all ranks.
    pub fn total_shard_bytes(&self) -> u64 {
        self.manifest.total_shard_bytes()
    }

    /// Returns true if the checkpoint stores the tensor of this name and role.
    pub fn has_tensor(&self, name: &str, role: TensorRole) -> bool {
        self.index.contains_key(&(role, name.to_owned()))
    }

    /// Fails if the checkpoint's weights differ from `weights`, those of the model that the job
    /// trains, in a name or a shape. The error names the first tensor that differs.
    pub fn require_matching_model(&self, weights: &[WeightShape]) -> Result<()> {
        require_same_model(self.path(), &self.manifest.facts.model, weights)
    }

    /// Reads the elements `range` of one tensor as F32 into `out`, which must have the length of
    /// the range. For many ranges [`Checkpoint::read_verified`] is faster: it reads each block
    /// once.
    pub fn read_f32(&self, name: &str, role: TensorRole, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        if range.start > range.end || range.end - range.start != out.len() as u64 {
            return Err(CkptError::internal("the range of a read has another length than its buffer"));
        }
        self.read_verified(&mut [F32ReadRequest { name, role, start_element: range.start, out }])
    }

    /// Reads the requested tensor elements as F32, and verifies the hash of every 1 MiB block from
    /// which elements are read. Reads and verifies each block once, in the order of shards and
    /// offsets. After an error the contents of the buffers are undefined. Needs 24 MiB of memory in
    /// addition to the buffers.
    ///
    /// # Errors
    /// Fails with [`CkptError::Damaged`], which names the block and its tensors, if a block is
    /// damaged. Fails with [`CkptError::NoSuchTensor`] or [`CkptError::RangeOutsideTensor`] if a
    /// tensor or range does not exist, and with [`CkptError::ShardsOnOtherHosts`] if a needed shard
    /// is not on this host.
    pub fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        self.read_verified_with_fetcher(requests, &mut |remote, _| {
            self.require_local_shards(|file| remote.iter().any(|run| run.file == file))
        })
    }

    /// Reads the requested tensor elements as F32, from shards on this host, and from shards on
    /// other hosts by a call of `fetch`. Reads the local blocks first. Then calls `fetch` once with
    /// all remote blocks, sorted by shard and index. This call happens even if there are no remote
    /// blocks or a local block could not be read. `fetch` must pass each block in this order to the
    /// sink, which verifies the block.
    ///
    /// # Errors
    /// Fails if a local block is damaged, a tensor or range does not exist, or `fetch` fails.
    pub fn read_verified_with_fetcher(
        &self,
        requests: &mut [F32ReadRequest<'_>],
        fetch: &mut BlockFetcher<'_>,
    ) -> Result<()> {
        self.read_stored_elements(requests, fetch)?;
        for request in requests.iter_mut() {
            if self.find_tensor(request.name, request.role)?.dtype == Dtype::BF16 {
                widen_bf16_in_place(request.out);
            }
        }
        Ok(())
    }

    /// Reads the requested tensor elements into the buffers of `requests`, in the dtype in which
    /// the checkpoint stores the elements. Gets the blocks of shards on other hosts through
    /// `fetch`. BF16 elements fill only the second half of the bytes of their buffer.
    fn read_stored_elements(
        &self,
        requests: &mut [F32ReadRequest<'_>],
        fetch: &mut BlockFetcher<'_>,
    ) -> Result<()> {
        let mut reads = Vec::new();
        for request in requests.iter_mut() {
            self.append_byte_reads(request, &mut reads)?;
        }
        reads.sort_by_key(|w| (w.file, w.bytes.start));
        let (mut jobs, mut remote) = (Vec::new(), Vec::new());
        for in_file in reads.chunk_by(|a, b| a.file == b.file) {
            let file = in_file[0].file;
            let ranges = in_file.iter().map(|w| w.bytes.clone()).collect();
            let size = self.manifest.files[file].bytes;
            for blocks in element_ranges::find_covering_blocks(ranges, BLOCK_BYTES as u64) {
                match self.local_files[file] {
                    true => jobs.push(BlockRequest { file, size, blocks }),
                    false => remote.push(BlockRange { file, blocks }),
                }
            }
        }
        let mut scatter = BlockScatter { checkpoint: self, reads: &mut reads, first_pending: 0 };
        let read =
            self.read_requested_blocks(&jobs, &mut |f, block, bytes| scatter.scatter_block(f, block, bytes));
        scatter.first_pending = 0;
        let fetched = fetch(remote, &mut |f, block, bytes| scatter.scatter_block(f, block, bytes));
        read.and(fetched)
    }

    /// Reads consecutive 1 MiB blocks of a shard on this host, without verifying their hashes, and
    /// calls `sink` with each block. These blocks are for a rank on another host, which verifies
    /// them when it receives them.
    pub fn read_blocks(&self, run: &BlockRange, sink: &mut BlockSink<'_>) -> Result<()> {
        let file = self.manifest.files.get(run.file).filter(|f| run.blocks.end <= f.blocks.len() as u64);
        let file = file.ok_or_else(|| {
            CkptError::missing(&self.path, MissingPart::Blocks { file: run.file, blocks: run.blocks.clone() })
        })?;
        self.read_requested_blocks(
            &[BlockRequest { file: run.file, size: file.bytes, blocks: run.blocks.clone() }],
            sink,
        )
    }

    /// Reads those 1 MiB blocks of shards on this host that `jobs` lists, and calls `sink` with
    /// each block in the order of the list.
    fn read_requested_blocks(&self, jobs: &[BlockRequest], sink: &mut BlockSink<'_>) -> Result<()> {
        let open = |file: usize| {
            let name = &self.manifest.files[file].name;
            let missing = || CkptError::missing(&self.path, MissingPart::File(name.clone()));
            match &self.storage {
                ShardStorage::Directory(directory) => BlockReader::open(directory, name),
                ShardStorage::Memory(shards) => {
                    shards.get(file).and_then(Option::as_ref).ok_or_else(missing)?.open(&self.path, name)
                }
                ShardStorage::Absent => Err(missing()),
            }
        };
        stream_windows(&self.buffers, jobs, open, |(job, read)| {
            let window = read.map_err(|e| self.convert_read_error(&job, e))?;
            job.blocks
                .clone()
                .zip(window.chunks(BLOCK_BYTES))
                .try_for_each(|(b, bytes)| sink(job.file, b, bytes))
        })
    }

    /// Translates a request for tensor elements into requests for byte ranges of the ranks' shards,
    /// and appends them to `reads`. Fails if the tensor or the range does not exist.
    fn append_byte_reads<'a>(
        &self,
        request: &'a mut F32ReadRequest<'_>,
        reads: &mut Vec<ByteReadRequest<'a>>,
    ) -> Result<()> {
        let tensor = self.find_tensor(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        if range.end > tensor.element_count() {
            let elements = tensor.element_count();
            return Err(CkptError::range_outside_tensor(&self.path, tensor.label(), elements, range.end));
        }
        let size = tensor.dtype.size();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(request.out);
        // narrower elements are read to the end of the buffer, and are widened in place from there
        let skip = bytes.len() - bytes.len() / 4 * size as usize;
        let mut rest = &mut bytes[skip..];
        for (i, part) in
            element_ranges::intersect_ranges(&tensor.pieces, TensorPieceEntry::element_range, range)
        {
            let piece = &tensor.pieces[i];
            let from = piece.offset + (part.start - piece.start) * size;
            let len = (part.end - part.start) * size;
            let (out, tail) = std::mem::take(&mut rest).split_at_mut(len as usize);
            rest = tail;
            reads.push(ByteReadRequest { file: piece.file, bytes: from..from + len, out });
        }
        Ok(())
    }

    /// Finds the manifest's entry of a tensor, or returns [`CkptError::NoSuchTensor`].
    fn find_tensor(&self, name: &str, role: TensorRole) -> Result<&TensorEntry> {
        let index = self.index.get(&(role, name.to_owned()));
        let missing = || CkptError::no_such_tensor(&self.path, role, name);
        index.map(|&i| &self.manifest.tensors[i]).ok_or_else(missing)
    }

    /// Fails if a block of a rank's file does not match its hash in the manifest. The error names
    /// the tensors in the block.
    fn verify_block(&self, file: usize, block: u64, bytes: &[u8]) -> Result<()> {
        let entry = &self.manifest.files[file];
        if entry.blocks.get(block as usize) == Some(&Hash::digest(bytes)) {
            return Ok(());
        }
        let damage = Damage {
            file: entry.name.clone(),
            block: Some(block),
            tensors: self.manifest.tensors_in_block(file, block),
            reason: DamageReason::HashMismatch,
        };
        Err(CkptError::from_damage(&self.path, damage))
    }

    /// Adds the path of this checkpoint, and for I/O errors the damaged file and the tensors in it,
    /// to the error of a failed read of blocks. An I/O error becomes [`CkptError::Damaged`] with
    /// the names of the tensors in these blocks.
    fn convert_read_error(&self, job: &BlockRequest, e: &CkptError) -> CkptError {
        let path = self.path().to_owned();
        match e {
            CkptError::Damaged { damage, .. } => CkptError::Damaged { path, damage: damage.clone() },
            CkptError::Missing { part, .. } => CkptError::Missing { path, part: part.clone() },
            other => {
                let mut damage = Damage {
                    file: self.manifest.files[job.file].name.clone(),
                    block: Some(job.blocks.start),
                    tensors: Vec::new(),
                    reason: other.to_string().into(),
                };
                for block in job.blocks.clone() {
                    damage.tensors.extend(self.manifest.tensors_in_block(job.file, block));
                }
                damage.tensors.dedup();
                CkptError::from_damage(&self.path, damage)
            }
        }
    }
}

impl TensorSource for Checkpoint {
    fn path(&self) -> &Path {
        Checkpoint::path(self)
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        Checkpoint::tensors(self).collect()
    }

    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        Checkpoint::read_verified(self, requests)
    }

    fn read_passthrough(&self) -> Result<PassthroughState> {
        let precision = (self.default_export_dtype() == Dtype::BF16).then_some(Dtype::BF16);
        Ok(PassthroughState {
            native_facts: Some(Box::new(self.run_facts().clone())),
            precision,
            ..PassthroughState::default()
        })
    }

    fn completed_steps(&self) -> Option<u64> {
        Some(self.run_facts().step)
    }

    fn default_export_dtype(&self) -> Dtype {
        let weights =
            self.manifest.tensors.iter().filter(|t| t.role == TensorRole::Weight && t.element_count() > 0);
        let (narrow, wide): (Vec<_>, Vec<_>) = weights.partition(|t| t.dtype == Dtype::BF16);
        if wide.is_empty() && !narrow.is_empty() { Dtype::BF16 } else { Dtype::F32 }
    }

    /// Returns true if the checkpoint has only weights: step 0, no optimizer states and no
    /// parameter groups. A training run always lists its parameter groups.
    fn has_only_weights(&self) -> bool {
        let facts = self.run_facts();
        let states = || Checkpoint::tensors(self).any(|t| t.role.is_optimizer_state());
        facts.step == 0 && facts.groups.as_array().is_none_or(Vec::is_empty) && !states()
    }

    fn training_state(&self) -> TrainingState {
        let facts = self.run_facts();
        let trained = facts.model.weights.iter().filter(|w| !facts.model.frozen.contains(&w.name));
        TrainingState {
            step: Some(facts.step),
            samples: facts.cursor["at"]["consumed_samples"].as_u64(),
            world: Some(facts.world),
            stage: Some(facts.stage),
            // the worker writes groups in this form; any other form is ignored
            groups: serde_json::from_value(facts.groups.clone()).unwrap_or_default(),
            steps: trained.map(|w| (w.name.clone(), facts.count_updates(&w.name))).collect(),
            // a converted checkpoint keeps the scheduler of its source, while a native run computes
            // its schedule from the step
            scheduler: facts.job["converted"]["scheduler"].clone(),
            loss_scaler: facts.cursor["loss_scale"].clone(),
            ties: facts.model.ties.clone(),
            frozen: facts.model.frozen.clone(),
            buffers: facts.model.buffers.iter().map(|b| b.name.clone()).collect(),
        }
    }

    fn trained_token_count(&self) -> Option<u64> {
        Some(self.run_facts().tokens)
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.run_facts().model.hf_config.as_object()
    }

    fn adapter_config(&self) -> Option<&Value> {
        self.run_facts().model.adapter.as_ref()
    }

    fn exported_text_files(&self) -> &[TextFile] {
        &self.run_facts().tokenizer
    }

    fn require_all_weights(&self) -> Result<()> {
        let state = |t: &&TensorEntry| !t.role.is_optimizer_state();
        let files: HashSet<usize> = self
            .manifest
            .tensors
            .iter()
            .filter(state)
            .flat_map(|t| t.pieces.iter().map(|p| p.file))
            .collect();
        self.require_local_shards(|file| files.contains(&file))
    }
}

/// Converts BF16 values in the second half of the buffer `out` to F32 values, which fill the whole
/// buffer, without a second buffer.
fn widen_bf16_in_place(out: &mut [f32]) {
    let len = out.len();
    for i in 0..len {
        // the write of element `i` never reaches the BF16 numbers after number `i`
        let halves: &[u16] = bytemuck::cast_slice(out);
        let half = halves[len + i];
        out[i] = f32::from_bits(u32::from(half) << 16);
    }
}

/// The consumer of blocks that were read from shards: it verifies the hash of each block, and
/// copies the bytes to the buffers of waiting reads. The caller must sort the reads by shard and
/// offset, and must pass the blocks in the same order.
struct BlockScatter<'s, 'a> {
    checkpoint: &'s Checkpoint,
    reads: &'s mut [ByteReadRequest<'a>],
    /// Index of the first read that may be incomplete. All reads before this index are complete.
    first_pending: usize,
}

impl BlockScatter<'_, '_> {
    /// Verifies the hash of the 1 MiB block number `block` of a shard, and copies its bytes to the
    /// buffers of all reads that include them.
    fn scatter_block(&mut self, file: usize, block: u64, bytes: &[u8]) -> Result<()> {
        self.checkpoint.verify_block(file, block, bytes)?;
        let at = block * BLOCK_BYTES as u64;
        let end = at + bytes.len() as u64;
        let done = |w: &ByteReadRequest<'_>| (w.file, w.bytes.end) <= (file, at) || w.file < file;
        while self.first_pending < self.reads.len() && done(&self.reads[self.first_pending]) {
            self.first_pending += 1;
        }
        for w in &mut self.reads[self.first_pending..] {
            if w.file > file || w.bytes.start >= end {
                break;
            }
            let (from, to) = (w.bytes.start.max(at), w.bytes.end.min(end));
            if from < to {
                let source = &bytes[(from - at) as usize..(to - at) as usize];
                w.out[(from - w.bytes.start) as usize..(to - w.bytes.start) as usize].copy_from_slice(source);
            }
        }
        Ok(())
    }
}
