//! [`Segment`]: the shared memory through which the processes of a group communicate, with its
//! layout, mapping and typed access.
//!
//! ```text
//! 0      header        identity (magic with layout version, world, staging), event count, abort
//! 4096   rank status   128 bytes per rank: entered rounds, calls of the last two rounds, pid
//! …      tables        per rank and slot 2 × world words: numbers for the peers (lengths, counts)
//! …      staging       per rank 2 slots of `staging` bytes
//! …      tail          one unused page, whose last byte sizes the file
//! …      windows       shared windows in the order of their allocation, each followed by a tail
//! ```
//! All offsets follow from this rank's own `world` and `staging`. A number that a peer wrote is
//! never used as an offset. The file is sparse: pages take memory only after they are touched.
use super::limits::ShmLimits;
use crate::{
    AbortReason, GroupError, Result, SharedMemoryError, abort_reason::FIXED_FIELDS_BYTES,
    shared_window::WindowMemory,
};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::stat::fstat,
};
use std::{
    num::NonZeroUsize,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst},
};

/// Number of bytes that the first page of a group's shared memory reserves for the encoded reason
/// of an abort ([`AbortReason`]).
pub(super) const MAX_REASON_BYTES: usize = 512;

/// The first word of a group's shared memory: "launchS" and the version of the layout.
const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"launchS\x02");
const PAGE_BYTES: usize = 4096;
const RANK_STATUS_BYTES: usize = 128;

/// First page of a group's shared memory: number of ranks, sizes, a futex that wakes sleeping
/// ranks, and the reason if the group was aborted.
#[repr(C)]
pub(super) struct SegmentHeader {
    magic: AtomicU64,
    world: AtomicU64,
    staging: AtomicU64,
    pad: [u64; 13],
    /// A counter that is incremented to wake sleeping ranks. Ranks sleep on this counter as a
    /// futex.
    pub(super) event_count: AtomicU32,
    /// The number of ranks that sleep or are about to.
    pub(super) sleepers: AtomicU32,
    pad2: [u64; 15],
    /// The state of an abort. 0: the group is not aborted. 1: a process is writing the reason. 2:
    /// the group is aborted.
    pub(super) abort_state: AtomicU32,
    pub(super) reason_len: AtomicU32,
    pub(super) reason: [AtomicU8; MAX_REASON_BYTES],
}

const _: () = assert!(size_of::<SegmentHeader>() <= PAGE_BYTES);
const _: () = assert!(MAX_REASON_BYTES > FIXED_FIELDS_BYTES);

/// Status that one rank publishes in the group's shared memory: its process id, its latest calls of
/// collectives, and whether it has left.
#[repr(C, align(128))]
pub(super) struct RankStatus {
    /// Number of the last round that this rank has entered. The rank has finished reading all
    /// earlier rounds.
    pub(super) entered_round: AtomicU64,
    /// The encoded calls of this rank's last two rounds. The call of round `n` is at index `n % 2`.
    pub(super) call: [[AtomicU64; 3]; 2],
    /// The process id of the rank; 0 until the rank has joined.
    pub(super) joined_pid: AtomicU32,
    /// Not 0 once the rank has left the group cleanly.
    pub(super) has_left: AtomicU32,
    /// The processor on which this rank entered its last round.
    pub(super) cpu: AtomicU32,
}

const _: () = assert!(size_of::<RankStatus>() == RANK_STATUS_BYTES);

/// Byte offsets of the areas in a group's shared memory: the statuses of the ranks, the tables of
/// numbers that ranks publish, and their data buffers. They follow from the number of ranks and the
/// staging size alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentLayout {
    pub(super) world: usize,
    /// Size in bytes of one staging slot, a buffer through which a rank passes data to its peers.
    pub(super) staging_bytes: usize,
    tables: usize,
    slots: usize,
    size: usize,
}

impl SegmentLayout {
    /// Computes the byte offsets of the areas in the shared memory of a group of `world` ranks.
    /// `staging` is rounded up to whole pages. Fails if `world` or `staging` is out of range.
    pub(super) fn new(world: usize, staging: usize) -> std::result::Result<Self, GroupError> {
        if !(1..=crate::MAX_WORLD_SIZE).contains(&world) {
            return Err(GroupError::WorldSize { world, limit: crate::MAX_WORLD_SIZE });
        }
        // a slot holds at least one cache line for each peer
        let (min, max) = (PAGE_BYTES.max(64 * world), 1 << 30);
        if !(min..=max).contains(&staging) {
            return Err(GroupError::StagingSize { bytes: staging, world, min, max });
        }
        let staging = staging.next_multiple_of(PAGE_BYTES);
        let tables = PAGE_BYTES + (world * RANK_STATUS_BYTES).next_multiple_of(PAGE_BYTES);
        let slots = tables + (world * 2 * 2 * world * size_of::<u64>()).next_multiple_of(PAGE_BYTES);
        let size = slots + world * 2 * staging + PAGE_BYTES; // at most 2 TiB of address space
        Ok(SegmentLayout { world, staging_bytes: staging, tables, slots, size })
    }
}

/// Memory mapping of a part of a file, through which this process shares memory with other
/// processes that map the file. Dropping it unmaps the memory.
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
    /// Maps `len` bytes of the file into memory, starting at byte `position`, for reading and
    /// writing. `position` must be a multiple of the page size.
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

/// Memory mapping of a shared window (memory that all ranks of a group read and write), in the file
/// with the group's other shared memory.
pub(super) struct WindowMapping(FileMapping);

impl WindowMapping {
    /// Maps the shared window (memory that all ranks of a group share) of `len` bytes that begins
    /// at byte `position` of the group's memory file. `position` must be a multiple of the page
    /// size. Enlarges the file so that it contains the window and one unused page.
    pub(super) fn open(fd: BorrowedFd<'_>, position: usize, len: usize) -> Result<Self> {
        grow_file_to(fd, position + len.next_multiple_of(PAGE_BYTES) + PAGE_BYTES)?;
        Ok(WindowMapping(FileMapping::new(fd, position, len.max(1))?))
    }

    /// Returns the address of the first byte of the mapped shared window.
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

/// Memory mapping of the first page of a group's shared memory, through which any process with the
/// file can abort the group.
pub(super) struct HeaderMapping(FileMapping);

impl HeaderMapping {
    /// Maps the first page of a group's shared memory, even before a rank has given the file its
    /// full size. Fails if the file belongs to another program.
    pub(super) fn open(fd: BorrowedFd<'_>) -> Result<Self> {
        check_owner(fd)?;
        grow_file_to(fd, PAGE_BYTES)?;
        seal_against_shrinking(fd)?;
        let mapping = HeaderMapping(FileMapping::new(fd, 0, PAGE_BYTES)?);
        set_or_compare_word(&mapping.header().magic, SEGMENT_MAGIC, "magic and layout version")?;
        Ok(mapping)
    }

    /// Returns the first page (header) of the group's shared memory.
    pub(super) fn header(&self) -> &SegmentHeader {
        // SAFETY: a page-aligned page of shared memory; SegmentHeader consists of atomics, all bits
        // are valid.
        unsafe { self.0.base.cast().as_ref() }
    }
}

/// Memory mapping of the whole shared memory of a group of processes, with the offsets of the areas
/// in it.
pub(super) struct Segment {
    mapping: FileMapping,
    pub(super) layout: SegmentLayout,
}

impl Segment {
    /// Maps the whole shared memory of a group of `world` ranks, and enlarges the file first if
    /// necessary. Fails if the peers have another layout version, world size or staging size. A
    /// different world or staging size also aborts the group.
    pub(super) fn open(fd: BorrowedFd<'_>, world: usize, limits: &ShmLimits) -> Result<Self> {
        let layout = SegmentLayout::new(world, limits.staging_bytes)?;
        check_owner(fd)?;
        grow_file_to(fd, layout.size)?;
        seal_against_shrinking(fd)?;
        let segment = Segment { mapping: FileMapping::new(fd, 0, layout.size)?, layout };
        set_or_compare_word(&segment.header().magic, SEGMENT_MAGIC, "magic and layout version")?;
        // From here on this is the segment of a group: a rank that cannot join aborts the group, so
        // that no peer waits for it.
        segment
            .check_group_identity(fd)
            .inspect_err(|e| segment.header().abort(&AbortReason::from_request(&e.to_string())))?;
        Ok(segment)
    }

    /// Fails if this rank and its peers have different world sizes, staging buffer sizes or sizes
    /// of the shared memory file. The first rank stores the values.
    fn check_group_identity(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let SegmentLayout { world, staging_bytes, size, .. } = self.layout;
        set_or_compare_word(&self.header().world, world as u64, "world size")?;
        set_or_compare_word(&self.header().staging, staging_bytes as u64, "staging size")?;
        match read_file_size(fd)? {
            found if found == size => Ok(()),
            found => Err(SharedMemoryError::FileSize { found, expected: size }.into()),
        }
    }

    /// Returns the first page (header) of the group's shared memory.
    pub(super) fn header(&self) -> &SegmentHeader {
        // SAFETY: the mapping begins with a page for the header; it consists of atomics, all bits
        // are valid.
        unsafe { self.mapping.base.cast().as_ref() }
    }

    /// Returns the status of `rank` in shared memory: its process id, its latest calls of
    /// collectives, and whether it has left.
    pub(super) fn rank_status(&self, rank: usize) -> &RankStatus {
        assert!(rank < self.layout.world);
        // SAFETY: inside the rank statuses, aligned to 128, made of atomics.
        unsafe { self.mapping.base.add(PAGE_BYTES + rank * RANK_STATUS_BYTES).cast().as_ref() }
    }

    /// Returns the table of numbers, such as lengths, that `rank` publishes in shared memory for
    /// data exchanges with its data buffer number `slot`. The table has `2 × world` words.
    pub(super) fn number_table(&self, rank: usize, slot: usize) -> &[AtomicU64] {
        let (world, words) = (self.layout.world, 2 * self.layout.world);
        assert!(rank < world && slot < 2);
        let offset = self.layout.tables + (rank * 2 + slot) * words * size_of::<u64>();
        // SAFETY: inside the tables, aligned to 8 (they begin at a page), made of atomics.
        unsafe { std::slice::from_raw_parts(self.mapping.base.add(offset).cast().as_ptr(), words) }
    }

    /// Returns the byte position of a new shared window of `bytes` bytes in the group's file, and
    /// the total size in bytes of all windows including the new one. `window_bytes` is the space
    /// that earlier windows take after the segment.
    pub(super) fn compute_window_position(
        &self,
        window_bytes: usize,
        bytes: usize,
    ) -> Result<(usize, usize)> {
        let padded = bytes.checked_next_multiple_of(PAGE_BYTES);
        let end = padded.and_then(|n| n.checked_add(PAGE_BYTES + window_bytes));
        let position = self.layout.size.next_multiple_of(PAGE_BYTES) + window_bytes;
        match end.filter(|&n| n <= isize::MAX as usize - position) {
            Some(end) => Ok((position, end)),
            None => Err(SharedMemoryError::WindowTooLarge { bytes }.into()),
        }
    }

    /// Returns the address of the bytes `start..start + len` in the shared-memory data buffer
    /// number `slot` of rank `rank`. Panics if the slot does not contain `len` bytes from there on.
    fn locate_slot_bytes(&self, rank: usize, slot: usize, start: usize, len: usize) -> NonNull<u8> {
        let SegmentLayout { world, staging_bytes, slots, .. } = self.layout;
        assert!(rank < world && slot < 2 && start <= staging_bytes && len <= staging_bytes - start);
        // SAFETY: inside the mapping, by the assertion.
        unsafe { self.mapping.base.add(slots + (rank * 2 + slot) * staging_bytes + start) }
    }

    /// Returns the bytes `start..start + len` of the buffer number `slot` in which `rank` publishes
    /// data in shared memory.
    ///
    /// # Safety
    ///
    /// The caller must use the returned bytes only within the round for which `rank` filled this
    /// slot: after `rank` has entered that round, and before this rank enters its next round. In
    /// between, `rank` does not write the slot. A peer that breaks this rule can corrupt numbers,
    /// but no addresses.
    pub(super) unsafe fn slot_bytes(&self, rank: usize, slot: usize, start: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds; all bytes are valid.
        unsafe { std::slice::from_raw_parts(self.locate_slot_bytes(rank, slot, start, len).as_ptr(), len) }
    }

    /// Returns the `f32` elements `start..start + len` of the buffer number `slot` in which `rank`
    /// publishes data in shared memory.
    ///
    /// # Safety
    ///
    /// The caller must obey the rules of [`Segment::slot_bytes`].
    pub(super) unsafe fn slot_f32(&self, rank: usize, slot: usize, start: usize, len: usize) -> &[f32] {
        // SAFETY: the caller's promise.
        bytemuck::cast_slice(unsafe { self.slot_bytes(rank, slot, start * 4, len * 4) })
    }

    /// Returns the bytes `start..start + len` of this rank's buffer number `slot` in shared memory,
    /// for writing.
    ///
    /// # Safety
    ///
    /// `rank` must be this rank, and `slot` the slot of its next round. The caller must not use the
    /// returned bytes after this rank has entered that round. While they are in use, no other slice
    /// of the same bytes may be in use.
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees exclusive access to the shared memory")]
    pub(super) unsafe fn slot_bytes_mut(
        &self,
        rank: usize,
        slot: usize,
        start: usize,
        len: usize,
    ) -> &mut [u8] {
        // SAFETY: in bounds; exclusive by the caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(self.locate_slot_bytes(rank, slot, start, len).as_ptr(), len)
        }
    }

    /// Returns the `f32` elements `start..start + len` of this rank's buffer number `slot` in
    /// shared memory, for writing.
    ///
    /// # Safety
    ///
    /// The caller must obey the rules of [`Segment::slot_bytes_mut`].
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees exclusive access to the shared memory")]
    pub(super) unsafe fn slot_f32_mut(
        &self,
        rank: usize,
        slot: usize,
        start: usize,
        len: usize,
    ) -> &mut [f32] {
        // SAFETY: the caller's promise.
        bytemuck::cast_slice_mut(unsafe { self.slot_bytes_mut(rank, slot, start * 4, len * 4) })
    }
}

/// Enlarges the group's shared memory file to at least `size` bytes by writing a zero at byte `size
/// - 1`, which no rank uses.
///
/// In contrast to `ftruncate`, the write cannot shrink the file of a peer with another size. The
/// file stays sparse.
fn grow_file_to(fd: BorrowedFd<'_>, size: usize) -> Result<()> {
    if read_file_size(fd)? >= size {
        return Ok(());
    }
    let failed = |errno| SharedMemoryError::Os { operation: "resize", bytes: size, errno };
    nix::sys::uio::pwrite(fd.as_fd(), &[0], (size - 1) as i64).map_err(failed)?;
    Ok(())
}

/// Prevents every process from shrinking the group's memory file, which would end the ranks with
/// SIGBUS. The file can still grow.
fn seal_against_shrinking(fd: BorrowedFd<'_>) -> Result<()> {
    let failed = |errno| SharedMemoryError::Os { operation: "seal", bytes: 0, errno };
    fcntl(fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).map_err(failed)?;
    Ok(())
}

/// Fails if the group's memory file belongs to another user, who could change it at any time.
fn check_owner(fd: BorrowedFd<'_>) -> Result<()> {
    let failed = |errno| SharedMemoryError::Os { operation: "inspect", bytes: 0, errno };
    let (uid, expected) = (fstat(fd).map_err(failed)?.st_uid, nix::unistd::geteuid().as_raw());
    if uid == expected { Ok(()) } else { Err(SharedMemoryError::OtherOwner { uid, expected }.into()) }
}

/// Reads the size of the group's memory file in bytes.
fn read_file_size(fd: BorrowedFd<'_>) -> Result<usize> {
    let failed = |errno| SharedMemoryError::Os { operation: "inspect", bytes: 0, errno };
    let stat = fstat(fd).map_err(failed)?;
    Ok(usize::try_from(stat.st_size).map_err(|_| failed(Errno::EINVAL))?)
}

/// Stores `value` in an empty word of the shared memory's first page, or fails if a peer has stored
/// another value there. The error names `field`.
fn set_or_compare_word(
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
        for world in [1, 2, 3, 8, 16, 100, crate::MAX_WORLD_SIZE] {
            let l = SegmentLayout::new(world, 70_000).unwrap();
            assert_eq!(l.staging_bytes % PAGE_BYTES, 0);
            assert!(PAGE_BYTES + world * RANK_STATUS_BYTES <= l.tables);
            assert!(l.tables + world * 2 * 2 * world * 8 <= l.slots);
            assert_eq!(l.slots + world * 2 * l.staging_bytes + PAGE_BYTES, l.size);
        }
    }

    /// Checks that the shared memory file of a group cannot be shrunk, which would end the ranks
    /// with SIGBUS.
    #[test]
    fn the_memory_of_a_group_cannot_shrink() {
        use nix::sys::memfd::{MFdFlags, memfd_create};
        let limits = ShmLimits { staging_bytes: 8192, ..ShmLimits::default() };
        let file = memfd_create(c"comm-test", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        let segment = Segment::open(file.as_fd(), 2, &limits).unwrap();
        let same_file = std::fs::File::options()
            .write(true)
            .open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)))
            .unwrap();
        for size in [0, segment.layout.size as u64 - 1] {
            let error = same_file.set_len(size).expect_err("sealed");
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        }
        segment.header().event_count.store(1, SeqCst);
        let unsealable = memfd_create(c"comm-test", MFdFlags::empty()).unwrap();
        let error = Segment::open(unsealable.as_fd(), 2, &limits).err().expect("an error");
        assert!(error.to_string().contains("seal"), "{error}");
    }

    #[test]
    fn sizes_out_of_bounds_are_rejected() {
        for (world, staging) in [(0, 8192), (2000, 8192), (2, 100), (1024, 4096), (2, usize::MAX)] {
            assert!(SegmentLayout::new(world, staging).is_err(), "{world} {staging}");
        }
    }
}
