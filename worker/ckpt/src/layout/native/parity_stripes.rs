//! Computes which blocks of a checkpoint's parity data (XOR redundancy over the shards) each rank
//! stores in its parity file. Does no I/O.
use crate::codec::disk::BLOCK_BYTES;
use crate::error::ManifestError;
use std::ops::Range;

/// Returns the name of the file with a rank's share of the parity data (XOR redundancy), such as
/// `parity-00000-of-00004.bin`.
pub(crate) fn parity_file_name(rank: u32, world: u32) -> String {
    format!("parity-{rank:05}-of-{world:05}.bin")
}

/// Returns which 1 MiB blocks of the parity data, the XOR over all shards, rank `rank` stores in
/// its parity file, and the file's size in bytes. `sizes` are the sizes of all shards in bytes.
pub(crate) fn compute_parity_blocks_of_rank(sizes: &[u64], rank: u32) -> (Range<u64>, u64) {
    let block = BLOCK_BYTES as u64;
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let blocks = longest.div_ceil(block);
    let per_rank = blocks.div_ceil(sizes.len().max(1) as u64);
    let start = u64::from(rank).saturating_mul(per_rank).min(blocks);
    let end = start.saturating_add(per_rank).min(blocks);
    let bytes = end.saturating_mul(block).min(longest) - start.saturating_mul(block).min(longest);
    (start..end, bytes)
}

/// Fails if the parity files in a manifest do not have the number, names and sizes that a
/// checkpoint with the shard sizes `sizes` must have. `parity` has the name, the size in bytes and
/// the number of blocks of each parity file, in the order of the ranks.
pub(crate) fn check_parity_files<'a>(
    sizes: &[u64],
    parity: impl ExactSizeIterator<Item = (&'a str, u64, u64)>,
) -> Result<(), ManifestError> {
    let world = u32::try_from(sizes.len()).map_err(|_| ManifestError::SizeOverflow)?;
    if parity.len() != sizes.len() {
        return Err(ManifestError::ParityCount { parity: parity.len(), shards: sizes.len() });
    }
    for (rank, (name, size, count)) in (0..world).zip(parity) {
        let (blocks, bytes) = compute_parity_blocks_of_rank(sizes, rank);
        let fits =
            name == parity_file_name(rank, world) && size == bytes && count == blocks.end - blocks.start;
        if !fits {
            return Err(ManifestError::ParityFile { rank, name: name.to_owned() });
        }
    }
    Ok(())
}
