//! Memory that the ranks of a group have in common, so that what one wrote needs no copy to be read by the others.
use device::{Buf, Dtype, View};
use std::{ops::Range, ptr::NonNull, sync::Arc};

/// What keeps common memory mapped, and lets go of pages of it.
pub(crate) trait Pages: Send + Sync {
    /// These bytes won't be read here for a while; what is in them stays.
    fn let_go(&self, bytes: Range<usize>);
}

/// This rank's share of memory that all ranks have in common.
pub struct SharedWindow {
    /// This rank's own elements, to write.
    pub owned: Buf,
    /// Everybody's, to read.
    pub view: SharedView,
}

/// The elements of all ranks, to read.
pub struct SharedView {
    all: Buf,
    /// Bytes of the own part.
    own: Range<usize>,
    pages: Arc<dyn Pages>,
}

impl SharedWindow {
    /// # Safety
    /// At `start` lie as many elements as `counts` sum up to, for as long as `pages` lives, aligned to their type.
    pub(crate) unsafe fn new<P: Pages + 'static>(
        pages: Arc<P>,
        start: NonNull<u8>,
        dtype: Dtype,
        counts: &[usize],
        rank: usize,
    ) -> SharedWindow {
        let (before, own) = (counts[..rank].iter().sum::<usize>(), counts[rank]);
        // SAFETY: inside, by the caller's promise.
        let at = unsafe { start.add(before * dtype.size()) };
        // SAFETY: the caller's promise; who writes and who reads when is the rule of `Comm::common`.
        let (owned, all) = unsafe {
            let own = Buf::from_raw_parts(pages.clone(), at, dtype, own);
            (own, Buf::from_raw_parts(pages.clone(), start, dtype, counts.iter().sum()))
        };
        let bytes = before * dtype.size()..(before + owned.len()) * dtype.size();
        SharedWindow { owned, view: SharedView { all, own: bytes, pages } }
    }
}

impl SharedView {
    /// All elements. Nobody writes its own while this is read.
    pub fn view(&self) -> View<'_> {
        self.all.view()
    }

    /// The peers' elements won't be read here for a while: they no longer count as this process's memory.
    pub fn let_go(&self) {
        let end = self.all.len() * self.all.dtype().size();
        self.pages.let_go(0..self.own.start);
        self.pages.let_go(self.own.end..end);
    }
}
