//! Defines [`ReportId`], the pair of sender number and message number that identifies a message of
//! an agent or controller in the journal. A controller that takes over a run thus knows which lines
//! are already stored, and neither loses nor repeats a line.

/// Identifies a message of an agent or controller that the journal stores: the number of the
/// sender, and the sequence number of the message. Each agent has a number. The controllers of a
/// run share the number [`CONTROLLER_REPORT_STREAM`].
pub(crate) type ReportId = (u64, u64);

/// The number that marks events from a controller of the run in the journal, where each agent has
/// another number.
pub(crate) const CONTROLLER_REPORT_STREAM: u64 = 0;
