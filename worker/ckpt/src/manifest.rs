//! `manifest.json`: which byte ranges of which file hold which tensor, a hash per block, and the facts.
//!
//! The file begins `{"blake3":"<64 hex digits>",`; the hash is of the whole file with zeros in its own place, so a flip
//! anywhere in it is found. A hash is no signature: everything is checked as if an enemy had written it.
use crate::catalog::{Facts, Role, check_name, elements};
use crate::cut;
use crate::disk::{BLOCK, Folder};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::safetensors;
use crate::hash::Hash;
use crate::host::Host;
use crate::stripes;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Its name; a folder without it is no checkpoint.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Larger ones are not read. 64 hex digits per MiB of state: enough for some 3 TB.
const MANIFEST_MAX: u64 = 256 << 20;
const FORMAT: &str = "launch checkpoint";
/// Without parity; every version of the program reads it.
const VERSION: u32 = 1;
/// With parity, or with shards on several hosts: it says on which.
const EXTENDED_VERSION: u32 = 2;
/// With weights in bf16, and what version 2 may have.
const NARROW_VERSION: u32 = 3;
/// The most hosts of one checkpoint.
const HOSTS_MAX: usize = 65_536;
const OPENING: &str = "{\"blake3\":\"";
const HEX: Range<usize> = OPENING.len()..OPENING.len() + 64;

/// All of it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// First, see the module.
    blake3: String,
    format: String,
    version: u32,
    pub(crate) facts: Facts,
    block_bytes: u64,
    /// Where the shards lie when that is not one directory; empty in version 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hosts: Vec<Host>,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
    /// A stripe of parity per rank; version 1 has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parity: Option<Vec<FileEntry>>,
}

/// The fields that every version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// One shard.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// BLAKE3 of each [`BLOCK`] of the file; the last may be shorter.
    pub(crate) blocks: Vec<Hash>,
    /// Index into [`Manifest::hosts`]; not in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<usize>,
}

/// One logical tensor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Sorted by start; together they are the tensor.
    pub(crate) pieces: Vec<Extent>,
}

/// Some elements of a tensor in one file.
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

    /// Bytes of the file.
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

/// Name of a rank's file.
pub(crate) fn shard_name(rank: u32, world: u32) -> String {
    format!("shard-{rank:05}-of-{world:05}.safetensors")
}

impl Manifest {
    pub(crate) fn new(
        facts: Facts,
        files: Vec<FileEntry>,
        tensors: Vec<TensorEntry>,
        parity: Option<Vec<FileEntry>>,
    ) -> Manifest {
        let (blake3, format) = ("0".repeat(64), FORMAT.to_owned());
        let (block_bytes, hosts) = (BLOCK as u64, Vec::new());
        let mut manifest =
            Manifest { blake3, format, version: VERSION, facts, block_bytes, hosts, files, tensors, parity };
        manifest.version = manifest.version_for();
        manifest
    }

    /// The oldest version that can say all of it.
    fn version_for(&self) -> u32 {
        if self.tensors.iter().any(|t| t.dtype == Dtype::BF16) {
            NARROW_VERSION
        } else if self.parity.is_some() || !self.hosts.is_empty() {
            EXTENDED_VERSION
        } else {
            VERSION
        }
    }

    /// The same with the host of each shard, by rank.
    pub(crate) fn scattered(mut self, hosts: Vec<Host>, host_of: &[usize]) -> Manifest {
        self.hosts = hosts;
        self.version = self.version_for();
        for (file, host) in self.files.iter_mut().zip(host_of) {
            file.host = Some(*host);
        }
        self
    }

    /// Where this shard was written, when the manifest says so.
    pub(crate) fn host_of(&self, file: usize) -> Option<&Host> {
        self.hosts.get(self.files.get(file)?.host?)
    }

    /// The file's content.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let zeroed = Manifest::open_text(serde_json::to_vec(self));
        let mut text = zeroed.map_err(|e| CkptError::invalid(format!("its facts are no JSON: {e}")))?;
        if text.len() as u64 > MANIFEST_MAX {
            return Err(CkptError::invalid(format!(
                "its manifest would have {} bytes, more than {MANIFEST_MAX}",
                text.len()
            )));
        }
        text[HEX].fill(b'0');
        let hash = Hash::of(&text).hex();
        text[HEX].copy_from_slice(hash.as_bytes());
        Ok(text)
    }

    fn open_text(text: serde_json::Result<Vec<u8>>) -> std::result::Result<Vec<u8>, String> {
        let text = text.map_err(|e| e.to_string())?;
        match text.starts_with(OPENING.as_bytes()) && text.len() > HEX.end {
            true => Ok(text),
            false => Err("the hash is not its first field".into()),
        }
    }

    /// Reads and checks everything that can be checked without the shards.
    pub(crate) fn load(folder: &Folder) -> Result<Manifest> {
        Manifest::parse(folder.path(), Manifest::read(folder)?)
    }

    /// The file's content as it is.
    pub(crate) fn read(folder: &Folder) -> Result<Vec<u8>> {
        match folder.read(MANIFEST, MANIFEST_MAX) {
            Err(CkptError::Missing { path, .. }) => {
                Err(CkptError::NotACheckpoint { path, why: format!("it has no {MANIFEST}") })
            }
            other => other,
        }
    }

    /// Puts the hash that fits into a manifest's text, if it is long enough to hold one.
    pub(crate) fn seal(text: &mut [u8]) {
        if text.get_mut(HEX).map(|hex| hex.fill(b'0')).is_some() {
            let hash = Hash::of(text).hex();
            text[HEX].copy_from_slice(hash.as_bytes());
        }
    }

    /// The hash that a text says, which is the right one, and the text with zeros in its place.
    pub(crate) fn unsealed(mut text: Vec<u8>) -> std::result::Result<(String, Vec<u8>), &'static str> {
        let stored = text.get(HEX).ok_or("it is cut short")?.to_owned();
        text[HEX].fill(b'0');
        let hash = Hash::of(&text).hex();
        match text.starts_with(OPENING.as_bytes()) && hash.as_bytes() == stored {
            true => Ok((hash, text)),
            false => Err("its content does not fit its own BLAKE3"),
        }
    }

    /// The same of the text of the manifest in `path`.
    pub(crate) fn parse(path: &Path, text: Vec<u8>) -> Result<Manifest> {
        let bad = |why: String| CkptError::damaged(path, MANIFEST, why);
        let (_, zeroed) = Manifest::unsealed(text).map_err(|why| bad(why.into()))?;
        let head: Head = serde_json::from_slice(&zeroed).map_err(|e| bad(e.to_string()))?;
        if head.format != FORMAT || !(VERSION..=NARROW_VERSION).contains(&head.version) {
            let what = format!(
                "it is {:?} version {}, and this program reads {FORMAT:?} version {VERSION} to {NARROW_VERSION}",
                head.format, head.version
            );
            return Err(CkptError::Unsupported { path: path.to_owned(), what });
        }
        let manifest: Manifest = serde_json::from_slice(&zeroed).map_err(|e| bad(e.to_string()))?;
        manifest.check().map_err(bad)?;
        Ok(manifest)
    }

    /// Bytes of all shards.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// Shards, then parity.
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

    /// `Err` says what contradicts what.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        self.facts.check()?;
        if self.block_bytes != BLOCK as u64 {
            return Err(format!("blocks of {} bytes, not {BLOCK}", self.block_bytes));
        }
        self.check_files()?;
        let version = self.version_for();
        if version != self.version {
            return Err(format!("it says version {}, and has what is of version {version}", self.version));
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
                return Err(format!("{} is listed twice", tensor.label()));
            }
        }
        for (file, spans) in self.files.iter().zip(&mut spans) {
            spans.sort_by_key(|r| r.start);
            if let Some(w) = spans.windows(2).find(|w| w[0].end > w[1].start) {
                return Err(format!(
                    "bytes {}..{} of {} belong to two tensors",
                    w[1].start, w[0].end, file.name
                ));
            }
        }
        self.check_complete(&seen)
    }

    fn check_files(&self) -> std::result::Result<(), String> {
        if self.files.len() as u64 != u64::from(self.facts.world) {
            return Err(format!("{} shards of a world of {}", self.files.len(), self.facts.world));
        }
        let mut total = 0u64;
        for (rank, file) in self.files.iter().enumerate() {
            if file.name != shard_name(rank as u32, self.facts.world) {
                return Err(format!("shard {rank} has the wrong name {:?}", file.name));
            }
            if file.blocks.len() as u64 != file.bytes.div_ceil(BLOCK as u64) {
                return Err(format!(
                    "{} hashes for the {} bytes of {}",
                    file.blocks.len(),
                    file.bytes,
                    file.name
                ));
            }
            total = total.checked_add(file.bytes).ok_or("sizes of shards that overflow")?;
        }
        Ok(())
    }

    /// With hosts it says of every shard on which of them it is.
    fn check_hosts(&self) -> std::result::Result<(), String> {
        if self.hosts.is_empty() {
            return match self.files.iter().all(|f| f.host.is_none()) {
                true => Ok(()),
                false => Err("shards on hosts that aren't listed".into()),
            };
        }
        if self.hosts.len() > HOSTS_MAX {
            return Err(format!("{} hosts, not 1 to {HOSTS_MAX}", self.hosts.len()));
        }
        let mut seen = HashSet::new();
        for host in &self.hosts {
            host.check()?;
            if !seen.insert(&host.id) {
                return Err(format!("host {} is listed twice", host.id));
            }
        }
        match self.files.iter().find(|f| f.host.is_none_or(|h| h >= self.hosts.len())) {
            Some(file) => Err(format!("{} is on no host that is listed", file.name)),
            None => Ok(()),
        }
    }

    fn check_tensor(
        &self,
        tensor: &TensorEntry,
        spans: &mut [Vec<Range<u64>>],
    ) -> std::result::Result<(), String> {
        check_name(&tensor.name)?;
        let label = tensor.label();
        let narrow = tensor.role == Role::Weight && tensor.dtype == Dtype::BF16;
        if tensor.dtype != Dtype::F32 && !narrow {
            return Err(format!(
                "{label} is {}, but state is kept as F32, weights also as BF16",
                tensor.dtype
            ));
        }
        let total =
            elements(&tensor.shape).ok_or(format!("{label} has the impossible shape {:?}", tensor.shape))?;
        if let Some(flaw) = cut::flaw(total, tensor.pieces.iter().map(Extent::elements)) {
            return Err(format!("{label}: {flaw}"));
        }
        for piece in &tensor.pieces {
            let bytes = piece.bytes(tensor.dtype);
            match (self.files.get(piece.file), spans.get_mut(piece.file)) {
                (Some(file), Some(spans)) if bytes.end <= file.bytes && bytes.start >= 8 => spans.push(bytes),
                _ => {
                    return Err(format!(
                        "{label}: bytes {}..{} are not in shard {}",
                        bytes.start, bytes.end, piece.file
                    ));
                }
            }
        }
        Ok(())
    }

    /// Every tensor that the model card and the optimizer state ask for is there, with the card's shape, and no other.
    fn check_complete(&self, found: &HashMap<(Role, &str), &[u64]>) -> std::result::Result<(), String> {
        let card = &self.facts.model;
        let frozen: HashSet<&str> = card.frozen.iter().map(String::as_str).collect();
        let mut expected: HashMap<(Role, &str), &[u64]> = HashMap::new();
        for role in Role::ALL {
            let listed = if role == Role::Buffer { &card.buffers } else { &card.weights };
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
                        None => return Err(format!("{role}/{} is held by no shard", t.name)),
                        Some(shape) if **shape != *t.shape => {
                            return Err(format!(
                                "{role}/{} has the shape {shape:?}, not {:?}",
                                t.name, t.shape
                            ));
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        match found.keys().find(|k| !expected.contains_key(*k)) {
            Some((role, name)) => Err(format!("{role}/{name} is no tensor of the model")),
            None => Ok(()),
        }
    }

    /// What the header of a shard must say: key → (element type, elements, byte range in the file).
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
