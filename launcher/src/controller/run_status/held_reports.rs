//! [`HeldReports`]: delays the reports of slow ranks with an unknown reason until the next
//! measurement of their host may show the reason.
use jobspec::ids::Rank;
use protocol::{
    event::{Event, StragglerReport},
    straggler::StragglerKind,
};

/// The longest time, in seconds, for which the report of a slow rank is delayed. Agents measure
/// every two seconds.
const MAX_HOLD_SECONDS: f64 = 5.0;
/// The largest number of reports about slow ranks that are delayed at the same time.
const MAX_HELD_REPORTS: usize = 16;

/// The delayed reports about slow ranks, each with the time in seconds since 1970 at which its
/// delay began.
#[derive(Default)]
pub(super) struct HeldReports(Vec<(StragglerReport, f64)>);

impl HeldReports {
    /// Stores a report about a slow rank for later, together with `time`, the time in seconds since
    /// 1970 at which its delay begins. Returns false if too many reports are held.
    pub(super) fn hold(&mut self, report: &StragglerReport, time: f64) -> bool {
        let has_space = self.0.len() < MAX_HELD_REPORTS;
        if has_space {
            self.0.push((report.clone(), time));
        }
        has_space
    }

    /// Removes and returns the delayed reports about ranks on `host`, which was just measured, and
    /// all reports that have waited too long.
    pub(super) fn take_due(&mut self, host: &str, time: f64) -> Vec<Event> {
        self.take_if(|report, since| report.host == host || time - since > MAX_HOLD_SECONDS)
    }

    /// Removes the delayed reports of one kind of slowness about the rank `rank` from the waiting
    /// reports, and returns them as events.
    pub(super) fn take_rank(&mut self, rank: Rank, kind: StragglerKind) -> Vec<Event> {
        self.take_if(|report, _| (report.rank, report.kind) == (rank, kind))
    }

    /// Removes and returns all delayed reports about slow ranks, for example at the end of an
    /// attempt.
    pub(super) fn take_all(&mut self) -> Vec<Event> {
        self.take_if(|_, _| true)
    }

    fn take_if(&mut self, is_due: impl Fn(&StragglerReport, f64) -> bool) -> Vec<Event> {
        let due = self.0.extract_if(.., |(report, since)| is_due(report, *since));
        due.map(|(report, _)| Event::Straggler(Box::new(report))).collect()
    }
}
