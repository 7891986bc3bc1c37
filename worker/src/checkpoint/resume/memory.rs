//! Resumes from copies of the training state that hosts keep in their memory.
use super::{
    candidates::CheckpointLocations,
    native::{
        LoadError, ReadableCheckpoint, ResumeOrigin, load_opened_checkpoint, require_readable_on_all_ranks,
    },
    resume_point::{EventSink, MemoryResumeState, ResumePoint},
};
use crate::{
    checkpoint::memory_copies::{CompleteState, HostMemoryCopies, StateSelection},
    error::Result,
    trainer_stages::UninitializedTrainer,
};
use protocol::event::ResumeSource;

/// Maximum number of training states in the memory of hosts that one message lists with the reason
/// why they were not used.
const MAX_LISTED_STATES: usize = 2;

/// Result of the search for a training state in the memory of hosts: the run resumed from it, or
/// must resume from a checkpoint on disk.
pub(super) enum MemorySearchOutcome {
    /// The run resumed from copies in memory.
    Resumed(ResumePoint),
    /// The run must resume from disk. The text is the reason why newer copies in memory were not
    /// used; `None` if there are no newer copies.
    Unusable(Option<String>),
}

/// Range of steps of the training states in the memory of hosts that a resume tries before the next
/// checkpoint on disk.
#[derive(Clone, Copy)]
pub(super) struct MemoryCopyStepRange {
    /// The step of the next checkpoint on disk. States of earlier steps are not tried. `None` if
    /// there is no further checkpoint.
    pub(super) from: Option<u64>,
    /// The step of the checkpoint on disk that was damaged. States of this step and of later ones
    /// were tried before. `None` if nothing was tried.
    pub(super) below: Option<u64>,
}

/// Resumes from the newest training state with a step in `range` for which the memory of hosts has
/// copies of every rank's shard. Collective: every rank must call it.
pub(super) fn resume_from_memory(
    ready: &mut UninitializedTrainer,
    dirs: &CheckpointLocations,
    range: MemoryCopyStepRange,
    data_digest: &str,
    events: &mut EventSink,
) -> Result<MemorySearchOutcome> {
    let Some(memory) = dirs.memory else { return Ok(MemorySearchOutcome::Unusable(None)) };
    let queue = ready.trainer.engine.queue().clone();
    let StateSelection { complete, unusable, .. } = memory.list_states(&queue)?;
    if complete.is_empty() && unusable.is_empty() {
        let reason = "no host has copies in memory".to_owned();
        return Ok(MemorySearchOutcome::Unusable((memory.attempt() > 0).then_some(reason)));
    }
    let is_in_range = |step: u64| Some(step) >= range.from && range.below.is_none_or(|below| step < below);
    let mut problems: Vec<(u64, String)> =
        unusable.into_iter().filter(|s| is_in_range(s.step)).map(|s| (s.step, s.reason)).collect();
    for state in complete.into_iter().filter(|state| is_in_range(state.id.step)) {
        // A step with an evaluation has two copies, so a problem may be that of the other one.
        let reason = format_unused_states_reason(&problems, Some(state.id.step.saturating_add(1)));
        match load_memory_state(ready, memory, &state, (data_digest, reason), events) {
            Ok(resumed) => {
                let next_sequence = state.id.sequence.saturating_add(1);
                let ResumePoint { memory, .. } = &resumed;
                let memory = MemoryResumeState { is_source: true, next_sequence, ..memory.clone() };
                return Ok(MemorySearchOutcome::Resumed(ResumePoint { memory, ..resumed }));
            }
            Err(LoadError::Fatal(e)) => return Err(e),
            Err(LoadError::Damaged(e)) => problems.push((state.id.step, e.to_string())),
        }
    }
    Ok(MemorySearchOutcome::Unusable(format_unused_states_reason(&problems, range.from)))
}

/// Loads the training state `state` from the copies in the memory of hosts into the trainers of all
/// ranks. Collective: every rank must call it.
fn load_memory_state(
    ready: &mut UninitializedTrainer,
    memory: &HostMemoryCopies,
    state: &CompleteState,
    (data_digest, reason): (&str, Option<String>),
    events: &mut EventSink,
) -> std::result::Result<ResumePoint, LoadError> {
    let queue = ready.trainer.engine.queue().clone();
    let opened = memory.open_state(&queue, state)?.map(|c| ReadableCheckpoint::HostLocal(Box::new(c)));
    let opened = require_readable_on_all_ranks(ready, opened)?;
    let origin = ResumeOrigin { source: ResumeSource::Memory, reason };
    load_opened_checkpoint(ready, &opened, &state.display_path(), data_digest, origin, events)
}

/// Formats the reasons why training states in the memory of hosts were not used, with the step of
/// each state, as text for the user. `problems` has the step and the problem of each state.
/// Mentions only states of `step` and of later steps, or all states if `step` is `None`. Returns
/// `None` if there are none.
fn format_unused_states_reason(problems: &[(u64, String)], step: Option<u64>) -> Option<String> {
    let mut newer: Vec<&(u64, String)> = problems.iter().filter(|(at, _)| Some(*at) >= step).collect();
    newer.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    newer.dedup_by_key(|(at, _)| *at);
    let texts: Vec<String> = newer
        .iter()
        .take(MAX_LISTED_STATES)
        .map(|(at, problem)| format!("step {at} in memory is not used: {problem}"))
        .collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_the_newest_states_that_are_not_used() {
        let problems = [(7, "a".to_owned()), (9, "b".to_owned()), (8, "c".to_owned())];
        assert_eq!(format_unused_states_reason(&problems, Some(10)), None);
        assert_eq!(
            format_unused_states_reason(&problems, Some(9)).as_deref(),
            Some("step 9 in memory is not used: b")
        );
        let both = "step 9 in memory is not used: b; step 8 in memory is not used: c";
        assert_eq!(format_unused_states_reason(&problems, None).as_deref(), Some(both));
    }
}
