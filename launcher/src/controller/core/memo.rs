//! Sends the state of the run to all agents before each order, such as a stop, so that a later
//! controller can restore this state.
use super::{
    AttemptState, ControllerAction, ControllerCore, HostIndex,
    adoption_state::AgedMemo,
    host_state::{AgentConnectionState, HostState},
    run_memo::{MemoPhase, RunMemo, StoredMemo},
};
use crate::controller::journal::JournalSummary;
use std::time::Duration;

impl ControllerCore {
    /// Sends the present state of the run (the memo) to all agents that have joined, which keep it
    /// for a later controller. Does nothing if the run ends with its controller.
    pub(super) fn send_memo(&mut self, now: Duration) {
        if self.setup.outlives_controller {
            let hosts = (0..self.hosts.len())
                .filter(|id| self.hosts[*id].agent == AgentConnectionState::Joined)
                .collect();
            self.request_sending_memo(now, hosts);
        }
    }

    /// Sends the present state of the run (the memo) to the agent of host `id`, which keeps it for
    /// a later controller. Does nothing if the run ends with its controller. The agent must have
    /// joined.
    pub(super) fn send_memo_to(&mut self, now: Duration, id: HostIndex) {
        if self.setup.outlives_controller {
            self.request_sending_memo(now, vec![id]);
        }
    }

    /// Requests that the run's present state (the memo) be sent to the agents of `hosts`, which
    /// keep it for a later controller.
    fn request_sending_memo(&mut self, now: Duration, hosts: Vec<HostIndex>) {
        let memo = Box::new(self.build_memo(now));
        self.actions.push(ControllerAction::SendMemo { hosts, memo });
    }

    /// Builds the memo, which is the part of the run's state that agents store so that a later
    /// controller can take over the run.
    fn build_memo(&mut self, now: Duration) -> RunMemo {
        self.memos += 1;
        let phase = match self.state {
            AttemptState::Adopting
            | AttemptState::Joining
            | AttemptState::Preparing
            | AttemptState::Backoff { .. }
            | AttemptState::Finished => MemoPhase::BeforeStart,
            AttemptState::Running => MemoPhase::Running,
            AttemptState::Stopping(request) => MemoPhase::Stopping(request),
            AttemptState::Draining { host_lost } => MemoPhase::Draining { host_lost },
            AttemptState::Ending => MemoPhase::Ending,
        };
        let troubled = self.hosts.iter().enumerate().filter(|(_, host)| host.failures > 0 || host.excluded);
        let lost = self.hosts.iter().enumerate().filter_map(|(id, host)| {
            // Without an end, this controller has not handled the loss yet.
            let is_lost = host.agent == AgentConnectionState::Lost && !host.quarantined_until.is_zero();
            let end = host.inherited_quarantine_end.or(is_lost.then_some(host.quarantined_until))?;
            Some((id, end.saturating_sub(now).as_millis() as u64))
        });
        RunMemo {
            token: self.setup.token,
            number: self.memos,
            attempt: self.attempt,
            phase,
            stop_request: self.stop_request,
            killed: self.killed,
            restarts: self.history.used,
            last_end: self.history.last,
            no_progress: self.history.no_progress,
            cause: self.cause.clone(),
            is_unreported: self.unreported_since.is_some(),
            no_restart: self.no_restart,
            restart_pause: self.restart_pause,
            host_lost: self.host_lost,
            last_failure: self.last_failure.clone(),
            troubled_hosts: troubled.map(|(id, host)| (id, host.failures, host.excluded)).collect(),
            lost_hosts: lost.collect(),
        }
    }

    /// Restores the state of a run that was taken over, except its workers, from the agents' newest
    /// memo and the journal.
    pub(super) fn restore_memo(&mut self, now: Duration, newest: AgedMemo, summary: &JournalSummary) {
        let age = newest.age(now);
        let StoredMemo { memo, newest_event, .. } = newest.stored;
        self.attempt = memo.attempt;
        (self.stop_request, self.killed) = (memo.stop_request, memo.killed);
        self.history.used = memo.restarts;
        (self.history.last, self.history.no_progress) = (memo.last_end, memo.no_progress);
        (self.cause, self.no_restart) = (memo.cause, memo.no_restart);
        // The previous controller may have reported the failure after it wrote the memo.
        let is_unreported = memo.is_unreported && summary.last_failure <= newest_event;
        self.unreported_since = is_unreported.then_some(now);
        self.restart_pause = memo.restart_pause;
        (self.host_lost, self.last_failure) = (memo.host_lost, memo.last_failure);
        for (id, failures, is_excluded) in memo.troubled_hosts {
            if let Some(host) = self.hosts.get_mut(id) {
                (host.failures, host.excluded) = (failures, is_excluded);
            }
        }
        for (id, left_ms) in memo.lost_hosts {
            let is_unadopted = |host: &&mut HostState| host.agent != AgentConnectionState::Joined;
            if let Some(host) = self.hosts.get_mut(id).filter(is_unadopted) {
                let left = Duration::from_millis(left_ms).saturating_sub(age);
                host.inherited_quarantine_end = Some(now + left);
            }
        }
        (self.step, self.stepped) = (summary.step, summary.has_stepped);
        self.checkpoint.clone_from(&summary.checkpoint);
        let journaled = summary.placement.as_ref().map_or(0, |(attempt, _)| *attempt);
        if memo.phase != MemoPhase::BeforeStart && journaled == memo.attempt {
            (self.attempt_step, self.attempt_saved) = (summary.attempt_step, summary.attempt_saved);
        }
    }
}
