//! A checkpoint of another program while it is put together.
use super::store::{Part, Store, StoredFile};
use super::{Entry, Foreign, ForeignFacts};
use crate::catalog::{Role, TensorInfo};
use crate::disk::Folder;
use crate::error::{CkptError, Result};
use crate::formats::torch_file::{PLAIN, TENSORS, TensorView, TorchFile};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// Globals that files of PyTorch programs may name.
pub(crate) const GLOBALS: &[&[&str]] = &[TENSORS, PLAIN];

impl Entry {
    /// A tensor that is whole in one file.
    pub(crate) fn whole(name: &str, role: Role, file: usize, view: &TensorView) -> Entry {
        let count = view.elements();
        let parts = if count > 0 { vec![Part::of(file, view, 0..count, 0)] } else { Vec::new() };
        Entry::of(name, role, view.dtype, view.shape.clone(), parts)
    }

    /// A tensor of these parts, sorted by their first element.
    pub(crate) fn of(
        name: &str,
        role: Role,
        dtype: crate::dtype::Dtype,
        shape: Vec<u64>,
        parts: Vec<Part>,
    ) -> Entry {
        Entry { info: TensorInfo { name: name.to_owned(), role, dtype, shape }, parts }
    }
}

/// Names of the weights that a reader trains: what it knows where a file only has numbers.
pub(crate) type Trained = HashSet<String>;

/// Files, tensors and facts found so far in one folder.
pub(crate) struct Draft {
    pub(crate) folder: Arc<Folder>,
    /// What the reader trains, where it said so.
    pub(crate) trained: Option<Trained>,
    pub(crate) facts: ForeignFacts,
    pub(crate) store: Store,
    pub(crate) entries: Vec<Entry>,
}

impl Draft {
    pub(crate) fn new(path: &Path) -> Result<Draft> {
        let folder = Arc::new(Folder::open(path)?);
        let facts = ForeignFacts::default();
        Ok(Draft { folder, trained: None, facts, store: Store::default(), entries: Vec::new() })
    }

    /// Reads a torch file in the folder and adds it to the store: its index there, and its values.
    pub(crate) fn torch(&mut self, name: &str, globals: &[&[&'static str]]) -> Result<(usize, TorchFile)> {
        let file = TorchFile::open(&self.folder, name, globals)?;
        let mut stored = StoredFile::new(self.folder.clone(), name.to_owned(), file.size);
        stored.add(file.members.clone());
        self.store.files.push(stored);
        Ok((self.store.files.len() - 1, file))
    }

    /// Something is wrong with a file in the folder.
    pub(crate) fn damaged(&self, file: &str, why: impl Into<String>) -> CkptError {
        CkptError::damaged(self.folder.path(), file, why)
    }

    pub(crate) fn missing(&self, what: impl Into<String>) -> CkptError {
        CkptError::Missing { path: self.folder.path().to_owned(), what: what.into() }
    }

    pub(crate) fn notice(&mut self, line: impl Into<String>) {
        self.facts.notices.push(line.into());
    }

    /// Names and shapes of the weights.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (&str, &[u64])> {
        let weights = self.entries.iter().filter(|e| e.info.role == Role::Weight);
        weights.map(|e| (e.info.name.as_str(), e.info.shape.as_slice()))
    }

    pub(crate) fn has_optimizer(&self) -> bool {
        self.entries.iter().any(|e| e.info.role.is_optimizer_state())
    }

    /// Sorts tensors by the place of their names in `order`.
    pub(crate) fn sort_by(&mut self, order: &[String]) {
        let place: HashMap<&str, usize> = order.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect();
        self.entries.sort_by_key(|e| place.get(e.info.name.as_str()).copied().unwrap_or(usize::MAX));
    }

    /// The checkpoint, with what a full training state has and this one has not.
    pub(crate) fn finish(mut self) -> Result<Foreign> {
        if !self.has_optimizer() {
            self.facts.missing.insert(0, "optimizer state".into());
        }
        let path = self.folder.path().to_owned();
        Foreign::new(&path, &path, self.facts, self.store, self.entries)
    }
}

/// `a, b and 3 more`.
pub(crate) fn some(names: &[String]) -> String {
    match names {
        [a, b, more @ ..] if !more.is_empty() => format!("{a}, {b} and {} more", more.len()),
        few => few.join(" and "),
    }
}

/// The state of an optimizer that a key names; `None` for one that isn't read.
pub(crate) fn role_of(key: &str) -> Option<Role> {
    match key {
        "exp_avg" => Some(Role::ExpAvg),
        "exp_avg_sq" => Some(Role::ExpAvgSq),
        "momentum_buffer" => Some(Role::Momentum),
        _ => None,
    }
}

/// A step as a whole number. `Err`: what it is instead.
pub(crate) fn whole_step(step: f64) -> std::result::Result<u64, String> {
    match step >= 0.0 && step.fract() == 0.0 && step < 9e15 {
        true => Ok(step as u64),
        false => Err(format!("its optimizer state is of step {step}, which is none")),
    }
}
