//! The limits of the silence between controller and agents, and the interval of heartbeats.
use std::time::Duration;

/// The interval at which an agent, and the controller of an agent on another host, send heartbeats.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The time limit from starting an agent to its hello, its first message. The limit covers the
/// connection, the login and, where necessary, copying the executable.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an agent on the controller's machine may be silent before the controller counts it as
/// lost.
pub(crate) const AGENT_LEASE: Duration = Duration::from_secs(30);
/// How long an agent on another host may be silent before the controller counts it as lost. The
/// lease is short because networks fail silently.
pub(crate) const REMOTE_LEASE: Duration = Duration::from_secs(5);
/// The time without a message of the controller after which the agent kills its workers. Applies
/// only after the first heartbeat of the controller.
///
/// A controller on the agent's machine sends no heartbeats, because the agent notices the end of
/// such a controller by the end of the control connection.
pub(crate) const CONTROLLER_LEASE: Duration = Duration::from_secs(5);
/// How long a lost remote host is not used again. If the agent of the host is still alive, it
/// notices within this time that the controller is silent, and ends its workers.
pub(crate) const LOST_HOST_QUARANTINE: Duration = Duration::from_secs(CONTROLLER_LEASE.as_secs() + 7);
