//! [`ReportId`]: identifies the report of an agent or controller from which a line of the journal
//! was written. A controller that takes over a run thus knows which lines are already stored, and
//! neither loses nor repeats a line.

/// Identifies the report of an agent or controller from which a line of the journal was written:
/// the number of the sender, and the number of the report among those of the sender. Each agent has
/// a number. The controllers of a run share the number [`CONTROLLER_REPORT_STREAM`].
pub(crate) type ReportId = (u64, u64);

/// The number of the sender under which all controllers of a run report their events; agents have
/// other numbers.
pub(crate) const CONTROLLER_REPORT_STREAM: u64 = 0;
