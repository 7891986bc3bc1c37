//! `manifest.json`: which byte ranges of which file hold which tensor, a hash per block, and facts
//! about the run.
//!
//! The file begins with `{"blake3":"<64 hex digits>",`. The hash is that of the whole file with
//! zeros in place of the digits, so that every flipped bit is detected. A hash is not a signature,
//! so all contents are checked as untrusted input.
use crate::catalog::{RunFacts, TensorRole, check_name, elements};
use crate::diagnosis::Diagnosis;
use crate::disk::{BLOCK, Directory};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result, SaveProblem, UnsupportedFeature};
use crate::formats::safetensors;
use crate::hash::Hash;
use crate::host::StorageHost;
use crate::manifest_error::ManifestError;
use crate::partition;
use crate::stripes;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Name of the file. A directory without it is not a native checkpoint.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Limit on the size of the file, bytes. 64 hex digits per MiB of state suffice for about 3 TB.
const MANIFEST_MAX: u64 = 256 << 20;
const FORMAT: &str = "launch checkpoint";
/// Without parity; readable by every version of the program.
const VERSION: u32 = 1;
/// With parity, or with the host of each shard.
const EXTENDED_VERSION: u32 = 2;
/// With BF16 weights, and everything of version 2.
const NARROW_VERSION: u32 = 3;
/// Limit on the hosts of one checkpoint.
const HOSTS_MAX: usize = 65_536;
const OPENING: &str = "{\"blake3\":\"";
const HEX: Range<usize> = OPENING.len()..OPENING.len() + 64;

/// The whole manifest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// Must be the first field; see the module documentation.
    blake3: String,
    format: String,
    version: u32,
    pub(crate) facts: RunFacts,
    block_bytes: u64,
    /// The hosts that store the shards, when they share no directory; empty in version 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hosts: Vec<StorageHost>,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
    /// One parity file per rank; absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parity: Option<Vec<FileEntry>>,
}

/// The fields that all versions have.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// A shard or parity file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// BLAKE3 hash of each [`BLOCK`] of the file; the last block may be shorter.
    pub(crate) blocks: Vec<Hash>,
    /// Index into [`Manifest::hosts`]; absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<usize>,
}

/// A logical tensor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    pub(crate) role: TensorRole,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Sorted by start; together they cover the tensor exactly once.
    pub(crate) pieces: Vec<Extent>,
}

/// Consecutive elements of a tensor in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Extent {
    /// First element.
    pub(crate) start: u64,
    /// Number of elements.
    pub(crate) count: u64,
    /// Index into [`Manifest::files`].
    pub(crate) file: usize,
    /// Byte offset in the file.
    pub(crate) offset: u64,
}

impl Extent {
    /// Elements of the tensor; a start that overflows is seen by [`cut::flaw`].
    pub(crate) fn elements(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.count)
    }

    /// Range of bytes in the file.
    pub(crate) fn bytes(&self, dtype: Dtype) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.count.saturating_mul(dtype.size()))
    }
}

impl TensorEntry {
    /// `role/name`.
    pub(crate) fn label(&self) -> String {
        format!("{}/{}", self.role, self.name)
    }

    /// Number of elements.
    pub(crate) fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(u64::MAX)
    }
}

/// File name of a rank's shard.
pub(crate) fn shard_name(rank: u32, world: u32) -> String {
    format!("shard-{rank:05}-of-{world:05}.safetensors")
}

impl Manifest {
    pub(crate) fn new(
        facts: RunFacts,
        files: Vec<FileEntry>,
        tensors: Vec<TensorEntry>,
        parity: Option<Vec<FileEntry>>,
    ) -> Manifest {
        let (blake3, format) = ("0".repeat(64), FORMAT.to_owned());
        let (block_bytes, hosts) = (BLOCK as u64, Vec::new());
        let mut manifest =
            Manifest { blake3, format, version: VERSION, facts, block_bytes, hosts, files, tensors, parity };
        manifest.version = manifest.needed_version();
        manifest
    }

    /// The oldest version that can represent the contents.
    fn needed_version(&self) -> u32 {
        if self.tensors.iter().any(|t| t.dtype == Dtype::BF16) {
            NARROW_VERSION
        } else if self.parity.is_some() || !self.hosts.is_empty() {
            EXTENDED_VERSION
        } else {
            VERSION
        }
    }

    /// Records the host of each shard, by rank.
    pub(crate) fn with_hosts(mut self, hosts: Vec<StorageHost>, host_of: &[usize]) -> Manifest {
        self.hosts = hosts;
        self.version = self.needed_version();
        for (file, host) in self.files.iter_mut().zip(host_of) {
            file.host = Some(*host);
        }
        self
    }

    /// The host that stores this shard, when the manifest records one.
    pub(crate) fn shard_host(&self, file: usize) -> Option<&StorageHost> {
        self.hosts.get(self.files.get(file)?.host?)
    }

    /// Serializes the manifest with its hash.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut text = self.unsealed_text().map_err(CkptError::invalid_save)?;
        if text.len() as u64 > MANIFEST_MAX {
            return Err(CkptError::invalid_save(SaveProblem::ManifestTooLarge {
                bytes: text.len() as u64,
                limit: MANIFEST_MAX,
            }));
        }
        text[HEX].fill(b'0');
        let hash = Hash::digest(&text).hex();
        text[HEX].copy_from_slice(hash.as_bytes());
        Ok(text)
    }

    /// The JSON text, with zeros in place of the hash.
    fn unsealed_text(&self) -> std::result::Result<Vec<u8>, ManifestError> {
        let text = serde_json::to_vec(self)?;
        match text.starts_with(OPENING.as_bytes()) && text.len() > HEX.end {
            true => Ok(text),
            false => Err(ManifestError::HashNotFirst),
        }
    }

    /// Reads the manifest and checks everything that does not need the shards.
    pub(crate) fn load(directory: &Directory) -> Result<Manifest> {
        Manifest::parse(directory.path(), Manifest::read(directory)?)
    }

    /// Reads the text of the manifest, unchecked.
    pub(crate) fn read(directory: &Directory) -> Result<Vec<u8>> {
        match directory.read(MANIFEST, MANIFEST_MAX) {
            Err(CkptError::Missing { path, .. }) => {
                Err(CkptError::not_a_checkpoint(&path, Diagnosis::ManifestMissing))
            }
            other => other,
        }
    }

    /// Writes the matching hash into the text of a manifest, if the text is long enough.
    pub(crate) fn seal(text: &mut [u8]) {
        if text.get_mut(HEX).map(|hex| hex.fill(b'0')).is_some() {
            let hash = Hash::digest(text).hex();
            text[HEX].copy_from_slice(hash.as_bytes());
        }
    }

    /// Verifies the hash of a text; returns the hash and the text with zeros in its place.
    pub(crate) fn unsealed(mut text: Vec<u8>) -> std::result::Result<(String, Vec<u8>), ManifestError> {
        let stored = text.get(HEX).ok_or(ManifestError::Truncated)?.to_owned();
        text[HEX].fill(b'0');
        let hash = Hash::digest(&text).hex();
        match text.starts_with(OPENING.as_bytes()) && hash.as_bytes() == stored {
            true => Ok((hash, text)),
            false => Err(ManifestError::HashMismatch),
        }
    }

    /// Parses and checks the text of the manifest of the checkpoint at `path`.
    pub(crate) fn parse(path: &Path, text: Vec<u8>) -> Result<Manifest> {
        let damaged = |error: ManifestError| CkptError::damaged(path, MANIFEST, error);
        let (_, zeroed) = Manifest::unsealed(text).map_err(damaged)?;
        let head: Head = serde_json::from_slice(&zeroed).map_err(|e| damaged(e.into()))?;
        if head.format != FORMAT || !(VERSION..=NARROW_VERSION).contains(&head.version) {
            let (format, version) = (head.format, head.version);
            let (oldest, newest) = (VERSION, NARROW_VERSION);
            let feature = UnsupportedFeature::FormatVersion { format, version, oldest, newest };
            return Err(CkptError::unsupported(path, feature));
        }
        let manifest: Manifest = serde_json::from_slice(&zeroed).map_err(|e| damaged(e.into()))?;
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// Size of all shards, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// The shards, then the parity files.
    pub(crate) fn all_files(&self) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().chain(self.parity.iter().flatten())
    }

    /// `role/name` of the tensors with bytes in this block.
    pub(crate) fn tensors_in(&self, file: usize, block: u64) -> Vec<String> {
        let (start, end) = (block * BLOCK as u64, (block + 1) * BLOCK as u64);
        let inside = |t: &TensorEntry, e: &Extent| {
            let bytes = e.bytes(t.dtype);
            e.file == file && bytes.start < end && bytes.end > start
        };
        self.tensors
            .iter()
            .filter(|t| t.pieces.iter().any(|e| inside(t, e)))
            .map(TensorEntry::label)
            .collect()
    }

    /// Rejects a manifest that contradicts itself.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        self.facts.check()?;
        if self.block_bytes != BLOCK as u64 {
            return Err(ManifestError::BlockSize { found: self.block_bytes, expected: BLOCK as u64 });
        }
        self.check_files()?;
        let version = self.needed_version();
        if version != self.version {
            return Err(ManifestError::Version { recorded: self.version, needed: version });
        }
        if let Some(parity) = &self.parity {
            let sizes: Vec<u64> = self.files.iter().map(|f| f.bytes).collect();
            let given = parity.iter().map(|f| (f.name.as_str(), f.bytes, f.blocks.len() as u64));
            stripes::check(&sizes, given)?;
        }
        self.check_hosts()?;
        let mut spans: Vec<Vec<Range<u64>>> = vec![Vec::new(); self.files.len()];
        let mut seen = HashMap::new();
        for tensor in &self.tensors {
            self.check_tensor(tensor, &mut spans)?;
            if seen.insert((tensor.role, tensor.name.as_str()), tensor.shape.as_slice()).is_some() {
                return Err(ManifestError::Duplicate(tensor.label()));
            }
        }
        for (file, spans) in self.files.iter().zip(&mut spans) {
            spans.sort_by_key(|r| r.start);
            if let Some(w) = spans.windows(2).find(|w| w[0].end > w[1].start) {
                return Err(ManifestError::Overlap { file: file.name.clone(), bytes: w[1].start..w[0].end });
            }
        }
        self.check_complete(&seen)
    }

    fn check_files(&self) -> std::result::Result<(), ManifestError> {
        if self.files.len() as u64 != u64::from(self.facts.world) {
            return Err(ManifestError::ShardCount { shards: self.files.len(), world: self.facts.world });
        }
        let mut total = 0u64;
        for (rank, file) in self.files.iter().enumerate() {
            if file.name != shard_name(rank as u32, self.facts.world) {
                return Err(ManifestError::ShardName { rank, name: file.name.clone() });
            }
            if file.blocks.len() as u64 != file.bytes.div_ceil(BLOCK as u64) {
                return Err(ManifestError::BlockCount {
                    file: file.name.clone(),
                    bytes: file.bytes,
                    hashes: file.blocks.len(),
                });
            }
            total = total.checked_add(file.bytes).ok_or(ManifestError::SizeOverflow)?;
        }
        Ok(())
    }

    /// When hosts are listed, every shard must be on one of them.
    fn check_hosts(&self) -> std::result::Result<(), ManifestError> {
        if self.hosts.is_empty() {
            return match self.files.iter().all(|f| f.host.is_none()) {
                true => Ok(()),
                false => Err(ManifestError::NoHosts),
            };
        }
        if self.hosts.len() > HOSTS_MAX {
            return Err(ManifestError::HostCount { found: self.hosts.len(), limit: HOSTS_MAX });
        }
        let mut seen = HashSet::new();
        for host in &self.hosts {
            host.check()?;
            if !seen.insert(&host.id) {
                return Err(ManifestError::Duplicate(format!("host {}", host.id)));
            }
        }
        match self.files.iter().find(|f| f.host.is_none_or(|h| h >= self.hosts.len())) {
            Some(file) => Err(ManifestError::ShardWithoutHost(file.name.clone())),
            None => Ok(()),
        }
    }

    fn check_tensor(
        &self,
        tensor: &TensorEntry,
        spans: &mut [Vec<Range<u64>>],
    ) -> std::result::Result<(), ManifestError> {
        check_name(&tensor.name)?;
        let label = tensor.label();
        let narrow = tensor.role == TensorRole::Weight && tensor.dtype == Dtype::BF16;
        if tensor.dtype != Dtype::F32 && !narrow {
            return Err(ManifestError::Dtype { tensor: label, dtype: tensor.dtype });
        }
        let total = elements(&tensor.shape).ok_or_else(|| ManifestError::ImpossibleShape {
            tensor: label.clone(),
            shape: tensor.shape.clone(),
        })?;
        let error = partition::coverage_error(total, tensor.pieces.iter().map(Extent::elements));
        if let Some(error) = error {
            return Err(ManifestError::Coverage { tensor: label, error });
        }
        for piece in &tensor.pieces {
            let bytes = piece.bytes(tensor.dtype);
            match (self.files.get(piece.file), spans.get_mut(piece.file)) {
                (Some(file), Some(spans)) if bytes.end <= file.bytes && bytes.start >= 8 => spans.push(bytes),
                _ => {
                    return Err(ManifestError::OutsideShard { tensor: label, bytes, shard: piece.file });
                }
            }
        }
        Ok(())
    }

    /// Every tensor of the model and of the optimizer state is stored with the shape of the model,
    /// and no other tensor is.
    fn check_complete(
        &self,
        found: &HashMap<(TensorRole, &str), &[u64]>,
    ) -> std::result::Result<(), ManifestError> {
        let card = &self.facts.model;
        let frozen: HashSet<&str> = card.frozen.iter().map(String::as_str).collect();
        let mut expected: HashMap<(TensorRole, &str), &[u64]> = HashMap::new();
        for role in TensorRole::ALL {
            let listed = if role == TensorRole::Buffer { &card.buffers } else { &card.weights };
            let any = role.is_optimizer_state() && found.keys().any(|(r, _)| *r == role);
            for t in listed {
                let key = (role, t.name.as_str());
                let wanted = match role.is_optimizer_state() {
                    true => (any && !frozen.contains(key.1)) || found.contains_key(&key),
                    false => true,
                };
                if wanted {
                    expected.insert(key, &t.shape);
                    match found.get(&key) {
                        None => {
                            return Err(ManifestError::MissingTensor(format!("{role}/{}", t.name)));
                        }
                        Some(shape) if **shape != *t.shape => {
                            return Err(ManifestError::Shape {
                                tensor: format!("{role}/{}", t.name),
                                found: shape.to_vec(),
                                expected: t.shape.clone(),
                            });
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        match found.keys().find(|k| !expected.contains_key(*k)) {
            Some((role, name)) => Err(ManifestError::UnknownTensor(format!("{role}/{name}"))),
            None => Ok(()),
        }
    }

    /// The expected header of a shard: dtype, elements and byte range in the file, by piece key.
    pub(crate) fn expected_header(&self, file: usize) -> HashMap<String, (Dtype, u64, Range<u64>)> {
        let mut expected = HashMap::new();
        for tensor in &self.tensors {
            for piece in tensor.pieces.iter().filter(|p| p.file == file && p.count > 0) {
                let key = safetensors::piece_key(tensor.role, &tensor.name, piece.start);
                expected.insert(key, (tensor.dtype, piece.count, piece.bytes(tensor.dtype)));
            }
        }
        expected
    }
}
