//! [`TakenOverJournal`]: the journal of a run (its file of events), which a controller has taken
//! over from a lost one.
use super::run_memo::UnstoredEvent;
use crate::controller::journal::JournalSummary;
use std::time::Duration;

/// What a new controller knows about the journal (the run's file of events) of a lost controller: a
/// summary, and the events missing from the file.
#[derive(Clone, Debug)]
pub(crate) struct TakenOverJournal {
    /// The summary of the journal and of the missing events, which are added to the journal.
    pub(super) summary: JournalSummary,
    /// The events of the lost controllers that the journal lacks, oldest first.
    pub(super) missing: Vec<MissingEvent>,
}

/// An event of a lost controller that the journal (the run's file of events) lacks.
#[derive(Clone, Debug)]
pub(crate) struct MissingEvent {
    pub(super) event: UnstoredEvent,
    /// The age of the event at the time of the takeover.
    pub(super) age: Duration,
}

impl TakenOverJournal {
    /// Finds the controller events that the journal (the run's file of events) lacks among the
    /// events `unstored`, which agents kept for the new controller. `time` is the present time in
    /// seconds since
    /// 1970.
    pub(crate) fn new(
        mut summary: JournalSummary,
        unstored: Vec<UnstoredEvent>,
        time: f64,
    ) -> TakenOverJournal {
        let journaled = summary.newest_controller_event_number();
        let is_missing = |event: &UnstoredEvent| event.number > journaled;
        let missing: Vec<MissingEvent> = unstored
            .into_iter()
            .filter(is_missing)
            .map(|event| {
                let age = Duration::try_from_secs_f64(time - event.time).unwrap_or_default();
                MissingEvent { event, age }
            })
            .collect();
        for MissingEvent { event, .. } in &missing {
            summary.add_controller_event(&event.event, event.number);
        }
        TakenOverJournal { summary, missing }
    }

    /// Returns the events that the journal (the run's file of events) lacks.
    pub(crate) fn missing_events(&self) -> impl Iterator<Item = &UnstoredEvent> {
        self.missing.iter().map(|missing| &missing.event)
    }

    /// Returns the summary of the journal (the run's file of events), in which the events that the
    /// file still lacks are counted as well.
    pub(crate) fn summary(&self) -> &JournalSummary {
        &self.summary
    }
}
