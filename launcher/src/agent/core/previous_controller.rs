//! [`PreviousController`]: the controller that an agent obeys again if a new controller is lost
//! before it takes over the run.
use protocol::control::ControllerToken;
use std::time::Duration;

/// The token of the agent's previous controller and the start of its silence, which are kept until
/// a new controller has taken over the run.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreviousController {
    pub(super) token: ControllerToken,
    /// The time since which the agent had received no message of the previous controller.
    pub(super) unattended_since: Duration,
}
