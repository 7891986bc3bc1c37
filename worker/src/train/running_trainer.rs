//! [`RunningTrainer`]: a trainer that runs the optimizer steps and counts the steps, samples and
//! tokens of the run.
use super::step::{RankStepReport, SampleSource, StepOutcome, Trainer};
use crate::{error::Result, optim::schedule::compute_learning_rate};
use jobspec::{ReloadTrainValues, TrainSpec};

/// A trainer whose parameters have values, together with the progress of the run in steps, samples
/// and tokens.
pub struct RunningTrainer {
    /// The trainer, which computes the steps.
    pub trainer: Trainer,
    train: TrainSpec,
    /// The progress of the run.
    pub position: Cursor,
}

/// The progress of a training run, which checkpoints store: the numbers of completed steps, used
/// samples and trained tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cursor {
    /// The number of optimizer steps done.
    pub step: u64,
    /// The number of samples consumed, which is also the number of the next step's first sample.
    pub consumed_samples: u64,
    /// The number of tokens trained on.
    pub tokens: u64,
    /// Whether an evaluation is due before the next step. A stop request can end a run before this
    /// evaluation is complete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_evaluation_due: bool,
}

impl RunningTrainer {
    /// Creates a trainer that continues a run in which the steps, samples and tokens counted in
    /// `position` are done.
    pub fn new(trainer: Trainer, train: TrainSpec, position: Cursor) -> Self {
        RunningTrainer { trainer, train, position }
    }

    /// Runs one optimizer step of this rank: computes gradients of the global batch with the other
    /// ranks, and updates the parameters. Returns its outcome and learning rate. Collective: every
    /// rank must call it.
    ///
    /// If the loss or the gradient norm is not finite, no parameter changes and the step is not
    /// counted. If the step was skipped because fp16 gradients overflowed, its samples still count
    /// as consumed, so that the next step uses other samples.
    pub fn run_step(
        &mut self,
        source: &dyn SampleSource,
        report: RankStepReport,
    ) -> Result<(StepOutcome, f64)> {
        let lr = compute_learning_rate(
            &self.train.schedule,
            self.train.optimizer.lr,
            self.train.steps,
            self.position.step,
        );
        let accumulated =
            self.trainer.start_global_batch_gradients(source, self.position.consumed_samples, report)?;
        let outcome = self.trainer.update_parameters(&accumulated, lr, self.position.step)?;
        let samples = self.trainer.global_batch_size();
        // At the smallest loss scale the step is not skipped. The overflowed gradient norm is then
        // an error, as in every other precision.
        let skipped = outcome.skipped && self.trainer.loss_scale.record_overflow();
        let outcome = StepOutcome { skipped, ..outcome };
        if skipped {
            self.position.consumed_samples += samples;
        } else if outcome.loss.is_finite() && outcome.grad_norm.is_finite() {
            self.trainer.loss_scale.record_step_without_overflow();
            self.position.step += 1;
            self.position.consumed_samples += samples;
            self.position.tokens += samples * u64::from(self.train.data.seq_len);
        }
        Ok((outcome, lr))
    }

    /// Returns whether all optimizer steps of the run are done.
    pub fn is_done(&self) -> bool {
        self.position.step >= self.train.steps
    }

    /// Replaces the number of steps, the minimum learning rate and the decay steps by the values
    /// that the user has set in the job file during the run.
    pub fn apply_reloaded_values(&mut self, values: &ReloadTrainValues) {
        self.train.steps = values.steps;
        self.train.schedule.min_lr = values.min_lr;
        self.train.schedule.decay_steps = values.decay_steps;
    }

    /// Returns the job's `train` section, including values that launch filled in at the start and
    /// values that were changed during the run.
    pub fn train_spec(&self) -> &TrainSpec {
        &self.train
    }
}
