//! [`CheckpointBuilder`]: collects the files, tensors and facts of an external checkpoint.
use super::store::{Store, StoredFile, TensorPart};
use super::{ExternalCheckpoint, ExternalFacts, ExternalTensor, StatePart};
use crate::catalog::{TensorInfo, TensorRole};
use crate::disk::Directory;
use crate::error::{CkptError, DamageReason, MissingPart, Result};
use crate::formats::optimizer::InvalidStep;
use crate::formats::torch_file::{PLAIN, TENSORS, TensorView, TorchFile};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// Classes and functions that torch files may name.
pub(crate) const GLOBALS: &[&[&str]] = &[TENSORS, PLAIN];

impl ExternalTensor {
    /// A tensor that is stored completely in one file.
    pub(crate) fn whole(name: &str, role: TensorRole, file: usize, view: &TensorView) -> ExternalTensor {
        let count = view.elements();
        let parts = if count > 0 { vec![TensorPart::new(file, view, 0..count, 0)] } else { Vec::new() };
        ExternalTensor::from_parts(name, role, view.dtype, view.shape.clone(), parts)
    }

    /// A tensor of these parts, which are sorted by their first element.
    pub(crate) fn from_parts(
        name: &str,
        role: TensorRole,
        dtype: crate::dtype::Dtype,
        shape: Vec<u64>,
        parts: Vec<TensorPart>,
    ) -> ExternalTensor {
        ExternalTensor { info: TensorInfo { name: name.to_owned(), role, dtype, shape }, parts }
    }
}

/// Names of the weights that a reader trains, which identify numbered optimizer states.
pub(crate) type Trained = HashSet<String>;

/// The files, tensors and facts found in a directory so far.
pub(crate) struct CheckpointBuilder {
    pub(crate) directory: Arc<Directory>,
    /// The weights that the reader trains, if it gave them.
    pub(crate) trained: Option<Trained>,
    pub(crate) facts: ExternalFacts,
    pub(crate) store: Store,
    pub(crate) entries: Vec<ExternalTensor>,
}

impl CheckpointBuilder {
    pub(crate) fn new(path: &Path) -> Result<CheckpointBuilder> {
        let directory = Arc::new(Directory::open(path)?);
        let facts = ExternalFacts::default();
        Ok(CheckpointBuilder {
            directory,
            trained: None,
            facts,
            store: Store::default(),
            entries: Vec::new(),
        })
    }

    /// Opens a torch file and adds it to the store; returns its index there and its values.
    pub(crate) fn open_torch_file(
        &mut self,
        name: &str,
        globals: &[&[&'static str]],
    ) -> Result<(usize, TorchFile)> {
        let file = TorchFile::open(&self.directory, name, globals)?;
        let mut stored = StoredFile::new(self.directory.clone(), name.to_owned(), file.size);
        stored.add(file.members.clone());
        self.store.files.push(stored);
        Ok((self.store.files.len() - 1, file))
    }

    /// An error about a file in the directory.
    pub(crate) fn damaged(&self, file: &str, reason: impl Into<DamageReason>) -> CkptError {
        CkptError::damaged(self.directory.path(), file, reason)
    }

    pub(crate) fn missing(&self, part: impl Into<MissingPart>) -> CkptError {
        CkptError::missing(self.directory.path(), part)
    }

    pub(crate) fn add_notice(&mut self, line: impl Into<String>) {
        self.facts.notices.push(line.into());
    }

    /// Records why the optimizer state is ignored.
    pub(crate) fn skip_optimizer(&mut self, notice: String) {
        self.facts.ignored_optimizer.get_or_insert_with(|| notice.clone());
        self.add_notice(notice);
    }

    /// Names and shapes of the weights.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[u64])> {
        let weights = self.entries.iter().filter(|e| e.info.role == TensorRole::Weight);
        weights.map(|e| (e.info.name.as_str(), e.info.shape.as_slice()))
    }

    pub(crate) fn has_optimizer(&self) -> bool {
        self.entries.iter().any(|e| e.info.role.is_optimizer_state())
    }

    /// Sorts the tensors by the position of their names in `order`.
    pub(crate) fn sort_by(&mut self, order: &[String]) {
        let place: HashMap<&str, usize> = order.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect();
        self.entries.sort_by_key(|e| place.get(e.info.name.as_str()).copied().unwrap_or(usize::MAX));
    }

    /// Builds the checkpoint.
    pub(crate) fn finish(mut self) -> Result<ExternalCheckpoint> {
        if !self.has_optimizer() {
            self.facts.missing.insert(0, StatePart::OptimizerState);
        }
        let path = self.directory.path().to_owned();
        ExternalCheckpoint::new(&path, &path, self.facts, self.store, self.entries)
    }
}

/// The role of an optimizer state with this key; `None` for unknown states.
pub(crate) fn optimizer_state_role(key: &str) -> Option<TensorRole> {
    match key {
        "exp_avg" => Some(TensorRole::ExpAvg),
        "exp_avg_sq" => Some(TensorRole::ExpAvgSq),
        "momentum_buffer" => Some(TensorRole::Momentum),
        _ => None,
    }
}

/// Converts a step to a whole number.
pub(crate) fn whole_step(step: f64) -> std::result::Result<u64, InvalidStep> {
    match step >= 0.0 && step.fract() == 0.0 && step < 9e15 {
        true => Ok(step as u64),
        false => Err(InvalidStep(step)),
    }
}
