//! Starts agents on lost hosts again while the job runs, so that these hosts are available as spare
//! hosts.
use super::{
    AttemptState, ControllerCore,
    host_state::{AgentConnectionState, HostIndex},
};
use std::time::Duration;

/// The number of failed attempts to reach a lost host after which the pause between attempts is no
/// longer doubled.
const MAX_RETRY_PAUSE_DOUBLINGS: u32 = 5;
/// How long the controller defers an attempt to reach a lost host while the workers are not
/// running.
const RECONNECTION_DEFERRAL: Duration = Duration::from_secs(1);

impl ControllerCore {
    /// Schedules the next attempt to reach the lost host `id`: the first one at the end of the
    /// host's quarantine, and later ones after a pause that doubles with each failed attempt.
    pub(super) fn schedule_host_reconnection(&mut self, now: Duration, id: HostIndex) {
        if !self.setup.arrival.reconnects_while_running || !self.setup.hosts[id].remote {
            return;
        }
        let host = &mut self.hosts[id];
        let wait = self.setup.arrival.quarantine * (1 << host.failed_returns.min(MAX_RETRY_PAUSE_DOUBLINGS));
        host.return_at = if host.failed_returns == 0 { host.quarantined_until } else { now + wait };
        host.failed_returns = host.failed_returns.saturating_add(1);
        self.next_return = Some(self.next_return.map_or(host.return_at, |next| next.min(host.return_at)));
    }

    /// Starts an agent on each lost host whose pause before the next reconnection attempt has
    /// ended, unless the workers are not running. Defers this while the job does not run, because
    /// the selection of hosts for the next attempt then starts the agents that it needs.
    pub(super) fn reconnect_lost_hosts(&mut self, now: Duration) {
        if self.next_return.is_none_or(|at| now < at) {
            return;
        }
        if self.state != AttemptState::Running || self.killed {
            self.next_return = Some(now + RECONNECTION_DEFERRAL);
            return;
        }
        self.next_return = None;
        for id in 0..self.hosts.len() {
            let host = &self.hosts[id];
            if host.agent != AgentConnectionState::Lost || host.excluded || host.unlisted {
                continue;
            }
            let at = host.return_at.max(host.quarantined_until);
            if now >= at {
                self.start_agent(now, id);
                self.hosts[id].is_returning = true;
            } else {
                self.next_return = Some(self.next_return.map_or(at, |next| next.min(at)));
            }
        }
    }

    /// Informs the user that a lost host is available again, as a spare host, after a new agent has
    /// sent its first message.
    pub(super) fn record_host_return(&mut self, id: HostIndex) {
        let host = &mut self.hosts[id];
        host.failed_returns = 0;
        if std::mem::take(&mut host.is_returning) {
            let label = self.format_host_label(id);
            self.emit_notice(format!("{label} is available again, as a spare host"));
        }
    }

    /// Schedules the next attempt to reach a lost host after an attempt has failed because the new
    /// agent has ended. Returns `false` for other agents. The user already knows that the host is
    /// lost.
    pub(super) fn handle_failed_host_reconnection(&mut self, now: Duration, id: HostIndex) -> bool {
        if !std::mem::take(&mut self.hosts[id].is_returning) {
            return false;
        }
        self.hosts[id].agent = AgentConnectionState::Lost;
        self.schedule_host_reconnection(now, id);
        if self.state == AttemptState::Joining {
            self.restart_host_scan();
            self.try_prepare_attempt(now);
        }
        true
    }
}
