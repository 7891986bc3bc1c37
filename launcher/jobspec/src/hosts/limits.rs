//! Limits on the host lists, hostfiles and filters that users write.

/// The largest number of hosts of a job. Lists of more hosts are rejected.
pub const MAX_HOSTS: usize = 16_384;
/// The longest name of a host or user, in bytes. DNS allows 253 bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// The largest slot number that a filter of hosts may contain; a slot is the place of one worker on
/// a host. Slots are numbered from 0.
pub(super) const MAX_SLOT_NUMBER: u32 = 1023;
/// The largest number of slots (places of workers) that a hostfile or filter may give a host.
pub(super) const MAX_SLOTS_PER_HOST: u32 = 1024;
/// The largest number of digits of a number in the brackets of a host name, such as `n[01-03]`.
pub(super) const MAX_RANGE_DIGITS: usize = 9;
/// The largest number of pairs of brackets in one host name. Each pair holds ranges of numbers.
pub(super) const MAX_BRACKET_PAIRS: usize = 4;
