//! Handles lost hosts on which agents and workers may still run although this controller has no
//! connection to them.
use super::{AgentEnd, ControllerAction, ControllerCore, HostIndex, host_state::OrphanedAttempt};
use std::time::Duration;

/// The interval at which the controller repeats its request that the agent of a lost host end,
/// while the restart of the workers waits for this end.
const EVICTION_RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// How long the controller waits at the end of a run until a lost host's agent has confirmed that
/// its workers have ended.
const EVICTION_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl ControllerCore {
    /// Ensures that workers of a lost host, which may still be running, do not run together with
    /// the restarted workers. Asks the host's agent, which may be alive, to end. If the host has
    /// all workers of the attempt, they can continue alone, so the next attempt waits until they
    /// must have ended.
    pub(super) fn guard_against_orphans(&mut self, now: Duration, id: HostIndex, end: &AgentEnd) {
        let host = &self.hosts[id];
        let is_child = !self.setup.hosts[id].remote && !host.is_adopted;
        if !host.active || is_child || (end.proves_workers_ended() && !host.is_adopted) {
            return;
        }
        let has_all = host.ranks.len() == self.workers.len();
        if has_all {
            let until = now + self.setup.orphan_timeout;
            let next_eviction = now + EVICTION_RETRY_INTERVAL;
            self.orphans = Some(OrphanedAttempt { host: id, until, next_eviction });
        }
        if has_all || self.setup.outlives_controller {
            self.actions.push(ControllerAction::EvictAgent(id));
        }
        if self.setup.outlives_controller && end.is_connection_end() {
            self.awaited_evictions.insert(id, now + EVICTION_ANSWER_TIMEOUT);
        }
    }

    /// Returns the latest time until which the controller, at the end of a run, waits for agents of
    /// lost hosts to confirm their end. An agent whose connection broke may obey a later
    /// controller, which then ends the run.
    pub(super) fn find_eviction_deadline(&self) -> Option<Duration> {
        self.awaited_evictions.values().max().copied()
    }

    /// Records that the agent of the lost host `id` has confirmed that its workers have ended, so
    /// that a restart need not wait for this host. The next attempt need not wait for it.
    pub(super) fn record_eviction(&mut self, id: HostIndex) {
        self.awaited_evictions.remove(&id);
        if self.orphans.as_ref().is_some_and(|orphans| orphans.host == id) {
            self.orphans = None;
        }
    }

    /// Returns the time at which the workers of a lost host must have ended, before which the job's
    /// workers are not restarted, or zero without such a host.
    pub(super) fn find_orphan_deadline(&self) -> Duration {
        self.orphans.as_ref().map_or(Duration::ZERO, |orphans| orphans.until)
    }

    /// Returns the next time at which a request to the agent of a lost host must be repeated or its
    /// answer is no longer awaited.
    pub(super) fn find_next_eviction_time(&self) -> Option<Duration> {
        let repetition = self.orphans.as_ref().map(|orphans| orphans.next_eviction.min(orphans.until));
        repetition.into_iter().chain(self.awaited_evictions.values().copied()).min()
    }

    /// Repeats every [`EVICTION_RETRY_INTERVAL`] the request that a lost host's agent end, while
    /// the restart of the workers waits for this end.
    pub(super) fn retry_eviction(&mut self, now: Duration) {
        self.awaited_evictions.retain(|_, until| now < *until);
        let Some(orphans) = &mut self.orphans else { return };
        if now >= orphans.until {
            self.orphans = None;
        } else if now >= orphans.next_eviction {
            orphans.next_eviction = now + EVICTION_RETRY_INTERVAL;
            let host = orphans.host;
            self.actions.push(ControllerAction::EvictAgent(host));
        }
    }
}
