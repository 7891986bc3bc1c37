//! Buffers that are used again: gathered parameters and whole gradients of one unit at a time.
use device::{Buf, Dtype, Ops, ViewMut, storage::Event};

/// Elements by which [`grow`] makes a buffer larger.
const GROWTH: usize = 1024;

/// The first `len` elements of a buffer that becomes as large as it has to be, whatever it held.
pub fn grow<'a>(ops: &dyn Ops, buf: &'a mut Buf, len: usize) -> ViewMut<'a> {
    if buf.len() < len {
        let dtype = buf.dtype();
        // The old one goes first: both at once would be a peak for nothing.
        *buf = ops.zeroed(dtype, 0);
        *buf = ops.zeroed(dtype, len.next_multiple_of(GROWTH));
    }
    buf.view_mut().slice(0..len)
}

/// A pool of buffers of one element type and any length. The best fit is handed out; a new one is allocated when none fits.
pub struct Pool {
    dtype: Dtype,
    /// Each with the mark behind which it is.
    free: Vec<(Buf, Event)>,
}

impl Pool {
    /// An empty pool for elements of this type.
    pub fn of(dtype: Dtype) -> Self {
        Pool { dtype, free: Vec::new() }
    }

    /// A buffer of at least `len` elements with unspecified content.
    pub fn take(&mut self, ops: &dyn Ops, len: usize) -> Buf {
        // Of several the one that was given back first, which is free first. Where all are free the first in memory: so a step has
        // the buffers of the step before, and a card may be asked for the same work again.
        let keys = self.free.iter().map(|(buf, mark)| {
            let at = if mark.is_behind_all() { buf.view().address() } else { u64::MAX };
            (buf.len(), at)
        });
        match best_fit(keys, (len, 0)) {
            Some(i) => {
                let (buf, mark) = self.free.remove(i);
                mark.follow();
                buf
            }
            None => ops.zeroed(self.dtype, len),
        }
    }

    /// Gives a buffer back, for the thread that does so.
    pub fn give(&mut self, buf: Buf) {
        self.give_behind(buf, Event::default());
    }

    /// Gives a buffer back that is used until `mark`, for any thread.
    pub fn give_behind(&mut self, buf: Buf, mark: Event) {
        self.free.push((buf, mark));
    }
}

/// The same decisions on lengths alone, for the memory estimate.
#[derive(Default, Clone)]
pub struct PoolPlan {
    free: Vec<usize>,
    /// Elements allocated so far.
    pub allocated: usize,
}

impl PoolPlan {
    /// The length of the buffer that a pool would hand out.
    pub fn take(&mut self, len: usize) -> usize {
        match best_fit(self.free.iter().copied(), len) {
            Some(i) => self.free.swap_remove(i),
            None => {
                self.allocated += len;
                len
            }
        }
    }

    /// Gives a buffer back.
    pub fn give(&mut self, len: usize) {
        self.free.push(len);
    }
}

fn best_fit<T: Ord + Copy>(free: impl Iterator<Item = T>, least: T) -> Option<usize> {
    free.enumerate().filter(|&(_, n)| n >= least).min_by_key(|&(_, n)| n).map(|(i, _)| i)
}
