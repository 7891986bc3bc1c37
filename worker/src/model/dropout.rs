//! [`DropoutModule`]: dropout in training.
//!
//! A mask is a function of the run's seed, the module, the sample's number in the run and the
//! position in the sample (docs/numerics.md). The backward pass recomputes it.
use super::Batch;
use crate::rng::{Purpose, RandomStream};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{AttentionDropout, Dropout},
};

/// A dropout module of a model, with its rate and random numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct DropoutModule {
    rate: f64,
    stream: RandomStream,
}

impl DropoutModule {
    /// A module with its name in transformers, which selects the random numbers.
    pub(super) fn new(rate: f64, seed: u64, name: &str) -> Self {
        DropoutModule { rate, stream: RandomStream::new(seed, Purpose::Dropout, name) }
    }

    /// The number of the batch's first sample, if elements are dropped.
    fn first_dropped_sample(&self, batch: &Batch) -> Option<u64> {
        batch.first_sample.filter(|_| self.rate > 0.0)
    }

    /// The dropout of attention probabilities; `None` if no element is dropped.
    pub(super) fn attention_dropout(&self, batch: &Batch) -> Option<AttentionDropout> {
        let first = self.first_dropped_sample(batch)?;
        Some(AttentionDropout { key: self.stream.key(), probability: self.rate, first_sequence: first })
    }

    /// The dropout of rows of this width; `None` if no element is dropped.
    fn row_dropout(&self, batch: &Batch, width: usize) -> Option<Dropout> {
        let first = self.first_dropped_sample(batch)?;
        Some(Dropout {
            key: self.stream.key(),
            probability: self.rate,
            sample_len: batch.seq_len * width,
            first_sample: first,
        })
    }

    /// Applies dropout to `x`, `[rows, width]`, or to its gradient, in place.
    pub(super) fn apply(&self, ops: &dyn Ops, batch: &Batch, width: usize, x: ViewMut) {
        if let Some(d) = self.row_dropout(batch, width) {
            ops.dropout(x, &d);
        }
    }

    /// The gradient of the input from that of the output, `dy`, `[rows, width]`. The result is
    /// written to `buffer`; it is `dy` itself if no element is dropped.
    pub(super) fn backward<'a>(
        &self,
        ops: &dyn Ops,
        batch: &Batch,
        width: usize,
        dy: View<'a>,
        buffer: &'a mut Buf,
    ) -> View<'a> {
        let Some(d) = self.row_dropout(batch, width) else { return dy };
        ops.cast(buffer.view_mut(), dy);
        ops.dropout(buffer.view_mut(), &d);
        buffer.view()
    }
}
