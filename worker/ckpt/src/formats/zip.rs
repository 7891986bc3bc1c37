//! The zip container as torch writes it: members stored as they are, sizes beyond 4 GiB, CRCs in the central directory.
use std::io;
use std::ops::Range;

/// Largest central directory that is read, bytes.
const DIRECTORY_MAX: u64 = 64 << 20;
/// Longest comment after the end record.
const COMMENT_MAX: u64 = u16::MAX as u64;
const END_BYTES: u64 = 22;
const LOCATOR_BYTES: u64 = 20;
const ENTRY_BYTES: usize = 46;
const LOCAL_BYTES: usize = 30;

/// One stored file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Its bytes in the container.
    pub(crate) data: Range<u64>,
    /// CRC-32 of them; a legacy file has none.
    pub(crate) crc: Option<u32>,
}

/// The members of a container of `size` bytes in the order of their bytes; `read_at(offset, buffer)` fills the buffer.
/// No member overlaps another or leaves the container, and no name leaves its folder. `Err` is one line that says what
/// is wrong with it.
pub(crate) fn members(
    size: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<Vec<Member>, String> {
    let found = directory(size, &mut read_at);
    let (directory, count) = found.map_err(|why| super::or_stand_in(size, &mut read_at, why))?;
    let mut bytes = vec![0u8; (directory.end - directory.start) as usize];
    read_at(directory.start, &mut bytes).map_err(|e| e.to_string())?;
    let mut members = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (mut member, used) = entry(&bytes[at..])?;
        at += used;
        member.data = data_of(&member, directory.start, &mut read_at)?;
        members.push(member);
    }
    if members.len() as u64 != count {
        return Err(format!("its zip directory has {} members, its end record says {count}", members.len()));
    }
    members.sort_by_key(|m| (m.data.start, m.data.end));
    if let Some(w) = members.windows(2).find(|w| w[0].data.end > w[1].data.start) {
        return Err(format!("its zip members {:?} and {:?} overlap", w[0].name, w[1].name));
    }
    let mut names: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
    names.sort_unstable();
    if let Some(w) = names.windows(2).find(|w| w[0] == w[1]) {
        return Err(format!("its zip directory has the member {:?} twice", w[0]));
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

/// Where the central directory lies and how many members it has.
fn directory(
    size: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<(Range<u64>, u64), String> {
    let cut = || {
        "it has no zip directory at its end: it is cut short, was never written out, or is no torch file"
            .to_owned()
    };
    let tail_at = size.saturating_sub(END_BYTES + COMMENT_MAX + LOCATOR_BYTES);
    let mut tail = vec![0u8; (size - tail_at) as usize];
    read_at(tail_at, &mut tail).map_err(|e| e.to_string())?;
    let is_end = |&i: &usize| {
        let rest = &tail[i..];
        rest.starts_with(b"PK\x05\x06")
            && rest.len() as u64 >= END_BYTES
            && u16_at(rest, 20) == rest.len() as u64 - END_BYTES
    };
    let end = (0..tail.len()).rev().find(is_end).ok_or_else(cut)?;
    let record = &tail[end..];
    let (mut count, mut length, mut start) = (u16_at(record, 10), u32_at(record, 12), u32_at(record, 16));
    let disks = u16_at(record, 4) | u16_at(record, 6);
    let mut before = tail_at + end as u64;
    let locator = end.checked_sub(LOCATOR_BYTES as usize).map(|i| &tail[i..end]);
    if let Some(locator) = locator.filter(|l| l.starts_with(b"PK\x06\x07")) {
        let mut wide = [0u8; 56];
        let at = u64_at(locator, 8);
        if at.checked_add(56).is_none_or(|e| e > before) {
            return Err("its zip64 end record lies outside of it".into());
        }
        read_at(at, &mut wide).map_err(|e| e.to_string())?;
        if !wide.starts_with(b"PK\x06\x06") {
            return Err("its zip64 end record is damaged".into());
        }
        (count, length, start) = (u64_at(&wide, 32), u64_at(&wide, 40), u64_at(&wide, 48));
        before = at;
    }
    if disks != 0 && disks != 0xffff {
        return Err("its zip is split over several files".into());
    }
    match start.checked_add(length) {
        Some(end) if end == before && length <= DIRECTORY_MAX => Ok((start..end, count)),
        Some(end) if end <= before && length > DIRECTORY_MAX => {
            Err(format!("its zip directory has {length} bytes, more than the {DIRECTORY_MAX} allowed"))
        }
        _ => {
            Err(format!("its zip directory should be {length} bytes at {start}, which is not where it ends"))
        }
    }
}

/// One entry of the central directory, and its length there. The member's `data` starts at its local header as yet.
fn entry(bytes: &[u8]) -> Result<(Member, usize), String> {
    let damaged = || "its zip directory is damaged".to_owned();
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
        return Err(format!("its zip member {name:?} is encrypted"));
    }
    if method != 0 {
        return Err(format!(
            "its zip member {name:?} is compressed (method {method}); torch stores members as they are: unpack it and pack it with `zip -0`"
        ));
    }
    if packed != whole {
        return Err(format!("its zip member {name:?} has {packed} bytes stored and {whole} bytes whole"));
    }
    let data = at..at.checked_add(whole).ok_or_else(damaged)?;
    Ok((Member { name: name.to_owned(), data, crc: Some(u32_at(bytes, 16) as u32) }, used))
}

/// The 64-bit numbers of the zip64 extra field.
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

fn check_name(name: &str) -> Result<(), String> {
    let outside = name.starts_with('/')
        || name.contains(['\\', '\0'])
        || name.split('/').any(|part| part == "..")
        || name.chars().any(char::is_control);
    match outside || name.is_empty() {
        true => Err(format!("its zip member {name:?} has a name that leads out of the file")),
        false => Ok(()),
    }
}

/// Where a member's bytes are, from its local header.
fn data_of(
    member: &Member,
    limit: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> Result<Range<u64>, String> {
    let outside = || format!("its zip member {:?} lies outside of the file", member.name);
    let at = member.data.start;
    let mut header = [0u8; LOCAL_BYTES];
    if at.checked_add(LOCAL_BYTES as u64).is_none_or(|end| end > limit) {
        return Err(outside());
    }
    read_at(at, &mut header).map_err(|e| e.to_string())?;
    if !header.starts_with(b"PK\x03\x04") || u16_at(&header, 26) != member.name.len() as u64 {
        return Err(format!("the header of its zip member {:?} is damaged", member.name));
    }
    let mut name = vec![0u8; member.name.len()];
    let start = at + LOCAL_BYTES as u64 + u16_at(&header, 26) + u16_at(&header, 28);
    let end = start.checked_add(member.data.end - at).filter(|&end| end <= limit).ok_or_else(outside)?;
    read_at(at + LOCAL_BYTES as u64, &mut name).map_err(|e| e.to_string())?;
    match name == member.name.as_bytes() {
        true => Ok(start..end),
        false => Err(format!("its zip member {:?} has another name in its own header", member.name)),
    }
}

/// A container of these members, for tests.
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

    fn parse(file: &[u8]) -> Result<Vec<Member>, String> {
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
    fn stored_members_are_found_with_their_bytes() {
        let file = sound();
        let members = parse(&file).expect("sound");
        let of = |i: usize| &file[members[i].data.start as usize..members[i].data.end as usize];
        assert_eq!(members[1].name, "a/data/0");
        assert_eq!((of(0), of(1), of(2)), (&b"N."[..], &b"12345678"[..], &b"3\n"[..]));
        assert_eq!(members[1].crc, Some(crc32fast::hash(b"12345678")));
        let mut commented = file.clone();
        let at = commented.len() - 2;
        commented[at] = 5;
        commented.extend(b"hello");
        assert_eq!(parse(&commented).expect("a comment is fine").len(), 3);
    }

    /// The sound container with bytes of the first directory entry replaced.
    fn patched(at: usize, bytes: &[u8]) -> String {
        let mut file = sound();
        let entry = file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory") + at;
        file[entry..entry + bytes.len()].copy_from_slice(bytes);
        parse(&file).expect_err("refused")
    }

    #[test]
    fn hostile_containers_are_refused_with_the_reason() {
        for (why, reason) in [
            (patched(8, &[1, 0]), "encrypted"),
            (patched(10, &[8, 0]), "compressed (method 8)"),
            (patched(24, &[255, 255, 255, 127]), "bytes whole"),
            (patched(20, &[255, 255, 255, 127, 255, 255, 255, 127]), "outside of the file"),
            (patched(42, &[0, 0, 0, 127]), "outside of the file"),
            (patched(42, &[1, 0, 0, 0]), "damaged"),
            (patched(46, b"../ata.pkl"), "leads out of the file"),
            (patched(46, b"/etc/shado"), "leads out of the file"),
            (patched(46, b"b/data.pkl"), "another name"),
            (patched(0, b"XX"), "directory is damaged"),
            (patched(28, &[255, 255]), "directory is damaged"),
        ] {
            assert!(why.contains(reason), "{why} lacks {reason}");
        }
        let twice = parse(&pack(&[("a", b"1"), ("a", b"2")])).expect_err("twice");
        assert!(twice.contains("twice"), "{twice}");
    }

    /// Two entries that share the bytes of one member: how small files unfold to large ones.
    #[test]
    fn overlapping_members_are_refused() {
        let mut file = pack(&[("a", b"12345678"), ("a", b"x")]);
        let second = file.windows(4).rposition(|w| w == b"PK\x01\x02").expect("a directory");
        let first = file.windows(4).position(|w| w == b"PK\x01\x02").expect("a directory");
        let entry = file[first..second].to_owned();
        file[second..second + entry.len()].copy_from_slice(&entry);
        let why = parse(&file).expect_err("refused");
        assert!(why.contains("overlap"), "{why}");
    }

    #[test]
    fn every_cut_is_refused() {
        let file = sound();
        for len in 0..file.len() {
            assert!(parse(&file[..len]).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn huge_directories_are_refused_unread() {
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
