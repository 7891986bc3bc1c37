//! Applies changes of the job's list of hosts (hostfile) while the job runs. An added host becomes
//! a spare host. A host that is no longer listed is released as soon as the other hosts are enough
//! for the job.
use super::{
    AttemptState, ControllerAction, ControllerCore, HostIndex, HostSetup, host_state::AgentConnectionState,
    host_state::HostState,
};
use diagnostic::quantity::format_count;
use std::time::Duration;

impl ControllerCore {
    /// Applies a changed hostfile while the job runs, by starting agents on added hosts and
    /// releasing hosts that were removed from the file. `added` are the new hosts. `listed` states
    /// for each known host whether the new list contains it.
    pub(super) fn update_host_list(&mut self, now: Duration, added: Vec<HostSetup>, listed: &[bool]) {
        for (id, listed) in (0..self.hosts.len()).zip(listed) {
            let host = &mut self.hosts[id];
            match (host.unlisted, *listed) {
                (false, false) => (host.unlisted, host.use_reported) = (true, false),
                (true, true) => self.readmit_host(now, id),
                (false, true) | (true, false) => {}
            }
        }
        for setup in added {
            self.any_remote |= setup.remote;
            self.setup.hosts.push(setup);
            self.hosts.push(HostState::default());
            self.start_agent_of_listed_host(now, self.hosts.len() - 1);
        }
        self.unlisted = self.hosts.iter().filter(|host| host.unlisted && !host.excluded).count();
        if self.setup.use_all_listed {
            let listed = self.hosts.iter().filter(|host| !host.unlisted).count();
            self.setup.use_hosts = listed.max(self.setup.min_hosts);
        }
        if self.state == AttemptState::Joining {
            self.restart_host_scan();
        }
        self.release_unlisted_hosts(now);
        self.try_prepare_attempt(now);
    }

    /// Allows the use of a host that was released before, because the hostfile lists it again, for
    /// example after a repair. Forgets the failures of the host, and starts its agent if the agent
    /// was released.
    fn readmit_host(&mut self, now: Duration, id: HostIndex) {
        let host = &mut self.hosts[id];
        (host.unlisted, host.excluded, host.failures) = (false, false, 0);
        if host.agent == AgentConnectionState::NotStarted {
            self.start_agent_of_listed_host(now, id);
        }
    }

    /// Starts the agent of a host that was added to the hostfile while the job runs. Does nothing
    /// if the attempt is ending, because the next attempt then starts the agent.
    fn start_agent_of_listed_host(&mut self, now: Duration, id: HostIndex) {
        let ending =
            matches!(self.state, AttemptState::Stopping(_) | AttemptState::Ending | AttemptState::Finished);
        if !ending {
            self.start_agent(now, id);
        }
    }

    /// Releases hosts that the hostfile no longer lists, the last ones first, as long as at least
    /// `run.min_hosts` usable hosts remain. Hosts with workers are drained first; the drain begins
    /// only when all workers of the attempt have started. Reports each unlisted host that must stay
    /// in use.
    pub(super) fn release_unlisted_hosts(&mut self, now: Duration) {
        if self.unlisted == 0 {
            return;
        }
        // While hosts are joining, a started agent may still join. Later only joined hosts count.
        let joining = self.state == AttemptState::Joining;
        let is_usable = |host: &HostState| {
            !host.excluded
                && (host.agent == AgentConnectionState::Joined
                    || joining && host.agent == AgentConnectionState::Starting)
        };
        let usable = self.hosts.iter().filter(|host| is_usable(host)).count();
        let mut surplus = usable.saturating_sub(self.setup.min_hosts);
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        for id in (0..self.hosts.len()).rev() {
            let host = &self.hosts[id];
            if !host.unlisted || host.excluded {
                continue;
            }
            match (is_usable(host), surplus) {
                (true, 0) => self.report_unlisted_hosts_in_use(id),
                (counts, _) => {
                    surplus -= usize::from(counts);
                    if host.active { busy.push(id) } else { idle.push(id) }
                }
            }
        }
        let releases_member =
            self.state == AttemptState::Preparing && idle.iter().any(|id| self.members.contains(id));
        idle.into_iter().for_each(|id| self.release_host(id));
        if releases_member {
            // Another attempt number invalidates the plan that is being prepared.
            (self.state, self.phase_deadline) = (AttemptState::Joining, None);
            self.attempt += 1;
        }
        if self.state == AttemptState::Joining {
            self.restart_host_scan();
            self.try_prepare_attempt(now);
        }
        // A request to stop that is sent before all workers run might miss some of them.
        let is_running = self.state == AttemptState::Running && self.suspect.is_none();
        if is_running && !busy.is_empty() && self.workers.iter().all(|w| w.pid.is_some()) {
            self.drain_hosts(now, &busy);
        }
    }

    /// Reports to the user, once for each host, that a host stays in use although the hostfile no
    /// longer lists it.
    fn report_unlisted_hosts_in_use(&mut self, id: HostIndex) {
        if !std::mem::replace(&mut self.hosts[id].use_reported, true) {
            let label = self.format_host_label(id);
            let needed = format_count(self.setup.min_hosts, "host");
            self.emit_notice(format!(
                "{label} is no longer listed but stays in use: the job needs {needed} (`run.min_hosts`) \
                 and no other is available"
            ));
        }
    }

    /// Excludes a host on which no process of the job runs from the rest of the run, and makes its
    /// agent end.
    fn release_host(&mut self, id: HostIndex) {
        self.unlisted -= 1;
        let host = &mut self.hosts[id];
        host.excluded = true;
        if host.is_starting_or_joined() {
            host.agent = AgentConnectionState::NotStarted;
            self.actions.push(ControllerAction::ReleaseAgent(id));
        }
        let label = self.format_host_label(id);
        self.emit_notice(format!("{label} is no longer listed: the run continues without it"));
    }

    /// Makes all workers save a checkpoint and stop, so that they are restarted without the hosts
    /// `leaving`, which the hostfile no longer lists.
    fn drain_hosts(&mut self, now: Duration, leaving: &[HostIndex]) {
        self.state = AttemptState::Draining { host_lost: false };
        self.send_stop_to_workers(now);
        let names: Vec<&str> = leaving.iter().rev().map(|id| self.setup.hosts[*id].name.as_str()).collect();
        let hosts = if names.len() == 1 { "host" } else { "hosts" };
        let subject = format!("draining {hosts} {}, no longer listed", names.join(", "));
        self.emit_notice(if self.setup.builtin {
            format!("{subject}: workers save at the next step boundary and restart on the other hosts")
        } else {
            let (sent, following) = self.setup.describe_program_stop();
            format!("{subject}: sent {sent} to the workers ({following}); they restart on the other hosts")
        });
    }

    /// Ends the workers of all hosts after a host was lost that the hostfile no longer lists, while
    /// its workers were saving and stopping. Kills the other workers, which cannot finish the step.
    pub(super) fn handle_lost_draining_host(&mut self, now: Duration, message: &str) {
        self.emit_notice(format!("{message}; it is no longer listed, and the run continues without it"));
        if self.state == (AttemptState::Draining { host_lost: false }) {
            self.state = AttemptState::Draining { host_lost: true };
            let grace = if self.setup.builtin { super::ABORT_GRACE } else { self.setup.grace };
            self.kill_workers(now, message, grace, false);
        }
    }
}
