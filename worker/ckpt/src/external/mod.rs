//! [`ExternalCheckpoint`]: a checkpoint written by another program, read in place.
pub(crate) mod builder;
mod check;
pub(crate) mod companion_files;
mod crc_combine;
mod detect;
mod facts;
mod part;
pub(crate) mod scan;
pub(crate) mod store;
mod unfuse_experts;
pub(crate) mod values;

pub(crate) use self::detect::{open, open_trained};
pub use self::facts::{ExternalFacts, StatePart};

use self::store::{PartRead, Store, TensorPart};
use crate::catalog::{TensorInfo, TensorRole, TextFile};
use crate::disk::Directory;
use crate::error::{CkptError, Damage, DamageReason, MissingPart, Result, UnsupportedFeature};
use crate::partition;
use crate::passthrough::PassthroughState;
use crate::source::{ReadRequest, TensorSource};
use crate::state::TrainingState;
use crate::verify::CheckpointReport;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Limit on text files that are exported with the weights, bytes.
const TEXT_MAX: u64 = 64 << 20;
/// Files next to a model that belong to a Hugging Face directory.
const TEXTS: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// A tensor and the parts of files that hold its elements.
pub(crate) struct ExternalTensor {
    pub(crate) info: TensorInfo,
    /// Sorted by start; together they cover the tensor.
    pub(crate) parts: Vec<TensorPart>,
}

/// An open checkpoint of another program.
pub struct ExternalCheckpoint {
    path: PathBuf,
    facts: ExternalFacts,
    store: Store,
    entries: Vec<ExternalTensor>,
    index: HashMap<(TensorRole, String), usize>,
    config: Option<Map<String, Value>>,
    texts: Vec<TextFile>,
    /// State that a conversion copies unchanged.
    passthrough: PassthroughState,
    /// The checkpoint is a single file; files next to it do not belong to it.
    is_single_file: bool,
}

impl fmt::Debug for ExternalCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExternalCheckpoint({}, {})", self.facts.kind, self.path.display())
    }
}

impl ExternalCheckpoint {
    /// Checks that the entries are complete; `root` is the directory that may have `config.json`
    /// and a tokenizer.
    pub(crate) fn new(
        path: &Path,
        root: &Path,
        mut facts: ExternalFacts,
        store: Store,
        mut entries: Vec<ExternalTensor>,
    ) -> Result<ExternalCheckpoint> {
        entries.sort_by_key(|e| e.info.role);
        let mut index = HashMap::new();
        for (i, entry) in entries.iter().enumerate() {
            let label = format!("{}/{}", entry.info.role, entry.info.name);
            let damaged = |reason: DamageReason| CkptError::damaged(path, label.as_str(), reason);
            crate::catalog::check_name(&entry.info.name).map_err(|e| damaged(e.into()))?;
            let total = crate::catalog::elements(&entry.info.shape)
                .ok_or_else(|| damaged(format!("the shape {:?} is impossible", entry.info.shape).into()))?;
            let error = partition::coverage_error(total, entry.parts.iter().map(TensorPart::elements));
            if let Some(error) = error {
                return Err(damaged(error.into()));
            }
            if index.insert((entry.info.role, entry.info.name.clone()), i).is_some() {
                return Err(damaged("the tensor occurs twice".into()));
            }
        }
        let of_role = |role: TensorRole| entries.iter().filter(move |e| e.info.role == role);
        facts.buffers = of_role(TensorRole::Buffer).map(|e| e.info.name.clone()).collect();
        facts.root = root.to_owned();
        let root = Directory::open(root)?;
        let config = read_config(&root)?;
        let texts = read_texts(&root)?;
        if config.is_none() {
            facts.missing.push(StatePart::Config);
        }
        if !texts.iter().any(|t| t.name != TEXTS[0]) {
            facts.missing.push(StatePart::Tokenizer);
        }
        Ok(ExternalCheckpoint {
            path: path.to_owned(),
            facts,
            store,
            entries,
            index,
            config,
            texts,
            passthrough: PassthroughState::default(),
            is_single_file: false,
        })
    }

    /// Adds state that a conversion copies unchanged.
    pub(crate) fn with_passthrough(mut self, passthrough: PassthroughState) -> ExternalCheckpoint {
        self.passthrough = passthrough;
        self
    }

    /// Facts about the checkpoint.
    pub fn facts(&self) -> &ExternalFacts {
        &self.facts
    }

    /// Marks the checkpoint as a single file.
    pub(crate) fn single_file(mut self) -> ExternalCheckpoint {
        self.is_single_file = true;
        self
    }

    /// Adds warnings.
    pub(crate) fn warn(&mut self, lines: Vec<String>) {
        self.facts.warnings.extend(lines);
    }

    /// Inserts notices before the others.
    fn prepend_notices(&mut self, mut lines: Vec<String>) {
        lines.append(&mut self.facts.notices);
        self.facts.notices = lines;
    }

    /// Name and size of every file that holds tensors.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.store.files.iter().map(|f| (f.name.as_str(), f.size))
    }

    /// `role/name` of the tensors with a part that satisfies the predicate.
    fn tensors_with(&self, inside: &dyn Fn(&TensorPart) -> bool) -> Vec<String> {
        let entries = self.entries.iter().filter(|e| e.parts.iter().any(inside));
        entries.map(|e| format!("{}/{}", e.info.role, e.info.name)).collect()
    }

    /// Verifies every byte of every file, including files without tensors; returns the report and
    /// warnings.
    pub(crate) fn verify(&self) -> Result<(CheckpointReport, Vec<String>)> {
        let (mut bytes, mut blocks, mut problems) =
            self.store.verify_all(|inside| self.tensors_with(inside))?;
        let lost = |name: &String| Damage {
            file: self.facts.tag.clone(),
            block: None,
            tensors: vec![format!("{}/{name}", TensorRole::Weight)],
            reason: DamageReason::PartMissing(MissingPart::Weights(vec![name.clone()])),
        };
        problems.extend(self.facts.lost.iter().map(lost));
        let file = || self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let incomplete = |detail: &String| Damage::of_file(file(), detail.clone());
        problems.extend(self.facts.incomplete.iter().map(incomplete));
        for scan in self.scan_other_files()? {
            bytes += scan.bytes;
            blocks += scan.members;
            problems.extend(scan.problems);
        }
        let mut warnings = self.facts.warnings.clone();
        // when some ranks have a random state, all should
        let absent = self.facts.missing.iter().filter(|m| matches!(m, StatePart::RandomState { .. }));
        warnings.extend(absent.map(|m| format!("the {m} is missing")));
        let report = CheckpointReport {
            path: self.path.clone(),
            step: self.facts.step,
            bytes,
            blocks,
            problems,
            ..Default::default()
        };
        Ok((report, warnings))
    }

    /// Scans the files without tensors: random states, schedulers, and files of other programs.
    fn scan_other_files(&self) -> Result<Vec<scan::ScanReport>> {
        if self.is_single_file {
            return Ok(Vec::new());
        }
        let tag = self.store.files.first().map(|f| f.directory().path().to_owned());
        let mut paths = vec![(self.facts.root.clone(), 0)];
        if let Some(tag) = tag.filter(|tag| *tag != self.facts.root) {
            paths.push((tag, 3));
        }
        let mut scans = Vec::new();
        for (path, depth) in paths {
            let name = |f: &store::StoredFile| (f.directory().path() == path).then(|| f.name.clone());
            let known = self.store.files.iter().filter_map(name).collect();
            scans.push(scan::scan_directory(&path, &known, depth)?);
        }
        Ok(scans)
    }

    fn find_tensor(&self, name: &str, role: TensorRole) -> Result<&ExternalTensor> {
        self.index.get(&(role, name.to_owned())).map(|&i| &self.entries[i]).ok_or_else(|| {
            CkptError::NoSuchTensor { path: self.path.clone(), tensor: format!("{role}/{name}") }
        })
    }

    fn resolve_request<'a>(
        &'a self,
        request: &'a mut ReadRequest<'_>,
        parts: &mut Vec<PartRead<'a>>,
    ) -> Result<()> {
        let entry = self.find_tensor(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        if range.end > entry.info.elements() {
            return Err(CkptError::RangeOutsideTensor {
                path: self.path.clone(),
                tensor: format!("{}/{}", request.role, request.name),
                elements: entry.info.elements(),
                requested: range.end,
            });
        }
        if !entry.info.dtype.is_float() {
            let tensor = format!("{}/{}", request.role, request.name);
            let feature = UnsupportedFeature::Dtype { tensor, dtype: entry.info.dtype };
            return Err(CkptError::unsupported(&self.path, feature));
        }
        let mut rest: &mut [f32] = request.out;
        for (i, range) in partition::cover(&entry.parts, TensorPart::elements, range) {
            let (out, tail) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            rest = tail;
            parts.push(PartRead { part: &entry.parts[i], dtype: entry.info.dtype, range, out });
        }
        Ok(())
    }
}

impl TensorSource for ExternalCheckpoint {
    fn path(&self) -> &Path {
        &self.path
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.entries.iter().map(|e| e.info.clone()).collect()
    }

    fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        let mut wanted = Vec::new();
        for request in requests {
            self.resolve_request(request, &mut wanted)?;
        }
        self.store.read(wanted, |inside| self.tensors_with(inside))
    }

    fn read_unchecked(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        let mut wanted = Vec::new();
        for request in requests {
            self.resolve_request(request, &mut wanted)?;
        }
        self.store.read_unchecked(wanted, |inside| self.tensors_with(inside))
    }

    fn verify_reads(&self, every_byte: bool) -> Result<()> {
        self.store.verify_reads(every_byte, |inside| self.tensors_with(inside))
    }

    fn read_raw(&self, name: &str, role: TensorRole, start_element: u64, out: &mut [u8]) -> Result<()> {
        let entry = self.find_tensor(name, role)?;
        let size = entry.info.dtype.size();
        let end = start_element.saturating_add(out.len() as u64 / size);
        let mut rest = out;
        for (i, range) in partition::cover(&entry.parts, TensorPart::elements, start_element..end) {
            let bytes = ((range.end - range.start) * size) as usize;
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = later;
            let tensors_with = |inside: &dyn Fn(&TensorPart) -> bool| self.tensors_with(inside);
            self.store.read_raw(&entry.parts[i], entry.info.dtype, range, now, tensors_with)?;
        }
        match rest.is_empty() {
            true => Ok(()),
            false => Err(CkptError::RangeOutsideTensor {
                path: self.path.clone(),
                tensor: format!("{role}/{name}"),
                elements: entry.info.elements(),
                requested: end,
            }),
        }
    }

    fn passthrough(&self) -> Result<PassthroughState> {
        Ok(self.passthrough.clone())
    }

    fn step(&self) -> Option<u64> {
        self.facts.step
    }

    fn state(&self) -> TrainingState {
        self.facts.state()
    }

    fn is_weights_alone(&self) -> bool {
        let states = self.entries.iter().any(|e| e.info.role.is_optimizer_state());
        !states && !self.facts.is_training_state()
    }

    fn ignored_optimizer(&self) -> Option<&str> {
        self.facts.ignored_optimizer_reason()
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.config.as_ref()
    }

    fn texts(&self) -> &[TextFile] {
        &self.texts
    }

    fn require_weights(&self) -> Result<()> {
        match self.facts.lost.as_slice() {
            [] => Ok(()),
            lost => Err(CkptError::missing(&self.path, MissingPart::Weights(lost.to_vec()))),
        }
    }
}

fn read_config(directory: &Directory) -> Result<Option<Map<String, Value>>> {
    match directory.size_of("config.json")? {
        None => Ok(None),
        Some(_) => {
            let text = directory.read("config.json", TEXT_MAX)?;
            match serde_json::from_slice(&text) {
                Ok(Value::Object(map)) => Ok(Some(map)),
                Ok(_) => Err(CkptError::damaged(
                    directory.path(),
                    "config.json",
                    DamageReason::Json("not an object".into()),
                )),
                Err(e) => Err(CkptError::damaged(directory.path(), "config.json", e)),
            }
        }
    }
}

fn read_texts(directory: &Directory) -> Result<Vec<TextFile>> {
    let mut texts = Vec::new();
    for name in TEXTS {
        if directory.size_of(name)?.is_some() {
            let text = String::from_utf8(directory.read(name, TEXT_MAX)?)
                .map_err(|_| CkptError::damaged(directory.path(), name, "the file is not UTF-8 text"))?;
            texts.push(TextFile { name: name.into(), text });
        }
    }
    Ok(texts)
}
