//! Tests the memory copies of shards: roundtrips, torn and damaged copies, and the release of
//! memory.
use super::*;
use crate::save::memory_store::{
    COPY_HEADER_BYTES, MemoryCopyId, MemoryStore, StoredMemoryCopies, StoredMemoryCopy,
    open_memory_checkpoint, parse_copy_description,
};
use crate::{Checkpoint, CkptError, PieceElements, TensorPiece};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

/// The distance in bytes between the starts of two regions of a store's memory file.
const REGION: u64 = 1 << 40;

/// Creates a store, and a second handle to its memory file.
fn make_store() -> (MemoryStore, File) {
    let file = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).expect("a memory file"));
    (MemoryStore::new(file.try_clone().expect("a handle")), file)
}

/// Returns the identity of the memory copies of step `step`.
fn make_id(step: u64, sequence: u64) -> MemoryCopyId {
    MemoryCopyId { step, sequence, attempt: 0, world: 2 }
}

/// Returns the facts of a save with two ranks and a tensor of more than one block.
fn make_two_rank_facts(step: u64) -> RunFacts {
    make_facts(step, 2, &[("w", &[700, 1000]), ("v", &[7])])
}

/// Copies the shard of `rank` at `step` into the store, with values that depend on the step.
fn write_copy(store: &MemoryStore, rank: u32, step: u64, sequence: u64) {
    let facts = make_two_rank_facts(step);
    let tensors: Vec<(TensorRole, &str, Vec<f32>)> = list_tensors(&facts)
        .into_iter()
        .map(|(role, name, count)| (role, name, compute_values(role, name, &facts, count)))
        .collect();
    let pieces: Vec<TensorPiece<'_>> = tensors
        .iter()
        .map(|(role, name, values)| {
            let half = values.len() / 2;
            let range = if rank == 0 { 0..half } else { half..values.len() };
            let start_element = range.start as u64;
            TensorPiece { name, role: *role, start_element, data: PieceElements::F32(&values[range]) }
        })
        .collect();
    let facts = (rank == 0).then(|| facts.clone());
    store.write_copy(make_id(step, sequence), rank, facts, &pieces, 2).expect("written");
}

/// Lists role, name and number of elements of each tensor of a save.
fn list_tensors(facts: &RunFacts) -> Vec<(TensorRole, &str, u64)> {
    let roles = [TensorRole::Weight, TensorRole::ExpAvg, TensorRole::ExpAvgSq];
    let count = |shape: &[u64]| shape.iter().product();
    roles
        .iter()
        .flat_map(|role| facts.model.weights.iter().map(|w| (*role, w.name.as_str(), count(&w.shape))))
        .collect()
}

/// Opens the checkpoint that consists of all ranks' memory copies of the state at `step`.
fn open_step(copies: &StoredMemoryCopies, step: u64) -> crate::Result<Checkpoint> {
    let mut chosen: Vec<&StoredMemoryCopy> = copies.complete.iter().filter(|c| c.id.step == step).collect();
    chosen.sort_by_key(|c| c.rank);
    let parse = |c: &&StoredMemoryCopy| parse_copy_description(&c.description, c.hash).expect("valid");
    let descriptions = chosen.iter().map(parse).collect();
    let shards = chosen.iter().map(|c| Some(c.shard.clone())).collect();
    open_memory_checkpoint(Path::new("memory"), descriptions, shards)
}

/// Reads every tensor of the checkpoint, and compares the values with those of the save.
fn assert_contains(checkpoint: &Checkpoint, step: u64) {
    let facts = make_two_rank_facts(step);
    assert_eq!(checkpoint.run_facts(), &facts);
    for (role, name, count) in list_tensors(&facts) {
        let mut out = vec![f32::NAN; count as usize];
        checkpoint.read_f32(name, role, 0..count, &mut out).expect("readable");
        assert_eq!(out, compute_values(role, name, &facts, count), "{role}/{name}");
    }
}

#[test]
fn copies_of_all_ranks_form_a_checkpoint_of_their_step() {
    let (store, _file) = make_store();
    for (step, sequence) in [(4, 0), (5, 1), (6, 2)] {
        (0..2).for_each(|rank| write_copy(&store, rank, step, sequence));
    }
    let copies = store.list_copies().expect("listed");
    assert!(copies.incomplete.is_empty());
    let mut ids: Vec<_> = copies.complete.iter().map(|c| (c.rank, c.id.step)).collect();
    ids.sort_unstable();
    assert_eq!(ids, [(0, 5), (0, 6), (1, 5), (1, 6)], "each rank has two regions");
    assert_contains(&open_step(&copies, 5).expect("opened"), 5);
    assert_contains(&open_step(&copies, 6).expect("opened"), 6);
}

#[test]
fn a_copy_that_was_cut_off_leaves_the_previous_one_whole() {
    let (store, _file) = make_store();
    (0..2).for_each(|rank| write_copy(&store, rank, 4, 0));
    (0..2).for_each(|rank| write_copy(&store, rank, 5, 1));
    store.invalidate_copy_image(1, 2).expect("begun");
    store.write_copy_image(1, 2, COPY_HEADER_BYTES, &[7; 100]).expect("written");
    let copies = store.list_copies().expect("listed");
    assert_eq!(copies.incomplete, [1]);
    assert!(copies.complete.iter().all(|c| (c.rank, c.id.step) != (1, 4)));
    assert_contains(&open_step(&copies, 5).expect("opened"), 5);
}

#[test]
fn every_damaged_part_of_a_copy_is_detected() {
    let (store, file) = make_store();
    (0..2).for_each(|rank| write_copy(&store, rank, 4, 0));
    let region = 2 * REGION;
    let bytes = store.copy_image_size_in_bytes(1, 0).expect("complete");
    // Bytes 96 to 4095 of the header are unused.
    let offsets = [0, 15, 16, 31, 40, 95, COPY_HEADER_BYTES, bytes / 2, bytes - 2000, bytes - 1];
    for offset in offsets {
        let mut byte = [0];
        file.read_exact_at(&mut byte, region + offset).expect("read");
        file.write_all_at(&[byte[0] ^ 1], region + offset).expect("damaged");
        let copies = store.list_copies().expect("listed");
        if copies.incomplete.is_empty() {
            let checkpoint = open_step(&copies, 4).expect("opened");
            let count = 700 * 1000;
            let read = [TensorRole::Weight, TensorRole::ExpAvg, TensorRole::ExpAvgSq]
                .map(|role| checkpoint.read_f32("w", role, 0..count, &mut vec![0.0; count as usize]));
            let damaged = read.iter().any(|r| matches!(r, Err(CkptError::Damaged { .. })));
            assert!(damaged, "offset {offset}: {read:?}");
        } else {
            assert_eq!(copies.incomplete, [1], "offset {offset}");
        }
        file.write_all_at(&byte, region + offset).expect("restored");
    }
    assert_contains(&open_step(&store.list_copies().expect("listed"), 4).expect("opened"), 4);
}

#[test]
fn copies_of_ranks_that_do_not_fit_together_are_no_checkpoint() {
    let (store, _file) = make_store();
    write_copy(&store, 1, 4, 0);
    let copies = store.list_copies().expect("listed");
    assert!(matches!(open_step(&copies, 4), Err(CkptError::Damaged { .. })), "no facts, no rank 0");
    let copy = &copies.complete[0];
    let changed = [&copy.description[..], b" "].concat();
    assert!(parse_copy_description(&changed, copy.hash).is_err());
}

#[test]
fn an_image_that_another_host_receives_is_the_same_copy() {
    let (store, _file) = make_store();
    let (peer, _peer_file) = make_store();
    (0..2).for_each(|rank| write_copy(&store, rank, 4, 0));
    for rank in 0..2 {
        let bytes = store.copy_image_size_in_bytes(rank, 0).expect("complete") as usize;
        let mut image = vec![0; bytes];
        store.read_copy_image(rank, 0, 0, &mut image).expect("read");
        let (head, rest) = image.split_at(COPY_HEADER_BYTES as usize);
        peer.invalidate_copy_image(rank, 0).expect("begun");
        peer.write_copy_image(rank, 0, COPY_HEADER_BYTES, rest).expect("written");
        assert_eq!(peer.list_copies().expect("listed").incomplete, [rank]);
        peer.write_copy_image(rank, 0, 0, head).expect("written");
    }
    let copies = peer.list_copies().expect("listed");
    assert_contains(&open_step(&copies, 4).expect("opened"), 4);
    assert!(peer.write_copy_image(0, 0, REGION - 1, &[0; 2]).is_err(), "beyond the region");
    assert!(peer.write_copy_image(u32::MAX, 0, 0, &[0]).is_err(), "beyond the last rank");
}

#[test]
fn freed_copies_use_no_memory() {
    let (store, file) = make_store();
    (0..2).for_each(|rank| write_copy(&store, rank, 4, 0));
    let before = file.metadata().expect("metadata").blocks();
    store.free_copies_except(|rank| rank == 0).expect("freed");
    let after = file.metadata().expect("metadata").blocks();
    assert!(after * 3 < before * 2, "{before} blocks before, {after} after");
    let ranks: Vec<u32> = store.list_copies().expect("listed").complete.iter().map(|c| c.rank).collect();
    assert_eq!(ranks, [0]);
}
