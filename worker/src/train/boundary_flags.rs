//! The boundary flags, which ranks exchange with the losses of a step. A flag that one rank sets
//! applies to all ranks.

/// A rank was asked to save a checkpoint and stop.
pub const STOP: u64 = 1;
/// A checkpoint was requested or is due.
pub const SAVE: u64 = 2;
/// Rank 0 has reloaded the job file; its values are exchanged after this step.
pub const RELOAD: u64 = 8;
/// The background writer of this rank is still writing a checkpoint.
pub const WRITING: u64 = 4;
