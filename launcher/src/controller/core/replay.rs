//! Processes events and agents' reports from before a takeover that the lost controller may not
//! have stored in the journal. These are events of the lost controllers that the journal lacks, and
//! reports that the agents have repeated.
//!
//! The journal gets all earlier events first, in the order in which they happened. The reports
//! about the ends of workers follow, because they make this controller report events.
use super::{
    ControllerAction, ControllerCore, HostIndex,
    adoption_state::{ReplayedReport, SignedTimeMs, subtract_age},
    find_message_attempt,
    run_memo::UnstoredEvent,
    taken_over_journal::{MissingEvent, TakenOverJournal},
    workers::is_controller_event,
};
use protocol::{control::FromAgent, event::Event};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

/// An event from before a takeover that is missing in the journal (the run's file of events), so
/// that the new controller adds it.
#[derive(Debug)]
enum MissingJournalLine {
    /// An event of a lost controller.
    Controller(UnstoredEvent),
    /// An event that an agent has repeated.
    Worker(ReplayedReport),
}

impl ControllerCore {
    /// Adds the events that the journal (the run's file of events) lacks after a takeover to the
    /// journal, and returns the agents' reports that are not events. Returns the other reports, in
    /// the order in which they were made.
    pub(super) fn replay_events(
        &mut self,
        now: Duration,
        reports: Vec<ReplayedReport>,
        journal: TakenOverJournal,
    ) -> Vec<ReplayedReport> {
        let reports = sort_reports_by_time(reports);
        let TakenOverJournal { summary, missing } = journal;
        let is_event = |report: &ReplayedReport| matches!(*report.message, FromAgent::Event { .. });
        let (events, others): (Vec<ReplayedReport>, Vec<ReplayedReport>) =
            reports.into_iter().partition(is_event);
        for line in merge_missing_lines(now, missing, events) {
            match line {
                MissingJournalLine::Controller(event) => {
                    self.actions.push(ControllerAction::RestoreEvent(event))
                }
                MissingJournalLine::Worker(replayed) => {
                    let report = (self.hosts[replayed.host].stream, replayed.seq);
                    if summary.contains_report(report) {
                        // The agent need not keep an event that the journal contains.
                        let age = Duration::from_millis(replayed.age_ms(now));
                        self.actions.push(ControllerAction::WorkerEvent { report, age, event: None });
                    } else {
                        self.replay_event(now, replayed);
                    }
                }
            }
        }
        others
    }

    /// Processes a worker's event that was reported to the lost controller but not stored by it,
    /// and that the agent has sent again after the takeover.
    fn replay_event(&mut self, now: Duration, replayed: ReplayedReport) {
        let age_ms = replayed.age_ms(now);
        let ReplayedReport { host, seq, message, .. } = replayed;
        let attempt = find_message_attempt(&message);
        match *message {
            // The lost controller had processed the event, but not stored it.
            FromAgent::Event { event, is_restored, .. }
                if attempt.is_some_and(|attempt| attempt < self.attempt) =>
            {
                let is_new = !is_restored || self.is_unreported_step(&event);
                let event = Some(event).filter(|event| is_new && !is_controller_event(event));
                event.iter().for_each(|event| self.record_run_progress(event));
                let (report, age) = ((self.hosts[host].stream, seq), Duration::from_millis(age_ms));
                self.actions.push(ControllerAction::WorkerEvent { report, age, event });
            }
            message => {
                let message = Box::new(message);
                self.handle_report_or_message(now, host, FromAgent::Report { seq, age_ms, message });
            }
        }
    }

    /// Processes a report from before a takeover that an agent has sent again and that is not an
    /// event, such as a worker's exit. Reports of earlier attempts have no effect.
    pub(super) fn replay_report(&mut self, now: Duration, replayed: ReplayedReport) {
        let age_ms = replayed.age_ms(now);
        let ReplayedReport { host, seq, message, .. } = replayed;
        if find_message_attempt(&message).is_none_or(|attempt| attempt >= self.attempt) {
            self.handle_report_or_message(now, host, FromAgent::Report { seq, age_ms, message });
        }
    }
}

/// Sorts reports that agents have sent again after a takeover by the time at which each report was
/// originally made. The reports of each agent keep their order, which is that of their arrival.
fn sort_reports_by_time(mut reports: Vec<ReplayedReport>) -> Vec<ReplayedReport> {
    // Reports may arrive late, and then seem to be younger than they are.
    let mut next: BTreeMap<HostIndex, SignedTimeMs> = BTreeMap::new();
    for report in reports.iter_mut().rev() {
        let at = next.entry(report.host).or_insert(report.at);
        *at = report.at.min(*at);
        report.at = *at;
    }
    reports.sort_by_key(|report| (report.at, report.host, report.seq));
    reports
}

/// Merges two lists of events that the journal lacks, one from lost controllers and one from
/// workers, into one list in the order of time.
///
/// The clocks of the machines of earlier controllers may differ. Therefore the start of an attempt
/// is always placed after the events of earlier attempts, and before the events of the attempt's
/// workers.
fn merge_missing_lines(
    now: Duration,
    missing: Vec<MissingEvent>,
    events: Vec<ReplayedReport>,
) -> Vec<MissingJournalLine> {
    let mut missing = VecDeque::from(missing);
    let mut events = VecDeque::from(events);
    let mut lines = Vec::with_capacity(missing.len() + events.len());
    while let (Some(first), Some(event)) = (missing.front(), events.front()) {
        let event_attempt = find_message_attempt(&event.message).unwrap_or(0);
        let started = missing.iter().filter_map(|missing| match missing.event.event {
            Event::Placement { attempt, .. } => Some(attempt),
            _ => None,
        });
        // The worker's attempt was started by a controller's event that is still to come.
        let follows_start = started.clone().any(|attempt| attempt == event_attempt);
        let is_next_start = matches!(first.event.event, Event::Placement { .. });
        let precedes_start = is_next_start && started.clone().next().is_some_and(|a| event_attempt < a);
        let age_ms = u64::try_from(first.age.as_millis()).unwrap_or(u64::MAX);
        let is_earlier = event.at <= subtract_age(now, age_ms);
        if !follows_start && (precedes_start || is_earlier) {
            lines.extend(events.pop_front().map(MissingJournalLine::Worker));
        } else {
            lines.extend(missing.pop_front().map(|missing| MissingJournalLine::Controller(missing.event)));
        }
    }
    lines.extend(missing.into_iter().map(|missing| MissingJournalLine::Controller(missing.event)));
    lines.extend(events.into_iter().map(MissingJournalLine::Worker));
    lines
}
