//! [`ReportLog`]: keeps the messages of an agent that no controller may miss, so that they can be
//! repeated for a later controller.
use jobspec::ids::Rank;
use protocol::{control::FromAgent, frame::encode_frame};
use std::{collections::VecDeque, time::Duration};

/// The largest total size, in bytes, of the workers' events that the agent has reported and the
/// controller has not yet acknowledged. At this size, the agent stops reading messages of its
/// workers.
pub(crate) const MAX_UNACKNOWLEDGED_BYTES: usize = 64 << 20;

/// The log of an agent's numbered reports (messages that must reach a controller), from which the
/// agent repeats reports for a later controller. Events are kept until the controller acknowledges
/// them, and the other reports of an attempt until the next attempt starts.
#[derive(Debug, Default)]
pub(crate) struct ReportLog {
    /// The kept reports, by ascending number.
    reports: VecDeque<KeptReport>,
    /// The number of the newest report; 0 before the first report.
    last: u64,
    /// The number of the last report that was taken for the present controller.
    sent: u64,
    /// The size of the kept events, in bytes.
    event_bytes: usize,
}

/// A report of an agent (a message that must reach a controller), which the agent stores to repeat
/// it for a later controller.
#[derive(Debug)]
struct KeptReport {
    seq: u64,
    /// The time at which the report was made.
    at: Duration,
    message: FromAgent,
    /// The encoded size of an event; 0 for other reports.
    event_bytes: usize,
}

impl KeptReport {
    /// Returns whether this report states that the worker with the rank `rank` makes no progress,
    /// or that it makes progress again.
    fn is_stall_report_of(&self, rank: Rank) -> bool {
        matches!(&self.message,
            FromAgent::Stalled { rank: r, .. } | FromAgent::Recovered { rank: r, .. } if *r == rank)
    }
}

impl ReportLog {
    /// Appends a report (a message that must reach a controller) to the log, with the next number
    /// and the time `now`.
    pub(crate) fn append_report(&mut self, now: Duration, message: FromAgent) {
        if let FromAgent::Stalled { rank, .. } | FromAgent::Recovered { rank, .. } = message {
            // Only the newest state of a rank matters to a later controller.
            let sent = self.sent;
            self.reports.retain(|report| report.seq > sent || !report.is_stall_report_of(rank));
        }
        let is_event = matches!(message, FromAgent::Event { .. });
        let event_bytes = if is_event { encode_frame(&message).map_or(0, |frame| frame.len()) } else { 0 };
        self.last += 1;
        self.event_bytes += event_bytes;
        self.reports.push_back(KeptReport { seq: self.last, at: now, message, event_bytes });
    }

    /// Returns the oldest report (message that must reach a controller) that was not yet sent to
    /// the present controller, and marks it as sent. Returns `None` if there is none.
    pub(crate) fn take_unsent(&mut self, now: Duration) -> Option<FromAgent> {
        let next = self.reports.get(self.reports.partition_point(|report| report.seq <= self.sent))?;
        self.sent = next.seq;
        let age_ms = now.saturating_sub(next.at).as_millis() as u64;
        Some(FromAgent::Report { seq: next.seq, age_ms, message: Box::new(next.message.clone()) })
    }

    /// Forgets the workers' events with report numbers up to `seq`, because the controller has
    /// acknowledged that it has stored them.
    pub(crate) fn acknowledge(&mut self, seq: u64) {
        let seq = seq.min(self.sent);
        self.drop_reports(|report| report.seq <= seq && matches!(report.message, FromAgent::Event { .. }));
    }

    /// Forgets all reports of earlier attempts (starts of all workers) when a new attempt begins,
    /// except for the events of workers.
    pub(crate) fn drop_reports_of_earlier_attempts(&mut self) {
        self.drop_reports(|report| !matches!(report.message, FromAgent::Event { .. }));
    }

    /// Marks all stored reports of the agent as unsent, so that a new controller receives them from
    /// the oldest one on.
    pub(crate) fn resend_kept_reports(&mut self) {
        self.sent = 0;
    }

    /// Returns the number of the newest report (message that must reach a controller) that is kept
    /// for later controllers; 0 if no report is kept.
    pub(crate) fn last_kept_number(&self) -> u64 {
        self.reports.back().map_or(0, |report| report.seq)
    }

    /// Returns whether unacknowledged events of workers fill the log, so that the agent must read
    /// no further messages of its workers.
    pub(crate) fn is_full(&self) -> bool {
        self.event_bytes >= MAX_UNACKNOWLEDGED_BYTES
    }

    /// Returns whether the agent has a report (message that must reach a controller) that was not
    /// yet sent to the present controller.
    pub(crate) fn has_unsent(&self) -> bool {
        self.last_kept_number() > self.sent
    }

    /// Drops those kept reports (messages that must reach a controller) for which the function
    /// `is_dropped` returns `true`.
    fn drop_reports(&mut self, is_dropped: impl Fn(&KeptReport) -> bool) {
        let mut dropped_bytes = 0;
        self.reports.retain(|report| {
            let drops = is_dropped(report);
            dropped_bytes += if drops { report.event_bytes } else { 0 };
            !drops
        });
        self.event_bytes -= dropped_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::event::Event;

    /// Builds a report with an event of rank 0 in attempt 0. `text` is part of the event.
    fn build_event(text: &str) -> FromAgent {
        FromAgent::Event { attempt: 0, rank: 0, event: Event::new_notice(None, text), is_restored: false }
    }

    /// Builds a report that the worker of rank 0 was started with the pid `pid`.
    fn build_started(pid: u32) -> FromAgent {
        FromAgent::Started { attempt: 0, rank: 0, pid }
    }

    /// Takes all unsent reports, and returns their numbers and ages.
    fn take_all(log: &mut ReportLog, now: Duration) -> Vec<(u64, u64)> {
        let mut taken = Vec::new();
        while let Some(FromAgent::Report { seq, age_ms, .. }) = log.take_unsent(now) {
            taken.push((seq, age_ms));
        }
        taken
    }

    #[test]
    fn events_are_kept_until_they_are_acknowledged_and_other_reports_until_the_next_attempt() {
        let mut log = ReportLog::default();
        log.append_report(Duration::from_secs(1), build_started(7));
        log.append_report(Duration::from_secs(2), build_event("a"));
        assert_eq!(take_all(&mut log, Duration::from_secs(3)), [(1, 2000), (2, 1000)]);
        log.append_report(Duration::from_secs(3), build_event("b"));
        // An acknowledgement of a report that was not sent has no effect on it.
        log.acknowledge(9);
        assert!(log.has_unsent());
        assert_eq!(take_all(&mut log, Duration::from_secs(4)), [(3, 1000)]);
        log.resend_kept_reports();
        assert_eq!(take_all(&mut log, Duration::from_secs(4)), [(1, 3000), (3, 1000)]);
        log.drop_reports_of_earlier_attempts();
        log.resend_kept_reports();
        assert_eq!(take_all(&mut log, Duration::from_secs(4)), [(3, 1000)]);
        log.acknowledge(3);
        assert_eq!((log.last_kept_number(), log.event_bytes), (0, 0));
        log.append_report(Duration::from_secs(5), build_event("c"));
        assert_eq!(take_all(&mut log, Duration::from_secs(5)), [(4, 0)], "numbers are not used again");
    }

    #[test]
    fn only_the_newest_stall_of_a_rank_is_kept() {
        let stalled =
            |rank| FromAgent::Stalled { attempt: 0, rank, stalled_ms: 5, suspended: false, shows_hang: true };
        let mut log = ReportLog::default();
        for rank in [0, 1, 0] {
            log.append_report(Duration::ZERO, stalled(rank));
            log.append_report(Duration::ZERO, FromAgent::Recovered { attempt: 0, rank });
            take_all(&mut log, Duration::ZERO);
        }
        log.resend_kept_reports();
        assert_eq!(take_all(&mut log, Duration::ZERO), [(3, 0), (4, 0), (5, 0), (6, 0)]);
    }

    #[test]
    fn a_full_log_asks_for_a_pause_until_events_are_acknowledged() {
        let mut log = ReportLog::default();
        let text = "x".repeat(MAX_UNACKNOWLEDGED_BYTES / 8);
        for _ in 0..8 {
            assert!(!log.is_full());
            log.append_report(Duration::ZERO, build_event(&text));
        }
        assert!(log.is_full());
        take_all(&mut log, Duration::ZERO);
        log.acknowledge(2);
        assert!(!log.is_full());
    }
}
