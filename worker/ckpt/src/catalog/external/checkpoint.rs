//! [`ExternalCheckpoint`]: reads a checkpoint of another program from its original files.
use super::crc_check;
use super::facts::{ExternalFacts, TrainingStatePart};
use super::stored_files::{PartReadRequest, StoredFiles};
use super::tensor_part::{ExternalTensor, TensorPart};
use crate::catalog::model::{CONFIG_VALUES_MAX, TensorInfo, TextFile};
use crate::catalog::passthrough::PassthroughState;
use crate::catalog::tensor_source::{F32ReadRequest, TensorSource};
use crate::catalog::training_state::TrainingState;
use crate::codec::disk::Directory;
use crate::codec::json::{LimitedValue, read_json_if_exists};
use crate::error::{CkptError, DamageReason, MissingPart, Result, UnsupportedFeature};
use crate::format_constants::TENSORS_MAX;
use crate::tensor::{TensorRole, check_tensor_name, count_elements, element_ranges};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Name of the file with the model's config in a Hugging Face directory.
const CONFIG_FILE: &str = "config.json";
/// Limit on the size of a model's `config.json` in bytes.
const CONFIG_BYTES_MAX: u64 = 64 << 20;
/// Limit on the total size, in bytes, of the tokenizer's and the model's text files that are read
/// from a checkpoint to be copied into exports.
const TEXT_BYTES_MAX: u64 = 128 << 20;
/// The largest accepted ratio of the total size of a checkpoint's tensors to the size of the files
/// that store them, apart from [`TENSOR_BYTES_ALLOWANCE`]. Tensors may share stored bytes, so their
/// total size may exceed that of the files.
const TENSOR_TO_FILE_BYTES_RATIO_MAX: u64 = 2;
/// The number of bytes by which the total size of a checkpoint's tensors may exceed
/// [`TENSOR_TO_FILE_BYTES_RATIO_MAX`] times the size of the files that store them. A small
/// checkpoint can need them for an expanded mask, for example.
const TENSOR_BYTES_ALLOWANCE: u64 = 256 << 20;
/// Names of the text files that a Hugging Face directory may contain in addition to the weights.
const HF_TEXT_FILE_NAMES: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// An open checkpoint that another program, such as DeepSpeed or PyTorch, wrote.
pub struct ExternalCheckpoint {
    path: PathBuf,
    pub(super) facts: ExternalFacts,
    pub(crate) store: StoredFiles,
    pub(crate) entries: Vec<ExternalTensor>,
    /// Maps the role and the name of each tensor to its index in `entries`.
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
    /// Creates an [`ExternalCheckpoint`] from the tensors and files that were found in a checkpoint
    /// of another program, after checking the tensors.
    ///
    /// # Errors
    /// Fails if a tensor is invalid, the tensors exceed a limit, or a file of `root` is invalid.
    pub(crate) fn new(
        path: &Path,
        root: &Path,
        mut facts: ExternalFacts,
        store: StoredFiles,
        mut entries: Vec<ExternalTensor>,
    ) -> Result<ExternalCheckpoint> {
        entries.sort_by_key(|e| e.info.role);
        let index = index_tensors(path, &store, &entries)?;
        facts.warnings.extend(facts.state.impossible_update_count_warning());
        let of_role = |role: TensorRole| entries.iter().filter(move |e| e.info.role == role);
        facts.state.buffers = of_role(TensorRole::Buffer).map(|e| e.info.name.clone()).collect();
        facts.root = root.to_owned();
        let root = Directory::open(root)?;
        let config = read_model_config_json(&root)?;
        let texts = read_text_files(&root)?;
        if config.is_none() {
            facts.missing.push(TrainingStatePart::Config);
        }
        if !texts.iter().any(|t| t.name != HF_TEXT_FILE_NAMES[0]) {
            facts.missing.push(TrainingStatePart::Tokenizer);
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

    /// Returns this checkpoint with `passthrough` as the objects that a conversion to another
    /// checkpoint format copies unchanged.
    pub(crate) fn with_passthrough_state(mut self, passthrough: PassthroughState) -> ExternalCheckpoint {
        self.passthrough = passthrough;
        self
    }

    /// Returns what is known about the checkpoint in addition to its tensors, such as its step and
    /// the program that wrote it.
    pub fn facts(&self) -> &ExternalFacts {
        &self.facts
    }

    /// Marks the checkpoint as a single file of weights, so that other files in the same directory
    /// are not verified.
    pub(crate) fn mark_as_single_file(mut self) -> ExternalCheckpoint {
        self.is_single_file = true;
        self
    }

    /// Appends `lines` to the warnings about the checkpoint, such as a stale file `latest`.
    pub(crate) fn add_warnings(&mut self, lines: Vec<String>) {
        self.facts.warnings.extend(lines);
    }

    /// Adds messages for the user about this checkpoint before the messages that the checkpoint
    /// already has.
    pub(crate) fn prepend_notices(&mut self, mut lines: Vec<String>) {
        lines.append(&mut self.facts.notices);
        self.facts.notices = lines;
    }

    /// Iterates over the names and sizes in bytes of the files that hold tensors.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.store.files.iter().map(|f| (f.name.as_str(), f.size))
    }

    /// Returns the tensor with the name `name` and the role `role` (weight, optimizer state or
    /// buffer). Fails with [`CkptError::NoSuchTensor`] if the checkpoint does not have the tensor.
    fn find_tensor(&self, name: &str, role: TensorRole) -> Result<&ExternalTensor> {
        let index = self.index.get(&(role, name.to_owned()));
        index.map(|&i| &self.entries[i]).ok_or_else(|| CkptError::no_such_tensor(&self.path, role, name))
    }

    /// Converts requests for tensor elements to reads from files, because a tensor may be stored in
    /// several parts and each read covers one part.
    fn split_requests_into_part_reads<'a>(
        &'a self,
        requests: &'a mut [F32ReadRequest<'_>],
    ) -> Result<Vec<PartReadRequest<'a>>> {
        let mut parts = Vec::new();
        requests.iter_mut().try_for_each(|request| self.append_part_reads(request, &mut parts))?;
        Ok(parts)
    }

    /// Converts one request for tensor elements to reads from files, each from one stored part of
    /// the tensor, and appends these reads to `parts`.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is unknown or is not of a floating-point dtype, or if the request
    /// reaches beyond the tensor's last element.
    fn append_part_reads<'a>(
        &'a self,
        request: &'a mut F32ReadRequest<'_>,
        parts: &mut Vec<PartReadRequest<'a>>,
    ) -> Result<()> {
        let entry = self.find_tensor(request.name, request.role)?;
        let start = request.start_element;
        let range = start..start.saturating_add(request.out.len() as u64);
        let (tensor, elements) = (entry.info.label(), entry.info.element_count());
        if range.end > elements {
            return Err(CkptError::range_outside_tensor(&self.path, tensor, elements, range.end));
        }
        if !entry.info.dtype.is_float() {
            let feature = UnsupportedFeature::Dtype { tensor, dtype: entry.info.dtype };
            return Err(CkptError::unsupported(&self.path, feature));
        }
        let mut rest: &mut [f32] = request.out;
        for (i, range) in element_ranges::intersect_ranges(&entry.parts, TensorPart::element_range, range) {
            let (out, tail) = std::mem::take(&mut rest).split_at_mut((range.end - range.start) as usize);
            rest = tail;
            parts.push(PartReadRequest { part: &entry.parts[i], dtype: entry.info.dtype, range, out });
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

    fn read_verified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        self.store.read_parts(self.split_requests_into_part_reads(requests)?, true, &self.entries)
    }

    fn read_unverified(&self, requests: &mut [F32ReadRequest<'_>]) -> Result<()> {
        self.store.read_parts(self.split_requests_into_part_reads(requests)?, false, &self.entries)
    }

    fn verify_reads(&self, every_byte: bool) -> Result<()> {
        crc_check::verify_read_spans(&self.store, every_byte, &self.entries)
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
            self.store.read_raw(&entry.parts[i], entry.info.dtype, range, now, &self.entries)?;
        }
        if rest.is_empty() {
            return Ok(());
        }
        let elements = entry.info.element_count();
        Err(CkptError::range_outside_tensor(&self.path, entry.info.label(), elements, end))
    }

    fn skip_file_holes(&self, info: &TensorInfo, start: u64) -> Result<u64> {
        let entry = self.find_tensor(&info.name, info.role)?;
        let parts = element_ranges::intersect_ranges(
            &entry.parts,
            TensorPart::element_range,
            start..info.element_count(),
        );
        for (i, range) in parts {
            let next = self.store.skip_file_holes(&entry.parts[i], entry.info.dtype, range.clone())?;
            if next < range.end {
                return Ok(next);
            }
        }
        Ok(info.element_count())
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

    fn ignored_optimizer_reason(&self) -> Option<&str> {
        self.facts.ignored_optimizer_reason()
    }

    fn hf_config(&self) -> Option<&Map<String, Value>> {
        self.config.as_ref()
    }

    fn exported_text_files(&self) -> &[TextFile] {
        &self.texts
    }

    fn require_all_weights(&self) -> Result<()> {
        match self.facts.lost.as_slice() {
            [] => Ok(()),
            lost => Err(CkptError::missing(&self.path, MissingPart::Weights(lost.to_vec()))),
        }
    }
}

/// Checks the names, shapes and stored parts of the tensors `entries`, and returns a map from each
/// tensor's role and name to its position. `path` is the path of the checkpoint, for errors.
///
/// # Errors
/// Fails if a tensor's name or shape is invalid, its parts do not cover it exactly once, or two
/// tensors have the same role and name. Also fails if there are too many tensors, or the tensors
/// are much larger than the files.
fn index_tensors(
    path: &Path,
    store: &StoredFiles,
    entries: &[ExternalTensor],
) -> Result<HashMap<(TensorRole, String), usize>> {
    let stored = store.files.iter().fold(0u64, |sum, file| sum.saturating_add(file.size));
    let bytes_max =
        stored.saturating_mul(TENSOR_TO_FILE_BYTES_RATIO_MAX).saturating_add(TENSOR_BYTES_ALLOWANCE);
    let (mut index, mut bytes) = (HashMap::new(), 0u64);
    for (i, entry) in entries.iter().enumerate() {
        let damaged = |reason: DamageReason| CkptError::damaged(path, entry.info.label(), reason);
        check_tensor_name(&entry.info.name).map_err(|e| damaged(e.into()))?;
        let total = count_elements(&entry.info.shape)
            .ok_or_else(|| damaged(format!("the shape {:?} is impossible", entry.info.shape).into()))?;
        let error =
            element_ranges::find_coverage_error(total, entry.parts.iter().map(TensorPart::element_range));
        if let Some(error) = error {
            return Err(damaged(error.into()));
        }
        if index.insert((entry.info.role, entry.info.name.clone()), i).is_some() {
            return Err(damaged("the tensor occurs twice".into()));
        }
        bytes = bytes.saturating_add(entry.info.size_in_bytes());
        let file =
            || entry.parts.first().map_or_else(|| entry.info.label(), |p| store.files[p.file].name.clone());
        if i >= TENSORS_MAX {
            return Err(CkptError::damaged(
                path,
                file(),
                DamageReason::TooManyTensors { limit: TENSORS_MAX },
            ));
        }
        if bytes > bytes_max {
            return Err(CkptError::damaged(path, file(), DamageReason::TensorsExceedFiles { bytes, stored }));
        }
    }
    Ok(index)
}

/// Reads the model's `config.json` in a checkpoint directory, and returns `None` if the file does
/// not exist. Fails if the file is not a JSON object.
fn read_model_config_json(directory: &Directory) -> Result<Option<Map<String, Value>>> {
    match read_json_if_exists(directory, CONFIG_FILE, CONFIG_BYTES_MAX)? {
        None => Ok(None),
        Some(LimitedValue::<CONFIG_VALUES_MAX>(Value::Object(map))) => Ok(Some(map)),
        Some(_) => {
            let reason = DamageReason::Json("not an object".into());
            Err(CkptError::damaged(directory.path(), CONFIG_FILE, reason))
        }
    }
}

/// Reads the text files of the tokenizer, and the settings of text generation, that exist in a
/// checkpoint directory. Fails if a file is not UTF-8 text, or the files together have more than
/// [`TEXT_BYTES_MAX`] bytes.
fn read_text_files(directory: &Directory) -> Result<Vec<TextFile>> {
    let (mut texts, mut bytes_left) = (Vec::new(), TEXT_BYTES_MAX);
    for name in HF_TEXT_FILE_NAMES {
        if directory.file_size(name)?.is_some() {
            let text = String::from_utf8(directory.read_file(name, bytes_left)?)
                .map_err(|_| CkptError::damaged(directory.path(), name, "the file is not UTF-8 text"))?;
            bytes_left -= text.len() as u64;
            texts.push(TextFile { name: name.into(), text });
        }
    }
    Ok(texts)
}
