//! [`HostState`]: the state of a host and its agent, as far as the controller knows it.
use crate::cluster::AgentStartStep;
use jobspec::ids::Rank;
use std::{cmp::Reverse, collections::BinaryHeap, ops::Range, time::Duration};

/// The index, from 0, of a host in the job's list of hosts.
pub(crate) type HostIndex = usize;

/// The state of a host's agent as the controller knows it: not started, starting, joined (its first
/// message has arrived) or lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AgentConnectionState {
    /// The agent is not started, or is released.
    #[default]
    NotStarted,
    /// The agent is started, and its hello has not arrived.
    Starting,
    /// The agent's hello has arrived.
    Joined,
    /// The agent ended, failed, or was killed because its lease expired.
    Lost,
}

/// What the controller knows about a host and its agent, such as its connection, failures and
/// ranks.
#[derive(Debug, Default)]
pub(super) struct HostState {
    pub(super) agent: AgentConnectionState,
    /// The host name that the agent reported in its hello; empty before the hello.
    pub(super) hostname: String,
    /// The process id of the agent; 0 before its hello.
    pub(super) pid: u32,
    /// The number that identifies the agent's sequence of reports; 0 before its hello.
    pub(super) stream: u64,
    /// The number of bytes of host memory that the job may use on the host; 0 if unknown.
    pub(super) memory: u64,
    /// The time at which the most recent message of the agent arrived or, before the first message,
    /// at which the agent was started.
    pub(super) last_heard: Duration,
    /// The host whose agent is connected with the controller and passes on the messages of this
    /// host's agent; `None` if this agent is connected with the controller itself.
    pub(super) inner_host: Option<HostIndex>,
    /// The most recent step of the agent's start that the transport has reported; `None` if it has
    /// reported no step.
    pub(super) start_step: Option<AgentStartStep>,
    /// The number of attempts that failed because of this host. With copies in memory, the number
    /// of such attempts since the last attempt that brought progress.
    pub(super) failures: u32,
    /// Whether the agent keeps copies of the training state in memory, from which the next attempt
    /// resumes.
    pub(super) keeps_copies: bool,
    /// Whether the agent was started to reach a lost host again while the job runs.
    pub(super) is_returning: bool,
    /// How often in a row the lost host was not reached again.
    pub(super) failed_returns: u32,
    /// For a lost host, the time of the next connection with it while the job runs.
    pub(super) return_at: Duration,
    /// How often the controller has waited again for the agent of the host, because the host was
    /// lost before an attempt began.
    pub(super) returns: u32,
    /// Whether the run no longer uses the host, because it caused too many failures or is no longer
    /// listed.
    pub(super) excluded: bool,
    /// Whether the host is no longer in the list of hosts.
    pub(super) unlisted: bool,
    /// Whether a notice has reported that the host is used although it is unlisted.
    pub(super) use_reported: bool,
    /// For a lost host, the time after which no process of the job can be alive on the host.
    pub(super) quarantined_until: Duration,
    /// For a host that an earlier controller has lost, the end of its quarantine, until this
    /// controller handles the loss during a takeover.
    pub(super) inherited_quarantine_end: Option<Duration>,
    /// Whether another controller has started the agent, so that it is no child of this one.
    pub(super) is_adopted: bool,
    /// Whether the host may have processes of this attempt.
    pub(super) active: bool,
    /// The ranks whose workers run on the host in this attempt; a contiguous range.
    pub(super) ranks: Range<Rank>,
    /// The number of workers of this attempt that are running on the host.
    pub(super) running: usize,
    /// The number of the host's newest entry in the lease queue. Entries of the host with other
    /// numbers are out of date and are ignored.
    pub(super) ticket: u32,
}

impl HostState {
    /// Returns whether the controller processes messages of the host's agent, because the agent was
    /// started and is not lost. Only then are its messages processed.
    pub(super) fn is_starting_or_joined(&self) -> bool {
        matches!(self.agent, AgentConnectionState::Starting | AgentConnectionState::Joined)
    }
}

/// A queue with the times at which the controller must check whether the agent of a host has sent
/// no message for too long. When an entry is due, the check either finds that the lease has expired
/// or schedules the next check. So a message of an agent needs no update of the queue.
#[derive(Debug, Default)]
pub(super) struct LeaseQueue(pub(super) BinaryHeap<Reverse<(Duration, HostIndex, u32)>>);

impl LeaseQueue {
    /// Returns the time of the next check whether the agent of a host has sent no message for too
    /// long, or `None` without a pending check.
    pub(super) fn find_next_check(&self) -> Option<Duration> {
        // A lease expires when it is exceeded, not when it is reached.
        self.0.peek().map(|Reverse((at, ..))| *at + Duration::from_nanos(1))
    }
}

/// A lost host on which all workers of the job may still run without a controller, and the time at
/// which these workers have certainly ended.
#[derive(Debug)]
pub(super) struct OrphanedAttempt {
    pub(super) host: HostIndex,
    /// The time at which the workers must have ended.
    pub(super) until: Duration,
    pub(super) next_eviction: Duration,
}
