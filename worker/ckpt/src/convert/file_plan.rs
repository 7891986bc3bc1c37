//! The plan of one output file: its values, and which elements of which source tensors it stores.
use crate::dtype::Dtype;
use crate::pickle::{Object, StoredTensor};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// One planned file of the result.
pub(super) struct FilePlan {
    /// Path in the output directory, with `/` between names.
    pub(super) path: String,
    pub(super) content: FileContent,
}

/// The content of a planned file.
pub(super) enum FileContent {
    /// A file in the container of `torch.save`.
    Torch(TorchPlan),
    /// A native shard.
    Shard { rank: u32, pieces: Vec<ShardPiece> },
    /// A small file of these bytes.
    Bytes(Vec<u8>),
    /// The content of an existing file: a hard link to it, or a copy where links are not possible.
    LinkTo(PathBuf),
}

/// A range of a source tensor as a native shard stores it.
#[derive(Clone)]
pub(super) struct ShardPiece {
    pub(super) tensor: usize,
    pub(super) elements: Range<u64>,
    pub(super) dtype: Dtype,
}

impl ShardPiece {
    pub(super) fn element_count(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    pub(super) fn bytes(&self) -> u64 {
        self.element_count() * self.dtype.size()
    }
}

/// The object of a torch file, and the storages of the tensors in it.
pub(super) struct TorchPlan {
    pub(super) value: Object,
    pub(super) storages: Vec<PlannedStorage>,
}

/// One storage: a flat array that tensors of the file refer to.
pub(super) struct PlannedStorage {
    pub(super) dtype: Dtype,
    pub(super) spans: Vec<StorageSpan>,
}

/// Consecutive elements of a storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StorageSpan {
    /// Elements of the source tensor with this index, converted to the storage's dtype.
    Elements(usize, Range<u64>),
    /// All elements of the source tensor with this index, in its stored dtype. The second field is
    /// their number.
    Raw(usize, u64),
    /// This many zeros.
    Zeros(u64),
    /// Literal bytes.
    Bytes(Arc<[u8]>),
}

impl PlannedStorage {
    pub(super) fn elements(&self) -> u64 {
        self.spans.iter().map(|s| s.elements(self.dtype)).sum()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }
}

impl StorageSpan {
    fn elements(&self, dtype: Dtype) -> u64 {
        match self {
            StorageSpan::Elements(_, range) => range.end - range.start,
            StorageSpan::Raw(_, n) | StorageSpan::Zeros(n) => *n,
            StorageSpan::Bytes(bytes) => bytes.len() as u64 / dtype.size(),
        }
    }
}

impl FilePlan {
    /// Bytes of tensor data, or of the whole file where it has no tensors; 0 for a link.
    pub(super) fn bytes(&self) -> u64 {
        match &self.content {
            FileContent::Torch(plan) => plan.bytes(),
            FileContent::Shard { pieces, .. } => pieces.iter().map(ShardPiece::bytes).sum(),
            FileContent::Bytes(bytes) => bytes.len() as u64,
            FileContent::LinkTo(_) => 0,
        }
    }

    /// The file name without its extension.
    pub(super) fn stem(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.rsplit_once('.').map_or(name, |(stem, _)| stem)
    }
}

impl TorchPlan {
    pub(super) fn bytes(&self) -> u64 {
        self.storages.iter().map(PlannedStorage::bytes).sum()
    }
}

/// Collects the storages of one file while its object is built.
#[derive(Default)]
pub(super) struct StorageBuilder(Vec<PlannedStorage>);

impl StorageBuilder {
    /// Adds a tensor with a separate storage.
    pub(super) fn tensor(&mut self, dtype: Dtype, shape: Vec<u64>, spans: Vec<StorageSpan>) -> Object {
        let spans: Vec<StorageSpan> = spans.into_iter().filter(|s| s.elements(dtype) > 0).collect();
        let storage = PlannedStorage { dtype, spans };
        let stored = storage.elements();
        self.0.push(storage);
        Object::Tensor(StoredTensor { storage: self.0.len() - 1, dtype, stored, shape })
    }

    /// Adds a one-dimensional F32 tensor.
    pub(super) fn flat_tensor(&mut self, spans: Vec<StorageSpan>) -> Object {
        let n = spans.iter().map(|s| s.elements(Dtype::F32)).sum();
        self.tensor(Dtype::F32, vec![n], spans)
    }

    /// Adds an F32 tensor of shape `[]`.
    pub(super) fn scalar(&mut self, value: f64) -> Object {
        let bytes: Arc<[u8]> = (value as f32).to_le_bytes().into();
        self.tensor(Dtype::F32, Vec::new(), vec![StorageSpan::Bytes(bytes)])
    }

    /// Takes over a value from another file; its tensors get storages in this file.
    pub(super) fn adopt(&mut self, value: &Object) -> Object {
        let pairs = |this: &mut StorageBuilder, pairs: &[(Object, Object)]| {
            pairs.iter().map(|(k, v)| (k.clone(), this.adopt(v))).collect()
        };
        match value {
            Object::Literal { dtype, shape, bytes } => {
                self.tensor(*dtype, shape.clone(), vec![StorageSpan::Bytes(bytes.clone())])
            }
            Object::List(v) => Object::List(v.iter().map(|v| self.adopt(v)).collect()),
            Object::Tuple(v) => Object::Tuple(v.iter().map(|v| self.adopt(v)).collect()),
            Object::Dict(v) => Object::Dict(pairs(self, v)),
            Object::OrderedDict(v) => Object::OrderedDict(pairs(self, v)),
            other => other.clone(),
        }
    }

    /// The plan of a file with this object and the collected storages.
    pub(super) fn into_file(self, path: String, value: Object) -> FilePlan {
        FilePlan { path, content: FileContent::Torch(TorchPlan { value, storages: self.0 }) }
    }
}
