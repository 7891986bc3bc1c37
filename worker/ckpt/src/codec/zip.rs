//! Reads the list of members (central directory) of the zip containers that torch writes. Such
//! containers have stored (uncompressed) members, zip64 sizes, and CRC-32s in the central
//! directory.
use super::disk::read_file_crc;
use super::placeholder_file;
use crate::error::ZipError;
use crate::format_constants::{NAME_BYTES_MAX, TENSORS_MAX, ZIP_DIRECTORY_MAX};
use std::fs::File;
use std::io;
use std::ops::Range;

/// Limit on the length in bytes of the comment at the end of a zip container.
const COMMENT_MAX: u64 = u16::MAX as u64;
/// Size in bytes of the record at the end of a zip container, without its comment.
const END_RECORD_BYTES: u64 = 22;
/// Size in bytes of the record that states where the zip64 end record is.
const ZIP64_LOCATOR_BYTES: u64 = 20;
/// Size in bytes of an entry of the central directory, without the name, the extra field and the
/// comment.
const DIRECTORY_ENTRY_BYTES: usize = 46;
/// Size in bytes of the header before the data of a zip member, without the name and the extra
/// field.
const LOCAL_HEADER_BYTES: usize = 30;
/// Limit on the number of members of a zip container.
const MEMBERS_MAX: usize = 2 * TENSORS_MAX;

/// A member of a zip container: its name, the byte range of its content, and its CRC-32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ZipMember {
    pub(crate) name: String,
    /// Byte range of the content in the container.
    pub(crate) data: Range<u64>,
    /// CRC-32 of the content; `None` in formats without checksums.
    pub(crate) crc: Option<u32>,
}

impl ZipMember {
    /// Returns the size of the member's content in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.data.end - self.data.start
    }

    /// Returns true if the content of the member in `file` matches its CRC-32, or if the member has
    /// no CRC-32. Reads the content in pieces of the size of `buffer`.
    pub(crate) fn matches_crc(&self, file: &File, buffer: &mut [u8]) -> io::Result<bool> {
        let crc = read_file_crc(file, self.data.clone(), buffer)?;
        Ok(self.crc.is_none_or(|expected| crc == expected))
    }
}

/// Result of reading a zip container.
type Result<T> = std::result::Result<T, ZipError>;

/// Reads the list of members from the central directory of a zip container of `size` bytes.
/// `read_at(offset, buffer)` must fill the buffer with the bytes at the offset. Returns the
/// members, sorted by the offsets of their contents.
///
/// # Errors
/// Fails if the directory is invalid, or if members overlap, are outside of the container, are
/// compressed or encrypted, or have unsafe or equal names.
pub(crate) fn read_members(
    size: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<Vec<ZipMember>> {
    let found = locate_central_directory(size, &mut read_at);
    let (directory, count) = found.map_err(|error| {
        placeholder_file::detect_placeholder_file(size, &mut read_at).map_or(error, ZipError::Placeholder)
    })?;
    let mut bytes = vec![0u8; (directory.end - directory.start) as usize];
    read_at(directory.start, &mut bytes)?;
    let mut members = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (mut member, used) = parse_directory_entry(&bytes[at..])?;
        at += used;
        if members.len() == MEMBERS_MAX {
            return Err(ZipError::TooManyMembers { limit: MEMBERS_MAX });
        }
        member.data = locate_member_data(&member, directory.start, &mut read_at)?;
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

/// Reads a little-endian u16 from `bytes` at offset `at`, or returns 0 if `bytes` ends before the
/// number does.
fn read_u16_zero_padded(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 2).map_or(0, |b| u64::from(u16::from_le_bytes([b[0], b[1]])))
}

/// Reads a little-endian u32 from `bytes` at offset `at`, and takes missing bytes after the end of
/// `bytes` as 0.
fn read_u32_zero_padded(bytes: &[u8], at: usize) -> u64 {
    read_u16_zero_padded(bytes, at) | read_u16_zero_padded(bytes, at + 2) << 16
}

/// Reads a little-endian u64 from `bytes` at offset `at`, and takes missing bytes after the end of
/// `bytes` as 0.
fn read_u64_zero_padded(bytes: &[u8], at: usize) -> u64 {
    read_u32_zero_padded(bytes, at) | read_u32_zero_padded(bytes, at + 4) << 32
}

/// Finds the central directory of a zip container of `size` bytes. Returns its byte range, and the
/// number of members that the end record states.
fn locate_central_directory(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<(Range<u64>, u64)> {
    let tail_at = size.saturating_sub(END_RECORD_BYTES + COMMENT_MAX + ZIP64_LOCATOR_BYTES);
    let mut tail = vec![0u8; (size - tail_at) as usize];
    read_at(tail_at, &mut tail)?;
    let is_end = |&i: &usize| {
        let rest = &tail[i..];
        rest.starts_with(b"PK\x05\x06")
            && rest.len() as u64 >= END_RECORD_BYTES
            && read_u16_zero_padded(rest, 20) == rest.len() as u64 - END_RECORD_BYTES
    };
    let end = (0..tail.len()).rev().find(is_end).ok_or(ZipError::NoDirectory)?;
    let record = &tail[end..];
    let (mut count, mut length, mut start) = (
        read_u16_zero_padded(record, 10),
        read_u32_zero_padded(record, 12),
        read_u32_zero_padded(record, 16),
    );
    let disks = read_u16_zero_padded(record, 4) | read_u16_zero_padded(record, 6);
    let mut before = tail_at + end as u64;
    let locator = end.checked_sub(ZIP64_LOCATOR_BYTES as usize).map(|i| &tail[i..end]);
    if let Some(locator) = locator.filter(|l| l.starts_with(b"PK\x06\x07")) {
        let mut wide = [0u8; 56];
        let at = read_u64_zero_padded(locator, 8);
        if at.checked_add(56).is_none_or(|e| e > before) {
            return Err(ZipError::Zip64Record);
        }
        read_at(at, &mut wide)?;
        if !wide.starts_with(b"PK\x06\x06") {
            return Err(ZipError::Zip64Record);
        }
        (count, length, start) = (
            read_u64_zero_padded(&wide, 32),
            read_u64_zero_padded(&wide, 40),
            read_u64_zero_padded(&wide, 48),
        );
        before = at;
    }
    if disks != 0 && disks != 0xffff {
        return Err(ZipError::MultiDisk);
    }
    match start.checked_add(length) {
        Some(end) if end == before && length <= ZIP_DIRECTORY_MAX => Ok((start..end, count)),
        Some(end) if end <= before && length > ZIP_DIRECTORY_MAX => {
            Err(ZipError::DirectoryTooLarge { bytes: length })
        }
        _ => Err(ZipError::DirectoryMisplaced { bytes: length, start }),
    }
}

/// Parses the entry of a zip container's central directory at the beginning of `bytes`. Returns the
/// member and the entry's length in bytes. The range `data` of the member begins at the local
/// header, until [`locate_member_data`] finds the content.
fn parse_directory_entry(bytes: &[u8]) -> Result<(ZipMember, usize)> {
    let damaged = || ZipError::DirectoryDamaged;
    if bytes.len() < DIRECTORY_ENTRY_BYTES || !bytes.starts_with(b"PK\x01\x02") {
        return Err(damaged());
    }
    let (name_len, extra_len, comment_len) = (
        read_u16_zero_padded(bytes, 28) as usize,
        read_u16_zero_padded(bytes, 30) as usize,
        read_u16_zero_padded(bytes, 32) as usize,
    );
    let used = DIRECTORY_ENTRY_BYTES + name_len + extra_len + comment_len;
    if used > bytes.len() {
        return Err(damaged());
    }
    let name = std::str::from_utf8(&bytes[DIRECTORY_ENTRY_BYTES..DIRECTORY_ENTRY_BYTES + name_len])
        .map_err(|_| damaged())?;
    check_member_name(name)?;
    let (mut packed, mut whole, mut at) =
        (read_u32_zero_padded(bytes, 20), read_u32_zero_padded(bytes, 24), read_u32_zero_padded(bytes, 42));
    let extra = &bytes[DIRECTORY_ENTRY_BYTES + name_len..DIRECTORY_ENTRY_BYTES + name_len + extra_len];
    let mut wide = parse_zip64_fields(extra).into_iter();
    for field in [&mut whole, &mut packed, &mut at] {
        if *field == u64::from(u32::MAX) {
            *field = wide.next().ok_or_else(damaged)?;
        }
    }
    let (flags, method) = (read_u16_zero_padded(bytes, 8), read_u16_zero_padded(bytes, 10));
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
    Ok((ZipMember { name: name.to_owned(), data, crc: Some(read_u32_zero_padded(bytes, 16) as u32) }, used))
}

/// Returns the 64-bit sizes and offsets that the zip64 extra field of a zip member contains.
/// Returns an empty list if there is no zip64 field.
fn parse_zip64_fields(mut extra: &[u8]) -> Vec<u64> {
    while extra.len() >= 4 {
        let (id, len) = (read_u16_zero_padded(extra, 0), read_u16_zero_padded(extra, 2) as usize);
        let Some(body) = extra.get(4..4 + len) else { break };
        if id == 1 {
            return body.chunks_exact(8).map(|b| read_u64_zero_padded(b, 0)).collect();
        }
        extra = &extra[4 + len..];
    }
    Vec::new()
}

/// Fails if the name of a zip member is too long, or unsafe as a path or in messages.
fn check_member_name(name: &str) -> Result<()> {
    let outside = name.starts_with('/')
        || name.contains(['\\', '\0'])
        || name.split('/').any(|part| part == "..")
        || name.chars().any(char::is_control);
    match outside || name.is_empty() || name.len() > NAME_BYTES_MAX {
        true => Err(ZipError::UnsafeName(name.chars().take(60).collect())),
        false => Ok(()),
    }
}

/// Reads the local header of a zip member, and returns the byte range of the content after this
/// header. Fails if the header does not match the member, or if the content ends after the offset
/// `limit`.
fn locate_member_data(
    member: &ZipMember,
    limit: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<Range<u64>> {
    let outside = || ZipError::OutOfBounds(member.name.clone());
    let (at, name_end) = (member.data.start, LOCAL_HEADER_BYTES + member.name.len());
    if at.checked_add(name_end as u64).is_none_or(|end| end > limit) {
        return Err(outside());
    }
    let mut header = vec![0u8; name_end];
    read_at(at, &mut header)?;
    if !header.starts_with(b"PK\x03\x04") || read_u16_zero_padded(&header, 26) != member.name.len() as u64 {
        return Err(ZipError::LocalHeader(member.name.clone()));
    }
    let start = at + name_end as u64 + read_u16_zero_padded(&header, 28);
    let end = start.checked_add(member.data.end - at).filter(|&end| end <= limit).ok_or_else(outside)?;
    match header[LOCAL_HEADER_BYTES..] == *member.name.as_bytes() {
        true => Ok(start..end),
        false => Err(ZipError::LocalName(member.name.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::pack_zip;
    use proptest::prelude::*;

    /// Reads the members of a zip container in memory, and checks that no read reaches beyond its
    /// end.
    fn parse_container(file: &[u8]) -> Result<Vec<ZipMember>> {
        read_members(file.len() as u64, |at, out| {
            let end = at as usize + out.len();
            assert!(end <= file.len(), "reads of {at}..{end} of {}", file.len());
            out.copy_from_slice(&file[at as usize..end]);
            Ok(())
        })
    }

    /// Returns the bytes of a valid zip container with three members.
    fn make_valid_container() -> Vec<u8> {
        pack_zip(&[("a/data.pkl", b"N."), ("a/data/0", b"12345678"), ("a/version", b"3\n")])
    }

    #[test]
    fn stored_members_have_their_byte_ranges() {
        let file = make_valid_container();
        let members = parse_container(&file).expect("sound");
        let bytes = |i: usize| &file[members[i].data.start as usize..members[i].data.end as usize];
        assert_eq!(members[1].name, "a/data/0");
        assert_eq!((bytes(0), bytes(1), bytes(2)), (&b"N."[..], &b"12345678"[..], &b"3\n"[..]));
        assert_eq!(members[1].crc, Some(crc32fast::hash(b"12345678")));
        let mut commented = file.clone();
        let at = commented.len() - 2;
        commented[at] = 5;
        commented.extend(b"hello");
        assert_eq!(parse_container(&commented).expect("comments are allowed").len(), 3);
    }

    /// Overwrites bytes of a valid zip container, from byte `at` of the first entry of its central
    /// directory. Returns the error of reading the container.
    fn expect_patched_rejection(at: usize, bytes: &[u8]) -> ZipError {
        let mut file = make_valid_container();
        let entry = file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory") + at;
        file[entry..entry + bytes.len()].copy_from_slice(bytes);
        parse_container(&file).expect_err("rejected")
    }

    #[test]
    fn malformed_containers_are_rejected_with_the_reason() {
        let member = || "a/data.pkl".to_owned();
        for (error, expected) in [
            (expect_patched_rejection(8, &[1, 0]), ZipError::Encrypted(member())),
            (expect_patched_rejection(10, &[8, 0]), ZipError::Compressed { member: member(), method: 8 }),
            (
                expect_patched_rejection(24, &[255, 255, 255, 127]),
                ZipError::MemberSize { member: member(), stored: 2, size: 0x7fff_ffff },
            ),
            (
                expect_patched_rejection(20, &[255, 255, 255, 127, 255, 255, 255, 127]),
                ZipError::OutOfBounds(member()),
            ),
            (expect_patched_rejection(42, &[0, 0, 0, 127]), ZipError::OutOfBounds(member())),
            (expect_patched_rejection(42, &[1, 0, 0, 0]), ZipError::LocalHeader(member())),
            (expect_patched_rejection(46, b"../ata.pkl"), ZipError::UnsafeName("../ata.pkl".into())),
            (expect_patched_rejection(46, b"/etc/shado"), ZipError::UnsafeName("/etc/shado".into())),
            (expect_patched_rejection(46, b"b/data.pkl"), ZipError::LocalName("b/data.pkl".into())),
            (expect_patched_rejection(0, b"XX"), ZipError::DirectoryDamaged),
            (expect_patched_rejection(28, &[255, 255]), ZipError::DirectoryDamaged),
        ] {
            assert_eq!(error, expected);
        }
        let twice = parse_container(&pack_zip(&[("a", b"1"), ("a", b"2")])).expect_err("twice");
        assert_eq!(twice, ZipError::Duplicate("a".into()));
    }

    /// Checks that two directory entries with the bytes of one member are rejected, since such
    /// entries let a small file expand into a large one.
    #[test]
    fn overlapping_members_are_rejected() {
        let mut file = pack_zip(&[("a", b"12345678"), ("a", b"x")]);
        let second = file.windows(4).rposition(|w| w == b"PK\x01\x02").expect("a directory");
        let first = file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory");
        let entry = file[first..second].to_owned();
        file[second..second + entry.len()].copy_from_slice(&entry);
        let error = parse_container(&file).expect_err("rejected");
        assert!(matches!(error, ZipError::Overlap { .. }), "{error}");
    }

    #[test]
    fn truncated_containers_are_rejected() {
        let file = make_valid_container();
        for len in 0..file.len() {
            assert!(parse_container(&file[..len]).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn huge_zip_directories_are_rejected_without_reading_them() {
        let mut file = make_valid_container();
        let end = file.len() - 22;
        file[end + 12..end + 16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(parse_container(&file).is_err());
    }

    proptest! {
        #[test]
        fn mutated_containers_do_not_panic(flips in proptest::collection::vec((0usize..400, any::<u8>()), 0..6)) {
            let mut file = make_valid_container();
            let len = file.len();
            for (at, value) in flips {
                file[at % len] = value;
            }
            let _ = parse_container(&file);
        }
    }
}
