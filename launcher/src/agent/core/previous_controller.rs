//! [`PreviousController`]: the controller that an agent obeys again if a new controller is lost
//! before it takes over the run.
use protocol::control::ControllerToken;
use std::time::Duration;

/// The controller that an agent obeyed before a new controller took control of the agent. Kept
/// until the new controller has taken over the run.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreviousController {
    pub(super) token: ControllerToken,
    /// The time since which the agent had received no message of the previous controller.
    pub(super) unattended_since: Duration,
}
