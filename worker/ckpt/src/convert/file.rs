//! A file to be written: its values, and which elements of which tensors of the source go where.
use crate::dtype::Dtype;
use crate::pickle::{Object, StoredTensor};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// One file of the result.
pub(super) struct FilePlan {
    /// Below the folder that is made; `/` between names.
    pub(super) path: String,
    pub(super) content: Content,
}

/// What is in a file.
pub(super) enum Content {
    /// As `torch.save` writes it.
    Torch(TorchPlan),
    /// A shard of ours.
    Shard { rank: u32, pieces: Vec<ShardPiece> },
    /// A small file.
    Bytes(Vec<u8>),
    /// Another file's content: a hard link where that can be.
    Same(PathBuf),
}

/// A range of a tensor of the source, as a shard of ours keeps it.
#[derive(Clone)]
pub(super) struct ShardPiece {
    pub(super) tensor: usize,
    pub(super) elements: Range<u64>,
    pub(super) dtype: Dtype,
}

impl ShardPiece {
    pub(super) fn count(&self) -> u64 {
        self.elements.end - self.elements.start
    }

    pub(super) fn bytes(&self) -> u64 {
        self.count() * self.dtype.size()
    }
}

/// Values, and the storages of their tensors.
pub(super) struct TorchPlan {
    pub(super) value: Object,
    pub(super) storages: Vec<Storage>,
}

/// One storage.
pub(super) struct Storage {
    pub(super) dtype: Dtype,
    pub(super) spans: Vec<Span>,
}

/// Elements of a storage, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Span {
    /// Elements of a tensor of the source, by its index, as numbers.
    Of(usize, Range<u64>),
    /// A whole tensor of the source as it is stored.
    Raw(usize, u64),
    Zeros(u64),
    /// These bytes.
    Bytes(Arc<[u8]>),
}

impl Storage {
    pub(super) fn elements(&self) -> u64 {
        self.spans.iter().map(|s| s.elements(self.dtype)).sum()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size()
    }
}

impl Span {
    fn elements(&self, dtype: Dtype) -> u64 {
        match self {
            Span::Of(_, range) => range.end - range.start,
            Span::Raw(_, n) | Span::Zeros(n) => *n,
            Span::Bytes(bytes) => bytes.len() as u64 / dtype.size(),
        }
    }
}

impl FilePlan {
    /// Bytes of its tensors, or all of it.
    pub(super) fn bytes(&self) -> u64 {
        match &self.content {
            Content::Torch(plan) => plan.bytes(),
            Content::Shard { pieces, .. } => pieces.iter().map(ShardPiece::bytes).sum(),
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::Same(_) => 0,
        }
    }

    /// The last name of its path, without the ending.
    pub(super) fn stem(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.rsplit_once('.').map_or(name, |(stem, _)| stem)
    }
}

impl TorchPlan {
    pub(super) fn bytes(&self) -> u64 {
        self.storages.iter().map(Storage::bytes).sum()
    }
}

/// Collects the storages of one file while its values are made.
#[derive(Default)]
pub(super) struct Storages(Vec<Storage>);

impl Storages {
    /// A tensor of its own storage.
    pub(super) fn tensor(&mut self, dtype: Dtype, shape: Vec<u64>, spans: Vec<Span>) -> Object {
        let spans: Vec<Span> = spans.into_iter().filter(|s| s.elements(dtype) > 0).collect();
        let storage = Storage { dtype, spans };
        let stored = storage.elements();
        self.0.push(storage);
        Object::Tensor(StoredTensor { storage: self.0.len() - 1, dtype, stored, shape })
    }

    /// A flat F32 tensor.
    pub(super) fn flat(&mut self, spans: Vec<Span>) -> Object {
        let n = spans.iter().map(|s| s.elements(Dtype::F32)).sum();
        self.tensor(Dtype::F32, vec![n], spans)
    }

    /// A tensor of one number.
    pub(super) fn scalar(&mut self, value: f64) -> Object {
        let bytes: Arc<[u8]> = (value as f32).to_le_bytes().into();
        self.tensor(Dtype::F32, Vec::new(), vec![Span::Bytes(bytes)])
    }

    /// A value that came from another file: its tensors get storages here.
    pub(super) fn taken(&mut self, value: &Object) -> Object {
        let pairs = |this: &mut Storages, pairs: &[(Object, Object)]| {
            pairs.iter().map(|(k, v)| (k.clone(), this.taken(v))).collect()
        };
        match value {
            Object::Literal { dtype, shape, bytes } => {
                self.tensor(*dtype, shape.clone(), vec![Span::Bytes(bytes.clone())])
            }
            Object::List(v) => Object::List(v.iter().map(|v| self.taken(v)).collect()),
            Object::Tuple(v) => Object::Tuple(v.iter().map(|v| self.taken(v)).collect()),
            Object::Dict(v) => Object::Dict(pairs(self, v)),
            Object::OrderedDict(v) => Object::OrderedDict(pairs(self, v)),
            other => other.clone(),
        }
    }

    /// The file.
    pub(super) fn file(self, path: String, value: Object) -> FilePlan {
        FilePlan { path, content: Content::Torch(TorchPlan { value, storages: self.0 }) }
    }
}
