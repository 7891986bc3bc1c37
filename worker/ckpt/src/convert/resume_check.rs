//! Verifies files that a killed conversion had finished: a file is reused only when every byte of
//! it is what was written.
use crate::disk::BLOCK;
use crate::formats::torch_write::digest;
use crate::formats::zip;
use crate::hash::Hash;
use crate::save::ShardReport;
use std::fs;
use std::os::unix::fs::FileExt;

/// Whether every member of a torch file matches its CRC-32, and all CRCs match the recorded digest.
/// `None` when the file can't be read.
pub(super) fn torch_file_is_intact(file: &fs::File, size: u64, expected: u32) -> Option<bool> {
    let members = zip::members(size, |at, out| file.read_exact_at(out, at)).ok()?;
    let crcs: Vec<u32> = members.iter().map(|m| m.crc).collect::<Option<_>>()?;
    let entries =
        members.iter().zip(&crcs).map(|(m, crc)| (m.name.as_str(), m.data.end - m.data.start, *crc));
    if digest(entries) != expected {
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

/// Whether every block of a native shard matches its hash. `None` when the file can't be read.
pub(super) fn shard_is_intact(file: &fs::File, size: u64, shard: &ShardReport) -> Option<bool> {
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
