//! The limits of the rendezvous store: the sizes of keys, values, messages and of the whole store.

/// The length of the longest key that the rendezvous store accepts, in bytes. Requests with longer
/// keys are rejected.
pub(super) const MAX_KEY_BYTES: u64 = 8 << 10;
/// The length of the longest value that the rendezvous store accepts, in bytes. Requests with
/// longer values are rejected.
pub(super) const MAX_VALUE_BYTES: u64 = 8 << 20;
/// The largest number of keys in one request to the rendezvous store. Requests with more keys are
/// rejected.
pub(super) const MAX_KEYS_PER_REQUEST: u64 = 128 << 10;
/// The length of the longest request to the rendezvous store, and of its longest reply, in bytes.
/// Longer requests are rejected, and so are requests with longer replies.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// The largest total size, in bytes, of the keys, values, queues and waits in the rendezvous store,
/// including a fixed overhead for each. A request that would exceed it is rejected.
pub(super) const MAX_STORE_BYTES: usize = 1 << 30;
