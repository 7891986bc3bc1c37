//! Selects the hosts of the next attempt (start of all workers) among those whose agents have
//! joined.
use super::{
    AttemptState, ControllerAction, ControllerCore, FailureReason, MAX_HOST_FAILURES, RootCause,
    host_state::{AgentConnectionState, HostIndex, HostState},
};
use diagnostic::quantity::format_count;
use protocol::exit;
use std::time::Duration;

impl ControllerCore {
    /// Begins to plan the next start of all workers once enough hosts have joined, or once no other
    /// host can still join. In the second case, fails the attempt if fewer hosts have joined than
    /// `run.min_hosts` requires. Does nothing while hosts may still join, or if the core does not
    /// wait for agents.
    ///
    /// Each call continues at the host at which the previous call stopped. So the cost of joining
    /// is constant per host.
    pub(super) fn try_prepare_attempt(&mut self, now: Duration) {
        if self.state != AttemptState::Joining {
            return;
        }
        while self.scanned < self.hosts.len() && self.scanned_joined < self.setup.use_hosts {
            let host = &self.hosts[self.host_at_selection_position(self.scanned)];
            match host.agent {
                AgentConnectionState::Starting => return,
                AgentConnectionState::Joined if !host.excluded => self.scanned_joined += 1,
                AgentConnectionState::Joined
                | AgentConnectionState::NotStarted
                | AgentConnectionState::Lost => {}
            }
            self.scanned += 1;
        }
        if self.scanned_joined < self.setup.min_hosts {
            return self.fail_with_too_few_hosts(now);
        }
        let joined = |id: &HostIndex| {
            self.hosts[*id].agent == AgentConnectionState::Joined && !self.hosts[*id].excluded
        };
        let scanned = (0..self.scanned).map(|position| self.host_at_selection_position(position));
        self.members = scanned.filter(joined).collect();
        // Ranks follow the order of the list of hosts.
        self.members.sort_unstable();
        self.state = AttemptState::Preparing;
        // Preparing a checkpoint that programs resume from may take long.
        (self.phase_deadline, self.planned) = (None, None);
        self.actions.push(ControllerAction::Prepare {
            attempt: self.attempt,
            restarts: self.history.used,
            hosts: self.members.clone(),
            resume: self.checkpoint.clone(),
        });
    }

    /// Restarts the selection of hosts for the next start of all workers, so that hosts with memory
    /// copies of the training state are considered first.
    ///
    /// Hosts whose agents keep copies of the training state in memory come first, because without
    /// them the run would repeat steps. Hosts that are being reached again in the background come
    /// last, because no attempt waits for them if the others are enough.
    pub(super) fn restart_host_scan(&mut self) {
        (self.scanned, self.scanned_joined) = (0, 0);
        self.selection_order.clear();
        let is_special = |host: &HostState| host.keeps_copies || host.is_returning;
        if self.hosts.iter().any(is_special) {
            self.selection_order.extend(0..self.hosts.len());
            let hosts = &self.hosts;
            self.selection_order.sort_by_key(|id| (hosts[*id].is_returning, !hosts[*id].keeps_copies));
        }
    }

    /// Returns the index of the host that the selection of hosts for the next start of all workers
    /// considers at the position `position`.
    fn host_at_selection_position(&self, position: usize) -> HostIndex {
        self.selection_order.get(position).copied().unwrap_or(position)
    }

    /// Fails the planned start of the workers (attempt) because fewer hosts have joined than
    /// `run.min_hosts` requires.
    fn fail_with_too_few_hosts(&mut self, now: Duration) {
        let (available, required) = (self.scanned_joined as u64, self.setup.min_hosts as u64);
        let previous =
            self.last_failure.as_ref().map_or_else(String::new, |c| format!("; the last failure was: {c}"));
        let (hosts, verb) = (format_count(available, "host"), if available == 1 { "is" } else { "are" });
        let message = format!("{hosts} {verb} available, but `run.min_hosts` requires {required}{previous}");
        let host = (0..self.hosts.len())
            .find(|id| self.hosts[*id].agent != AgentConnectionState::Joined)
            .unwrap_or(0);
        let reason = FailureReason::TooFewHosts { available, required };
        self.fail_attempt(now, RootCause::new(host, reason, message).with_exit_code(exit::CLUSTER));
    }

    /// Begins another start of all workers (attempt): excludes faulty hosts, starts agents on
    /// unused hosts if hosts are missing, and selects the hosts to use. Excludes each host that
    /// made [`MAX_HOST_FAILURES`] attempts fail, if the other hosts are enough. If fewer hosts have
    /// joined than the job uses, starts the agents of the other hosts that are not excluded, except
    /// hosts in quarantine.
    pub(super) fn begin_next_attempt(&mut self, now: Duration) {
        self.state = AttemptState::Joining;
        self.exclude_failing_hosts();
        let is_usable = |host: &&HostState| host.agent == AgentConnectionState::Joined && !host.excluded;
        if self.hosts.iter().filter(is_usable).count() < self.setup.use_hosts {
            let absent = |id: &HostIndex| {
                let host = &self.hosts[*id];
                matches!(host.agent, AgentConnectionState::Lost | AgentConnectionState::NotStarted)
                    && !host.excluded
                    && now >= host.quarantined_until
            };
            for id in (0..self.hosts.len()).filter(absent).collect::<Vec<_>>() {
                self.start_agent(now, id);
            }
        }
        self.restart_host_scan();
        self.release_unlisted_hosts(now);
        self.try_prepare_attempt(now);
    }

    /// Excludes from the job each host that caused [`MAX_HOST_FAILURES`] failures of the workers,
    /// if the job has enough other hosts.
    fn exclude_failing_hosts(&mut self) {
        let failing = (0..self.hosts.len()).filter(|id| {
            let host = &self.hosts[*id];
            host.failures >= MAX_HOST_FAILURES && !host.excluded
        });
        for id in failing.collect::<Vec<_>>() {
            let others = (0..self.hosts.len()).filter(|o| *o != id && !self.hosts[*o].excluded);
            let usable = |o: &HostIndex| {
                self.hosts[*o].is_starting_or_joined() || self.hosts[*o].failures < MAX_HOST_FAILURES
            };
            if others.filter(usable).count() >= self.setup.min_hosts {
                self.hosts[id].excluded = true;
                let label = self.format_host_label(id);
                self.emit_notice(format!(
                    "{label} made {MAX_HOST_FAILURES} attempts fail; the run continues without it"
                ));
            }
        }
    }

    /// Counts a failure of the workers against the host `id` that has caused it, so that the host
    /// is excluded after several failures.
    ///
    /// With copies in memory, a restart takes a moment. A host then only counts as failing if its
    /// attempts bring no progress: `advanced` states whether the attempt has passed all steps of
    /// the earlier ones or completed a checkpoint.
    pub(super) fn count_host_failure(&mut self, id: HostIndex, advanced: bool) {
        if !(self.setup.has_memory_copies && advanced) {
            self.hosts[id].failures += 1;
            return;
        }
        for member in &self.members {
            self.hosts[*member].failures = 0;
        }
    }

    /// Returns the earliest time of the next start of all workers, which is delayed by `pause` or
    /// until enough lost hosts may be used again.
    pub(super) fn compute_next_attempt_time(&self, now: Duration, pause: Duration) -> Duration {
        let is_usable = |host: &&HostState| host.agent == AgentConnectionState::Joined && !host.excluded;
        let usable = self.hosts.iter().filter(is_usable).count();
        let Some(last_missing) = self.setup.use_hosts.saturating_sub(usable).checked_sub(1) else {
            return now + pause;
        };
        let lost =
            self.hosts.iter().filter(|host| host.agent == AgentConnectionState::Lost && !host.excluded);
        let mut ends: Vec<Duration> = lost.map(|host| host.quarantined_until).collect();
        ends.sort_unstable();
        let quarantine = ends.get(last_missing).or(ends.last()).copied();
        (now + pause).max(quarantine.unwrap_or_default())
    }
}
