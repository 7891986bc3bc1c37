//! [`PreviousController`]: the controller that an agent obeys again if a new controller is lost
//! before it takes over the run.
use protocol::control::ControllerToken;
use std::time::Duration;

/// What the agent remembers about its previous controller until a new controller has taken over the
/// run: the token that identifies the controller, and since when it was silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreviousController {
    pub(super) token: ControllerToken,
    /// The time since which the agent had received no message of the previous controller.
    pub(super) unattended_since: Duration,
}
