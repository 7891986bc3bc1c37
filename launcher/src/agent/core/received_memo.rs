//! [`ReceivedMemo`]: the state of the run that an agent keeps for a later controller.
use std::time::Duration;

/// The state of the run that only a controller knows (the memo), as the agent keeps it for a later
/// controller.
pub(super) struct ReceivedMemo {
    pub(super) text: String,
    /// The time at which the agent got the memo.
    pub(super) at: Duration,
}

impl ReceivedMemo {
    /// Returns how long before `now` the agent got the memo, in milliseconds.
    pub(super) fn age_ms(&self, now: Duration) -> u64 {
        now.saturating_sub(self.at).as_millis() as u64
    }
}
