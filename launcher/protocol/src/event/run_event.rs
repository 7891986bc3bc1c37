//! [`Event`]: one event of a run, such as a step, a checkpoint or a failure, with its fields.
use super::straggler_report::{StepTimesReport, StragglerReport};
use crate::failure::FailureReason;
use diagnostic::Diagnostic;
use jobspec::{ReloadValues, ids::Rank};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The storage from which the training state is read when a run resumes: a checkpoint on disk, or
/// copies in the memory of the hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeSource {
    /// A checkpoint on disk.
    #[default]
    Checkpoint,
    /// Copies in the memory of the hosts (`checkpoint.memory`).
    Memory,
}

/// An event of a run, such as a step, a checkpoint or a failure, for the terminal, `--json` and the
/// journal (the file of events). Other programs read the JSON names of events and fields. Fields
/// may be added, but renaming one requires a new [`EventSchema`](super::EventSchema).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The run began.
    Start {
        /// The name of the run.
        run: String,
        /// The path of the run directory.
        run_dir: PathBuf,
        /// The number of workers of the job.
        world: u32,
    },
    /// All workers have joined and built the model, so training begins.
    Ready {
        /// The number of optimizer steps that are already done: 0, or the step of the checkpoint.
        step: u64,
        /// The number of optimizer steps after which training ends.
        total_steps: u64,
        /// The number of parameters of the model.
        parameters: u64,
        /// The number of tokens that all ranks together process per step.
        tokens_per_step: u64,
    },
    /// Training resumes from a checkpoint.
    Resume {
        /// The number of optimizer steps that were done when the checkpoint was saved.
        step: u64,
        /// The directory of the checkpoint.
        path: PathBuf,
        /// The world size of the run that wrote the checkpoint; `None` if the checkpoint does not
        /// record it.
        world: Option<u32>,
        /// The ZeRO stage of the run that wrote the checkpoint; `None` if the checkpoint does not
        /// record it.
        stage: Option<u8>,
        /// Where the state was read from.
        #[serde(default)]
        source: ResumeSource,
        /// Why another source or an older state than the newest one was used; `None` if the newest
        /// state was used.
        #[serde(default)]
        reason: Option<String>,
    },
    /// One optimizer step is done.
    Step {
        /// The number of optimizer steps that are done, from 1.
        step: u64,
        /// The mean cross-entropy per target token, in nats.
        loss: f64,
        /// The global L2 norm of the gradients before clipping.
        grad_norm: f64,
        /// The learning rate of the step.
        lr: f64,
        /// The number of tokens that were trained on since step 0.
        tokens: u64,
        /// The training throughput of all ranks together, in tokens per second.
        tokens_per_s: f64,
        /// The largest resident set size of any rank since its start, in bytes.
        peak_rss: u64,
        /// The time in which computation waited for collectives since the previous step event, in
        /// seconds. The value is the maximum over all ranks.
        #[serde(default)]
        exposed_comm_s: f64,
    },
    /// The times of the ranks since the previous event of this kind, at most once a minute. The
    /// size of the event does not depend on the number of ranks.
    StepTimes(StepTimesReport),
    /// A rank began or ceased to slow down the others (`run.straggler`).
    Straggler(Box<StragglerReport>),
    /// A gradient overflowed in fp16, so all ranks skipped the update of the step.
    Overflow {
        /// The number of the skipped step. The step is repeated with the next samples.
        step: u64,
        /// The mean cross-entropy per target token of the skipped step, in nats.
        loss: f64,
        /// The loss scale that the next step uses.
        loss_scale: f64,
        /// The number of steps that were skipped since step 0.
        skipped: u64,
    },
    /// The model was evaluated on held-out data.
    Eval {
        /// The number of optimizer steps that are done.
        step: u64,
        /// The mean cross-entropy per target token, in nats.
        loss: f64,
        /// The perplexity, which is the exponential of the loss.
        perplexity: f64,
        /// The number of target tokens that were evaluated.
        tokens: u64,
    },
    /// The model continued a prompt (`train.eval.sample`).
    Sample {
        /// The number of optimizer steps that are done.
        step: u64,
        /// The prompt that the job file contains.
        prompt: String,
        /// The generated text, which continues the prompt.
        text: String,
    },
    /// A checkpoint is complete on disk.
    Checkpoint {
        /// The number of optimizer steps that are done.
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
        /// The number of optimizer steps that are done.
        step: u64,
        /// The directory that contains the weights.
        path: PathBuf,
        /// The size of the weights, in bytes.
        bytes: u64,
    },
    /// New values of the changed job file take effect after this step.
    Reload {
        /// The number of optimizer steps that were done with the old values.
        step: u64,
        /// The new values of all reloadable keys.
        values: ReloadValues,
    },
    /// A controller took over the run after the loss of the previous one.
    Takeover {
        /// The host name of the machine on which the controller runs.
        host: String,
        /// The process id of the controller.
        pid: u32,
        /// The longest time for which a host had no controller, in seconds.
        unattended_s: f64,
    },
    /// A message for the user, after which the job continues.
    Notice {
        /// The rank that reports the message; `None` if the controller reports it.
        rank: Option<Rank>,
        /// The message, on one line.
        message: String,
        /// The warning or error that the message is about; empty if there is none.
        #[serde(default, skip_serializing_if = "Vec::is_empty", with = "super::diagnostic_list")]
        diagnostics: Vec<Diagnostic>,
    },
    /// The root cause of a failed run. A run has at most one such event.
    Failure(Box<FailureReport>),
    /// An attempt failed, and the workers are restarted.
    Restart {
        /// The number of the next attempt, from 1.
        attempt: u32,
        /// The number of restarts that `run.restarts` still allows.
        restarts_left: u32,
        /// The time until the next attempt, in seconds.
        pause_s: f64,
        /// The root cause of the failed attempt. Its fields are those of the failure event.
        #[serde(flatten)]
        failure: Box<FailureReport>,
    },
    /// The workers of an attempt are being started. This event is only printed for several hosts
    /// and after a restart.
    Placement {
        /// The number of the attempt, from 0.
        attempt: u32,
        /// The number of workers.
        world: u32,
        /// The names of the hosts, ordered by the ranks of their workers.
        hosts: Vec<String>,
        /// The number of workers of each host, in the order of `hosts`; empty in events of earlier
        /// versions.
        #[serde(default)]
        workers: Vec<u32>,
    },
    /// The run ended, with success or failure.
    Done {
        /// The exit code with which `launch` ends.
        exit_code: u8,
        /// The number of optimizer steps that are done; `None` if unknown.
        step: Option<u64>,
        /// The duration of the run, in seconds.
        seconds: f64,
    },
}

impl Event {
    /// Creates an event that shows `message` to the user, without an attached diagnostic.
    pub fn new_notice(rank: Option<Rank>, message: impl Into<String>) -> Event {
        Event::Notice { rank, message: message.into(), diagnostics: Vec::new() }
    }

    /// Creates an event that shows `message` to the user, and that also contains the warning or
    /// error `diagnostic` for programs.
    pub fn new_diagnostic_notice(
        rank: Option<Rank>,
        message: impl Into<String>,
        diagnostic: &Diagnostic,
    ) -> Event {
        Event::Notice { rank, message: message.into(), diagnostics: vec![diagnostic.clone()] }
    }
}

/// The root cause of a failed run, or of a failed attempt (one start of all workers): which worker
/// or host failed, and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The rank of the worker that failed; `None` if no worker failed.
    pub rank: Option<Rank>,
    /// The name of the host of the failed worker, or of the host that failed.
    pub host: String,
    /// The process id of the process that failed; 0 if unknown.
    pub pid: u32,
    /// The reason for the failure, in a form that programs can match.
    #[serde(default)]
    pub reason: FailureReason,
    /// The reason for the failure, in one line of text for the user.
    pub message: String,
    /// Advice for the user about the failure, one item per suggestion.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub help: Vec<String>,
    /// The errors that caused the failure; empty if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "super::diagnostic_list")]
    pub diagnostics: Vec<Diagnostic>,
    /// The path of the failed worker's log, on the worker's host; `None` if there is no log.
    pub log: Option<PathBuf>,
    /// The last lines of the failed worker's output, oldest first.
    pub tail: Vec<String>,
}

/// The current activity of a worker of the built-in training, such as reading a checkpoint or
/// training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerPhase {
    /// Joining the group of ranks, reading data, and building the model.
    Starting,
    /// Reading the checkpoint to resume from.
    Resuming,
    /// Running forward passes, backward passes and optimizer updates.
    Training,
    /// Evaluating on held-out data.
    Evaluating,
    /// Writing the rank's shard of a checkpoint, or copying the shard to a staging buffer.
    Saving,
    /// Gathering full weights into a Hugging Face directory.
    Gathering,
    /// Waiting until all ranks are done, before the process exits.
    Ending,
}
