//! What ranks agree on at a step boundary: one word of bits, or'ed over all ranks with the losses.

/// Save and leave.
pub const STOP: u64 = 1;
/// Save and go on.
pub const SAVE: u64 = 2;
/// Rank 0 has new values of the job file: they are exchanged after this step and hold for all ranks.
pub const RELOAD: u64 = 8;
/// This rank's background writer has not finished.
pub const WRITING: u64 = 4;
