//! Sends each rank's training state to the hosts that must keep a copy in memory, in several
//! exchanges of limited size between all ranks.
use super::host_map::RankHostMap;
use crate::{
    error::{Result, to_unreadable_checkpoint_error, to_unwritable_checkpoint_error},
    zero::collective_queue::CollectiveQueue,
};
use ckpt::memory_store::{COPY_HEADER_BYTES, MemoryStore};
use std::ops::Range;

/// Maximum number of bytes of a training state that a rank sends to each receiving host in one
/// all-to-all exchange; larger states need several exchanges.
const MAX_BYTES_PER_ROUND: u64 = 4 << 20;

/// Sends this rank's training state (memory copy number `sequence`) to ranks on other hosts, and
/// stores the training states that other ranks send. Returns the number of sent bytes. Does nothing
/// if no other host keeps copies. Collective: every rank must call it.
pub(super) fn exchange_memory_copies(
    queue: &CollectiveQueue,
    store: &MemoryStore,
    hosts: &RankHostMap,
    copies: usize,
    sequence: u64,
) -> Result<u64> {
    let (rank, world) = (queue.comm().rank(), queue.comm().world_size());
    let keepers: Vec<Vec<usize>> = (0..world).map(|r| hosts.list_keepers(r, copies)).collect();
    if keepers.iter().all(Vec::is_empty) {
        return Ok(0);
    }
    let size =
        store.copy_image_size_in_bytes(rank as u32, sequence).map_err(to_unreadable_checkpoint_error)?;
    let sizes = queue.run_and_wait(move |c| c.all_gather_u64(&[size]))?;
    let sizes: Vec<u64> = sizes.iter().map(|sizes| sizes.first().copied().unwrap_or(0)).collect();
    let kept: Vec<usize> = (0..world).filter(|sender| keepers[*sender].contains(&rank)).collect();
    for sender in &kept {
        store.invalidate_copy_image(*sender as u32, sequence).map_err(to_unwritable_checkpoint_error)?;
    }
    let rounds = sizes.iter().map(|size| count_rounds(*size)).max().unwrap_or(0);
    let mut sent = 0;
    for round in 0..rounds {
        let chunk = find_chunk_of_round(size, round);
        let length = (chunk.end - chunk.start) as usize;
        let mut image = vec![0; length];
        store
            .read_copy_image(rank as u32, sequence, chunk.start, &mut image)
            .map_err(to_unreadable_checkpoint_error)?;
        let (mut send_counts, mut receive_counts) = (vec![0; world], vec![0; world]);
        keepers[rank].iter().for_each(|keeper| send_counts[*keeper] = length);
        for sender in &kept {
            let chunk = find_chunk_of_round(sizes[*sender], round);
            receive_counts[*sender] = (chunk.end - chunk.start) as usize;
        }
        let send = image.repeat(keepers[rank].len());
        sent += send.len() as u64;
        let counts = receive_counts.clone();
        let received = queue.run_and_wait(move |c| {
            let mut received = vec![0; counts.iter().sum()];
            c.all_to_all_bytes(&mut received, &counts, &send, &send_counts)?;
            Ok(received)
        })?;
        let mut rest = received.as_slice();
        for sender in &kept {
            let (bytes, after) = rest.split_at(receive_counts[*sender]);
            rest = after;
            let offset = find_chunk_of_round(sizes[*sender], round).start;
            store
                .write_copy_image(*sender as u32, sequence, offset, bytes)
                .map_err(to_unwritable_checkpoint_error)?;
        }
    }
    Ok(sent)
}

/// Returns the number of all-to-all exchanges that are needed to send a memory copy of `size`
/// bytes: some for its content, and one for its header.
fn count_rounds(size: u64) -> u64 {
    size.saturating_sub(COPY_HEADER_BYTES).div_ceil(MAX_BYTES_PER_ROUND) + 1
}

/// Returns the byte range of a memory copy of `size` bytes that is sent to other hosts in exchange
/// number `round`. The range is empty after the last round of this copy.
fn find_chunk_of_round(size: u64, round: u64) -> Range<u64> {
    let last = count_rounds(size) - 1;
    if round >= last {
        return 0..if round == last { COPY_HEADER_BYTES.min(size) } else { 0 };
    }
    let start = COPY_HEADER_BYTES + round * MAX_BYTES_PER_ROUND;
    start..(start + MAX_BYTES_PER_ROUND).min(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_sent_once_and_the_header_last() {
        for size in [
            0,
            10,
            COPY_HEADER_BYTES,
            COPY_HEADER_BYTES + 1,
            3 * MAX_BYTES_PER_ROUND,
            3 * MAX_BYTES_PER_ROUND + 5000,
        ] {
            let chunks: Vec<Range<u64>> =
                (0..count_rounds(size)).map(|round| find_chunk_of_round(size, round)).collect();
            let (header, content) = chunks.split_last().unwrap();
            assert_eq!(*header, 0..COPY_HEADER_BYTES.min(size), "{size}");
            let mut at = COPY_HEADER_BYTES;
            for chunk in content {
                assert!(
                    chunk.start == at && chunk.end - chunk.start <= MAX_BYTES_PER_ROUND,
                    "{size}: {chunk:?}"
                );
                at = chunk.end;
            }
            assert_eq!(at, size.max(COPY_HEADER_BYTES));
            assert!(find_chunk_of_round(size, count_rounds(size)).is_empty());
        }
    }
}
