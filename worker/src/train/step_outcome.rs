//! The results of a training step: [`StepOutcome`] and the combined reports of all ranks.

/// The values that each rank sends to the other ranks once per step, in addition to its losses. In
/// a [`StepOutcome`], the combined reports of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankStepReport {
    /// Flags of [`super::boundary_flags`]. Combined: the union over all ranks.
    pub flags: u64,
    /// The largest resident set of the rank so far, in bytes. Combined: the maximum over all ranks.
    pub peak_rss: u64,
    /// Seconds since the previous report in which computation waited for collectives. Combined: the
    /// maximum over all ranks.
    pub exposed_comm: f64,
}

/// The losses and the gradient norm of a step, with the same bits on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// The mean loss per target token, in nats.
    pub loss: f64,
    /// The global L2 norm of the mean gradient before clipping.
    pub grad_norm: f64,
    /// The number of tokens with a loss.
    pub targets: u64,
    /// The combined reports of all ranks.
    pub report: RankStepReport,
    /// Whether the step was skipped because a gradient overflowed in fp16.
    pub skipped: bool,
}
