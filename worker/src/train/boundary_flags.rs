//! Flags that ranks exchange at the end of each step, such as the request to stop. A flag that one
//! rank sets applies to all ranks.

/// The flag that a rank sets if it was asked to save a checkpoint and stop.
pub const STOP: u64 = 1;
/// The flag that a rank sets if a checkpoint was requested or is due.
pub const SAVE: u64 = 2;
/// The flag that rank 0 sets if it has reloaded the job file. The reloaded values are exchanged
/// after this step.
pub const RELOAD: u64 = 8;
/// The flag that a rank sets if its background thread is still writing a checkpoint.
pub const WRITING: u64 = 4;
