//! Ends all agents and the processes through which they were started (such as `ssh`), and kills
//! processes that agents left on this machine.
use super::{ControllerDriver, SupervisedAgent};
use crate::{
    cluster::AgentHandle,
    controller::{
        core::{ControllerInput, HostIndex},
        root_cause::AgentEnd,
    },
    processes::{kill_descendants, lock_children, reap_children},
};
use diagnostic::Diagnostic;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// How long an agent may take to exit after its control connection has ended, before it is killed.
const AGENT_EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the controller waits until an agent on another host has closed its connection after a
/// request to end.
const AGENT_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a child process such as `ssh` may take to exit, first after the last agent's end and
/// once more after SIGTERM.
const TRANSPORT_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long [`ControllerDriver::sweep_processes`] waits until the processes that it has killed have
/// ended.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval between two searches for processes that an agent left running when it ended.
const SWEEP_INTERVAL: Duration = Duration::from_millis(2);

impl ControllerDriver {
    /// Waits for the end of an agent whose control connection has ended, kills processes that it
    /// left on this machine, and reports the end to the state machine. Kills an agent that has not
    /// ended after [`AGENT_EXIT_TIMEOUT`]. `error` states why the stream broke; `None` if the
    /// stream ended in order.
    pub(super) async fn handle_agent_end(&mut self, host: HostIndex, error: Option<Diagnostic>) {
        if let Some(agent) = self.agents.get_mut(&host) {
            agent.outbox = None;
        }
        let limit = self.clock.now() + AGENT_EXIT_TIMEOUT;
        while self.agents.get(&host).is_some_and(|a| a.find_unreaped_pid().is_some()) {
            self.reap_children();
            if self.clock.now() > limit {
                self.kill_agent(host);
            }
            sleep(SWEEP_INTERVAL).await;
        }
        self.sweep_processes().await;
        let ended = self.agents.get(&host).and_then(|a| a.ended);
        let connection = self.agents.get(&host).and_then(|a| match &a.handle {
            AgentHandle::Connection(connection) => Some(connection),
            AgentHandle::Child(_) => None,
        });
        let ended = ended.or_else(|| connection.and_then(|c| c.exit_status()));
        // The exit status of a relay is not that of the agent.
        let is_relay = self.agents.get(&host).is_some_and(|agent| agent.is_relay);
        let ended = ended.filter(|_| !is_relay);
        let end = match (connection.and_then(|c| c.failure()), error, ended) {
            (Some(failure), _, _) => AgentEnd::ConnectionLost(failure),
            (None, Some(error), _) => AgentEnd::StreamBroken(error),
            (None, None, ended) if connection.is_some() || is_relay => AgentEnd::ConnectionEnded(ended),
            (None, None, Some(status)) => AgentEnd::Exited(status),
            (None, None, None) => AgentEnd::NeverRan,
        };
        self.handle_input(ControllerInput::AgentGone { host, end });
    }

    /// Reaps all ended child processes: agents, processes such as `ssh`, and orphans that this
    /// process has inherited from ended agents. Returns whether any child is left.
    pub(super) fn reap_children(&mut self) -> bool {
        let (agents, transport) = (&mut self.agents, &mut self.transport);
        let _lock = lock_children();
        // Also ends what such a process has left, such as the proxy command of an ssh.
        let leaders = transport.children_with_killed_groups();
        reap_children(
            |pid| leaders.contains(&pid),
            |pid, status| match agents.values_mut().find(|a| a.find_unreaped_pid() == Some(pid)) {
                Some(agent) => agent.ended = Some(status),
                None => transport.record_child_exit(pid, status),
            },
        )
    }

    /// Kills the processes of this job on this machine whose agent has ended, and warns the user if
    /// this takes longer than [`SWEEP_TIMEOUT`]. Gives up after [`SWEEP_TIMEOUT`] and warns the
    /// user.
    pub(super) async fn sweep_processes(&mut self) {
        let limit = self.clock.now() + SWEEP_TIMEOUT;
        // One scan may miss a process that is forked during the scan.
        let mut empty_scans = 0;
        while self.reap_children() && empty_scans < 2 {
            let lock = lock_children();
            let running = self.agents.values().filter_map(SupervisedAgent::find_unreaped_pid);
            let kept = running.chain(self.preexisting_children.iter().copied());
            let kept: Vec<u32> = kept.chain(self.transport.child_processes()).collect();
            empty_scans = if kill_descendants(&kept).is_empty() { empty_scans + 1 } else { 0 };
            drop(lock);
            if self.clock.now() > limit {
                self.report.show_message(
                    "launch: some processes did not end after SIGKILL; they are blocked in the kernel".into(),
                );
                return;
            }
            sleep(SWEEP_INTERVAL).await;
        }
    }

    /// Kills the agent of a host, or closes the connection to an agent on another machine.
    pub(super) fn kill_agent(&mut self, host: HostIndex) {
        let Some(agent) = self.agents.get(&host) else { return };
        match &agent.handle {
            AgentHandle::Connection(connection) => connection.abort(),
            AgentHandle::Child(_) => {
                if let Some(pid) = agent.find_unreaped_pid() {
                    // The child was not reaped, so no other process can have its pid.
                    _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
                }
            }
        }
    }

    /// Closes the control connections of all agents, which makes the agents exit, and kills agents
    /// that have not exited after [`AGENT_EXIT_TIMEOUT`]. Then ends the child processes of the
    /// transport and kills every process of the job that is left on this machine. Agents get the
    /// exit code of the run.
    pub(super) async fn close_agents(&mut self, exit_code: u8) {
        (0..self.hosts.len()).for_each(|host| self.release_agent(host, Some(exit_code)));
        let limit = self.clock.now() + AGENT_EXIT_TIMEOUT;
        while self.reap_children() && self.agents.values().any(|a| a.find_unreaped_pid().is_some()) {
            if self.clock.now() > limit {
                (0..self.hosts.len()).for_each(|host| self.kill_agent(host));
            }
            self.receive_end_of_agent().await;
        }
        self.wait_for_released_agents().await;
        self.end_transport_processes().await;
        self.sweep_processes().await;
    }

    /// Waits until the agents on other hosts that were asked to end have closed their connections,
    /// but not longer than [`AGENT_RELEASE_TIMEOUT`]. An agent whose run outlives its controller
    /// would continue without the request.
    pub(super) async fn wait_for_released_agents(&mut self) {
        let limit = self.clock.now() + AGENT_RELEASE_TIMEOUT;
        while !self.released.is_empty() && self.clock.now() <= limit {
            self.receive_end_of_agent().await;
        }
    }

    /// Waits briefly for a message from any agent, and records the end of an agent's connection if
    /// that is the message. Ignores other messages.
    async fn receive_end_of_agent(&mut self) {
        if let Ok(Some((agent, Ok(None) | Err(_)))) = timeout(SWEEP_INTERVAL, self.messages.1.recv()).await {
            self.released.remove(&agent);
        }
    }

    /// Waits for the end of the child processes through which the agents were reached, such as
    /// `ssh`. They end after the last agent. Sends SIGTERM, and later SIGKILL, to each of them that
    /// does not end in time.
    pub(super) async fn end_transport_processes(&mut self) {
        let limit = self.clock.now() + TRANSPORT_EXIT_TIMEOUT;
        while self.reap_children() && !self.transport.child_processes().is_empty() {
            let now = self.clock.now();
            if now > limit {
                let signal =
                    if now > limit + TRANSPORT_EXIT_TIMEOUT { Signal::SIGKILL } else { Signal::SIGTERM };
                for pid in self.transport.child_processes() {
                    // The child was not reaped, so no other process can have its pid.
                    _ = kill(Pid::from_raw(pid as i32), signal);
                }
            }
            while let Ok(line) = self.lines.1.try_recv() {
                self.report.show_message(line);
            }
            self.receive_end_of_agent().await;
        }
    }
}
