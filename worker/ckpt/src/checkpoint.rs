//! [`Checkpoint`]: reads any range of any tensor of a native checkpoint, and verifies every block
//! before its bytes are returned.
use crate::catalog::{RunFacts, TensorInfo, TensorRole, TextFile, WeightShape, require_same_model};
use crate::disk::{BLOCK, BlockFile, Buffers, Directory, ReadJob, stream};
use crate::dtype::Dtype;
use crate::error::{CkptError, Damage, DamageReason, MissingPart, RemoteShard, Result};
use crate::hash::Hash;
use crate::host::StorageHost;
use crate::manifest::{Extent, FileEntry, Manifest, TensorEntry};
use crate::partition;
use crate::passthrough::PassthroughState;
use crate::remote_shards::RemoteShards;
use crate::source::{ReadRequest, TensorSource};
use crate::state::TrainingState;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An open native checkpoint. It remains readable when its directory is renamed, but not when it is
/// removed.
pub struct Checkpoint {
    path: PathBuf,
    /// `None` when no part of the checkpoint is on this host.
    directory: Option<Directory>,
    /// For each file, whether it is in the directory.
    local_files: Vec<bool>,
    manifest: Manifest,
    index: HashMap<(TensorRole, String), usize>,
    buffers: Buffers,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({})", self.path.display())
    }
}

/// Consecutive 1 MiB blocks of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRange {
    /// Index of the file, which is the rank that wrote it.
    pub file: usize,
    /// Indices of the blocks.
    pub blocks: Range<u64>,
}

/// Receives a block: index of the file, index of the block, bytes.
pub type BlockSink<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<()> + 'a;

/// Fetches blocks from other hosts and passes each to the sink, in the order of the request.
pub type FetchBlocks<'a> = dyn FnMut(Vec<BlockRange>, &mut BlockSink<'_>) -> Result<()> + 'a;

/// A byte range of a file, and the buffer to fill.
struct ByteRead<'a> {
    file: usize,
    bytes: Range<u64>,
    out: &'a mut [u8],
}

impl Checkpoint {
    /// Opens a directory with a manifest. Verifies the hash, the consistency of the manifest and
    /// the sizes of the shards. The content of the shards is verified when it is read.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        if !crate::disk::exists(path) {
            return Err(CkptError::NotFound { path: path.to_owned() });
        }
        let directory = Directory::open(path)?;
        let manifest = Manifest::load(&directory)?;
        let remote = RemoteShards::new(path, &manifest);
        let mut local_files = Vec::with_capacity(manifest.files.len());
        for (i, file) in manifest.files.iter().enumerate() {
            local_files.push(match directory.size_of(&file.name)? {
                Some(size) if size == file.bytes => true,
                Some(size) => {
                    let reason = DamageReason::SizeMismatch { expected: file.bytes, found: size };
                    return Err(CkptError::damaged(path, &file.name, reason));
                }
                None if remote.remote_host(i).is_some() => false,
                None => return Err(CkptError::missing(path, MissingPart::File(file.name.clone()))),
            });
        }
        Ok(Checkpoint::from_parts(path, Some(directory), local_files, manifest))
    }

    /// Opens a host-local checkpoint from the text of its manifest. Shards in the directory (if
    /// `has_directory`) are read directly, the others through [`Checkpoint::read_many_with`].
    pub fn from_manifest(path: &Path, text: Vec<u8>, has_directory: bool) -> Result<Checkpoint> {
        let manifest = Manifest::parse(path, text)?;
        let directory = if has_directory { Some(Directory::open(path)?) } else { None };
        let is_local = |f: &FileEntry| {
            directory.as_ref().is_some_and(|d| d.size_of(&f.name).is_ok_and(|n| n == Some(f.bytes)))
        };
        let local_files = manifest.files.iter().map(is_local).collect();
        Ok(Checkpoint::from_parts(path, directory, local_files, manifest))
    }

    fn from_parts(
        path: &Path,
        directory: Option<Directory>,
        local_files: Vec<bool>,
        manifest: Manifest,
    ) -> Checkpoint {
        let index = manifest.tensors.iter().enumerate().map(|(i, t)| ((t.role, t.name.clone()), i)).collect();
        Checkpoint {
            path: path.to_owned(),
            directory,
            local_files,
            manifest,
            index,
            buffers: Buffers::default(),
        }
    }

    /// The path given to [`Checkpoint::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For each file, whether it is in the directory.
    pub fn local_files(&self) -> &[bool] {
        &self.local_files
    }

    /// The host that stores a shard; `None` when all shards are in one directory.
    pub fn shard_host(&self, file: usize) -> Option<&StorageHost> {
        self.manifest.shard_host(file)
    }

    /// Number of 1 MiB blocks of each file.
    pub fn blocks(&self) -> Vec<u64> {
        self.manifest.files.iter().map(|f| f.blocks.len() as u64).collect()
    }

    fn require_shards(&self, needed: impl Fn(usize) -> bool) -> Result<()> {
        let absent = (0..self.local_files.len()).filter(|&i| !self.local_files[i] && needed(i));
        let shards: Vec<RemoteShard> = absent.map(|i| self.remote_shard(i)).collect();
        match shards.is_empty() {
            true => Ok(()),
            false => Err(CkptError::ShardsOnOtherHosts { path: self.path.clone(), shards }),
        }
    }

    /// The name of a shard and the host that stores it.
    fn remote_shard(&self, file: usize) -> RemoteShard {
        let host = self.shard_host(file).map_or("unknown".to_owned(), StorageHost::to_string);
        RemoteShard { file: self.manifest.files[file].name.clone(), host }
    }

    /// Facts about the run that saved the checkpoint.
    pub fn facts(&self) -> &RunFacts {
        &self.manifest.facts
    }

    /// Every tensor, weights first, in the order of the model.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo> + '_ {
        self.manifest.tensors.iter().map(|t| TensorInfo {
            name: t.name.clone(),
            role: t.role,
            dtype: t.dtype,
            shape: t.shape.clone(),
        })
    }

    /// Name and size in bytes of every shard.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.manifest.files.iter().map(|f| (f.name.as_str(), f.bytes))
    }

    /// Size of all shards, bytes.
    pub fn bytes(&self) -> u64 {
        self.manifest.bytes()
    }

    /// True when the checkpoint stores this tensor.
    pub fn holds(&self, name: &str, role: TensorRole) -> bool {
        self.index.contains_key(&(role, name.to_owned()))
    }

    /// Rejects a checkpoint of a model with other weights; the error names the first difference.
    pub fn require_model(&self, weights: &[WeightShape]) -> Result<()> {
        require_same_model(self.path(), &self.manifest.facts.model, weights)
    }

    /// Reads elements `range` of one tensor; `out` is as long as the range. For many ranges
    /// [`Checkpoint::read_many`] is faster, since it reads no block twice.
    pub fn read_f32(&self, name: &str, role: TensorRole, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        if range.start > range.end || range.end - range.start != out.len() as u64 {
            return Err(CkptError::internal("the range of a read has another length than its buffer"));
        }
        self.read_many(&mut [ReadRequest { name, role, start_element: range.start, out }])
    }

    /// Reads many ranges in the order of their offsets. Each block is read and verified once. After
    /// an error the contents of the outputs are undefined. Needs 24 MiB in addition to the outputs.
    ///
    /// # Errors
    /// [`CkptError::Damaged`] names the block and the tensors in it; [`CkptError::NoSuchTensor`]
    /// and [`CkptError::RangeOutsideTensor`] when a tensor or range does not exist.
    pub fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        self.read_many_with(requests, &mut |remote, _| {
            self.require_shards(|file| remote.iter().any(|run| run.file == file))
        })
    }

    /// Like [`Checkpoint::read_many`], for a checkpoint with shards on other hosts. After the local
    /// blocks are read, `fetch` is called once with all remote blocks, sorted. `fetch` passes each
    /// block in that order to the sink, which verifies it.
    pub fn read_many_with(
        &self,
        requests: &mut [ReadRequest<'_>],
        fetch: &mut FetchBlocks<'_>,
    ) -> Result<()> {
        self.read_stored(requests, fetch)?;
        for request in requests.iter_mut() {
            if self.find_tensor(request.name, request.role)?.dtype == Dtype::BF16 {
                widen(request.out);
            }
        }
        Ok(())
    }

    /// Reads the stored elements, unconverted, to the end of each output.
    fn read_stored(&self, requests: &mut [ReadRequest<'_>], fetch: &mut FetchBlocks<'_>) -> Result<()> {
        let mut reads = Vec::new();
        for request in requests.iter_mut() {
            self.resolve_request(request, &mut reads)?;
        }
        reads.sort_by_key(|w| (w.file, w.bytes.start));
        let (mut jobs, mut remote) = (Vec::new(), Vec::new());
        for in_file in reads.chunk_by(|a, b| a.file == b.file) {
            let file = in_file[0].file;
            let ranges = in_file.iter().map(|w| w.bytes.clone()).collect();
            let size = self.manifest.files[file].bytes;
            for blocks in partition::covering_blocks(ranges, BLOCK as u64) {
                match self.local_files[file] {
                    true => jobs.push(ReadJob { file, size, blocks }),
                    false => remote.push(BlockRange { file, blocks }),
                }
            }
        }
        let mut scatter = BlockScatter { reads: &mut reads, first: 0 };
        let read = self.read_jobs(&jobs, &mut |file, block, bytes| {
            self.verify_block(file, block, bytes)?;
            scatter.scatter_block(file, block * BLOCK as u64, bytes);
            Ok(())
        });
        let mut scatter = BlockScatter { reads: &mut reads, first: 0 };
        let fetched = fetch(remote, &mut |file, block, bytes| {
            self.verify_block(file, block, bytes)?;
            scatter.scatter_block(file, block * BLOCK as u64, bytes);
            Ok(())
        });
        read.and(fetched)
    }

    /// Reads blocks of a local file without verifying them. The rank on another host that receives
    /// them verifies them.
    pub fn read_blocks(&self, run: &BlockRange, sink: &mut BlockSink<'_>) -> Result<()> {
        let file = self.manifest.files.get(run.file).filter(|f| run.blocks.end <= f.blocks.len() as u64);
        let file = file.ok_or_else(|| {
            CkptError::missing(&self.path, MissingPart::Blocks { file: run.file, blocks: run.blocks.clone() })
        })?;
        self.read_jobs(&[ReadJob { file: run.file, size: file.bytes, blocks: run.blocks.clone() }], sink)
    }

    fn read_jobs(&self, jobs: &[ReadJob], sink: &mut BlockSink<'_>) -> Result<()> {
        let open = |file: usize| {
            let name = &self.manifest.files[file].name;
            match &self.directory {
                Some(directory) => BlockFile::open(directory, name),
                None => Err(CkptError::missing(&self.path, MissingPart::File(name.clone()))),
            }
        };
        stream(&self.buffers, jobs, open, |(job, read)| {
            let window = read.map_err(|e| self.read_error(&job, e))?;
            job.blocks.clone().zip(window.chunks(BLOCK)).try_for_each(|(b, bytes)| sink(job.file, b, bytes))
        })
    }

    fn resolve_request<'a>(
        &self,
        request: &'a mut ReadRequest<'_>,
        reads: &mut Vec<ByteRead<'a>>,
    ) -> Result<()> {
        let tensor = self.find_tensor(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        if range.end > tensor.elements() {
            return Err(CkptError::RangeOutsideTensor {
                path: self.path().to_owned(),
                tensor: tensor.label(),
                elements: tensor.elements(),
                requested: range.end,
            });
        }
        let size = tensor.dtype.size();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(request.out);
        // narrower elements are read to the end of the buffer, from where they are widened in place
        let skip = bytes.len() - bytes.len() / 4 * size as usize;
        let mut rest = &mut bytes[skip..];
        for (i, part) in partition::cover(&tensor.pieces, Extent::elements, range) {
            let piece = &tensor.pieces[i];
            let from = piece.offset + (part.start - piece.start) * size;
            let len = (part.end - part.start) * size;
            let (out, tail) = std::mem::take(&mut rest).split_at_mut(len as usize);
            rest = tail;
            reads.push(ByteRead { file: piece.file, bytes: from..from + len, out });
        }
        Ok(())
    }

    fn find_tensor(&self, name: &str, role: TensorRole) -> Result<&TensorEntry> {
        match self.index.get(&(role, name.to_owned())) {
            Some(&i) => Ok(&self.manifest.tensors[i]),
            None => Err(CkptError::NoSuchTensor {
                path: self.path().to_owned(),
                tensor: format!("{role}/{name}"),
            }),
        }
    }

    fn verify_block(&self, file: usize, block: u64, bytes: &[u8]) -> Result<()> {
        let entry = &self.manifest.files[file];
        if entry.blocks.get(block as usize) == Some(&Hash::digest(bytes)) {
            return Ok(());
        }
        let damage = Damage {
            file: entry.name.clone(),
            block: Some(block),
            tensors: self.manifest.tensors_in(file, block),
            reason: DamageReason::HashMismatch,
        };
        Err(CkptError::Damaged { path: self.path().to_owned(), damage: Box::new(damage) })
    }

    /// Converts the error of a failed read, and adds the tensors in the blocks.
    fn read_error(&self, job: &ReadJob, e: &CkptError) -> CkptError {
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
                    damage.tensors.extend(self.manifest.tensors_in(job.file, block));
                }
                damage.tensors.dedup();
                CkptError::Damaged { path, damage: Box::new(damage) }
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

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        Checkpoint::read_many(self, requests)
    }

    fn passthrough(&self) -> Result<PassthroughState> {
        let precision = (self.weights_dtype() == Dtype::BF16).then_some(Dtype::BF16);
        Ok(PassthroughState {
            native: Some(Box::new(self.facts().clone())),
            precision,
            ..PassthroughState::default()
        })
    }

    fn step(&self) -> Option<u64> {
        Some(self.facts().step)
    }

    fn weights_dtype(&self) -> Dtype {
        let weights =
            self.manifest.tensors.iter().filter(|t| t.role == TensorRole::Weight && t.elements() > 0);
        let (narrow, wide): (Vec<_>, Vec<_>) = weights.partition(|t| t.dtype == Dtype::BF16);
        if wide.is_empty() && !narrow.is_empty() { Dtype::BF16 } else { Dtype::F32 }
    }

    /// Whether the checkpoint has weights only. A training run always lists its parameter groups,
    /// even if its optimizer has no states.
    fn is_weights_alone(&self) -> bool {
        let facts = self.facts();
        let states = || Checkpoint::tensors(self).any(|t| t.role.is_optimizer_state());
        facts.step == 0 && facts.groups.as_array().is_none_or(Vec::is_empty) && !states()
    }

    fn state(&self) -> TrainingState {
        let facts = self.facts();
        let trained = facts.model.weights.iter().filter(|w| !facts.model.frozen.contains(&w.name));
        TrainingState {
            step: Some(facts.step),
            samples: facts.cursor["at"]["consumed_samples"].as_u64(),
            world: Some(facts.world),
            stage: Some(facts.stage),
            // the worker writes groups in this form; any other form is ignored
            groups: serde_json::from_value(facts.groups.clone()).unwrap_or_default(),
            steps: trained.map(|w| (w.name.clone(), facts.updates(&w.name))).collect(),
            // the scheduler of the program that it was converted from; here the schedule is a
            // function of the step
            scheduler: facts.job["converted"]["scheduler"].clone(),
            loss_scaler: facts.cursor["loss_scale"].clone(),
            ties: facts.model.ties.clone(),
            frozen: facts.model.frozen.clone(),
            buffers: facts.model.buffers.iter().map(|b| b.name.clone()).collect(),
        }
    }

    fn tokens(&self) -> Option<u64> {
        Some(self.facts().tokens)
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.facts().model.hf_config.as_object()
    }

    fn adapter(&self) -> Option<&Value> {
        self.facts().model.adapter.as_ref()
    }

    fn texts(&self) -> &[TextFile] {
        &self.facts().tokenizer
    }

    fn require_weights(&self) -> Result<()> {
        let state = |t: &&TensorEntry| !t.role.is_optimizer_state();
        let files: HashSet<usize> = self
            .manifest
            .tensors
            .iter()
            .filter(state)
            .flat_map(|t| t.pieces.iter().map(|p| p.file))
            .collect();
        self.require_shards(|file| files.contains(&file))
    }
}

/// Widens the BF16 numbers in the second half of `out` to F32, in place.
fn widen(out: &mut [f32]) {
    let len = out.len();
    for i in 0..len {
        // element `i` is written at or before the halves that are still to be read
        let halves: &[u16] = bytemuck::cast_slice(out);
        let half = halves[len + i];
        out[i] = f32::from_bits(u32::from(half) << 16);
    }
}

/// Copies verified blocks, which arrive sorted, to the buffers of the reads.
struct BlockScatter<'s, 'a> {
    reads: &'s mut [ByteRead<'a>],
    /// All reads before this one are complete.
    first: usize,
}

impl BlockScatter<'_, '_> {
    fn scatter_block(&mut self, file: usize, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        let done = |w: &ByteRead<'_>| (w.file, w.bytes.end) <= (file, at) || w.file < file;
        while self.first < self.reads.len() && done(&self.reads[self.first]) {
            self.first += 1;
        }
        for w in &mut self.reads[self.first..] {
            if w.file > file || w.bytes.start >= end {
                return;
            }
            let (from, to) = (w.bytes.start.max(at), w.bytes.end.min(end));
            if from < to {
                let source = &bytes[(from - at) as usize..(to - at) as usize];
                w.out[(from - w.bytes.start) as usize..(to - w.bytes.start) as usize].copy_from_slice(source);
            }
        }
    }
}
