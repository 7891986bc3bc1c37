//! [`HeldReports`]: reports of slow ranks that wait for the next measurement of their host, because
//! the reason is not known yet.
use jobspec::ids::Rank;
use protocol::{
    event::{Event, StragglerReport},
    straggler::StragglerKind,
};

/// The longest time for which a report is held, in seconds. Agents measure every two seconds.
const MAX_HOLD_SECONDS: f64 = 5.0;
/// The largest number of reports that are held.
const MAX_HELD_REPORTS: usize = 16;

/// Reports of slow ranks that are held back, with the times since which they are held.
#[derive(Default)]
pub(super) struct HeldReports(Vec<(StragglerReport, f64)>);

impl HeldReports {
    /// Holds back a report at the time `time`. Returns false if too many reports are held.
    pub(super) fn hold(&mut self, report: &StragglerReport, time: f64) -> bool {
        let has_space = self.0.len() < MAX_HELD_REPORTS;
        if has_space {
            self.0.push((report.clone(), time));
        }
        has_space
    }

    /// Takes the reports about ranks of a host that was measured at the time `time`, and those that
    /// were held for too long.
    pub(super) fn take_due(&mut self, host: &str, time: f64) -> Vec<Event> {
        self.take_if(|report, since| report.host == host || time - since > MAX_HOLD_SECONDS)
    }

    /// Takes the report about a rank.
    pub(super) fn take_rank(&mut self, rank: Rank, kind: StragglerKind) -> Vec<Event> {
        self.take_if(|report, _| (report.rank, report.kind) == (rank, kind))
    }

    /// Takes all reports.
    pub(super) fn take_all(&mut self) -> Vec<Event> {
        self.take_if(|_, _| true)
    }

    fn take_if(&mut self, is_due: impl Fn(&StragglerReport, f64) -> bool) -> Vec<Event> {
        let due = self.0.extract_if(.., |(report, since)| is_due(report, *since));
        due.map(|(report, _)| Event::Straggler(Box::new(report))).collect()
    }
}
