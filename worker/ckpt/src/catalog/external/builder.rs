//! [`ExternalCheckpointBuilder`]: collects the files, tensors and facts of an external checkpoint.
use super::checkpoint::{ExternalCheckpoint, ExternalTensor};
use super::facts::{ExternalFacts, StatePart};
use super::stored_files::{StoredFile, StoredFiles};
use super::tensor_part::TensorPart;
use crate::catalog::model::TensorInfo;
use crate::codec::disk::Directory;
use crate::codec::torch_file::{PLAIN_GLOBALS, TENSOR_GLOBALS, TensorView, TorchFile};
use crate::error::{CkptError, DamageReason, InvalidStep, MissingPart, Result};
use crate::tensor::TensorRole;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// Classes and functions that the pickles of torch files may name.
pub(crate) const GLOBALS: &[&[&str]] = &[TENSOR_GLOBALS, PLAIN_GLOBALS];

impl ExternalTensor {
    /// Returns a tensor whose elements are all elements of the view `view`, in order. `file` is the
    /// index of the view's file in the store.
    pub(crate) fn from_whole_view(
        name: &str,
        role: TensorRole,
        file: usize,
        view: &TensorView,
    ) -> ExternalTensor {
        let count = view.elements();
        let parts = if count > 0 { vec![TensorPart::new(file, view, 0..count, 0)] } else { Vec::new() };
        ExternalTensor::from_parts(name, role, view.dtype, view.shape.clone(), parts)
    }

    /// Returns a tensor that consists of `parts`, which must be sorted by their first element.
    pub(crate) fn from_parts(
        name: &str,
        role: TensorRole,
        dtype: crate::tensor::Dtype,
        shape: Vec<u64>,
        parts: Vec<TensorPart>,
    ) -> ExternalTensor {
        ExternalTensor { info: TensorInfo { name: name.to_owned(), role, dtype, shape }, parts }
    }
}

/// Names of the weights that the reader of a checkpoint trains. The names identify optimizer states
/// that a file stores only by number.
pub(crate) type TrainedNames = HashSet<String>;

/// The files, tensors and facts that were found in a directory so far.
pub(crate) struct ExternalCheckpointBuilder {
    pub(crate) directory: Arc<Directory>,
    /// The weights that the reader trains; `None` if unknown.
    pub(crate) trained: Option<TrainedNames>,
    pub(crate) facts: ExternalFacts,
    pub(crate) store: StoredFiles,
    pub(crate) entries: Vec<ExternalTensor>,
}

impl ExternalCheckpointBuilder {
    /// Opens the directory at `path`, without reading any file.
    pub(crate) fn new(path: &Path) -> Result<ExternalCheckpointBuilder> {
        let directory = Arc::new(Directory::open(path)?);
        let facts = ExternalFacts::default();
        Ok(ExternalCheckpointBuilder {
            directory,
            trained: None,
            facts,
            store: StoredFiles::default(),
            entries: Vec::new(),
        })
    }

    /// Opens a torch file and adds it to the store. Returns the file's index in the store, and the
    /// parsed file. `globals` lists the classes and functions that the file may name.
    pub(crate) fn add_torch_file(
        &mut self,
        name: &str,
        globals: &[&[&'static str]],
    ) -> Result<(usize, TorchFile)> {
        let file = TorchFile::open(&self.directory, name, globals)?;
        let mut stored = StoredFile::new(self.directory.clone(), name.to_owned(), file.size);
        stored.add_spans(file.members.clone());
        self.store.files.push(stored);
        Ok((self.store.files.len() - 1, file))
    }

    /// Returns [`CkptError::Damaged`] for the file `file` of the directory.
    pub(crate) fn damaged(&self, file: &str, reason: impl Into<DamageReason>) -> CkptError {
        CkptError::damaged(self.directory.path(), file, reason)
    }

    /// Returns [`CkptError::Missing`] for the part `part` of the checkpoint.
    pub(crate) fn missing(&self, part: impl Into<MissingPart>) -> CkptError {
        CkptError::missing(self.directory.path(), part)
    }

    /// Adds a notice for the user to the facts.
    pub(crate) fn add_notice(&mut self, line: impl Into<String>) {
        self.facts.notices.push(line.into());
    }

    /// Records as a notice why the optimizer state is ignored. The first such notice also becomes
    /// the reason in the facts.
    pub(crate) fn record_skipped_optimizer(&mut self, notice: String) {
        self.facts.ignored_optimizer.get_or_insert_with(|| notice.clone());
        self.add_notice(notice);
    }

    /// Iterates over the names and shapes of the weights that were added so far.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[u64])> {
        let weights = self.entries.iter().filter(|e| e.info.role == TensorRole::Weight);
        weights.map(|e| (e.info.name.as_str(), e.info.shape.as_slice()))
    }

    /// Returns true if any tensor added so far is an optimizer state.
    pub(crate) fn has_optimizer_state(&self) -> bool {
        self.entries.iter().any(|e| e.info.role.is_optimizer_state())
    }

    /// Sorts the tensors by the position of their names in `order`. Tensors whose names are not in
    /// `order` come last, in their previous order.
    pub(crate) fn sort_tensors(&mut self, order: &[String]) {
        let position: HashMap<&str, usize> = order.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect();
        self.entries.sort_by_key(|e| position.get(e.info.name.as_str()).copied().unwrap_or(usize::MAX));
    }

    /// Builds the checkpoint. Lists the optimizer state as missing in the facts if no tensor is an
    /// optimizer state.
    pub(crate) fn finish(mut self) -> Result<ExternalCheckpoint> {
        if !self.has_optimizer_state() {
            self.facts.missing.insert(0, StatePart::OptimizerState);
        }
        let path = self.directory.path().to_owned();
        ExternalCheckpoint::new(&path, &path, self.facts, self.store, self.entries)
    }
}

/// Returns the role of the optimizer state that programs store under `key`, or `None` for other
/// states.
pub(crate) fn parse_optimizer_state_role(key: &str) -> Option<TensorRole> {
    match key {
        "exp_avg" => Some(TensorRole::ExpAvg),
        "exp_avg_sq" => Some(TensorRole::ExpAvgSq),
        "momentum_buffer" => Some(TensorRole::Momentum),
        _ => None,
    }
}

/// Converts a step, which programs may store as a float, to an integer.
///
/// # Errors
/// Fails if the step is negative, fractional or too large to be exact.
pub(crate) fn to_whole_step(step: f64) -> std::result::Result<u64, InvalidStep> {
    match step >= 0.0 && step.fract() == 0.0 && step < 9e15 {
        true => Ok(step as u64),
        false => Err(InvalidStep(step)),
    }
}
