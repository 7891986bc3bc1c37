//! The end of agents and helpers, and the removal of every process that they leave.
use super::{Agent, Driver};
use crate::{
    agent::{self, descendants::kill_descendants},
    controller::{
        core::{HostIndex, Input},
        root_cause::AgentEnd,
    },
    transport::AgentHandle,
};
use diagnostic::Diagnostic;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// From the end of an agent's stream until its process is killed.
const AGENT_EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// From the end of the last agent until a helper process (such as `srun`) gets SIGTERM, and from
/// then until it gets SIGKILL.
const HELPER_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the controller waits for killed processes to end.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two scans for descendants.
const SWEEP_INTERVAL: Duration = Duration::from_millis(2);

impl Driver {
    /// The stream of an agent has ended: kills what is left of its host's processes on this
    /// machine, then informs the core.
    pub(super) async fn on_agent_ended(&mut self, host: HostIndex, error: Option<Diagnostic>) {
        if let Some(agent) = self.agents.get_mut(&host) {
            agent.outbox = None;
        }
        let limit = self.clock.now() + AGENT_EXIT_TIMEOUT;
        while self.agents.get(&host).is_some_and(|a| a.unreaped_child().is_some()) {
            self.reap();
            if self.clock.now() > limit {
                self.kill_agent(host);
            }
            sleep(SWEEP_INTERVAL).await;
        }
        self.sweep().await;
        let ended = self.agents.get(&host).and_then(|a| a.ended);
        let connection = self.agents.get(&host).and_then(|a| match &a.handle {
            AgentHandle::Connection(connection) => Some(connection),
            AgentHandle::Child(_) => None,
        });
        let ended = ended.or_else(|| connection.and_then(|c| c.exit_status()));
        let end = match (connection.and_then(|c| c.failure()), error, ended) {
            (Some(failure), _, _) => AgentEnd::ConnectionLost(failure),
            (None, Some(error), _) => AgentEnd::StreamBroken(error),
            (None, None, ended) if connection.is_some() => AgentEnd::ConnectionEnded(ended),
            (None, None, Some(status)) => AgentEnd::Exited(status),
            (None, None, None) => AgentEnd::NeverRan,
        };
        self.handle(Input::AgentGone { host, end });
    }

    /// Reaps children that have ended: agents, and orphans that were reparented when an agent died.
    /// Returns whether any child is left.
    pub(super) fn reap(&mut self) -> bool {
        let (agents, transport) = (&mut self.agents, &mut self.transport);
        agent::reap_children(
            |_| false,
            |pid, status| match agents.values_mut().find(|a| a.unreaped_child() == Some(pid)) {
                Some(agent) => agent.ended = Some(status),
                None => transport.on_child_exit(pid, status),
            },
        )
    }

    /// Kills every process of this job on this machine that no running agent supervises.
    pub(super) async fn sweep(&mut self) {
        let limit = self.clock.now() + SWEEP_TIMEOUT;
        // One scan may miss a process that is forked during the scan.
        let mut empty_scans = 0;
        while self.reap() && empty_scans < 2 {
            let running = self.agents.values().filter_map(Agent::unreaped_child);
            let kept = running.chain(self.preexisting_children.iter().copied());
            let kept: Vec<u32> = kept.chain(self.transport.helper_pids()).collect();
            empty_scans = if kill_descendants(&kept).is_empty() { empty_scans + 1 } else { 0 };
            if self.clock.now() > limit {
                self.report.message(
                    "launch: some processes did not end after SIGKILL; they are blocked in the kernel".into(),
                );
                return;
            }
            sleep(SWEEP_INTERVAL).await;
        }
    }

    pub(super) fn kill_agent(&mut self, host: HostIndex) {
        let Some(agent) = self.agents.get(&host) else { return };
        match &agent.handle {
            AgentHandle::Connection(connection) => connection.abort(),
            AgentHandle::Child(_) => {
                if let Some(pid) = agent.unreaped_child() {
                    // It was not reaped, so no other process can have the pid.
                    _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
                }
            }
        }
    }

    /// Closes the streams of all agents, which makes them exit, and kills what is left.
    pub(super) async fn close(&mut self) {
        self.agents.values_mut().for_each(|a| a.outbox = None);
        let limit = self.clock.now() + AGENT_EXIT_TIMEOUT;
        while self.reap() && self.agents.values().any(|a| a.unreaped_child().is_some()) {
            if self.clock.now() > limit {
                (0..self.hosts.len()).for_each(|host| self.kill_agent(host));
            }
            _ = timeout(SWEEP_INTERVAL, self.messages.1.recv()).await;
        }
        self.end_helpers().await;
        self.sweep().await;
    }

    /// Waits for helper processes, which end with the last agent, and ends those that do not.
    pub(super) async fn end_helpers(&mut self) {
        let limit = self.clock.now() + HELPER_EXIT_TIMEOUT;
        while self.reap() && !self.transport.helper_pids().is_empty() {
            let now = self.clock.now();
            if now > limit {
                let signal =
                    if now > limit + HELPER_EXIT_TIMEOUT { Signal::SIGKILL } else { Signal::SIGTERM };
                for pid in self.transport.helper_pids() {
                    // It was not reaped, so no other process can have the pid.
                    _ = kill(Pid::from_raw(pid as i32), signal);
                }
            }
            while let Ok(line) = self.lines.1.try_recv() {
                self.report.message(line);
            }
            _ = timeout(SWEEP_INTERVAL, self.messages.1.recv()).await;
        }
    }
}
