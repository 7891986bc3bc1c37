//! [`Adoption`]: the state of taking over a run from a lost controller. [`AdoptedRun`] is the
//! result.
use super::{
    host_state::HostIndex,
    run_memo::{MemoPhase, StoredMemo},
};
use crate::controller::root_cause::AgentEnd;
use protocol::control::{AdoptedAgent, FromAgent, HostPlan, WorkerPeers};
use std::time::Duration;

/// The answer of one host to a controller that takes over the run: none yet, an obeying agent, no
/// agent, or unreachable.
#[derive(Debug, Default)]
pub(super) enum HostAnswer {
    /// The host has not answered.
    #[default]
    Awaited,
    /// The agent obeys this controller. `is_complete` states whether the agent has repeated all
    /// reports that were made before, and `memo_at` when the agent got its memo.
    Adopted { agent: Box<AdoptedAgent>, is_complete: bool, memo_at: SignedTimeMs },
    /// No agent of the run is alive on the host.
    NoAgent,
    /// The host cannot be reached, or its agent does not answer.
    Unreachable(AgentEnd),
}

/// A time on the clock of this controller in milliseconds, which is negative before the start of
/// the controller.
pub(super) type SignedTimeMs = i64;

/// Returns the time, on the clock of this controller, that is `age_ms` milliseconds before `now`.
pub(super) fn subtract_age(now: Duration, age_ms: u64) -> SignedTimeMs {
    to_time_ms(now).saturating_sub(i64::try_from(age_ms).unwrap_or(i64::MAX))
}

/// Returns how long before `now` the time `at` was.
fn compute_age(now: Duration, at: SignedTimeMs) -> Duration {
    Duration::from_millis(u64::try_from(to_time_ms(now).saturating_sub(at)).unwrap_or(0))
}

/// Converts a time on the clock of this controller to milliseconds.
fn to_time_ms(now: Duration) -> SignedTimeMs {
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// A report of an agent, such as a worker's exit, that the agent has repeated for a controller that
/// takes over the run. It waits until the new controller has taken over the journal.
#[derive(Debug)]
pub(super) struct ReplayedReport {
    /// The time at which the agent made the report.
    pub(super) at: SignedTimeMs,
    pub(super) host: HostIndex,
    pub(super) seq: u64,
    pub(super) message: Box<FromAgent>,
}

impl ReplayedReport {
    /// Returns how long before `now` the agent made the report, in milliseconds.
    pub(super) fn age_ms(&self, now: Duration) -> u64 {
        compute_age(now, self.at).as_millis() as u64
    }
}

/// The newest state of the run that agents keep for a later controller (the memo), with the time at
/// which an agent got it.
#[derive(Clone, Debug)]
pub(super) struct AgedMemo {
    pub(super) stored: StoredMemo,
    at: SignedTimeMs,
}

impl AgedMemo {
    /// Returns how long before `now` the earlier controller has sent the memo.
    pub(super) fn age(&self, now: Duration) -> Duration {
        compute_age(now, self.at)
    }
}

/// The progress of taking over a run: the answers of the hosts' agents, their repeated reports, and
/// the newest copy of the run's state.
#[derive(Debug)]
pub(super) struct Adoption {
    /// The answers of the hosts, by index.
    pub(super) hosts: Vec<HostAnswer>,
    pub(super) reports: Vec<ReplayedReport>,
    /// The number and the hosts of the most recent attempt according to the journal; `None` if the
    /// journal does not record them.
    pub(super) placement: Option<(u32, Vec<String>)>,
    /// Whether the run is taken over although hosts do not answer.
    pub(super) is_forced: bool,
    /// The newest memo, which holds the state of the run that agents keep for a later controller;
    /// `None` until the takeover of the journal begins.
    pub(super) memo: Option<AgedMemo>,
}

impl Adoption {
    /// Creates the state of taking over a run with `hosts` hosts, before any host has answered.
    pub(super) fn new(hosts: usize, placement: Option<(u32, Vec<String>)>, is_forced: bool) -> Adoption {
        let answers = (0..hosts).map(|_| HostAnswer::Awaited).collect();
        Adoption { hosts: answers, reports: Vec::new(), placement, is_forced, memo: None }
    }

    /// Returns the agents that have accepted this controller during a takeover, each with the index
    /// of its host.
    pub(super) fn adopted_agents(&self) -> impl Iterator<Item = (HostIndex, &AdoptedAgent)> {
        self.hosts.iter().enumerate().filter_map(|(id, answer)| match answer {
            HostAnswer::Adopted { agent, .. } => Some((id, &**agent)),
            _ => None,
        })
    }

    /// Returns whether the takeover waits for no more answers, because each host's agent has
    /// answered or is known to be unreachable.
    pub(super) fn have_all_hosts_answered(&self) -> bool {
        self.hosts.iter().all(|answer| {
            !matches!(answer, HostAnswer::Awaited | HostAnswer::Adopted { is_complete: false, .. })
        })
    }

    /// Finds the newest memo (the state of the run that agents keep for a later controller) among
    /// the answers of all agents.
    pub(super) fn find_newest_memo(&self) -> Option<AgedMemo> {
        let parsed = self.hosts.iter().filter_map(|answer| match answer {
            HostAnswer::Adopted { agent, memo_at, .. } => {
                let stored = serde_json::from_str(agent.memo.as_deref()?).ok()?;
                Some(AgedMemo { stored, at: *memo_at })
            }
            _ => None,
        });
        parsed.max_by_key(|AgedMemo { stored: StoredMemo { memo, .. }, .. }| (memo.token, memo.number))
    }
}

/// The state of a run from which a new controller continues after a takeover, such as the run's
/// phase and the agents' plans and reports. The reports of its agents are not processed yet.
pub(super) struct AdoptedRun {
    pub(super) phase: MemoPhase,
    /// The plan of each adopted host that has one.
    pub(super) plans: Vec<(HostIndex, HostPlan)>,
    /// The addresses of the workers of an attempt, and a host whose agent has reported them; `None`
    /// if no agent has.
    pub(super) peers: Option<(HostIndex, WorkerPeers)>,
    /// The number and the hosts of the most recent attempt according to the journal; `None` if the
    /// journal does not record them.
    pub(super) placement: Option<(u32, Vec<String>)>,
    pub(super) reports: Vec<ReplayedReport>,
    /// The hosts whose agents were not adopted, with the reasons.
    pub(super) lost: Vec<(HostIndex, AgentEnd)>,
    /// The longest time for which an agent had no controller.
    pub(super) unattended: Duration,
}
