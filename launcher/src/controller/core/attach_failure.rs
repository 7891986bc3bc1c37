//! [`AttachFailure`]: the reason why a controller cannot take over a run from a lost controller.
use super::host_state::HostIndex;
use protocol::control::ControllerToken;

/// The reason why a controller cannot take over a run from a lost controller.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AttachFailure {
    /// An agent obeys another controller, which is alive.
    Controlled { host: HostIndex, silent_ms: u64 },
    /// An agent has obeyed a controller whose token is greater than that of this controller.
    Stale { token: ControllerToken },
    /// No agent of the run is alive. Holds the number of hosts that cannot be reached.
    NoAgents { unreachable: usize },
    /// No worker of the run was started.
    NotStarted,
    /// Too many hosts do not answer, so another controller might hold them.
    TooFewAnswers { adopted: usize, unreachable: Vec<HostIndex> },
    /// The user requested the end of the takeover.
    Interrupted,
}
