//! [`ReportId`]: identifies a line of the journal. A controller that takes over a run thus knows
//! which lines are already stored, and neither loses nor repeats a line.

/// The origin of a line of the journal: the number of a sequence of reports, and the number of the
/// report in this sequence. Each agent has a sequence. The controllers of a run share the sequence
/// [`CONTROLLER_STREAM`].
pub(crate) type ReportId = (u64, u64);

/// The number of the sequence of reports that the controllers of a run share.
pub(crate) const CONTROLLER_STREAM: u64 = 0;
