//! Parses `.metadata` of torch distributed checkpoints: the tensors, their chunks, and where each
//! chunk is stored.
use super::error::DcpError;
use crate::dtype::Dtype;
use crate::formats::torch_file::{named_dtype, shape_of};
use crate::pickle::{self, Tree, View};
use std::collections::HashMap;

/// Classes and functions that the pickle may name.
const GLOBALS: &[&[&str]] = &[&[
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "torch.Size",
    "torch.bfloat16",
    "torch.bool",
    "torch.contiguous_format",
    "torch.float16",
    "torch.float32",
    "torch.float64",
    "torch.float8_e4m3fn",
    "torch.float8_e5m2",
    "torch.int16",
    "torch.int32",
    "torch.int64",
    "torch.int8",
    "torch.preserve_format",
    "torch.strided",
    "torch.uint8",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.checkpoint._fsspec_filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
]];
/// Limit on the dimensions of a tensor.
const RANK_MAX: usize = 16;

type Result<T> = std::result::Result<T, DcpError>;

/// One item of the saved state dict.
#[derive(Debug)]
pub(crate) struct ItemMetadata {
    /// The flattened key.
    pub(crate) key: String,
    /// The keys of the nested dicts, when they are recorded.
    pub(crate) path: Option<Vec<String>>,
    /// A value or a tensor.
    pub(crate) content: ItemContent,
}

/// The content of an item.
#[derive(Debug)]
pub(crate) enum ItemContent {
    /// A pickled value.
    Bytes(StorageLocation),
    Tensor {
        dtype: Dtype,
        shape: Vec<u64>,
        chunks: Vec<Chunk>,
    },
}

/// A rectangular part of a tensor.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) offsets: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) location: StorageLocation,
}

/// A byte range of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StorageLocation {
    pub(crate) file: String,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Parses the file; returns the items in their order.
pub(crate) fn parse(input: &[u8]) -> Result<Vec<ItemMetadata>> {
    let tree: Tree = pickle::load(input, GLOBALS)?;
    let (class, _, root) = tree.root().object().ok_or(DcpError::NotMetadata { class: None })?;
    if class != "torch.distributed.checkpoint.metadata.Metadata" {
        return Err(DcpError::NotMetadata { class: Some(class) });
    }
    let mut locations = read_locations(read_field(root, "storage_data")?)?;
    let paths = paths(root.get("planner_data"))?;
    let mut items = Vec::new();
    for (key, value) in read_field(root, "state_dict_metadata")?
        .pairs()
        .ok_or(DcpError::InvalidField("state_dict_metadata"))?
    {
        let key = key.str().ok_or(DcpError::InvalidField("key"))?.to_owned();
        let path = match &paths {
            Some(paths) => Some(paths.get(&key).cloned().ok_or_else(|| DcpError::PathMissing(key.clone()))?),
            None => None,
        };
        let content = read_item(&key, value, &mut locations)?;
        items.push(ItemMetadata { key, path, content });
    }
    match locations.into_keys().next() {
        Some((key, offsets)) => Err(DcpError::LocationUnused { key, offsets }),
        None => Ok(items),
    }
}

fn read_field<'t>(value: View<'t>, key: &'static str) -> Result<View<'t>> {
    value.get(key).ok_or(DcpError::MissingField(key))
}

/// The attributes of an object of this class, given by the last component of its name.
fn attributes<'t>(value: View<'t>, class: &'static str) -> Result<View<'t>> {
    match value.object() {
        Some((name, _, state)) if name.rsplit('.').next() == Some(class) => Ok(state),
        _ => Err(DcpError::WrongClass(class)),
    }
}

/// The storage location of each chunk, by key and offsets (`None` for a value).
type Locations = HashMap<(String, Option<Vec<u64>>), StorageLocation>;

fn read_locations(value: View<'_>) -> Result<Locations> {
    let mut locations = HashMap::new();
    let mut taken: Vec<StorageLocation> = Vec::new();
    for (index, info) in value.pairs().ok_or(DcpError::InvalidField("storage_data"))? {
        let (index, info) = (attributes(index, "MetadataIndex")?, attributes(info, "_StorageInfo")?);
        let key = read_field(index, "fqn")?.str().ok_or(DcpError::InvalidField("key"))?.to_owned();
        let offset = match index.get("offset").filter(|v| !v.is_none()) {
            Some(v) => Some(shape_of(v).ok_or(DcpError::InvalidField("offset"))?),
            None => None,
        };
        if info
            .get("transform_descriptors")
            .is_some_and(|t| !t.is_none() && t.items().is_none_or(|i| i.get(0).is_some()))
        {
            return Err(DcpError::Transformed(key));
        }
        let number = |key: &'static str| read_field(info, key)?.count().ok_or(DcpError::InvalidField(key));
        let file = read_field(info, "relative_path")?
            .str()
            .ok_or(DcpError::InvalidField("relative_path"))?
            .to_owned();
        let location = StorageLocation { file, offset: number("offset")?, length: number("length")? };
        taken.push(location.clone());
        if locations.insert((key.clone(), offset), location).is_some() {
            return Err(DcpError::DuplicateLocation(key));
        }
    }
    taken.sort();
    let overlap = |w: &&[StorageLocation]| {
        w[0].file == w[1].file && w[0].offset.saturating_add(w[0].length) > w[1].offset
    };
    match taken.windows(2).find(overlap) {
        Some(w) => Err(DcpError::SharedBytes { file: w[1].file.clone(), offset: w[1].offset }),
        None => Ok(locations),
    }
}

/// The path of each key, checked against the key; `None` when paths are not recorded.
fn paths(planner: Option<View<'_>>) -> Result<Option<HashMap<String, Vec<String>>>> {
    let Some(pairs) = planner.and_then(View::pairs) else { return Ok(None) };
    let mut paths = HashMap::new();
    for (key, path) in pairs {
        let key = key.str().ok_or(DcpError::InvalidField("key"))?;
        let part = |v: View<'_>| v.str().map(str::to_owned).or_else(|| v.int().map(|i| i.to_string()));
        let path: Option<Vec<String>> =
            path.items().map(|p| p.iter().map(part).collect()).unwrap_or_default();
        let path = path.ok_or(DcpError::InvalidField("path"))?;
        if path.join(".") != key {
            return Err(DcpError::PathMismatch { key: key.to_owned(), path });
        }
        paths.insert(key.to_owned(), path);
    }
    Ok(Some(paths))
}

fn read_item(key: &str, value: View<'_>, locations: &mut Locations) -> Result<ItemContent> {
    let mut take = |offset: Option<Vec<u64>>| {
        let offsets = offset.clone().unwrap_or_default();
        locations
            .remove(&(key.to_owned(), offset))
            .ok_or_else(|| DcpError::LocationMissing { key: key.to_owned(), offsets })
    };
    if attributes(value, "BytesStorageMetadata").is_ok() {
        return Ok(ItemContent::Bytes(take(None)?));
    }
    let state = attributes(value, "TensorStorageMetadata")?;
    let sizes = |view: View<'_>, name: &'static str| {
        let sizes = view.get(name).and_then(shape_of).filter(|s| s.len() <= RANK_MAX);
        sizes.ok_or(DcpError::InvalidField(name))
    };
    let properties = attributes(read_field(state, "properties")?, "TensorProperties")?;
    let dtype = properties.items().and_then(|p| p.get(0)).or_else(|| properties.get("dtype"));
    let dtype = dtype.and_then(View::global).and_then(named_dtype);
    let dtype = dtype.ok_or_else(|| DcpError::UnknownDtype(key.to_owned()))?;
    let shape = sizes(state, "size")?;
    let mut chunks = Vec::new();
    for chunk in read_field(state, "chunks")?.items().ok_or(DcpError::InvalidField("chunks"))?.iter() {
        let chunk = attributes(chunk, "ChunkStorageMetadata")?;
        let (offsets, sizes) = (sizes(chunk, "offsets")?, sizes(chunk, "sizes")?);
        let fits =
            |((&o, &s), &whole): ((&u64, &u64), &u64)| o.checked_add(s).is_some_and(|end| end <= whole);
        if offsets.len() != shape.len()
            || sizes.len() != shape.len()
            || !offsets.iter().zip(&sizes).zip(&shape).all(fits)
        {
            return Err(DcpError::ChunkOutside { key: key.to_owned(), offsets, sizes, shape });
        }
        let location = take(Some(offsets.clone()))?;
        chunks.push(Chunk { offsets, sizes, location });
    }
    Ok(ItemContent::Tensor { dtype, shape, chunks })
}
