//! Verifies files that a killed conversion had finished. Such a file is reused only if every byte
//! is unchanged since it was written.
use crate::codec::disk::BLOCK;
use crate::codec::torch_writer::digest_members;
use crate::codec::zip;
use crate::hash::Hash;
use crate::save::ShardReport;
use std::fs;
use std::os::unix::fs::FileExt;

/// Reads a torch file of `size` bytes. Returns whether every member matches its CRC-32, and the
/// digest over the names, sizes and CRCs of all members is `expected`. Returns `None` if the file
/// can't be read.
pub(super) fn is_torch_file_intact(file: &fs::File, size: u64, expected: u32) -> Option<bool> {
    let members = zip::read_members(size, |at, out| file.read_exact_at(out, at)).ok()?;
    let crcs: Vec<u32> = members.iter().map(|m| m.crc).collect::<Option<_>>()?;
    let entries =
        members.iter().zip(&crcs).map(|(m, crc)| (m.name.as_str(), m.data.end - m.data.start, *crc));
    if digest_members(entries) != expected {
        return Some(false);
    }
    let mut buffer = vec![0u8; BLOCK];
    for (m, crc) in members.iter().zip(crcs) {
        let mut hasher = crc32fast::Hasher::new();
        let mut at = m.data.start;
        while at < m.data.end {
            let n = (m.data.end - at).min(BLOCK as u64) as usize;
            file.read_exact_at(&mut buffer[..n], at).ok()?;
            hasher.update(&buffer[..n]);
            at += n as u64;
        }
        if hasher.finalize() != crc {
            return Some(false);
        }
    }
    Some(true)
}

/// Reads a native shard of `size` bytes. Returns whether every block matches its hash in the report
/// `shard`. Returns `None` if the file can't be read.
pub(super) fn is_shard_intact(file: &fs::File, size: u64, shard: &ShardReport) -> Option<bool> {
    let mut buffer = vec![0u8; BLOCK];
    let mut at = 0;
    for hash in &shard.blocks {
        let n = size.checked_sub(at)?.min(BLOCK as u64) as usize;
        file.read_exact_at(&mut buffer[..n], at).ok()?;
        if Hash::digest(&buffer[..n]) != *hash {
            return Some(false);
        }
        at += n as u64;
    }
    Some(at == size)
}
