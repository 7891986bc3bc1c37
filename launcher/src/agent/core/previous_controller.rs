//! [`PreviousController`]: the controller that an agent obeys again if a new controller is lost
//! before it takes over the run.
use protocol::control::ControllerToken;
use std::time::Duration;

/// The token of the controller that the agent obeyed before the present one, and the time since
/// which that earlier controller had sent no message.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreviousController {
    pub(super) token: ControllerToken,
    /// The time since which the agent had received no message of the previous controller.
    pub(super) unattended_since: Duration,
}
