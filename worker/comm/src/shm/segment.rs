//! [`Segment`]: the shared memory of a group, with its layout, its mapping and typed access to its
//! parts.
//!
//! ```text
//! 0      header        identity (magic with layout version, world, staging), event count, abort
//! 4096   rank lines    128 bytes per rank: entered rounds, calls of the last two rounds, pid
//! …      tables        per rank and slot 2 × world words: numbers for the peers (lengths, counts)
//! …      staging       per rank 2 slots of `staging` bytes
//! …      tail          one unused page, whose last byte sizes the file
//! …      windows       shared windows in the order of their allocation, each followed by a tail
//! ```
//! All offsets follow from this rank's own `world` and `staging`. A number that a peer wrote is
//! never used as an offset. The file is sparse: pages take memory only after they are touched.
use super::ShmLimits;
use crate::{
    AbortReason, GroupError, Result, SharedMemoryError, abort_reason::FIXED_BYTES,
    shared_window::WindowMemory,
};
use nix::{errno::Errno, sys::stat::fstat};
use std::{
    num::NonZeroUsize,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst},
};

/// Bytes of the header for an encoded [`AbortReason`].
pub(super) const MAX_REASON_BYTES: usize = 512;

/// "launchS" and the layout version.
const MAGIC: u64 = u64::from_le_bytes(*b"launchS\x02");
const PAGE_BYTES: usize = 4096;
const RANK_LINE_BYTES: usize = 128;

/// The first page of the segment.
#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    world: AtomicU64,
    staging: AtomicU64,
    pad: [u64; 13],
    /// Counts the events that sleepers wait for; the futex on which they sleep.
    pub(super) event_count: AtomicU32,
    /// Ranks that sleep or are about to.
    pub(super) sleepers: AtomicU32,
    pad2: [u64; 15],
    /// 0: not aborted, 1: a process is writing the reason, 2: aborted.
    pub(super) abort_state: AtomicU32,
    pub(super) reason_len: AtomicU32,
    pub(super) reason: [AtomicU8; MAX_REASON_BYTES],
}

const _: () = assert!(size_of::<Header>() <= PAGE_BYTES);
const _: () = assert!(MAX_REASON_BYTES > FIXED_BYTES);

/// What one rank publishes to all others. Only that rank writes it.
#[repr(C, align(128))]
pub(super) struct RankLine {
    /// The last round that this rank has entered. It has then finished reading all earlier rounds.
    pub(super) entered_round: AtomicU64,
    /// The call that round `n` belongs to, at index `n % 2`.
    pub(super) call: [[AtomicU64; 3]; 2],
    /// Process id, or 0 before the rank has joined.
    pub(super) joined_pid: AtomicU32,
    /// Not 0 after the rank has left the group in order.
    pub(super) has_left: AtomicU32,
    /// The processor on which this rank entered its last round.
    pub(super) cpu: AtomicU32,
}

const _: () = assert!(size_of::<RankLine>() == RANK_LINE_BYTES);

/// The offsets of all parts, which follow from `world` and `staging` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentLayout {
    pub(super) world: usize,
    /// Bytes of one slot.
    pub(super) staging_bytes: usize,
    tables: usize,
    slots: usize,
    size: usize,
}

impl SegmentLayout {
    /// Computes the offsets. `staging` is rounded up to whole pages. Fails if a size is out of
    /// bounds.
    pub(super) fn new(world: usize, staging: usize) -> std::result::Result<Self, GroupError> {
        if !(1..=crate::MAX_WORLD).contains(&world) {
            return Err(GroupError::WorldSize { world, limit: crate::MAX_WORLD });
        }
        // a slot holds at least one cache line for each peer
        let (min, max) = (PAGE_BYTES.max(64 * world), 1 << 30);
        if !(min..=max).contains(&staging) {
            return Err(GroupError::StagingSize { bytes: staging, world, min, max });
        }
        let staging = staging.next_multiple_of(PAGE_BYTES);
        let tables = PAGE_BYTES + (world * RANK_LINE_BYTES).next_multiple_of(PAGE_BYTES);
        let slots = tables + (world * 2 * 2 * world * size_of::<u64>()).next_multiple_of(PAGE_BYTES);
        let size = slots + world * 2 * staging + PAGE_BYTES; // at most 2 TiB of address space
        Ok(SegmentLayout { world, staging_bytes: staging, tables, slots, size })
    }
}

/// A shared mapping of a part of a file.
struct FileMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is accessed through atomics, or through slices by the rules of
// `Segment::slot`.
unsafe impl Send for FileMapping {}
// SAFETY: see `Send`.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps `len` bytes from `position` on, a multiple of the page size.
    fn new(fd: BorrowedFd<'_>, position: usize, len: usize) -> Result<Self> {
        use nix::sys::mman::{MapFlags, ProtFlags, mmap};
        let failed = |errno| SharedMemoryError::Os { operation: "map", bytes: len, errno };
        let size = NonZeroUsize::new(len).ok_or(failed(Errno::EINVAL))?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel selects.
        let base = unsafe { mmap(None, size, prot, flags, fd, position as i64) }.map_err(failed)?;
        Ok(FileMapping { base: base.cast(), len })
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; no reference to it is left.
        let _ = unsafe { nix::sys::mman::munmap(self.base.cast(), self.len) };
    }
}

/// The mapping of a shared window, which is stored after the segment.
pub(super) struct WindowMapping(FileMapping);

impl WindowMapping {
    /// Maps `len` bytes from `position` on, a multiple of the page size, followed by a tail page
    /// that sizes the file.
    pub(super) fn open(fd: BorrowedFd<'_>, position: usize, len: usize) -> Result<Self> {
        ensure_file_size(fd, position + len.next_multiple_of(PAGE_BYTES) + PAGE_BYTES)?;
        Ok(WindowMapping(FileMapping::new(fd, position, len.max(1))?))
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.0.base.cast()
    }
}

impl WindowMemory for WindowMapping {
    fn release_pages(&self, bytes: Range<usize>) {
        let from = bytes.start.next_multiple_of(PAGE_BYTES);
        let to = bytes.end.min(self.0.len) / PAGE_BYTES * PAGE_BYTES;
        if from < to {
            // SAFETY: whole pages inside the mapping. The mapping is shared: the contents stay in
            // the file, and the next access maps them again. If the call fails, the pages still
            // count as memory of this process, which changes no result.
            let _ = unsafe {
                libc::madvise(self.0.base.add(from).as_ptr().cast(), to - from, libc::MADV_DONTNEED)
            };
        }
    }
}

/// The mapping of the header alone, which is enough to abort a group.
pub(super) struct HeaderMapping(FileMapping);

impl HeaderMapping {
    /// Maps the header of a segment, which may not have its full size yet.
    pub(super) fn open(fd: BorrowedFd<'_>) -> Result<Self> {
        ensure_file_size(fd, PAGE_BYTES)?;
        let mapping = HeaderMapping(FileMapping::new(fd, 0, PAGE_BYTES)?);
        set_or_compare(&mapping.header().magic, MAGIC, "magic and layout version")?;
        Ok(mapping)
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: a page-aligned page of shared memory; Header consists of atomics, all bits are
        // valid.
        unsafe { self.0.base.cast().as_ref() }
    }
}

/// The mapping of the whole segment.
pub(super) struct Segment {
    mapping: FileMapping,
    pub(super) layout: SegmentLayout,
}

impl Segment {
    /// Sizes the file unless a peer has done so, maps it, and checks that the peers have the same
    /// layout version, world and staging.
    pub(super) fn open(fd: BorrowedFd<'_>, world: usize, limits: &ShmLimits) -> Result<Self> {
        let layout = SegmentLayout::new(world, limits.staging_bytes)?;
        ensure_file_size(fd, layout.size)?;
        // A file that shrinks would end ranks with SIGBUS. Sealing fails if the creator did not
        // allow seals; then the ranks must trust each other.
        let _ = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_ADD_SEALS(nix::fcntl::SealFlag::F_SEAL_SHRINK));
        let segment = Segment { mapping: FileMapping::new(fd, 0, layout.size)?, layout };
        set_or_compare(&segment.header().magic, MAGIC, "magic and layout version")?;
        // From here on this is the segment of a group: a rank that cannot join aborts the group, so
        // that no peer waits for it.
        segment
            .check_identity(fd)
            .inspect_err(|e| segment.header().abort(&AbortReason::requested(&e.to_string())))?;
        Ok(segment)
    }

    fn check_identity(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let SegmentLayout { world, staging_bytes, size, .. } = self.layout;
        set_or_compare(&self.header().world, world as u64, "world size")?;
        set_or_compare(&self.header().staging, staging_bytes as u64, "staging size")?;
        match file_size(fd)? {
            found if found == size => Ok(()),
            found => Err(SharedMemoryError::FileSize { found, expected: size }.into()),
        }
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a page for the header; it consists of atomics, all bits
        // are valid.
        unsafe { self.mapping.base.cast().as_ref() }
    }

    /// What `rank` publishes to the others.
    pub(super) fn rank_line(&self, rank: usize) -> &RankLine {
        assert!(rank < self.layout.world);
        // SAFETY: inside the rank lines, aligned to 128, made of atomics.
        unsafe { self.mapping.base.add(PAGE_BYTES + rank * RANK_LINE_BYTES).cast().as_ref() }
    }

    /// The `2 × world` words of `rank` for the rounds of this slot.
    pub(super) fn table(&self, rank: usize, slot: usize) -> &[AtomicU64] {
        let (world, words) = (self.layout.world, 2 * self.layout.world);
        assert!(rank < world && slot < 2);
        let offset = self.layout.tables + (rank * 2 + slot) * words * size_of::<u64>();
        // SAFETY: inside the tables, aligned to 8 (they begin at a page), made of atomics.
        unsafe { std::slice::from_raw_parts(self.mapping.base.add(offset).cast().as_ptr(), words) }
    }

    /// The position in the file of a new shared window of `bytes` bytes, if `window_bytes` are in
    /// use after the segment, and how many are in use then.
    pub(super) fn window_position(&self, window_bytes: usize, bytes: usize) -> Result<(usize, usize)> {
        let padded = bytes.checked_next_multiple_of(PAGE_BYTES);
        let end = padded.and_then(|n| n.checked_add(PAGE_BYTES + window_bytes));
        let position = self.layout.size.next_multiple_of(PAGE_BYTES) + window_bytes;
        match end.filter(|&n| n <= isize::MAX as usize - position) {
            Some(end) => Ok((position, end)),
            None => Err(SharedMemoryError::WindowTooLarge { bytes }.into()),
        }
    }

    fn slot_address(&self, rank: usize, slot: usize, start: usize, len: usize) -> NonNull<u8> {
        let SegmentLayout { world, staging_bytes, slots, .. } = self.layout;
        assert!(rank < world && slot < 2 && start <= staging_bytes && len <= staging_bytes - start);
        // SAFETY: inside the mapping, by the assertion.
        unsafe { self.mapping.base.add(slots + (rank * 2 + slot) * staging_bytes + start) }
    }

    /// `len` bytes of a slot from byte `start`, to read.
    ///
    /// # Safety
    /// Allowed from the round in which `rank` published this slot until this rank enters its next
    /// round. The peer does not write the slot in between. A peer that breaks this rule can corrupt
    /// numbers, but no addresses.
    pub(super) unsafe fn slot(&self, rank: usize, slot: usize, start: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds; all bytes are valid.
        unsafe { std::slice::from_raw_parts(self.slot_address(rank, slot, start, len).as_ptr(), len) }
    }

    /// `len` elements of a slot from element `start`, to read.
    ///
    /// # Safety
    /// See [`Segment::slot`].
    pub(super) unsafe fn slot_f32(&self, rank: usize, slot: usize, start: usize, len: usize) -> &[f32] {
        // SAFETY: the caller's promise.
        bytemuck::cast_slice(unsafe { self.slot(rank, slot, start * 4, len * 4) })
    }

    /// `len` bytes of a slot of this rank from byte `start`, to write.
    ///
    /// # Safety
    /// `rank` is the caller's, the slot is that of its next round, and no other slice of the range
    /// is in use.
    #[allow(clippy::mut_from_ref)] // shared memory: the protocol guarantees exclusive access
    pub(super) unsafe fn slot_mut(&self, rank: usize, slot: usize, start: usize, len: usize) -> &mut [u8] {
        // SAFETY: in bounds; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.slot_address(rank, slot, start, len).as_ptr(), len) }
    }

    /// `len` elements of a slot of this rank from element `start`, to write.
    ///
    /// # Safety
    /// See [`Segment::slot_mut`].
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slot_f32_mut(
        &self,
        rank: usize,
        slot: usize,
        start: usize,
        len: usize,
    ) -> &mut [f32] {
        // SAFETY: the caller's promise.
        bytemuck::cast_slice_mut(unsafe { self.slot_mut(rank, slot, start * 4, len * 4) })
    }
}

/// Makes the file at least `size` bytes long by writing its last byte, which is not used.
///
/// In contrast to truncation this cannot shrink the file of a peer with another size. The file
/// stays sparse.
fn ensure_file_size(fd: BorrowedFd<'_>, size: usize) -> Result<()> {
    if file_size(fd)? >= size {
        return Ok(());
    }
    let failed = |errno| SharedMemoryError::Os { operation: "resize", bytes: size, errno };
    nix::sys::uio::pwrite(fd.as_fd(), &[0], (size - 1) as i64).map_err(failed)?;
    Ok(())
}

fn file_size(fd: BorrowedFd<'_>) -> Result<usize> {
    let failed = |errno| SharedMemoryError::Os { operation: "inspect", bytes: 0, errno };
    let stat = fstat(fd).map_err(failed)?;
    Ok(usize::try_from(stat.st_size).map_err(|_| failed(Errno::EINVAL))?)
}

/// Stores `value` in a word of the header if no rank has set it; fails if a peer has set another
/// one.
fn set_or_compare(
    word: &AtomicU64,
    value: u64,
    field: &'static str,
) -> std::result::Result<(), SharedMemoryError> {
    match word.compare_exchange(0, value, SeqCst, SeqCst) {
        Err(found) if found != value => {
            Err(SharedMemoryError::HeaderMismatch { field, found, expected: value })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_layout_do_not_overlap() {
        for world in [1, 2, 3, 8, 16, 100, crate::MAX_WORLD] {
            let l = SegmentLayout::new(world, 70_000).unwrap();
            assert_eq!(l.staging_bytes % PAGE_BYTES, 0);
            assert!(PAGE_BYTES + world * RANK_LINE_BYTES <= l.tables);
            assert!(l.tables + world * 2 * 2 * world * 8 <= l.slots);
            assert_eq!(l.slots + world * 2 * l.staging_bytes + PAGE_BYTES, l.size);
        }
    }

    #[test]
    fn sizes_out_of_bounds_are_rejected() {
        for (world, staging) in [(0, 8192), (2000, 8192), (2, 100), (1024, 4096), (2, usize::MAX)] {
            assert!(SegmentLayout::new(world, staging).is_err(), "{world} {staging}");
        }
    }
}
