//! Reads files that `torch.save` wrote before PyTorch 1.6, or that it writes with
//! `_use_new_zipfile_serialization=False`. A file has consecutive pickles and then the storages,
//! each after its number of elements. The format has no checksums.
use super::pickle::{self, PickleTree, PickleView};
use super::zip::ZipMember;
use crate::error::{PickleError, TorchFileError};
use crate::format_constants::PICKLE_BYTES_MAX;
use std::collections::HashMap;

/// The first bytes of a torch file in the legacy format: the pickle of a magic number.
pub(crate) const MAGIC: &[u8] =
    &[0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e];
/// The only version number that files in torch's legacy format have.
const FORMAT_VERSION: i64 = 1001;
/// Number of bytes that are read first to parse one of the pickles of a file in torch's legacy
/// format. Longer pickles need further reads, since the file does not state their length.
const FIRST_READ_BYTES: u64 = 64 << 10;
/// Maximum number of tensor storages in a file of torch's legacy format.
const STORAGES_MAX: usize = 1 << 20;

/// The parsed contents of a torch file in the legacy format: the pickled values, and the byte range
/// of each tensor storage in the file.
pub(super) struct LegacyFile {
    pub(super) tree: PickleTree,
    /// The storages, as members without CRC-32s.
    pub(super) members: Vec<ZipMember>,
}

/// The result of reading a torch file in the legacy format.
type Result<T> = std::result::Result<T, TorchFileError>;

/// Parses the pickles of a torch file in the legacy format, and determines the byte range of each
/// tensor storage in the file. `read_at(offset, buffer)` must fill the buffer with the bytes at the
/// offset. `globals` lists the classes and functions that the pickles may name. `width(class)` must
/// return the bytes per element of a storage class, or `None` for an unknown class.
pub(super) fn parse_legacy_file(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    globals: &[&[&'static str]],
    width: impl Fn(&str) -> Option<u64>,
) -> Result<LegacyFile> {
    let mut at = MAGIC.len() as u64;
    let version = read_next_pickle(&mut at, size, read_at, globals)?;
    if version.root_value().as_int() != Some(FORMAT_VERSION) {
        return Err(TorchFileError::LegacyVersion);
    }
    let system = read_next_pickle(&mut at, size, read_at, globals)?;
    if system.root_value().get("little_endian").is_some_and(|v| v.to_json() == false) {
        return Err(TorchFileError::BigEndian);
    }
    let tree = read_next_pickle(&mut at, size, read_at, globals)?;
    let keys = read_next_pickle(&mut at, size, read_at, globals)?;
    let keys = keys.root_value().as_items().ok_or(TorchFileError::LegacyKeys)?;
    let described = list_described_storages(&tree, width)?;
    let mut members = Vec::new();
    for key in keys.iter() {
        let key = key.as_str().ok_or(TorchFileError::LegacyKeys)?;
        let &(count, bytes) =
            described.get(key).ok_or_else(|| TorchFileError::UndescribedStorage(key.into()))?;
        members.push(locate_storage(&mut at, size, read_at, key, count, bytes)?);
        if members.len() > STORAGES_MAX {
            return Err(TorchFileError::TooManyStorages { limit: STORAGES_MAX });
        }
    }
    match at == size {
        true => Ok(LegacyFile { tree, members }),
        false => Err(TorchFileError::TrailingData { end: at, size }),
    }
}

/// Determines which byte range of a torch file in the legacy format contains the elements of the
/// tensor storage with the key `key`. At offset `at`, the file has the number of elements, and then
/// the data of `bytes` bytes. Moves `at` to the end of the data.
///
/// # Errors
///
/// Fails if the stored number of elements is not `count`, or the data reach beyond `size`, the end
/// of the file.
fn locate_storage(
    at: &mut u64,
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    key: &str,
    count: u64,
    bytes: u64,
) -> Result<ZipMember> {
    let mut length = [0u8; 8];
    let start = at
        .checked_add(8)
        .filter(|&s| s <= size)
        .ok_or_else(|| TorchFileError::Truncated { part: format!("storage {key}") })?;
    read_at(*at, &mut length)?;
    let stored = u64::from_le_bytes(length);
    if stored != count {
        return Err(TorchFileError::StorageElements { key: key.into(), expected: count, found: stored });
    }
    let end = start.checked_add(bytes).filter(|&e| e <= size);
    let end = end.ok_or_else(|| TorchFileError::Truncated { part: format!("storage {key}") })?;
    *at = end;
    Ok(ZipMember { name: format!("data/{key}"), data: start..end, crc: None })
}

/// Lists the tensor storages to which a torch file's pickle refers, with the number of elements and
/// the size in bytes of each one. `width(class)` must return the bytes per element of a storage
/// class, or `None` for an unknown class.
fn list_described_storages(
    tree: &PickleTree,
    width: impl Fn(&str) -> Option<u64>,
) -> Result<HashMap<&str, (u64, u64)>> {
    let mut found = HashMap::new();
    for id in tree.persistent_ids() {
        let part = |i: usize| id.as_items().and_then(|items| items.get(i));
        if part(0).and_then(PickleView::as_str) != Some("storage") {
            return Err(TorchFileError::NotAStorage);
        }
        let unknown = || TorchFileError::UnknownTensorForm;
        let key = part(2).and_then(PickleView::as_str).ok_or_else(unknown)?;
        let count = part(4).and_then(PickleView::as_count).ok_or_else(unknown)?;
        let width = part(1).and_then(PickleView::as_global).and_then(&width).ok_or_else(unknown)?;
        let bytes = count.checked_mul(width).ok_or_else(unknown)?;
        if found.insert(key, (count, bytes)).is_some_and(|other| other != (count, bytes)) {
            return Err(TorchFileError::StorageConflict(key.into()));
        }
    }
    Ok(found)
}

/// Parses the pickle that begins at offset `at` of a file of `size` bytes, and sets `at` to the
/// offset of the pickle's end.
fn read_next_pickle(
    at: &mut u64,
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    globals: &[&[&'static str]],
) -> Result<PickleTree> {
    let left = size.saturating_sub(*at);
    let mut length = FIRST_READ_BYTES.min(left);
    loop {
        let mut input = vec![0u8; length as usize];
        read_at(*at, &mut input)?;
        match pickle::parse_first_pickle(&input, globals) {
            Ok((tree, used)) => {
                *at += used as u64;
                return Ok(tree);
            }
            Err(error) if !error.is_truncated() => return Err(error.into()),
            Err(_) if length < left && length < PICKLE_BYTES_MAX => {
                length = (length * 4).min(left).min(PICKLE_BYTES_MAX);
            }
            Err(_) if length < left => return Err(PickleError::TooLarge { bytes: left }.into()),
            Err(_) => return Err(TorchFileError::Truncated { part: "a pickle".into() }),
        }
    }
}
