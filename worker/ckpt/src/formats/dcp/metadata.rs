//! `.metadata` of torch's distributed checkpoints: which tensors there are, their chunks, and where each one lies.
use crate::dtype::Dtype;
use crate::formats::torch_file::{named_dtype, shape_of};
use crate::pickle::{self, Tree, View};
use std::collections::HashMap;

/// Globals in it.
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
/// Most dimensions of a tensor.
const RANK_MAX: usize = 16;

/// `Err` is one line that says what is wrong.
type Said<T> = Result<T, String>;

/// One item of the state: where it lies in the program's own dicts, and its pieces.
#[derive(Debug)]
pub(crate) struct Item {
    /// The whole key.
    pub(crate) key: String,
    /// The keys on the way to it, where they are written.
    pub(crate) path: Option<Vec<String>>,
    pub(crate) content: Content,
}

/// What an item is.
#[derive(Debug)]
pub(crate) enum Content {
    /// A value of another kind.
    Bytes(Place),
    Tensor {
        dtype: Dtype,
        shape: Vec<u64>,
        chunks: Vec<Chunk>,
    },
}

/// A box of a tensor.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) offsets: Vec<u64>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) place: Place,
}

/// A stretch of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    pub(crate) file: String,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// All items in their order.
pub(crate) fn parse(input: &[u8]) -> Said<Vec<Item>> {
    let tree: Tree = pickle::load(input, GLOBALS)?;
    let (class, _, root) = tree.root().object().ok_or("it is no Metadata")?;
    if class != "torch.distributed.checkpoint.metadata.Metadata" {
        return Err(format!("it is a {class}, no Metadata"));
    }
    let mut places = places(need(root, "storage_data")?)?;
    let paths = paths(root.get("planner_data"))?;
    let mut items = Vec::new();
    for (key, value) in
        need(root, "state_dict_metadata")?.pairs().ok_or("its state_dict_metadata is no dict")?
    {
        let key = key.str().ok_or("it has a key that is no text")?.to_owned();
        let path = match &paths {
            Some(paths) => Some(paths.get(&key).cloned().ok_or_else(|| format!("it has no path of {key}"))?),
            None => None,
        };
        let content = content(&key, value, &mut places)?;
        items.push(Item { key, path, content });
    }
    match places.into_keys().next() {
        Some((key, offset)) => Err(format!("it says where {key} at {offset:?} is, which is in no tensor")),
        None => Ok(items),
    }
}

fn need<'t>(value: View<'t>, key: &str) -> Said<View<'t>> {
    value.get(key).ok_or_else(|| format!("it has no {key}"))
}

/// Attributes of an object of this class (the last part of its name).
fn attributes<'t>(value: View<'t>, class: &str) -> Said<View<'t>> {
    match value.object() {
        Some((name, _, state)) if name.rsplit('.').next() == Some(class) => Ok(state),
        _ => Err(format!("it has something else where a {class} belongs")),
    }
}

/// Key and offset of a piece (none of a value) → where it lies.
type Places = HashMap<(String, Option<Vec<u64>>), Place>;

fn places(value: View<'_>) -> Said<Places> {
    let mut places = HashMap::new();
    let mut taken: Vec<Place> = Vec::new();
    for (index, info) in value.pairs().ok_or("its storage_data is no dict")? {
        let (index, info) = (attributes(index, "MetadataIndex")?, attributes(info, "_StorageInfo")?);
        let key = need(index, "fqn")?.str().ok_or("it has a key that is no text")?.to_owned();
        let offset = match index.get("offset").filter(|v| !v.is_none()) {
            Some(v) => Some(shape_of(v).ok_or("it has an offset that is none")?),
            None => None,
        };
        if info
            .get("transform_descriptors")
            .is_some_and(|t| !t.is_none() && t.items().is_none_or(|i| i.get(0).is_some()))
        {
            return Err(format!("{key} is stored in a transformed form, which isn't read"));
        }
        let number =
            |key: &str| need(info, key)?.count().ok_or_else(|| format!("it has a {key} that is none"));
        let file = need(info, "relative_path")?.str().ok_or("it has a path that is no text")?.to_owned();
        let place = Place { file, offset: number("offset")?, length: number("length")? };
        taken.push(place.clone());
        if places.insert((key.clone(), offset), place).is_some() {
            return Err(format!("it says twice where {key} is"));
        }
    }
    taken.sort();
    let overlap =
        |w: &&[Place]| w[0].file == w[1].file && w[0].offset.saturating_add(w[0].length) > w[1].offset;
    match taken.windows(2).find(overlap) {
        Some(w) => Err(format!("two of its items share bytes of {} at {}", w[1].file, w[1].offset)),
        None => Ok(places),
    }
}

/// Key → path, checked against the key; `None` when paths aren't written.
fn paths(planner: Option<View<'_>>) -> Said<Option<HashMap<String, Vec<String>>>> {
    let Some(pairs) = planner.and_then(View::pairs) else { return Ok(None) };
    let mut paths = HashMap::new();
    for (key, path) in pairs {
        let key = key.str().ok_or("it has a key that is no text")?;
        let part = |v: View<'_>| v.str().map(str::to_owned).or_else(|| v.int().map(|i| i.to_string()));
        let path: Option<Vec<String>> =
            path.items().map(|p| p.iter().map(part).collect()).unwrap_or_default();
        let path = path.ok_or_else(|| format!("its path of {key} is none"))?;
        if path.join(".") != key {
            return Err(format!("its path of {key} is {path:?}, which doesn't fit"));
        }
        paths.insert(key.to_owned(), path);
    }
    Ok(Some(paths))
}

fn content(key: &str, value: View<'_>, places: &mut Places) -> Said<Content> {
    let mut take = |offset: Option<Vec<u64>>| {
        let shown = offset.clone().unwrap_or_default();
        places
            .remove(&(key.to_owned(), offset))
            .ok_or_else(|| format!("nothing says where {key} at {shown:?} is"))
    };
    if attributes(value, "BytesStorageMetadata").is_ok() {
        return Ok(Content::Bytes(take(None)?));
    }
    let state = attributes(value, "TensorStorageMetadata")?;
    let sizes = |view: View<'_>, name: &str| {
        let sizes = view.get(name).and_then(shape_of).filter(|s| s.len() <= RANK_MAX);
        sizes.ok_or_else(|| format!("{key} has {name} that are none"))
    };
    let properties = attributes(need(state, "properties")?, "TensorProperties")?;
    let dtype = properties.items().and_then(|p| p.get(0)).or_else(|| properties.get("dtype"));
    let dtype = dtype.and_then(View::global).and_then(named_dtype);
    let dtype = dtype.ok_or_else(|| format!("{key} has an unknown dtype"))?;
    let shape = sizes(state, "size")?;
    let mut chunks = Vec::new();
    for chunk in need(state, "chunks")?.items().ok_or("its chunks are no list")?.iter() {
        let chunk = attributes(chunk, "ChunkStorageMetadata")?;
        let (offsets, sizes) = (sizes(chunk, "offsets")?, sizes(chunk, "sizes")?);
        let fits =
            |((&o, &s), &whole): ((&u64, &u64), &u64)| o.checked_add(s).is_some_and(|end| end <= whole);
        if offsets.len() != shape.len()
            || sizes.len() != shape.len()
            || !offsets.iter().zip(&sizes).zip(&shape).all(fits)
        {
            return Err(format!("a chunk of {key} at {offsets:?} of {sizes:?} is no part of {shape:?}"));
        }
        let place = take(Some(offsets.clone()))?;
        chunks.push(Chunk { offsets, sizes, place });
    }
    Ok(Content::Tensor { dtype, shape, chunks })
}
