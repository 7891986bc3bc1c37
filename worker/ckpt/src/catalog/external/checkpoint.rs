//! [`ExternalCheckpoint`]: a checkpoint written by another program, which is read in place.

use super::facts::{ExternalFacts, StatePart};

use super::stored_files::{PartRead, StoredFiles};
use super::tensor_part::TensorPart;
use crate::catalog::model::{TensorInfo, TextFile};
use crate::catalog::passthrough::PassthroughState;
use crate::catalog::tensor_source::{ReadRequest, TensorSource};
use crate::catalog::training_state::TrainingState;
use crate::codec::disk::Directory;
use crate::error::{CkptError, DamageReason, MissingPart, Result, UnsupportedFeature};
use crate::tensor::{TensorRole, element_ranges};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Limit on the size of `config.json` and of text files that are exported with the weights, in
/// bytes.
const TEXT_FILE_MAX: u64 = 64 << 20;
/// Text files that a Hugging Face directory has next to the weights.
const TEXT_FILES: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// A tensor, and the parts of files that hold its elements.
pub(crate) struct ExternalTensor {
    pub(crate) info: TensorInfo,
    /// The parts, sorted by their first element. Together the parts cover the tensor.
    pub(crate) parts: Vec<TensorPart>,
}

/// An open checkpoint of another program.
pub struct ExternalCheckpoint {
    path: PathBuf,
    pub(super) facts: ExternalFacts,
    pub(crate) store: StoredFiles,
    pub(super) entries: Vec<ExternalTensor>,
    /// Index of each tensor in `entries`, by role and name.
    pub(super) index: HashMap<(TensorRole, String), usize>,
    /// The content of `config.json`, or `None` if the file does not exist.
    config: Option<Map<String, Value>>,
    texts: Vec<TextFile>,
    /// State that a conversion copies unchanged.
    passthrough: PassthroughState,
    /// True if the checkpoint is a single file of weights. The other files of the directory do not
    /// belong to such a checkpoint.
    pub(crate) is_single_file: bool,
}

impl fmt::Debug for ExternalCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExternalCheckpoint({}, {})", self.facts.kind, self.path.display())
    }
}

impl ExternalCheckpoint {
    /// Makes a checkpoint of the tensors `entries`, and reads `config.json` and the tokenizer from
    /// the directory `root`.
    ///
    /// # Errors
    /// Fails if a tensor's name or shape is invalid, its parts do not cover it exactly once, or two
    /// tensors have the same role and name.
    pub(crate) fn new(
        path: &Path,
        root: &Path,
        mut facts: ExternalFacts,
        store: StoredFiles,
        mut entries: Vec<ExternalTensor>,
    ) -> Result<ExternalCheckpoint> {
        entries.sort_by_key(|e| e.info.role);
        let mut index = HashMap::new();
        for (i, entry) in entries.iter().enumerate() {
            let label = format!("{}/{}", entry.info.role, entry.info.name);
            let damaged = |reason: DamageReason| CkptError::damaged(path, label.as_str(), reason);
            crate::tensor::check_tensor_name(&entry.info.name).map_err(|e| damaged(e.into()))?;
            let total = crate::tensor::count_elements(&entry.info.shape)
                .ok_or_else(|| damaged(format!("the shape {:?} is impossible", entry.info.shape).into()))?;
            let error =
                element_ranges::find_coverage_error(total, entry.parts.iter().map(TensorPart::element_range));
            if let Some(error) = error {
                return Err(damaged(error.into()));
            }
            if index.insert((entry.info.role, entry.info.name.clone()), i).is_some() {
                return Err(damaged("the tensor occurs twice".into()));
            }
        }
        let of_role = |role: TensorRole| entries.iter().filter(move |e| e.info.role == role);
        facts.state.buffers = of_role(TensorRole::Buffer).map(|e| e.info.name.clone()).collect();
        facts.root = root.to_owned();
        let root = Directory::open(root)?;
        let config = read_config(&root)?;
        let texts = read_text_files(&root)?;
        if config.is_none() {
            facts.missing.push(StatePart::Config);
        }
        if !texts.iter().any(|t| t.name != TEXT_FILES[0]) {
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

    /// Sets the state that a conversion copies unchanged, and returns the checkpoint.
    pub(crate) fn with_passthrough(mut self, passthrough: PassthroughState) -> ExternalCheckpoint {
        self.passthrough = passthrough;
        self
    }

    /// Returns the facts that the checkpoint records, or that were derived from its files.
    pub fn facts(&self) -> &ExternalFacts {
        &self.facts
    }

    /// Marks the checkpoint as a single file, so that other files of its directory are not
    /// verified.
    pub(crate) fn into_single_file(mut self) -> ExternalCheckpoint {
        self.is_single_file = true;
        self
    }

    /// Adds the warnings `lines` to the facts, after the existing warnings.
    pub(crate) fn add_warnings(&mut self, lines: Vec<String>) {
        self.facts.warnings.extend(lines);
    }

    /// Inserts notices before the existing notices in the facts.
    pub(crate) fn prepend_notices(&mut self, mut lines: Vec<String>) {
        lines.append(&mut self.facts.notices);
        self.facts.notices = lines;
    }

    /// Iterates over the names and sizes in bytes of the files that hold tensors.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.store.files.iter().map(|f| (f.name.as_str(), f.size))
    }

    /// Lists the tensors with a part for which `inside` is true, as `role/name`.
    pub(crate) fn list_tensors_with(&self, inside: &dyn Fn(&TensorPart) -> bool) -> Vec<String> {
        let entries = self.entries.iter().filter(|e| e.parts.iter().any(inside));
        entries.map(|e| format!("{}/{}", e.info.role, e.info.name)).collect()
    }

    /// Returns the tensor of this name and role. Fails with [`CkptError::NoSuchTensor`] if the
    /// checkpoint does not have the tensor.
    fn find_tensor(&self, name: &str, role: TensorRole) -> Result<&ExternalTensor> {
        self.index.get(&(role, name.to_owned())).map(|&i| &self.entries[i]).ok_or_else(|| {
            CkptError::NoSuchTensor { path: self.path.clone(), tensor: format!("{role}/{name}") }
        })
    }

    /// Appends the reads that together satisfy `request` to `parts`. Each stored part of the tensor
    /// that has some of the requested elements gets one read.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is unknown or is not of a floating-point dtype, or if the request
    /// reaches beyond the tensor's last element.
    fn resolve_request<'a>(
        &'a self,
        request: &'a mut ReadRequest<'_>,
        parts: &mut Vec<PartRead<'a>>,
    ) -> Result<()> {
        let entry = self.find_tensor(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        if range.end > entry.info.element_count() {
            return Err(CkptError::RangeOutsideTensor {
                path: self.path.clone(),
                tensor: format!("{}/{}", request.role, request.name),
                elements: entry.info.element_count(),
                requested: range.end,
            });
        }
        if !entry.info.dtype.is_float() {
            let tensor = format!("{}/{}", request.role, request.name);
            let feature = UnsupportedFeature::Dtype { tensor, dtype: entry.info.dtype };
            return Err(CkptError::unsupported(&self.path, feature));
        }
        let mut rest: &mut [f32] = request.out;
        for (i, range) in element_ranges::intersect_ranges(&entry.parts, TensorPart::element_range, range) {
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
        let mut part_reads = Vec::new();
        for request in requests {
            self.resolve_request(request, &mut part_reads)?;
        }
        self.store.read_verified_parts(part_reads, |inside| self.list_tensors_with(inside))
    }

    fn read_unchecked(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        let mut part_reads = Vec::new();
        for request in requests {
            self.resolve_request(request, &mut part_reads)?;
        }
        self.store.read_unverified_parts(part_reads, |inside| self.list_tensors_with(inside))
    }

    fn verify_reads(&self, every_byte: bool) -> Result<()> {
        self.store.verify_read_spans(every_byte, |inside| self.list_tensors_with(inside))
    }

    fn read_raw(&self, name: &str, role: TensorRole, start_element: u64, out: &mut [u8]) -> Result<()> {
        let entry = self.find_tensor(name, role)?;
        let size = entry.info.dtype.size();
        let end = start_element.saturating_add(out.len() as u64 / size);
        let mut rest = out;
        for (i, range) in
            element_ranges::intersect_ranges(&entry.parts, TensorPart::element_range, start_element..end)
        {
            let bytes = ((range.end - range.start) * size) as usize;
            let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = later;
            let tensors_with = |inside: &dyn Fn(&TensorPart) -> bool| self.list_tensors_with(inside);
            self.store.read_raw(&entry.parts[i], entry.info.dtype, range, now, tensors_with)?;
        }
        match rest.is_empty() {
            true => Ok(()),
            false => Err(CkptError::RangeOutsideTensor {
                path: self.path.clone(),
                tensor: format!("{role}/{name}"),
                elements: entry.info.element_count(),
                requested: end,
            }),
        }
    }

    fn read_passthrough(&self) -> Result<PassthroughState> {
        Ok(self.passthrough.clone())
    }

    fn completed_steps(&self) -> Option<u64> {
        self.facts.state.step
    }

    fn training_state(&self) -> TrainingState {
        self.facts.state.clone()
    }

    fn has_only_weights(&self) -> bool {
        let states = self.entries.iter().any(|e| e.info.role.is_optimizer_state());
        !states && !self.facts.is_training_state()
    }

    fn ignored_optimizer(&self) -> Option<&str> {
        self.facts.ignored_optimizer_reason()
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.config.as_ref()
    }

    fn exported_text_files(&self) -> &[TextFile] {
        &self.texts
    }

    fn require_weights(&self) -> Result<()> {
        match self.facts.lost.as_slice() {
            [] => Ok(()),
            lost => Err(CkptError::missing(&self.path, MissingPart::Weights(lost.to_vec()))),
        }
    }
}

/// Reads `config.json`. Returns `None` if the directory does not have this file. Fails if the file
/// is not a JSON object.
fn read_config(directory: &Directory) -> Result<Option<Map<String, Value>>> {
    match directory.file_size("config.json")? {
        None => Ok(None),
        Some(_) => {
            let text = directory.read_file("config.json", TEXT_FILE_MAX)?;
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

/// Reads the files of [`TEXT_FILES`] that the directory has. Fails if a file is not UTF-8 text.
fn read_text_files(directory: &Directory) -> Result<Vec<TextFile>> {
    let mut texts = Vec::new();
    for name in TEXT_FILES {
        if directory.file_size(name)?.is_some() {
            let text = String::from_utf8(directory.read_file(name, TEXT_FILE_MAX)?)
                .map_err(|_| CkptError::damaged(directory.path(), name, "the file is not UTF-8 text"))?;
            texts.push(TextFile { name: name.into(), text });
        }
    }
    Ok(texts)
}
