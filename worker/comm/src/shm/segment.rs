//! The shared memory of a group: its layout, how it is sized and mapped, and the typed access to its parts.
//!
//! ```text
//! 0      header        identity (magic and layout version, world, staging), bell, poison and its reason
//! 4096   rank lines    128 bytes per rank: rounds posted, the call of the last two rounds, pid, left
//! …      tables        per rank and slot 2 × world words: numbers that peers need (lengths, counts)
//! …      staging       per rank 2 slots of `staging` bytes
//! …      tail          one page, never used but for its last byte, which sizes the file
//! …      common        memory that all ranks have in common, each followed by a tail, in the order of the calls
//! ```
//! All offsets come from this rank's own `world` and `staging`; nothing that a peer wrote is ever used as one. The file is
//! sparse: pages cost memory only when they are touched.
use super::Limits;
use crate::{CommError, Result, shared_window::Pages};
use nix::sys::stat::fstat;
use std::{
    num::NonZeroUsize,
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst},
};

/// Bytes of an abort reason that are kept.
pub(super) const REASON: usize = 512;

/// "launchS" and the layout version.
const MAGIC: u64 = u64::from_le_bytes(*b"launchS\x01");
const PAGE: usize = 4096;
const LINE: usize = 128;

/// The first page of the segment.
#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    world: AtomicU64,
    staging: AtomicU64,
    pad: [u64; 13],
    /// Counts the events that sleepers wait for; the futex they sleep on.
    pub(super) bell: AtomicU32,
    /// How many ranks sleep or are about to.
    pub(super) sleepers: AtomicU32,
    pad2: [u64; 15],
    /// 0: healthy, 1: somebody is writing the reason, 2: aborted.
    pub(super) poison: AtomicU32,
    pub(super) reason_len: AtomicU32,
    pub(super) reason: [AtomicU8; REASON],
}

const _: () = assert!(size_of::<Header>() <= PAGE);

/// What one rank tells all others; only that rank writes it.
#[repr(C, align(128))]
pub(super) struct Line {
    /// Rounds that this rank has entered. Entering a round says: whatever earlier rounds showed has been read.
    pub(super) posted: AtomicU64,
    /// The call that round `n` belongs to, at `n % 2`.
    pub(super) call: [[AtomicU64; 3]; 2],
    /// Process id, or 0 while the rank hasn't joined.
    pub(super) joined: AtomicU32,
    /// Not 0: the rank has left the group in good order.
    pub(super) left: AtomicU32,
    /// The processor on which this rank entered its last round.
    pub(super) cpu: AtomicU32,
}

const _: () = assert!(size_of::<Line>() == LINE);

/// Where everything lies, from world and staging alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) world: usize,
    /// Bytes of one slot.
    pub(super) staging: usize,
    tables: usize,
    slots: usize,
    size: usize,
}

impl Layout {
    /// `staging` is rounded up to whole pages. Fails when the sizes are out of bounds.
    pub(super) fn new(world: usize, staging: usize) -> Result<Self> {
        if !(1..=crate::MAX_WORLD).contains(&world) {
            let most = crate::MAX_WORLD;
            return Err(CommError::Io(format!("a group has 1 to {most} ranks, not {world}")));
        }
        // room for a cache line to each peer
        let (least, most) = (PAGE.max(64 * world), 1 << 30);
        if !(least..=most).contains(&staging) {
            return Err(CommError::Io(format!(
                "staging of {staging} bytes: {least} to {most} are possible with {world} ranks"
            )));
        }
        let staging = staging.next_multiple_of(PAGE);
        let tables = PAGE + (world * LINE).next_multiple_of(PAGE);
        let slots = tables + (world * 2 * 2 * world * size_of::<u64>()).next_multiple_of(PAGE);
        let size = slots + world * 2 * staging + PAGE; // at most 2 TiB of address space
        Ok(Layout { world, staging, tables, slots, size })
    }
}

/// A shared mapping of the first bytes of a file.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: shared memory is reached through atomics, or through slices under the rules of `Segment::slot`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        Mapping::at(fd, 0, len)
    }

    /// `at`: a multiple of a page.
    fn at(fd: BorrowedFd<'_>, at: usize, len: usize) -> Result<Self> {
        use nix::sys::mman::{MapFlags, ProtFlags, mmap};
        let size = NonZeroUsize::new(len).ok_or_else(|| CommError::Io("empty shared memory".into()))?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(None, size, prot, flags, fd, at as i64) }
            .map_err(|e| CommError::Io(format!("can't map {len} bytes of shared memory: {e}")))?;
        Ok(Mapping { base: base.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; nothing refers to it any more.
        let _ = unsafe { nix::sys::mman::munmap(self.base.cast(), self.len) };
    }
}

/// Memory behind the segment that all ranks have in common.
pub(super) struct CommonMap(Mapping);

impl CommonMap {
    /// `len` bytes from `at` on, a multiple of a page, with a page behind them that sizes the file.
    pub(super) fn open(fd: BorrowedFd<'_>, at: usize, len: usize) -> Result<Self> {
        grow(fd, at + len.next_multiple_of(PAGE) + PAGE)?;
        Ok(CommonMap(Mapping::at(fd, at, len.max(1))?))
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.0.base.cast()
    }
}

impl Pages for CommonMap {
    fn let_go(&self, bytes: Range<usize>) {
        let (from, to) = (bytes.start.next_multiple_of(PAGE), bytes.end.min(self.0.len) / PAGE * PAGE);
        if from < to {
            // SAFETY: whole pages inside the mapping. They are shared: what is in them stays in the file, and the next access
            // maps them again. Should it fail, they go on to count as this process's memory, which changes no result.
            let _ = unsafe {
                libc::madvise(self.0.base.add(from).as_ptr().cast(), to - from, libc::MADV_DONTNEED)
            };
        }
    }
}

/// The mapped header alone: enough to abort a group.
pub(super) struct HeaderMap(Mapping);

impl HeaderMap {
    /// Maps the header of a segment that need not be sized yet.
    pub(super) fn open(fd: BorrowedFd<'_>) -> Result<Self> {
        grow(fd, PAGE)?;
        let map = HeaderMap(Mapping::new(fd, PAGE)?);
        agree(&map.header().magic, MAGIC, "magic and layout version")?;
        Ok(map)
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: a page-aligned page of shared memory; Header is made of atomics, any bits are valid.
        unsafe { self.0.base.cast().as_ref() }
    }
}

/// The whole mapped segment.
pub(super) struct Segment {
    map: Mapping,
    pub(super) layout: Layout,
}

impl Segment {
    /// Sizes the file unless a peer has done so, maps it, and agrees with the peers about version, world and staging.
    pub(super) fn open(fd: BorrowedFd<'_>, world: usize, limits: &Limits) -> Result<Self> {
        let layout = Layout::new(world, limits.staging)?;
        grow(fd, layout.size)?;
        // Nobody shrinks it: a rank could die of SIGBUS. Refused where the creator didn't allow seals; then it's trust.
        let _ = nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_ADD_SEALS(nix::fcntl::SealFlag::F_SEAL_SHRINK));
        let seg = Segment { map: Mapping::new(fd, layout.size)?, layout };
        agree(&seg.header().magic, MAGIC, "magic and layout version")?;
        // From here on it is a group's segment: a rank that can't take part ends the group, so nobody waits for it.
        seg.check(fd).inspect_err(|e| seg.header().abort(&e.to_string()))?;
        Ok(seg)
    }

    fn check(&self, fd: BorrowedFd<'_>) -> Result<()> {
        let Layout { world, staging, size, .. } = self.layout;
        agree(&self.header().world, world as u64, "world")?;
        agree(&self.header().staging, staging as u64, "staging")?;
        match size_of_file(fd)? {
            found if found == size => Ok(()),
            found => Err(CommError::Io(format!("the shared segment has {found} bytes, not {size}"))),
        }
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a page for the header; it is made of atomics, any bits are valid.
        unsafe { self.map.base.cast().as_ref() }
    }

    /// What rank `rank` tells the others.
    pub(super) fn line(&self, rank: usize) -> &Line {
        assert!(rank < self.layout.world);
        // SAFETY: inside the rank lines, aligned to 128, made of atomics.
        unsafe { self.map.base.add(PAGE + rank * LINE).cast().as_ref() }
    }

    /// `2 × world` words of rank `rank` for the rounds of this slot.
    pub(super) fn table(&self, rank: usize, slot: usize) -> &[AtomicU64] {
        let (world, words) = (self.layout.world, 2 * self.layout.world);
        assert!(rank < world && slot < 2);
        let at = self.layout.tables + (rank * 2 + slot) * words * size_of::<u64>();
        // SAFETY: inside the tables, aligned to 8 (they begin at a page), made of atomics.
        unsafe { std::slice::from_raw_parts(self.map.base.add(at).cast().as_ptr(), words) }
    }

    /// Where `bytes` of common memory lie in the file, when `before` bytes are taken behind the segment, and how many are
    /// then.
    pub(super) fn behind(&self, before: usize, bytes: usize) -> Result<(usize, usize)> {
        let taken = bytes.checked_next_multiple_of(PAGE).and_then(|n| n.checked_add(PAGE + before));
        let at = self.layout.size.next_multiple_of(PAGE) + before;
        match taken.filter(|&n| n <= isize::MAX as usize - at) {
            Some(end) => Ok((at, end)),
            None => Err(CommError::Io(format!("{bytes} bytes of common memory don't fit the address space"))),
        }
    }

    fn slot_at(&self, rank: usize, slot: usize, start: usize, len: usize) -> NonNull<u8> {
        let Layout { world, staging, slots, .. } = self.layout;
        assert!(rank < world && slot < 2 && start <= staging && len <= staging - start);
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.map.base.add(slots + (rank * 2 + slot) * staging + start) }
    }

    /// `len` bytes of a slot, from byte `start`, to read.
    ///
    /// # Safety
    /// Only between the round in which `rank` showed this slot and the next one that this rank enters. The peer doesn't
    /// write it then; one that breaks the rule can spoil numbers, not addresses.
    pub(super) unsafe fn slot(&self, rank: usize, slot: usize, start: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds; any bytes are valid.
        unsafe { std::slice::from_raw_parts(self.slot_at(rank, slot, start, len).as_ptr(), len) }
    }

    /// As [`Segment::slot`], `len` elements from element `start`.
    ///
    /// # Safety
    /// As [`Segment::slot`].
    pub(super) unsafe fn slot_f32(&self, rank: usize, slot: usize, start: usize, len: usize) -> &[f32] {
        // SAFETY: the caller's promise.
        bytemuck::cast_slice(unsafe { self.slot(rank, slot, start * 4, len * 4) })
    }

    /// `len` bytes of a slot of this rank's own, to fill.
    ///
    /// # Safety
    /// `rank` is the caller's own, the slot is the next round's, and no other slice of the range is alive.
    #[allow(clippy::mut_from_ref)] // shared memory: the exclusiveness is the protocol's, not the borrow's
    pub(super) unsafe fn slot_mut(&self, rank: usize, slot: usize, start: usize, len: usize) -> &mut [u8] {
        // SAFETY: in bounds; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.slot_at(rank, slot, start, len).as_ptr(), len) }
    }

    /// As [`Segment::slot_mut`], `len` elements from element `start`.
    ///
    /// # Safety
    /// As [`Segment::slot_mut`].
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

/// Makes the file at least `size` bytes long by writing its last byte, which nothing uses. Unlike truncation this can't
/// shrink the file under a peer that believes in another size, and like it leaves the file sparse.
fn grow(fd: BorrowedFd<'_>, size: usize) -> Result<()> {
    if size_of_file(fd)? >= size {
        return Ok(());
    }
    nix::sys::uio::pwrite(fd.as_fd(), &[0], (size - 1) as i64)
        .map(drop)
        .map_err(|e| CommError::Io(format!("can't size the shared segment to {size} bytes: {e}")))
}

fn size_of_file(fd: BorrowedFd<'_>) -> Result<usize> {
    let stat = fstat(fd).map_err(|e| CommError::Io(format!("can't look at the shared segment: {e}")))?;
    usize::try_from(stat.st_size).map_err(|_| CommError::Io("the shared segment has no size".into()))
}

/// The first rank to come writes `ours`; later ones must bring the same.
fn agree(word: &AtomicU64, ours: u64, what: &str) -> Result<()> {
    match word.compare_exchange(0, ours, SeqCst, SeqCst) {
        Err(theirs) if theirs != ours => Err(CommError::Io(format!(
            "the shared segment's {what} is {theirs:#x}, this rank's {ours:#x}: the ranks belong to different jobs or programs"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_layout_do_not_overlap() {
        for world in [1, 2, 3, 8, 16, 100, crate::MAX_WORLD] {
            let l = Layout::new(world, 70_000).unwrap();
            assert_eq!(l.staging % PAGE, 0);
            assert!(PAGE + world * LINE <= l.tables);
            assert!(l.tables + world * 2 * 2 * world * 8 <= l.slots);
            assert_eq!(l.slots + world * 2 * l.staging + PAGE, l.size);
        }
    }

    #[test]
    fn sizes_out_of_bounds_are_refused() {
        for (world, staging) in [(0, 8192), (2000, 8192), (2, 100), (1024, 4096), (2, usize::MAX)] {
            assert!(Layout::new(world, staging).is_err(), "{world} {staging}");
        }
    }
}
