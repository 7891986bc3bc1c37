//! Checks that the files which a killed conversion had completed are unchanged, before another
//! conversion reuses them. Such a file is reused only if every byte is unchanged since it was
//! written.
use crate::codec::disk::BLOCK_BYTES;
use crate::hash::{FileHasher, Hash};
use crate::save::ShardReport;
use std::fs;
use std::os::unix::fs::FileExt;

/// Returns true if a torch file of `size` bytes still has the hash `expected`, which was recorded
/// when the file was written. Returns `None` if the file cannot be read.
pub(super) fn is_torch_file_intact(file: &fs::File, size: u64, expected: Hash) -> Option<bool> {
    let (mut hasher, mut buffer, mut at) = (FileHasher::default(), vec![0u8; BLOCK_BYTES], 0);
    while at < size {
        let n = (size - at).min(BLOCK_BYTES as u64) as usize;
        file.read_exact_at(&mut buffer[..n], at).ok()?;
        hasher.update(&buffer[..n]);
        at += n as u64;
    }
    Some(hasher.finish() == expected)
}

/// Returns true if every 1 MiB block of a rank's file still has the hash that `shard` recorded when
/// the file was written. Returns `None` if the file cannot be read.
pub(super) fn is_shard_intact(file: &fs::File, size: u64, shard: &ShardReport) -> Option<bool> {
    let mut buffer = vec![0u8; BLOCK_BYTES];
    let mut at = 0;
    for hash in &shard.blocks {
        let n = size.checked_sub(at)?.min(BLOCK_BYTES as u64) as usize;
        file.read_exact_at(&mut buffer[..n], at).ok()?;
        if Hash::digest(&buffer[..n]) != *hash {
            return Some(false);
        }
        at += n as u64;
    }
    Some(at == size)
}
