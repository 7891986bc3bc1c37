//! [`Event`]: an event of a run, as data for the terminal, `--json` and the journal.
//!
//! Events travel from a worker through its agent to the controller, which prints and stores them.
//! docs/events.md documents every event and field; a test compares it with this module.
use crate::{failure::FailureReason, ids::Rank, job::ReloadValues};
use diagnostic::Diagnostic;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub use json::{EventSchema, TimedEvent};

mod json;

/// An event of a run. Programs read the JSON names: add fields, and rename none without a new
/// [`EventSchema`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The run began.
    Start {
        /// The name of the run.
        run: String,
        /// The run directory.
        run_dir: PathBuf,
        /// The number of workers.
        world: u32,
    },
    /// All workers have joined and built the model; training begins.
    Ready {
        /// Optimizer steps that are already done: 0, or the step of the checkpoint.
        step: u64,
        /// Optimizer steps after which training ends.
        total_steps: u64,
        /// The number of parameters of the model.
        parameters: u64,
        /// The number of tokens per step over all ranks.
        tokens_per_step: u64,
    },
    /// Training resumes from a checkpoint.
    Resume {
        /// Optimizer steps done when the checkpoint was saved.
        step: u64,
        /// The directory of the checkpoint.
        path: PathBuf,
        /// The world size of the run that wrote the checkpoint; `None` if it is not recorded.
        world: Option<u32>,
        /// The ZeRO stage of the run that wrote the checkpoint; `None` if it is not recorded.
        stage: Option<u8>,
    },
    /// One optimizer step is done.
    Step {
        /// Optimizer steps done, from 1.
        step: u64,
        /// Mean cross-entropy per target token, in nats.
        loss: f64,
        /// Global L2 norm of the gradients before clipping.
        grad_norm: f64,
        /// Learning rate of the step.
        lr: f64,
        /// The number of tokens trained on since step 0.
        tokens: u64,
        /// Tokens per second over all ranks.
        tokens_per_s: f64,
        /// Largest resident set of any rank so far, in bytes.
        peak_rss: u64,
        /// The time since the last step event that computation waited for collectives, in seconds;
        /// the longest of any rank.
        #[serde(default)]
        exposed_comm_s: f64,
    },
    /// A gradient overflowed fp16, and all ranks skipped the step.
    Overflow {
        /// The step that was skipped. The next samples repeat it.
        step: u64,
        /// Mean cross-entropy per target token of the skipped step, in nats.
        loss: f64,
        /// The loss scale of the next step.
        loss_scale: f64,
        /// The number of steps that were skipped since step 0.
        skipped: u64,
    },
    /// The model was evaluated on held-out data.
    Eval {
        /// Optimizer steps done.
        step: u64,
        /// Mean cross-entropy per target token, in nats.
        loss: f64,
        /// The exponential of the loss.
        perplexity: f64,
        /// The number of target tokens that were evaluated.
        tokens: u64,
    },
    /// The model continued a prompt (`train.eval.sample`).
    Sample {
        /// Optimizer steps done.
        step: u64,
        /// The prompt of the job file.
        prompt: String,
        /// The generated text.
        text: String,
    },
    /// A checkpoint is complete on disk.
    Checkpoint {
        /// Optimizer steps done.
        step: u64,
        /// The directory of the checkpoint.
        path: PathBuf,
        /// The size of the checkpoint, in bytes.
        bytes: u64,
        /// The duration of the save, in seconds.
        seconds: f64,
    },
    /// Full weights were gathered into a Hugging Face directory.
    Gather {
        /// Optimizer steps done.
        step: u64,
        /// The directory with the weights.
        path: PathBuf,
        /// The size of the weights, in bytes.
        bytes: u64,
    },
    /// Values of the changed job file take effect after this step.
    Reload {
        /// Optimizer steps done with the old values.
        step: u64,
        /// The new values.
        values: ReloadValues,
    },
    /// A message for people. The job continues.
    Notice {
        /// The rank that reports the message; `None` if the controller reports it.
        rank: Option<Rank>,
        /// The message, on one line.
        message: String,
        /// The warning or error that the message is about; empty if there is none.
        #[serde(default, skip_serializing_if = "Vec::is_empty", with = "json::diagnostics")]
        diagnostics: Vec<Diagnostic>,
    },
    /// The root cause of a failed run. A run has at most one such event.
    Failure(Box<FailureReport>),
    /// An attempt failed, and the job is started again.
    Restart {
        /// The attempt that follows, from 1.
        attempt: u32,
        /// The number of restarts that `run.restarts` still allows.
        restarts_left: u32,
        /// The time until the next attempt, in seconds.
        pause_s: f64,
        /// The root cause of the failed attempt, with the fields of the failure event.
        #[serde(flatten)]
        failure: Box<FailureReport>,
    },
    /// The workers of an attempt start. This event is only printed for several hosts and after a
    /// restart.
    Placement {
        /// The attempt, from 0.
        attempt: u32,
        /// The number of workers.
        world: u32,
        /// The hosts in the order of their ranks.
        hosts: Vec<String>,
    },
    /// The run ended.
    Done {
        /// The exit code of `launch`.
        exit_code: u8,
        /// The last optimizer step; `None` if unknown.
        step: Option<u64>,
        /// The duration of the run, in seconds.
        seconds: f64,
    },
}

impl Event {
    /// Creates a notice without a diagnostic.
    pub fn new_notice(rank: Option<Rank>, message: impl Into<String>) -> Event {
        Event::Notice { rank, message: message.into(), diagnostics: Vec::new() }
    }

    /// Creates a notice about a warning or an error, which contains the diagnostic.
    pub fn new_diagnostic_notice(
        rank: Option<Rank>,
        message: impl Into<String>,
        diagnostic: &Diagnostic,
    ) -> Event {
        Event::Notice { rank, message: message.into(), diagnostics: vec![diagnostic.clone()] }
    }
}

/// The root cause of a failed attempt or run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The rank that failed; `None` if no worker failed.
    pub rank: Option<Rank>,
    /// The host of the worker, or the host that failed.
    pub host: String,
    /// The process id of the process that failed; 0 if unknown.
    pub pid: u32,
    /// The reason of the failure, for programs.
    #[serde(default)]
    pub reason: FailureReason,
    /// The reason of the failure, for people, on one line.
    pub message: String,
    /// What the user can do about the failure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub help: Vec<String>,
    /// The errors that caused the failure; empty if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "json::diagnostics")]
    pub diagnostics: Vec<Diagnostic>,
    /// The path of the log of the worker that failed, on the worker's host.
    pub log: Option<PathBuf>,
    /// The last lines of the worker's output.
    pub tail: Vec<String>,
}

/// The current activity of a rank, for the live view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerPhase {
    /// Joining the group of ranks, reading data, building the model.
    Starting,
    /// Reading a checkpoint.
    Resuming,
    /// Running forward passes, backward passes and updates.
    Training,
    /// Evaluating on held-out data.
    Evaluating,
    /// Writing the rank's shard of a checkpoint, or copying the shard to a staging buffer.
    Saving,
    /// Writing full weights.
    Gathering,
    /// Ending.
    Ending,
}
