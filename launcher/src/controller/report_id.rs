//! [`ReportId`]: identifies the report of an agent or controller from which a line of the journal
//! was written. A controller that takes over a run thus knows which lines are already stored, and
//! neither loses nor repeats a line.

/// Identifies the report from which a line of the journal was written: the number of the agent's
/// (or controllers') sequence of reports, and the number of the report in it. Each agent has a
/// sequence. The controllers of a run share the sequence [`CONTROLLER_REPORT_STREAM`].
pub(crate) type ReportId = (u64, u64);

/// The number under which the controllers of a run report events, in place of the number of an
/// agent's sequence of reports.
pub(crate) const CONTROLLER_REPORT_STREAM: u64 = 0;
