//! Evaluates the model on held-out samples between two training steps. A stop request ends an
//! evaluation early.
use super::step::{RankStepReport, SampleSource, StepOutcome, Trainer};
use crate::{consensus::is_any_true, error::Result};

impl Trainer {
    /// Evaluates the model on `micro_batches` micro-batches of held-out samples from sample number
    /// `first` on, and returns their mean loss on every rank. Every rank gets the result.
    ///
    /// Calls `is_stopping` before each micro-batch. Returns `None` without further micro-batches if
    /// the result is true on any rank. Collective: every rank must call it.
    pub fn evaluate(
        &mut self,
        source: &dyn SampleSource,
        first: u64,
        micro_batches: usize,
        is_stopping: &dyn Fn() -> bool,
    ) -> Result<Option<StepOutcome>> {
        let (rank, world) = (self.engine.rank(), self.engine.world());
        let rounds = micro_batches.div_ceil(world);
        self.batch.first_sample = None;
        let order: Vec<usize> = (0..rounds).flat_map(|_| self.list_units_in_pass_order(false)).collect();
        self.engine.begin_pass(order);
        let mut mine = Vec::new();
        for round in 0..rounds {
            if self.cancel_pass_if_stopping_on_any_rank(is_stopping())? {
                return Ok(None);
            }
            let micro_batch = Some(round * world + rank).filter(|&s| s < micro_batches);
            if let Some(s) = micro_batch {
                self.load_micro_batch(source, first + (s * self.micro_batch_size) as u64)?;
            }
            self.run_forward(micro_batch.is_some())?;
            self.run_head(None, micro_batch.is_some())?;
            if let Some(s) = micro_batch {
                mine.push((s, self.sum_micro_batch_loss()?));
            }
        }
        self.exchange_losses(&mine, micro_batches, RankStepReport::default()).map(Some)
    }

    /// Returns whether any rank was asked to stop, and in that case cancels the current forward
    /// pass on all ranks. Collective: every rank must call it between the same two forward passes.
    pub(super) fn cancel_pass_if_stopping_on_any_rank(&mut self, is_stopping: bool) -> Result<bool> {
        let is_cancelled = is_any_true(self.engine.queue(), is_stopping)?;
        if is_cancelled {
            self.engine.cancel_pass()?;
        }
        Ok(is_cancelled)
    }
}
