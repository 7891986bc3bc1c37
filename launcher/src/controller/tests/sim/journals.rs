//! Simulates the journals of controllers. A controller writes its journal with a delay. If the
//! controller ends before, the events that it has not written are lost.
use super::{ControllerIndex, ControllerInput, SimEvent, Simulation};
use crate::controller::{
    core::TakenOverJournal,
    journal::{JournalSummary, is_restart_that_never_began},
    report_id::ReportId,
};
use protocol::event::Event;
use std::collections::BTreeMap;

/// A line of a journal: an event and its origin.
pub(in crate::controller::tests) type JournalLine = (Event, ReportId);

/// An item that a controller passes to its journal thread: a line to append, or a report that
/// counts as stored.
#[derive(Debug)]
pub(super) enum JournalItem {
    Append(JournalLine),
    /// The report counts as stored.
    Skip(ReportId),
}

impl Simulation {
    /// Passes an item to the simulated journal thread of a controller, which writes it after a
    /// delay.
    pub(super) fn queue_journal_item(&mut self, index: ControllerIndex, order: JournalItem) {
        self.controllers[index].unwritten.push(order);
        if self.controllers[index].unwritten.len() == 1 {
            // A disk may stall.
            let longest = if self.rng.pick_one_in(20) { 8000 } else { 1500 };
            let at = self.now + self.rng.pick_delay(0, longest);
            self.schedule_event(at, SimEvent::WriteJournal(index));
        }
    }

    /// Writes all items that a controller has passed to its journal thread, and informs the
    /// controller that they are stored.
    pub(super) fn write_queued_items(&mut self, index: ControllerIndex) {
        let mut stored: BTreeMap<u64, u64> = BTreeMap::new();
        for order in std::mem::take(&mut self.controllers[index].unwritten) {
            let report = match order {
                JournalItem::Append(line) => {
                    let report = line.1;
                    let journal = self.controllers[index].journal;
                    self.journals[journal].push(line);
                    report
                }
                JournalItem::Skip(report) => report,
            };
            stored.insert(report.0, report.1);
        }
        let stored: Vec<ReportId> = stored.into_iter().collect();
        self.controllers[index].events.forget_stored_events(&stored);
        self.feed_controller(index, ControllerInput::Stored(stored));
    }

    /// Copies the journal for a controller that takes over the run.
    pub(super) fn take_over_journal(&mut self, index: ControllerIndex) {
        let Some(stored) = self.controllers[index].taken_memo.take() else { return };
        let is_kept = |line: &&JournalLine| !is_restart_that_never_began(&line.0, stored.memo.restarts);
        let lines: Vec<JournalLine> = self.journal_lines().iter().filter(is_kept).cloned().collect();
        let mut summary = JournalSummary::default();
        for (event, report) in &lines {
            summary.add_event(event, Some(*report));
        }
        let journaled = summary.newest_controller_event_number();
        let journal = TakenOverJournal::new(summary, stored.unstored, self.now.as_secs_f64());
        self.journals.push(lines);
        let controller = &mut self.controllers[index];
        controller.journal = self.journals.len() - 1;
        let missing = journal.missing_events().cloned();
        controller.events.continue_numbering_after(journaled.max(stored.newest_event), missing);
        self.takeovers += 1;
        self.feed_controller(index, ControllerInput::JournalTaken(Box::new(journal)));
        let listed = self.listed.clone();
        self.feed_controller(index, ControllerInput::Hosts { added: Vec::new(), listed });
    }
}
