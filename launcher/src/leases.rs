//! Defines how often agents and controller send heartbeats, and after how much silence each of them
//! counts the other as lost.
use std::time::Duration;

/// The interval at which the controller and the agents (launch's processes on other hosts) send
/// each other signs of life (heartbeats).
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent (launch's process on a host) may take to send its first message to the
/// controller, from the start of the connection to the host. The limit covers the connection and
/// the login. It counts from the turn of the host, and again from the end of a copy of the
/// executable, which has a separate limit.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// The time in which an agent must accept a new controller after the loss of the previous one,
/// where `run.host_lease` is added to this time. The limit covers the connection and the login. It
/// counts like [`HELLO_TIMEOUT`].
pub(crate) const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);
/// The time for which a new controller repeats its request for control to an agent that is
/// connected only through other agents. `run.host_lease` is added. Only silence shows such an agent
/// that the earlier controller is lost.
pub(crate) const ADOPTION_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the agent (launch's process that starts workers) on the controller's machine may be
/// silent before the controller counts it as lost.
pub(crate) const LOCAL_AGENT_LEASE: Duration = Duration::from_secs(30);
/// The time after the loss of a remote host during which launch does not use the host again,
/// because the host is probably still down. An agent that is still alive there is evicted by the
/// next one.
pub(crate) const LOST_HOST_QUARANTINE: Duration = Duration::from_secs(12);
