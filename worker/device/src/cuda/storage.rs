//! [`Storage`] on a card.
use super::{Cuda, Pinned, address, must};
use crate::mem::{Buf, Dtype, View, ViewMut};
use crate::storage::Storage;
use std::{ops::Range, sync::Arc};

impl Storage for Cuda {
    fn is_host(&self) -> bool {
        false
    }

    fn zeroed(&self, dtype: Dtype, len: usize) -> Buf {
        must(self.try_zeroed(dtype, len))
    }

    fn staging(&self, dtype: Dtype, len: usize) -> Buf {
        if len == 0 {
            return Buf::zeroed_as(dtype, 0);
        }
        let bytes = len * dtype.size();
        let at = must(self.card.allocate_pinned(bytes));
        // SAFETY: as long as was asked for.
        unsafe { at.write_bytes(0, bytes) };
        Buf::on_host_of(Arc::new(Pinned(self.card.clone())), at, dtype, len)
    }

    fn copy(&self, to: ViewMut, from: View) {
        assert!(
            to.dtype() == from.dtype() && to.len() == from.len(),
            "copy: {} of {:?} to {} of {:?}",
            from.len(),
            from.dtype(),
            to.len(),
            to.dtype()
        );
        match (to.as_view().is_on_host(), from.is_on_host()) {
            (true, true) => to.bytes().copy_from_slice(from.bytes()),
            (true, false) => must(self.card.download(to.bytes(), address(from))),
            (false, true) => {
                must(self.card.upload(address(to.as_view()), from.bytes()));
                // Pinned memory is read when the copy's turn comes.
                must(self.card.wait());
            }
            (false, false) => {
                let bytes = from.len() * from.dtype().size();
                must(self.card.copy(address(to.as_view()), address(from), bytes));
            }
        }
    }

    fn clear(&self, x: ViewMut) {
        let bytes = x.len() * x.dtype().size();
        must(self.card.fill_zero(address(x.as_view()), bytes));
    }

    /// By way of scratch: copies inside a card must not overlap.
    fn move_down(&self, mut x: ViewMut, from: Range<usize>, to: usize) {
        if from.start == to || from.is_empty() {
            return;
        }
        let bytes = from.len() * x.dtype().size();
        let scratch = self.scratch(bytes);
        let target = x.part(to..to + from.len()).as_view().address();
        must(self.card.copy(scratch.at(), address(x.as_view().slice(from)), bytes));
        must(self.card.copy(target, scratch.at(), bytes));
    }

    fn wait(&self) {
        must(self.card.wait());
    }

    fn peak_memory(&self) -> u64 {
        self.card.peak()
    }
}
