//! How long agents (launch's process on each host) and the controller may be silent before they
//! count as lost (leases), and the interval of their signs of life (heartbeats).
use std::time::Duration;

/// The interval at which the controller and the agents (launch's processes on other hosts) send
/// each other signs of life (heartbeats).
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent (launch's process on a host) may take from its start to its first message to
/// the controller, the hello. The limit covers the connection and the login. It counts from the
/// turn of the host, and again from the end of a copy of the executable, which has a separate
/// limit.
pub(crate) const HELLO_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an agent (launch's process on a host) may take to accept the controller that takes over
/// a run whose controller was lost; `run.host_lease` is added. The limit covers the connection and
/// the login. It counts like [`HELLO_TIMEOUT`].
pub(crate) const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a controller that takes over a run repeats its request to an agent (launch's process on
/// a host) that is connected to it through other agents; `run.host_lease` is added. Only silence
/// shows such an agent that the earlier controller is lost.
pub(crate) const ADOPTION_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the agent (launch's process that starts workers) on the controller's machine may be
/// silent before the controller counts it as lost.
pub(crate) const LOCAL_AGENT_LEASE: Duration = Duration::from_secs(30);
/// How long launch waits before it uses a lost remote host again, because the host is probably
/// still down. An agent that is still alive there is evicted by the next one.
pub(crate) const LOST_HOST_QUARANTINE: Duration = Duration::from_secs(12);
