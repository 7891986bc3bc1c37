//! Where the stripes of parity lie (pure).
use crate::disk::BLOCK;
use std::ops::Range;

/// Name of a rank's stripe.
pub(crate) fn parity_name(rank: u32, world: u32) -> String {
    format!("parity-{rank:05}-of-{world:05}.bin")
}

/// Blocks of the parity that stripe `rank` holds, and its size in bytes; `sizes` are those of the shards.
pub(crate) fn stripe(sizes: &[u64], rank: u32) -> (Range<u64>, u64) {
    let block = BLOCK as u64;
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let all = longest.div_ceil(block);
    let each = all.div_ceil(sizes.len().max(1) as u64);
    let start = u64::from(rank).saturating_mul(each).min(all);
    let end = start.saturating_add(each).min(all);
    let bytes = end.saturating_mul(block).min(longest) - start.saturating_mul(block).min(longest);
    (start..end, bytes)
}

/// `Err`: what of the parity files, each with its name, size and number of blocks, doesn't fit shards of these sizes.
pub(crate) fn check<'a>(
    sizes: &[u64],
    parity: impl ExactSizeIterator<Item = (&'a str, u64, u64)>,
) -> Result<(), String> {
    let world = u32::try_from(sizes.len()).map_err(|e| e.to_string())?;
    if parity.len() != sizes.len() {
        return Err(format!("{} parity files for {world} shards", parity.len()));
    }
    for (rank, (name, size, count)) in (0..world).zip(parity) {
        let (blocks, bytes) = stripe(sizes, rank);
        let fits = name == parity_name(rank, world) && size == bytes && count == blocks.end - blocks.start;
        if !fits {
            return Err(format!("parity file {rank} ({name}) doesn't fit the shards"));
        }
    }
    Ok(())
}
