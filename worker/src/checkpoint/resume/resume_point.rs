//! [`ResumePoint`]: the checkpoint from which a run resumed.
use crate::{checkpoint::memory_copies::RecentStepEvents, error::Result, train::running_trainer::Cursor};
use jobspec::RngPolicy;
use protocol::control::FromWorker;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The checkpoint or training state in memory from which a run resumed, with the steps, samples and
/// tokens that were completed before.
pub struct ResumePoint {
    /// The directory of the checkpoint.
    pub path: PathBuf,
    /// The progress that the checkpoint records.
    pub cursor: Cursor,
    /// Whether launch wrote the checkpoint. If so, no save is needed before the first step.
    pub is_native: bool,
    /// The number of times that RNG streams were reseeded before the checkpoint was written.
    pub rng_generation: u64,
    /// How the run resumed with respect to the copies of the training state in the memory of hosts.
    pub memory: MemoryResumeState,
}

/// What a resume has found out about memory copies of the training state: whether the run resumed
/// from them, and the next copy's number.
#[derive(Clone, Debug, Default)]
pub struct MemoryResumeState {
    /// Whether the run resumed from copies in memory.
    pub is_source: bool,
    /// The newest checkpoint on disk, if the run resumed from memory.
    pub newest_saved: Option<PathBuf>,
    /// The number of the next copy in memory.
    pub next_sequence: u64,
    /// The events of the newest steps before the resume, if the run resumed from memory.
    pub step_events: RecentStepEvents,
}

impl ResumePoint {
    /// Returns how often the random generators of the run have been reseeded, including this
    /// resume, and a JSON description of this resume for later checkpoints.
    ///
    /// The random numbers of the built-in runtime do not depend on the generation. `reseed`
    /// therefore increments the generation, but changes no random number.
    pub fn count_reseeds_and_record_resume(&self, policy: RngPolicy, world: usize) -> (u64, Value) {
        let generation = self.rng_generation + u64::from(policy == RngPolicy::Reseed);
        let policy = match policy {
            RngPolicy::Reconcile => "reconcile",
            RngPolicy::Strict => "strict",
            RngPolicy::Reseed => "reseed",
        };
        let path = self.path.display().to_string();
        (generation, json!({ "from": path, "world": world, "policy": policy, "streams": "stateless" }))
    }
}

/// Callback that sends a message with an event from this rank to its agent while the run resumes.
/// Only the messages of rank 0 are sent.
pub type EventSink<'a> = dyn FnMut(FromWorker) -> Result<()> + 'a;
