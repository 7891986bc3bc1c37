//! Defines [`ExternalCheckpointBuilder`], which collects the files, tensors and step of a
//! checkpoint that another program has written.
use super::checkpoint::ExternalCheckpoint;
use super::facts::{ExternalFacts, TrainingStatePart};
use super::stored_files::StoredFiles;
use super::tensor_part::ExternalTensor;
use crate::codec::disk::Directory;
use crate::codec::torch_file::{DTYPE_GLOBALS, PLAIN_GLOBALS, TENSOR_GLOBALS, TorchFile};
use crate::error::{CkptError, DamageReason, InvalidStep, MissingPart, Result, format_names};
use crate::format_constants::TENSORS_MAX;
use crate::tensor::TensorRole;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// The only Python classes and functions that the pickles of torch files may refer to.
pub(crate) const ALLOWED_GLOBALS: &[&[&str]] = &[TENSOR_GLOBALS, DTYPE_GLOBALS, PLAIN_GLOBALS];

/// The names of the weights that a job trains, by which the optimizer states in another program's
/// checkpoint are identified. The names identify optimizer states that a file stores only by
/// number.
pub(crate) type TrainedWeightNames = HashSet<String>;

/// Collects the files, tensors and other information, such as the step, of another program's
/// checkpoint while its directory is read.
pub(crate) struct ExternalCheckpointBuilder {
    pub(crate) directory: Arc<Directory>,
    /// The weights that the job which reads the checkpoint trains; `None` if unknown.
    pub(crate) trained: Option<TrainedWeightNames>,
    pub(crate) facts: ExternalFacts,
    pub(crate) store: StoredFiles,
    pub(crate) entries: Vec<ExternalTensor>,
}

impl ExternalCheckpointBuilder {
    /// Opens the checkpoint directory at `path`, without reading a file in it, and creates a
    /// builder that has no files and tensors yet.
    pub(crate) fn new(path: &Path) -> Result<ExternalCheckpointBuilder> {
        Ok(ExternalCheckpointBuilder {
            directory: Arc::new(Directory::open(path)?),
            trained: None,
            facts: ExternalFacts::default(),
            store: StoredFiles::default(),
            entries: Vec::new(),
        })
    }

    /// Opens a file of the checkpoint directory that `torch.save` has written, and adds it to the
    /// list of the checkpoint's files. Returns the file's index in [`StoredFiles`], and the parsed
    /// file. `globals` lists the classes and functions that the file may name.
    pub(crate) fn add_torch_file(
        &mut self,
        name: &str,
        globals: &[&[&'static str]],
    ) -> Result<(usize, TorchFile)> {
        let file = TorchFile::open(&self.directory, name, globals)?;
        Ok((self.store.add_file(&self.directory, name, file.size, file.members.clone()), file))
    }

    /// Fails if `count` further tensors would exceed the limit of [`TENSORS_MAX`] tensors per
    /// checkpoint. `name` is the file that contains them.
    pub(crate) fn require_tensor_capacity(&self, name: &str, count: usize) -> Result<()> {
        match self.entries.len().saturating_add(count) > TENSORS_MAX {
            true => Err(self.damaged_file_error(name, DamageReason::TooManyTensors { limit: TENSORS_MAX })),
            false => Ok(()),
        }
    }

    /// Returns the error [`CkptError::Damaged`] for the file named `file` in the checkpoint
    /// directory.
    pub(crate) fn damaged_file_error(&self, file: &str, reason: impl Into<DamageReason>) -> CkptError {
        CkptError::damaged(self.directory.path(), file, reason)
    }

    /// Returns the error [`CkptError::Damaged`] for one file with tensors, which is given as an
    /// index into the builder's list of files.
    pub(crate) fn damaged_stored_file_error(
        &self,
        file: usize,
        reason: impl Into<DamageReason>,
    ) -> CkptError {
        self.damaged_file_error(&self.store.files[file].name, reason)
    }

    /// Returns the error [`CkptError::Missing`], which reports that the checkpoint lacks `part`,
    /// such as a file or a tensor.
    pub(crate) fn missing_part_error(&self, part: impl Into<MissingPart>) -> CkptError {
        CkptError::missing(self.directory.path(), part)
    }

    /// Adds `line` to the messages that are shown to the user when the checkpoint is read.
    pub(crate) fn add_notice(&mut self, line: impl Into<String>) {
        self.facts.notices.push(line.into());
    }

    /// Records, for the user and for later decisions, that the checkpoint's optimizer states are
    /// not read, with the reason `notice`. The first such notice also becomes the reason in the
    /// facts.
    pub(crate) fn record_skipped_optimizer(&mut self, notice: String) {
        self.facts.ignored_optimizer.get_or_insert_with(|| notice.clone());
        self.add_notice(notice);
    }

    /// Adds a message for the user with the names of unknown optimizer states in the checkpoint,
    /// which are not read. Does nothing if `keys` is empty.
    pub(crate) fn add_unknown_states_notice<'k>(&mut self, keys: impl IntoIterator<Item = &'k String>) {
        let keys: BTreeSet<&String> = keys.into_iter().collect();
        if !keys.is_empty() {
            let keys: Vec<String> = keys.into_iter().cloned().collect();
            self.add_notice(format!("ignoring unknown optimizer states: {}", format_names(&keys)));
        }
    }

    /// Iterates over the names and shapes of the weights that were added to the builder so far.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[u64])> {
        let weights = self.entries.iter().filter(|e| e.info.role == TensorRole::Weight);
        weights.map(|e| (e.info.name.as_str(), e.info.shape.as_slice()))
    }

    /// Sorts the checkpoint's tensors in the order in which `order` lists their names. Tensors
    /// whose names are not in `order` come last, in their previous order.
    pub(crate) fn sort_tensors<'n>(&mut self, order: impl IntoIterator<Item = &'n str>) {
        let position: HashMap<&str, usize> = order.into_iter().zip(0..).collect();
        self.entries.sort_by_key(|e| position.get(e.info.name.as_str()).copied().unwrap_or(usize::MAX));
    }

    /// Builds the [`ExternalCheckpoint`] from everything that was added to the builder. Lists the
    /// optimizer state as missing in the facts if no tensor is an optimizer state.
    pub(crate) fn finish(self) -> Result<ExternalCheckpoint> {
        let path = self.directory.path().to_owned();
        self.finish_with_paths(&path, &path)
    }

    /// Builds the [`ExternalCheckpoint`] at `path` from everything that was added so far, and reads
    /// the model's config and tokenizer from the directory `root`.
    pub(crate) fn finish_with_paths(mut self, path: &Path, root: &Path) -> Result<ExternalCheckpoint> {
        if !self.entries.iter().any(|e| e.info.role.is_optimizer_state()) {
            self.facts.missing.insert(0, TrainingStatePart::OptimizerState);
        }
        ExternalCheckpoint::new(path, root, self.facts, self.store, self.entries)
    }
}

/// Converts an optimizer step, which some programs store as a float, to an integer.
///
/// # Errors
/// Fails if the step is negative, fractional or too large to be exact.
pub(crate) fn convert_step_to_integer(step: f64) -> std::result::Result<u64, InvalidStep> {
    match step >= 0.0 && step.fract() == 0.0 && step < 9e15 {
        true => Ok(step as u64),
        false => Err(InvalidStep(step)),
    }
}
