//! What happened, as data: the way back from worker to terminal, `--json`, and the run's journal.
//!
//! `--json` prints each event as one object a line, tagged by `"event"`. Floats round-trip.
use crate::{ids::Rank, job::Reload};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One thing that happened. The JSON names are a public interface (docs/cli.md): add, never rename.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The run began: where its files lie, how many workers.
    Start { run: String, run_dir: PathBuf, world: u32 },
    /// All workers joined and built; training begins at `step` (0, or the step resumed from).
    Ready { step: u64, total_steps: u64, parameters: u64, tokens_per_step: u64 },
    /// Training goes on from a checkpoint that `world` workers wrote; other programs' may not say how many, or have no stage.
    Resume { step: u64, path: PathBuf, world: Option<u32>, stage: Option<u8> },
    /// One optimizer step.
    Step {
        /// 1-based: the number of optimizer steps done.
        step: u64,
        /// Mean cross-entropy per target token, nats.
        loss: f64,
        /// Global L2 norm before clipping.
        grad_norm: f64,
        lr: f64,
        /// Tokens trained on since step 0.
        tokens: u64,
        tokens_per_s: f64,
        /// Largest resident set of any rank so far, bytes.
        peak_rss: u64,
        /// Seconds since the last event in which computation waited for collectives, the longest of any rank.
        #[serde(default)]
        exposed_comm_s: f64,
    },
    /// fp16: a gradient overflowed, and the step was skipped on all ranks.
    Overflow {
        /// The step that was not taken; the next samples try it again.
        step: u64,
        loss: f64,
        /// Of the next step.
        loss_scale: f64,
        /// Steps skipped since step 0.
        skipped: u64,
    },
    /// Held-out loss.
    Eval { step: u64, loss: f64, perplexity: f64, tokens: u64 },
    /// What the model makes of a prompt (`train.eval.sample`).
    Sample { step: u64, prompt: String, text: String },
    /// A checkpoint is complete on disk.
    Checkpoint { step: u64, path: PathBuf, bytes: u64, seconds: f64 },
    /// Weights were gathered into a Hugging Face folder.
    Gathered { step: u64, path: PathBuf, bytes: u64 },
    /// The job file changed, and these values hold for everything after this step.
    Reload { step: u64, values: Reload },
    /// Something a person should know; the job goes on.
    Notice { rank: Option<Rank>, message: String },
    /// The root cause of a failed job; at most one per run.
    Failure {
        rank: Option<Rank>,
        host: String,
        pid: u32,
        cause: String,
        log: Option<PathBuf>,
        tail: Vec<String>,
    },
    /// The job failed and is started again.
    Restart {
        /// 1 at the first restart.
        epoch: u32,
        /// How often it may still be started again after this.
        left: u32,
        /// Until the next start, seconds.
        pause_s: f64,
        /// The root cause, as in `failure`.
        rank: Option<Rank>,
        host: String,
        pid: u32,
        cause: String,
        log: Option<PathBuf>,
        tail: Vec<String>,
    },
    /// Workers start on these hosts, in the order of their ranks; told when there are several hosts or it is a restart.
    Placed { epoch: u32, world: u32, hosts: Vec<String> },
    /// The run ended.
    Done { exit_code: u8, step: Option<u64>, seconds: f64 },
}

/// What a rank is doing, for the live view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Joining, reading data, building.
    Starting,
    /// Reading a checkpoint.
    Resuming,
    /// Forward, backward, update.
    Training,
    /// Held-out loss.
    Evaluating,
    /// Writing its part of a checkpoint (or copying it aside).
    Saving,
    /// Writing the gathered weights.
    Gathering,
    /// Leaving.
    Ending,
}
