//! The part of the controller's state machine that tracks which agents have joined, which hosts are
//! lost, and which hosts run the workers.
use super::host_state::{AgentConnectionState, HostIndex, HostState};
use super::{
    AgentEnd, AttemptState, ControllerAction, ControllerCore, FailureReason, PlannedWorker,
    RENDEZVOUS_BIND_TIMEOUT, RootCause, WorkerState,
};
use crate::{
    cluster::AgentStartStep,
    controller::{peer_exchange::PeerExchange, root_cause::AgentLabel},
    leases::{ATTACH_TIMEOUT, HEARTBEAT_INTERVAL, LOCAL_AGENT_LEASE},
};
use diagnostic::{Diagnostic, codes::run};
use jobspec::ids::Rank;
use protocol::{
    control::{HostInventory, PROTOCOL_VERSION, RendezvousRequest, ToAgent},
    event::Event,
    exit,
};
use std::{cmp::Reverse, time::Duration};

/// The number of checks of a silent host within the time limit for silence, if its messages are
/// forwarded by an agent that is silent, too.
const CHECKS_PER_EXTENDED_LEASE: u32 = 10;

impl ControllerCore {
    /// Returns how long the agent of a host may send no message before the host counts as lost,
    /// which depends on whether the agent has joined. Returns `None` if the time is not limited,
    /// because the agent waits for its turn to be started.
    fn select_host_lease(&self, id: HostIndex) -> Option<Duration> {
        let host = &self.hosts[id];
        match (host.agent, host.start_step) {
            (AgentConnectionState::Joined, _) if self.setup.hosts[id].remote => Some(self.setup.host_lease),
            (AgentConnectionState::Joined, _) => Some(LOCAL_AGENT_LEASE),
            (AgentConnectionState::Starting, Some(AgentStartStep::Waiting)) => None,
            (AgentConnectionState::Starting, Some(AgentStartStep::Copying(limit))) => Some(limit),
            _ if self.state == AttemptState::Adopting => Some(self.setup.host_lease + ATTACH_TIMEOUT),
            _ => Some(self.setup.arrival.hello_timeout),
        }
    }

    /// Restarts the time limit for an agent's first message after a part of the agent's start, such
    /// as the copy of the executable, is done.
    pub(super) fn handle_agent_start_step(&mut self, now: Duration, id: HostIndex, step: AgentStartStep) {
        let Some(host) = self.hosts.get_mut(id) else { return };
        if host.agent == AgentConnectionState::Starting {
            (host.start_step, host.last_heard) = (Some(step), now);
            self.schedule_lease_check(id);
        }
    }

    /// Schedules a check of the host `id` for the time at which the host counts as lost unless its
    /// agent has sent another message. Invalidates the host's earlier entry in the queue.
    pub(super) fn schedule_lease_check(&mut self, id: HostIndex) {
        let ticket = self.hosts[id].ticket.wrapping_add(1);
        self.hosts[id].ticket = ticket;
        if let Some(lease) = self.select_host_lease(id) {
            self.leases.0.push(Reverse((self.hosts[id].last_heard + lease, id, ticket)));
        }
    }

    /// Schedules, for the time `due`, the next check whether the agent of a host was silent for too
    /// long.
    fn schedule_lease_check_at(&mut self, id: HostIndex, due: Duration) {
        let host = &mut self.hosts[id];
        host.ticket = host.ticket.wrapping_add(1);
        self.leases.0.push(Reverse((due, id, host.ticket)));
    }

    /// Sends the first message (hello) to an agent that was just started, and begins to measure its
    /// silence.
    pub(super) fn send_hello(&mut self, now: Duration, id: HostIndex) {
        let host = &mut self.hosts[id];
        (host.agent, host.last_heard, host.pid) = (AgentConnectionState::Starting, now, 0);
        (host.start_step, host.is_returning) = (None, false);
        self.schedule_lease_check(id);
        self.actions.push(ControllerAction::SendHello(id));
    }

    /// Starts the agent of a host and sends the first message (hello) to it.
    pub(super) fn start_agent(&mut self, now: Duration, id: HostIndex) {
        self.actions.push(ControllerAction::StartAgent(id));
        self.send_hello(now, id);
    }

    /// Handles an agent's first message (hello): records that the host has joined, and stores the
    /// reported process ID and inventory. Fails the attempt if the agent speaks another version of
    /// the control protocol and the host is needed.
    pub(super) fn handle_agent_hello(
        &mut self,
        now: Duration,
        id: HostIndex,
        version: u32,
        pid: u32,
        inventory: HostInventory,
    ) {
        let host = &mut self.hosts[id];
        if host.agent != AgentConnectionState::Starting {
            return;
        }
        host.is_adopted = false;
        (host.agent, host.pid, host.memory) = (AgentConnectionState::Joined, pid, inventory.memory);
        host.hostname.clone_from(&inventory.host);
        // The lease of a joined agent is shorter than the limit of its hello.
        self.schedule_lease_check(id);
        if version != PROTOCOL_VERSION {
            let message = format!(
                "the agent speaks version {version} of the control protocol and the controller version {PROTOCOL_VERSION}"
            );
            let error = Diagnostic::error(run::AGENT_VERSION_MISMATCH, message)
                .with_help("install the same build of launch on every host");
            return self.handle_agent_failure(now, id, error);
        }
        self.record_host_return(id);
        if self.setup.hosts[id].remote {
            // From the first heartbeat on, the agent ends its workers when the controller is
            // silent.
            self.actions.push(ControllerAction::Send(id, ToAgent::Heartbeat));
        }
        self.actions.push(ControllerAction::RecordInventory(id, inventory));
        self.send_memo_to(now, id);
        // The agent has locked its host, so no earlier one is left.
        self.record_eviction(id);
        self.release_unlisted_hosts(now);
        self.try_prepare_attempt(now);
    }

    /// Handles an agent's report that the agent cannot continue: the agent's host counts as lost,
    /// or all workers are ended as failed. If an attempt runs that does not use the host, the host
    /// counts as lost and the run continues. Otherwise the attempt fails.
    pub(super) fn handle_agent_failure(&mut self, now: Duration, id: HostIndex, diagnostic: Diagnostic) {
        let joining = matches!(self.state, AttemptState::Joining | AttemptState::Preparing);
        if !joining && !self.hosts[id].active {
            self.actions.push(ControllerAction::KillAgent(id));
            return self.handle_agent_gone(now, id, AgentEnd::Failed(diagnostic));
        }
        let exit_code = if joining { exit::CLUSTER } else { exit::FAILED };
        let cause = self.build_agent_end_cause(id, AgentEnd::Failed(diagnostic)).with_exit_code(exit_code);
        self.fail_attempt(now, cause);
    }

    /// Returns whether the attempt (start of all workers) with the number `attempt` is the current
    /// one and its workers are not started yet.
    pub(super) fn is_preparing_attempt(&self, attempt: u32) -> bool {
        self.state == AttemptState::Preparing && attempt == self.attempt
    }

    /// Requests that the agent of the first planned host bind the rendezvous port (`MASTER_PORT`)
    /// before the workers are started.
    pub(super) fn request_rendezvous_bind(
        &mut self,
        now: Duration,
        workers: Vec<Vec<PlannedWorker>>,
        bind: RendezvousRequest,
    ) {
        let Some(first) = self.members.first().copied() else { return };
        self.planned = Some(workers);
        self.phase_deadline = Some(now + RENDEZVOUS_BIND_TIMEOUT);
        self.actions.push(ControllerAction::Send(first, ToAgent::Bind(bind)));
    }

    /// Starts the planned workers after an agent has bound the rendezvous port (`MASTER_PORT`), or
    /// gives up their start if the agent could not bind it.
    pub(super) fn handle_bound_rendezvous(
        &mut self,
        now: Duration,
        host: HostIndex,
        attempt: u32,
        port: diagnostic::Result<u16>,
    ) {
        if !self.is_preparing_attempt(attempt) || self.members.first() != Some(&host) {
            return;
        }
        let Some(workers) = self.planned.take() else { return };
        match port {
            Ok(port) => self.start_attempt(now, workers, port),
            Err(diagnostic) => self.reject_attempt(now, diagnostic),
        }
    }

    /// Starts the planned workers on all their hosts, after their rendezvous port (`MASTER_PORT`)
    /// was bound. `plan` holds the workers of each member host, and `port` is that of the
    /// rendezvous.
    fn start_attempt(&mut self, now: Duration, plan: Vec<Vec<PlannedWorker>>, port: u16) {
        self.phase_deadline = None;
        self.workers.clear();
        self.hosts.iter_mut().for_each(|host| host.keeps_copies = false);
        for (&id, planned) in self.members.iter().zip(plan) {
            let first = self.workers.len() as Rank;
            let workers = planned.into_iter().map(|worker| WorkerState::new(id, worker.log));
            self.workers.extend(workers);
            let host = &mut self.hosts[id];
            (host.active, host.running, host.keeps_copies) = (true, 0, self.setup.has_memory_copies);
            host.ranks = first..self.workers.len() as Rank;
        }
        (self.active_hosts, self.running, self.stalled) = (self.members.len(), 0, 0);
        self.peer_exchange = PeerExchange::new(self.attempt, self.workers.len());
        self.state = AttemptState::Running;
        if self.hosts.len() > 1 || self.attempt > 0 {
            let hosts = self.members.iter().map(|id| self.setup.hosts[*id].name.clone()).collect();
            let workers = self.members.iter().map(|id| self.hosts[*id].ranks.len() as u32).collect();
            let world = self.workers.len() as u32;
            self.actions.push(ControllerAction::Event(Event::Placement {
                attempt: self.attempt,
                world,
                hosts,
                workers,
            }));
        }
        // The memo contains the placement.
        self.send_memo(now);
        self.actions.push(ControllerAction::StartWorkers { port });
        // Hosts that were lost meanwhile have no workers of this attempt.
        let lost =
            self.members.iter().copied().find(|id| self.hosts[*id].agent != AgentConnectionState::Joined);
        for id in self.members.clone() {
            if self.hosts[id].agent != AgentConnectionState::Joined {
                self.mark_host_inactive(id);
            }
        }
        if let Some(id) = lost {
            let message = format!("lost {} before its workers started", self.format_host_label(id));
            let host = self.setup.hosts[id].name.clone();
            let reason = FailureReason::HostLost { host, silent_s: None };
            self.fail_attempt(now, RootCause::new(id, reason, message).with_exit_code(exit::CLUSTER));
        }
    }

    /// Records that no worker of the current start of the job runs on the host `id` any more,
    /// because its processes have ended or the host is lost.
    pub(super) fn mark_host_inactive(&mut self, id: HostIndex) {
        let host = &mut self.hosts[id];
        if std::mem::take(&mut host.active) {
            self.active_hosts -= 1;
            self.running -= host.running;
            host.running = 0;
            for rank in host.ranks.clone() {
                let worker = &mut self.workers[rank as usize];
                if worker.is_running() && worker.stalled_for.take().is_some() {
                    self.stalled -= 1;
                }
            }
        }
    }

    /// Records that an agent has ended and its host is lost, so that a remote host is not used
    /// again for some time. Does nothing if the host is lost already or its agent was released.
    pub(super) fn handle_agent_gone(&mut self, now: Duration, id: HostIndex, end: AgentEnd) {
        if self.state == AttemptState::Adopting {
            return self.mark_host_not_adoptable(id, end);
        }
        // A lost host is counted once, and a released agent may end.
        if matches!(self.hosts[id].agent, AgentConnectionState::Lost | AgentConnectionState::NotStarted) {
            return;
        }
        if self.handle_failed_host_reconnection(now, id) {
            return;
        }
        let remote = self.setup.hosts[id].remote;
        let host = &mut self.hosts[id];
        (host.agent, host.keeps_copies) = (AgentConnectionState::Lost, false);
        // The quarantine counts from the loss, which an earlier controller may have seen.
        let quarantine_end = if remote { now + self.setup.arrival.quarantine } else { now };
        host.quarantined_until = host.inherited_quarantine_end.take().unwrap_or(quarantine_end);
        let was_active = host.active;
        self.schedule_host_reconnection(now, id);
        self.renew_leases_behind_host(now, id);
        self.guard_against_orphans(now, id, &end);
        let cause = self.build_agent_end_cause(id, end);
        self.mark_host_inactive(id);
        self.handle_lost_host(now, cause, was_active);
    }

    /// Builds the description of a failure whose root cause is that the agent on the host `id` has
    /// ended. Its exit code for `launch` is 1, which the caller may replace.
    fn build_agent_end_cause(&self, id: HostIndex, end: AgentEnd) -> RootCause {
        let remote = self.setup.hosts[id].remote;
        let host = if remote { &self.setup.hosts[id].name } else { self.choose_hostname(id) };
        let label = AgentLabel { host, remote, pid: self.hosts[id].pid };
        let cause = RootCause::new(id, end.to_failure_reason(label), end.format_message(label));
        match end.into_diagnostic() {
            Some(diagnostic) => cause.with_diagnostic(diagnostic),
            None => cause,
        }
    }

    /// Reacts to the loss of a host: waits for the host to return, continues without it, or fails
    /// the current start of the workers (attempt). Before the workers are started, the attempt
    /// fails only if fewer than `run.min_hosts` hosts are left. Afterwards the attempt fails if the
    /// host had workers of the attempt (`was_active`), unless the host was being drained.
    fn handle_lost_host(&mut self, now: Duration, cause: RootCause, was_active: bool) {
        self.host_lost = true;
        let id = cause.host;
        let is_used = match self.state {
            AttemptState::Joining => true,
            AttemptState::Preparing => self.members.contains(&id),
            _ => false,
        };
        if is_used && self.may_host_return(id) {
            return self.await_host_return(now, id, &cause.message);
        }
        match self.state {
            AttemptState::Joining => {
                self.restart_host_scan();
                self.hosts[id].failures += 1;
                if self.has_enough_hosts() {
                    self.emit_notice(format!("{}; the run continues without it", cause.message));
                    self.try_prepare_attempt(now);
                } else {
                    self.fail_attempt(now, cause.with_exit_code(exit::CLUSTER));
                }
            }
            AttemptState::Preparing if self.members.contains(&id) => {
                self.hosts[id].failures += 1;
                if self.has_enough_hosts() {
                    self.emit_notice(format!("{}; the run continues without it", cause.message));
                    self.state = AttemptState::Joining;
                    self.phase_deadline = None;
                    self.restart_host_scan();
                    // Another attempt number invalidates the plan that is being prepared.
                    self.attempt += 1;
                    self.try_prepare_attempt(now);
                } else {
                    self.fail_attempt(now, cause.with_exit_code(exit::CLUSTER));
                }
            }
            AttemptState::Draining { .. } if was_active && self.hosts[id].unlisted => {
                self.handle_lost_draining_host(now, &cause.message);
            }
            AttemptState::Adopting | AttemptState::Finished => {}
            AttemptState::Backoff { until } => {
                self.emit_notice(cause.message);
                let until = until.max(self.compute_next_attempt_time(now, Duration::ZERO));
                self.state = AttemptState::Backoff { until };
            }
            AttemptState::Preparing
            | AttemptState::Running
            | AttemptState::Stopping(_)
            | AttemptState::Draining { .. }
            | AttemptState::Ending => {
                if was_active {
                    self.fail_attempt(now, cause);
                } else {
                    // The host is a spare, or its workers had ended.
                    self.emit_notice(cause.message);
                }
            }
        }
    }

    /// Returns whether the controller waits for a new agent on a host that was lost before the
    /// workers were started, because the host has not been lost too often.
    fn may_host_return(&self, id: HostIndex) -> bool {
        let host = &self.hosts[id];
        let has_joined = host.pid != 0;
        has_joined && !host.excluded && host.returns < self.setup.arrival.max_returns
    }

    /// Waits until a new agent joins from a host that was lost before the workers were started.
    /// `message` describes the loss.
    fn await_host_return(&mut self, now: Duration, id: HostIndex, message: &str) {
        self.emit_notice(format!("{message}; waiting until it joins again"));
        if self.state == AttemptState::Preparing {
            self.state = AttemptState::Joining;
            self.phase_deadline = None;
            // Another attempt number invalidates the plan that is being prepared.
            self.attempt += 1;
        }
        self.hosts[id].returns += 1;
        self.restart_host_scan();
        self.start_agent(now, id);
        self.try_prepare_attempt(now);
    }

    /// Returns whether at least `run.min_hosts` hosts have joined or may still join.
    fn has_enough_hosts(&self) -> bool {
        let usable = |host: &&HostState| host.is_starting_or_joined() && !host.excluded;
        self.hosts.iter().filter(usable).count() >= self.setup.min_hosts
    }

    /// Sends a heartbeat to all joined agents on other hosts whenever the heartbeat interval has
    /// passed since the last heartbeats.
    pub(super) fn send_heartbeats(&mut self, now: Duration) {
        if now < self.next_heartbeat {
            return;
        }
        self.next_heartbeat = now + HEARTBEAT_INTERVAL;
        let heartbeats = self.build_heartbeats();
        self.actions.extend(heartbeats);
    }

    /// Builds the actions that send a heartbeat to each agent on another host.
    pub(crate) fn build_heartbeats(&self) -> Vec<ControllerAction> {
        let remote = |id: &HostIndex| {
            self.setup.hosts[*id].remote && self.hosts[*id].agent == AgentConnectionState::Joined
        };
        let heartbeat = |id| ControllerAction::Send(id, ToAgent::Heartbeat);
        (0..self.hosts.len()).filter(remote).map(heartbeat).collect()
    }

    /// Kills agents that were silent for too long (whose leases have expired), and marks their
    /// hosts as lost.
    pub(super) fn expire_leases(&mut self, now: Duration) {
        while let Some(Reverse((due, id, ticket))) = self.leases.0.peek().copied()
            && now > due
            && self.state != AttemptState::Finished
        {
            self.leases.0.pop();
            if !self.hosts[id].is_starting_or_joined() || self.hosts[id].ticket != ticket {
                continue;
            }
            let Some(lease) = self.select_host_lease(id) else { continue };
            if now <= self.hosts[id].last_heard + lease {
                self.schedule_lease_check(id);
                continue;
            }
            if self.is_behind_silent_host(now, id, lease) {
                self.schedule_lease_check_at(id, now + lease / CHECKS_PER_EXTENDED_LEASE);
                continue;
            }
            let seconds = lease.as_secs();
            let end = match self.hosts[id].agent {
                AgentConnectionState::Starting => AgentEnd::NoHello { seconds },
                AgentConnectionState::NotStarted
                | AgentConnectionState::Joined
                | AgentConnectionState::Lost => AgentEnd::Silent { seconds },
            };
            self.actions.push(ControllerAction::KillAgent(id));
            self.handle_agent_gone(now, id, end);
        }
    }

    /// Returns whether a host may seem silent only because its messages are forwarded by the agent
    /// of another host, which is silent, too. The latter is then the lost one. The former has
    /// another lease to find another way.
    fn is_behind_silent_host(&self, now: Duration, id: HostIndex, lease: Duration) -> bool {
        self.hosts[id].inner_host.and_then(|inner| self.hosts.get(inner)).is_some_and(|inner| {
            inner.agent == AgentConnectionState::Joined && now > inner.last_heard + lease / 2
        })
    }

    /// Stores, for each of the given hosts, the other host whose agent now forwards its messages to
    /// the controller.
    pub(super) fn record_inner_hosts(&mut self, changes: Vec<(HostIndex, Option<HostIndex>)>) {
        for (id, inner_host) in changes {
            if let Some(host) = self.hosts.get_mut(id) {
                host.inner_host = inner_host.filter(|inner| *inner != id);
            }
        }
    }

    /// Restarts the time limits for silence of all hosts whose messages were forwarded by the agent
    /// of the host `lost`, which is lost.
    fn renew_leases_behind_host(&mut self, now: Duration, lost: HostIndex) {
        for host in self.hosts.iter_mut().filter(|host| host.inner_host == Some(lost)) {
            (host.inner_host, host.last_heard) = (None, now);
        }
    }

    /// Returns the host name that a machine has reported or, before the first message of its agent,
    /// the name in the job.
    pub(super) fn choose_hostname(&self, id: HostIndex) -> &str {
        match self.hosts[id].hostname.as_str() {
            "" if self.setup.hosts[id].name.is_empty() => "this machine",
            "" => &self.setup.hosts[id].name,
            hostname => hostname,
        }
    }

    /// Formats a host as `host NAME`, with its name in the job.
    pub(super) fn format_host_label(&self, id: HostIndex) -> String {
        format!("host {}", self.setup.hosts[id].name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::core::{
        ControllerInput,
        harness::{CoreHarness, create_setup},
    };
    use crate::{cluster::ArrivalLimits, controller::core::CoreSetup};

    #[test]
    fn a_node_that_is_lost_before_the_first_attempt_may_return() {
        let arrival =
            ArrivalLimits { max_returns: 1, quarantine: Duration::ZERO, ..ArrivalLimits::default() };
        let mut setup = CoreSetup { arrival, ..create_setup(2, true) };
        setup.hosts.iter_mut().for_each(|host| host.remote = true);
        let mut harness = CoreHarness::new_with_setup(setup, 1);
        harness.send_hello(1);
        let lose = |harness: &mut CoreHarness| {
            harness.feed_input(ControllerInput::AgentGone { host: 1, end: AgentEnd::ConnectionEnded(None) })
        };
        let actions = lose(&mut harness);
        assert!(actions.contains(&ControllerAction::StartAgent(1)), "{actions:?}");
        let is_end = |action: &ControllerAction| matches!(action, ControllerAction::End(_));
        assert!(!actions.iter().any(is_end));
        harness.send_hello(1);
        // The second loss exceeds the limit.
        let actions = lose(&mut harness);
        assert!(actions.iter().any(is_end), "{actions:?}");
    }
}
