//! [`FilePlan`]: what one output file of a conversion will contain: Python values, and elements of
//! tensors of the source checkpoint.
use crate::codec::pickle::{PythonObject, StoredTensor};
use crate::tensor::Dtype;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// The path of one output file of a conversion, and what the file will contain.
pub(super) struct FilePlan {
    /// Path in the output directory, with `/` between names.
    pub(super) path: String,
    pub(super) content: FileContent,
}

/// What an output file of a conversion will contain: a torch file, a rank's file (shard) in
/// launch's own format, a small file, or a link.
pub(super) enum FileContent {
    /// A file in the zip format of `torch.save`.
    Torch(TorchFilePlan),
    /// The native shard of a rank, with these pieces of tensors.
    Shard { rank: u32, pieces: Vec<PlannedShardPiece> },
    /// A small file whose content is this vector.
    Bytes(Vec<u8>),
    /// A hard link to the existing file at this path, or a copy if links are not possible.
    LinkTo(PathBuf),
}

/// A range of a source tensor's elements that a rank's file in launch's own (native) format will
/// store, with the dtype `dtype`.
#[derive(Clone)]
pub(super) struct PlannedShardPiece {
    /// Index of the tensor in the source checkpoint.
    pub(super) tensor: usize,
    /// Indices of the elements within the source tensor.
    pub(super) elements: Range<u64>,
    pub(super) dtype: Dtype,
}

impl PlannedShardPiece {
    /// Returns the number of elements in this range of a source tensor.
    pub(super) fn element_count(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    /// Returns the size in bytes that the elements of this range will have in the rank's file.
    pub(super) fn size_in_bytes(&self) -> u64 {
        self.element_count() * self.dtype.size()
    }
}

/// What a torch file will contain: its Python value, and the storages (flat arrays) to which
/// tensors in the value refer.
pub(super) struct TorchFilePlan {
    pub(super) value: PythonObject,
    pub(super) storages: Vec<PlannedStorage>,
}

/// A storage (flat array to which tensors refer) that a torch file of the converted checkpoint will
/// contain.
pub(super) struct PlannedStorage {
    pub(super) dtype: Dtype,
    pub(super) spans: Vec<StorageSpan>,
}

/// Where consecutive elements of a storage (flat array) of a torch file come from: a source tensor,
/// or given values.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StorageSpan {
    /// Elements of the source tensor with this index, converted to the storage's dtype.
    Elements(usize, Range<u64>),
    /// All elements of the source tensor with this index, in its stored dtype. The second field is
    /// the number of elements.
    Raw(usize, u64),
    /// This number of zeros.
    Zeros(u64),
    /// Elements given by their little-endian bytes, in the storage's dtype.
    Bytes(Arc<[u8]>),
}

impl PlannedStorage {
    /// Returns the number of elements that the storage will have.
    pub(super) fn element_count(&self) -> u64 {
        self.spans.iter().map(|s| s.element_count(self.dtype)).sum()
    }

    /// Returns the size of the storage in bytes.
    pub(super) fn size_in_bytes(&self) -> u64 {
        self.element_count() * self.dtype.size()
    }
}

impl StorageSpan {
    /// Returns the number of elements in this part of a storage (flat array), whose dtype is
    /// `dtype`.
    fn element_count(&self, dtype: Dtype) -> u64 {
        match self {
            StorageSpan::Elements(_, range) => range.end - range.start,
            StorageSpan::Raw(_, n) | StorageSpan::Zeros(n) => *n,
            StorageSpan::Bytes(bytes) => bytes.len() as u64 / dtype.size(),
        }
    }
}

impl FilePlan {
    /// Returns the number of bytes of tensor data in a planned torch file or shard, or the size of
    /// a small file. Returns 0 for a link.
    pub(super) fn size_in_bytes(&self) -> u64 {
        match &self.content {
            FileContent::Torch(plan) => plan.size_in_bytes(),
            FileContent::Shard { pieces, .. } => pieces.iter().map(PlannedShardPiece::size_in_bytes).sum(),
            FileContent::Bytes(bytes) => bytes.len() as u64,
            FileContent::LinkTo(_) => 0,
        }
    }

    /// Returns the name of the planned file without directories and extension.
    pub(super) fn file_stem(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.rsplit_once('.').map_or(name, |(stem, _)| stem)
    }
}

impl TorchFilePlan {
    /// Returns the total size in bytes of the storages (flat arrays) that the torch file will
    /// contain.
    pub(super) fn size_in_bytes(&self) -> u64 {
        self.storages.iter().map(PlannedStorage::size_in_bytes).sum()
    }
}

/// Collects the storages (flat arrays) of one torch file while the caller builds the Python value
/// that refers to them.
#[derive(Default)]
pub(super) struct StorageBuilder(Vec<PlannedStorage>);

impl StorageBuilder {
    /// Adds a storage (flat array) with the planned content `spans` to the torch file, and returns
    /// a Python tensor of the shape `shape` that refers to the storage.
    pub(super) fn add_tensor(
        &mut self,
        dtype: Dtype,
        shape: Vec<u64>,
        spans: Vec<StorageSpan>,
    ) -> PythonObject {
        let spans: Vec<StorageSpan> = spans.into_iter().filter(|s| s.element_count(dtype) > 0).collect();
        let storage = PlannedStorage { dtype, spans };
        let stored = storage.element_count();
        self.0.push(storage);
        PythonObject::Tensor(StoredTensor {
            storage: self.0.len() - 1,
            dtype,
            storage_elements: stored,
            shape,
        })
    }

    /// Adds an F32 storage (flat array) with the planned content `spans` to the torch file, and
    /// returns a one-dimensional Python tensor of all its elements.
    pub(super) fn add_flat_tensor(&mut self, spans: Vec<StorageSpan>) -> PythonObject {
        let n = spans.iter().map(|s| s.element_count(Dtype::F32)).sum();
        self.add_tensor(Dtype::F32, vec![n], spans)
    }

    /// Adds a storage (flat array) with `value` as its only element to the torch file, and returns
    /// an F32 tensor of shape `[]` that refers to it.
    pub(super) fn add_scalar(&mut self, value: f64) -> PythonObject {
        let bytes: Arc<[u8]> = (value as f32).to_le_bytes().into();
        self.add_tensor(Dtype::F32, Vec::new(), vec![StorageSpan::Bytes(bytes)])
    }

    /// Converts `value`, which was read from another torch file, to a value that the planned torch
    /// file can store. Tensors in the value get storages in this file.
    pub(super) fn import_value(&mut self, value: &PythonObject) -> PythonObject {
        let pairs = |this: &mut StorageBuilder, pairs: &[(PythonObject, PythonObject)]| {
            pairs.iter().map(|(k, v)| (k.clone(), this.import_value(v))).collect()
        };
        match value {
            PythonObject::Literal { dtype, shape, bytes } => {
                self.add_tensor(*dtype, shape.clone(), vec![StorageSpan::Bytes(bytes.clone())])
            }
            PythonObject::List(v) => PythonObject::List(v.iter().map(|v| self.import_value(v)).collect()),
            PythonObject::Tuple(v) => PythonObject::Tuple(v.iter().map(|v| self.import_value(v)).collect()),
            PythonObject::Dict(v) => PythonObject::Dict(pairs(self, v)),
            PythonObject::OrderedDict(v) => PythonObject::OrderedDict(pairs(self, v)),
            other => other.clone(),
        }
    }

    /// Returns the plan of a torch file at `path` that contains `value` and the collected storages
    /// (flat arrays).
    pub(super) fn into_file_plan(self, path: String, value: PythonObject) -> FilePlan {
        FilePlan { path, content: FileContent::Torch(TorchFilePlan { value, storages: self.0 }) }
    }
}

/// The files that a conversion will write, with the ZeRO stage and the number of ranks of the
/// result.
pub(super) struct OutputPlan {
    pub(super) files: Vec<FilePlan>,
    pub(super) stage: Option<u8>,
    pub(super) world: u32,
}

/// Returns the total number of bytes ([`FilePlan::size_in_bytes`]) of the planned files, or
/// `u64::MAX` if the sum overflows.
pub(super) fn sum_bytes(files: &[FilePlan]) -> u64 {
    files.iter().fold(0, |sum, file| sum.saturating_add(file.size_in_bytes()))
}
