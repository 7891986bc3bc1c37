//! Reading a checkpoint: any range of any tensor, each block verified before its bytes are handed out.
use crate::catalog::{Facts, Role, TensorInfo, TextFile, WeightShape, require_same_model};
use crate::cut;
use crate::disk::{BLOCK, BlockFile, Buffers, Folder, Job, stream};
use crate::dtype::Dtype;
use crate::elsewhere::Elsewhere;
use crate::error::{CkptError, Damage, Result};
use crate::passthrough::Extras;
use crate::hash::Hash;
use crate::host::Host;
use crate::manifest::{Extent, FileEntry, Manifest, TensorEntry};
use crate::source::{Request, Source};
use crate::state::TrainingState;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An open checkpoint. It goes on being readable when its folder is renamed, not when it is removed.
pub struct Checkpoint {
    path: PathBuf,
    /// `None`: nothing of it is here.
    folder: Option<Folder>,
    /// Of each file: is it in the folder?
    here: Vec<bool>,
    manifest: Manifest,
    index: HashMap<(Role, String), usize>,
    buffers: Buffers,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({})", self.path.display())
    }
}

/// Consecutive 1 MiB blocks of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Index of the file: the rank that wrote it.
    pub file: usize,
    pub blocks: Range<u64>,
}

/// Takes a block: file, index, bytes.
pub type Sink<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<()> + 'a;

/// Brings the blocks that are lacking.
pub type Fetch<'a> = dyn FnMut(Vec<Run>, &mut Sink<'_>) -> Result<()> + 'a;

/// Some bytes of a file and where they go.
struct Wanted<'a> {
    file: usize,
    bytes: Range<u64>,
    out: &'a mut [u8],
}

impl Checkpoint {
    /// Opens a folder with a manifest: the manifest is verified against its own hash and checked against itself and the
    /// sizes of the shards. The shards' content is verified as it is read.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        if !crate::disk::exists(path) {
            let why = "there is no such directory".into();
            return Err(CkptError::NotACheckpoint { path: path.to_owned(), why });
        }
        let folder = Folder::open(path)?;
        let manifest = Manifest::load(&folder)?;
        let own = Elsewhere::of(path, &manifest);
        let mut here = Vec::with_capacity(manifest.files.len());
        for (i, file) in manifest.files.iter().enumerate() {
            here.push(match folder.size_of(&file.name)? {
                Some(size) if size == file.bytes => true,
                Some(size) => {
                    let why = format!("it has {size} bytes, the manifest says {}", file.bytes);
                    return Err(CkptError::damaged(path, &file.name, why));
                }
                None if own.host_of(i).is_some() => false,
                None => return Err(CkptError::Missing { path: path.to_owned(), what: file.name.clone() }),
            });
        }
        Ok(Checkpoint::of(path, Some(folder), here, manifest))
    }

    /// A checkpoint that is scattered over hosts, from its manifest's text: what is in `folder` (if there is one) can be
    /// read here, the rest by [`Checkpoint::read_many_with`].
    pub fn from_manifest(path: &Path, text: Vec<u8>, in_folder: bool) -> Result<Checkpoint> {
        let manifest = Manifest::parse(path, text)?;
        let folder = if in_folder { Some(Folder::open(path)?) } else { None };
        let has = |f: &FileEntry| {
            folder.as_ref().is_some_and(|d| d.size_of(&f.name).is_ok_and(|n| n == Some(f.bytes)))
        };
        let here = manifest.files.iter().map(has).collect();
        Ok(Checkpoint::of(path, folder, here, manifest))
    }

    fn of(path: &Path, folder: Option<Folder>, here: Vec<bool>, manifest: Manifest) -> Checkpoint {
        let index = manifest.tensors.iter().enumerate().map(|(i, t)| ((t.role, t.name.clone()), i)).collect();
        Checkpoint { path: path.to_owned(), folder, here, manifest, index, buffers: Buffers::default() }
    }

    /// As given to [`Checkpoint::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Of each file: is it in the folder?
    pub fn here(&self) -> &[bool] {
        &self.here
    }

    /// The host on which a file was written, when it isn't in one directory with the others.
    pub fn host_of(&self, file: usize) -> Option<&Host> {
        self.manifest.host_of(file)
    }

    /// Number of 1 MiB blocks of each file.
    pub fn blocks(&self) -> Vec<u64> {
        self.manifest.files.iter().map(|f| f.blocks.len() as u64).collect()
    }

    /// Refuses a checkpoint of which some shards are on other hosts.
    pub fn require_whole(&self) -> Result<()> {
        self.require_here(|_| true)
    }

    fn require_here(&self, needed: impl Fn(usize) -> bool) -> Result<()> {
        let lacking = (0..self.here.len()).filter(|&i| !self.here[i] && needed(i));
        let shards: Vec<(String, String)> = lacking.map(|i| self.whereabouts(i)).collect();
        match shards.is_empty() {
            true => Ok(()),
            false => Err(CkptError::Elsewhere { path: self.path.clone(), shards }),
        }
    }

    /// Name of a shard and where it lies.
    fn whereabouts(&self, file: usize) -> (String, String) {
        let host = self.host_of(file).map_or("(not said)".to_owned(), Host::to_string);
        (self.manifest.files[file].name.clone(), host)
    }

    /// What the saving run supplied.
    pub fn facts(&self) -> &Facts {
        &self.manifest.facts
    }

    /// Every tensor, weights first, in canonical order.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo> + '_ {
        self.manifest.tensors.iter().map(|t| TensorInfo {
            name: t.name.clone(),
            role: t.role,
            dtype: t.dtype,
            shape: t.shape.clone(),
        })
    }

    /// Name and size of every shard.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.manifest.files.iter().map(|f| (f.name.as_str(), f.bytes))
    }

    /// Bytes of all shards.
    pub fn bytes(&self) -> u64 {
        self.manifest.bytes()
    }

    /// True when there is such a tensor.
    pub fn holds(&self, name: &str, role: Role) -> bool {
        self.index.contains_key(&(role, name.to_owned()))
    }

    /// Refuses a checkpoint of a model with other weights, naming the first tensor that differs.
    pub fn require_model(&self, weights: &[WeightShape]) -> Result<()> {
        require_same_model(self.path(), &self.manifest.facts.model, weights)
    }

    /// Reads elements `range` of one tensor; `out` is as long as the range. For many ranges [`Checkpoint::read_many`]
    /// is better: it reads no block twice.
    pub fn read_f32(&self, name: &str, role: Role, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        if range.start > range.end || range.end - range.start != out.len() as u64 {
            return Err(CkptError::invalid(format!("a range of {range:?} for {} elements", out.len())));
        }
        self.read_many(&mut [Request { name, role, start_element: range.start, out }])
    }

    /// Reads many ranges in the order in which they lie on the disk: each block that holds wanted bytes is read and
    /// verified once. After an error the contents of the outputs mean nothing. Needs 24 MiB beside the outputs.
    ///
    /// # Errors
    /// [`CkptError::Damaged`] names the block and the tensors in it; [`CkptError::Mismatch`] when a tensor or range is
    /// not there.
    pub fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        self.read_many_with(requests, &mut |lacking, _| {
            self.require_here(|file| lacking.iter().any(|run| run.file == file))
        })
    }

    /// The same when some of the files aren't here: `fetch` is called once, after the others are read, with all blocks
    /// that are lacking (sorted), and hands each over in that order; each is verified.
    pub fn read_many_with(&self, requests: &mut [Request<'_>], fetch: &mut Fetch<'_>) -> Result<()> {
        self.read_stored(requests, fetch)?;
        for request in requests.iter_mut() {
            if self.tensor(request.name, request.role)?.dtype == Dtype::BF16 {
                widen(request.out);
            }
        }
        Ok(())
    }

    /// Each output ends with the elements as they are stored.
    fn read_stored(&self, requests: &mut [Request<'_>], fetch: &mut Fetch<'_>) -> Result<()> {
        let mut wanted = Vec::new();
        for request in requests.iter_mut() {
            self.resolve(request, &mut wanted)?;
        }
        wanted.sort_by_key(|w| (w.file, w.bytes.start));
        let (mut jobs, mut lacking) = (Vec::new(), Vec::new());
        for of_file in wanted.chunk_by(|a, b| a.file == b.file) {
            let file = of_file[0].file;
            let ranges = of_file.iter().map(|w| w.bytes.clone()).collect();
            let size = self.manifest.files[file].bytes;
            for blocks in cut::blocks(ranges, BLOCK as u64) {
                match self.here[file] {
                    true => jobs.push(Job { file, size, blocks }),
                    false => lacking.push(Run { file, blocks }),
                }
            }
        }
        let mut scatter = Scatter { wanted: &mut wanted, first: 0 };
        let read = self.read_jobs(&jobs, &mut |file, block, bytes| {
            self.verify_block(file, block, bytes)?;
            scatter.block(file, block * BLOCK as u64, bytes);
            Ok(())
        });
        let mut scatter = Scatter { wanted: &mut wanted, first: 0 };
        let fetched = fetch(lacking, &mut |file, block, bytes| {
            self.verify_block(file, block, bytes)?;
            scatter.block(file, block * BLOCK as u64, bytes);
            Ok(())
        });
        read.and(fetched)
    }

    /// Reads blocks of a file that is here as they are, for a reader on another host, who verifies them.
    pub fn read_blocks(&self, run: &Run, sink: &mut Sink<'_>) -> Result<()> {
        let file = self.manifest.files.get(run.file).filter(|f| run.blocks.end <= f.blocks.len() as u64);
        let file = file.ok_or_else(|| CkptError::Missing {
            path: self.path.clone(),
            what: format!("blocks {:?} of file {}", run.blocks, run.file),
        })?;
        self.read_jobs(&[Job { file: run.file, size: file.bytes, blocks: run.blocks.clone() }], sink)
    }

    fn read_jobs(&self, jobs: &[Job], sink: &mut Sink<'_>) -> Result<()> {
        let open = |file: usize| {
            let name = &self.manifest.files[file].name;
            match &self.folder {
                Some(folder) => BlockFile::open(folder, name),
                None => Err(CkptError::Missing { path: self.path.clone(), what: name.clone() }),
            }
        };
        stream(&self.buffers, jobs, open, |(job, read)| {
            let window = read.map_err(|e| self.explain(&job, e))?;
            job.blocks.clone().zip(window.chunks(BLOCK)).try_for_each(|(b, bytes)| sink(job.file, b, bytes))
        })
    }

    fn resolve<'a>(&self, request: &'a mut Request<'_>, wanted: &mut Vec<Wanted<'a>>) -> Result<()> {
        let tensor = self.tensor(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        if range.end > tensor.elements() {
            return Err(CkptError::Mismatch {
                path: self.path().to_owned(),
                what: format!("size of {}", tensor.label()),
                expected: format!("at least {} elements", range.end),
                found: format!("{} elements", tensor.elements()),
            });
        }
        let size = tensor.dtype.size();
        let all: &mut [u8] = bytemuck::cast_slice_mut(request.out);
        // narrower elements come to lie at the end, from where they are widened
        let skip = all.len() - all.len() / 4 * size as usize;
        let mut rest = &mut all[skip..];
        for (i, part) in cut::cover(&tensor.pieces, Extent::elements, range) {
            let piece = &tensor.pieces[i];
            let from = piece.offset + (part.start - piece.start) * size;
            let len = (part.end - part.start) * size;
            let (out, tail) = std::mem::take(&mut rest).split_at_mut(len as usize);
            rest = tail;
            wanted.push(Wanted { file: piece.file, bytes: from..from + len, out });
        }
        Ok(())
    }

    fn tensor(&self, name: &str, role: Role) -> Result<&TensorEntry> {
        match self.index.get(&(role, name.to_owned())) {
            Some(&i) => Ok(&self.manifest.tensors[i]),
            None => Err(CkptError::Mismatch {
                path: self.path().to_owned(),
                what: "tensors".into(),
                expected: format!("{role}/{name}"),
                found: "no such tensor".into(),
            }),
        }
    }

    fn verify_block(&self, file: usize, block: u64, bytes: &[u8]) -> Result<()> {
        let entry = &self.manifest.files[file];
        if entry.blocks.get(block as usize) == Some(&Hash::of(bytes)) {
            return Ok(());
        }
        let damage = Damage {
            file: entry.name.clone(),
            block: Some(block),
            tensors: self.manifest.tensors_in(file, block),
            why: "its bytes do not fit their BLAKE3".into(),
        };
        Err(CkptError::Damaged { path: self.path().to_owned(), damage })
    }

    /// A window that could not be read, as the caller's error.
    fn explain(&self, job: &Job, e: &CkptError) -> CkptError {
        let path = self.path().to_owned();
        match e {
            CkptError::Damaged { damage, .. } => CkptError::Damaged { path, damage: damage.clone() },
            CkptError::Missing { what, .. } => CkptError::Missing { path, what: what.clone() },
            other => {
                let mut damage = Damage {
                    file: self.manifest.files[job.file].name.clone(),
                    block: Some(job.blocks.start),
                    tensors: Vec::new(),
                    why: other.to_string(),
                };
                for block in job.blocks.clone() {
                    damage.tensors.extend(self.manifest.tensors_in(job.file, block));
                }
                damage.tensors.dedup();
                CkptError::Damaged { path, damage }
            }
        }
    }
}

impl Source for Checkpoint {
    fn path(&self) -> &Path {
        Checkpoint::path(self)
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        Checkpoint::tensors(self).collect()
    }

    fn read_many(&self, requests: &mut [Request<'_>]) -> Result<()> {
        Checkpoint::read_many(self, requests)
    }

    fn extras(&self) -> Result<Extras> {
        let precision = (self.weights_dtype() == Dtype::BF16).then_some(Dtype::BF16);
        Ok(Extras { native: Some(Box::new(self.facts().clone())), precision, ..Extras::default() })
    }

    fn step(&self) -> Option<u64> {
        Some(self.facts().step)
    }

    fn weights_dtype(&self) -> Dtype {
        let weights = self.manifest.tensors.iter().filter(|t| t.role == Role::Weight && t.elements() > 0);
        let (narrow, wide): (Vec<_>, Vec<_>) = weights.partition(|t| t.dtype == Dtype::BF16);
        if wide.is_empty() && !narrow.is_empty() { Dtype::BF16 } else { Dtype::F32 }
    }

    /// A run always lists its groups, also where its optimizer keeps no states.
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
            // the worker writes them in this form; other forms are none
            groups: serde_json::from_value(facts.groups.clone()).unwrap_or_default(),
            steps: trained.map(|w| (w.name.clone(), facts.updates(&w.name))).collect(),
            // that of the program that it was converted from: here the schedule is a function of the step
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
        self.require_here(|file| files.contains(&file))
    }
}

/// The bf16 numbers in the second half of `out` become its elements.
fn widen(out: &mut [f32]) {
    let len = out.len();
    for i in 0..len {
        // what is written at `i` lies at or before the halves that are still to be read
        let halves: &[u16] = bytemuck::cast_slice(out);
        let half = halves[len + i];
        out[i] = f32::from_bits(u32::from(half) << 16);
    }
}

/// Copies verified blocks, which come sorted, to where they are wanted.
struct Scatter<'s, 'a> {
    wanted: &'s mut [Wanted<'a>],
    /// All before this one have what they want.
    first: usize,
}

impl Scatter<'_, '_> {
    fn block(&mut self, file: usize, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        let done = |w: &Wanted<'_>| (w.file, w.bytes.end) <= (file, at) || w.file < file;
        while self.first < self.wanted.len() && done(&self.wanted[self.first]) {
            self.first += 1;
        }
        for w in &mut self.wanted[self.first..] {
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
