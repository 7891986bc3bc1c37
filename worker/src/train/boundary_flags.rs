//! Flags that ranks exchange at the end of each step, such as the request to stop. A flag that one
//! rank sets applies to all ranks.

/// The flag that a rank sets if it was asked to save a checkpoint and stop.
pub const STOP: u64 = 1;
/// The flag that a rank sets if it was asked to save a checkpoint, or if one is due after the step.
pub const SAVE: u64 = 2;
/// The flag that rank 0 sets if it has reloaded a job file that the user changed during the run.
/// The reloaded values are exchanged after this step.
pub const RELOAD: u64 = 8;
/// The flag that a rank sets while its background thread still writes its shard of a checkpoint.
pub const WRITING: u64 = 4;
