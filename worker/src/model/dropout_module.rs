//! [`DropoutModule`]: dropout during training, with masks that do not depend on the number of
//! ranks.
//!
//! A mask is a function of the run's seed, the module, the sample's number in the run and the
//! position in the sample (docs/numerics.md). The backward pass recomputes the mask.
use super::micro_batch::MicroBatch;
use crate::rng::{Purpose, RandomStream};
use device::{
    Buf, Ops, View, ViewMut,
    ops::{AttentionDropout, SampleDropout},
};

/// A dropout module of a model: its rate, and the random stream from which its masks are drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct DropoutModule {
    rate: f64,
    stream: RandomStream,
}

impl DropoutModule {
    /// Creates a dropout module with the rate `rate`, whose random masks are derived from `seed`
    /// and `name`. `name` is the name of the module in transformers, which selects the random
    /// numbers together with the run's seed.
    pub(super) fn new(rate: f64, seed: u64, name: &str) -> Self {
        DropoutModule { rate, stream: RandomStream::new(seed, Purpose::Dropout, name) }
    }

    /// Returns the number of the micro-batch's first sample, counted over the whole run, or `None`
    /// if no dropout is applied to the micro-batch.
    fn first_sample_if_active(&self, batch: &MicroBatch) -> Option<u64> {
        batch.first_sample.filter(|_| self.rate > 0.0)
    }

    /// Returns the dropout rate, random key and first sample for dropout of attention
    /// probabilities, or `None` if no dropout is applied to the micro-batch.
    pub(super) fn create_attention_dropout(&self, batch: &MicroBatch) -> Option<AttentionDropout> {
        let first = self.first_sample_if_active(batch)?;
        Some(AttentionDropout { key: self.stream.key(), probability: self.rate, first_sequence: first })
    }

    /// Returns the rate, random key and first sample for dropout of an activation with `width`
    /// elements per token, or `None` if no dropout is applied.
    fn create_row_dropout(&self, batch: &MicroBatch, width: usize) -> Option<SampleDropout> {
        let first = self.first_sample_if_active(batch)?;
        Some(SampleDropout {
            key: self.stream.key(),
            probability: self.rate,
            sample_len: batch.seq_len * width,
            first_sample: first,
        })
    }

    /// Applies dropout in place to the activation `x`, `[rows, width]`, or to its gradient in the
    /// backward pass.
    pub(super) fn apply_dropout(&self, ops: &dyn Ops, batch: &MicroBatch, width: usize, x: ViewMut) {
        if let Some(d) = self.create_row_dropout(batch, width) {
            ops.dropout(x, &d);
        }
    }

    /// Returns the gradient of the dropout module's input, computed from `dy`, `[rows, width]`, the
    /// gradient of its output. `buffer` is used for the result. Returns `dy` itself if no element
    /// is dropped.
    pub(super) fn dropout_backward<'a>(
        &self,
        ops: &dyn Ops,
        batch: &MicroBatch,
        width: usize,
        dy: View<'a>,
        buffer: &'a mut Buf,
    ) -> View<'a> {
        let Some(d) = self.create_row_dropout(batch, width) else { return dy };
        ops.cast(buffer.view_mut(), dy);
        ops.dropout(buffer.view_mut(), &d);
        buffer.view()
    }
}
