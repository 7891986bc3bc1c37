//! Modules that drop a share of what they get, in training alone. What is dropped is a function of the run's seed, the module, the
//! sample's number in the run and the place in the sample (docs/numerics.md), so a backward makes it anew.
use super::Batch;
use crate::rng::{Purpose, RandomStream};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{AttentionDropout, Dropout},
};

/// A module of a model with its rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Module {
    rate: f64,
    stream: RandomStream,
}

impl Module {
    /// `name`: of the module in transformers.
    pub(super) fn new(rate: f64, seed: u64, name: &str) -> Self {
        Module { rate, stream: RandomStream::new(seed, Purpose::Dropout, name) }
    }

    /// The number of the first sample, where something is dropped.
    fn first(&self, batch: &Batch) -> Option<u64> {
        batch.first.filter(|_| self.rate > 0.0)
    }

    /// What is dropped of attention's probabilities.
    pub(super) fn of_attention(&self, batch: &Batch) -> Option<AttentionDropout> {
        let first = self.first(batch)?;
        Some(AttentionDropout { key: self.stream.key(), share: self.rate, first })
    }

    /// What is dropped of rows of this width.
    fn of_rows(&self, batch: &Batch, width: usize) -> Option<Dropout> {
        let first = self.first(batch)?;
        Some(Dropout { key: self.stream.key(), share: self.rate, sample: batch.t * width, first })
    }

    /// In place on `x[rows, width]`, or on its gradient.
    pub(super) fn apply(&self, ops: &dyn Ops, batch: &Batch, width: usize, x: ViewMut) {
        if let Some(d) = self.of_rows(batch, width) {
            ops.dropout(x, &d);
        }
    }

    /// The gradient of what went in from `dy[rows, width]`, that of what came out: in `room`, or `dy` itself where nothing was
    /// dropped.
    pub(super) fn backward<'a>(
        &self,
        ops: &dyn Ops,
        batch: &Batch,
        width: usize,
        dy: View<'a>,
        room: &'a mut Buf,
    ) -> View<'a> {
        let Some(d) = self.of_rows(batch, width) else { return dy };
        ops.cast(room.view_mut(), dy);
        ops.dropout(room.view_mut(), &d);
        room.view()
    }
}
