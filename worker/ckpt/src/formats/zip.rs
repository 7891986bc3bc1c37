//! Reads zip containers as torch writes them: stored (uncompressed) members, zip64 sizes, and
//! CRC-32s in the central directory.
use super::placeholder::{self, Placeholder};
use crate::error::ReadFailure;
use std::io;
use std::ops::Range;

/// Limit on the size of the central directory, bytes.
const DIRECTORY_MAX: u64 = 64 << 20;
/// Longest comment after the end record, bytes.
const COMMENT_MAX: u64 = u16::MAX as u64;
const END_BYTES: u64 = 22;
const LOCATOR_BYTES: u64 = 20;
const ENTRY_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;

/// One member of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Byte range of the member in the container.
    pub(crate) data: Range<u64>,
    /// CRC-32 of the bytes; `None` in legacy torch files.
    pub(crate) crc: Option<u32>,
}

/// Why a zip container is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZipError {
    /// The file has no end record.
    #[error(
        "no zip directory at the end: the file is truncated, was not completely written, or is not a torch file"
    )]
    NoDirectory,
    /// Another file stands in place of the container.
    #[error("{0}")]
    Placeholder(Placeholder),
    /// The zip64 end record is outside of the file or damaged.
    #[error("the zip64 end record is invalid")]
    Zip64Record,
    /// The container is split over several files.
    #[error("the zip container is split over several files")]
    MultiDisk,
    /// The central directory is larger than the limit.
    #[error("the zip directory has {bytes} bytes, more than the limit of {DIRECTORY_MAX}")]
    DirectoryTooLarge {
        /// Size of the central directory.
        bytes: u64,
    },
    /// The central directory does not end where the end record begins.
    #[error("the zip directory should be {bytes} bytes at {start}, which is not where the end record is")]
    DirectoryMisplaced {
        /// Size of the central directory.
        bytes: u64,
        /// Offset of the central directory.
        start: u64,
    },
    /// An entry of the central directory is damaged.
    #[error("the zip directory is damaged")]
    DirectoryDamaged,
    /// The number of entries differs from the end record.
    #[error("the zip directory has {found} members, the end record {recorded}")]
    MemberCount {
        /// Entries found.
        found: usize,
        /// Entries recorded.
        recorded: u64,
    },
    /// Two members share bytes.
    #[error("zip members {first:?} and {second:?} overlap")]
    Overlap {
        /// One member.
        first: String,
        /// The other member.
        second: String,
    },
    /// Two members have the same name.
    #[error("zip member {0:?} occurs twice")]
    Duplicate(String),
    /// A member is encrypted.
    #[error("zip member {0:?} is encrypted")]
    Encrypted(String),
    /// A member is compressed.
    #[error(
        "zip member {member:?} is compressed (method {method}); torch stores members uncompressed, as `zip -0` does"
    )]
    Compressed {
        /// Name of the member.
        member: String,
        /// Compression method.
        method: u64,
    },
    /// The stored size of a member differs from its size.
    #[error("zip member {member:?} has {stored} stored bytes and a size of {size} bytes")]
    MemberSize {
        /// Name of the member.
        member: String,
        /// Stored bytes.
        stored: u64,
        /// Size.
        size: u64,
    },
    /// A name is absolute or contains `..`.
    #[error("zip member {0:?} has a name that points outside of the container")]
    UnsafeName(String),
    /// A member is outside of the file.
    #[error("zip member {0:?} is outside of the file")]
    OutOfBounds(String),
    /// The local header of a member is damaged.
    #[error("zip member {0:?} has a damaged header")]
    LocalHeader(String),
    /// The local header of a member has another name.
    #[error("zip member {0:?} has another name in its own header")]
    LocalName(String),
    /// The file cannot be read.
    #[error("read error: {0}")]
    Read(#[from] ReadFailure),
}

impl From<io::Error> for ZipError {
    fn from(error: io::Error) -> Self {
        ZipError::Read(error.into())
    }
}

type Result<T> = std::result::Result<T, ZipError>;

/// Reads the directory of a container of `size` bytes; `read_at(offset, buffer)` fills the buffer.
/// Returns the members in the order of their bytes. Members do not overlap, are inside of the
/// container, and have safe names.
pub(crate) fn members(
    size: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<Vec<Member>> {
    let found = directory(size, &mut read_at);
    let (directory, count) = found
        .map_err(|error| placeholder::detect(size, &mut read_at).map_or(error, ZipError::Placeholder))?;
    let mut bytes = vec![0u8; (directory.end - directory.start) as usize];
    read_at(directory.start, &mut bytes)?;
    let mut members = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (mut member, used) = entry(&bytes[at..])?;
        at += used;
        member.data = data_range(&member, directory.start, &mut read_at)?;
        members.push(member);
    }
    if members.len() as u64 != count {
        return Err(ZipError::MemberCount { found: members.len(), recorded: count });
    }
    members.sort_by_key(|m| (m.data.start, m.data.end));
    if let Some(w) = members.windows(2).find(|w| w[0].data.end > w[1].data.start) {
        return Err(ZipError::Overlap { first: w[0].name.clone(), second: w[1].name.clone() });
    }
    let mut names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
    names.sort_unstable();
    if let Some(w) = names.windows(2).find(|w| w[0] == w[1]) {
        return Err(ZipError::Duplicate(w[0].to_owned()));
    }
    Ok(members)
}

fn u16_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 2).map_or(0, |b| u64::from(u16::from_le_bytes([b[0], b[1]])))
}

fn u32_at(bytes: &[u8], at: usize) -> u64 {
    u16_at(bytes, at) | u16_at(bytes, at + 2) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u32_at(bytes, at) | u32_at(bytes, at + 4) << 32
}

/// Byte range of the central directory, and the number of members that the end record states.
fn directory(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<(Range<u64>, u64)> {
    let tail_at = size.saturating_sub(END_BYTES + COMMENT_MAX + LOCATOR_BYTES);
    let mut tail = vec![0u8; (size - tail_at) as usize];
    read_at(tail_at, &mut tail)?;
    let is_end = |&i: &usize| {
        let rest = &tail[i..];
        rest.starts_with(b"PK\x05\x06")
            && rest.len() as u64 >= END_BYTES
            && u16_at(rest, 20) == rest.len() as u64 - END_BYTES
    };
    let end = (0..tail.len()).rev().find(is_end).ok_or(ZipError::NoDirectory)?;
    let record = &tail[end..];
    let (mut count, mut length, mut start) = (u16_at(record, 10), u32_at(record, 12), u32_at(record, 16));
    let disks = u16_at(record, 4) | u16_at(record, 6);
    let mut before = tail_at + end as u64;
    let locator = end.checked_sub(LOCATOR_BYTES as usize).map(|i| &tail[i..end]);
    if let Some(locator) = locator.filter(|l| l.starts_with(b"PK\x06\x07")) {
        let mut wide = [0u8; 56];
        let at = u64_at(locator, 8);
        if at.checked_add(56).is_none_or(|e| e > before) {
            return Err(ZipError::Zip64Record);
        }
        read_at(at, &mut wide)?;
        if !wide.starts_with(b"PK\x06\x06") {
            return Err(ZipError::Zip64Record);
        }
        (count, length, start) = (u64_at(&wide, 32), u64_at(&wide, 40), u64_at(&wide, 48));
        before = at;
    }
    if disks != 0 && disks != 0xffff {
        return Err(ZipError::MultiDisk);
    }
    match start.checked_add(length) {
        Some(end) if end == before && length <= DIRECTORY_MAX => Ok((start..end, count)),
        Some(end) if end <= before && length > DIRECTORY_MAX => {
            Err(ZipError::DirectoryTooLarge { bytes: length })
        }
        _ => Err(ZipError::DirectoryMisplaced { bytes: length, start }),
    }
}

/// Parses one entry of the central directory; returns the member and the length of the entry. The
/// `data` of the member still begins at its local header.
fn entry(bytes: &[u8]) -> Result<(Member, usize)> {
    let damaged = || ZipError::DirectoryDamaged;
    if bytes.len() < ENTRY_BYTES || !bytes.starts_with(b"PK\x01\x02") {
        return Err(damaged());
    }
    let (name_len, extra_len, comment_len) =
        (u16_at(bytes, 28) as usize, u16_at(bytes, 30) as usize, u16_at(bytes, 32) as usize);
    let used = ENTRY_BYTES + name_len + extra_len + comment_len;
    if used > bytes.len() {
        return Err(damaged());
    }
    let name = std::str::from_utf8(&bytes[ENTRY_BYTES..ENTRY_BYTES + name_len]).map_err(|_| damaged())?;
    check_name(name)?;
    let (mut packed, mut whole, mut at) = (u32_at(bytes, 20), u32_at(bytes, 24), u32_at(bytes, 42));
    let extra = &bytes[ENTRY_BYTES + name_len..ENTRY_BYTES + name_len + extra_len];
    let mut wide = zip64_fields(extra).into_iter();
    for field in [&mut whole, &mut packed, &mut at] {
        if *field == u64::from(u32::MAX) {
            *field = wide.next().ok_or_else(damaged)?;
        }
    }
    let (flags, method) = (u16_at(bytes, 8), u16_at(bytes, 10));
    if flags & 1 != 0 {
        return Err(ZipError::Encrypted(name.to_owned()));
    }
    if method != 0 {
        return Err(ZipError::Compressed { member: name.to_owned(), method });
    }
    if packed != whole {
        return Err(ZipError::MemberSize { member: name.to_owned(), stored: packed, size: whole });
    }
    let data = at..at.checked_add(whole).ok_or_else(damaged)?;
    Ok((Member { name: name.to_owned(), data, crc: Some(u32_at(bytes, 16) as u32) }, used))
}

/// The 64-bit numbers in the zip64 extra field.
fn zip64_fields(mut extra: &[u8]) -> Vec<u64> {
    while extra.len() >= 4 {
        let (id, len) = (u16_at(extra, 0), u16_at(extra, 2) as usize);
        let Some(body) = extra.get(4..4 + len) else { break };
        if id == 1 {
            return body.chunks_exact(8).map(|b| u64_at(b, 0)).collect();
        }
        extra = &extra[4 + len..];
    }
    Vec::new()
}

fn check_name(name: &str) -> Result<()> {
    let outside = name.starts_with('/')
        || name.contains(['\\', '\0'])
        || name.split('/').any(|part| part == "..")
        || name.chars().any(char::is_control);
    match outside || name.is_empty() {
        true => Err(ZipError::UnsafeName(name.to_owned())),
        false => Ok(()),
    }
}

/// Byte range of the data of a member, found from its local header.
fn data_range(
    member: &Member,
    limit: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<Range<u64>> {
    let outside = || ZipError::OutOfBounds(member.name.clone());
    let at = member.data.start;
    let mut header = [0u8; LOCAL_BYTES];
    if at.checked_add(LOCAL_BYTES as u64).is_none_or(|end| end > limit) {
        return Err(outside());
    }
    read_at(at, &mut header)?;
    if !header.starts_with(b"PK\x03\x04") || u16_at(&header, 26) != member.name.len() as u64 {
        return Err(ZipError::LocalHeader(member.name.clone()));
    }
    let mut name = vec![0u8; member.name.len()];
    let start = at + LOCAL_BYTES as u64 + u16_at(&header, 26) + u16_at(&header, 28);
    let end = start.checked_add(member.data.end - at).filter(|&end| end <= limit).ok_or_else(outside)?;
    read_at(at + LOCAL_BYTES as u64, &mut name)?;
    match name == member.name.as_bytes() {
        true => Ok(start..end),
        false => Err(ZipError::LocalName(member.name.clone())),
    }
}

/// Makes a container with these members, for tests.
#[cfg(test)]
pub(crate) fn pack(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in members {
        let (at, len, crc) = (file.len() as u32, data.len() as u32, crc32fast::hash(data));
        let fields = |out: &mut Vec<u8>| {
            for v in [crc, len, len] {
                out.extend(v.to_le_bytes());
            }
            out.extend((name.len() as u16).to_le_bytes());
            out.extend([0, 0]);
        };
        file.extend(b"PK\x03\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00");
        fields(&mut file);
        file.extend(name.as_bytes());
        file.extend(*data);
        directory.extend(b"PK\x01\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00");
        fields(&mut directory);
        directory.extend([0u8; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (at, len, count) = (file.len() as u32, directory.len() as u32, members.len() as u16);
    file.extend(directory);
    file.extend(b"PK\x05\x06\x00\x00\x00\x00");
    file.extend(count.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend(len.to_le_bytes());
    file.extend(at.to_le_bytes());
    file.extend([0, 0]);
    file
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(file: &[u8]) -> Result<Vec<Member>> {
        members(file.len() as u64, |at, out| {
            let end = at as usize + out.len();
            assert!(end <= file.len(), "reads of {at}..{end} of {}", file.len());
            out.copy_from_slice(&file[at as usize..end]);
            Ok(())
        })
    }

    fn sound() -> Vec<u8> {
        pack(&[("a/data.pkl", b"N."), ("a/data/0", b"12345678"), ("a/version", b"3\n")])
    }

    #[test]
    fn stored_members_have_their_byte_ranges() {
        let file = sound();
        let members = parse(&file).expect("sound");
        let bytes = |i: usize| &file[members[i].data.start as usize..members[i].data.end as usize];
        assert_eq!(members[1].name, "a/data/0");
        assert_eq!((bytes(0), bytes(1), bytes(2)), (&b"N."[..], &b"12345678"[..], &b"3\n"[..]));
        assert_eq!(members[1].crc, Some(crc32fast::hash(b"12345678")));
        let mut commented = file.clone();
        let at = commented.len() - 2;
        commented[at] = 5;
        commented.extend(b"hello");
        assert_eq!(parse(&commented).expect("comments are allowed").len(), 3);
    }

    /// The error of a container with some bytes of its first directory entry replaced.
    fn patched(at: usize, bytes: &[u8]) -> ZipError {
        let mut file = sound();
        let entry = file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory") + at;
        file[entry..entry + bytes.len()].copy_from_slice(bytes);
        parse(&file).expect_err("rejected")
    }

    #[test]
    fn malformed_containers_are_rejected_with_the_reason() {
        let member = || "a/data.pkl".to_owned();
        for (error, expected) in [
            (patched(8, &[1, 0]), ZipError::Encrypted(member())),
            (patched(10, &[8, 0]), ZipError::Compressed { member: member(), method: 8 }),
            (
                patched(24, &[255, 255, 255, 127]),
                ZipError::MemberSize { member: member(), stored: 2, size: 0x7fff_ffff },
            ),
            (patched(20, &[255, 255, 255, 127, 255, 255, 255, 127]), ZipError::OutOfBounds(member())),
            (patched(42, &[0, 0, 0, 127]), ZipError::OutOfBounds(member())),
            (patched(42, &[1, 0, 0, 0]), ZipError::LocalHeader(member())),
            (patched(46, b"../ata.pkl"), ZipError::UnsafeName("../ata.pkl".into())),
            (patched(46, b"/etc/shado"), ZipError::UnsafeName("/etc/shado".into())),
            (patched(46, b"b/data.pkl"), ZipError::LocalName("b/data.pkl".into())),
            (patched(0, b"XX"), ZipError::DirectoryDamaged),
            (patched(28, &[255, 255]), ZipError::DirectoryDamaged),
        ] {
            assert_eq!(error, expected);
        }
        let twice = parse(&pack(&[("a", b"1"), ("a", b"2")])).expect_err("twice");
        assert_eq!(twice, ZipError::Duplicate("a".into()));
    }

    /// Two entries that share the bytes of one member let a small file expand into a large one.
    #[test]
    fn overlapping_members_are_rejected() {
        let mut file = pack(&[("a", b"12345678"), ("a", b"x")]);
        let second = file.windows(4).rposition(|w| w == b"PK\x01\x02").expect("a directory");
        let first = file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory");
        let entry = file[first..second].to_owned();
        file[second..second + entry.len()].copy_from_slice(&entry);
        let error = parse(&file).expect_err("rejected");
        assert!(matches!(error, ZipError::Overlap { .. }), "{error}");
    }

    #[test]
    fn every_truncation_is_rejected() {
        let file = sound();
        for len in 0..file.len() {
            assert!(parse(&file[..len]).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn huge_directories_are_rejected_without_reading_them() {
        let mut file = sound();
        let end = file.len() - 22;
        file[end + 12..end + 16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(parse(&file).is_err());
    }

    proptest! {
        #[test]
        fn no_mutation_panics(flips in proptest::collection::vec((0usize..400, any::<u8>()), 0..6)) {
            let mut file = sound();
            let len = file.len();
            for (at, value) in flips {
                file[at % len] = value;
            }
            let _ = parse(&file);
        }
    }
}
