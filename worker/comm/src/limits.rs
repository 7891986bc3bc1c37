//! Limits on the number of ranks in a group and on the bytes that a rank may gather.

/// The largest number of bytes that one rank may pass to the collective
/// [`crate::Comm::all_gather_bytes`].
pub const MAX_GATHER_BYTES: usize = 16 << 20;

/// The largest number of ranks in a group.
pub const MAX_WORLD_SIZE: usize = 1024;
