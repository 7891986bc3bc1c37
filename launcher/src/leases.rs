//! How long agents and controllers may be silent before they count as lost (leases), and the
//! interval of their signs of life (heartbeats).
use std::time::Duration;

/// The interval at which agents on other hosts, and the controller, send each other signs of life
/// (heartbeats).
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent may take from its start to its first message (hello) to the controller. The
/// limit covers the connection and the login. It counts from the turn of the host, and again from
/// the end of a copy of the executable, which has a separate limit.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an agent may take to accept a controller that takes over a run, in addition to
/// `run.host_lease`. The limit covers the connection and the login. It counts like
/// [`HELLO_TIMEOUT`].
pub(crate) const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a controller that takes over a run repeats its request to an agent whose connection
/// other agents pass on, in addition to `run.host_lease`. Only silence shows such an agent that the
/// earlier controller is lost.
pub(crate) const ADOPTION_TIMEOUT: Duration = Duration::from_secs(15);
/// How long an agent on the controller's machine may be silent before the controller counts it as
/// lost.
pub(crate) const LOCAL_AGENT_LEASE: Duration = Duration::from_secs(30);
/// How long launch waits before it uses a lost remote host again, because the host is probably
/// still down. An agent that is still alive there is evicted by the next one.
pub(crate) const LOST_HOST_QUARANTINE: Duration = Duration::from_secs(12);
