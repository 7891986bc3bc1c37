//! [`Manifest`]: the content of `manifest.json`, which lists the tensors and files of a checkpoint
//! in launch's own format.
//!
//! The file begins with `{"blake3":"<64 hex digits>",`. The hash covers the whole file with zeros
//! in place of these digits, so that every flipped bit is detected. A hash is not a signature, so
//! all contents are checked as untrusted input.
use super::parity_stripes;
use super::storage_host::StorageHost;
use crate::catalog::RunFacts;
use crate::codec::disk::{BLOCK_BYTES, Directory};
use crate::codec::sealed_json::{JsonSeal, SealError};
use crate::codec::{json, safetensors};
use crate::error::{CkptError, Diagnosis, ManifestError, Result, SaveProblem, UnsupportedFeature};
use crate::format_constants::{MANIFEST_FILE, TENSORS_MAX};
use crate::hash::Hash;
use crate::tensor::{
    Dtype, TensorRole, check_tensor_name, count_elements, deserialize_shape, element_ranges,
};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Maximum size in bytes of the file `manifest.json`. With 64 hex digits per MiB of state, this
/// suffices for about 3 TB.
const MANIFEST_BYTES_MAX: u64 = 256 << 20;
/// The value of the field `format` in `manifest.json`, by which a checkpoint in launch's own format
/// is recognized.
const FORMAT_NAME: &str = "launch checkpoint";
/// The version number of manifests without parity files, without a list of hosts and without BF16
/// weights. Every version of the program reads them.
const BASE_VERSION: u32 = 1;
/// The manifest version of a checkpoint that has parity files (XOR redundancy) or records which
/// host stores each shard.
const PARITY_AND_HOSTS_VERSION: u32 = 2;
/// The version number of manifests of checkpoints with BF16 weights. Such a manifest may also have
/// parity and hosts.
const BF16_VERSION: u32 = 3;
/// Maximum number of hosts that store parts of one checkpoint.
const HOSTS_MAX: usize = 65_536;
/// Maximum number of shards of one checkpoint, and maximum number of parity files.
const SHARDS_MAX: usize = 65_536;

/// The content of `manifest.json`, which describes a checkpoint in launch's own (native) format.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// BLAKE3 hash of `manifest.json`, with zeros in place of this hash. Must be the first field,
    /// since the hash has a fixed position.
    blake3: String,
    format: String,
    version: u32,
    pub(crate) facts: RunFacts,
    block_bytes: u64,
    /// The hosts that store the shards of a host-local checkpoint. Empty if the hosts share the
    /// checkpoint directory, and in version 1.
    #[serde(default, deserialize_with = "json::deserialize_list::<_, _, HOSTS_MAX>")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) hosts: Vec<StorageHost>,
    #[serde(deserialize_with = "json::deserialize_list::<_, _, SHARDS_MAX>")]
    pub(crate) files: Vec<FileEntry>,
    #[serde(deserialize_with = "json::deserialize_list::<_, _, TENSORS_MAX>")]
    pub(crate) tensors: Vec<TensorEntry>,
    /// The parity files, one per rank. `None` in a checkpoint without parity, and in version 1.
    #[serde(default, deserialize_with = "json::deserialize_optional_list::<_, _, SHARDS_MAX>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parity: Option<Vec<FileEntry>>,
}

/// The two fields that manifests of all versions have, the name of the format and the version
/// number, which are checked before all other fields.
#[derive(Deserialize)]
struct ManifestHeader {
    format: String,
    version: u32,
}

/// The name, size and block hashes of one shard or parity file, as the manifest of a checkpoint
/// states them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// BLAKE3 hash of each block of [`BLOCK_BYTES`] bytes of the file. The last block may be
    /// shorter.
    pub(crate) blocks: Vec<Hash>,
    /// Index into [`Manifest::hosts`] of the host that stores the file. Absent if the manifest has
    /// no hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<usize>,
}

/// What a manifest states about one tensor: name, role, dtype, shape, and where its elements are
/// stored.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    pub(crate) role: TensorRole,
    pub(crate) dtype: Dtype,
    #[serde(deserialize_with = "deserialize_shape")]
    pub(crate) shape: Vec<u64>,
    /// The pieces of the tensor, sorted by first element. Together the pieces contain each element
    /// exactly once.
    pub(crate) pieces: Vec<TensorPieceEntry>,
}

/// The entry of a manifest for consecutive elements of one tensor: their range in the tensor, and
/// their offset in a rank's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorPieceEntry {
    /// Index in the tensor of the first element of the piece.
    pub(crate) start: u64,
    /// Number of elements in the piece.
    pub(crate) count: u64,
    /// Index in [`Manifest::files`] of the shard that stores the piece.
    pub(crate) file: usize,
    /// Byte offset in the shard of the first element of the piece.
    pub(crate) offset: u64,
}

impl TensorPieceEntry {
    /// Returns the range of indices, within the tensor, of the elements in this piece. An end that
    /// overflows becomes `u64::MAX`, which [`element_ranges::find_coverage_error`] rejects.
    pub(crate) fn element_range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.count)
    }

    /// Returns the range of bytes that this piece occupies in its rank's file, for elements of the
    /// dtype `dtype`.
    pub(crate) fn byte_range(&self, dtype: Dtype) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.count.saturating_mul(dtype.size()))
    }
}

impl TensorEntry {
    /// Formats the name of the tensor as `role/name`.
    pub(crate) fn label(&self) -> String {
        format!("{}/{}", self.role, self.name)
    }

    /// Returns the number of elements of the tensor, or `u64::MAX` if the number overflows.
    pub(crate) fn element_count(&self) -> u64 {
        count_elements(&self.shape).unwrap_or(u64::MAX)
    }
}

/// Returns the name of the file that stores the shard of rank `rank`, such as
/// `shard-00000-of-00004.safetensors`.
pub(crate) fn shard_file_name(rank: u32, world: u32) -> String {
    format!("shard-{rank:05}-of-{world:05}.safetensors")
}

impl Manifest {
    /// Creates a manifest, with the oldest version number that can represent the contents. Does not
    /// check the contents, and leaves the hash at zeros.
    pub(crate) fn new(
        facts: RunFacts,
        files: Vec<FileEntry>,
        tensors: Vec<TensorEntry>,
        parity: Option<Vec<FileEntry>>,
    ) -> Manifest {
        let mut manifest = Manifest {
            blake3: JsonSeal::empty_hash(),
            format: FORMAT_NAME.to_owned(),
            version: BASE_VERSION,
            facts,
            block_bytes: BLOCK_BYTES as u64,
            hosts: Vec::new(),
            files,
            tensors,
            parity,
        };
        manifest.version = manifest.choose_oldest_version();
        manifest
    }

    /// Returns the oldest version of the manifest format that can represent this manifest, so that
    /// older releases of launch can read it if possible.
    fn choose_oldest_version(&self) -> u32 {
        if self.tensors.iter().any(|t| t.dtype == Dtype::BF16) {
            BF16_VERSION
        } else if self.parity.is_some() || !self.hosts.is_empty() {
            PARITY_AND_HOSTS_VERSION
        } else {
            BASE_VERSION
        }
    }

    /// Adds the hosts that store the checkpoint to the manifest, and records for each shard which
    /// of the hosts stores it. `host_of[r]` is the index in `hosts` of the host that stores the
    /// shard of rank r.
    pub(crate) fn with_hosts(mut self, hosts: Vec<StorageHost>, host_of: &[usize]) -> Manifest {
        self.hosts = hosts;
        self.version = self.choose_oldest_version();
        for (file, host) in self.files.iter_mut().zip(host_of) {
            file.host = Some(*host);
        }
        self
    }

    /// Returns the host that stores the shard with the index `file`, or `None` if the manifest
    /// records no host for it.
    pub(crate) fn shard_host(&self, file: usize) -> Option<&StorageHost> {
        self.hosts.get(self.files.get(file)?.host?)
    }

    /// Returns the text of `manifest.json` for this manifest: compact JSON that contains the BLAKE3
    /// hash of the text itself.
    ///
    /// # Errors
    /// Fails if the text is longer than [`MANIFEST_BYTES_MAX`].
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut text = self.encode_unsealed().map_err(CkptError::invalid_save)?;
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(CkptError::invalid_save(SaveProblem::ManifestTooLarge {
                bytes: text.len() as u64,
                limit: MANIFEST_BYTES_MAX,
            }));
        }
        JsonSeal::COMPACT.seal(&mut text);
        Ok(text)
    }

    /// Serializes the manifest to JSON without computing the hash in its field `blake3`.
    fn encode_unsealed(&self) -> std::result::Result<Vec<u8>, ManifestError> {
        let text = serde_json::to_vec(self)?;
        match JsonSeal::COMPACT.has_hash(&text) {
            true => Ok(text),
            false => Err(ManifestError::HashNotFirst),
        }
    }

    /// Reads the manifest of the checkpoint in `directory`, and verifies its hash and consistency.
    /// Does not read the shards.
    pub(crate) fn load(directory: &Directory) -> Result<Manifest> {
        Manifest::parse(directory.path(), Manifest::read_text(directory)?)
    }

    /// Reads the text of the manifest in `directory` without verifying it.
    ///
    /// # Errors
    /// Fails with [`Diagnosis::ManifestMissing`] if the file does not exist.
    pub(crate) fn read_text(directory: &Directory) -> Result<Vec<u8>> {
        match directory.read_file(MANIFEST_FILE, MANIFEST_BYTES_MAX) {
            Err(CkptError::Missing { path, .. }) => {
                Err(CkptError::not_a_checkpoint(&path, Diagnosis::ManifestMissing))
            }
            other => other,
        }
    }

    /// Checks that the text of a manifest matches the BLAKE3 hash that it contains. Returns the
    /// hash, and the text with zeros in place of the hash.
    pub(crate) fn verify_and_unseal(
        mut text: Vec<u8>,
    ) -> std::result::Result<(String, Vec<u8>), ManifestError> {
        match JsonSeal::COMPACT.unseal(&mut text) {
            Ok(hash) => Ok((hash, text)),
            Err(SealError::Truncated) => Err(ManifestError::Truncated),
            Err(SealError::Mismatch) => Err(ManifestError::HashMismatch),
        }
    }

    /// Parses the text of the manifest of the checkpoint at `path`, and verifies its hash, version
    /// and consistency.
    pub(crate) fn parse(path: &Path, text: Vec<u8>) -> Result<Manifest> {
        let damaged = |error: ManifestError| CkptError::damaged(path, MANIFEST_FILE, error);
        let (_, zeroed) = Manifest::verify_and_unseal(text).map_err(damaged)?;
        let head: ManifestHeader = json::parse_object(&zeroed).map_err(|e| damaged(e.into()))?;
        if head.format != FORMAT_NAME || !(BASE_VERSION..=BF16_VERSION).contains(&head.version) {
            let (format, version) = (head.format, head.version);
            let (oldest, newest) = (BASE_VERSION, BF16_VERSION);
            let feature = UnsupportedFeature::FormatVersion { format, version, oldest, newest };
            return Err(CkptError::unsupported(path, feature));
        }
        let manifest: Manifest = json::parse_object(&zeroed).map_err(|e| damaged(e.into()))?;
        // the text is as large as the parsed manifest, and the checks need memory, too
        drop(zeroed);
        manifest.check_consistency().map_err(damaged)?;
        Ok(manifest)
    }

    /// Returns the total size in bytes of the shards of all ranks.
    pub(crate) fn total_shard_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// Iterates over the manifest's entries of all shards, and then over its entries of all parity
    /// files.
    pub(crate) fn all_files(&self) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().chain(self.parity.iter().flatten())
    }

    /// Returns the names, as `role/name`, of the tensors with bytes in the 1 MiB block `block` of
    /// the shard with the index `file`.
    pub(crate) fn tensors_in_block(&self, file: usize, block: u64) -> Vec<String> {
        let (start, end) = (block * BLOCK_BYTES as u64, (block + 1) * BLOCK_BYTES as u64);
        let inside = |t: &TensorEntry, e: &TensorPieceEntry| {
            let bytes = e.byte_range(t.dtype);
            e.file == file && bytes.start < end && bytes.end > start
        };
        let tensors = self.tensors.iter().filter(|t| t.pieces.iter().any(|e| inside(t, e)));
        tensors.map(TensorEntry::label).collect()
    }

    /// Fails if parts of the manifest contradict each other or exceed a limit.
    pub(crate) fn check_consistency(&self) -> std::result::Result<(), ManifestError> {
        self.facts.check()?;
        if self.block_bytes != BLOCK_BYTES as u64 {
            return Err(ManifestError::BlockSize { found: self.block_bytes, expected: BLOCK_BYTES as u64 });
        }
        self.check_files()?;
        let version = self.choose_oldest_version();
        if version != self.version {
            return Err(ManifestError::Version { recorded: self.version, needed: version });
        }
        if let Some(parity) = &self.parity {
            let sizes: Vec<u64> = self.files.iter().map(|f| f.bytes).collect();
            let given = parity.iter().map(|f| (f.name.as_str(), f.bytes, f.blocks.len() as u64));
            parity_stripes::check_parity_files(&sizes, given)?;
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

    /// Fails if the manifest does not list exactly one shard per rank, with the expected file name
    /// and number of block hashes.
    fn check_files(&self) -> std::result::Result<(), ManifestError> {
        if self.files.len() as u64 != u64::from(self.facts.world) {
            return Err(ManifestError::ShardCount { shards: self.files.len(), world: self.facts.world });
        }
        let mut total = 0u64;
        for (rank, file) in self.files.iter().enumerate() {
            if file.name != shard_file_name(rank as u32, self.facts.world) {
                return Err(ManifestError::ShardName { rank, name: file.name.clone() });
            }
            if file.blocks.len() as u64 != file.bytes.div_ceil(BLOCK_BYTES as u64) {
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

    /// Fails if the manifest lists an invalid host or a host twice, or assigns a shard to a host
    /// that it does not list. In a manifest without hosts, fails if a shard has a host.
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

    /// Fails if a tensor's entry in the manifest is invalid, such as one that omits elements or
    /// stores an element twice. Adds the byte ranges of the pieces to `spans`, by shard.
    fn check_tensor(
        &self,
        tensor: &TensorEntry,
        spans: &mut [Vec<Range<u64>>],
    ) -> std::result::Result<(), ManifestError> {
        check_tensor_name(&tensor.name)?;
        let label = tensor.label();
        let narrow = tensor.role == TensorRole::Weight && tensor.dtype == Dtype::BF16;
        if tensor.dtype != Dtype::F32 && !narrow {
            return Err(ManifestError::Dtype { tensor: label, dtype: tensor.dtype });
        }
        let total = count_elements(&tensor.shape).ok_or_else(|| ManifestError::ImpossibleShape {
            tensor: label.clone(),
            shape: tensor.shape.clone(),
        })?;
        let error = element_ranges::find_coverage_error(
            total,
            tensor.pieces.iter().map(TensorPieceEntry::element_range),
        );
        if let Some(error) = error {
            return Err(ManifestError::Coverage { tensor: label, error });
        }
        for piece in &tensor.pieces {
            let bytes = piece.byte_range(tensor.dtype);
            match (self.files.get(piece.file), spans.get_mut(piece.file)) {
                (Some(file), Some(spans)) if bytes.end <= file.bytes && bytes.start >= 8 => spans.push(bytes),
                _ => {
                    return Err(ManifestError::OutsideShard { tensor: label, bytes, shard: piece.file });
                }
            }
        }
        Ok(())
    }

    /// Fails if the tensors in the manifest are not exactly the weights of the model and their
    /// optimizer states, with matching shapes. `found` maps each tensor of the manifest to its
    /// shape.
    fn check_complete(
        &self,
        found: &HashMap<(TensorRole, &str), &[u64]>,
    ) -> std::result::Result<(), ManifestError> {
        let model = &self.facts.model;
        let frozen: HashSet<&str> = model.frozen.iter().map(String::as_str).collect();
        let mut expected: HashMap<(TensorRole, &str), &[u64]> = HashMap::new();
        for role in TensorRole::ALL {
            let listed = if role == TensorRole::Buffer { &model.buffers } else { &model.weights };
            let any = role.is_optimizer_state() && found.keys().any(|(r, _)| *r == role);
            for t in listed {
                let key = (role, t.name.as_str());
                let Some(shape) = role.tensor_shape_for_weight(&t.shape) else { continue };
                let wanted = match role.is_optimizer_state() {
                    true => (any && !frozen.contains(key.1)) || found.contains_key(&key),
                    false => true,
                };
                if wanted {
                    expected.insert(key, shape);
                    match found.get(&key) {
                        None => {
                            return Err(ManifestError::MissingTensor(format!("{role}/{}", t.name)));
                        }
                        Some(found) if **found != *shape => {
                            return Err(ManifestError::Shape {
                                tensor: format!("{role}/{}", t.name),
                                found: found.to_vec(),
                                expected: shape.to_vec(),
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

    /// Lists the pieces of tensors in each rank's shard, sorted by their byte offsets in the shard.
    pub(crate) fn list_pieces_by_shard(&self) -> Vec<Vec<ShardPiece<'_>>> {
        let mut shards: Vec<Vec<ShardPiece<'_>>> = self.files.iter().map(|_| Vec::new()).collect();
        for (index, tensor) in self.tensors.iter().enumerate() {
            for piece in &tensor.pieces {
                if let Some(shard) = shards.get_mut(piece.file) {
                    shard.push(ShardPiece { index, tensor, piece });
                }
            }
        }
        shards
            .iter_mut()
            .for_each(|pieces| pieces.sort_by_key(|p| (p.byte_range().start, p.byte_range().end)));
        shards
    }
}

/// A range of consecutive elements of a tensor in one rank's shard, with the manifest's entries of
/// the range and of the whole tensor.
#[derive(Clone, Copy)]
pub(crate) struct ShardPiece<'m> {
    /// Index of the tensor in the manifest.
    pub(crate) index: usize,
    pub(crate) tensor: &'m TensorEntry,
    pub(crate) piece: &'m TensorPieceEntry,
}

impl ShardPiece<'_> {
    /// Returns the range of bytes that this piece of a tensor occupies in the rank's shard.
    pub(crate) fn byte_range(&self) -> Range<u64> {
        self.piece.byte_range(self.tensor.dtype)
    }

    /// Returns the name of this piece of a tensor in the safetensors header of the rank's shard.
    pub(crate) fn header_key(&self) -> String {
        safetensors::format_piece_key(self.tensor.role, &self.tensor.name, self.piece.start)
    }
}
