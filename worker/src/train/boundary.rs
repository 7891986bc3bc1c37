//! Flags that ranks exchange with the losses at a step boundary; a flag of one rank applies to all.

/// Save and stop.
pub const STOP: u64 = 1;
/// Save and continue.
pub const SAVE: u64 = 2;
/// Rank 0 has reloaded the job file; its values are exchanged after this step.
pub const RELOAD: u64 = 8;
/// The background writer of this rank is still writing a checkpoint.
pub const WRITING: u64 = 4;
