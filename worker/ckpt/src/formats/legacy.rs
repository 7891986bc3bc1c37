//! What `torch.save` wrote before version 1.6, and still writes when asked: pickles one after the other, then the
//! storages, each after its length. It has no checksums.
use super::zip::Member;
use crate::pickle::{self, Tree, Unread, View};

/// First bytes: a pickle of torch's magic number.
pub(crate) const MAGIC: &[u8] =
    &[0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e];
/// The only version there was.
const PROTOCOL: i64 = 1001;
/// Bytes read at first to find a pickle's end.
const FIRST_READ: u64 = 64 << 10;
/// Most storages.
const STORAGES_MAX: usize = 1 << 20;

/// The values of a file, and its storages: name and elements' bytes.
pub(super) struct Legacy {
    pub(super) tree: Tree,
    pub(super) members: Vec<Member>,
}

/// Reads a file of `size` bytes that begins with [`MAGIC`]. `width(class)` gives the bytes per element of a storage.
pub(super) fn parse(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    globals: &[&[&'static str]],
    width: impl Fn(&str) -> Option<u64>,
) -> Result<Legacy, String> {
    let mut at = MAGIC.len() as u64;
    let version = next(&mut at, size, read_at, globals)?;
    if version.root().int() != Some(PROTOCOL) {
        return Err("it is in a legacy format of torch whose version isn't 1001".into());
    }
    let system = next(&mut at, size, read_at, globals)?;
    if system.root().get("little_endian").is_some_and(|v| v.json() == false) {
        return Err("its numbers are not little-endian".into());
    }
    let tree = next(&mut at, size, read_at, globals)?;
    let keys = next(&mut at, size, read_at, globals)?;
    let keys = keys.root().items().ok_or("its list of storages is none")?;
    let wanted = storages(&tree, width)?;
    let mut members = Vec::new();
    for key in keys.iter() {
        let key = key.str().ok_or("its list of storages holds something that is no key")?;
        let &(count, bytes) =
            wanted.get(key).ok_or_else(|| format!("nothing says what its storage {key} is"))?;
        members.push(storage(&mut at, size, read_at, key, count, bytes)?);
        if members.len() > STORAGES_MAX {
            return Err(format!("it has more than {STORAGES_MAX} storages"));
        }
    }
    match at == size {
        true => Ok(Legacy { tree, members }),
        false => Err(format!("its storages end at byte {at}, the file at {size}")),
    }
}

/// The storage at `at`: its number of elements, then they.
fn storage(
    at: &mut u64,
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    key: &str,
    count: u64,
    bytes: u64,
) -> Result<Member, String> {
    let mut length = [0u8; 8];
    let start = at
        .checked_add(8)
        .filter(|&s| s <= size)
        .ok_or_else(|| format!("it is cut short before storage {key}"))?;
    read_at(*at, &mut length).map_err(|e| e.to_string())?;
    let stored = u64::from_le_bytes(length);
    if stored != count {
        return Err(format!("its storage {key} should have {count} elements, but says {stored}"));
    }
    let end = start.checked_add(bytes).filter(|&e| e <= size);
    let end =
        end.ok_or_else(|| format!("it is cut short in storage {key}: {bytes} bytes at {start} of {size}"))?;
    *at = end;
    Ok(Member { name: format!("data/{key}"), data: start..end, crc: None })
}

/// Every storage that the values name: key → elements and bytes.
fn storages(
    tree: &Tree,
    width: impl Fn(&str) -> Option<u64>,
) -> Result<std::collections::HashMap<&str, (u64, u64)>, String> {
    let mut found = std::collections::HashMap::new();
    for id in tree.persistent() {
        let part = |i: usize| id.items().and_then(|items| items.get(i));
        if part(0).and_then(View::str) != Some("storage") {
            return Err("it holds something outside of its pickle that is no storage".into());
        }
        let unusual = || "a storage in it is described in an unknown way".to_owned();
        let key = part(2).and_then(View::str).ok_or_else(unusual)?;
        let count = part(4).and_then(View::count).ok_or_else(unusual)?;
        let width = part(1).and_then(View::global).and_then(&width).ok_or_else(unusual)?;
        let bytes = count.checked_mul(width).ok_or_else(unusual)?;
        if found.insert(key, (count, bytes)).is_some_and(|other| other != (count, bytes)) {
            return Err(format!("its storage {key} is described in two ways"));
        }
    }
    Ok(found)
}

/// The pickle at `at`, which moves to its end.
fn next(
    at: &mut u64,
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    globals: &[&[&'static str]],
) -> Result<Tree, String> {
    let left = size.saturating_sub(*at);
    let mut length = FIRST_READ.min(left);
    loop {
        let mut input = vec![0u8; length as usize];
        read_at(*at, &mut input).map_err(|e| e.to_string())?;
        match pickle::load_first(&input, globals) {
            Ok((tree, used)) => {
                *at += used as u64;
                return Ok(tree);
            }
            Err(Unread { more: true, .. }) if length < left && length < pickle::BYTES_MAX => {
                length = (length * 4).min(left).min(pickle::BYTES_MAX);
            }
            Err(Unread { more: true, .. }) if length < left => {
                return Err(format!("it has more than the {} bytes of pickle allowed", pickle::BYTES_MAX));
            }
            Err(Unread { why, more }) => {
                return Err(if more { format!("it is cut short: {why}") } else { why });
            }
        }
    }
}
