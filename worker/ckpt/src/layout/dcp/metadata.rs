//! Parses `.metadata` of torch distributed checkpoints (DCP), the file that lists the tensors and
//! where their parts are stored.
use crate::codec::pickle::{self, PickleTree, PickleView, parse_shape};
use crate::codec::torch_file::{DTYPE_GLOBALS, parse_dtype};
use crate::error::{DcpError, TorchFileError};
use crate::tensor::Dtype;
use std::collections::HashMap;

/// Python classes and functions that the pickle in a torch distributed checkpoint's `.metadata` may
/// name.
const ALLOWED_GLOBALS: &[&[&str]] = &[
    DTYPE_GLOBALS,
    &[
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "torch.Size",
        "torch.contiguous_format",
        "torch.preserve_format",
        "torch.strided",
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
    ],
];

/// The result of parsing `.metadata`: a value, or a [`DcpError`].
type Result<T> = std::result::Result<T, DcpError>;

/// What `.metadata` states about one entry of a torch distributed checkpoint: its key and its
/// content.
#[derive(Debug)]
pub(crate) struct ItemMetadata {
    /// The flattened key, which joins the keys of the nested dicts with dots.
    pub(crate) key: String,
    /// The keys of the nested dicts, or `None` if `.metadata` does not record these keys.
    pub(crate) path: Option<Vec<String>>,
    /// The kind of the item, and the locations of its value or chunks.
    pub(crate) content: ItemContent,
}

/// The content of an entry of a torch distributed checkpoint, as `.metadata` states it: a pickled
/// value or a tensor.
#[derive(Debug)]
pub(crate) enum ItemContent {
    /// A pickled value.
    Bytes(StorageLocation),
    /// A tensor, whose chunks may be in several files.
    Tensor { dtype: Dtype, shape: Vec<u64>, chunks: Vec<TensorChunk> },
}

/// A rectangular part of a tensor of a torch distributed checkpoint, which one file stores.
#[derive(Debug)]
pub(crate) struct TensorChunk {
    /// Index of the chunk's first element, per dimension.
    pub(crate) offsets: Vec<u64>,
    /// Size of the chunk, per dimension.
    pub(crate) sizes: Vec<u64>,
    pub(crate) location: StorageLocation,
}

/// Where a torch distributed checkpoint stores a value or a part of a tensor: a byte range of a
/// file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StorageLocation {
    pub(crate) file: String,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Parses the content of a torch distributed checkpoint's `.metadata`, and returns the entries in
/// the order of the file.
///
/// # Errors
/// Fails if the pickle is invalid, an item has no storage location, or a storage location belongs
/// to no item.
pub(crate) fn parse_metadata(input: &[u8]) -> Result<Vec<ItemMetadata>> {
    let tree: PickleTree = pickle::parse_pickle(input, ALLOWED_GLOBALS)?;
    let (class, _, root) = tree.root_value().as_object().ok_or(DcpError::NotMetadata { class: None })?;
    if class != "torch.distributed.checkpoint.metadata.Metadata" {
        return Err(DcpError::NotMetadata { class: Some(class) });
    }
    let mut locations = read_storage_locations(read_field(root, "storage_data")?)?;
    let paths = read_key_paths(root.get("planner_data"))?;
    let mut items = Vec::new();
    for (key, value) in read_field(root, "state_dict_metadata")?
        .as_pairs()
        .ok_or(DcpError::InvalidField("state_dict_metadata"))?
    {
        let key = key.as_short_str().ok_or(DcpError::InvalidField("key"))?.to_owned();
        let path = match &paths {
            Some(paths) => Some(paths.get(&key).cloned().ok_or_else(|| DcpError::PathMissing(key.clone()))?),
            None => None,
        };
        let content = read_item_content(&key, value, &mut locations)?;
        items.push(ItemMetadata { key, path, content });
    }
    match locations.into_keys().next() {
        Some((key, offsets)) => Err(DcpError::LocationUnused { key, offsets }),
        None => Ok(items),
    }
}

/// Returns the value for the string key `key` in `value`, a dict that was read from `.metadata` of
/// a torch distributed checkpoint. Fails with [`DcpError::MissingField`] if the key is missing.
fn read_field<'t>(value: PickleView<'t>, key: &'static str) -> Result<PickleView<'t>> {
    value.get(key).ok_or(DcpError::MissingField(key))
}

/// Returns the text for the string key `key` in `value`, a dict that was read from `.metadata` of a
/// torch distributed checkpoint.
fn read_text(value: PickleView<'_>, key: &'static str) -> Result<String> {
    read_field(value, key)?.as_short_str().map(str::to_owned).ok_or(DcpError::InvalidField(key))
}

/// Returns the attributes of a Python object that was read from `.metadata` of a torch distributed
/// checkpoint. Fails if `class` is not the last component of the object's class name.
fn read_attributes<'t>(value: PickleView<'t>, class: &'static str) -> Result<PickleView<'t>> {
    match value.as_object() {
        Some((name, _, state)) if name.rsplit('.').next() == Some(class) => Ok(state),
        _ => Err(DcpError::WrongClass(class)),
    }
}

/// A map that states which byte range of which file stores a value or a chunk of a tensor, by the
/// entry's key and the chunk's offsets. The offsets of a value are `None`.
type StorageLocations = HashMap<(String, Option<Vec<u64>>), StorageLocation>;

/// Reads from `.metadata` where each value and each part of a tensor of a torch distributed
/// checkpoint is stored.
///
/// # Errors
/// Fails if a description is invalid, two locations share bytes, or an item is stored in a
/// transformed form.
fn read_storage_locations(value: PickleView<'_>) -> Result<StorageLocations> {
    let mut locations = HashMap::new();
    let mut taken: Vec<StorageLocation> = Vec::new();
    for (index, info) in value.as_pairs().ok_or(DcpError::InvalidField("storage_data"))? {
        let (index, info) =
            (read_attributes(index, "MetadataIndex")?, read_attributes(info, "_StorageInfo")?);
        let key = read_text(index, "fqn")?;
        let offset = match index.get("offset").filter(|v| !v.is_none()) {
            Some(v) => Some(parse_shape(v).ok_or(DcpError::InvalidField("offset"))?),
            None => None,
        };
        if info
            .get("transform_descriptors")
            .is_some_and(|t| !t.is_none() && t.as_items().is_none_or(|i| i.get(0).is_some()))
        {
            return Err(DcpError::Transformed(key));
        }
        let number = |key: &'static str| read_field(info, key)?.as_count().ok_or(DcpError::InvalidField(key));
        let file = read_text(info, "relative_path")?;
        let location = StorageLocation { file, offset: number("offset")?, length: number("length")? };
        taken.push(location.clone());
        if locations.insert((key.clone(), offset), location).is_some() {
            return Err(DcpError::DuplicateLocation(key));
        }
    }
    taken.sort_unstable();
    let overlap = |w: &&[StorageLocation]| {
        w[0].file == w[1].file && w[0].offset.saturating_add(w[0].length) > w[1].offset
    };
    match taken.windows(2).find(overlap) {
        Some(w) => Err(DcpError::SharedBytes { file: w[1].file.clone(), offset: w[1].offset }),
        None => Ok(locations),
    }
}

/// Reads from `.metadata` a map from each entry's flattened key, such as `optimizer.state.0`, to
/// the nested dict keys that make up this key. Returns `None` if nested keys are not recorded.
/// Fails if nested keys do not match the flattened key.
fn read_key_paths(planner: Option<PickleView<'_>>) -> Result<Option<HashMap<String, Vec<String>>>> {
    let Some(pairs) = planner.and_then(PickleView::as_pairs) else { return Ok(None) };
    let mut paths = HashMap::new();
    for (key, path) in pairs {
        let key = key.as_short_str().ok_or(DcpError::InvalidField("key"))?;
        let part = |v: PickleView<'_>| {
            v.as_short_str().map(str::to_owned).or_else(|| v.as_int().map(|i| i.to_string()))
        };
        let path: Option<Vec<String>> =
            path.as_items().map(|p| p.iter().map(part).collect()).unwrap_or_default();
        let path = path.ok_or(DcpError::InvalidField("path"))?;
        if path.join(".") != key {
            return Err(DcpError::PathMismatch { key: key.to_owned(), path });
        }
        paths.insert(key.to_owned(), path);
    }
    Ok(Some(paths))
}

/// Reads from `.metadata` whether one entry is a tensor or another value, and takes the byte ranges
/// of the entry's data from the map `locations`. Fails if a location is missing, or a chunk is
/// outside of its tensor.
fn read_item_content(
    key: &str,
    value: PickleView<'_>,
    locations: &mut StorageLocations,
) -> Result<ItemContent> {
    let mut take = |offset: Option<Vec<u64>>| {
        let offsets = offset.clone().unwrap_or_default();
        locations
            .remove(&(key.to_owned(), offset))
            .ok_or_else(|| DcpError::LocationMissing { key: key.to_owned(), offsets })
    };
    if read_attributes(value, "BytesStorageMetadata").is_ok() {
        return Ok(ItemContent::Bytes(take(None)?));
    }
    let state = read_attributes(value, "TensorStorageMetadata")?;
    let sizes = |view: PickleView<'_>, name: &'static str| {
        view.get(name).and_then(parse_shape).ok_or(DcpError::InvalidField(name))
    };
    let properties = read_attributes(read_field(state, "properties")?, "TensorProperties")?;
    let dtype = properties.as_items().and_then(|p| p.get(0)).or_else(|| properties.get("dtype"));
    let dtype = dtype.and_then(PickleView::as_global).and_then(parse_dtype);
    let dtype = dtype.ok_or_else(|| DcpError::UnknownDtype(key.to_owned()))?;
    let shape = sizes(state, "size")?;
    let mut chunks = Vec::new();
    for chunk in read_field(state, "chunks")?.as_items().ok_or(DcpError::InvalidField("chunks"))?.iter() {
        let chunk = read_attributes(chunk, "ChunkStorageMetadata")?;
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
        chunks.push(TensorChunk { offsets, sizes, location });
    }
    Ok(ItemContent::Tensor { dtype, shape, chunks })
}

impl StorageLocation {
    /// Converts an error while reading one entry of a torch distributed checkpoint to a
    /// [`DcpError`] that states the entry's offset in the file.
    pub(super) fn wrap_read_error(&self, error: TorchFileError) -> DcpError {
        DcpError::Item { offset: self.offset, error }
    }
}
