//! Flags that ranks exchange at the end of each step, such as the request to stop. A flag that one
//! rank sets applies to all ranks.

/// The flag that a rank sets if it was asked to save a checkpoint and stop.
pub const STOP: u64 = 1;
/// The flag that rank 0 sets if all ranks must save a checkpoint after this step, because a save
/// was requested or the save interval (a duration) has passed.
pub const SAVE: u64 = 2;
/// The flag that rank 0 sets if it has reloaded a job file that the user changed during the run.
/// The reloaded values are exchanged after this step.
pub const RELOAD: u64 = 8;
/// The flag that a rank sets as long as its background thread is writing this rank's shard of a
/// checkpoint.
pub const WRITING: u64 = 4;
