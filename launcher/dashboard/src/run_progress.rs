//! [`RunProgress`]: the progress of a run, such as its step and loss, which the page, the metrics
//! and the terminal show.
use serde::Serialize;
use serde_json::Value;

/// The progress and the newest values of a run, such as its step, loss and throughput. A number is
/// `None` until an event has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RunProgress {
    /// The number of optimizer steps that are done.
    pub(crate) step: Option<u64>,
    pub(crate) total_steps: Option<u64>,
    pub(crate) parameters: Option<u64>,
    pub(crate) tokens_per_step: Option<u64>,
    pub(crate) loss: Option<f64>,
    pub(crate) eval_loss: Option<f64>,
    pub(crate) grad_norm: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) tokens: Option<u64>,
    pub(crate) tokens_per_s: Option<f64>,
    /// The duration of the newest step, in seconds.
    pub(crate) step_s: Option<f64>,
    pub(crate) peak_rss: Option<u64>,
    pub(crate) exposed_comm_s: Option<f64>,
    /// The number of the attempt, from 0.
    pub(crate) attempt: u32,
    pub(crate) restarts: u64,
    pub(crate) checkpoints: u64,
    /// The number of steps that were skipped because of an fp16 overflow.
    pub(crate) skipped_steps: u64,
    /// The step, size in bytes, duration in seconds and time of the newest checkpoint.
    pub(crate) checkpoint: Option<CheckpointSummary>,
    /// The JSON object of the failure that ended the run, or of the newest restart.
    pub(crate) failure: Option<Value>,
    pub(crate) exit_code: Option<u8>,
    /// The duration of the run in seconds, if the run has ended.
    pub(crate) seconds: Option<f64>,
    /// The time of the newest event, in seconds since 1970.
    pub(crate) time: Option<f64>,
    /// The number of lines of the journal that could not be read.
    pub(crate) damaged_lines: u64,
}

/// The step, size, duration and time of a saved checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct CheckpointSummary {
    pub(crate) step: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    pub(crate) time: f64,
}
