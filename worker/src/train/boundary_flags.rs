//! Flags that ranks exchange at the end of each step, such as the request to stop. A flag that one
//! rank sets applies to all ranks.

/// Set if a rank was asked to save a checkpoint and stop.
pub const STOP: u64 = 1;
/// Set if a checkpoint was requested or is due.
pub const SAVE: u64 = 2;
/// Set if rank 0 has reloaded the job file. The reloaded values are exchanged after this step.
pub const RELOAD: u64 = 8;
/// Set if the background writer of a rank is still writing a checkpoint.
pub const WRITING: u64 = 4;
