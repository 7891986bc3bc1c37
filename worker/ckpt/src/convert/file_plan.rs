//! [`FilePlan`]: the path and the planned content of one output file of a conversion.
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

/// The planned content of an output file: torch data, a rank's shard in launch's own format, given
/// bytes, or a link to another file.
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

/// A range of elements of a source tensor that one rank's shard in launch's own format will
/// contain, and the dtype in the shard.
#[derive(Clone)]
pub(super) struct PlannedShardPiece {
    /// Index of the tensor in the source checkpoint.
    pub(super) tensor: usize,
    /// Indices of the elements within the source tensor.
    pub(super) elements: Range<u64>,
    pub(super) dtype: Dtype,
}

impl PlannedShardPiece {
    /// Returns the number of elements of the source tensor that this piece contains.
    pub(super) fn element_count(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    /// Returns the size in bytes that the elements of this range will have in the rank's file.
    pub(super) fn size_in_bytes(&self) -> u64 {
        self.element_count() * self.dtype.size()
    }
}

/// The planned content of a torch file: its pickled Python value, and the tensor storages to which
/// the value refers.
pub(super) struct TorchFilePlan {
    pub(super) value: PythonObject,
    pub(super) storages: Vec<PlannedStorage>,
}

/// A tensor storage of a torch file that the conversion will write: its dtype, and where its
/// elements come from.
pub(super) struct PlannedStorage {
    pub(super) dtype: Dtype,
    pub(super) spans: Vec<StorageSpan>,
}

/// The origin of consecutive elements in an output file's tensor storage: a tensor of the source
/// checkpoint, zeros, or given bytes.
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
    /// Returns the number of elements that this range of tensor elements, zeros or given bytes
    /// fills in a tensor storage of the dtype `dtype`.
    fn element_count(&self, dtype: Dtype) -> u64 {
        match self {
            StorageSpan::Elements(_, range) => range.end - range.start,
            StorageSpan::Raw(_, n) | StorageSpan::Zeros(n) => *n,
            StorageSpan::Bytes(bytes) => bytes.len() as u64 / dtype.size(),
        }
    }
}

impl FilePlan {
    /// Returns the size in bytes of the planned file, which for a torch file or a rank's shard
    /// counts only the tensor data. Returns 0 for a link.
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
    /// Returns the total size in bytes of the tensor storages that the torch file will contain.
    pub(super) fn size_in_bytes(&self) -> u64 {
        self.storages.iter().map(PlannedStorage::size_in_bytes).sum()
    }
}

/// The growing list of tensor storages of a planned torch file, with one storage for each tensor
/// that was added to the file so far.
#[derive(Default)]
pub(super) struct StorageBuilder(Vec<PlannedStorage>);

impl StorageBuilder {
    /// Adds a tensor with the shape `shape` and the elements `spans` to the planned torch file, and
    /// returns the Python tensor for its pickle.
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

    /// Adds a one-dimensional F32 tensor with the elements `spans` to the planned torch file, and
    /// returns the Python tensor for its pickle.
    pub(super) fn add_flat_tensor(&mut self, spans: Vec<StorageSpan>) -> PythonObject {
        let n = spans.iter().map(|s| s.element_count(Dtype::F32)).sum();
        self.add_tensor(Dtype::F32, vec![n], spans)
    }

    /// Adds an F32 tensor of shape `[]` with the element `value` to the planned torch file, and
    /// returns the Python tensor for its pickle.
    pub(super) fn add_scalar(&mut self, value: f64) -> PythonObject {
        let bytes: Arc<[u8]> = (value as f32).to_le_bytes().into();
        self.add_tensor(Dtype::F32, Vec::new(), vec![StorageSpan::Bytes(bytes)])
    }

    /// Copies a Python value from the source checkpoint for the pickle of the planned torch file,
    /// and adds the data of the tensors in it to this file. Tensors in the value get storages in
    /// this file.
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

    /// Returns the plan of a torch file at `path` with the pickled value `value` and all tensor
    /// storages that were added to this builder.
    pub(super) fn into_file_plan(self, path: String, value: PythonObject) -> FilePlan {
        FilePlan { path, content: FileContent::Torch(TorchFilePlan { value, storages: self.0 }) }
    }
}

/// The list of files that a conversion will write, with the ZeRO stage and the number of ranks of
/// the converted checkpoint.
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
